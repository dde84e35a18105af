"""The curves of several runs as numbers, and as text with small bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ortlab.notebook import plaintext
from ortlab.telemetry import INDEX

if TYPE_CHECKING:
    from ortlab.past.comparison import RunComparison
    from ortlab.telemetry import Recorder, Rows

CHARTS = (
    ("Loss", "step", "loss"),
    ("Loss", "time (s)", "loss"),
    ("Throughput (samples/s)", "step", "samples_per_s"),
    ("Memory (MiB)", "step", "memory"),
)
"""Each with its title, what lies across, and what is drawn."""
_MEMORY = ("cuda_allocated_bytes", "rss_bytes")


def text(comparison: RunComparison) -> str:
    """The curves as bars, all runs of a number in the same scale of their own, and the table."""
    lines = []
    width = max(len(run.name) for run in comparison.runs)
    for title, across, name in CHARTS:
        if across != "step":
            continue
        for run in comparison.runs:
            _, values = curve(run.recorder, across, name)
            if len(values):
                ends = f"{plaintext.number(values[0])} → {plaintext.number(values[-1])}"
                bars = f"{plaintext.bars(values):<{plaintext.WIDTH}}"
                lines.append(f"{title:<22} {run.name:<{width}} {bars} {ends}")
    return "\n".join([*lines, repr(comparison)])


def curve(recorder: Recorder, across: str, name: str) -> tuple[plaintext.Values, plaintext.Values]:
    """Where the points of a run's curve lie, and how high; those that are known."""
    rows = recorder.rows()
    rows = plaintext.with_rates(rows, plaintext.smoothing(len(rows)))
    values = _memory(rows) if name == "memory" else rows[:, INDEX[name]]
    places = rows[:, INDEX["step" if across == "step" else "time_s"]]
    known = np.isfinite(values) & np.isfinite(places)
    return places[known], values[known]


def _memory(rows: Rows) -> plaintext.Values:
    """MiB: on CUDA what torch has allocated, else the resident size."""
    for name in _MEMORY:
        values: plaintext.Values = rows[:, INDEX[name]] / plaintext.MIB
        if np.isfinite(values).any():
            return values
    return values
