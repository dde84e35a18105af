"""ORT's torch C++ extensions, built once per installed torch version and cached per user.

ORT ships them as source. Each is one C++ file whose only purpose is to return the addresses of
functions, so the file is compiled against a small replacement of ``torch/torch.h``. This needs
neither pybind11 nor Python's headers, works for every Python version, and takes 10 s instead of the
40 s of the build that ORT documents. ortlab has extensions of its own beside them, which make
training faster or let more models train; ORTModule works without them.
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
COMPILER_FIX = "Install one (Debian, Ubuntu: sudo apt-get install g++), or set CXX to yours"
HEADERS_FIX = "Debian, Ubuntu: sudo apt-get install python3-dev"
CUDA_LIBRARIES = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
}
"""Libraries that ORT's CUDA provider links to, and their PyPI packages: the extra ``cuda``."""
_FLAGS = ("-std=c++20", "-fPIC", "-w")


@dataclass(frozen=True)
class Extension:
    """C++ extension that can be built.

    Attributes:
        name: Name of the extension.
        purpose: What it does, as a few words after its name.
        source: Path below ORT's torch_cpp_extensions folder, or an absolute path.
        headers: Headers that replace torch's umbrella headers.
        functions: Functions that return addresses.
        libraries: Torch's own libraries to link to; they are loaded together with torch.
        replace: Text to replace in the source.
        cuda: Whether the build needs CUDA's headers.
        python: Whether the build needs Python's headers.
        seconds: Approximate build time in seconds.
        flags: Flags of the compiler; with ``-march=native`` the library is for this processor only.
    """

    name: str
    purpose: str
    source: str
    headers: tuple[str, ...]
    functions: tuple[str, ...]
    libraries: tuple[str, ...]
    replace: Mapping[str, str]
    cuda: bool = False
    python: bool = False
    seconds: int = 10
    flags: tuple[str, ...] = ("-O2",)

    @property
    def title(self) -> str:
        """Name of the extension for users, with its owner."""
        owner = "ortlab's" if Path(self.source).is_absolute() else "ORT's"
        return f"{owner} {self.name.removeprefix('ortlab_')}"

    def code(self) -> str:
        """Return the C++ code to compile: the source and exported names for its functions."""
        text = (_ort_sources() / self.source).read_text(encoding="utf-8")
        for old, new in self.replace.items():
            assert old in text
            text = text.replace(old, new)
        exports = (f'extern "C" size_t ortlab_{f}() {{ return {f}(); }}\n' for f in self.functions)
        return text + "".join(exports)

    def stand_in(self) -> str:
        """Return the header that replaces torch's umbrella headers."""
        includes = "".join(f"#include <{header}>\n" for header in self.headers)
        # The bindings become a template that is never instantiated.
        bindings = "template <class Module> static void bindings(Module& variable)"
        return f"#pragma once\n{includes}#define PYBIND11_MODULE(name, variable) {bindings}\n"

    def path(self) -> Path:
        """Return the path of the built library, which need not exist."""
        flags = (*_FLAGS, *self.flags)
        what = "\0".join((_torch_version_file(), self.code(), self.stand_in(), *flags))
        if self.python:
            what += str(sysconfig.get_config_var("SOABI"))
        if "-march=native" in flags:
            what += processor()
        digest = hashlib.sha256(what.encode()).hexdigest()[:12]
        return cache_folder() / f"{self.name}-{torch_version()}-{platform.machine()}-{digest}.so"


# An operator may return its input or a view of it, as the gradients of `frac` and `addcdiv` do. ORT
# frees the input's memory after the node, also where it is itself a view, so that the output would
# be read after other nodes have overwritten it.
_OUTPUT = "tensor.is_contiguous() ? tensor : tensor.contiguous()"
_OUTPUT_OF_ITS_OWN = """[&] {
        for (const auto& argument : arguments)
          if (argument.isTensor() && argument.toTensor().defined() &&
              argument.toTensor().is_alias_of(tensor))
            return tensor.clone(at::MemoryFormat::Contiguous);
        return tensor.contiguous();
      }()"""
ATEN = Extension(
    name="aten_op_executor",
    purpose="torch's operators in ORT",
    source="cpu/aten_op_executor/aten_op_executor.cc",
    headers=("torch/version.h", "torch/csrc/jit/runtime/operator.h", "ATen/ScalarOps.h"),
    functions=("is_tensor_argument_address", "execute_aten_operator_address"),
    libraries=("torch_cpu", "c10"),
    replace={_OUTPUT: _OUTPUT_OF_ITS_OWN},
)
GPU_ALLOCATOR = Extension(
    name="torch_gpu_allocator",
    purpose="torch's GPU memory in ORT",
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
    purpose="autograd functions in ORT",
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
    purpose="the work on each parameter in a step",
    source=str(Path(__file__).with_name("native.cc")),
    headers=(),
    functions=("record_address", "layout_address", "edits_address", "versions_address"),
    libraries=("torch_python", "torch_cpu", "c10"),
    replace={},
    python=True,
    seconds=20,
)
"""Per-parameter work of each step, see `ortlab.engines.ortmodule.compat.native`."""
KERNELS = Extension(
    name="ortlab_kernels",
    purpose="faster kernels for the CPU",
    source=str(Path(__file__).parents[1] / "kernels" / "kernels.cc"),
    headers=(),
    functions=("trim_address",),
    libraries=("torch_cpu", "c10"),
    replace={},
    # Loops can be vectorized if errno and floating-point traps are ignored. The OpenMP runtime is
    # the one that torch has loaded.
    flags=("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"),
)
"""ortlab's own kernels, see `ortlab.engines.ortmodule.kernels`."""
OPTIONAL = (KERNELS, NATIVE, INTEROP)
"""Extensions that ORTModule can do without."""


