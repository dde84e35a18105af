"""Small picture of a stage's outermost modules, for saved notebooks and printed pages.

Forward runs down on the left and the gradient up on the right, with a module in the same row of
both. Edges to the next row are arrows, edges that skip rows are arcs.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.graph.capture import Stage
from ortlab.graph.module_tree import Module, Outline
from ortlab.utils.svg_bars import PAPER, TEXT
from ortlab.utils.wording import shortened

ROWS: Final = 24
"""Maximum number of rows of a picture, as far as folding allows."""
_ENOUGH = 6  # from this many rows on, only modules with more than half of all nodes are unfolded
_BOX, _HIGH, _STEP, _SIDE, _TOP = 210, 22, 34, 70, 26  # pixels
_LINE = "#8a8a8a"
_FILL: Final[Mapping[str, str]] = {"forward": "#2f7fd0", "backward": "#d9772b"}
_TITLES: Final[Mapping[str, str]] = {"forward": "forward", "backward": "gradient"}
_LABEL = 32  # characters that fit into a box


@dataclass(frozen=True)
class Row:
    """A row of the picture.

    Attributes:
        label: Name of its module.
        counts: Number of nodes by phase.
    """

    label: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Sketch:
    """Layout of the picture.

    Attributes:
        rows: Rows from top to bottom.
        edges: Pairs of rows (source, target) by phase.
        between: Number of nodes of unfolded modules, which are drawn as edges only.
    """

    rows: Sequence[Row]
    edges: Mapping[str, Sequence[tuple[int, int]]]
    between: int


def sketch(stage: Stage, outline: Outline) -> Sketch:
    """Lay out a stage in a readable number of rows.

    Args:
        stage: The stage.
        outline: Outline of the same stage.
    """
    row_of = _folded(outline)
    places: defaultdict[int, list[int]] = defaultdict(list)
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    edges: dict[str, dict[tuple[int, int], None]] = {phase: {} for phase in _TITLES}
    origins: dict[tuple[str, str], frozenset[int]] = {}
    for i, (node, module) in enumerate(zip(stage.nodes, outline.module_of, strict=True)):
        row, phase = row_of[module], node.phase
        sources = frozenset().union(*(origins.get((phase, n), ()) for n in node.inputs))
        if row is not None:
            edges[phase] |= {(source, row): None for source in sources if source != row}
            places[row].append(i)
            counts[row][phase] += 1
            sources = frozenset((row,))
        origins |= {(phase, name): sources for name in node.outputs}
    order = _order({row: sum(at) / len(at) for row, at in places.items()}, edges["forward"])
    at = {row: i for i, row in enumerate(order)}
    return Sketch(
        [Row(_label(outline.modules[row]), counts[row]) for row in order],
        {phase: [(at[a], at[b]) for a, b in found] for phase, found in edges.items()},
        len(stage.nodes) - sum(map(len, places.values())),
    )


def _folded(outline: Outline) -> list[int | None]:
    """Return for each module the module it is folded into; None if it is unfolded.

    The largest modules are unfolded first; modules of similar size are unfolded together.
    """
    modules = outline.modules
    opened: set[int] = set()
    while True:
        folded = [i for i, m in enumerate(modules) if i not in opened and m.parent in opened]
        sizes = {i: modules[i].forward + modules[i].backward for i in folded or [0]}
        largest = {i for i, size in sizes.items() if size > 0.9 * max(sizes.values())}
        within = sum(module.parent in largest for module in modules)
        rows = len(sizes) - len(largest) + within
        even = 2 * max(sizes.values()) <= len(outline.module_of)
        if not within or rows > ROWS or (even and len(sizes) >= _ENOUGH):
            break
        opened |= largest
    found: list[int | None] = []
    for i, module in enumerate(modules):
        above = found[module.parent] if i else None
        found.append(None if i in opened else i if above is None else above)
    return found


def _order(groups: Mapping[int, float], edges: Collection[tuple[int, int]]) -> list[int]:
    """Return the rows in topological order of forward; ties are broken by mean node index.

    A module that is called again creates a cycle, of which the row with the lowest mean comes
    first.
    """
    order: list[int] = []
    left = set(groups)
    while left:
        free = [g for g in left if not any(b == g and a in left for a, b in edges)]
        order.append(min(free or left, key=lambda group: groups[group]))
        left.discard(order[-1])
    return order


def _label(module: Module) -> str:
    """Return a module's name, with its parent's if it is a number: "layer.0" instead of "0"."""
    parts = module.path.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) or "the model"


def svg(picture: Sketch) -> str:
    """Return a picture as SVG, about 600 pixels wide.

    Args:
        picture: Layout of the picture.
    """
    phases = [
        phase for phase in ("forward", "backward") if any(r.counts[phase] for r in picture.rows)
    ]
    left = {phase: _SIDE + i * (_BOX + 36) for i, phase in enumerate(phases)}
    width = _SIDE + max(len(phases), 2) * (_BOX + 36) - 36 + _SIDE  # room for the text below too
    height = _TOP + _STEP * len(picture.rows) + (16 if picture.between else 0)
    parts = []
    if picture.between:
        words = f"{picture.between:,} more nodes between these modules"
        parts.append(_text(_SIDE, height - 6, words, "start"))
    for phase in phases:
        x = left[phase]
        parts.append(_text(x + _BOX / 2, 14, _TITLES[phase], "middle", bold=True))
        parts += [_edge(a, b, x, phase) for a, b in picture.edges[phase]]
        parts += [
            _box(row, x, _TOP + i * _STEP, phase)
            for i, row in enumerate(picture.rows)
            if row.counts[phase]
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="11">'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 1 10 5 0 9z" fill="{_LINE}"/></marker></defs>'
        f"{PAPER}{''.join(parts)}</svg>"
    )


def _box(row: Row, x: int, y: int, phase: str) -> str:
    color = _FILL[phase]
    count = row.counts[phase]
    label = shortened(row.label, _LABEL)
    return (
        f'<g><title>{html.escape(row.label)}</title><rect x="{x}" y="{y}" width="{_BOX}" '
        f'height="{_HIGH}" rx="4" fill="{color}" fill-opacity="0.1" stroke="{color}"/>'
        f"{_text(x + 8, y + 15, label, 'start')}"
        f"{_text(x + _BOX - 8, y + 15, f'{count:,}', 'end')}</g>"
    )


def _edge(source: int, target: int, x: int, phase: str) -> str:
    down = target > source
    start = _TOP + source * _STEP + (_HIGH if down else 0)
    end = _TOP + target * _STEP + (0 if down else _HIGH)
    if abs(target - source) == 1:
        path = f"M{x + _BOX / 2} {start}V{end}"
    else:
        side = x if phase == "forward" else x + _BOX
        out = min(_SIDE - 6, 10 + 6 * abs(target - source)) * (-1 if phase == "forward" else 1)
        a, b = _TOP + source * _STEP + _HIGH / 2, _TOP + target * _STEP + _HIGH / 2
        path = f"M{side} {a}C{side + out} {a} {side + out} {b} {side} {b}"
    return f'<path d="{path}" fill="none" stroke="{_LINE}" marker-end="url(#tip)"/>'


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{TEXT}"{weight}>'
        f"{html.escape(text)}</text>"
    )
