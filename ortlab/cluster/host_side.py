"""Host's side of workers on hosts: starts them, and ends them with the kernel.

Nothing of ipyparallel watches the kernel from another host. The workers end when this process ends,
which ends as soon as its standard input does (the connection of ssh, srun or mpirun), or its
lifeline: a connection to the kernel's process that the system closes with it. The system's probes
find out that the kernel's machine is gone, where SSH's server would wait for hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from ortlab.cluster import facts
from ortlab.utils import contention, scratch
from ortlab.utils.threads import Thread

_TO_END_S: Final = 2.0
"""Seconds that a worker has to end after SIGTERM before it is killed."""
_LAUNCHERS: Final = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "PRTE_")
_PROBES: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 9}
"""Probes of the lifeline: after a minute without an answer it is broken (tcp(7))."""


def run(order: Mapping[str, Any], lifeline: socket.socket) -> None:
    """Start workers and wait until they have ended, or until the kernel ends them.

    Args:
        order: "host" (its name for the user), "count" and "connection" (ipyparallel's connection
            information for engines).
        lifeline: Connection to the kernel's process.
    """
    folder = scratch.folder("workers")
    ending = _Ending()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    workers = []
    try:
        for number in range(order["count"]):
            workers.append(_start(order, folder / str(number)))
            _tell(started=workers[-1].pid)
        Thread(_watch_input, ending, name="ortlab-input").start()
        Thread(_watch_lifeline, lifeline, ending, name="ortlab-lifeline").start()
        waiters = [Thread(_watch_worker, each, name="ortlab-worker") for each in workers]
        for waiter in waiters:
            waiter.start()
        while not ending.wait(0.2) and any(waiter.is_alive() for waiter in waiters):
            pass
    finally:
        _end(workers, ending.number)
        scratch.remove(folder)


class _Ending(threading.Event):
    """Event that is set when the workers have to end; ``number`` is the signal that ends them."""

    number: int = signal.SIGTERM


def _start(order: Mapping[str, Any], profile: Path) -> subprocess.Popen[str]:
    """Start a worker; what it writes goes to the kernel as errors of ssh."""
    threads = max(1, facts.cores() // order["count"])
    profile.mkdir(mode=0o700)
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "ortlab.cluster.process", "remote-engine", str(os.getpid())),
            "--timeout=60",  # on a busy machine, registering takes longer than 5 s
        ],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        text=True,
        env={
            **{name: value for name, value in os.environ.items() if not _of_launcher(name)},
            **contention.SLEEPING,
            "IPP_PROFILE_DIR": str(profile),
            "OMP_NUM_THREADS": str(threads),
            facts.HOST: order["host"],
            facts.FOLDER: str(profile.parent),
            # torch would warn on each rank that the names of the others do not resolve.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        },
        start_new_session=True,  # its processes can be ended with it, and only this one ends it
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin as pipe:
        pipe.write(json.dumps(order["connection"]))
    return worker


def _of_launcher(name: str) -> bool:
    """Return whether a variable says which rank srun or mpirun gave this process, as its only one.

    DeepSpeed and others would take it for the rank of each worker.
    """
    kept = name.startswith("SLURM_JOB_") or name == "SLURM_CONF"
    return name.startswith(_LAUNCHERS) and not kept


def _tell(**told: int) -> None:
    with contextlib.suppress(OSError):  # the kernel is gone
        # One call of write: several threads tell.
        sys.stdout.write(f"{facts.GREETING}{json.dumps(told)}\n")
        sys.stdout.flush()


def _watch_worker(worker: subprocess.Popen[str]) -> None:
    code = worker.wait()
    _tell(ended=worker.pid, code=code)


def _watch_input(ending: _Ending) -> None:
    line = sys.stdin.readline()
    if line.strip():
        ending.number = int(line)
    ending.set()


def _watch_lifeline(lifeline: socket.socket, ending: _Ending) -> None:
    with contextlib.suppress(OSError):
        lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):  # not on every system
                lifeline.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        lifeline.recv(1)
    ending.set()


def _end(workers: list[subprocess.Popen[str]], number: int) -> None:
    """End workers and the processes that they have started."""
    helpers = []
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # the one that forwards its signals
            helpers += psutil.Process(worker.pid).children(recursive=True)
        worker.send_signal(number)
    until = time.monotonic() + _TO_END_S
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    for helper in helpers:  # otherwise they end some seconds later
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()
