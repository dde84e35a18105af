"""A run in words and small bars: for terminals, saved notebooks without pictures, and captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ortlab.telemetry import COLUMNS, INDEX, Column

if TYPE_CHECKING:
    from ortlab.telemetry import Recorder, Rows, Status, Watched

GIB = 1024**3
MIB = 1024**2
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # bars in a line
TITLES = {
    "loss": "loss",
    "throughput": "throughput",
    "memory": "memory",
    "lr": "learning rate",
    "time": "step time",
}


def text(watched: Watched) -> str:
    """The run as plain text: a headline, then a line of bars for every number that it has."""
    status = watched.status()
    rows = watched.recorder.rows()
    lines = [headline(watched.title, status), *status.lines]
    for name, title in TITLES.items():
        for column in known_columns(name, rows):
            values = rows[:, INDEX[column.name]]
            label = (
                title if column.label in ("training loss", title) else f"{title}: {column.label}"
            )
            first, last = (with_unit(value, column) for value in ends(values))
            lines.append(f"{label:<29} {bars(values):<{WIDTH}} {first} → {last}")
    lines += evaluations(watched.recorder)
    if status.error:
        lines.append(status.error)
    return "\n".join(lines)


def headline(title: str, status: Status) -> str:
    """One line: what runs, how far it is, how long it takes still."""
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


def progress(watched: Watched) -> str:
    """The headline with the newest numbers, for a terminal."""
    line = headline(watched.title, watched.status())
    last = watched.recorder.last
    if last is None:
        return line
    values = dict(zip(INDEX, watched.recorder.rows()[-1].tolist(), strict=True))
    shown = [c for c in COLUMNS if c.name in ("loss", "samples_per_s", "tokens_per_s", "rss_bytes")]
    numbers = [
        f"{'loss ' if c.name == 'loss' else ''}{with_unit(values[c.name], c)}"
        for c in shown
        if not math.isnan(values[c.name])
    ]
    return " · ".join([line, *numbers])


def evaluations(recorder: Recorder) -> list[str]:
    """The evaluation before and after, as a line; none where nothing was evaluated."""
    events = recorder.events("eval")
    if not events:
        return []
    parts = []
    for name, form in (("loss", number), ("accuracy", percent)):
        values = [event.values[name] for event in events if name in event.values]
        if values:
            parts.append(f"{name} {form(values[0])} → {form(values[-1])}")
    return [f"{'evaluation':<29} {', '.join(parts)}"] if parts else []


def known_columns(chart: str, rows: Rows) -> list[Column]:
    """The columns of a chart that have a value in `rows`."""
    return [
        column
        for column in COLUMNS
        if column.chart == chart and np.isfinite(rows[:, INDEX[column.name]]).any()
    ]


def ends(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The first and the last value that are known."""
    known = values[np.isfinite(values)]
    return float(known[0]), float(known[-1])


def bars(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> str:
    """At most `WIDTH` bars from the lowest to the highest value; zero is not the base."""
    known = values[np.isfinite(values)]
    means = np.array([part.mean() for part in np.array_split(known, min(WIDTH, len(known)))])
    spread = np.ptp(means)
    if spread <= 1e-9 * np.abs(means).max():
        return BARS[3] * len(means)
    heights = ((means - means.min()) / spread * (len(BARS) - 1)).round().astype(int)
    return "".join(BARS[height] for height in heights)


def number(value: float) -> str:
    """Four significant digits, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return exponent(value)
    decimals = max(0, min(4, 3 - math.floor(math.log10(size)))) if size else 0
    return f"{value:,.{decimals}f}"


def exponent(value: float) -> str:
    """0.00005 is 5e-5."""
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}" if value else "0"


def percent(share: float) -> str:
    """0.805 is 80.5 %."""
    return f"{100 * share:.1f} %"


def memory(size_bytes: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def duration(seconds: float) -> str:
    """7 s, 1:05, 2:03:04."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def with_unit(value: float, column: Column) -> str:
    """A value of a column as a person reads it."""
    if column.unit == "B":
        return memory(value)
    if column.chart == "lr":
        return exponent(value)
    return f"{number(value)} {column.unit}".rstrip()