@functools.cache
def processor() -> str:
    """Return the processor's name and features."""
    told = first_processor(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else "")
    said = [told[name] for name in ("model name", "flags", "Features") if name in told]
    return " ".join(said) or platform.processor()


def cache_folder() -> Path:
    """Return the user's folder for built extensions, below XDG_CACHE_HOME; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # XDG specification: relative paths must be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ortlab" / "extensions"


def compiler() -> list[str] | None:
    """Return the command of a C++ compiler: $CXX, else the first one on PATH; None without one."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        return asked if shutil.which(asked[0]) else None
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return None if found is None else [found]


def missing() -> list[Extension]:
    """Return the extensions of this machine that are not built. Imports nothing."""
    return [each for each in (ATEN, *_gpu(), *OPTIONAL) if not each.path().exists()]


def built() -> bool:
    """Return True if the extension that ORTModule requires is built. Imports nothing."""
    return ATEN.path().exists()


def build(on_progress: Progress | None = None, *, again: bool = False) -> dict[str, str]:
    """Build the extensions that are missing in the cache.

    Safe to call in several processes at once.

    Args:
        on_progress: Called with a line of text before and after each build.
        again: Also build optional extensions that the compiler has failed to build before.

    Returns:
        Why optional extensions could not be built, by title.

    Raises:
        OrtUnavailable: If a required extension cannot be built.
    """
    _build(ATEN, on_progress)
    failed = {}
    for extension in (*_gpu(), *OPTIONAL):
        if not again and (log := _log(extension)).exists():
            failed[extension.title] = f"the compiler has failed before: {log}"
            continue
        try:
            _build(extension, on_progress)
        except OrtUnavailable as error:
            failed[extension.title] = str(error)
    return failed


def load() -> dict[str, dict[str, int]]:
    """Load the extensions that ORTModule uses itself; `build` builds them.

    Imports torch, whose libraries the extensions use.

    Returns:
        The addresses: extension -> function -> address.

    Raises:
        OrtUnavailable: If the required extension cannot be built or loaded.
    """
    import torch  # noqa: F401 - loads the libraries that the extensions link to

    there = [each for each in _gpu() if each.path().exists()]
    return {each.name: _addresses(each) for each in (ATEN, *there)}


def load_interop() -> int:
    """Load the extension that runs torch.autograd.Functions in ORT.

    Returns:
        The address of its function.

    Raises:
        OrtUnavailable: If it is not built or cannot be loaded.
    """
    return _addresses(INTEROP)["runner"]


def load_native() -> dict[str, int]:
    """Load the extension that `compat.native` calls.

    Returns:
        The addresses of its functions, by name.

    Raises:
        OrtUnavailable: If it is not built or cannot be loaded.
    """
    import torch  # noqa: F401 - as for `load`

    return _addresses(NATIVE)


def load_kernels() -> Callable[[bool], int]:
    """Load ortlab's kernels, which registers them with torch.

    Returns:
        Their function ``trim``.

    Raises:
        OrtUnavailable: If they are not built or cannot be loaded.
    """
    import torch  # noqa: F401 - as for `load`

    addresses = _addresses(KERNELS)
    trim: Callable[[bool], int] = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_bool)(
        addresses["trim_address"]
    )
    return trim


def python_header() -> Path:
    """Return the path of Python.h, which need not exist."""
    return Path(sysconfig.get_path("include"), "Python.h")


def _addresses(extension: Extension) -> dict[str, int]:
    path = extension.path()
    if not path.exists():
        _compiler_for(extension)  # says what is missing
        raise OrtUnavailable(f"{extension.title} is not built", "Run ortlab doctor --build")
    _refuse_shared(path.parent)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OrtUnavailable(
            f"{extension.title} cannot be loaded: {error}", f"Remove {path} and try again"
        ) from error
    addresses = {}
    for name in extension.functions:
        function = getattr(library, f"ortlab_{name}")
        function.restype = ctypes.c_size_t
        addresses[name] = int(function())
    return addresses


