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

from ortlab.metrics import rank_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlab.metrics.rank_metrics import Rank, Values
    from ortlab.metrics.recorder import Watched

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
        self._lines: list[tuple[str, str]] = []
        self._span = (0, 0)  # the steps that they are of

    def news(self, *, now: bool = False) -> dict[str, Any]:
        """``ranks`` and ``rank_notes`` where they changed and are due, or asked for `now`.

        A rank is [number, remark or "", 1 where it trains still, 1 where it is the slowest, loss,
        samples/s, ms of a step, ms of communication in it, bytes of parameters, gradients,
        optimizer state and the rest of the peak, loss line, samples/s line]; what is unknown is
        null. A line is base64 of a byte for each of its points.
        """
        began = time.perf_counter()
        if not self._watched.recorder.ranks or (began < self._due and not now):
            return {}
        used_s = time.thread_time()
        told = self._told(whole=now)
        cost_s = time.thread_time() - used_s
        many_s = len(told["ranks"]) / RANKS_A_SECOND
        self._due = began + max(PERIOD_S, many_s, cost_s / SHARE)
        new = {name: value for name, value in told.items() if self._sent.get(name) != value}
        self._sent |= new
        return new

    def _told(self, *, whole: bool) -> dict[str, Any]:
        found = rank_metrics.standing(
            self._watched.recorder, rank_metrics.trained_under(self._watched)
        )
        self._draw(found.ranks, whole=whole)
        told = [
            [*_row(rank, trains=rank.current and found.until is None), *lines]
            # A rank that has told its first step in between is in the next message.
            for rank, lines in zip(found.ranks, self._lines, strict=False)
        ]
        return {"ranks": told, "rank_notes": found.notes()}

    def _draw(self, of: Sequence[Rank], *, whole: bool) -> None:
        """The lines, where they have another point by now: all of the series is read for them."""
        points = max(FEWEST_POINTS, min(POINTS, POINTS_OF_ALL // max(len(of), 1)))
        first, last = self._span
        newer = max((rank.step for rank in of), default=0) - last
        if newer * points < last - first and len(of) == len(self._lines) and not whole:
            return
        lines = rank_metrics.lines(self._watched.recorder, points)
        rates = drawn(lines.samples_per_s, from_zero=True)
        self._lines = list(zip(drawn(lines.loss), rates, strict=True))
        self._span = (lines.first, lines.last)


def _row(rank: Rank, *, trains: bool) -> list[Any]:
    figures = (
        *(rank.loss, rank.samples_per_s, rank.step_ms, rank.communication_ms),
        *(rank.parameters, rank.gradients, rank.optimizer_state, rank.rest),
    )
    remark = "" if rank.slowest else rank.remark  # that one has a mark of its own
    return [rank.rank, remark, int(trains), int(rank.slowest), *map(_json, figures)]


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
