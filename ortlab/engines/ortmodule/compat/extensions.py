"""ORT's torch C++ extensions: built once for the torch that is installed, kept in a per-user cache.

ORT ships them as source. Each is one C++ file whose only business is to hand out the addresses of
functions, so the file is compiled unchanged against a small stand-in for ``torch/torch.h``: that
needs neither pybind11 nor Python's headers, works for every Python, and takes 10 s where the build
that ORT documents takes 40. The one for torch.autograd.Function is of our own, `interop.cc`: it
needs Python's headers, takes a second, and is built when such a function is first met.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ortlab.engines.ortmodule.compat.base import OrtUnavailable, Progress
from ortlab.utils import files
from ortlab.utils.processor import CPUINFO, first_processor

COMPILERS = ("c++", "g++", "clang++")
COMPILER_FIX = "Install one (Debian, Ubuntu: sudo apt-get install g++), or name yours in CXX"
HEADERS_FIX = "Debian, Ubuntu: sudo apt-get install python3-dev"
CUDA_LIBRARIES = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
}
"""What ORT's CUDA provider links to, and the PyPI package that has it: the extra ``cuda``."""
_FLAGS = ("-std=c++20", "-fPIC", "-w")


@dataclass(frozen=True)
class Extension:
    """One extension: `source` is a path below ORT's torch_cpp_extensions folder, or a whole one.

    `headers` is what stands in for torch's umbrella headers, `functions` the ones that give
    addresses, `libraries` those of torch's own that it links to; they are loaded with torch.
    `python` tells that it needs Python's headers, and `seconds` about how long it takes to build.
    `flags` are the compiler's; with ``-march=native`` the library is for this processor alone.
    """

    name: str
    source: str
    headers: tuple[str, ...]
    functions: tuple[str, ...]
    libraries: tuple[str, ...]
    replace: Mapping[str, str]
    cuda: bool = False
    python: bool = False
    seconds: int = 10
    flags: tuple[str, ...] = ("-O2",)

    def code(self) -> str:
        """The C++ text that is compiled: ORT's file and exported names for its functions."""
        text = (_ort_sources() / self.source).read_text(encoding="utf-8")
        for old, new in self.replace.items():
            text = text.replace(old, new)
        exports = (f'extern "C" size_t ortlab_{f}() {{ return {f}(); }}\n' for f in self.functions)
        return text + "".join(exports)

    def stand_in(self) -> str:
        """The text of the header that takes the place of torch's umbrella headers."""
        includes = "".join(f"#include <{header}>\n" for header in self.headers)
        # The bindings become a template that nothing instantiates.
        bindings = "template <class Module> static void bindings(Module& variable)"
        return f"#pragma once\n{includes}#define PYBIND11_MODULE(name, variable) {bindings}\n"

    def path(self) -> Path:
        """Where the built library lies, or would."""
        flags = (*_FLAGS, *self.flags)
        what = "\0".join((_torch_version_file(), self.code(), self.stand_in(), *flags))
        if self.python:
            what += str(sysconfig.get_config_var("SOABI"))
        if "-march=native" in flags:
            what += processor()
        digest = hashlib.sha256(what.encode()).hexdigest()[:12]
        return cache_folder() / f"{self.name}-{torch_version()}-{platform.machine()}-{digest}.so"


ATEN = Extension(
    name="aten_op_executor",
    source="cpu/aten_op_executor/aten_op_executor.cc",
    headers=("torch/version.h", "torch/csrc/jit/runtime/operator.h", "ATen/ScalarOps.h"),
    functions=("is_tensor_argument_address", "execute_aten_operator_address"),
    libraries=("torch_cpu", "c10"),
    replace={},
)
GPU_ALLOCATOR = Extension(
    name="torch_gpu_allocator",
    source="cuda/torch_gpu_allocator/torch_gpu_allocator.cc",
    headers=(),
    functions=(
        "gpu_caching_allocator_raw_alloc_address",
        "gpu_caching_allocator_raw_delete_address",
        "gpu_caching_allocator_empty_cache_address",
    ),
    libraries=("c10_cuda", "c10"),
    replace={
        "___gpu_identifier___": "cuda",
        "___gpu_allocator_header___": "CUDACachingAllocator",
    },
    cuda=True,
)


