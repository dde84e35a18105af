"""View of a comparison of runs: their curves in one picture, and a table of their differences.

The picture is drawn without pyplot, like `picture`.
"""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ortlab.notebook.static_views import curves, drawing, plain_text
from ortlab.notebook.static_views.drawing import COLORS, draws
from ortlab.notebook.static_views.picture import DPI, FONT, GRID, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ortlab.history.comparison import RunComparison

DASHES: tuple[Any, ...] = (
    *("-", (0, (7, 2)), (0, (1.2, 1.2)), (0, (7, 2, 1.2, 2))),
    *((0, (3, 1.5)), (0, (12, 2)), (0, (7, 2, 1.2, 1.2, 1.2, 2)), (0, (12, 2, 3, 2))),
)
"""One pattern per run, in order, for prints without colors."""
WIDTH_IN, CHART_IN, LEGEND_IN = 10.0, 2.5, 0.32
_ACROSS = 4  # names of runs per row of the legend


def bundle(comparison: RunComparison) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the MIME bundle of a comparison, with HTML and text, and its metadata.

    Args:
        comparison: The comparison.
    """
    address = "data:image/png;base64," + base64.b64encode(png(comparison)).decode()
    alt = html.escape("Curves of " + ", ".join(run.name for run in comparison.runs))
    picture = f'<img src="{address}" alt="{alt}" style="width: 960px; max-width: 100%">'
    page = f"<div>{picture}{comparison._repr_html_()}</div>"
    return {"text/html": page, "text/plain": curves.text(comparison)}, {}


@draws
def png(comparison: RunComparison) -> bytes:
    """Draw loss by step and by time, throughput and memory as a PNG, with one color per run.

    Args:
        comparison: The comparison.
    """
    names = [run.name for run in comparison.runs]
    legend = LEGEND_IN * (1 + (len(names) - 1) // _ACROSS)
    height = 2 * CHART_IN + legend
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    handles: list[Any] = []
    for index, (title, across, name) in enumerate(curves.CHARTS):
        row, column = divmod(index, 2)
        left = column * WIDTH_IN / 2 + 0.7
        bottom = height - legend - (row + 1) * CHART_IN + 0.55
        place = (
            *(left / WIDTH_IN, bottom / height),
            *((WIDTH_IN / 2 - 1.0) / WIDTH_IN, (CHART_IN - 0.9) / height),
        )
        drawn = _draw(figure.add_axes(place), title, across, name, comparison)
        handles = handles or drawn
    if handles:
        named = figure.legend(
            handles=handles,
            labels=names,
            loc="upper left",
            bbox_to_anchor=(0.05, 1.0),
            ncols=_ACROSS,
            fontsize=FONT,
            labelcolor=TEXT,
            frameon=False,
            handlelength=4.0,  # a whole period of each pattern
            borderaxespad=0.2,
        )
        for text in named.get_texts():
            text.set_parse_math(False)  # names come from the user and may contain a $
    return drawing.png(canvas)


def _draw(axes: Axes, title: str, across: str, name: str, comparison: RunComparison) -> list[Any]:
    axes.grid(color=GRID, linewidth=0.6)
    lines = []
    for color, dashes, run in zip(COLORS, DASHES, comparison.runs, strict=False):
        places, values = curves.curve(run.recorder, across, name)
        lines += axes.plot(
            places,
            values,
            color=color,
            linestyle=dashes,
            linewidth=1.5,
            marker="o" if len(values) <= 2 else None,  # a line of one point is invisible
            markersize=3,
        )
        if name == "loss" and across == "step":
            points = [
                (event.step, event.values["loss"])
                for event in run.recorder.events("eval")
                if np.isfinite(event.values.get("loss", np.nan))
            ]
            if points:
                at, losses = zip(*points, strict=True)
                axes.plot(at, losses, color=color, linewidth=0.8, marker="o", markersize=3.5)
    axes.tick_params(colors=TEXT, labelsize=FONT, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=across == "step"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_text.number(value)))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    told = f"{title}, evaluation with dots" if name == "loss" and across == "step" else title
    axes.set_title(told, color=TEXT, fontsize=FONT + 0.5, loc="left", y=1.0)
    below = f"{across} ({plain_text.RATED})" if name == "samples_per_s" else across
    axes.set_xlabel(below, color=TEXT, fontsize=FONT)
    if name != "loss" and axes.dataLim.y1 > 0:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
    if not any(np.size(line.get_xdata()) for line in lines):
        axes.text(0.5, 0.5, "no values", color=TEXT, ha="center", transform=axes.transAxes)
    return lines
