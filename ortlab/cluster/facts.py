"""What must be known of a worker before anything is sent to it.

Its source goes to workers as text, so nothing but Python's library is needed to run it, of any
version: what two versions of Python pickle or compile differs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import platform
import socket
import sys
from typing import Any

_DISTRIBUTIONS = ("ortlab", "torch", "onnxruntime-training", "cloudpickle")


def facts() -> dict[str, Any]:
    """This process: host, pid, cores that it may run on, versions by name (None: not installed)."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {name: _version(name) for name in _DISTRIBUTIONS}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": cores(),
        "versions": versions,
    }


def cores() -> int:
    """The processors that this process may run on."""
    # Not on macOS and Windows.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return len(allowed(0))


def as_text() -> str:
    """Python code that prints `facts` as JSON, and leaves no name behind."""
    code = f"{inspect.getsource(sys.modules[__name__])}\nimport json\nprint(json.dumps(facts()))"
    return f"exec({code!r}, {{'__name__': 'facts'}})"


def _version(distribution: str) -> Any:
    try:
        if distribution == "ortlab":  # as it is imported: it may be a clone that is not installed
            return importlib.import_module("ortlab._version").__version__
        return importlib.metadata.version(distribution)
    except ImportError:  # PackageNotFoundError too
        return None
