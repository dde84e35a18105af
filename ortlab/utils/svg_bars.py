"""Bar charts as static SVG images, for saved notebooks and printed pages."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Mapping, Sequence

Row = tuple[str, Sequence[Mapping[str, float]]]
"""Label and its bars, one below the other; each bar stacks amounts by name of the series."""
Series = Mapping[str, tuple[str, float]]
"""Color and opacity of each series, by name."""

WIDTH, LABELS, NUMBERS = 900, 290, 70
BAR, GAP, LEGEND = 9, 7, 26
_LINE = 16  # of the legend
TEXT = "#424242"  # 10:1 on `PAPER`
PAPER = '<rect width="100%" height="100%" fill="#fff"/>'
"""White background: letters that suit a light and a dark page alike would be pale on both."""
FONT = 11
LETTERS = 44  # longest label that fits


def milliseconds(us: float) -> str:
    """Format microseconds as milliseconds.

    Args:
        us: Time in microseconds.
    """
    return f"{us / 1000:.2f} ms"


def svg(
    rows: Sequence[Row],
    series: Series,
    *,
    told: Callable[[float], str] = milliseconds,
    limit: float | None = None,
) -> str:
    """Draw a bar chart.

    Args:
        rows: The bars, drawn to scale with the sum of each at its end.
        series: Colors of the series.
        told: Formats a sum.
        limit: Amount at which a vertical line is drawn; bars may cross it. None draws no line.

    Returns:
        The SVG document.
    """
    sums = [sum(bar.values()) for _, bars in rows for bar in bars]
    longest = max([*sums, limit or 0.0], default=0.0) or 1.0
    scale = (WIDTH - LABELS - NUMBERS) / longest
    used = [name for name in series if any(name in bar for _, bars in rows for bar in bars)]
    parts, top = _legend(used, series)
    first = top
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
            f'<line x1="{x:.1f}" y1="{first - 4}" x2="{x:.1f}" y2="{top}" stroke="{TEXT}" '
            'stroke-dasharray="4 3"/>'
        )
        top += GAP
        parts.append(text(x, top, told(limit), anchor="middle"))
        top += GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" font-family="sans-serif" font-size="{FONT}">{PAPER}{"".join(parts)}</svg>'
    )


def image(picture: str, alt: str) -> str:
    """Return an HTML image of an SVG, whose content cannot act on the page.

    Args:
        picture: The SVG document.
        alt: Alternative text.
    """
    return f'<img alt="{html.escape(alt)}" style="max-width: 100%" src="{_address(picture)}">'


def hoverable(picture: str, alt: str) -> str:
    """Return an HTML object of an SVG, which shows its titles on hover; an image does not.

    Where a page does not allow objects (JupyterLab in an untrusted notebook), it falls back to an
    image.

    Args:
        picture: The SVG document.
        alt: Alternative text.
    """
    return (
        f'<object type="image/svg+xml" style="max-width: 100%" data="{_address(picture)}">'
        f"{image(picture, alt)}</object>"
    )


def _address(picture: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()


def _legend(names: Sequence[str], series: Series) -> tuple[list[str], int]:
    """Return the names of the series in lines, and where the bars begin below them."""
    parts: list[str] = []
    left, top = float(LABELS), 0
    for name in names:
        width = 28 + 0.6 * FONT * len(name)
        if left > LABELS and left + width > WIDTH:
            left, top = float(LABELS), top + _LINE
        parts += [box(left, top + 4, 10, 10, series[name]), text(left + 14, top + 9, name)]
        left += width
    return parts, top + LEGEND


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
    """Shorten a label from the left, since the end of a path says more than its beginning."""
    return label if len(label) <= LETTERS else "\N{HORIZONTAL ELLIPSIS}" + label[1 - LETTERS :]


def box(x: float, y: float, width: float, height: float, look: tuple[str, float]) -> str:
    """Return an SVG rectangle.

    Args:
        x: Left edge, in pixels.
        y: Top edge.
        width: Width; negative ones are drawn as 0.
        height: Height.
        look: Color and opacity.
    """
    color, opacity = look
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height}" '
        f'fill="{color}" fill-opacity="{opacity}"/>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = FONT) -> str:
    """Return SVG text.

    Args:
        x: Position of the anchor, in pixels.
        y: Vertical center of the text.
        words: The text, which is escaped.
        anchor: SVG's ``text-anchor``: "start", "middle" or "end".
        size: Font size in pixels.
    """
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT}" font-size="{size}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{html.escape(words)}</text>'
    )
