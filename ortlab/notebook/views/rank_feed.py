"""Messages to the browser about the ranks of a run: their content, size and frequency.

Every message has the complete state, so a lost message matters only until the next one, and a page
that is opened late needs no history. The browser's side is js/src/ranks.js.
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
"""Minimum time between two messages."""
RANKS_A_SECOND: Final = 8
"""Maximum number of ranks sent per second: with more ranks, messages are less frequent."""
SHARE: Final = 0.002
"""Maximum share of a core: messages that cost more are less frequent."""
POINTS: Final = 48
POINTS_OF_ALL: Final = 256
FEWEST_POINTS: Final = 16
"""Points of a rank's line: at most `POINTS`, at most `POINTS_OF_ALL` for all ranks together, and at
least `FEWEST_POINTS`."""
LEVELS: Final = 254
"""Number of steps between the lowest point of a line, 1, and the highest; 0 is a gap."""


class RankFeed:
    """Source of new values for the rank traits of a run's view."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._due = -math.inf
        self._sent: dict[str, Any] = {}
        self._lines: list[tuple[str, str]] = []
        self._span = (0, 0)  # first and last step of the lines

    def news(self, *, now: bool = False) -> dict[str, Any]:
        """Return the traits ``ranks`` and ``rank_notes`` if they have changed and are due.

        A rank is [number, remark or "", 1 if it is still training, 1 if it is the slowest, loss,
        samples/s, step time in ms, communication time in ms, bytes of parameters, gradients,
        optimizer state and the rest of the step, loss line, samples/s line]; unknown values are
        null. A line is base64 with one byte per point.

        Args:
            now: Whether to return them even if they are not due.
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
            # A rank whose first step arrived in between is in the next message.
            for rank, lines in zip(found.ranks, self._lines, strict=False)
        ]
        return {"ranks": told, "rank_notes": found.notes()}

    def _draw(self, of: Sequence[Rank], *, whole: bool) -> None:
        """Update the lines if they have a new point; this reads the whole series."""
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
    remark = "" if rank.slowest else rank.remark  # the view marks the slowest rank itself
    return [rank.rank, remark, int(trains), int(rank.slowest), *map(_json, figures)]


def drawn(lines: Values, *, from_zero: bool = False) -> list[str]:
    """Encode lines as base64 of their heights, 1 to 255 on a common scale; 0 is a gap.

    Args:
        lines: Values, [ranks, points]; NaN where unknown.
        from_zero: Whether the scale begins at 0 instead of the lowest value.
    """
    known = np.isfinite(lines)
    if not known.any():
        return [base64.b64encode(bytes(lines.shape[1])).decode()] * len(lines)
    low = 0.0 if from_zero else float(lines[known].min())
    spread = float(lines[known].max()) - low
    part = (np.where(known, lines, low) - low) / spread if spread else np.full(lines.shape, 0.5)
    heights = np.where(known, 1 + np.round(LEVELS * part), 0).astype(np.uint8)
    return [base64.b64encode(row.tobytes()).decode() for row in heights]


def _json(value: float) -> float | None:
    """Round to four significant digits; None for NaN, which JSON does not have."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short
