"""The code of a model, each line with the time, the memory and the operators that it causes.

Torch's capture knows the line that every operator comes from, and a gradient has the line of its
operator. The times are those of `profile`, the saved bytes those of `memory`.
"""

from __future__ import annotations

import ast
import dataclasses
import html
import itertools
import linecache
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ortlab.engines.ort.model import OrtModel
from ortlab.graph.capture import Graphs, Node, Place, Stage
from ortlab.graph.captured import TORCH, last_step
from ortlab.graph.memory import MemoryPlan, plan_of
from ortlab.graph.profile import Profile
from ortlab.settings import unknown_name
from ortlab.utils.errors import short_place
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, escaped

_FOLDED: Final = 4
"""Lines without operators from which on they are folded."""
_MOST_NODES: Final = 12
"""Nodes that are named for each phase of a line; `SourceLines.nodes` has all."""
_BAR: Final = "rgba(47, 127, 208, 0.25)"

_STYLE: Final = """
<style>
.ortlab-lines {overflow-x: auto}
.ortlab-lines h4 {margin: 12px 0 4px; font-weight: 600}
.ortlab-lines .row {display: grid; gap: 0 12px; white-space: pre;
  font: var(--jp-code-font-size, 13px) / 1.5 var(--jp-code-font-family, monospace);
  grid-template-columns: 3em minmax(20em, 1fr) repeat(var(--columns), 6.6em) 6em}
.ortlab-lines .row > span {text-align: right}
.ortlab-lines .row > :nth-child(2) {text-align: left; overflow: hidden; text-overflow: ellipsis}
.ortlab-lines .row > :first-child, .ortlab-lines .head, .ortlab-lines .plain {opacity: 0.65}
.ortlab-lines summary {cursor: pointer; list-style: none}
.ortlab-lines summary:hover {background: rgba(128, 128, 128, 0.15)}
.ortlab-lines .torch {color: var(--jp-warn-color1, #c66a00)}
.ortlab-lines ul {margin: 2px 0 6px 5em; padding: 0; list-style: none}
.ortlab-lines p {margin: 4px 0}
</style>
"""


@dataclass(frozen=True)
class SourceLine:
    """A line of code.

    Attributes:
        number: Its number in the file, starting at 1.
        code: Its text.
        nodes: Nodes that compute it and its gradients, in the order in which they run, without
            views.
        us: Microseconds of these nodes in a step, by phase.
        eager_us: Microseconds of the line and its gradients in eager torch.
        saved_bytes: Size of its results that are stored for the backward pass.
    """

    number: int
    code: str
    nodes: tuple[Node, ...] = ()
    us: Mapping[str, float] = field(default_factory=dict)
    eager_us: float = 0.0
    saved_bytes: int = 0

    @property
    def runs_in(self) -> str:
        """Runtime of its operators: "ORT", "torch" or "ORT, torch"; empty without operators."""
        return ", ".join(sorted({TORCH if _is_torch(node) else "ORT" for node in self.nodes}))


@dataclass(frozen=True)
class Function:
    """A function that a step runs.

    Attributes:
        name: Its name, after those of the classes and functions around it.
        file: File of its code.
        lines: Its lines. If its code cannot be read any more, only those that cause operators.
    """

    name: str
    file: str
    lines: tuple[SourceLine, ...]

    @property
    def place(self) -> str:
        """Its first line, such as "model.py:12"."""
        return short_place(self.file, self.lines[0].number)


