"""Messages to the browser about new data of a run; js/src/runview.js documents their format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortlab.metrics.evaluation import scores
from ortlab.metrics.recorder import COLUMNS, INDEX, merged
from ortlab.metrics.setting_changes import Change, changes
from ortlab.utils.wording import shortened

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Rows, Status, Watched


WIRE = [
    *(COLUMNS[INDEX[name]] for name in ("step", "time_s", "samples")),
    *(column for column in COLUMNS if column.chart),
]
"""X axes and columns of the charts, in the order of the bits of a message's mask."""


_WIRE_AT = [INDEX[column.name] for column in WIRE]


UPDATE_BYTES = 192
"""Maximum size of the new rows in an update; with Jupyter's headers, a message is below 1 KB."""


WHOLE_ROWS = 2000
"""Maximum number of rows of a whole series: two per pixel of a chart."""


CHANGE_LETTERS = 240
"""Maximum length of the text of a settings change; an update has at most one change."""


WHOLE_CHANGES = 200
"""Maximum number of settings changes in a whole series; the last ones are sent."""


MARKS = ("checkpoint", "pause")
"""Kinds of events that the charts mark, besides evaluations and changes of settings."""


WHOLE_MARKS = 200
"""Maximum number of marks in a whole series; the last ones are sent."""


MARK_LETTERS = 80
"""Maximum length of the text of a mark."""


FRESH_MARKS = 3
"""Maximum number of marks in an update."""


@dataclass(frozen=True)
class Update:
    """A message to the browser.

    Attributes:
        content: JSON part.
        rows: New rows as float32, row by row.
    """

    content: dict[str, Any]
    rows: bytes = b""


class Feed:
    """Source of update messages of a run, independent of their transport.

    Attributes:
        waiting: Whether rows were postponed because the last message had text.
        state: State of the run when it was last read; "" before.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._cursor = 0
        self._number = 0
        self._evaluated_s = -math.inf
        self._marked_s = -math.inf
        self._progress: object = None
        self._info: dict[str, Any] = {}
        self._changes: dict[int, list[Any]] = {}
        self._settled = 0
        self._limit = 8
        self.waiting = False
        self.state = ""

    def whole(self) -> Update:
        """Return a message with the whole series, which needs no earlier message."""
        recorder = self._watched.recorder
        # The cursor is read first, so that rows that arrive in between are sent twice instead of
        # never; the browser drops steps that it already has.
        _, self._cursor = recorder.since(recorder.count)
        rows = recorder.rows()
        self._evaluated_s = self._marked_s = -math.inf
        self._changes, self._settled = {}, 0
        changed = self._changed(None)
        self._changes = {change[0]: change for change in changed}
        status = self._status()
        marks = self._marks(WHOLE_MARKS)
        return self._update(rows, status, WHOLE_ROWS, changed[-WHOLE_CHANGES:], marks, whole=True)

    def fresh(self) -> Update | None:
        """Return a message with the data since the last call, or None if there is none."""
        rows, cursor = self._watched.recorder.since(self._cursor, limit=self._limit)
        status = self._status()
        changed = self._changed(2)[:1]
        marks = [] if changed else self._marks(FRESH_MARKS)
        words = bool(changed or marks) or _info(self._watched.title, status) != self._info
        if not words and not len(rows) and _progress(status) == self._progress:
            return None
        # Messages are small, so text postpones rows, but never twice in a row: otherwise, rows
        # would never be sent if every message had text.
        self.waiting = words and len(rows) > 1 and not self.waiting
        if self.waiting:
            rows = rows[:0]
        else:
            self._cursor = cursor
        self._changes |= {change[0]: change for change in changed}
        return self._update(rows, status, self._limit, changed, marks, whole=False)

    def _status(self) -> Status:
        status = self._watched.status()
        self.state = status.state
        return status

    def _update(
        self,
        rows: Rows,
        status: Status,
        limit: int,
        changes_: list[list[Any]],
        marks: list[list[Any]],
        *,
        whole: bool,
    ) -> Update:
        self._number += 1
        self._progress = _progress(status)
        content: dict[str, Any] = {
            "p": [
                self._number,
                status.state,
                status.step,
                status.total_steps,
                round(status.elapsed_s, 1),
                None if status.left_s is None else round(status.left_s, 1),
            ]
        }
        if whole:
            content["a"] = 1
        known = {} if whole else self._info
        self._info = _info(self._watched.title, status)
        if changed := {k: v for k, v in self._info.items() if k not in known or known[k] != v}:
            content["i"] = changed
        if changes_:
            content["c"] = changes_
        if marks:
            content["k"] = marks
        if not whole and (changed or changes_ or marks):
            limit = 1
        evaluations = [
            event
            for event in self._watched.recorder.events("eval")
            if event.time_s > self._evaluated_s
        ]
        if evaluations:
            self._evaluated_s = evaluations[-1].time_s
            content["e"] = [
                [event.step, _json(event.values["loss"]), scores(event)] for event in evaluations
            ]
        if not len(rows):
            return Update(content)
        thin = merged(rows, math.ceil(len(rows) / limit))
        thin = thin[:, _WIRE_AT].astype(np.float32)
        present = ~np.isnan(thin).all(axis=0)
        self._limit = max(1, UPDATE_BYTES // (4 * int(present.sum())))
        content["m"] = sum(1 << int(bit) for bit in np.flatnonzero(present))
        return Update(content, thin[:, present].tobytes())

    def _marks(self, most: int) -> list[list[Any]]:
        """Return the next `most` marks; of more than `WHOLE_MARKS`, only the last ones count."""
        events = self._watched.recorder.events(*MARKS)
        fresh = [event for event in events if event.time_s > self._marked_s][-WHOLE_MARKS:][:most]
        if fresh:
            self._marked_s = fresh[-1].time_s
        return [[event.kind, event.step, shortened(event.text, MARK_LETTERS)] for event in fresh]

    def _changed(self, most: int | None) -> list[list[Any]]:
        """Return those of the next `most` settings changes that the browser does not have yet."""
        found = changes(self._watched.recorder, known=self._settled, most=most)
        unknown = [one for one in map(_change, found) if self._changes.get(one[0]) != one]
        for change in found:  # final changes are not read again: a run can have many
            if not change.settled or self._changes.get(change.number) != _change(change):
                break
            self._settled = change.number
        return unknown


def _progress(status: Status) -> tuple[object, ...]:
    """Return the values whose change causes a message; in a paused run, time does not count."""
    if status.state == "paused":
        return status.state, status.step
    left_s = None if status.left_s is None else int(status.left_s)
    return status.state, status.step, int(status.elapsed_s), left_s


def _info(title: str, status: Status) -> dict[str, Any]:
    """Return the values that rarely change. The title can change, as it names the engine."""
    return {
        "title": title,
        "badges": list(status.badges),
        "lines": list(status.lines),
        "error": status.error,
        "advice": status.advice,
    }


def _change(change: Change) -> list[Any]:
    text = shortened(change.text, CHANGE_LETTERS)
    figures = (change.cost_s, *change.samples_per_s, *change.memory_bytes)
    return [change.number, change.step, text, *map(_json, figures)]


def _json(value: float) -> float | None:
    """Round to seven significant digits; None for NaN, which JSON does not have."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
