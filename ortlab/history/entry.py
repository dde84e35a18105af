"""Summary of a run in one line of the history, read from its folder without its metrics."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.history.notes import legible, read_notes
from ortlab.history.run_folder import RunFolder, in_checkpoints, read_last
from ortlab.metrics.recorder import INDEX, NAN, peak_bytes
from ortlab.settings import stored
from ortlab.utils import files
from ortlab.utils.tables import escaped

AT_WORK: Final = ("starting", "running", "paused", "stopping")
"""States of a run that a process is training."""
_NUMBERED = re.compile(r"run-(\d{1,18})")
_MOST: Final = 2**63
"""Upper bound of SQLite's integers."""


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """Summary of a run; unknown numbers are NaN, unknown texts are empty.

    For a run without a result, `steps`, `loss`, `samples_per_s` and `peak_bytes` come from its last
    steps.

    Attributes:
        name: Name of the run.
        number: N of a run called run-N; None for other names.
        state: State of the run: "interrupted" if its process ended before the run was over; an
            active run of another process is always "running", even if it is paused.
        model: Class of the model.
        parameters: Number of parameters.
        engine_asked: Engine that the user asked for, such as "auto".
        engine_used: Engine that executed the model.
        fallback: Reason for a fallback to another engine.
        precision: Precision in the last settings.
        learning_rate: Learning rate in the last settings; the highest one of a loop's steps.
        workers: Number of workers.
        steps: Completed steps.
        loss: Training loss of the last step.
        not_finite: "nan", "inf" or "-inf" if that is the loss; "" otherwise.
        held_out_loss: Loss of the best evaluation on held-out data.
        held_out_accuracy: Accuracy of the same evaluation.
        held_out_metrics: The user's metrics of the same evaluation, in JSON; see `scores`.
        samples_per_s: Samples per second.
        tokens_per_s: Tokens per second.
        peak_bytes: Peak memory, as `ortlab.history.run_result.RunResult.peak_bytes`.
        created: Time of the start, in UTC and ISO 8601.
        wall_s: Duration.
        size_bytes: Size of all files in the folder.
        note: Last note.
        tags: Tags, separated by spaces.
        error: Error that ended the run, or failure that it was paused or stopped after.
        continues: Name of the run that this one continues.
        resumed: Where the run resumes from, such as "continues run-3 from step 40".
        checkpoints: Number of saved checkpoints.
        folder: Folder of the run.
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
    learning_rate: float
    workers: int
    steps: int
    loss: float
    not_finite: str
    held_out_loss: float
    held_out_accuracy: float
    held_out_metrics: str
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
    resumed: str
    checkpoints: int
    folder: Path

    @property
    def scores(self) -> dict[str, float]:
        """The user's metrics of the best evaluation, by name."""
        return dict(json.loads(self.held_out_metrics))

    @property
    def at_work(self) -> bool:
        """True if this or another process is training the run."""
        return self.state in AT_WORK

    @property
    def can_go_on(self) -> bool:
        """True if there is a checkpoint to resume from, its own or of the run that it continues."""
        return bool(self.checkpoints or self.continues)

    @property
    def resume(self) -> str:
        """Magic command that resumes the run."""
        return f"%ort resume {self.number or self.name}"

    def __str__(self) -> str:
        return f"{self.name}: {self.model} on {self.engine_used or self.engine_asked}, {self.state}"


def read_entry(path: Path, so_far: Mapping[str, Any] | None = None) -> RunEntry | None:
    """Read the summary of a run from its folder.

    Args:
        path: The folder.
        so_far: Current result of a run that this process is training, in the form of the result in
            run.json. With it neither the last steps nor the lock are read.

    Returns:
        The summary; None if the folder is not a run's, or has another format.
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
    asked = about.get("engine_asked") or settings.get("engine", "")
    asked = legible(stored.current_engine(asked, settings))
    used = about.get("engine_used") or settings.get("engine") or asked
    used = legible(stored.current_engine(used, settings))
    continues = legible(about.get("continues") or "")
    return RunEntry(
        name=path.name,
        number=numbered(path.name),
        state=state,
        model=legible(about.get("model", "")),
        parameters=_whole(about, "parameters"),
        engine_asked=asked,
        engine_used=used,
        fallback=legible(about.get("fallback_reason") or ""),
        precision=legible(about.get("precision") or settings.get("precision", "")),
        learning_rate=_number({**settings, **about}, "learning_rate"),
        workers=_whole(about, "workers") or _whole(settings, "workers") or 1,
        steps=_whole(result, "steps"),
        loss=_number(result, "final_loss"),
        not_finite=legible(result.get("not_finite") or ""),
        held_out_loss=_number(best, "loss"),
        held_out_accuracy=_number(best, "accuracy"),
        held_out_metrics=_metrics(best),
        samples_per_s=_number(result, "samples_per_s"),
        tokens_per_s=_number(result, "tokens_per_s"),
        peak_bytes=_number(result, "peak_bytes"),
        created=legible(about.get("created", "")),
        wall_s=_number(result, "wall_s"),
        size_bytes=size_of(path),
        note=said.notes[-1].text if said.notes else "",
        tags=" ".join(said.tags),
        error=legible(about.get("error") or ""),
        continues=continues,
        resumed=legible(about.get("resumed") or (continues and f"continues {continues}")),
        checkpoints=_kept(path),
        folder=path,
    )


def numbered(name: str) -> int | None:
    """Return the number in the name of a run, such as 3 for run-3.

    Args:
        name: Name of a run.

    Returns:
        The number; None for other names, and for numbers of more than 18 digits.
    """
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def stamp(path: Path) -> str:
    """Return a stamp that changes with the files that `read_entry` reads of a run that is over.

    Args:
        path: Folder of the run.
    """
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
    """Return the size of all files below a folder in bytes; links are not followed.

    Args:
        path: The folder.
    """
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
    """Return a substitute for the result of a run that has none, from its last steps."""
    try:
        rows = read_last(path / "metrics.jsonl")
        ranks = [read_last(each) for each in path.glob("rank-*.jsonl")]
    except OSError:
        return {}
    if not len(rows):
        return {}
    last = {name: float(rows[-1, place]) for name, place in INDEX.items()}
    step_s = float(rows[:, INDEX["step_ms"]].sum()) / 1e3
    return {
        "steps": last["step"],
        "wall_s": last["time_s"],
        "final_loss": last["loss"],
        "samples_per_s": float(rows[:, INDEX["samples"]].sum()) / step_s if step_s else NAN,
        "tokens_per_s": float(rows[:, INDEX["tokens"]].sum()) / step_s if step_s else NAN,
        "peak_bytes": peak_bytes(ranks or [rows]),
    }


def _whole(values: Mapping[str, Any], name: str) -> int:
    """Return an integer; 0 if it is unknown, not a number, or out of range."""
    value = _number(values, name)
    return int(value) if abs(value) < _MOST else 0


def _metrics(evaluation: Mapping[str, Any]) -> str:
    """Return the finite metrics of an evaluation in JSON."""
    found = evaluation.get("metrics")
    names = found if isinstance(found, Mapping) else {}
    values = {legible(str(name)): _number(names, name) for name in names}
    return json.dumps({name: value for name, value in values.items() if math.isfinite(value)})


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    with contextlib.suppress(OverflowError):  # JSON allows integers that do not fit into a float
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return NAN
