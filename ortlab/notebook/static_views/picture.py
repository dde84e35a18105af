"""Static picture of a run for saved notebooks and printed pages.

It is drawn without pyplot, which has global state and is not thread-safe.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from ortlab.history.saved_run import SavedRun
from ortlab.metrics import rank_metrics
from ortlab.metrics.evaluation import SHOWN, scores
from ortlab.metrics.recorder import INDEX
from ortlab.metrics.setting_changes import Change, changes
from ortlab.notebook.static_views import drawing, plain_text, rank_picture
from ortlab.notebook.static_views.drawing import COLORS, draws
from ortlab.utils.process_memory import memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from ortlab.metrics.recorder import Column, Recorder, Rows, Status, Watched

WIDTH_IN = 10.0
CHART_IN = 2.4  # a row of charts with titles and labels
BELOW_IN = 0.55  # the bar with the step time
LINE_IN = 0.24  # a line of the heading
DPI = 192
TEXT = "#424242"  # 10:1 on the pictures' white
GRID = "#80808040"
FONT = 9.5
LINE = 125  # characters that fit on a line of the heading
BOLD_LINE = 105  # of those in bold
ERROR_LINES = 8
CHANGES = 8  # settings changes in the heading; the last ones are shown
WRAPPED_LINES = 3  # lines that one change or remark may take
MARKS_IN_ROW = 20  # numbers of changes that fit side by side in a chart
MARK_ROWS = 4
_LONGEST = 24  # characters of a score's name
MARK = "#8c62d9"  # 4.3:1 on white, 4.4:1 on #111111


@draws
def png(watched: Watched) -> bytes:
    """Draw the charts, the breakdown of the step time, the ranks and the final numbers.

    Args:
        watched: The run.

    Returns:
        A PNG.
    """
    status = watched.status()
    rows = watched.recorder.rows()
    rows = plain_text.with_rates(rows, plain_text.smoothing(len(rows)))
    changed = changes(watched.recorder)
    heading = _heading(watched, status, rows, changed)
    # All positions are fixed, in inches from the bottom: a layout engine would draw it twice.
    standing = rank_metrics.standing(watched.recorder, rank_metrics.trained_under(watched))
    below = BELOW_IN + rank_picture.height_in(standing)
    scored = _scored(watched.recorder)
    drawn = len(rows) > 0  # a run that failed at its start has nothing to draw
    shown = [
        name
        for name in plain_text.TITLES
        if plain_text.known_columns(name, rows)
        or (drawn and name == "loss" and _evaluation_losses(watched.recorder))
    ]
    charts_in = (math.ceil(len(shown) / 2) + bool(scored)) * CHART_IN
    below = below if drawn else 0.1
    width, height = WIDTH_IN, below + charts_in + LINE_IN * len(heading)
    figure = Figure(figsize=(width, height), dpi=DPI)
    canvas = FigureCanvasAgg(figure)

    def place(left: float, bottom: float, wide: float, high: float) -> Axes:
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    top = below + charts_in
    for index, line in enumerate(heading):
        _write(figure, 0.1 / width, (top + (len(heading) - index - 0.5) * LINE_IN) / height, line)
    for index, name in enumerate(shown):
        row, column = divmod(index, 2)
        left, bottom = column * width / 2 + 0.7, top - (row + 1) * CHART_IN + 0.5
        axes = place(left, bottom, width / 2 - 1.4, CHART_IN - 0.85)
        _draw(axes, name, rows, watched.recorder)
        _mark(axes, changed)
    if scored:
        axes = place(0.7, below + 0.5, width - 1.4, CHART_IN - 0.85)
        _draw_scores(axes, scored)
        _mark(axes, changed)
    if drawn:
        _split(place(0.1, below - BELOW_IN + 0.1, width - 0.2, 0.14), rows)
    if standing.ranks:
        axes = place(0.0, 0.0, width, below - BELOW_IN)
        rank_picture.draw(axes, standing, watched.recorder, text=TEXT, font=FONT)
    return drawing.png(canvas)


def summary(watched: Watched, rows: Rows) -> str:
    """Return the final loss, throughput and peak memory in one line.

    Args:
        watched: The run.
        rows: Its rows, with rates.
    """
    parts = []
    if len(losses := plain_text.known(rows, "loss")):
        parts.append(f"loss {plain_text.number(losses[-1])}")
    for column in plain_text.known_columns("throughput", rows):
        rate = watched.recorder.rate(column.name.removesuffix("_per_s"))
        parts.append(f"{plain_text.number(rate, digits=3)} {column.unit}")
    if np.isfinite(peak_bytes := _peak_bytes(watched)):
        parts.append(f"peak memory {memory(peak_bytes)}")
    return " · ".join(parts)


def _peak_bytes(watched: Watched) -> float:
    """Return the peak memory as the run's result has it, or of a loop without one."""
    if isinstance(watched, SavedRun):
        return watched.entry.peak_bytes
    if (so_far := getattr(watched, "so_far", None)) is not None:
        return float(so_far().peak_bytes)
    return watched.recorder.peak_bytes()


