"""Ranks of a run in its static picture: one row per rank, as in the live charts."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from matplotlib.patches import Rectangle

from ortlab.metrics.rank_metrics import PARTS, lines, milliseconds
from ortlab.notebook.static_views import plain_text
from ortlab.notebook.static_views.drawing import COLORS
from ortlab.utils.process_memory import memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ortlab.metrics.rank_metrics import Rank, Standing, Values
    from ortlab.metrics.recorder import Recorder

ROW_IN: Final = 0.28
HEAD_IN: Final = 0.5  # title with legend, and column heads
NOTE_IN: Final = 0.22
MARGIN_IN: Final = 0.12
MOST: Final = 16
"""Maximum number of ranks that are drawn; a note states how many more there are."""
POINTS: Final = 60
LINE: Final = 145  # characters of a note that fit on a line
PARTS_COLORS: Final = COLORS[:4]
WAITED: Final = COLORS[4]
TRACK: Final = "#808080"
WARN: Final = "#b96410"  # 4.2:1 on white, 4.4:1 on #111111
# Left edge of each column, and widths of their lines and bars, in inches.
NAME, LOSS, RATE, STEP, SHARE, MEMORY = 0.1, 1.45, 3.2, 4.95, 5.75, 7.5
WIDE: Final = 0.95
STACK: Final = 1.6
GAP: Final = 0.07


def height_in(standing: Standing) -> float:
    """Return the height of the ranks in inches; 0 if there are none.

    Args:
        standing: Ranks with their latest values.
    """
    if not standing.ranks:
        return 0.0
    return (
        MARGIN_IN + HEAD_IN + ROW_IN * len(standing.ranks[:MOST]) + NOTE_IN * len(_notes(standing))
    )


def draw(axes: Axes, standing: Standing, recorder: Recorder, *, text: str, font: float) -> None:
    """Draw the ranks of a run into a strip of a page.

    Args:
        axes: Where to draw; a unit of its data coordinates is an inch of the page.
        standing: Ranks with their latest values.
        recorder: Recorder that has the ranks' curves.
        text: Color of the letters.
        font: Font size of the picture, in points.
    """
    height = height_in(standing)
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, height)
    page = _Page(axes, text, font - 0.5)
    top = height - MARGIN_IN - 0.1
    _draw_heads(page, top)
    shown = standing.ranks[:MOST]
    drawn = lines(recorder, POINTS)
    most = max((rank.peak for rank in shown if math.isfinite(rank.peak)), default=0.0)
    middle = top - 0.24 - ROW_IN
    for rank, loss, rate in zip(shown, drawn.loss, drawn.samples_per_s, strict=False):
        alpha = 1.0 if rank.current and standing.until is None else 0.5
        _line(axes, LOSS, middle, loss, drawn.loss, PARTS_COLORS[0], from_zero=False)
        _line(axes, RATE, middle, rate, drawn.samples_per_s, PARTS_COLORS[2], from_zero=True)
        _draw_values(page, rank, middle, most, alpha)
        middle -= ROW_IN
    for note in _notes(standing):
        middle += (ROW_IN - NOTE_IN) / 2
        page.write(NAME, middle, note)
        middle -= (ROW_IN + NOTE_IN) / 2


class _Page(NamedTuple):
    """Axes with the color and the font size of their letters."""

    axes: Axes
    text: str
    size: float

    def write(
        self, x: float, y: float, words: str, color: str | None = None, weight: str = "normal"
    ) -> None:
        """Write one line that is vertically centered at `y`."""
        self.axes.text(
            x,
            y,
            words,
            color=color or self.text,
            weight=weight,
            fontsize=self.size,
            verticalalignment="center",
            parse_math=False,
        )


def _draw_heads(page: _Page, top: float) -> None:
    """Draw the title, the legend and the column heads."""
    page.write(NAME, top, "Workers", weight="bold")
    x = LOSS
    legend = [*zip(PARTS.values(), PARTS_COLORS, strict=True), ("communication", WAITED)]
    for label, color in legend:
        page.axes.add_patch(Rectangle((x, top - 0.05), 0.1, 0.1, color=color, linewidth=0))
        page.write(x + 0.16, top, label)
        x += 0.35 + 0.075 * len(label)
    heads = (LOSS, "loss"), (RATE, "samples/s"), (STEP, "step"), (SHARE, "communication")
    for x, label in (*heads, (MEMORY, "step memory")):
        page.write(x, top - 0.24, label)


def _draw_values(page: _Page, rank: Rank, middle: float, most: float, alpha: float) -> None:
    """Draw the name, the numbers and the bars of one rank."""
    axes = page.axes
    page.write(NAME, middle, f"rank {rank.rank}", weight="bold")
    if rank.remark:
        mark = f"▲ {rank.remark}" if rank.slowest else rank.remark
        page.write(NAME + 0.52, middle, mark, WARN if rank.slowest else None)
    page.write(LOSS + WIDE + GAP, middle, plain_text.number(rank.loss))
    page.write(RATE + WIDE + GAP, middle, plain_text.number(rank.samples_per_s, 3))
    page.write(STEP, middle, milliseconds(rank.step_ms))
    _bar(axes, SHARE, middle, WIDE, TRACK, 0.25)
    if math.isfinite(rank.communication):
        _bar(axes, SHARE, middle, WIDE * min(1.0, rank.communication), WAITED, alpha)
        page.write(SHARE + WIDE + GAP, middle, f"{rank.communication:.0%}")
    _stack(axes, middle, rank, most, alpha)
    if math.isfinite(rank.peak):
        page.write(MEMORY + STACK + GAP, middle, memory(rank.peak))


def _notes(standing: Standing) -> list[str]:
    more = len(standing.ranks) - MOST
    notes = [f"and {more} more ranks"] if more > 0 else []
    return [line for note in (*notes, *standing.notes()) for line in textwrap.wrap(note, LINE)]


def _line(
    axes: Axes,
    left: float,
    middle: float,
    own: Values,
    of_all: Values,
    color: str,
    *,
    from_zero: bool,
) -> None:
    known = of_all[np.isfinite(of_all)]
    if not len(known):
        return
    low = 0.0 if from_zero else float(known.min())
    spread = float(known.max()) - low or 1.0
    x = left + WIDE * np.arange(len(own)) / max(len(own) - 1, 1)
    y = middle + ROW_IN * 0.7 * ((own - low) / spread - 0.5)
    marker = "o" if np.isfinite(own).sum() == 1 else None
    axes.plot(x, y, color=color, linewidth=1.1, marker=marker, markersize=2)


def _bar(
    axes: Axes, left: float, middle: float, wide: float, color: str, faint: float = 1.0
) -> None:
    corner = (left, middle - 0.05)
    axes.add_patch(Rectangle(corner, wide, 0.1, color=color, linewidth=0, alpha=faint))


def _stack(axes: Axes, middle: float, rank: Rank, most: float, faint: float) -> None:
    """Draw a rank's memory by part; the largest of all ranks has the full width."""
    left = MEMORY
    for part, color in zip(PARTS, PARTS_COLORS, strict=True):
        size = getattr(rank, part)
        if most and math.isfinite(size):
            _bar(axes, left, middle, STACK * size / most, color, faint)
            left += STACK * size / most
