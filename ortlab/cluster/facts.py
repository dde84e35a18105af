"""Facts about a worker that are checked before anything is sent to it: host, cores, versions.

The source of this module is sent to workers as text and needs only Python's standard library, in
any version: pickles and compiled code differ between versions of Python. On a host that is reached
over SSH the same text greets this process before ortlab is imported there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import socket
import sys
from typing import Any

GREETING = "ortlab-host: "
"""Beginning of a line for the kernel; shells of the host may print others before it."""
HOST = "ORTLAB_WORKER_HOST"
"""Environment variable of a worker that was started over SSH: its host as the user names it."""
FOLDER = "ORTLAB_WORKER_FOLDER"
"""Environment variable of such a worker: the private folder of all workers on its host."""
TOKEN_BYTES = 32
"""Length of the token by which the kernel knows the connections of its hosts."""
REACH_S = 2.5
"""Seconds that a host has to connect back to the kernel."""

_DISTRIBUTIONS = {
    **{name: (name,) for name in ("ortlab", "torch", "onnxruntime-training")},
    # The same runtime for other devices; hosts may have other ones than the kernel.
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    **{name: (name,) for name in ("ipyparallel", "cloudpickle")},
}


def facts() -> dict[str, Any]:
    """Return facts about this process.

    Returns:
        A dictionary of "host", "pid", "cores" (the processors that it may run on) and "versions",
        by name, with None for a library that is not installed.
    """
    versions: dict[str, Any] = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name, distributions in _DISTRIBUTIONS.items():
        versions[name] = next(filter(None, map(_version, distributions)), None)
    return {
        "host": os.environ.get(HOST) or socket.gethostname(),
        "pid": os.getpid(),
        "cores": cores(),
        "versions": versions,
    }


def cores() -> int:
    """Return the number of processors that this process may run on."""
    # macOS and Windows do not have sched_getaffinity.
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return len(allowed(0))


def as_text(then: str = "print(json.dumps(facts()))") -> str:
    """Return Python code in one line that runs this module elsewhere and defines no names.

    Args:
        then: What to do with it; by default it prints `facts` as JSON.
    """
    code = f"{inspect.getsource(sys.modules[__name__])}\n{then}"
    return f"exec({code!r}, {{'__name__': 'facts'}})"


def greet() -> None:
    """Tell the kernel the facts of this host, and start workers when it orders them.

    The first line of the standard input has the address and port of the kernel's listening socket
    and a token, the second one the order. Between them the kernel checks all hosts.
    """
    asked = json.loads(sys.stdin.readline())
    lifeline, unreached = None, ""
    try:
        lifeline = socket.create_connection((asked["address"], asked["port"]), REACH_S)
        lifeline.sendall(asked["token"].encode())
        lifeline.settimeout(None)
    except OSError as error:
        unreached = error.strerror or str(error)
    found = {**facts(), "python": sys.executable, "unreached": unreached}
    print(GREETING + json.dumps(found), flush=True)
    order = sys.stdin.readline()
    if order:
        start = importlib.import_module("ortlab.cluster.host_side")
        start.run(json.loads(order), lifeline)


def different(theirs: dict[str, Any]) -> tuple[str, str] | None:
    """Compare versions with those of this process.

    Args:
        theirs: Versions of another process, by name.

    Returns:
        The versions that differ, as text: theirs and those of this process; None if all are equal.
    """
    ours = facts()["versions"]
    names = [name for name in ours if theirs.get(name) != ours[name]]
    if not names:
        return None
    each = [
        ", ".join(f"{name} {found[name]}" if found.get(name) else f"no {name}" for name in names)
        for found in (theirs, ours)
    ]
    return each[0], each[1]


def _version(distribution: str) -> Any:
    try:
        if distribution == "ortlab":  # it may be imported from a clone that is not installed
            return importlib.import_module("ortlab._version").__version__
        return importlib.metadata.version(distribution)
    except ImportError:  # PackageNotFoundError too
        return None
