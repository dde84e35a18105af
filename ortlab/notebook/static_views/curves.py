"""Curves of several runs as numbers, and as text with small bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortlab.metrics.evaluation import SHOWN, scores
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text
from ortlab.utils.tables import escaped

if TYPE_CHECKING:
    from ortlab.history.comparison import RunComparison
    from ortlab.metrics.recorder import Recorder, Rows


@dataclass(frozen=True)
class Chart:
    """Chart of several runs.

    Attributes:
        title: Title of the chart.
        across: X axis: "step", or any other value for the time in seconds.
        name: Y axis: a column, "memory", or a value of the evaluations.
        evaluation: True for a value of the evaluations.
    """

    title: str
    across: str
    name: str
    evaluation: bool = False


LOSS = Chart("Training loss", "step", "loss")
EVALUATION_LOSS = Chart("Evaluation loss", "step", "loss", evaluation=True)
THROUGHPUT = Chart("Throughput (samples/s)", "step", "samples_per_s")
_STEPS = (
    *(THROUGHPUT, Chart("Memory (MiB)", "step", "memory")),
    Chart("Training loss", "time (s)", "loss"),
)
_MEMORY = ("cuda_allocated_bytes", "rss_bytes")


def text(comparison: RunComparison) -> str:
    """Return the curves as bars, each on its own scale, and the table of a comparison.

    Args:
        comparison: The comparison.
    """
    lines = []
    shown = [chart for chart in charts(comparison) if chart.across == "step"]
    titles = max((len(chart.title) for chart in shown), default=0)
    width = max(map(len, comparison.labels))
    for chart in shown:
        for label, run in zip(comparison.labels, comparison.runs, strict=True):
            _, values = curve(run.recorder, chart)
            if len(values):
                ends = f"{plain_text.number(values[0])} → {plain_text.number(values[-1])}"
                bars = f"{plain_text.bars(values):<{plain_text.WIDTH}}"
                lines.append(f"{chart.title:<{titles}} {label:<{width}} {bars} {ends}")
    return "\n".join([*lines, repr(comparison)])


def charts(comparison: RunComparison) -> list[Chart]:
    """Return the charts of a comparison: those with values, and a metric that runs share.

    Args:
        comparison: The comparison.
    """
    recorders = [run.recorder for run in comparison.runs]
    metrics: dict[str, int] = {}
    for recorder in recorders:
        names = dict.fromkeys(name for event in recorder.events("eval") for name in scores(event))
        metrics |= {name: metrics.get(name, 0) + 1 for name in names}
    shared = [name for name, runs in metrics.items() if runs > 1][:SHOWN]
    scored = [
        Chart(f"Evaluation {escaped(name)}", "step", name, evaluation=True) for name in shared
    ]
    return [
        chart
        for chart in (LOSS, EVALUATION_LOSS, *scored, *_STEPS)
        if any(len(curve(recorder, chart)[0]) for recorder in recorders)
    ]


def curve(recorder: Recorder, chart: Chart) -> tuple[plain_text.Values, plain_text.Values]:
    """Return the x and y values of a run's curve where both are known.

    Args:
        recorder: Recorder of the run.
        chart: The chart.
    """
    if chart.evaluation:
        events = recorder.events("eval")
        values = np.array([event.values.get(chart.name, np.nan) for event in events], float)
        places = np.array([event.step for event in events], float)
    else:
        rows = recorder.rows()
        rows = plain_text.with_rates(rows, plain_text.smoothing(len(rows)))
        values = _memory(rows) if chart.name == "memory" else rows[:, INDEX[chart.name]]
        places = rows[:, INDEX["step" if chart.across == "step" else "time_s"]]
    known = np.isfinite(values) & np.isfinite(places)
    return places[known], values[known]


def _memory(rows: Rows) -> plain_text.Values:
    """Return the memory in MiB: torch's allocated memory on CUDA, else the resident set size."""
    for name in _MEMORY:
        values: plain_text.Values = rows[:, INDEX[name]] / plain_text.MIB
        if np.isfinite(values).any():
            return values
    return values
