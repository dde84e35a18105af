"""The changes of settings that a run went through, with what each one cost and what it brought."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortlab.metrics.recorder import INDEX, NAN

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Event, Recorder, Rows

STEPS = 16
SECONDS = 2.0
"""Each side of a change is looked at for so many steps and seconds: memory is read twice a second,
and a small model makes many steps in that time."""


@dataclass(frozen=True)
class Change:
    """One change: what was changed after which step, and the run before and after it.

    Rates and bytes are medians over the steps nearby; NaN is unknown, or not known yet. The bytes
    are the peak of what CUDA allocated, or else of the resident size. ``settled`` says that later
    steps will not change them.
    """

    number: int
    step: int
    text: str
    cost_s: float
    samples_per_s: tuple[float, float] = (NAN, NAN)
    memory_bytes: tuple[float, float] = (NAN, NAN)
    settled: bool = False


def changes(recorder: Recorder, *, known: int = 0, most: int | None = None) -> list[Change]:
    """The changes so far, in their order, numbered from 1: `most` of them after `known` ones."""
    events = recorder.events("change")
    if len(events) <= known:
        return []
    chosen = list(enumerate(events))[known:][:most]
    rows = recorder.rows(events[known - 1].step if known else -math.inf)
    found = []
    for at, event in chosen:
        begin = events[at - 1].step if at else -math.inf
        end = events[at + 1].step if at + 1 < len(events) else math.inf
        # The first row after an event is left out on both sides: its step has the cost in it, and
        # where rows were merged it may have steps from before the event.
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


def refusals(recorder: Recorder) -> list[Event]:
    """The changes that were asked for and not made: warnings, whose ``cost_s`` is the time lost."""
    return [event for event in recorder.events("warning") if "cost_s" in event.values]


def _rate(rows: Rows) -> float:
    # Not the column of rates: the mean of several steps' counts the quick ones too much.
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
