"""Start of a run that continues another one: its newest complete checkpoint, and its metrics."""

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
from ortlab.metrics.evaluation import Evaluation
from ortlab.metrics.recorder import INDEX, Event, Rows
from ortlab.settings import AUTO
from ortlab.training.checkpoint_writer import BEST, remove
from ortlab.utils.files import half_written

NAMES: Final = (
    "model",
    "train",
    "eval_dataset",
    "loss",
    "metrics",
    "callbacks",
    "optimizer",
    "lr_scheduler",
    "collate_fn",
)
"""Parts of a run that have names in the user's code."""
_STEP = re.compile(r"(?:last|step)-(\d+)")
_NEWS: Final = ("eval", "change", "checkpoint", "pause", "note", "warning")


@dataclass(frozen=True, eq=False)
class Beginning:
    """Checkpoint that a run resumes from, with its ``path`` and the last ``settings`` in effect.

    ``damaged`` says why it is not the newest checkpoint of the run; "" if it is.
    """

    checkpoint: Checkpoint
    path: Path
    settings: Mapping[str, Any]
    damaged: str = ""


@dataclass(frozen=True, eq=False)
class Earlier:
    """Run that another one continues: its metrics up to the checkpoint, and its history."""

    name: str
    line: tuple[Path, ...]
    """Folder of the run, and those of the runs that it continued."""
    step: int
    rows: Rows
    events: tuple[Event, ...]
    told: tuple[tuple[str, str], ...]
    """Kinds and texts of events that describe the start of the new run."""

    @property
    def time_s(self) -> float:
        """Training time at the checkpoint, in seconds; 0 if unknown."""
        times = self.rows[-1:, INDEX["time_s"]]
        return float(times[0]) if len(times) and math.isfinite(times[0]) else 0.0

    @property
    def evaluated(self) -> bool:
        """True if the run was evaluated."""
        return any(event.kind == "eval" for event in self.events)

    def saying(self, warning: str) -> Earlier:
        """Return a copy with a warning.

        Args:
            warning: Text of the warning.

        Returns:
            The copy.
        """
        return dataclasses.replace(self, told=(*self.told, ("warning", warning)))

    def carry_best(self, folder: RunFolder) -> Evaluation | None:
        """Copy the best checkpoint to another run's folder.

        Args:
            folder: Folder of the new run.

        Returns:
            The evaluation of the checkpoint, or None if there is no complete one, or its step is to
            be done again.
        """
        for each in (each for run in self.line for each in StoredRun(RunFolder(run)).checkpoints):
            if each.name != BEST:
                continue
            with contextlib.suppress(ValueError, RuntimeError):  # damaged, or the disk is full
                best = Checkpoint.load(each.path)
                if best.position.step <= self.step:
                    best.save(folder.checkpoint_path(BEST))
                    return self._evaluation(best.position.step)
        return None

    def _evaluation(self, step: int) -> Evaluation | None:
        for each in self.events:
            if each.kind == "eval" and each.step == step:
                return Evaluation.of(step, each.values)
        return None


def beginning(resume_from: str | int | Path | StoredRun) -> Beginning:
    """Return the checkpoint that ``resume_from`` stands for.

    Args:
        resume_from: A run, its name or number, or its folder, for its newest complete checkpoint;
            or a checkpoint's file, or its folder for one of several workers.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If there is no checkpoint, or none is complete.
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


def origin(begin: Beginning | Checkpoint, earlier: Earlier | None = None) -> str:
    """Return where a run resumes from, such as "continues run-3 from step 40".

    Args:
        begin: The checkpoint.
        earlier: The run that is continued, if it is known.
    """
    if isinstance(begin, Checkpoint):
        return f"resumed from a checkpoint at step {begin.position.step:,}"
    folder = begin.path.absolute().parent.parent
    stored = (folder / "run.json").is_file()  # not a copy of the checkpoint elsewhere
    name = earlier.name if earlier else folder.name if stored else begin.path.name
    return f"continues {name} from step {begin.checkpoint.position.step:,}"


def chosen_by_auto(begin: Beginning) -> str:
    """Return the name of a checkpoint's run if "auto" chose its engine; "" if the user named it.

    Args:
        begin: The checkpoint.
    """
    entry = read_entry(begin.path.absolute().parent.parent)
    if entry is None or entry.engine_asked != AUTO:
        return ""
    began_with = StoredRun(RunFolder(entry.folder)).began_with
    return entry.name if began_with.get("engine") == begin.settings.get("engine") else ""


def newest(folder: Path) -> Beginning:
    """Return the newest complete checkpoint of a run; that of its best evaluation comes last.

    For a run that ended before its first checkpoint, the checkpoints of the run that it continued
    count.

    Args:
        folder: Folder of the run.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If there is no checkpoint, or none is complete.
    """
    line = _line(folder)
    found = [path for run in line for path in _kept(run)]
    if not found:
        if (kept := folder / "checkpoints").is_symlink():
            raise ValueError(
                f"{kept} is a symbolic link, which is not followed; pass resume_from the path of a "
                "checkpoint in its target"
            )
        before = f", and neither has {line[1].name}, which it continued" if line[1:] else ""
        raise ValueError(
            f"{folder.name} has no checkpoint{before}: it ended before the first one; use "
            "save_steps=N or checkpoint_minutes=M to save more of them"
        )
    found.sort(key=lambda path: _age(path)[0] < 0)  # the best of all runs after all others
    wrong: list[str] = []
    for path in found:
        called = _called(path, folder)
        try:
            taken = Checkpoint.load(path)
        except ValueError as error:
            wrong.append(f"{called} cannot be used ({_short(error, path)})")
            continue
        own = path.parent.parent == folder
        settings = taken.settings if own else StoredRun(RunFolder(folder)).began_with
        used, told = f"{called} of step {taken.position.step}", ""
        if wrong:
            told = f"{'; '.join(wrong)}: {used}, the one before, is used"
        elif not own:
            told = f"{folder.name} has no checkpoint of its own: {used} is used"
        return Beginning(taken, path, settings, told)
    raise ValueError(f"no checkpoint of {folder.name} is complete: {'; '.join(wrong)}")


def _line(folder: Path) -> tuple[Path, ...]:
    """Return the folder of a run, of the run that it continued, and so on."""
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
    """Return a checkpoint's name, with its run if that is not the one in `folder`."""
    run = path.parent.parent
    return path.name if run == folder else f"{run.name}'s {path.name}"


