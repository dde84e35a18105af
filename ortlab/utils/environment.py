"""What a run depends on besides its settings: versions, system, processor, devices."""

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
    """Those of the packages that are installed; looking them up takes tens of milliseconds."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def environment() -> dict[str, Any]:
    """What a run depends on besides its settings; nothing that names the user or the machine."""
    found: dict[str, Any] = {
        "ortlab": __version__,
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    import torch

    found["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["devices"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return found
