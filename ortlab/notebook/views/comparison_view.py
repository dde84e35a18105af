"""View of a comparison of runs: their curves in one picture, and a table of their differences.

The picture is drawn without pyplot, like `picture`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ortlab.notebook.static_views import curves, drawing, plain_text
from ortlab.notebook.static_views.drawing import COLORS, draws
from ortlab.notebook.static_views.picture import DPI, FONT, GRID, TEXT
from ortlab.utils.wording import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ortlab.history.comparison import RunComparison

DASHES: tuple[Any, ...] = (
    *("-", (0, (7, 2)), (0, (1.2, 1.2)), (0, (7, 2, 1.2, 2))),
    *((0, (3, 1.5)), (0, (12, 2)), (0, (7, 2, 1.2, 1.2, 1.2, 2)), (0, (12, 2, 3, 2))),
)
"""One pattern per run, in order, for prints without colors."""
WIDTH_IN, CHART_IN, LEGEND_IN = 10.0, 2.5, 0.32
_ACROSS = 4  # labels of runs per row of the legend
_LINE = 105  # characters that fit on a row of the legend, besides its samples of lines
_TITLE = 48  # characters that fit above a chart


def bundle(comparison: RunComparison) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the MIME bundle of a comparison, with HTML and text, and its metadata.

    Args:
        comparison: The comparison.
    """
    picture = ""
    if shown := curves.charts(comparison):
        address = "data:image/png;base64," + base64.b64encode(_png(comparison, shown)).decode()
        alt = html.escape("Curves of " + ", ".join(comparison.labels))
        picture = f'<img src="{address}" alt="{alt}" style="width: 960px; max-width: 100%">'
    page = f"<div>{picture}{comparison._repr_html_()}</div>"
    return {"text/html": page, "text/plain": curves.text(comparison)}, {}


@draws
def _png(comparison: RunComparison, shown: Sequence[curves.Chart]) -> bytes:
    """Draw charts of a comparison as a PNG."""
    return drawing.png(FigureCanvasAgg(figure(comparison, shown)))


def figure(comparison: RunComparison, shown: Sequence[curves.Chart]) -> Figure:
    """Draw charts of a comparison; a run has the same color and dashes in all of them.

    Args:
        comparison: The comparison.
        shown: The charts, two in a row.
    """
    across = max(1, min(_ACROSS, _LINE // (max(map(len, comparison.labels)) + 8)))
    legend = LEGEND_IN * (1 + (len(comparison.labels) - 1) // across)
    height = (1 + (len(shown) - 1) // 2) * CHART_IN + legend
    made = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    handles: list[Any] = []
    for index, chart in enumerate(shown):
        row, column = divmod(index, 2)
        left = column * WIDTH_IN / 2 + 0.7
        bottom = height - legend - (row + 1) * CHART_IN + 0.55
        place = (
            *(left / WIDTH_IN, bottom / height),
            *((WIDTH_IN / 2 - 1.0) / WIDTH_IN, (CHART_IN - 0.9) / height),
        )
        handles = _draw(made.add_axes(place), chart, comparison)
    named = made.legend(
        handles=[Line2D([], [], color=h.get_color(), linestyle=h.get_linestyle()) for h in handles],
        labels=list(comparison.labels),
        loc="upper left",
        bbox_to_anchor=(0.05, 1.0),
        ncols=across,
        fontsize=FONT,
        labelcolor=TEXT,
        frameon=False,
        handlelength=4.0,  # a whole period of each pattern
        borderaxespad=0.2,
    )
    for text in named.get_texts():
        text.set_parse_math(False)  # names come from the user and may contain a $
    return made


def _draw(axes: Axes, chart: curves.Chart, comparison: RunComparison) -> list[Line2D]:
    axes.grid(color=GRID, linewidth=0.6)
    lines = []
    for color, dashes, run in zip(COLORS, DASHES, comparison.runs, strict=False):
        places, values = curves.curve(run.recorder, chart)
        lines += axes.plot(
            places,
            values,
            color=color,
            linestyle=dashes,
            linewidth=1.5,
            # A line of one point is invisible.
            marker="o" if chart.evaluation or len(values) <= 2 else None,
            markersize=3,
        )
    axes.tick_params(colors=TEXT, labelsize=FONT, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=chart.across == "step"))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_text.number(value)))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    title = shortened(chart.title, _TITLE)
    axes.set_title(title, color=TEXT, fontsize=FONT + 0.5, loc="left", y=1.0, parse_math=False)
    told = f"{chart.across} ({plain_text.RATED})" if chart == curves.THROUGHPUT else chart.across
    axes.set_xlabel(told, color=TEXT, fontsize=FONT)
    if not chart.evaluation and chart.name != "loss" and axes.dataLim.y1 > 0:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1)
    return lines
