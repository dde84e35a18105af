"""Bars as one static picture: what stays in a saved notebook and on a printed page."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Mapping, Sequence

Row = tuple[str, Sequence[Mapping[str, float]]]
"""A label, and under one another its bars: amounts by the name of the series, end to end."""
Series = Mapping[str, tuple[str, float]]
"""The colour and opacity of each series, by name."""

WIDTH, LABELS, NUMBERS = 900, 290, 70
BAR, GAP, LEGEND = 9, 7, 26
TEXT = "#7a7a7a"  # 4.3:1 on white, 4.4:1 on JupyterLab's dark #111111
FONT = 11
LETTERS = 44  # of a label that fit


def milliseconds(us: float) -> str:
    """Microseconds as their sum is told."""
    return f"{us / 1000:.2f} ms"


def svg(
    rows: Sequence[Row],
    series: Series,
    *,
    told: Callable[[float], str] = milliseconds,
    limit: float | None = None,
) -> str:
    """The picture of `rows`: widths in proportion, the sum of each bar at its end, as `told`.

    A `limit` is a line that bars may cross.
    """
    sums = [sum(bar.values()) for _, bars in rows for bar in bars]
    longest = max([*sums, limit or 0.0], default=0.0) or 1.0
    scale = (WIDTH - LABELS - NUMBERS) / longest
    used = [name for name in series if any(name in bar for _, bars in rows for bar in bars)]
    parts, top = list(_legend(used, series)), LEGEND
    for label, bars in rows:
        middle = top + len(bars) * BAR / 2
        parts.append(text(LABELS - 8, middle, _fitting(label), anchor="end"))
        for bar in bars:
            parts += _bar(top, bar, series, scale, told)
            top += BAR
        top += GAP
    if limit is not None:
        x = LABELS + limit * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{LEGEND - 4}" x2="{x:.1f}" y2="{top}" stroke="{TEXT}" '
            'stroke-dasharray="4 3"/>'
        )
        top += GAP
        parts.append(text(x, top, told(limit), anchor="middle"))
        top += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" font-family="sans-serif" font-size="{FONT}">{"".join(parts)}</svg>'
    )


def image(picture: str, alt: str) -> str:
    """An HTML image of an SVG `picture`: nothing in it can act upon the page."""
    return f'<img alt="{html.escape(alt)}" style="max-width: 100%" src="{_address(picture)}">'


def hoverable(picture: str, alt: str) -> str:
    """The same, whose titles are shown on hover, which a browser does in no image.

    Where a page allows no objects (JupyterLab in a notebook that is not trusted) it is an image.
    """
    # A document of another scheme than the page's would get a background of its own.
    style = "max-width: 100%; color-scheme: light"
    return (
        f'<object type="image/svg+xml" style="{style}" data="{_address(picture)}">'
        f"{image(picture, alt)}</object>"
    )


def _address(picture: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def _legend(names: Sequence[str], series: Series) -> Iterator[str]:
    left = float(LABELS)
    for name in names:
        yield box(left, 4, 10, 10, series[name])
        yield text(left + 14, 9, name)
        left += 28 + 0.6 * FONT * len(name)


def _bar(
    top: float,
    bar: Mapping[str, float],
    series: Series,
    scale: float,
    told: Callable[[float], str],
) -> Iterator[str]:
    left = float(LABELS)
    for name, amount in bar.items():
        yield box(left, top, amount * scale, BAR - 1, series[name])
        left += amount * scale
    yield text(left + 4, top + BAR / 2, told(sum(bar.values())), size=FONT - 2)


def _fitting(label: str) -> str:
    """The end of a long path says more than its beginning."""
    return label if len(label) <= LETTERS else "\N{HORIZONTAL ELLIPSIS}" + label[1 - LETTERS :]


def box(x: float, y: float, width: float, height: float, look: tuple[str, float]) -> str:
    """A rectangle in SVG; `look` is its colour and opacity."""
    colour, opacity = look
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height}" '
        f'fill="{colour}" fill-opacity="{opacity}"/>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = FONT) -> str:
    """Words in SVG, their middle at the height `y`."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT}" font-size="{size}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{html.escape(words)}</text>'
    )