def _short(error: ValueError, path: Path) -> str:
    """Return the reason of an error, without the path and the advice."""
    return str(error).removeprefix(f"{path} ").removeprefix("is ").partition(";")[0]


def _age(path: Path) -> tuple[float, str]:
    """Return a key that sorts by step: the final checkpoint is the newest, the best one unknown."""
    name = path.name.removesuffix(".safetensors")
    match = _STEP.fullmatch(name)
    return (int(match[1]) if match else math.inf if name == "final" else -1.0), name


def earlier(run: SavedRun, begin: Beginning) -> Earlier:
    """Return the part of a run that a new run includes.

    Args:
        run: The run.
        begin: Checkpoint of `run` that the new run resumes from.

    Returns:
        The metrics and events up to the checkpoint.
    """
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
    lost = f", which had reached step {came}," if came > position.step else ""
    called = _called(begin.path, run.folder)
    told = (("note", f"continues {run.name}{lost} from {called} of step {position.step}"),)
    rows = metrics.rows[steps <= position.step]
    return Earlier(run.name, _line(run.folder), position.step, rows, tuple(events), told)


def resumable(name: str | int) -> SavedRun:
    """Return a run of the history that can be continued.

    Args:
        name: Name or number of the run.

    Returns:
        The run.

    Raises:
        ValueError: If the run trains in another kernel, has finished, or is not one of finetune.
    """
    run = SavedRun(find(name).folder)
    if run.entry.at_work:
        raise ValueError(f"{run.name} is training in another kernel: stop it there, then resume it")
    if (run.folder / "trainer.json").exists():
        raise ValueError(
            f"{run.name} is not a run of finetune: a Trainer resumes from its own checkpoints, and "
            f"a loop of your own by ortlab.track(model, optimizer=..., resume_from={run.name!r})"
        )
    if run.state == "finished":
        raise ValueError(
            f"{run.name} finished after {run.entry.steps} steps: nothing is left to do; use "
            f"finetune(model, data, resume_from={run.name!r}, num_train_epochs=...) to train more"
        )
    return run


def clear(run: SavedRun) -> None:
    """Delete the incomplete checkpoint of a process that ended in the middle of a write.

    Args:
        run: The run.
    """
    for path in in_checkpoints(run.folder):
        if half_written(path) and not path.is_symlink():
            remove(path)


def names_of(run: SavedRun) -> dict[str, str]:
    """Return the user's names of the model, the data and the rest of a run.

    Args:
        run: The run.

    Returns:
        Known names, by the entries of `NAMES`.
    """
    kept = run.about.get("names")
    kept = kept if isinstance(kept, dict) else {}
    kept = {"eval_dataset": kept.get("eval_data"), **kept}  # its former name
    return {each: kept[each] for each in NAMES if isinstance(kept.get(each), str) and kept[each]}


def found_by_name(
    run: SavedRun, given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """Complete the arguments of a resumed run from the user's variables.

    Args:
        run: The run.
        given: Arguments, by the entries of `NAMES`; None for those to look up.
        namespace: The user's variables.

    Returns:
        `given`, with the variables that have the names of the run in place of None.

    Raises:
        ValueError: If variables are missing; the message names all of them.
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
            missing.append(f"{_CALLED[each]}, whose name is unknown")
    if missing:
        raise ValueError(
            f"{run.name} cannot continue without {' and '.join(missing)}: run the cells that "
            f"create them, or pass others, as in %ort resume {run.name} MODEL DATA, or "
            f"ortlab.resume({run.name!r}, model, data)"
        )
    return found


_CALLED: Final = {
    "model": "the model",
    "train": "its data",
    "eval_dataset": "its evaluation data",
    "loss": "its loss",
    "metrics": "its metrics",
    "callbacks": "its callbacks",
    "optimizer": "its optimizer",
    "lr_scheduler": "its lr_scheduler",
    "collate_fn": "its collate_fn",
}
