"""Tests that memory freed by threads is returned to the system when they end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests.support.waiting import HANGS_S

KEPT = """
import ctypes, sys, threading
import psutil
from ortlab.utils.threads import Thread
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.free(libc.malloc(24_000_000))  # having freed a mapping, glibc keeps as much of an arena
process, held = psutil.Process(), []

def use():
    held.append(process.memory_info().rss)
    blocks = [libc.malloc(50_000) for _ in range(400)]
    for block in blocks:
        ctypes.memset(block, 1, 50_000)
    for block in reversed(blocks):
        libc.free(block)

plain, ours = threading.Thread(target=use), Thread(use, name="ortlab-test")
thread = ours if sys.argv[1] == "ours" else plain
thread.start()
thread.join()
print(process.memory_info().rss - held[0])
"""


def kept(thread: str, **environment: str) -> int:
    """Return the bytes kept after a thread that allocated 20 MB and freed them."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT, thread],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=True,
        env={**os.environ, **environment},
    )
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's arenas")
def test_what_a_thread_has_freed_goes_back() -> None:
    """Otherwise a kernel would keep, for each arena, the most that any thread has used."""
    assert kept("plain") > 15e6
    assert kept("ours") < 2e6
    chosen = kept("ours", GLIBC_TUNABLES="glibc.malloc.trim_threshold=67108864")
    assert chosen > 15e6, "who has chosen a threshold keeps it"
