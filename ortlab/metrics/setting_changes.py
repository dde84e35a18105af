"""Changes of settings during a run: the cost and the effect of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortlab.metrics.recorder import INDEX, NAN

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Recorder, Rows

STEPS = 16
SECONDS = 2.0
"""Minimum steps and seconds of each side of a change: memory is sampled twice a second, and a small
model trains many steps in that time."""


@dataclass(frozen=True)
class Change:
    """Change of settings during a run, with rate and memory before and after it.

    Attributes:
        number: Number of the change, starting at 1.
        step: Step after which the change was made.
        text: Description of the change.
        cost_s: Time that the change took.
        samples_per_s: Median rate before and after the change; NaN is unknown so far.
        memory_bytes: Median peak memory before and after the change, allocated by CUDA or else
            resident; NaN is unknown so far.
        settled: True if later steps do not change these values.
    """

    number: int
    step: int
    text: str
    cost_s: float
    samples_per_s: tuple[float, float] = (NAN, NAN)
    memory_bytes: tuple[float, float] = (NAN, NAN)
    settled: bool = False


def changes(recorder: Recorder, *, known: int = 0, most: int | None = None) -> list[Change]:
    """Return the changes of settings so far, in order.

    Args:
        recorder: Recorder of the run.
        known: Number of changes to skip at the beginning.
        most: Maximum number of changes; None returns all.
    """
    events = recorder.events("change")
    if len(events) <= known:
        return []
    chosen = list(enumerate(events))[known:][:most]
    rows = recorder.rows(events[known - 1].step if known else -math.inf)
    found = []
    for at, event in chosen:
        begin = events[at - 1].step if at else -math.inf
        end = events[at + 1].step if at + 1 < len(events) else math.inf
        # The first row after an event is left out on both sides: its step includes the cost, and
        # a merged row may include steps from before the event.
        sides = (begin, event.step, end)
        first, here, last = np.searchsorted(rows[:, INDEX["step"]], sides, side="right")
        before = rows[first + (1 if at else 0) : here]
        after = rows[here + 1 : last]
        times = INDEX["time_s"]
        if len(before):
            late = before[:, times] >= before[-1, times] - SECONDS
            late[-STEPS:] = True
            before = before[late]
        early = after[:, times] <= event.time_s + SECONDS
        early[:STEPS] = True
        found.append(
            Change(
                at + 1,
                event.step,
                event.text,
                event.values["cost_s"],
                (_rate(before), _rate(after[early])),
                (_memory(before), _memory(after[early])),
                settled=not early.all() or end < math.inf,
            )
        )
    return found


def _rate(rows: Rows) -> float:
    # Not the column of rates: a mean of rates over several steps overweights the fast ones.
    rates = 1e3 * rows[:, INDEX["samples"]] / rows[:, INDEX["step_ms"]]
    return _median(rates[np.isfinite(rates)])


def _memory(rows: Rows) -> float:
    for name in ("cuda_peak_bytes", "peak_bytes", "rss_bytes"):
        values = rows[:, INDEX[name]]
        values = values[np.isfinite(values)]
        if len(values):
            return _median(values)
    return NAN


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else NAN
