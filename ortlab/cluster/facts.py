"""Facts about a worker that are checked before anything is sent to it: host, cores, versions.

The source of this module is sent to workers as text and needs only Python's standard library, in
any version: pickles and compiled code differ between versions of Python.
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
    """Return facts about this process.

    Returns:
        A dictionary of "host", "pid", "cores" (the processors that it may run on) and "versions",
        by name, with None for a library that is not installed.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {name: _version(name) for name in _DISTRIBUTIONS}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": cores(),
        "versions": versions,
    }


def cores() -> int:
    """Return the number of processors that this process may run on."""
    # macOS and Windows do not have sched_getaffinity.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return len(allowed(0))


def as_text() -> str:
    """Return Python code that prints `facts` as JSON and defines no names."""
    code = f"{inspect.getsource(sys.modules[__name__])}\nimport json\nprint(json.dumps(facts()))"
    return f"exec({code!r}, {{'__name__': 'facts'}})"


def _version(distribution: str) -> Any:
    try:
        if distribution == "ortlab":  # it may be imported from a clone that is not installed
            return importlib.import_module("ortlab._version").__version__
        return importlib.metadata.version(distribution)
    except ImportError:  # PackageNotFoundError too
        return None
