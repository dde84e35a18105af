"""The outermost modules of a stage as one small picture, for saved notebooks and printed pages.

Forward runs down on the left, the gradient up on the right, a module in the same row of both. What
goes to the next row is an arrow, what skips rows an arc. The colours read well on light and dark.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.graph.capture import Stage
from ortlab.graph.outline import Outline

ROWS: Final = 20
"""That a picture has, at most, where folding can do it."""
_BOX, _HIGH, _STEP, _SIDE, _TOP = 210, 22, 34, 70, 26  # pixels
_TEXT, _LINE = "#7a7a7a", "#8a8a8a"
_FILL: Final[Mapping[str, str]] = {"forward": "#2f7fd0", "backward": "#d9772b"}
_TITLES: Final[Mapping[str, str]] = {"forward": "forward", "backward": "gradient"}
_LABEL = 32  # characters that fit into a box


@dataclass(frozen=True)
class Row:
    """What a row of the picture stands for, and how many nodes of each phase it has."""

    label: str
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Sketch:
    """The picture before it is drawn: rows from above, edges between rows for each phase."""

    rows: Sequence[Row]
    edges: Mapping[str, Sequence[tuple[int, int]]]


def sketch(stage: Stage, outline: Outline) -> Sketch:
    """`stage` in as many rows as are easy to take in; `outline` is of the same stage."""
    row_of = _folded(outline)
    groups = [row_of[module] for module in outline.module_of]
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    ops: defaultdict[int, Counter[str]] = defaultdict(Counter)
    places: defaultdict[int, list[int]] = defaultdict(list)
    edges: dict[str, dict[tuple[int, int], None]] = {phase: {} for phase in _TITLES}
    made: dict[tuple[str, str], int] = {}
    for i, (node, group) in enumerate(zip(stage.nodes, groups, strict=True)):
        counts[group][node.phase] += 1
        ops[group][node.op.rpartition(".")[2]] += 1
        places[group].append(i)
        for name in node.inputs:
            if (maker := made.get((node.phase, name), group)) != group:
                edges[node.phase][maker, group] = None
        made |= {(node.phase, name): group for name in node.outputs}
    means = {group: sum(found) / len(found) for group, found in places.items()}
    order = _order(means, edges["forward"])
    row = {group: i for i, group in enumerate(order)}
    return Sketch(
        [Row(_label(outline, group, row_of, ops[group]), counts[group]) for group in order],
        {phase: [(row[a], row[b]) for a, b in found] for phase, found in edges.items()},
    )


def _folded(outline: Outline) -> list[int]:
    """For each module the one that it is folded into; an unfolded one stands for itself alone.

    The largest are unfolded first, those that are alike together.
    """
    modules = outline.modules
    opened: set[int] = set()
    while True:
        folded = [
            i for i, m in enumerate(modules) if i not in opened and (m.parent in opened or i == 0)
        ]
        sizes = [modules[i].forward + modules[i].backward for i in folded]
        largest = [i for i, size in zip(folded, sizes, strict=True) if size > 0.9 * max(sizes)]
        if not any(module.parent in largest for module in modules):
            break
        wider = opened | set(largest)
        if sum(m.parent in wider or i in wider for i, m in enumerate(modules)) > ROWS:
            break
        opened = wider
    found: list[int] = []
    for i, module in enumerate(modules):
        above = -1 if i == 0 or module.parent in opened else found[module.parent]
        found.append(above if above >= 0 else i)
    return found


def _order(groups: Mapping[int, float], edges: Collection[tuple[int, int]]) -> list[int]:
    """The rows as forward runs through them, and where that leaves a choice by their mean place.

    A module that is called again closes a circle; of a circle the first in place comes first.
    """
    order: list[int] = []
    left = set(groups)
    while left:
        free = [g for g in left if not any(b == g and a in left for a, b in edges)]
        order.append(min(free or left, key=lambda group: groups[group]))
        left.discard(order[-1])
    return order


def _label(outline: Outline, group: int, row_of: Sequence[int], ops: Counter[str]) -> str:
    module = outline.modules[group]
    parts = module.path.split(".")
    name = ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])
    unfolded = any(
        other.parent == group and row_of[i] == i for i, other in enumerate(outline.modules)
    )
    if not unfolded:
        return name or "the model"
    # Of a module that is unfolded, a row has what it computes itself.
    return f"{name or 'the model'}: {', '.join(ops) if len(ops) < 3 else 'its own operators'}"


def svg(picture: Sketch) -> str:
    """The picture as SVG, about 600 pixels wide."""
    phases = [
        phase for phase in ("forward", "backward") if any(r.counts[phase] for r in picture.rows)
    ]
    left = {phase: _SIDE + i * (_BOX + 36) for i, phase in enumerate(phases)}
    width = _SIDE + len(phases) * (_BOX + 36) - 36 + _SIDE
    height = _TOP + _STEP * len(picture.rows)
    parts = []
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
        f"{''.join(parts)}</svg>"
    )


def _box(row: Row, x: int, y: int, phase: str) -> str:
    colour = _FILL[phase]
    count = row.counts[phase]
    label = row.label if len(row.label) <= _LABEL else f"{row.label[: _LABEL - 1]}…"
    return (
        f'<g><title>{html.escape(row.label)}</title><rect x="{x}" y="{y}" width="{_BOX}" '
        f'height="{_HIGH}" rx="4" fill="{colour}" fill-opacity="0.1" stroke="{colour}"/>'
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
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{_TEXT}"{weight}>'
        f"{html.escape(text)}</text>"
    )
