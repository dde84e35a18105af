"""Prints the extra of pyproject.toml with the ONNX Runtime of this Python.

The one that is installed stays; else it is that with ORTModule where there is a wheel of it.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata

EXTRAS = {
    "onnxruntime-training": "ortmodule",
    "onnxruntime-gpu": "gpu",
    "onnxruntime": "cpu",
}


def runtime() -> str:
    """Return the name of the extra."""
    here = {each.name.lower() for each in metadata.distributions() if each.name}
    installed = [extra for name, extra in EXTRAS.items() if name in here]
    machine = (sys.platform, platform.machine(), sys.version_info[:2])
    return (installed or ["ortmodule" if machine == ("linux", "x86_64", (3, 11)) else "cpu"])[0]


if __name__ == "__main__":
    print(runtime())