INTEROP = Extension(
    name="torch_interop_utils",
    source=str(Path(__file__).with_name("interop.cc")),
    headers=(),
    functions=("runner",),
    libraries=(),
    replace={},
    python=True,
    seconds=1,
)
NATIVE = Extension(
    name="ortlab_native",
    source=str(Path(__file__).with_name("native.cc")),
    headers=(),
    functions=("record_address", "layout_address", "edits_address", "versions_address"),
    libraries=("torch_python", "torch_cpu", "c10"),
    replace={},
    python=True,
    seconds=20,
)
"""What each step does once for every parameter, see `ortlab.engines.ortmodule.compat.native`."""
KERNELS = Extension(
    name="ortlab_kernels",
    source=str(Path(__file__).parents[1] / "kernels" / "kernels.cc"),
    headers=(),
    functions=("trim_address",),
    libraries=("torch_cpu", "c10"),
    replace={},
    # Loops become vector instructions where errno and signals need not be minded. OpenMP's runtime
    # is the one that torch has loaded.
    flags=("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
)
"""ortlab's own kernels, see `ortlab.engines.ortmodule.kernels`."""


@functools.cache
def processor() -> str:
    """The processor's name and what it can do."""
    told = first_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")
    said = [told[name] for name in ("model name", "flags", "Features") if name in told]
    return " ".join(said) or platform.processor()


def cache_folder() -> Path:
    """The user's folder for built extensions; honours XDG_CACHE_HOME. It need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ortlab" / "extensions"


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, else the first one on PATH; None when there is none."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return None if found is None else [found]


def wanted() -> tuple[Extension, ...]:
    """The extensions that the installed torch can use on this machine."""
    gpu = _cuda_build() and Path("/proc/driver/nvidia/version").exists()
    return (ATEN, GPU_ALLOCATOR) if gpu else (ATEN,)


def built() -> bool:
    """Whether what ORTModule cannot do without is built; imports nothing."""
    return ATEN.path().exists()


def build(on_progress: Progress | None = None) -> list[Path]:
    """Builds what is missing in the cache and returns where the libraries lie.

    Safe while other processes do the same. Raises OrtUnavailable when it cannot be done; torch's
    GPU allocator is an extra, which is left out where it once failed, for want of CUDA's headers.
    """
    paths = [_build(ATEN, on_progress)]
    if GPU_ALLOCATOR in wanted() and not _log(GPU_ALLOCATOR).exists():
        with contextlib.suppress(OrtUnavailable):
            paths.append(_build(GPU_ALLOCATOR, on_progress))
    return paths


def load(on_progress: Progress | None = None) -> dict[str, dict[str, int]]:
    """Builds what is missing, loads it, returns addresses: extension -> function -> address.

    Imports torch, whose libraries the extensions use.
    """
    import torch  # noqa: F401 - the libraries that the extensions link to come with it

    loaded = {}
    for extension, path in zip(wanted(), build(on_progress), strict=False):
        loaded[extension.name] = _addresses(extension, path)
    return loaded


def load_interop(on_progress: Progress | None = None) -> int:
    """Builds and loads what runs torch.autograd.Functions in ORT; the address of its function.

    Raises OrtUnavailable where it cannot be built.
    """
    return _addresses(INTEROP, _build(INTEROP, on_progress))["runner"]


def load_native(on_progress: Progress | None = None) -> dict[str, int]:
    """Builds and loads what `compat.native` calls; the addresses of its functions.

    Raises OrtUnavailable where it cannot be built.
    """
    import torch  # noqa: F401 - as for `load`

    return _addresses(NATIVE, _build(NATIVE, on_progress))


def load_kernels(on_progress: Progress | None = None) -> Callable[[bool], int]:
    """Builds and loads ortlab's kernels, which torch then knows by name; their `trim`.

    Raises OrtUnavailable where that cannot be done.
    """
    import torch  # noqa: F401 - as for `load`

    addresses = _addresses(KERNELS, _build(KERNELS, on_progress))
    trim: Callable[[bool], int] = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_bool)(
        addresses["trim_address"]
    )
    return trim


def python_header() -> Path:
    """Where Python.h lies, or would."""
    return Path(sysconfig.get_path("include"), "Python.h")


def _addresses(extension: Extension, path: Path) -> dict[str, int]:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OrtUnavailable(
            f"ORT's torch extension does not load: {error}", f"Remove {path} and try again"
        ) from error
    addresses = {}
    for name in extension.functions:
        function = getattr(library, f"ortlab_{name}")
        function.restype = ctypes.c_size_t
        addresses[name] = int(function())
    return addresses


def _build(extension: Extension, on_progress: Progress | None) -> Path:
    tell = on_progress or (lambda _line: None)
    path = extension.path()
    if path.exists():
        _refuse_shared(path.parent)
        return path
    command = compiler()
    if command is None:
        raise OrtUnavailable(
            "ORT's torch extension has to be built once and there is no C++ compiler", COMPILER_FIX
        )
    if extension.python and not python_header().exists():
        raise OrtUnavailable(f"Python's header {python_header()} is missing", HEADERS_FIX)
    _prepare(path.parent)
    with _locked(path.with_suffix(".lock"), tell):
        if not path.exists():
            tell(
                f"building ORT's {extension.name} for torch {torch_version()}: once, about "
                f"{extension.seconds} s"
            )
            began = time.perf_counter()
            _compile(extension, command, path)
            tell(f"built {extension.name} in {time.perf_counter() - began:.0f} s")
    return path


def _prepare(folder: Path) -> None:
    """Makes the cache folder, its owner's alone."""
    try:
        files.private(folder)
    except OSError as error:
        raise OrtUnavailable(
            f"no folder for ORT's torch extension: {error}", "Set XDG_CACHE_HOME to one of yours"
        ) from error
    _refuse_shared(folder)


def _refuse_shared(folder: Path) -> None:
    """What lies in `folder` is loaded as code: nobody else may have put it there."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OrtUnavailable(
            f"others can write to {folder}, so nothing is loaded from it",
            f"chmod 700 {folder}, or set XDG_CACHE_HOME to a folder of your own",
        )


@contextlib.contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Holds a lock file that the kernel frees when its owner dies."""
    import fcntl  # not on Windows, where nothing is ever built

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is building ORT's torch extension: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(extension: Extension, command: list[str], path: Path) -> None:
    """Compiles beside the final name and renames, so that no reader sees half a library."""
    torch = _torch_folder()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        stand_ins = Path(folder, "torch")
        stand_ins.mkdir()
        for umbrella in ("torch.h", "extension.h"):
            (stand_ins / umbrella).write_text(extension.stand_in(), encoding="utf-8")
        source, library = Path(folder, f"{extension.name}.cc"), Path(folder, path.name)
        source.write_text(extension.code(), encoding="utf-8")
        headers = [folder, torch / "include", torch / "include/torch/csrc/api/include"]
        if extension.cuda:
            headers += _cuda_headers()
        if extension.python:
            headers.append(python_header().parent)
        compiled = Path(folder, f"{extension.name}.o")
        # Apart, for the linker would add an OpenMP runtime to torch's.
        for arguments in (
            [*_FLAGS, *extension.flags, *(f"-I{header}" for header in headers), "-c", str(source),
             "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(library), f"-L{torch / 'lib'}",
             *(f"-l{name}" for name in extension.libraries)],
        ):  # fmt: skip
            _call(extension, [*command, *arguments])
        library.chmod(0o600)
        os.replace(library, path)


def _call(extension: Extension, command: list[str]) -> None:
    """Runs a compiler's command. OrtUnavailable tells its first error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    log = _log(extension)
    log.write_text(shlex.join(command) + "\n" + done.stderr, encoding="utf-8")
    first = re.search(r"(?:fatal )?error: .*", done.stderr)
    raise OrtUnavailable(
        f"building ORT's {extension.name} failed: "
        + (first.group() if first else f"{command[0]} ended with {done.returncode}"),
        f"The compiler's whole output: {log}",
    )


def _log(extension: Extension) -> Path:
    """What the compiler said when it failed."""
    return extension.path().with_suffix(".log")


def torch_version() -> str:
    """The installed torch's version, read without importing it: "2.13.0+cpu"."""
    found = re.search(r"^__version__ = '(.+)'", _torch_version_file(), re.MULTILINE)
    return found.group(1) if found else "unknown"


def rocm_version() -> str:
    """The ROCm that the installed torch is built for, read without importing it; "" for none."""
    found = re.search(r"^(?:hip|rocm)\b.* = '(.+)'", _torch_version_file(), re.MULTILINE)
    return found.group(1) if found else ""


def _cuda_build() -> bool:
    return re.search(r"^cuda: .* = '", _torch_version_file(), re.MULTILINE) is not None


def _torch_version_file() -> str:
    """torch/version.py: version, commit and CUDA version, all that a build depends on.

    The C++ ABI is no part of it: since 2.6 torch has only the new one.
    """
    return (_torch_folder() / "version.py").read_text(encoding="utf-8")


def _torch_folder() -> Path:
    return _package_folder("torch")


def _ort_sources() -> Path:
    return _package_folder("onnxruntime") / "training/ortmodule/torch_cpp_extensions"


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # a top-level name: found without importing it
    if spec is None or spec.origin is None:
        raise OrtUnavailable(f"{name} is not installed", "Install ortlab again in Python 3.11")
    return Path(spec.origin).parent


def preload_cuda() -> list[str]:
    """Loads what ORT's CUDA provider links to; returns the names of what is nowhere to be found.

    It asks for CUDA 11, whatever CUDA torch has. NVIDIA's packages on PyPI keep the libraries where
    the loader does not look; one that is loaded already, it takes.
    """
    missing = []
    for name in CUDA_LIBRARIES:
        here = sorted(_torch_folder().parent.glob(f"nvidia/*/lib/{name}"))
        try:
            ctypes.CDLL(str(here[0]) if here else name)
        except OSError:
            missing.append(name)
    return missing


def _cuda_headers() -> list[Path]:
    """Where cuda_runtime_api.h may lie: the CUDA toolkit, or NVIDIA's packages beside torch."""
    site = _torch_folder().parent
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    return [toolkit, *sorted(site.glob("nvidia/*/include"))]
