"""A run of the history, opened again from its folder: numbers, charts, notes, checkpoints."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

from ortlab.history import sqlite_index
from ortlab.history.entry import RunEntry, read_entry
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import Metrics, RunFolder, read_metrics, runs_root
from ortlab.metrics.rank_metrics import Rank, table, trained_under
from ortlab.metrics.recorder import NAN, Recorder, Status
from ortlab.settings import FinetuneSettings, unknown_name
from ortlab.utils.tables import Table


class SavedRun(StoredRun):
    """A run as its folder tells it; a notebook shows its charts.

    Of a run that another process trains, or that was interrupted, it has what is on the disk by
    now. ValueError where `path` is no run's folder.
    """

    interactive = False

    def __init__(self, path: Path) -> None:
        super().__init__(RunFolder(path))
        entry = read_entry(path)
        if entry is None:
            raise ValueError(
                f"{str(path)!r} is no folder of a run; %ort runs lists those there are"
            )
        self.entry: RunEntry = entry
        """The run in one line, as `ortlab.list_runs` has it."""

    def __repr__(self) -> str:
        return f"<SavedRun {self.entry}, {self.entry.steps} steps>"

    @property
    def title(self) -> str:
        """What stands above the charts."""
        return f"{self.name}: {self.entry.model} on {self.entry.engine_used}"

    @property
    def state(self) -> str:
        """Where it ended, "interrupted" with its process, or "running" in another."""
        return self.entry.state

    @property
    def error(self) -> str | None:
        """What a run that failed has raised, in its words."""
        return self.entry.error or None

    @property
    def settings(self) -> FinetuneSettings:
        """The settings that it began with; ValueError where this version has others.

        ``began_with`` are those of any version, by name.
        """
        return FinetuneSettings.of(self.began_with)

    @property
    def result(self) -> dict[str, Any]:
        """What it gave, by name, as `runs.RunResult` has it; empty where it came to no end."""
        result: dict[str, Any] = self._folder.read_json("run").get("result") or {}
        return result

    @functools.cached_property
    def metrics(self) -> Metrics:
        """All steps, none merged, and all events; read once."""
        try:
            return self._folder.read_metrics()
        except FileNotFoundError:
            return Metrics(Recorder().rows(), ())

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The numbers as the charts have them."""
        recorder = Recorder()
        recorder.restore(self.metrics.rows, self.metrics.events)
        # They come in order; those behind one that is missing belong to nobody who is known.
        for rank in itertools.count():
            try:
                of_rank = read_metrics(self.folder / f"rank-{rank}.jsonl")
            except FileNotFoundError:
                return recorder
            recorder.rank(rank).restore(of_rank.rows, of_rank.events)
        return recorder

    @property
    def current_settings(self) -> FinetuneSettings | None:
        """Those that it began with, where this version has them: what its ranks trained under."""
        try:
            return self.settings
        except ValueError:
            return None

    @property
    def ranks(self) -> Table[Rank]:
        """How the ranks stood at last."""
        return table(self.recorder, trained_under(self))

    def status(self) -> Status:
        """See `telemetry.Watched.status`; an interrupted run is told as one that failed."""
        entry = self.entry
        badges = [f"fallback to {entry.engine_used}: {entry.fallback}"] if entry.fallback else []
        if entry.state in ("interrupted", "running"):
            told = "its process ended before the run was over"
            if entry.can_go_on:
                told += f"; {entry.resume} goes on from its checkpoint"
            badges.append(f"interrupted: {told}" if entry.state == "interrupted" else _ELSEWHERE)
        notes = [f"note: {note.text}" for note in self.notes]
        return Status(
            state=_STATES.get(entry.state, "failed"),
            step=entry.steps,
            total_steps=None,
            elapsed_s=entry.wall_s if entry.wall_s == entry.wall_s else 0.0,
            left_s=None,
            badges=tuple(badges),
            lines=(*self._held_out(), *notes),
            error=self.error,
        )

    def _held_out(self) -> tuple[str, ...]:
        evaluations = [event for event in self.metrics.events if event.kind == "eval"]
        if not evaluations:
            return ()
        last = evaluations[-1]
        accuracy = last.values.get("accuracy", NAN)
        hits = f", accuracy {accuracy:.3f}" if accuracy == accuracy else ""
        return (f"held out at step {last.step}: loss {last.values.get('loss', NAN):.4g}{hits}",)

    def pause(self) -> None:
        """Nothing: whoever trains it, if anybody does, is another process."""

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def stop(self) -> None:
        """Nothing, as `pause`."""

    def over(self) -> bool:
        """True: nothing more comes of what was read."""
        return True

    def wait_over(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """True, at once."""
        return True


_ELSEWHERE = "in training in another kernel: what is on the disk by now"
_STATES: dict[str, Any] = {"finished": "finished", "stopped": "stopped", "running": "running"}


def run_name(given: str | int) -> str:
    """A run's name as it was typed, "run-3" of 3."""
    return f"run-{int(given)}" if str(given).strip().isdecimal() else str(given)


def find(name: str | int, root: Path | None = None) -> RunEntry:
    """The run of that name, or number; ValueError offers the nearest."""
    found = {entry.name: entry for entry in sqlite_index.entries(root)}
    wanted = run_name(name)
    if wanted not in found:
        if not found:
            raise ValueError(f"no run is kept in {root or runs_root()} yet")
        newest = list(found)[-8:]
        raise ValueError(f"no run is called {wanted!r}: {_offer(wanted, found, newest)}")
    return found[wanted]


def _offer(wanted: str, found: dict[str, RunEntry], newest: list[str]) -> str:
    """What may have been meant; of a long history the newest are listed."""
    if len(found) <= len(newest):
        return unknown_name(wanted, found)
    near = unknown_name(wanted, found).partition("; ")[2]
    return f"the newest are {', '.join(newest)}" + (f"; {near}" if near else "")
