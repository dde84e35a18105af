"""Checks of ORTModule's requirements on this machine, reported as findings.

Every check runs on every platform and Python version, with or without torch and ORT. The checks
that determine whether ORTModule can run import only the standard library.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

from ortlab.engines import runtimes
from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import MAX_IR, MAX_OPSET, OrtUnavailable
from ortlab.utils.findings import Finding, import_or_none, package_version, version_numbers

ORT_VERSION = "1.19.2"
ORT_PYTHON = (3, 11)
TORCH_RANGE = ((2, 9), (2, 15))
OTHER_ENGINES = "engine='ort' trains in onnxruntime on any Python"


def obstacle() -> Finding | None:
    """Return the first finding that prevents ORTModule from running; None if it can run. Cheap."""
    return next((f for f in (check() for check in ESSENTIALS) if f.ok is False), None)


# ---- requirements of ORTModule: cheap ------------------------------------------------------------


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] == ORT_PYTHON:
        return Finding("Python", True, version, required=True)
    return Finding(
        "Python",
        False,
        f"Python {version}, but onnxruntime-training {ORT_VERSION} has wheels up to Python 3.11",
        f"Create an environment with Python 3.11; {OTHER_ENGINES}",
        required=True,
    )


def _platform() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("platform", True, found, required=True)
    return Finding(
        "platform",
        False,
        f"{found}, but onnxruntime-training {ORT_VERSION} has wheels for Linux x86-64 only",
        f"Use Linux x86-64 (WSL or a container works); {OTHER_ENGINES}",
        required=True,
    )


def _torch() -> Finding:
    version = package_version("torch")
    low, high = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    beyond = f"{TORCH_RANGE[1][0]}.{TORCH_RANGE[1][1] + 1}"
    fix = f'pip install "torch>={low},<{beyond}"'
    if version is None:
        return Finding("torch", False, "torch is not installed", fix, required=True)
    if TORCH_RANGE[0] <= version_numbers(version) <= TORCH_RANGE[1]:
        return Finding("torch", True, version, required=True)
    found = f"torch {version} is not in {low} to {high}, the versions with the required exporter"
    return Finding("torch", False, found, fix, required=True)


def _rocm() -> Finding:
    name = "torch's build"
    try:
        rocm = extensions.rocm_version()
    except OrtUnavailable:  # torch is missing, which another check reports
        return Finding(name, None, "needs torch", required=True)
    if not rocm:
        return Finding(name, True, "not for ROCm", required=True)
    return Finding(
        name,
        False,
        f"torch is built for ROCm {rocm}, but PyPI has no wheel of onnxruntime-training for ROCm",
        f"Install torch for the CPU or for CUDA; {OTHER_ENGINES}",
        required=True,
    )


def _ort() -> Finding:
    version = package_version(runtimes.TRAINING)
    if version is not None and version.split("+")[0] == ORT_VERSION:
        return Finding(runtimes.TRAINING, True, version, required=True)
    if version is None and not (_python().ok and _platform().ok):
        # Installing it would fail; those findings say what to do.
        return Finding(runtimes.TRAINING, None, "has no wheel for this Python and platform")
    found = (
        "onnxruntime-training is not installed"
        if version is None
        else f"onnxruntime-training {version}, but ortlab's patches are for {ORT_VERSION}"
    )
    fix = f"pip install {runtimes.TRAINING}=={ORT_VERSION}"
    if others := [name for name in runtimes.installed() if name != runtimes.TRAINING]:
        fix = f"pip uninstall -y {' '.join(others)} && {fix}"
    return Finding(runtimes.TRAINING, False, found, fix, required=True)


def _onnx() -> Finding:
    version = package_version("onnx")
    if version is not None:
        return Finding("onnx", True, version, required=True)
    return Finding("onnx", False, "onnx is not installed", 'pip install "onnx>=1.18"', True)


def _ortmodule() -> Finding:
    """Return the obstacle to ORTModule, which the other engines do without."""
    found = obstacle()
    assert found is not None, "onnxruntime-training is not installed"
    return Finding("engine ortmodule", None, f"not here: {found.found}", found.fix)


def _any_python() -> Finding:
    return Finding("Python", True, platform.python_version())


def _extension() -> Finding:
    name = "torch extension"
    try:
        built = extensions.built()
    except OrtUnavailable:  # torch or ORT is missing, which another check reports
        return Finding(name, None, "needs torch and onnxruntime-training", required=True)
    if built:
        return Finding(name, True, f"built: {extensions.ATEN.path()}", required=True)
    found = f"not built yet for torch {extensions.torch_version()}"
    if extensions.compiler() is None:
        missing = f"{found}, and no C++ compiler was found"
        return Finding(name, False, missing, extensions.COMPILER_FIX, required=True)
    fix = "Built at first use in about 10 s; to build it now: ortlab doctor --build"
    return Finding(name, None, found, fix, required=True)


def _optional_extensions() -> Finding:
    name = "other extensions"
    try:
        missing = [each for each in extensions.missing() if each is not extensions.ATEN]
    except OrtUnavailable:
        return Finding(name, None, "need torch and onnxruntime-training")
    if not missing:
        return Finding(name, True, "built")
    found = ", ".join(f"{each.title} ({each.purpose})" for each in missing)
    seconds = sum(each.seconds for each in missing)
    fix = f"Built at first use in about {seconds} s; to build now: ortlab doctor --build"
    return Finding(name, None, f"not built yet: {found}", fix)


# ---- further checks ------------------------------------------------------------------------------


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
        f"{header} is missing: engine='compile' needs it, and 'ortmodule' for "
        "torch.autograd.Functions",
        extensions.HEADERS_FIX,
    )


def cuda_provider() -> Finding:
    """Check for the CUDA libraries that ORT needs, and load them."""
    name, torch = "ORT's CUDA provider", import_or_none("torch")
    if torch is None or not torch.cuda.is_available() or torch.version.hip:
        return Finding(name, None, "not needed: training runs on the CPU")
    missing = extensions.preload_cuda()
    if not missing:
        return Finding(name, True, "all its libraries are installed")
    named = (f"{library} ({extensions.CUDA_LIBRARIES[library]})" for library in missing)
    return Finding(
        name,
        False,
        f"missing {', '.join(named)}: models on the GPU cannot run in ORT",
        'pip install "ortlab[cuda]", about 1.3 GB',
    )


def _onnx_ir() -> Finding:
    name, onnx = "onnx IR version", import_or_none("onnx")
    if onnx is None:
        return Finding(name, None, "needs onnx")
    written = int(onnx.IR_VERSION)
    if written <= MAX_IR:
        return Finding(name, True, str(written))
    capped = f"{written}; models for ORT are limited to IR {MAX_IR} and opset {MAX_OPSET}"
    return Finding(name, True, capped)


ESSENTIALS: tuple[Callable[[], Finding], ...] = (
    _python, _platform, _torch, _rocm, _ort, runtimes.check, _onnx, _extension,
)  # fmt: skip
WITHOUT_ORTMODULE: tuple[Callable[[], Finding], ...] = (
    _any_python, _torch, runtimes.check, _onnx, _compiler, _python_headers, _ortmodule,
)  # fmt: skip
"""Checks where onnxruntime-training is not installed, so that those of ORTModule say nothing."""

CHECKS: tuple[Callable[[], Finding], ...] = (
    *ESSENTIALS,
    _extension_loads,
    _optional_extensions,
    _compiler,
    _python_headers,
    _onnx_ir,
)
