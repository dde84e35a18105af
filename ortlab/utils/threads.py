"""What the C library keeps of freed memory, given back to the system.

glibc has an arena for each thread and keeps it when the thread ends, for another one. Whatever a
thread has freed at the end of its arena stays there: a kernel in which threads come and go for
hours would hold the most that any of them has used, once for each arena.
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
"""Of ``mallopt``, see malloc.h."""
_ADAPTED: Final = 32 << 20
"""The largest threshold for mappings that glibc's own adjustment reaches (64 bit)."""
_BEYOND_BINS: Final = 100_000
"""Bytes whose ``free`` looks at the end of the arena: more than 65,536."""


class Thread(threading.Thread):
    """A daemon that gives back what it has freed when it ends."""

    def __init__(self, target: Callable[..., object], *args: Any, name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)

    def run(self) -> None:
        """The target, and what comes after it."""
        try:
            super().run()
        finally:
            trim_own()


def trim(*, collect: bool = True) -> None:
    """Has the C library give freed memory back to the system, where it can (glibc).

    What a step takes shows in the resident size only where it was given back before. Without
    `collect`, which takes tenths of a second, what only Python's collector finds stays. Of other
    threads' arenas the ends stay as well (see `trim_own`).
    """
    if collect:
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    trim_own()


def trim_own() -> None:
    """Gives back the end of this thread's arena; ``malloc_trim`` does that for the main one alone.

    A ``free`` does, where the end is above the threshold, so that is low for one moment. As
    ``mallopt`` ends glibc's adjustment, both thresholds stand from then on where it ends with large
    tensors (mallopt(3)). Where the environment sets one, everything is left alone.
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
    """The C library, where it is glibc and the user has not chosen its thresholds."""
    chosen = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if re.search(r"(mmap|trim)_threshold", " ".join(chosen), re.IGNORECASE):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except (OSError, AttributeError):
        return None
    return libc