def _heading(
    watched: Watched, status: Status, rows: Rows, changed: list[Change]
) -> list[tuple[str, str, str]]:
    """Return the lines of the heading with color and weight, truncated to the width."""
    badges, plain = " · ".join(status.badges), replace(status, badges=())
    lines = [
        (plain_text.headline(watched.title, plain), TEXT, "bold"),
        *((part, COLORS[1], "bold") for part in _wrapped(badges, width=BOLD_LINE)),
        (summary(watched, rows), TEXT, "normal"),
        *((part, TEXT, "normal") for line in status.lines for part in _wrapped(line)),
        *((line, TEXT, "normal") for line in _told(changed)),
        *((line, COLORS[5], "normal") for line in _error(status.error or "")),
    ]
    return [(text[:LINE], color, weight) for text, color, weight in lines if text]


def _error(text: str) -> list[str]:
    """Return the lines of an error with its advice, wrapped."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, LINE)]
    return lines[:ERROR_LINES]


def _told(changed: list[Change]) -> list[str]:
    """Return wrapped lines that describe the last numbered changes of settings."""
    left = len(changed) - CHANGES
    lines = [f"changes 1 to {left}: see the run's metrics"] if left > 0 else []
    for change in changed[-CHANGES:]:
        lines += _wrapped(f"[{change.number}] {plain_text.said(change)}")
    return lines


def _wrapped(text: str, *, width: int = LINE) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="    ", max_lines=WRAPPED_LINES, placeholder=" …"
    )


def _write(figure: Figure, x: float, y: float, line: tuple[str, str, str]) -> None:
    text, color, weight = line
    figure.text(
        x,
        y,
        text,
        color=color,
        weight=weight,
        fontsize=FONT + 0.5,
        verticalalignment="center",
        parse_math=False,  # names and errors come from the user and may contain a $
    )


def _style(axes: Axes) -> None:
    axes.tick_params(colors=TEXT, labelsize=FONT, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _draw(axes: Axes, name: str, rows: Rows, recorder: Recorder) -> None:
    """Draw one chart; a second unit has its own axis on the right."""
    axes.grid(color=GRID, linewidth=0.6)
    steps = rows[:, INDEX["step"]]
    columns = plain_text.known_columns(name, rows)
    sides: dict[str, Axes] = {}
    lines: list[Line2D] = []
    for color, column in zip(COLORS, columns, strict=False):
        if column.unit not in sides:
            sides[column.unit] = axes if not sides else axes.twinx()
        values = rows[:, INDEX[column.name]] / _size(name, columns, rows)
        known = np.isfinite(values)
        lines += sides[column.unit].plot(
            steps[known],
            values[known],
            color=color,
            label=column.label,
            linewidth=1.2 if lines else 2.2,  # the first stays visible below an equal one
            marker="o" if known.sum() <= 2 else None,  # a line of one point is invisible
            markersize=3,
        )
    if name == "loss":
        lines += _evaluations(axes, recorder)
    left, right = plain_text.TITLES[name], ""
    for index, (unit, side) in enumerate((sides or {"": axes}).items()):
        _style(side)
        if unit:
            shown = _unit(columns, rows) if unit == "B" else unit
            left, right = (left, shown) if index else (f"{left} ({shown})", right)
        if unit == "loss scale":  # halves and doubles
            side.set_yscale("log", base=2)
            side.yaxis.set_major_locator(LogLocator(2, numticks=5))
            side.minorticks_off()
        side.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_text.number(value)))
        if name != "loss" and lines and unit != "loss scale":
            # More room above the second, as the curves of samples and tokens would coincide.
            side.set_ylim(0, (1.4 if index else 1.08) * side.dataLim.y1 or 1)
    # With a fixed position, because finding one automatically measures all of the axes.
    axes.set_title(left, color=TEXT, fontsize=FONT + 0.5, loc="left", y=1.0)
    axes.set_title(right, color=TEXT, fontsize=FONT + 0.5, loc="right", y=1.0)
    told = f"step ({plain_text.RATED})" if name == "throughput" else "step"
    axes.set_xlabel(told, color=TEXT, fontsize=FONT)
    if len(lines) > 1:
        axes.legend(handles=lines, fontsize=FONT - 0.5, labelcolor=TEXT, frameon=False)


def _mark(axes: Axes, changed: list[Change]) -> None:
    """Draw a numbered dashed line at each change; numbers that would overlap are placed lower."""
    low, high = axes.get_xlim()
    ends = [-np.inf] * MARK_ROWS  # where the last number of each row ends
    for change in changed:
        at = min(max(change.step, low), high)
        axes.axvline(at, color=MARK, linewidth=1.0, linestyle=(0, (3, 2)), zorder=1.5)
        row = next((row for row, end in enumerate(ends) if at >= end), None)
        if row is None:
            continue
        ends[row] = at + (high - low) / MARKS_IN_ROW
        axes.annotate(
            str(change.number),
            (at, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -2 - 1.2 * row * FONT),
            textcoords="offset points",
            horizontalalignment="center",
            verticalalignment="top",
            color="#ffffff",
            fontsize=FONT - 2,
            weight="bold",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": MARK, "edgecolor": "none"},
            zorder=4,
        )
    axes.set_xlim(low, high)


def _unit(columns: list[Column], rows: Rows) -> str:
    """Return the binary unit for all memory values of a chart."""
    at = [INDEX[column.name] for column in columns]
    return "GiB" if at and np.nanmax(rows[:, at]) >= plain_text.GIB else "MiB"


def _size(name: str, columns: list[Column], rows: Rows) -> int:
    if name != "memory":
        return 1
    return plain_text.GIB if _unit(columns, rows) == "GiB" else plain_text.MIB


def _evaluation_losses(recorder: Recorder) -> list[tuple[int, float]]:
    """Return the steps and losses of the evaluations whose loss is finite."""
    return [
        (event.step, event.values["loss"])
        for event in recorder.events("eval")
        if np.isfinite(event.values.get("loss", np.nan))
    ]


def _evaluations(axes: Axes, recorder: Recorder) -> list[Line2D]:
    points = _evaluation_losses(recorder)
    if not points:
        return []
    steps, losses = zip(*points, strict=True)
    return axes.plot(
        steps,
        losses,
        color=COLORS[1],
        label="evaluation",
        linewidth=1.2,
        linestyle="--",
        marker="o",
        markersize=3.5,
    )


def _scored(recorder: Recorder) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values of the scores of evaluations, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for event in recorder.events("eval"):
        for name, value in scores(event).items():
            found.setdefault(name, []).append((event.step, value))
    return dict(list(found.items())[:SHOWN])


def _draw_scores(axes: Axes, scored: dict[str, list[tuple[int, float]]]) -> None:
    """Draw the chart of the scores of evaluations."""
    axes.grid(color=GRID, linewidth=0.6)
    _style(axes)
    for color, (name, points) in zip(COLORS, scored.items(), strict=False):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, label=name[:_LONGEST], marker="o", markersize=3.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_text.number(value)))
    axes.set_title("Evaluation", color=TEXT, fontsize=FONT + 0.5, loc="left", y=1.0)
    axes.set_xlabel("step", color=TEXT, fontsize=FONT)
    named = axes.legend(
        fontsize=FONT - 0.5,
        labelcolor=TEXT,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(scored),
        borderaxespad=0.0,
    )
    for text in named.get_texts():
        text.set_parse_math(False)  # names come from the user and may contain a $


def _split(axes: Axes, rows: Rows) -> None:
    """Draw the breakdown of the step time, averaged over the run, as one bar."""
    axes.set_axis_off()
    parts = plain_text.split(rows)
    if not parts:
        return
    left = 0.0
    for color, (label, value) in zip(COLORS, parts.items(), strict=False):
        axes.barh(
            0, value, left=left, color=color, label=f"{label} {plain_text.milliseconds(value)}"
        )
        left += value
    axes.set_xlim(0, left)
    axes.set_title(
        f"Step time {plain_text.milliseconds(left)}",
        color=TEXT,
        fontsize=FONT + 0.5,
        loc="left",
        y=1.0,
    )
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(parts),
        handlelength=1.0,
        columnspacing=1.2,
        fontsize=FONT - 0.5,
        labelcolor=TEXT,
        frameon=False,
        borderaxespad=0.0,
    )
