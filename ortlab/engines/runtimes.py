"""ONNX Runtime's distributions, which share a folder, so that only one can be installed."""

from __future__ import annotations

from typing import Final

from ortlab.utils.findings import Finding, package_version

TRAINING: Final = "onnxruntime-training"
"""Distribution with ORTModule; 1.19.2 is its last version."""

_BY_PREFERENCE: Final = (TRAINING, "onnxruntime-gpu", "onnxruntime")
"""Names of the distributions; of several that are installed, the first one is kept."""


def installed() -> dict[str, str]:
    """Return the versions of the installed distributions by their names."""
    found = ((name, package_version(name)) for name in _BY_PREFERENCE)
    return {name: version for name, version in found if version is not None}


def repair() -> str:
    """Return the command that leaves one complete runtime: the one that is here, or onnxruntime."""
    here = installed()
    if not here:
        return "pip install onnxruntime"
    kept, *others = here
    again = f"pip install --force-reinstall --no-deps {kept}=={here[kept]}"
    return f"pip uninstall -y {' '.join(others)} && {again}" if others else again


def check() -> Finding:
    """Check that exactly one distribution is installed."""
    name, here = "onnxruntime", [f"{each} {version}" for each, version in installed().items()]
    if not here:
        missing = "not installed: models train in eager torch"
        return Finding(name, False, missing, repair(), required=True)
    if len(here) == 1:
        return Finding(name, True, here[0], required=True)
    beside = f"{' and '.join(here)} are installed in one folder and break each other"
    return Finding(name, False, beside, repair(), required=True)
