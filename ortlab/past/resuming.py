"""What a run of the history goes on from: its newest checkpoint that is whole, and its numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ortlab.checkpoint import Checkpoint
from ortlab.history import RunFolder
from ortlab.keeping import BEST
from ortlab.loop import Evaluation
from ortlab.past.kept import Kept
from ortlab.past.opened import PastRun, find
from ortlab.telemetry import INDEX, NAN, Event, Rows

NAMES: Final = ("model", "train", "eval_data", "loss")
"""What of a run has names of the user's."""
_STEP = re.compile(r"(?:last|step)-(\d+)")
_NEWS: Final = ("eval", "change", "note", "warning")


@dataclass(frozen=True, eq=False)
class Beginning:
    """A checkpoint of a run, with its ``path``; ``damaged`` says which newer ones are no use."""

    checkpoint: Checkpoint
    path: Path
    damaged: str = ""


@dataclass(frozen=True, eq=False)
class Earlier:
    """A run that another one goes on with: its numbers up to the checkpoint, and how it stood."""

    name: str
    folder: Path
    step: int
    rows: Rows
    events: tuple[Event, ...]
    told: tuple[tuple[str, str], ...]
    """What is to be said of it, as the kinds and texts of events."""

    @property
    def time_s(self) -> float:
        """How long it had trained at the checkpoint; 0 where that is not known."""
        times = self.rows[-1:, INDEX["time_s"]]
        return float(times[0]) if len(times) and math.isfinite(times[0]) else 0.0

    @property
    def evaluated(self) -> bool:
        """Whether it was evaluated."""
        return any(event.kind == "eval" for event in self.events)

    def saying(self, warning: str) -> Earlier:
        """The same, with a warning."""
        return dataclasses.replace(self, told=(*self.told, ("warning", warning)))

    def carry_best(self, folder: RunFolder) -> Evaluation | None:
        """Takes its best checkpoint along to `folder`, and says of what evaluation it is.

        None where it has none that is whole, or one of a step that is to be done again.
        """
        try:
            best = Checkpoint.load(_file(self.folder, BEST))
            if best.position.step > self.step:
                return None
            best.save(folder.checkpoint_path(BEST))
        except (ValueError, RuntimeError):  # there is none, or no room for another
            return None
        for each in self.events:
            if each.kind == "eval" and each.step == best.position.step:
                values = each.values
                return Evaluation(each.step, values.get("loss", NAN), values.get("accuracy", NAN))
        return None


def beginning(resume_from: str | int | Path | Kept) -> Beginning:
    """The checkpoint that ``resume_from`` means: of a run the newest that is whole.

    A run is given by itself, its name or number, or its folder; a file, or the folder of a
    checkpoint of workers, is that one. ValueError where there is none, or none is whole.
    """
    if isinstance(resume_from, Kept):
        return newest(resume_from.folder)
    path = Path(str(resume_from))
    if not path.exists() and not isinstance(resume_from, Path):
        with contextlib.suppress(ValueError):
            path = find(resume_from).folder
    if (path / "checkpoints").is_dir():
        return newest(path)
    return Beginning(Checkpoint.load(path), path)


def newest(folder: Path) -> Beginning:
    """The newest checkpoint of the run in `folder` that is whole; that of its best evaluation last.

    ValueError where none is.
    """
    found = [each.path for each in Kept(RunFolder(folder)).checkpoints]
    if not found:
        raise ValueError(
            f"{folder.name} has kept no checkpoint: it had not come to the first one; "
            "checkpoint_every=N or checkpoint_minutes=M keep more of them"
        )
    wrong: list[str] = []
    for path in sorted(found, key=_age, reverse=True):
        try:
            taken = Checkpoint.load(path)
        except ValueError as error:
            wrong.append(f"{path.name} is no use ({_short(error, path)})")
            continue
        if not wrong:
            return Beginning(taken, path)
        step = taken.position.step
        told = f"{'; '.join(wrong)}: {path.name} of step {step}, the one before, is used"
        return Beginning(taken, path, told)
    raise ValueError(f"no checkpoint of {folder.name} is whole: {'; '.join(wrong)}")


def _short(error: ValueError, path: Path) -> str:
    """What is wrong, without the path and without what to do."""
    return str(error).removeprefix(f"{path} ").removeprefix("is ").partition(";")[0]


def _age(path: Path) -> tuple[float, str]:
    """By step, as the names tell it: the end is the newest, the best one may be of any step."""
    name = path.name.removesuffix(".safetensors")
    match = _STEP.fullmatch(name)
    return (int(match[1]) if match else math.inf if name == "final" else -1.0), name


def _file(folder: Path, name: str) -> Path:
    file = RunFolder(folder).checkpoint_path(name)
    return file if file.exists() else file.with_suffix("")


def earlier(run: PastRun, begin: Beginning) -> Earlier:
    """What another run, which goes on from `begin`, has of `run`."""
    position = begin.checkpoint.position
    metrics = run.metrics
    steps = metrics.rows[:, INDEX["step"]]
    events = [
        event
        for event in metrics.events
        if event.kind in _NEWS
        and event.step <= (position.evaluated if event.kind == "eval" else position.step)
    ]
    came = int(steps.max(initial=0))
    lost = f", which had come to step {came}" if came > position.step else ""
    told = f"goes on with {run.name}{lost}, from {begin.path.name} of step {position.step}"
    rows = metrics.rows[steps <= position.step]
    return Earlier(run.name, run.folder, position.step, rows, tuple(events), (("note", told),))


def resumable(name: str | int) -> PastRun:
    """The run of the history that is to go on; ValueError says why one cannot."""
    run = PastRun(find(name).folder)
    if run.entry.at_work:
        raise ValueError(
            f"{run.name} is in training in another kernel: stop it there, and resume it then"
        )
    if run.state == "finished":
        raise ValueError(
            f"{run.name} finished after {run.entry.steps} steps: nothing is left of it; "
            f"finetune(model, data, resume_from={run.name!r}, epochs=...) trains on"
        )
    return run


def left_behind(run: PastRun) -> list[Path]:
    """Files of checkpoints that a process was writing when it died; nobody else will."""
    return [path for path in (run.folder / "checkpoints").glob(".*") if not path.is_symlink()]


def names_of(run: PastRun) -> dict[str, str]:
    """What the user called model, data and loss of `run`, by `NAMES`; those that are known."""
    kept = run.about.get("names")
    kept = kept if isinstance(kept, dict) else {}
    return {each: kept[each] for each in NAMES if isinstance(kept.get(each), str) and kept[each]}


def found_by_name(
    run: PastRun, given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """`given`, and in the place of each that is None what the user calls as it was called.

    ValueError names all that are not there.
    """
    known = names_of(run)
    found, missing = dict(given), []
    for each in NAMES:
        if found.get(each) is not None:
            continue
        name = known.get(each)
        if name is not None and name in namespace:
            found[each] = namespace[name]
        elif name is not None:
            missing.append(f"{name} ({_CALLED[each]})")
        elif each in ("model", "train"):
            missing.append(f"{_CALLED[each]}, whose name is not known")
    if missing:
        raise ValueError(
            f"{run.name} cannot go on without {' and '.join(missing)}: run the cells that make "
            f"them, or name others, as in %ort resume {run.name} MODEL DATA, or "
            f"ortlab.resume({run.name!r}, model, data)"
        )
    return found


_CALLED: Final = {
    "model": "the model",
    "train": "its data",
    "eval_data": "the data it is evaluated on",
    "loss": "its loss",
}
