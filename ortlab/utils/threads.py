"""Release of freed memory from the C library to the system.

glibc has an arena per thread and keeps it for another thread when the thread ends. Memory that a
thread has freed at the end of its arena stays there: a kernel that starts and ends threads for
hours would keep the peak of any of them, once per arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import threading
from collections.abc import Callable
from typing import Any, Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``; see malloc.h."""
_ADAPTED: Final = 32 << 20
"""Largest mmap threshold that glibc's dynamic adjustment reaches (64 bit)."""
_BEYOND_BINS: Final = 100_000
"""Size from which ``free`` trims the end of the arena: more than 65,536 bytes."""
_NOT_GLIBC: Final = (OSError, AttributeError, TypeError)
"""Errors of glibc's functions on other systems; Windows refuses None as the name of a library."""


class Thread(threading.Thread):
    """Daemon thread that releases the memory it has freed when it ends.

    Args:
        target: Function to run.
        *args: Its arguments.
        name: Name of the thread.
    """

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)

    def run(self) -> None:
        """Run the target, then release freed memory."""
        try:
            super().run()
        finally:
            trim_own()


_BEFORE_TRIM: Final[list[Callable[[], object]]] = []


def before_trim(release: Callable[[], object]) -> None:
    """Let `trim` call a function that frees memory which an engine keeps for its next step.

    Args:
        release: The function.
    """
    _BEFORE_TRIM.append(release)


def trim(*, collect: bool = True) -> None:
    """Release freed memory to the system, where the C library supports it (glibc).

    The memory of a step shows in the resident size only if freed memory was released before it.
    The ends of other threads' arenas are not released (see `trim_own`).

    Args:
        collect: Run Python's garbage collector first, which takes tenths of a second; without it,
            memory of reference cycles is not released.
    """
    if collect:
        gc.collect()
    for release in _BEFORE_TRIM:
        release()
    with contextlib.suppress(*_NOT_GLIBC):
        ctypes.CDLL(None).malloc_trim(0)
    trim_own()


def trim_own() -> None:
    """Release the end of this thread's arena; ``malloc_trim`` does so only for the main arena.

    ``free`` releases the end of an arena if it is larger than the trim threshold, which is
    therefore lowered for a moment. Since ``mallopt`` disables glibc's dynamic adjustment, both
    thresholds are then set to the values that the adjustment reaches with large tensors
    (mallopt(3)). If the environment sets one of them, nothing is done.
    """
    libc = _libc()
    if libc is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _ADAPTED)
    libc.mallopt(_M_TRIM_THRESHOLD, 1)
    libc.free(libc.malloc(_BEYOND_BINS))
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _ADAPTED)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc and the user has not set its thresholds, else None."""
    chosen = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if re.search(r"(mmap|trim)_threshold", " ".join(chosen), re.IGNORECASE):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except _NOT_GLIBC:
        return None
    return libc
