"""What the history says of a run in one line, read from its folder without its metrics."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.history.notes import legible, read_notes
from ortlab.history.run_folder import RunFolder, in_checkpoints, read_last
from ortlab.metrics.recorder import INDEX, NAN
from ortlab.utils import files
from ortlab.utils.tables import escaped

AT_WORK: Final = ("starting", "running", "paused", "stopping")
"""The states of a run that a process works on."""
_NUMBERED = re.compile(r"run-(\d{1,18})")
_MOST: Final = 2**63
"""What SQLite's whole numbers stay below."""


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of the history. Numbers that are not known are NaN, words that are not are empty.

    ``state`` is "interrupted" where the process died before the run was over, and for a run of
    another process "running" whatever it does. ``number`` is the N of a run called run-N.
    ``engine_asked`` and ``precision`` are those that held last. ``loss`` is that of the last step,
    ``held_out_loss`` the lowest that training came to, ``held_out_accuracy`` the one beside it.
    ``created`` is in UTC, as ISO 8601 has it; ``size_bytes`` is that of all files in the folder.
    ``continues`` names the run that it went on with, ``checkpoints`` is how many it has kept.

    Of a run that has no result, ``steps``, ``loss``, ``samples_per_s`` and ``peak_bytes`` are those
    of its last steps.
    """

    name: str
    number: int | None
    state: str
    model: str
    parameters: int
    engine_asked: str
    engine_used: str
    fallback: str
    precision: str
    workers: int
    steps: int
    loss: float
    held_out_loss: float
    held_out_accuracy: float
    samples_per_s: float
    tokens_per_s: float
    peak_bytes: float
    created: str
    wall_s: float
    size_bytes: int
    note: str
    tags: str
    error: str
    continues: str
    checkpoints: int
    folder: Path

    @property
    def at_work(self) -> bool:
        """Whether a process trains it now, this one or another."""
        return self.state in AT_WORK

    @property
    def can_go_on(self) -> bool:
        """Whether there is a checkpoint to go on from: its own, or of the run that it continues."""
        return bool(self.checkpoints or self.continues)

    @property
    def resume(self) -> str:
        """The magic with which it goes on."""
        return f"%ort resume {self.number or self.name}"

    def __str__(self) -> str:
        return f"{self.name}: {self.model} on {self.engine_used or self.engine_asked}, {self.state}"


def read_entry(path: Path, so_far: Mapping[str, Any] | None = None) -> RunEntry | None:
    """The run that is kept in a folder; None where that is no run's, or one of another form.

    ``so_far`` is what a run of this process that goes on has given, as run.json holds a result:
    known without reading its last steps or trying its lock.
    """
    about, settings = _read(path / "run.json"), _read(path / "settings.json")
    if about is None or settings is None:
        return None
    if not about.get("name") == path.name == escaped(legible(path.name)):
        return None
    result = about.get("result") if so_far is None else so_far
    result = result if isinstance(result, Mapping) else _last_steps(path)
    best = next((b for b in map(result.get, ("best", "after")) if isinstance(b, dict)), {})
    state = str((about if so_far is None else so_far).get("state", ""))
    if so_far is None and state not in ("finished", "stopped", "failed"):
        state = "running" if RunFolder(path).held() else "interrupted"
    said = read_notes(path)
    asked = legible(about.get("engine_asked") or settings.get("engine", ""))
    return RunEntry(
        name=path.name,
        number=numbered(path.name),
        state=state,
        model=legible(about.get("model", "")),
        parameters=_whole(about, "parameters"),
        engine_asked=asked,
        engine_used=legible(about.get("engine_used") or asked),
        fallback=legible(about.get("fallback_reason") or ""),
        precision=legible(about.get("precision") or settings.get("precision", "")),
        workers=_whole(about, "workers") or _whole(settings, "workers") or 1,
        steps=_whole(result, "steps"),
        loss=_number(result, "final_loss"),
        held_out_loss=_number(best, "loss"),
        held_out_accuracy=_number(best, "accuracy"),
        samples_per_s=_number(result, "samples_per_s"),
        tokens_per_s=_number(result, "tokens_per_s"),
        peak_bytes=_number(result, "peak_bytes"),
        created=legible(about.get("created", "")),
        wall_s=_number(result, "wall_s"),
        size_bytes=size_of(path),
        note=said.notes[-1].text if said.notes else "",
        tags=" ".join(said.tags),
        error=legible(about.get("error") or ""),
        continues=legible(about.get("continues") or ""),
        checkpoints=_kept(path),
        folder=path,
    )


def numbered(name: str) -> int | None:
    """3 of run-3; None of a name of the user's own, and of no number that anybody counts to."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def stamp(path: Path) -> str:
    """What changes when anything changes that `read_entry` tells of a run that is over."""
    parts = []
    for part in (path, path / "checkpoints", path / "run.json", path / "notes.jsonl"):
        try:
            found = part.stat(follow_symlinks=False)
        except OSError:
            parts.append("-")
        else:
            parts.append(f"{found.st_mtime_ns:x}.{found.st_ino:x}.{found.st_size:x}")
    return " ".join(parts)


def size_of(path: Path) -> int:
    """Bytes of all files below a folder; links are not followed."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as found:
        for each in found:
            if each.is_dir(follow_symlinks=False):
                total += size_of(Path(each.path))
            else:
                total += each.stat(follow_symlinks=False).st_size
    return total


def _kept(path: Path) -> int:
    return sum(not each.name.startswith(".") for each in in_checkpoints(path))


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        return files.read_object(path)
    return None


def _last_steps(path: Path) -> dict[str, Any]:
    """What stands for the result of a run that has none: its last steps."""
    try:
        rows = read_last(path / "metrics.jsonl")
    except OSError:
        return {}
    if not len(rows):
        return {}
    last = {name: float(rows[-1, place]) for name, place in INDEX.items()}
    peaks = rows[:, [INDEX["cuda_peak_bytes"], INDEX["peak_bytes"]]]
    on_cuda, resident = ([*column[~(column != column)], NAN] for column in peaks.T)
    step_s = float(rows[:, INDEX["step_ms"]].sum()) / 1e3
    return {
        "steps": last["step"],
        "wall_s": last["time_s"],
        "final_loss": last["loss"],
        "samples_per_s": float(rows[:, INDEX["samples"]].sum()) / step_s if step_s else NAN,
        "tokens_per_s": float(rows[:, INDEX["tokens"]].sum()) / step_s if step_s else NAN,
        "peak_bytes": max(on_cuda[:-1] or resident[:-1] or [NAN]),
    }


def _whole(values: Mapping[str, Any], name: str) -> int:
    """0 where it is not known, and of what is no number at all, or of nothing that is counted."""
    value = _number(values, name)
    return int(value) if abs(value) < _MOST else 0


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    with contextlib.suppress(OverflowError):  # JSON has whole numbers that no float holds
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return NAN
