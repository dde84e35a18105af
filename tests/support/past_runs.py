"""Folders of runs as a run leaves them, made quickly, for the tests of the history."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from ortlab.history.run_folder import FORM, RunFolder
from ortlab.metrics.recorder import COLUMNS, INDEX, Event, Rows
from ortlab.settings import FinetuneSettings
from tests.support.waiting import HANGS_S

ENVIRONMENT = {"ortlab": "0.1.0", "python": "3.11.7", "packages": {"torch": "2.13.0"}, "cpus": 2}
"""An invented machine; describing this one would import torch."""


def steps(count: int, *, loss: float = 1.0) -> Rows:
    """Return steps of 8 samples and 4 ms each, whose loss falls to `loss`."""
    rows = np.full((count, len(COLUMNS)), np.nan)
    rows[:, INDEX["step"]] = np.arange(1, count + 1)
    rows[:, INDEX["time_s"]] = 0.005 * np.arange(1, count + 1)
    rows[:, INDEX["loss"]] = loss * np.linspace(2, 1, count)
    rows[:, INDEX["lr"]] = 0.001
    rows[:, INDEX["samples"]] = 8
    rows[:, INDEX["samples_per_s"]] = 2000
    rows[:, INDEX["step_ms"]] = 4
    rows[:, INDEX["rss_bytes"]] = rows[:, INDEX["peak_bytes"]] = 2**30
    return rows


def kept(
    root: Path,
    name: str | None = None,
    *,
    state: str = "finished",
    count: int = 20,
    loss: float = 1.0,
    days: float = 0.0,
    model: str = "Net",
    used: str | None = None,
    error: str | None = None,
    **settings: Any,
) -> Path:
    """Make a run that began `days` ago; ``state="running"`` makes one that never ended."""
    folder = RunFolder.create(name, root=root)
    chosen = FinetuneSettings.of({"engine": "eager", **settings})
    folder.write_json("settings", chosen.as_dict())
    folder.write_json("environment", ENVIRONMENT)
    sink = folder.metrics()
    evaluation = Event("eval", count, 0.1, "", {"loss": loss / 2, "accuracy": 0.75})
    sink.write(steps(count, loss=loss), [evaluation])
    sink.close()
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    about: dict[str, Any] = {
        "form": FORM,
        "name": folder.name,
        "model": model,
        "parameters": 42,
        "created": began.isoformat(timespec="seconds"),
        "state": state,
    }
    if state != "running":
        best = {"step": count, "loss": loss / 2, "accuracy": 0.75}
        about |= {
            "steps": count,
            "engine_used": used or chosen.model.engine,
            "fallback_reason": "told so" if used else None,
            "error": error,
            "result": {
                "state": state,
                "steps": count,
                "wall_s": 0.005 * count,
                "final_loss": loss,
                "after": best,
                "best": best,
                "samples_per_s": 2000.0,
                "peak_bytes": 2**30,
            },
        }
    folder.write_json("run", about)
    return folder.path


def end(path: Path) -> None:
    """End a run that is running, as its process would."""
    folder = RunFolder(path)
    about = folder.read_json("run")
    folder.write_json("run", about | {"state": "finished", "result": {"steps": 7}})
    folder.release()


def wait_for(path: Path, timeout_s: float = HANGS_S) -> None:
    """Wait until another process has created a file."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come within {timeout_s:g} s")
        time.sleep(0.01)


def spoil(path: Path) -> None:
    """Overwrite the beginning of a file."""
    with path.open("r+b") as file:
        file.write(os.urandom(200))