def _build(extension: Extension, on_progress: Progress | None) -> None:
    tell = on_progress or (lambda _line: None)
    path = extension.path()
    if path.exists():
        _refuse_shared(path.parent)
        return
    command = _compiler_for(extension)
    _prepare(path.parent)
    with _locked(extension, tell):
        if not path.exists():
            tell(
                f"building {extension.title} ({extension.purpose}) for torch {torch_version()}, "
                f"once, in about {extension.seconds} s"
            )
            began = time.perf_counter()
            _compile(extension, command, path)
            tell(f"built {extension.title} in {time.perf_counter() - began:.0f} s")


def _compiler_for(extension: Extension) -> list[str]:
    """Return the command of the compiler; raise OrtUnavailable if something is missing."""
    command = compiler()
    if command is None:
        raise OrtUnavailable(
            f"{extension.title} must be built once, but no C++ compiler was found", COMPILER_FIX
        )
    if extension.python and not python_header().exists():
        raise OrtUnavailable(f"Python's header {python_header()} is missing", HEADERS_FIX)
    return command


def _prepare(folder: Path) -> None:
    """Create the cache folder, accessible only to its owner."""
    try:
        files.private(folder)
    except OSError as error:
        raise OrtUnavailable(
            f"cannot create the folder for ORT's torch extension: {error}",
            "Set XDG_CACHE_HOME to a folder of your own",
        ) from error
    _refuse_shared(folder)


def _refuse_shared(folder: Path) -> None:
    """Raise if other users can write to `folder`, because its files are loaded as code."""
    if files.others_write(folder):
        raise OrtUnavailable(
            f"other users can write to {folder}, so nothing is loaded from it",
            f"Run chmod 700 {folder}, or set XDG_CACHE_HOME to a folder of your own",
        )


@contextlib.contextmanager
def _locked(extension: Extension, tell: Progress) -> Iterator[None]:
    """Hold a file lock, which the kernel releases if its owner dies."""
    import fcntl  # not on Windows, where nothing is ever built

    with open(extension.path().with_suffix(".lock"), "w", opener=files.plain) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"another process is building {extension.title}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(extension: Extension, command: list[str], path: Path) -> None:
    """Compile to a temporary path and rename it, so that no reader sees a partial library."""
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
        # Two commands: with -fopenmp the linker would add a second OpenMP runtime to torch's.
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
    """Run a compiler command. Raise OrtUnavailable with its first error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    log = _log(extension)
    log.write_text(shlex.join(command) + "\n" + done.stderr, encoding="utf-8")
    first = re.search(r"(?:fatal )?error: .*", done.stderr)
    raise OrtUnavailable(
        f"building {extension.title} failed: "
        + (first.group() if first else f"{command[0]} exited with status {done.returncode}"),
        f"Full output of the compiler: {log}",
    )


def _gpu() -> tuple[Extension, ...]:
    """Return torch's GPU allocator if torch and this machine can use it."""
    gpu = _cuda_build() and Path("/proc/driver/nvidia/version").exists()
    return (GPU_ALLOCATOR,) if gpu else ()


def _log(extension: Extension) -> Path:
    """Return the path of the compiler's output after a failed build."""
    return extension.path().with_suffix(".log")


def torch_version() -> str:
    """Return the version of the installed torch without importing it, such as "2.13.0+cpu"."""
    found = re.search(r"^__version__ = '(.+)'", _torch_version_file(), re.MULTILINE)
    return found.group(1) if found else "unknown"


def rocm_version() -> str:
    """Return the ROCm version of the installed torch without importing it; "" for none."""
    found = re.search(r"^(?:hip|rocm)\b.* = '(.+)'", _torch_version_file(), re.MULTILINE)
    return found.group(1) if found else ""


def _cuda_build() -> bool:
    return re.search(r"^cuda: .* = '", _torch_version_file(), re.MULTILINE) is not None


def _torch_version_file() -> str:
    """Return torch/version.py: version, commit and CUDA version, all that a build depends on.

    It does not contain the C++ ABI: since 2.6, torch has only the new one.
    """
    return (_torch_folder() / "version.py").read_text(encoding="utf-8")


def _torch_folder() -> Path:
    return _package_folder("torch")


def _ort_sources() -> Path:
    folder = _package_folder("onnxruntime") / "training/ortmodule/torch_cpp_extensions"
    if not folder.exists():  # that of another distribution of onnxruntime
        raise OrtUnavailable("onnxruntime-training is not installed", "Use engine='ort'")
    return folder


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # does not import a top-level package
    if spec is None or spec.origin is None:
        raise OrtUnavailable(f"{name} is not installed", "Reinstall ortlab in Python 3.11")
    return Path(spec.origin).parent


def preload_cuda() -> list[str]:
    """Load the libraries that ORT's CUDA provider links to.

    The provider needs CUDA 11, whatever CUDA version torch has. NVIDIA's PyPI packages install the
    libraries where the dynamic loader does not search, but it uses a library that is already
    loaded.

    Returns:
        The names of the libraries that were not found.
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
    """Return folders that may contain cuda_runtime_api.h: CUDA's toolkit and NVIDIA's packages."""
    site = _torch_folder().parent
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    return [toolkit, *sorted(site.glob("nvidia/*/include"))]
