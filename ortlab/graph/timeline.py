"""Static chart of memory over the nodes of a step: stacked tensors, with names on hover."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ortlab.utils.process_memory import memory
from ortlab.utils.svg_bars import FONT, PAPER, TEXT

WIDTH, HEIGHT = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 8, 40, 24
COLUMNS = 150
"""Number of columns of the chart. Each shows the node with the most memory among its nodes."""
DRAWN = 100
"""Number of tensors drawn individually. The rest of each kind is drawn as one area."""
_COLORS = {
    "parameter": "#6c757d",
    "optimizer state": "#a5acb3",
    "batch": "#57a773",
    "activation": "#2f7fd0",
    "gradient": "#d9772b",
    "workspace": "#b5394a",
}
_MIB = 2**20


@dataclass(frozen=True)
class Area:
    """A tensor that is in memory while the nodes `born` to `dies` run."""

    name: str
    kind: str
    module: str
    born: int
    dies: int
    size_bytes: int


def svg(
    areas: Sequence[Area],
    *,
    length: int,
    phases: Sequence[tuple[str, int]],
    kinds: Sequence[str],
) -> str:
    """Return the chart as SVG.

    Args:
        areas: Tensors to draw.
        length: Number of nodes.
        phases: Name and first node of each phase.
        kinds: Kinds of tensors, in the order in which they are stacked.
    """
    born = np.array([area.born for area in areas])
    dies = np.array([area.dies for area in areas])
    sizes = np.array([area.size_bytes for area in areas])
    stretches = np.array_split(np.arange(length), min(COLUMNS, length))
    nodes = _highest(stretches, _curve(born, dies, sizes, length))
    edges = np.array([*(stretch[0] for stretch in stretches), length])
    # [areas, columns]
    there = (born[:, None] <= nodes) & (nodes <= dies[:, None])
    heights = there * sizes[:, None]
    total = heights.sum(0)
    most = int(total.max())
    place = _Place(length, most)
    parts = [*_axis(place), *_phases(phases, place), *_legend({a.kind for a in areas}, kinds)]
    base = np.zeros(len(nodes))
    for label, kind, height in _stacked(areas, heights, kinds):
        parts.append(_polygon(label, kind, base, height, edges, place))
        base = base + height
    parts += _peak(int(nodes[total.argmax()]), most, place)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'style="max-width: 100%" width="{WIDTH}" role="img" font-family="sans-serif" '
        f'font-size="{FONT}"><title>Memory over the nodes of a step, step memory {memory(most)}'
        f"</title>{PAPER}{''.join(parts)}</svg>"
    )


class _Place:
    """Position of a node and of a number of bytes in the chart."""

    def __init__(self, length: int, most: int) -> None:
        self._across = (WIDTH - LEFT - RIGHT) / max(length, 1)
        self.top = most * 1.05 or 1.0
        self._up = (HEIGHT - TOP - BOTTOM) / self.top

    def x(self, node: float) -> float:
        return LEFT + node * self._across

    def y(self, size_bytes: float) -> float:
        return HEIGHT - BOTTOM - size_bytes * self._up


def _curve(born: np.ndarray, dies: np.ndarray, sizes: np.ndarray, length: int) -> np.ndarray:
    """Return the bytes in memory while each node runs."""
    change = np.zeros(length + 1, dtype=np.int64)
    np.add.at(change, born, sizes)
    np.subtract.at(change, dies + 1, sizes)
    return change.cumsum()[:length]


def _highest(stretches: Sequence[np.ndarray], curve: np.ndarray) -> np.ndarray:
    """Return the node with the most memory of each stretch of nodes."""
    return np.array([stretch[curve[stretch].argmax()] for stretch in stretches])


def _stacked(
    areas: Sequence[Area], heights: np.ndarray, kinds: Sequence[str]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the areas to draw, from the bottom: for each kind large tensors, then the rest as one.

    Tensors that are in memory all the time are drawn as part of the rest.
    """
    passing = [i for i in range(len(areas)) if not heights[i].all()]
    shown = set(sorted(passing, key=lambda i: -heights[i].sum())[:DRAWN])
    for kind in kinds:
        own = [i for i, area in enumerate(areas) if area.kind == kind]
        for i in sorted(set(own) & shown, key=lambda i: areas[i].born):
            yield _label(areas[i]), kind, heights[i]
        rest = [i for i in own if i not in shown]
        if rest:
            height = heights[rest].sum(0)
            yield f"{len(rest)} x {kind}\n{memory(float(height.max()))}", kind, height


