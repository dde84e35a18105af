"""A run as one static picture: what stays in a saved notebook and on a printed page.

Drawn without pyplot, which keeps global state and is not safe in threads.
"""

from __future__ import annotations

import io
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

    from ortlab.telemetry import Column, Recorder, Rows, Watched

SIZE_IN = (10.0, 5.6)
DPI = 192
TEXT = "#767676"  # 4.5:1 on white, 4.2:1 on JupyterLab's dark #111111
GRID = "#80808040"
COLOURS = ("#2f7fd0", "#d9772b", "#2f9e6b", "#a65fc4", "#c9a227", "#d1495b")
FONT = 8.5


def png(watched: Watched) -> bytes:
    """The four charts, the split of a step's time and the final numbers."""
    status = watched.status()
    rows = watched.recorder.rows()
    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    figure.patch.set_alpha(0)
    FigureCanvasAgg(figure)
    heading = [plaintext.headline(watched.title, status), summary(watched.recorder, rows)]
    if status.error:
        heading.append(_shortened(status.error))
    figure.suptitle(
        "\n".join(line for line in heading if line),
        color=TEXT,
        fontsize=10,
        x=0.01,
        horizontalalignment="left",
        parse_math=False,  # names and errors are the user's: a $ is a $
    )
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 0.09))
    for index, name in enumerate(("loss", "throughput", "memory", "lr")):
        _draw(figure.add_subplot(grid[index // 2, index % 2]), name, rows, watched.recorder)
    _split(figure.add_subplot(grid[2, :]), rows)
    out = io.BytesIO()
    figure.savefig(out, format="png", transparent=True)
    return out.getvalue()


def summary(recorder: Recorder, rows: Rows) -> str:
    """The final numbers in one line: loss, evaluation, speed, peak memory."""
    parts = []
    for name, label in (("loss", "loss"), ("samples_per_s", ""), ("tokens_per_s", "")):
        values = rows[:, INDEX[name]]
        if np.isfinite(values).any():
            shown = plaintext.ends(values)[1] if name == "loss" else float(np.nanmedian(values))
            unit = {"loss": "", "samples_per_s": " samples/s", "tokens_per_s": " tokens/s"}[name]
            parts.append(f"{label} {plaintext.number(shown)}{unit}".strip())
    for name in ("cuda_peak_bytes", "peak_bytes"):
        values = rows[:, INDEX[name]]
        if np.isfinite(values).any():
            where = "CUDA peak" if name.startswith("cuda") else "peak memory"
            parts.append(f"{where} {plaintext.memory(float(np.nanmax(values)))}")
    parts += [" ".join(line.split()) for line in plaintext.evaluations(recorder)]
    return " · ".join(parts)


def _shortened(error: str, lines: int = 3, width: int = 130) -> str:
    return "\n".join(line[:width] for line in error.splitlines()[:lines])


def _style(axes: Axes) -> None:
    axes.patch.set_alpha(0)
    axes.tick_params(colors=TEXT, labelsize=FONT, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _draw(axes: Axes, name: str, rows: Rows, recorder: Recorder) -> None:
    """One chart. A second unit gets an axis of its own on the right."""
    axes.set_title(plaintext.TITLES[name].capitalize(), color=TEXT, fontsize=FONT + 1, loc="left")
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
            linewidth=1.2,
            marker="o" if known.sum() <= 2 else None,  # a line of one point is not seen
            markersize=3,
        )
    if name == "loss":
        lines += _evaluations(axes, recorder)
    for unit, side in (sides or {"": axes}).items():
        _style(side)
        labels = {"loss": "loss", "lr": "learning rate", "memory": _unit(columns, rows)}
        side.set_ylabel(labels.get(name, unit), color=TEXT, fontsize=FONT)
        form = plaintext.exponent if name == "lr" else plaintext.number
        side.yaxis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form(value)))
        if name != "loss" and lines:
            side.set_ylim(bottom=0)
    axes.set_xlabel("step", color=TEXT, fontsize=FONT)
    if not lines:
        axes.text(0.5, 0.5, "no values", color=TEXT, ha="center", transform=axes.transAxes)
    elif len(lines) > 1:
        axes.legend(handles=lines, fontsize=FONT - 1, labelcolor=TEXT, frameon=False)


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
    parts = split(rows)
    if not parts:
        return
    left = 0.0
    for colour, (label, value) in zip(COLOURS, parts.items(), strict=False):
        axes.barh(0, value, left=left, color=colour, label=f"{label} {plaintext.number(value)} ms")
        left += value
    axes.set_xlim(0, left)
    axes.set_title(
        f"Step time {plaintext.number(left)} ms", color=TEXT, fontsize=FONT + 1, loc="left"
    )
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(parts),
        fontsize=FONT - 1,
        labelcolor=TEXT,
        frameon=False,
        borderaxespad=0.0,
    )


def split(rows: Rows) -> dict[str, float]:
    """Mean milliseconds of a step by part; "other" is what no part covers. Empty when unknown."""
    known = {c.name: c.label for c in plaintext.known_columns("time", rows)}
    if "step_ms" not in known:
        return {}
    means = {name: float(np.nanmean(rows[:, INDEX[name]])) for name in known}
    whole = means.pop("step_ms")
    parts = {known[name]: value for name, value in means.items()}
    rest = whole - sum(parts.values())
    return {**parts, "other": rest} if rest > 0.02 * whole else parts
