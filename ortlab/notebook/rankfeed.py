"""The ranks of a run as the browser is told of them: what, how small, and how often.

Every message has all that there is to show, so that a lost one matters for a second alone and a
page that is opened late needs nothing else. The browser's side is js/src/ranks.js.
"""

from __future__ import annotations

import base64
import math
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ortlab import ranks

if TYPE_CHECKING:
    from ortlab.ranks import Rank, Values
    from ortlab.telemetry import Watched

PERIOD_S: Final = 1.0
"""Between two messages of few ranks."""
RANKS_A_SECOND: Final = 8
"""More of them are told of less often: so no more bytes a second."""
SHARE: Final = 0.002
"""Of a core, that the messages may take: dearer ones come less often."""
POINTS: Final = 48
POINTS_OF_ALL: Final = 256
FEWEST_POINTS: Final = 16
"""Of a line: few in one of many."""
LEVELS: Final = 254
"""Heights of a line; 0 is a gap, and 1 the lowest."""


class RankFeed:
    """What is new of the ranks of what is watched: values for the view's traits."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._due = -math.inf
        self._sent: dict[str, Any] = {}

    def news(self, *, now: bool = False) -> dict[str, Any]:
        """``ranks`` and ``rank_notes`` where they changed and are due, or asked for `now`.

        A rank is [number, remark or "", 1 where it is current, 1 where it is the slowest, loss,
        samples/s, ms of a step, ms of communication in it, bytes of parameters, gradients,
        optimizer state and the rest of the peak, loss line, samples/s line]; what is unknown is
        null. A line is base64 of a byte for each of its points.
        """
        began = time.perf_counter()
        if not self._watched.recorder.ranks or (began < self._due and not now):
            return {}
        used_s = time.thread_time()
        told = self._told()
        cost_s = time.thread_time() - used_s
        many_s = len(told["ranks"]) / RANKS_A_SECOND
        self._due = began + max(PERIOD_S, many_s, cost_s / SHARE)
        new = {name: value for name, value in told.items() if self._sent.get(name) != value}
        self._sent |= new
        return new

    def _told(self) -> dict[str, Any]:
        recorder = self._watched.recorder
        found = ranks.standing(recorder, ranks.trained_under(self._watched))
        count = len(found.ranks)
        points = max(FEWEST_POINTS, min(POINTS, POINTS_OF_ALL // max(count, 1)))
        lines = ranks.lines(recorder, points)
        told = [
            [*_row(rank), loss, rate]
            # A rank that has told its first step in between is in the next message.
            for rank, loss, rate in zip(
                found.ranks,
                drawn(lines.loss),
                drawn(lines.samples_per_s, from_zero=True),
                strict=False,
            )
        ]
        return {"ranks": told, "rank_notes": found.notes()}


def _row(rank: Rank) -> list[Any]:
    figures = (
        *(rank.loss, rank.samples_per_s, rank.step_ms, rank.communication_ms),
        *(rank.parameters, rank.gradients, rank.optimizer_state, rank.rest),
    )
    remark = "" if rank.slowest else rank.remark  # that one has a mark of its own
    return [rank.rank, remark, int(rank.current), int(rank.slowest), *map(_json, figures)]


def drawn(lines: Values, *, from_zero: bool = False) -> list[str]:
    """`lines` [ranks, points] as base64 of their heights, on one scale: 1 to 255, 0 is a gap."""
    known = np.isfinite(lines)
    if not known.any():
        return [base64.b64encode(bytes(lines.shape[1])).decode()] * len(lines)
    low = 0.0 if from_zero else float(lines[known].min())
    spread = float(lines[known].max()) - low
    part = (np.where(known, lines, low) - low) / spread if spread else np.full(lines.shape, 0.5)
    heights = np.where(known, 1 + np.round(LEVELS * part), 0).astype(np.uint8)
    return [base64.b64encode(row.tobytes()).decode() for row in heights]


def _json(value: float) -> float | None:
    """Four digits, bytes and all; JSON has no NaN."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short
