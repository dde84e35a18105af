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

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history.entry import read_entry
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import RunFolder, in_checkpoints
from ortlab.history.saved_run import SavedRun, find
from ortlab.metrics.recorder import INDEX, NAN, Event, Rows
from ortlab.training.checkpoint_writer import BEST, remove
from ortlab.training.evaluator import Evaluation
from ortlab.utils.files import half_written

NAMES: Final = ("model", "train", "eval_data", "loss")
"""What of a run has names of the user's."""
_STEP = re.compile(r"(?:last|step)-(\d+)")
_NEWS: Final = ("eval", "change", "note", "warning")


@dataclass(frozen=True, eq=False)
class Beginning:
    """A checkpoint that a run goes on from, with its ``path`` and the ``settings`` that held last.

    ``damaged`` says where it is not the newest that the run should have, and why.
    """

    checkpoint: Checkpoint
    path: Path
    settings: Mapping[str, Any]
    damaged: str = ""


@dataclass(frozen=True, eq=False)
class Earlier:
    """A run that another one goes on with: its numbers up to the checkpoint, and how it stood."""

    name: str
    line: tuple[Path, ...]
    """Its folder, and those of the runs that it went on with."""
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

        None where it has none that is whole, or those of steps that are to be done again.
        """
        for each in (each for run in self.line for each in StoredRun(RunFolder(run)).checkpoints):
            if each.name != BEST:
                continue
            with contextlib.suppress(ValueError, RuntimeError):  # damaged, or there is no room
                best = Checkpoint.load(each.path)
                if best.position.step <= self.step:
                    best.save(folder.checkpoint_path(BEST))
                    return self._evaluation(best.position.step)
        return None

    def _evaluation(self, step: int) -> Evaluation | None:
        for each in self.events:
            if each.kind == "eval" and each.step == step:
                values = each.values
                return Evaluation(step, values.get("loss", NAN), values.get("accuracy", NAN))
        return None


def beginning(resume_from: str | int | Path | StoredRun) -> Beginning:
    """The checkpoint that ``resume_from`` means: of a run the newest that is whole.

    A run is given by itself, its name or number, or its folder; a file, or the folder of a
    checkpoint of workers, is that one. ValueError where there is none, or none is whole.
    """
    if isinstance(resume_from, StoredRun):
        return newest(resume_from.folder)
    path = Path(str(resume_from))
    if not path.exists() and not isinstance(resume_from, Path):
        with contextlib.suppress(ValueError):
            path = find(resume_from).folder
    if (path / "checkpoints").is_dir():
        return newest(path)
    taken = Checkpoint.load(path)
    return Beginning(taken, path, taken.settings)


def newest(folder: Path) -> Beginning:
    """The newest checkpoint of the run in `folder` that is whole; that of its best evaluation last.

    A run that died before its first one has those of the run that it went on with. ValueError
    where none is.
    """
    line = _line(folder)
    found = [path for run in line for path in _kept(run)]
    if not found:
        if (kept := folder / "checkpoints").is_symlink():
            raise ValueError(
                f"{kept} is a link, which is not followed; resume_from takes the path of a "
                "checkpoint where it leads"
            )
        before = f", nor is one left of {line[1].name}, which it went on with" if line[1:] else ""
        raise ValueError(
            f"{folder.name} has kept no checkpoint{before}: it had not come to the first one; "
            "checkpoint_every=N or checkpoint_minutes=M keep more of them"
        )
    found.sort(key=lambda path: _age(path)[0] < 0)  # the best of all runs after all others
    wrong: list[str] = []
    for path in found:
        called = _called(path, folder)
        try:
            taken = Checkpoint.load(path)
        except ValueError as error:
            wrong.append(f"{called} is no use ({_short(error, path)})")
            continue
        own = path.parent.parent == folder
        settings = taken.settings if own else StoredRun(RunFolder(folder)).began_with
        used, told = f"{called} of step {taken.position.step}", ""
        if wrong:
            told = f"{'; '.join(wrong)}: {used}, the one before, is used"
        elif not own:
            told = f"{folder.name} had come to no checkpoint of its own: {used} is used"
        return Beginning(taken, path, settings, told)
    raise ValueError(f"no checkpoint of {folder.name} is whole: {'; '.join(wrong)}")


def _line(folder: Path) -> tuple[Path, ...]:
    """The run in `folder`, the one that it went on with, the one that this went on with, ..."""
    line = [folder]
    while (entry := read_entry(line[-1])) is not None and entry.continues:
        before = folder.parent / Path(entry.continues).name
        if before in line:
            break
        line.append(before)
    return tuple(line)


def _kept(folder: Path) -> list[Path]:
    found = [each.path for each in StoredRun(RunFolder(folder)).checkpoints]
    return sorted(found, key=_age, reverse=True)


def _called(path: Path, folder: Path) -> str:
    """A checkpoint's name, and whose it is where that is not the run in `folder`."""
    run = path.parent.parent
    return path.name if run == folder else f"{run.name}'s {path.name}"


def _short(error: ValueError, path: Path) -> str:
    """What is wrong, without the path and without what to do."""
    return str(error).removeprefix(f"{path} ").removeprefix("is ").partition(";")[0]


def _age(path: Path) -> tuple[float, str]:
    """By step, as the names tell it: the end is the newest, the best one may be of any step."""
    name = path.name.removesuffix(".safetensors")
    match = _STEP.fullmatch(name)
    return (int(match[1]) if match else math.inf if name == "final" else -1.0), name


def earlier(run: SavedRun, begin: Beginning) -> Earlier:
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
    called = _called(begin.path, run.folder)
    told = (("note", f"goes on with {run.name}{lost}, from {called} of step {position.step}"),)
    rows = metrics.rows[steps <= position.step]
    return Earlier(run.name, _line(run.folder), position.step, rows, tuple(events), told)


def resumable(name: str | int) -> SavedRun:
    """The run of the history that is to go on; ValueError says why one cannot."""
    run = SavedRun(find(name).folder)
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


def clear(run: SavedRun) -> None:
    """Takes away the checkpoint that a process was writing when it died; nobody else will."""
    for path in in_checkpoints(run.folder):
        if half_written(path) and not path.is_symlink():
            remove(path)


def names_of(run: SavedRun) -> dict[str, str]:
    """What the user called model, data and loss of `run`, by `NAMES`; those that are known."""
    kept = run.about.get("names")
    kept = kept if isinstance(kept, dict) else {}
    return {each: kept[each] for each in NAMES if isinstance(kept.get(each), str) and kept[each]}


def found_by_name(
    run: SavedRun, given: Mapping[str, Any], namespace: Mapping[str, Any]
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
