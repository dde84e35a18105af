"""A run as text with small bars, for terminals, saved notebooks without pictures, and captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortlab.metrics import rank_metrics
from ortlab.metrics.recorder import COLUMNS, INDEX, Column, rated_ms
from ortlab.metrics.setting_changes import Change, changes

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Rows, Status, Watched

GIB = 1024**3
MIB = 1024**2
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # bars in a line
TITLES = {
    "loss": "Loss",
    "throughput": "Throughput",
    "memory": "Memory",
    "lr": "Learning rate",
}
"""Titles of the charts, in order."""

RATED = "without export, warm-up and pauses"
"""Remark on all rates; see `ortlab.metrics.recorder.Recorder.rate`."""

Values = npt.NDArray[np.float64]
"""Values of one column of a series."""


def text(watched: Watched, status: Status | None = None) -> str:
    """Return a run as plain text: a headline, then one line with bars per metric.

    Args:
        watched: The run.
        status: The status to show; None for the current one.
    """
    status = status or watched.status()
    rows = watched.recorder.rows()
    lines = [headline(watched.title, status), *status.lines]
    lines += [f"change {change.number}, {said(change)}" for change in changes(watched.recorder)]
    for column in (column for chart in TITLES for column in known_columns(chart, rows)):
        values = known(rows, column.name)
        if column.chart == "memory":
            tail = f"maximum {memory(float(values.max()))}"
        elif column.chart == "throughput":
            rate = watched.recorder.rate(column.name.removesuffix("_per_s"))
            tail = f"{number(rate, digits=3)} overall"
        else:
            tail = f"{number(values[0])} → {number(values[-1])}"
        lines.append(f"{column.label:<20} {bars(values):<{WIDTH}} {tail}")
    if parts := split(rows):
        whole = milliseconds(sum(parts.values()))
        each = ", ".join(f"{label} {milliseconds(value)}" for label, value in parts.items())
        lines.append(f"step time {whole}: {each}")
    if watched.recorder.ranks:
        lines += repr(
            rank_metrics.table(watched.recorder, rank_metrics.trained_under(watched))
        ).splitlines()
    if status.error:
        lines.append(status.error)
    return "\n".join(lines)


def headline(title: str, status: Status) -> str:
    """Return title, state, progress, elapsed and remaining time in one line.

    Args:
        title: Title of the run.
        status: Its status.
    """
    parts = [title, status.state]
    if status.total_steps:
        share = status.step / status.total_steps
        parts.append(f"step {status.step:,} of {status.total_steps:,} ({share:.0%})")
    else:
        parts.append(f"step {status.step:,}")
    parts.append(duration(status.elapsed_s))
    if status.left_s is not None and status.left_s > 0:
        parts.append(f"{duration(status.left_s)} left")
    return " · ".join([*parts, *(f"[{badge}]" for badge in status.badges)])


def said(change: Change) -> str:
    """Return a settings change in one line: step, text, cost, and its effect (before → after).

    Args:
        change: The change.
    """
    cost = f"cost {milliseconds(1e3 * change.cost_s)}" if change.cost_s else "free"
    parts = [f"step {change.step:,}: {change.text}", cost]
    for (before, after), show, unit in (
        (change.samples_per_s, lambda rate: number(rate, digits=3), "samples/s"),
        (change.memory_bytes, memory, "memory"),
    ):
        if math.isfinite(before) or math.isfinite(after):
            pair = (show(value) if math.isfinite(value) else "…" for value in (before, after))
            parts.append(f"{unit} {' → '.join(pair)}")
    return " · ".join(parts)


def progress(watched: Watched) -> str:
    """Return the headline with the latest numbers, for a terminal.

    Args:
        watched: The run.
    """
    line = headline(watched.title, watched.status())
    last = watched.recorder.last
    if last is None:
        return line
    parts = [line, f"loss {number(float(last.loss))}"]
    for name in ("samples_per_s", "tokens_per_s", "rss_bytes"):
        value = getattr(last, name)
        if not math.isnan(value):
            parts.append(with_unit(value, COLUMNS[INDEX[name]]))
    return " · ".join(parts)


def known_columns(chart: str, rows: Rows) -> list[Column]:
    """Return the columns of a chart that have any value.

    Args:
        chart: Name of the chart.
        rows: Rows of the run.
    """
    return [column for column in COLUMNS if column.chart == chart and len(known(rows, column.name))]


def known(rows: Rows, name: str) -> Values:
    """Return the known values of a column, in order.

    Args:
        rows: Rows of the run.
        name: Name of the column.
    """
    values = rows[:, INDEX[name]]
    return values[np.isfinite(values)]


_RATES = [INDEX["samples_per_s"], INDEX["tokens_per_s"]]


def with_rates(rows: Rows, window: int) -> Rows:
    """Return rows whose rates are averaged by time over the last `window` rows.

    Args:
        rows: Rows of the run; not changed.
        window: Number of rows.
    """
    out = rows.copy()
    rates, time_ms = rows[:, _RATES], rated_ms(rows)
    amounts = _summed(np.where(time_ms > 0, rates, 0.0) * time_ms, window)
    out[:, _RATES] = np.divide(amounts, _summed(time_ms, window), out=rates, where=time_ms > 0)
    return out


def _summed(values: Values, window: int) -> Values:
    total: Values = np.cumsum(values, axis=0)
    total[window:] = total[window:] - total[:-window]
    return total


def smoothing(count: int) -> int:
    """Return the window of a rate that makes its chart readable.

    Args:
        count: Number of rows.
    """
    return max(1, count // 50)


def split(rows: Rows) -> dict[str, float]:
    """Return the mean step time in milliseconds by part; empty if it is unknown.

    "other" is the time that no part covers. Communication is not a part, because it overlaps with
    the others. Like the rates, it leaves out steps that export and warm up.

    Args:
        rows: Rows of the run.
    """
    rated = rated_ms(rows)[:, 0] > 0
    rows = rows[rated] if rated.any() else rows
    columns = {column.name: column.label for column in known_columns("time", rows)}
    columns.pop("communication_ms", None)
    if "step_ms" not in columns:
        return {}
    means = {name: float(known(rows, name).mean()) for name in columns}
    whole = means.pop("step_ms")
    parts = {columns[name]: value for name, value in means.items()}
    rest = whole - sum(parts.values())
    return {**parts, "other": rest} if rest > 0.02 * whole else parts


def bars(values: Values) -> str:
    """Return up to `WIDTH` bars, scaled from the lowest to the highest value (not from zero).

    Args:
        values: Values of a column.
    """
    means = np.array([part.mean() for part in np.array_split(values, min(WIDTH, len(values)))])
    spread = np.ptp(means)
    if spread <= 1e-9 * np.abs(means).max():
        return BARS[3] * len(means)
    heights = ((means - means.min()) / spread * (len(BARS) - 1)).round().astype(int)
    return "".join(BARS[height] for height in heights)


def number(value: float, digits: int = 4) -> str:
    """Format a number with significant digits and thousands separators, without trailing zeros.

    Args:
        value: The number.
        digits: Number of significant digits.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return exponent(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    shown = f"{value:,.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if decimals else shown


def exponent(value: float) -> str:
    """Format a number with an exponent: 0.00005 is 5e-5.

    Args:
        value: The number.
    """
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}" if value else "0"


def memory(size_bytes: float) -> str:
    """Format a size in GiB or MiB.

    Args:
        size_bytes: Size in bytes.
    """
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def milliseconds(value: float) -> str:
    """Format a time in milliseconds or seconds: 7.25 ms, 1.2 s.

    Args:
        value: Time in milliseconds.
    """
    return f"{number(value / 1000, 3)} s" if value >= 1000 else f"{number(value, 3)} ms"


def duration(seconds: float) -> str:
    """Format a duration: 7 s, 1:05, 2:03:04.

    Args:
        seconds: Duration in seconds.
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def with_unit(value: float, column: Column) -> str:
    """Format a value of a column with its unit.

    Args:
        value: The value.
        column: Its column.
    """
    return memory(value) if column.unit == "B" else f"{number(value, 3)} {column.unit}"
