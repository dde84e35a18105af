"""A run as one static picture: what stays in a saved notebook and on a printed page.

Drawn without pyplot, which keeps global state and is not safe in threads.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ortlab.notebook import plaintext
from ortlab.telemetry import INDEX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from ortlab.telemetry import Column, Recorder, Rows, Status, Watched

SIZE_IN = (10.0, 5.6)
DPI = 192
TEXT = "#7a7a7a"  # 4.3:1 on white, 4.4:1 on JupyterLab's dark #111111
GRID = "#80808040"
COLOURS = ("#2f7fd0", "#d9772b", "#2f9e6b", "#a65fc4", "#c9a227", "#d1495b")
FONT = 9.5
LINE = 125  # characters that fit
ERROR_LINES = 3


def png(watched: Watched) -> bytes:
    """The four charts, the split of a step's time and the final numbers."""
    status = watched.status()
    rows = watched.recorder.rows()
    rows = plaintext.with_rates(rows, plaintext.smoothing(len(rows)))
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    heading = _heading(watched, status, rows)
    # Rows for the heading, two rows of charts and the bar of a step's time.
    grid = figure.add_gridspec(4, 2, height_ratios=(0.115 * len(heading), 1, 1, 0.08))
    _write(figure.add_subplot(grid[0, :]), heading)
    for index, name in enumerate(plaintext.TITLES):
        _draw(figure.add_subplot(grid[1 + index // 2, index % 2]), name, rows, watched.recorder)
    _split(figure.add_subplot(grid[3, :]), rows)
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True)
    return out.getvalue()


def summary(recorder: Recorder, rows: Rows) -> str:
    """The final numbers in one line: loss, speed, peak memory."""
    parts = []
    if len(losses := plaintext.known(rows, "loss")):
        parts.append(f"loss {plaintext.number(losses[-1], digits=3)}")
    for column in plaintext.known_columns("throughput", rows):
        rate = plaintext.overall(recorder, column.name)
        parts.append(f"{plaintext.number(rate, digits=3)} {column.unit}")
    for name, label in (("cuda_peak_bytes", "CUDA peak"), ("peak_bytes", "peak memory")):
        if len(values := plaintext.known(rows, name)):
            parts.append(f"{label} {plaintext.memory(float(values.max()))}")
    return " · ".join(parts)


def _heading(watched: Watched, status: Status, rows: Rows) -> list[tuple[str, str, str]]:
    """Lines of text with their colour and weight."""
    badges, plain = " · ".join(status.badges), replace(status, badges=())
    lines = [
        (plaintext.headline(watched.title, plain), TEXT, "bold"),
        (badges, COLOURS[1], "bold"),
        (summary(watched.recorder, rows), TEXT, "normal"),
        *((line, TEXT, "normal") for line in status.lines),
        *((line, COLOURS[5], "normal") for line in (status.error or "").splitlines()[:ERROR_LINES]),
    ]
    return [(text[:LINE], colour, weight) for text, colour, weight in lines if text]


def _write(axes: Axes, lines: list[tuple[str, str, str]]) -> None:
    axes.set_axis_off()
    for index, (text, colour, weight) in enumerate(lines):
        axes.text(
            0,
            1 - (index + 0.5) / len(lines),
            text,
            color=colour,
            weight=weight,
            fontsize=FONT + 0.5,
            verticalalignment="center",
            transform=axes.transAxes,
            parse_math=False,  # names and errors are the user's: a $ is a $
        )


def _style(axes: Axes) -> None:
    axes.tick_params(colors=TEXT, labelsize=FONT, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _draw(axes: Axes, name: str, rows: Rows, recorder: Recorder) -> None:
    """One chart. A second unit gets an axis of its own on the right."""
    axes.set_title(plaintext.TITLES[name], color=TEXT, fontsize=FONT + 0.5, loc="left")
    axes.grid(color=GRID, linewidth=0.6)
    steps = rows[:, INDEX["step"]]
    columns = plaintext.known_columns(name, rows)
    sides: dict[str, Axes] = {}
    lines: list[Line2D] = []
    for colour, column in zip(COLOURS, columns, strict=False):
        if column.unit not in sides:
            sides[column.unit] = axes if not sides else axes.twinx()
        values = rows[:, INDEX[column.name]] / _size(name, columns, rows)
        known = np.isfinite(values)
        lines += sides[column.unit].plot(
            steps[known],
            values[known],
            color=colour,
            label=column.label,
            linewidth=1.2 if lines else 2.2,  # the first shows below one that runs on top of it
            marker="o" if known.sum() <= 2 else None,  # a line of one point is not seen
            markersize=3,
        )
    if name == "loss":
        lines += _evaluations(axes, recorder)
    for unit, side in (sides or {"": axes}).items():
        _style(side)
        shown = _unit(columns, rows) if unit == "B" else unit
        side.set_ylabel(shown, color=TEXT, fontsize=FONT)
        side.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plaintext.number(value)))
        if name != "loss" and lines:
            side.set_ylim(0, 1.08 * side.dataLim.y1 or 1)
    axes.set_xlabel("step", color=TEXT, fontsize=FONT)
    if not lines:
        axes.text(0.5, 0.5, "no values", color=TEXT, ha="center", transform=axes.transAxes)
    elif len(lines) > 1:
        axes.legend(handles=lines, fontsize=FONT - 0.5, labelcolor=TEXT, frameon=False)


def _unit(columns: list[Column], rows: Rows) -> str:
    """The binary unit in which all of a chart reads well."""
    at = [INDEX[column.name] for column in columns]
    return "GiB" if at and np.nanmax(rows[:, at]) >= plaintext.GIB else "MiB"


def _size(name: str, columns: list[Column], rows: Rows) -> int:
    if name != "memory":
        return 1
    return plaintext.GIB if _unit(columns, rows) == "GiB" else plaintext.MIB


def _evaluations(axes: Axes, recorder: Recorder) -> list[Line2D]:
    points = [
        (event.step, event.values["loss"])
        for event in recorder.events("eval")
        if np.isfinite(event.values.get("loss", np.nan))
    ]
    if not points:
        return []
    steps, losses = zip(*points, strict=True)
    return axes.plot(
        steps,
        losses,
        color=COLOURS[1],
        label="evaluation",
        linewidth=1.2,
        linestyle="--",
        marker="o",
        markersize=3.5,
    )


def _split(axes: Axes, rows: Rows) -> None:
    """Where the time of a step goes: the means of the whole run, as one bar."""
    axes.set_axis_off()
    parts = plaintext.split(rows)
    if not parts:
        return
    left = 0.0
    for colour, (label, value) in zip(COLOURS, parts.items(), strict=False):
        axes.barh(
            0, value, left=left, color=colour, label=f"{label} {plaintext.milliseconds(value)}"
        )
        left += value
    axes.set_xlim(0, left)
    axes.set_title(
        f"Step time {plaintext.milliseconds(left)}", color=TEXT, fontsize=FONT + 0.5, loc="left"
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
