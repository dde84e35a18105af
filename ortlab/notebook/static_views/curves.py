"""Curves of several runs as numbers, and as text with small bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text

if TYPE_CHECKING:
    from ortlab.history.comparison import RunComparison
    from ortlab.metrics.recorder import Recorder, Rows

CHARTS = (
    ("Loss", "step", "loss"),
    ("Loss", "time (s)", "loss"),
    ("Throughput (samples/s)", "step", "samples_per_s"),
    ("Memory (MiB)", "step", "memory"),
)
"""Title, x axis and y axis of each chart."""
_MEMORY = ("cuda_allocated_bytes", "rss_bytes")


def text(comparison: RunComparison) -> str:
    """Return the curves as bars, each on its own scale, and the table of a comparison.

    Args:
        comparison: The comparison.
    """
    lines = []
    width = max(len(run.name) for run in comparison.runs)
    for title, across, name in CHARTS:
        if across != "step":
            continue
        for run in comparison.runs:
            _, values = curve(run.recorder, across, name)
            if len(values):
                ends = f"{plain_text.number(values[0])} → {plain_text.number(values[-1])}"
                bars = f"{plain_text.bars(values):<{plain_text.WIDTH}}"
                lines.append(f"{title:<22} {run.name:<{width}} {bars} {ends}")
    return "\n".join([*lines, repr(comparison)])


def curve(
    recorder: Recorder, across: str, name: str
) -> tuple[plain_text.Values, plain_text.Values]:
    """Return the x and y values of a run's curve where both are known.

    Args:
        recorder: Recorder of the run.
        across: X axis: "step", or any other value for the time in seconds.
        name: Y axis: name of a column, or "memory".
    """
    rows = recorder.rows()
    rows = plain_text.with_rates(rows, plain_text.smoothing(len(rows)))
    values = _memory(rows) if name == "memory" else rows[:, INDEX[name]]
    places = rows[:, INDEX["step" if across == "step" else "time_s"]]
    known = np.isfinite(values) & np.isfinite(places)
    return places[known], values[known]


def _memory(rows: Rows) -> plain_text.Values:
    """Return the memory in MiB: torch's allocated memory on CUDA, else the resident set size."""
    for name in _MEMORY:
        values: plain_text.Values = rows[:, INDEX[name]] / plain_text.MIB
        if np.isfinite(values).any():
            return values
    return values
