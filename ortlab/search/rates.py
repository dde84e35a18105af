"""Rates of set-ups with their quartiles, as text and as a static bar chart."""

from __future__ import annotations

from collections.abc import Sequence

from ortlab.bench.interleaved import Spread
from ortlab.utils import svg_bars
from ortlab.utils.tables import rounded

COLOR = "#4a86cf"
ROW, LABEL, NUMBER, LETTERS = 20, 220, 160, 36
ROOM = svg_bars.WIDTH - LABEL - NUMBER
"""Sizes in the chart: row height, width of labels, numbers and bars in pixels; label letters."""


def with_quartiles(rate: Spread | None) -> str:
    """Return a rate as text: the median, with the quartiles in parentheses.

    Args:
        rate: Rate to format. None, for one that was not measured, gives an empty string.
    """
    if rate is None:
        return ""
    return f"{rounded(rate.median)} ({rounded(rate.low)} to {rounded(rate.high)})"


def picture(rows: Sequence[tuple[str, Spread | None, str]], unit: str) -> str:
    """Return rates as a bar chart in SVG, with a line from the lower to the upper quartile.

    Args:
        rows: Label, rate, and the text to show if there is no rate.
        unit: Unit of the rates, per second.
    """
    highest = max((rate.high for _, rate, _ in rows if rate is not None), default=0.0)
    scale = ROOM / (highest or 1.0)
    parts = []
    for place, (label, rate, words) in enumerate(rows):
        middle = ROW * place + ROW / 2
        parts.append(svg_bars.text(LABEL - 8, middle, label[:LETTERS], anchor="end"))
        if rate is None:
            parts.append(svg_bars.text(LABEL, middle, words[:LETTERS]))
            continue
        parts.append(svg_bars.box(LABEL, middle - 6, rate.median * scale, 12, (COLOR, 0.8)))
        low, high = LABEL + rate.low * scale, LABEL + rate.high * scale
        parts.append(
            svg_bars.box(low, middle - 0.75, max(high - low, 1.0), 1.5, (svg_bars.TEXT, 1))
        )
        for end in (low, high):
            parts.append(svg_bars.box(end - 0.75, middle - 4, 1.5, 8, (svg_bars.TEXT, 1)))
        parts.append(svg_bars.text(high + 6, middle, f"{rounded(rate.median)} {unit}/s"))
    height = ROW * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg_bars.WIDTH} {height}" '
        f'width="{svg_bars.WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="{svg_bars.FONT}">{svg_bars.PAPER}{"".join(parts)}</svg>'
    )
