"""Rates of set-ups with their quartiles: in words, and as bars in one static picture."""

from __future__ import annotations

from collections.abc import Sequence

from ortlab.bench.interleaved import Spread
from ortlab.utils import svg_bars
from ortlab.utils.tables import rounded

COLOUR = "#4a86cf"
ROW, LABEL, NUMBER, LETTERS = 20, 220, 160, 36
ROOM = svg_bars.WIDTH - LABEL - NUMBER
"""Of the picture, in its pixels: a row, the labels, the numbers, the bars; letters of a label."""


def with_quartiles(rate: Spread | None) -> str:
    """The median, and the quartiles in brackets; nothing where it was not measured."""
    if rate is None:
        return ""
    return f"{rounded(rate.median)} ({rounded(rate.low)} to {rounded(rate.high)})"


def picture(rows: Sequence[tuple[str, Spread | None, str]], unit: str) -> str:
    """Rates as bars, in SVG; a line from the lower to the upper quartile.

    `rows` are a label, the rate, and what is said where there is none.
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
        parts.append(svg_bars.box(LABEL, middle - 6, rate.median * scale, 12, (COLOUR, 0.8)))
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
        f'font-size="{svg_bars.FONT}">{"".join(parts)}</svg>'
    )