class SourceLines:
    """The code of a model, line by line, as text and as HTML.

    Args:
        profile: Time of a step.
        stage: Graph of that step.
        graphs: All graphs of that model.
        order: The lines of code, in the order in which the model runs them.
        plan: Memory plan of that graph; None for a graph without a backward pass.

    Attributes:
        functions: Functions that the step runs, in the order of their first lines.
        graphs: All graphs of that model.
    """

    def __init__(
        self,
        profile: Profile,
        stage: Stage,
        graphs: Graphs,
        order: Sequence[Place],
        plan: MemoryPlan | None,
    ) -> None:
        self._profile = profile
        self.graphs = graphs
        self._us = profile.overlay(stage).values
        saved: defaultdict[str, int] = defaultdict(int)
        for held in () if plan is None else plan.saved():
            saved[held.tensor.node] += held.size_bytes
        found: dict[Place, list[Node]] = {}
        for node in stage.nodes:
            if node.place is not None:
                found.setdefault(node.place, []).append(node)
        lines = {
            place: self._line(place, found[place], stage, saved)
            for place in dict.fromkeys((*order, *found))
            if place in found
        }
        self.functions = tuple(_functions(lines))
        self._lines = lines

    def _line(
        self, place: Place, nodes: Sequence[Node], stage: Stage, saved: Mapping[str, int]
    ) -> SourceLine:
        us = {
            phase: sum(self._us.get(node.name, 0.0) for node in nodes if node.phase == phase)
            for phase in self._profile.phases
        }
        eager = self._profile.eager.line_us
        return SourceLine(
            place[1],
            nodes[0].source.partition(": ")[2],
            tuple(node for node in nodes if not stage.is_view(node)),
            us,
            sum(eager.get((place, phase), 0.0) for phase in self._profile.phases),
            sum(saved.get(node.name, 0) for node in nodes),
        )

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """Lines that cause operators."""
        return tuple(self._lines.values())

    @property
    def stage(self) -> str:
        """Name of the stage of `graphs` whose nodes compute the lines."""
        return "execution" if "backward" in self._profile.phases else "eval"

    @property
    def joined(self) -> float:
        """Share of the operators' time that belongs to a line."""
        total = sum(node.us for node in self._profile.nodes)
        return sum(sum(line.us.values()) for line in self.lines) / (total or 1.0)

    def nodes(self, place: str) -> Table[Node]:
        """Return a table of the nodes that compute a line and its gradients.

        Args:
            place: Line, such as "model.py:12", or "cell 2, line 9" in a notebook.

        Raises:
            ValueError: If the line causes no operators.
        """
        known: defaultdict[str, list[Node]] = defaultdict(list)
        for at, line in self._lines.items():  # files in two folders can have the same name
            known[short_place(*at)] += line.nodes
        if place not in known:
            raise ValueError(f"{place!r}: {unknown_name(place, known)}")
        columns: list[Column[Node]] = [
            Column("node", lambda node: node.name),
            Column("operator", lambda node: node.op),
            Column("module", lambda node: node.module),
            Column("phase", lambda node: node.phase),
            Column("us", lambda node: f"{self._us.get(node.name, 0.0):.0f}", number=True),
        ]
        return Table(known[place], columns)

    def __repr__(self) -> str:
        parts = [self._profile.headline, *self._notes()]
        for function in self.functions:
            parts += ["", f"{function.name} in {escaped(function.place)}"]
            rows = [self._heads, *(self._cells(line) for line in function.lines)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            gap = " " * (sum(widths) + 2 * len(widths))
            parts.append("  ".join(map(str.rjust, self._heads, widths)))
            for part in _folded(function.lines):
                if len(part) > 1:
                    parts.append(f"{gap}{'...':>5}")
                    continue
                (line,) = part
                cells = "  ".join(map(str.rjust, self._cells(line), widths))
                parts.append(f"{cells}  {line.number:>5}  {escaped(line.code)}".rstrip())
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        told = (*self._notes(), "a click on a line lists the nodes that compute it")
        notes = "<br>".join(map(html.escape, told))
        most = max((sum(line.us.values()) for line in self.lines), default=0.0) or 1.0
        heads = "".join(f"<span>{each}</span>" for each in ("", "", *self._heads))
        head = f'<div class="row head">{heads}</div>'
        functions = "".join(
            f"<h4>{html.escape(function.name)} <small>in "
            f"{html.escape(function.place)}</small></h4>{head}"
            + "".join(self._part(part, most) for part in _folded(function.lines))
            for function in self.functions
        )
        return (
            f'{_STYLE}<div class="ortlab-lines" style="--columns: {len(self._heads) - 1}">'
            f"<p><b>{html.escape(self._profile.headline)}</b></p><p>{notes}</p>{functions}</div>"
        )

    def _part(self, lines: Sequence[SourceLine], most: float) -> str:
        """Return a line in HTML, or several that are folded."""
        if len(lines) > 1:
            rows = "".join(self._row(line, most) for line in lines)
            return (
                f'<details><summary class="row plain"><span></span><span>... {len(lines)} lines'
                f"</span></summary>{rows}</details>"
            )
        (line,) = lines
        if not line.nodes:
            return self._row(line, most)
        listed = "".join(self._listed(line, phase) for phase in self._profile.phases)
        return f"<details>{self._row(line, most, 'summary')}<ul>{listed}</ul></details>"

    def _row(self, line: SourceLine, most: float, tag: str = "div") -> str:
        cells = [f"<span>{cell}</span>" for cell in self._cells(line)]
        if TORCH in line.runs_in:
            cells[-1] = f'<span class="torch">{line.runs_in}</span>'
        width = f"{sum(line.us.values()) / most:.1%}"
        bar = f"linear-gradient(to right, {_BAR} {width}, transparent {width})"
        style = f' style="background: {bar}"' if line.nodes else ""
        text = html.escape(escaped(line.code))
        code = f'<span{style} title="{text.strip()}">{text or " "}</span>'
        kind = 'class="row plain"'
        if line.nodes:
            place = line.nodes[0].source.partition(": ")[0]
            kind = f'class="row" data-line="{html.escape(place)}"'
        return f"<{tag} {kind}><span>{line.number}</span>{code}{''.join(cells)}</{tag}>"

    def _listed(self, line: SourceLine, phase: str) -> str:
        """Return the nodes of a line in one phase as an item of a list in HTML."""
        nodes = [node for node in line.nodes if node.phase == phase]
        if not nodes:
            return ""
        names = [
            f"{html.escape(node.op)} <i>{html.escape(escaped(node.name))}</i>"
            for node in nodes[:_MOST_NODES]
        ]
        if len(nodes) > _MOST_NODES:
            names.append(f"and {len(nodes) - _MOST_NODES} more")
        return f"<li>{phase}: {', '.join(names)}</li>"

    @property
    def _heads(self) -> tuple[str, ...]:
        return (*(f"{phase} ms" for phase in self._profile.phases), "eager ms", "saved", "runs in")

    def _cells(self, line: SourceLine) -> tuple[str, ...]:
        """Return what a line costs, as text below `_heads`."""
        if not line.nodes:
            return ("",) * len(self._heads)
        each = (*(line.us.get(phase, 0.0) for phase in self._profile.phases), line.eager_us)
        times = (f"{us / 1000:.2f}" for us in each)
        return (*times, memory(line.saved_bytes) if line.saved_bytes else "", line.runs_in)

    def _notes(self) -> Iterator[str]:
        yield from self._profile.notes
        yield (
            f"{self.joined:.0%} of the operators' time is in these lines; gradients count for the "
            "lines of their operators"
        )
        if saved := sum(line.saved_bytes for line in self.lines):
            yield f"{memory(saved)} of results are stored for the backward pass"


def source_lines(record: OrtModel, profile: Profile, graphs: Graphs) -> SourceLines:
    """Return the code of a model whose step was timed.

    Args:
        record: Record of the model.
        profile: Time of its step.
        graphs: Graphs of that step.
    """
    stage, sizes, order = last_step(record)
    trains = "backward" in profile.phases
    plan = plan_of(stage, sizes, record.module, "adamw") if trains else None
    return SourceLines(profile, stage, graphs, order, plan)


def _is_torch(node: Node) -> bool:
    return node.op.startswith(f"{TORCH}.")


def _folded(lines: Sequence[SourceLine]) -> Iterator[Sequence[SourceLine]]:
    """Iterate over lines one by one, but for many without operators in a row."""
    for _, each in itertools.groupby(lines, key=lambda line: bool(line.nodes)):
        group = tuple(each)
        if group[0].nodes or len(group) < _FOLDED:
            yield from ((line,) for line in group)
        else:
            yield group


def _functions(lines: Mapping[Place, SourceLine]) -> Iterator[Function]:
    """Iterate over the functions that contain lines, in the order of their first ones."""
    texts = {file: _text(file, lines) for file, _ in lines}
    scopes = {file: _scopes(text) for file, text in texts.items()}
    found: dict[tuple[str, _Scope], list[SourceLine]] = defaultdict(list)
    for (file, number), line in lines.items():
        within = [scope for scope in scopes[file] if scope.first <= number <= scope.last]
        innermost = max(within, key=lambda scope: scope.first, default=_Scope("", 0, 0))
        found[file, innermost].append(line)
    for (file, scope), known in found.items():
        numbered = {line.number: line for line in sorted(known, key=lambda line: line.number)}
        if scope.name:
            code = textwrap.dedent("\n".join(texts[file][scope.first - 1 : scope.last]))
            every = [
                dataclasses.replace(numbered.get(number, SourceLine(number, text)), code=text)
                for number, text in enumerate(code.splitlines(), scope.first)
            ]
            yield Function(scope.name, file, tuple(every))
        else:
            yield Function(Path(file).name, file, tuple(numbered.values()))


@dataclass(frozen=True)
class _Scope:
    """Name of a function, and the numbers of its first and of its last line."""

    name: str
    first: int
    last: int


def _text(file: str, lines: Mapping[Place, SourceLine]) -> list[str]:
    """Return the lines of a file; none if they are not those that were captured."""
    linecache.checkcache(file)
    text = [line.rstrip("\n") for line in linecache.getlines(file)]
    for (of, number), line in lines.items():
        if of == file and (number > len(text) or text[number - 1].strip() != line.code):
            return []
    return text


def _scopes(text: Sequence[str]) -> list[_Scope]:
    """Return the functions in the text of a file."""
    try:
        tree = ast.parse("\n".join(text))
    except SyntaxError:  # a cell with magics
        return []
    found = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
                if not isinstance(child, ast.ClassDef):
                    last = child.end_lineno or child.lineno
                    found.append(_Scope(".".join(inner), child.lineno, last))
            walk(child, inner)

    walk(tree, ())
    return found
