"""Software and hardware environment of a run: versions, system, processor, devices."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

from ortlab._version import __version__

_PACKAGES = (
    "torch",
    "onnxruntime-training",
    "onnx",
    "transformers",
    "safetensors",
    "numpy",
)


@functools.cache
def _versions() -> Mapping[str, str]:
    """Return the versions of the installed packages, cached: a lookup takes tens of ms."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def environment() -> dict[str, Any]:
    """Return the software and hardware that a run depends on, besides its settings.

    Nothing in it identifies the user or the machine.

    Returns:
        Versions of ortlab, Python and the packages, the system, the machine type, the number of
        CPUs, the number of torch threads, and with CUDA its version and the device names.
    """
    found: dict[str, Any] = {
        "ortlab": __version__,
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    import torch  # heavy: torch

    found["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["devices"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return found
