"""Runs in separate processes that are killed at a random moment, and runs that continue them.

`tests/training/test_checkpoint_writer.py` compares the losses. The processes are forked from one
that has imported torch, which takes seconds, and has done nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import ortlab
from ortlab.history.run_folder import RunFolder
from ortlab.metrics.recorder import INDEX
from tests.support.waiting import until

FILLER = "filler"
STEPS = 24
EVERY = 3
SETTINGS = {
    "loss": "cross_entropy",
    "device": "cpu",
    "batch_size": 4,
    "lr": 0.01,
    "num_train_epochs": 3,
    "save_steps": EVERY,
    "lr_scheduler_type": "cosine",
    "cache": False,
}
_PROCESSES = multiprocessing.get_context("forkserver")


def data() -> TensorDataset:
    """Return 32 samples: 8 steps per epoch."""
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network() -> nn.Module:
    """Return a network with buffers (batch normalization) and random numbers (dropout)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )


@dataclass(frozen=True)
class End:
    """Moment at which a run's process is killed.

    It is killed `delay_s` after the beginning of `step`, once `kept` checkpoints have been saved.
    `full` is the step before which the disk fills up, and the number of bytes that remain free.
    """

    kept: int
    step: int
    delay_s: float
    full: tuple[int, int] | None = None


class Deadly(Dataset[Any]):
    """Data whose process is killed at a random moment after the beginning of a step.

    The first steps wait for the checkpoints that must exist, and the last one waits for its end: a
    run ends neither before the first checkpoint nor before it is killed.
    """

    def __init__(self, home: Path, end: End) -> None:
        self._data = data()
        self._home, self._end = home, end
        self._checkpoints = home / "runs" / "run-1" / "checkpoints"
        self._read = 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        due, late = divmod(self._read - 1, 4 * EVERY)
        if late == 0 and 0 < due <= self._end.kept:
            until(lambda: len(list(self._checkpoints.glob("last-*"))) == due)
        if self._end.full is not None and self._read == 4 * self._end.full[0]:
            fill(self._home, self._end.full[1])
        if self._read == 4 * self._end.step:
            threading.Thread(target=self._kill, daemon=True).start()
        if self._read == 4 * STEPS:
            threading.Event().wait()
        return self._data[index]

    def _kill(self) -> None:
        time.sleep(self._end.delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def _begin(home: Path) -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # makes the test show where a process hangs
    os.environ["ORTLAB_HOME"] = str(home)
    torch.set_num_threads(1)


def _train(home: Path, engine: str, workers: int, end: End | None) -> None:
    _begin(home)
    train: Any = data() if end is None else Deadly(home, end)
    ortlab.finetune(network(), train, engine=engine, workers=workers, **SETTINGS).result()


def _resume(home: Path, name: str) -> None:
    _begin(home)
    torch.rand(7)  # this process has drawn other numbers
    ortlab.resume(name, network(), data()).result()


def train(home: Path, engine: str, workers: int = 1) -> None:
    """Train a run without any interruption."""
    assert _process(_train, home, engine, workers, None) == 0


def killed(
    home: Path,
    engine: str,
    drawn: random.Random,
    *,
    workers: int = 1,
    kept: int = 1,
    full: bool = False,
) -> None:
    """Train a run whose process is killed at random once it has saved that many checkpoints.

    With `workers` it is the process that has started them. With `full`, the disk of `home` is full
    from a random step on.
    """
    step = drawn.randint(EVERY * kept + 1, STEPS - 1)
    end = End(kept, step, drawn.random() * 0.03)
    if full:
        end = replace(end, full=(drawn.randint(EVERY * kept + 1, step), drawn.randrange(2**14)))
    assert _process(_train, home, engine, workers, end) == -signal.SIGKILL


def running(home: Path) -> list[int]:
    """Return the ids of processes that use `home`, such as the workers of a killed one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("ORTLAB_HOME") == str(home):
                found.append(process.pid)
    return found


def fill(disk: Path, left: int) -> None:
    """Fill a disk except for this many bytes, as exactly as its blocks allow; `free` undoes it."""
    with (disk / FILLER).open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    os.truncate(disk / FILLER, max(0, (disk / FILLER).stat().st_size - left))


def free(disk: Path) -> None:
    """Remove the file that fills the disk."""
    (disk / FILLER).unlink()


def resume(home: Path, name: str) -> None:
    """Continue the run in another process, to the end."""
    assert _process(_resume, home, name) == 0


def _process(target: Any, *arguments: Any) -> int | None:
    _PROCESSES.set_forkserver_preload(
        ["tests.support.killing", "ortlab.training.run", "ortlab.engines.ortmodule.engine"]
    )
    process = _PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def losses(home: Path, name: str) -> dict[int, float]:
    """Return step to loss, as stored in the run's file."""
    rows = RunFolder(home / "runs" / name).read_metrics().rows
    steps = [int(step) for step in rows[:, INDEX["step"]]]
    assert steps == sorted(set(steps))
    return dict(zip(steps, rows[:, INDEX["loss"]].tolist(), strict=True))


def spoil(path: Path, drawn: random.Random) -> None:
    """Damage a file: flip a bit, truncate it, or replace it by an empty one."""
    whole = bytearray(path.read_bytes())
    kind = drawn.choice(["flip", "cut", "empty"])
    if kind == "flip":
        whole[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
    else:
        del whole[drawn.randrange(len(whole)) if kind == "cut" else 0 :]
    path.write_bytes(whole)


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Any:
    """Mount a file system of `size` bytes at `path`; skip the test where that is not allowed."""
    import subprocess

    import pytest

    path.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system may be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
