"""What this machine has and lacks for ortlab: checks that become findings, each with its fix.

The cheap checks import nothing but the standard library, so they run on every platform and Python,
with or without torch and ORT.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ORT_VERSION = "1.19.2"
TORCH_RANGE = ((2, 9), (2, 15))
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


def obstacle() -> Finding | None:
    """The first finding that keeps ORTModule from running; None when it can run."""
    return next((f for f in _essentials() if f.ok is False), None)


def _essentials() -> Iterator[Finding]:
    """The required findings, cheap, in an order in which the first failure explains the others."""
    for check in ESSENTIALS:
        yield check()


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        return Finding("Python", True, version, required=True)
    return Finding(
        "Python",
        False,
        f"Python {version}: onnxruntime-training {ORT_VERSION} has wheels up to Python 3.11",
        f"Use a Python 3.11 environment for engine='ort'; {OTHER_ENGINES}",
        required=True,
    )


def _platform() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        return Finding("platform", True, found, required=True)
    return Finding(
        "platform",
        False,
        f"{found}: onnxruntime-training {ORT_VERSION} has wheels for Linux x86-64 only",
        f"Run engine='ort' on Linux x86-64 (WSL and x86-64 containers count); {OTHER_ENGINES}",
        required=True,
    )


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", False, "torch is not installed", "pip install torch", True)
    low, high = (".".join(map(str, bound)) for bound in TORCH_RANGE)
    if TORCH_RANGE[0] <= _numbers(version) <= TORCH_RANGE[1]:
        return Finding("torch", True, version, required=True)
    return Finding(
        "torch",
        False,
        f"torch {version} is outside the range {low} to {high} that ORTModule was tried with",
        f'pip install "torch>={low},<{TORCH_RANGE[1][0]}.{TORCH_RANGE[1][1] + 1}"',
        required=True,
    )


def _ort() -> Finding:
    version = _version("onnxruntime-training")
    if version is None:
        return Finding(
            "onnxruntime-training",
            False,
            "onnxruntime-training is not installed",
            f"pip install onnxruntime-training=={ORT_VERSION}",
            required=True,
        )
    if version.split("+")[0] != ORT_VERSION:
        return Finding(
            "onnxruntime-training",
            False,
            f"onnxruntime-training {version}, and the patches are for {ORT_VERSION}",
            f"pip install onnxruntime-training=={ORT_VERSION}",
            required=True,
        )
    return Finding("onnxruntime-training", True, version, required=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


ESSENTIALS: tuple[Callable[[], Finding], ...] = (_python, _platform, _torch, _ort)
