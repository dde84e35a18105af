"""Stored run of the history: its metrics, charts, notes and checkpoints."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

from ortlab.history import sqlite_index
from ortlab.history.entry import RunEntry, read_entry
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import Metrics, RunFolder, read_metrics, runs_root
from ortlab.metrics.evaluation import Evaluation, told_last
from ortlab.metrics.rank_metrics import Rank, table, trained_under
from ortlab.metrics.recorder import Event, Recorder, Status
from ortlab.metrics.told_events import told_failed, told_warnings
from ortlab.settings import FinetuneSettings, unknown_name
from ortlab.utils.tables import Table


class SavedRun(StoredRun):
    """Run that is read from its folder; a notebook shows its charts.

    For a run that another process is training, or that was interrupted, it contains the data on
    disk.

    Args:
        path: Folder of the run.

    Raises:
        ValueError: `path` is not a run's folder.
    """

    interactive = False

    def __init__(self, path: Path) -> None:
        super().__init__(RunFolder(path))
        entry = read_entry(path)
        if entry is None:
            raise ValueError(f"{str(path)!r} is not the folder of a run; %ort runs lists the runs")
        self.entry: RunEntry = entry
        """Summary of the run, as in `ortlab.list_runs`."""

    def __repr__(self) -> str:
        return f"<SavedRun {self.entry}, {self.entry.steps} steps>"

    @property
    def title(self) -> str:
        """Title above the charts."""
        return f"{self.name}: {self.entry.model} on {self.entry.engine_used}"

    @property
    def state(self) -> str:
        """Final state, "interrupted" if its process ended early, or "running" in another."""
        return self.entry.state

    @property
    def error(self) -> str | None:
        """Error that ended the run, or failure that it was paused or stopped after, with its cause.

        None without one.
        """
        return self.entry.error or None

    @property
    def settings(self) -> FinetuneSettings:
        """Initial settings of the run.

        Raises:
            ValueError: Another version of ortlab with different settings wrote them. ``began_with``
                has the settings of any version, by name.
        """
        return FinetuneSettings.of(self.began_with)

    @functools.cached_property
    def metrics(self) -> Metrics:
        """All steps, unmerged, and all events; read once and cached."""
        try:
            return self._folder.read_metrics()
        except FileNotFoundError:
            return Metrics(Recorder().rows(), ())

    @functools.cached_property
    def recorder(self) -> Recorder:
        """Recorder with the metrics for the charts."""
        recorder = Recorder()
        recorder.restore(self.metrics.rows, self.metrics.events)
        # Ranks are numbered without gaps; files after a missing one are ignored.
        for rank in itertools.count():
            try:
                of_rank = read_metrics(self.folder / f"rank-{rank}.jsonl")
            except FileNotFoundError:
                return recorder
            recorder.rank(rank).restore(of_rank.rows, of_rank.events)
        return recorder

    @property
    def current_settings(self) -> FinetuneSettings | None:
        """Initial settings, which apply to its ranks; None if this version cannot read them."""
        try:
            return self.settings
        except ValueError:
            return None

    @property
    def ranks(self) -> Table[Rank]:
        """Metrics of the ranks at their last steps, as a table."""
        return table(self.recorder, trained_under(self))

    def status(self) -> Status:
        """Return the status of the run; an interrupted run has the state "failed"."""
        entry = self.entry
        badges = [f"fallback to {entry.engine_used}: {entry.fallback}"] if entry.fallback else []
        if entry.state in ("interrupted", "running"):
            told = "its process ended before the run was over"
            if entry.can_go_on:
                told += f"; {entry.resume} continues from its checkpoint"
            badges.append(f"interrupted: {told}" if entry.state == "interrupted" else _ELSEWHERE)
        badges += told_failed(self._events("metric_failed"))
        resumed = [entry.resumed] if entry.resumed else []
        notes = [f"note: {note.text}" for note in self.notes]
        return Status(
            state=_STATES.get(entry.state, "failed"),
            step=entry.steps,
            total_steps=None,
            elapsed_s=entry.wall_s if entry.wall_s == entry.wall_s else 0.0,
            left_s=None,
            badges=tuple(badges),
            lines=(
                *resumed,
                *self._evaluated(),
                *self._told("early_stop"),
                *self._told("skipped_data"),
                *self._told("not_finite"),
                *told_warnings(self._events("warning"), badges),
                *notes,
            ),
            error=self.error,
        )

    def _evaluated(self) -> list[str]:
        last = self._events("eval")[-1:]
        return [told_last(Evaluation.of(each.step, each.values)) for each in last]

    def _told(self, kind: str) -> list[str]:
        """Return the text of the last event of a kind; empty if there is none."""
        return [event.text for event in self._events(kind)[-1:]]

    def _events(self, kind: str) -> list[Event]:
        return [event for event in self.metrics.events if event.kind == kind]

    def pause(self) -> None:
        """Do nothing: only the process that trains the run can pause it."""

    def resume(self) -> None:
        """Do nothing: only the process that trains the run can resume it."""

    def stop(self) -> None:
        """Do nothing: only the process that trains the run can stop it."""

    def over(self) -> bool:
        """Return True: a stored run records nothing more."""
        return True

    def wait_over(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Return True immediately.

        Args:
            timeout: Ignored.
        """
        return True


_ELSEWHERE = "training in another kernel: this is the data on disk so far"
_STATES: dict[str, Any] = {"finished": "finished", "stopped": "stopped", "running": "running"}


def run_name(given: str | int) -> str:
    """Return the name of a run that the user gave by name or number.

    Args:
        given: Name, or a number such as 3 for run-3.
    """
    return f"run-{int(given)}" if str(given).strip().isdecimal() else str(given)


def find(name: str | int, root: Path | None = None) -> RunEntry:
    """Find a run by name or number.

    Args:
        name: Name, or a number such as 3 for run-3.
        root: Folder of the runs; None is `ortlab.history.run_folder.runs_root`.

    Raises:
        ValueError: There is no such run; the message suggests the nearest name.
    """
    found = {entry.name: entry for entry in sqlite_index.entries(root)}
    wanted = run_name(name)
    if wanted not in found:
        if not found:
            raise ValueError(f"there is no run in {root or runs_root()} yet")
        newest = list(found)[-8:]
        raise ValueError(f"no run is called {wanted!r}: {_offer(wanted, found, newest)}")
    return found[wanted]


def _offer(wanted: str, found: dict[str, RunEntry], newest: list[str]) -> str:
    """Return suggestions for a name; of a long history only the newest runs are listed."""
    near = unknown_name(wanted, found, lists="%ort runs")
    return near if len(found) <= len(newest) else f"the newest are {', '.join(newest)}; {near}"
