"""Measurements in a kernel that runs for hours: imported by the notebook of the soak test."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ipywidgets
import psutil
from torch.utils.data import Dataset

from ortlab.notebook.views import charts
from tests.support.waiting import until

if TYPE_CHECKING:
    from ortlab.training.run import Run

COUNTED: Final = ("rss", "threads", "files", "sockets", "widgets")


def settled(run: Run, changes: dict[str, Any]) -> None:
    """Apply `changes` to a run in training and wait until they take effect."""
    run.apply(**changes)
    until(lambda: all(run.current_settings.as_dict()[k] == v for k, v in changes.items()))


def toggled(run: Run, cycle: int) -> None:
    """Act on a run as a person does: change settings back and forth, pause, save a checkpoint."""
    settled(run, {"learning_rate": 1e-3 * (1 + cycle % 3), "max_grad_norm": 1.0})
    settled(run, {"precision": "bf16", "batch_size": 64})
    settled(run, {"precision": "fp32", "batch_size": 32})
    if cycle % 3 == 0:
        settled(run, {"engine": "ortmodule"})
        step = run.step
        until(lambda: run.step > step + 5)
        settled(run, {"engine": "eager"})
    run.pause()
    until(lambda: run.state == "paused")
    run.checkpoint()
    run.resume()
    step = run.step
    until(lambda: run.step > step + 5)


def kinds() -> Counter[str]:
    """Return the number of open files of this process by kind: sockets, pipes, paths by name."""
    found: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the scan's own descriptor is closed by now
            target = os.readlink(entry.path)
            found[target if target.startswith("/") else target.split("[")[0]] += 1
    return found


WATCHED_S = 5.5
"""Seconds of unchanged settings with visible charts: time for five updates at their slowest pace,
whose cost is measured.
"""


class Read(Dataset[Any]):
    """Data whose samples take as long to read as small files: about 5 ms for a batch of 32."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(1e-4)
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated() -> int:
    """Return the bytes allocated by malloc in all arenas; memory cached by malloc is no leak."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    found = mallinfo()
    return int(found.hblkhd + found.uordblks)


def note(path: str, cycle: int) -> None:
    """Append this process's current resources and the cost of an update of the live charts."""
    time.sleep(WATCHED_S)
    gc.collect()
    process, files = psutil.Process(), kinds()
    pumps = [view.pump for view in charts._views]
    costs = [statistics.median(pump._costs_s) for pump in pumps if not pump.join(0)]
    held = {
        "cycle": cycle,
        "at_s": time.time(),
        "rss": process.memory_info().rss,
        "allocated": _allocated(),
        "threads": threading.active_count(),
        "native_threads": process.num_threads(),  # not judged: thread pools grow and shrink
        "files": process.num_fds(),
        "sockets": files["socket:"],
        "widgets": len(ipywidgets.widget._instances),
        "update_ms": 1e3 * max(costs, default=0.0),
        "kinds": files,
        "names": Counter("-".join(thread.name.split("-")[:2]) for thread in threading.enumerate()),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(held) + "\n")