def _label(area: Area) -> str:
    where = f" of {area.module}" if area.module else ""
    return f"{area.name}\n{area.kind}{where}\n{memory(area.size_bytes)}"


def _polygon(
    label: str, kind: str, base: np.ndarray, height: np.ndarray, edges: np.ndarray, place: _Place
) -> str:
    """Return a path in steps along the bottom of a tensor's area and back along its top."""
    drawn = np.flatnonzero(height)
    if not len(drawn):
        return ""
    path = []
    for run in np.split(drawn, np.flatnonzero(np.diff(drawn) > 1) + 1):
        lower = _steps(run, base, edges, place)
        upper = _steps(run, base + height, edges, place)
        path.append("M" + "L".join([*lower, *reversed(upper)]) + "Z")
    return (
        f'<path d="{"".join(path)}" fill="{_COLORS[kind]}" stroke="#ffffff" '
        f'stroke-opacity="0.35" stroke-width="0.5"><title>{html.escape(label)}</title></path>'
    )


def _steps(run: np.ndarray, level: np.ndarray, edges: np.ndarray, place: _Place) -> list[str]:
    """Return the corners of a stepped line at `level` along the columns of `run`."""
    points: list[str] = []
    start = run[0]
    for column in [*run[1:], None]:
        if column is not None and level[column] == level[start]:
            continue
        end = run[-1] + 1 if column is None else column
        y = f"{place.y(float(level[start])):.1f}"
        points += [f"{place.x(edges[start]):.1f} {y}", f"{place.x(edges[end]):.1f} {y}"]
        start = column
    return points


def _axis(place: _Place) -> Iterator[str]:
    step = _nice(place.top / 5 / _MIB)
    mark = 0.0
    while mark * _MIB <= place.top:
        y = place.y(mark * _MIB)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{TEXT}" '
            'stroke-opacity="0.25"/>'
        )
        yield _text(LEFT - 6, y, f"{mark:g}", anchor="end")
        mark += step
    yield _text(LEFT - 6, TOP - 10, "MiB", anchor="end")


def _nice(step: float) -> float:
    """Return a round number near `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return power * min((1, 2, 5, 10), key=lambda each: abs(each * power - step))


def _phases(phases: Sequence[tuple[str, int]], place: _Place) -> Iterator[str]:
    for name, first in phases:
        x = place.x(first)
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{TEXT}" '
            'stroke-dasharray="3 3"/>'
        )
        yield _text(x + 4, HEIGHT - BOTTOM + 12, name)


def _legend(used: set[str], kinds: Sequence[str]) -> Iterator[str]:
    left = float(LEFT)
    for kind in kinds:
        if kind in used:
            yield (f'<rect x="{left:.1f}" y="4" width="10" height="10" fill="{_COLORS[kind]}"/>')
            yield _text(left + 14, 9, kind)
            left += 32 + 0.5 * FONT * len(kind)


def _peak(node: int, most: int, place: _Place) -> Iterator[str]:
    x, y = place.x(node + 0.5), place.y(most)
    near_end = x > WIDTH - 140
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="none" stroke="{TEXT}"/>'
    yield _text(
        x - 6 if near_end else x + 6,
        y - 8,
        f"step memory {memory(most)}",
        anchor="end" if near_end else "start",
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{TEXT}" text-anchor="{anchor}" '
        f'dominant-baseline="central">{html.escape(text)}</text>'
    )
