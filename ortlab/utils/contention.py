"""Idle threads of OpenMP, and how long this process waits for a core on a busy machine.

torch's threads wait for work in OpenMP, which by default keeps them spinning. While other programs
use the cores, a spinning thread takes the time of the one that it waits for, and a step takes 20 to
60 times as long. ``OMP_WAIT_POLICY=passive`` makes them sleep; OpenMP reads it when torch is
loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SLEEPING: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "passive"}
"""Environment variables of a process whose idle threads sleep."""
FIX: Final = (
    "Start Python with OMP_WAIT_POLICY=passive, as `ortlab lab` and the kernels of "
    "`ortlab kernelspec install` do"
)
_THREADS = Path("/proc/self/task")
_ENOUGH_NS: Final = 10**9
"""Least time, in nanoseconds, that threads must have computed or waited to judge by."""
_BUSY: Final = 1 / 3
"""Share of this time spent waiting from which on the machine counts as busy."""


def spinning() -> bool:
    """Return True if the idle threads of OpenMP spin in this process."""
    return os.environ.get("OMP_WAIT_POLICY", "").lower() != SLEEPING["OMP_WAIT_POLICY"]


class Contention:
    """Share of the time that the threads of this process wait for a core.

    Linux counts the time of each thread (proc_pid_schedstat(5)); elsewhere nothing is known.
    """

    def __init__(self) -> None:
        self._before = _times()

    def waited(self) -> float | None:
        """Return the share since the last call that was not None, from 0 to 1.

        Returns:
            The share; None where it is unknown, or the threads have hardly run since.
        """
        now = _times()
        ran = waited = 0
        for thread, (ran_ns, waited_ns) in now.items():
            before = self._before.get(thread, (0, 0))
            ran += ran_ns - before[0]
            waited += waited_ns - before[1]
        if ran + waited < _ENOUGH_NS:
            return None
        self._before = now
        return waited / (ran + waited)

    def warning(self) -> str | None:
        """Return a line on a busy machine and spinning threads; None where all is well."""
        share = self.waited()
        if share is None or share < _BUSY or not spinning():
            return None
        return (
            f"the machine is busy: threads of this kernel waited for a core {share:.0%} of their "
            f"time, and OpenMP's idle threads spin, which makes steps many times slower. {FIX}"
        )


def _times() -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread has run, and has waited for a core."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError):  # it has ended
                ran, waited, _ = (thread / "schedstat").read_text(encoding="ascii").split()
                found[thread.name] = int(ran), int(waited)
    return found
