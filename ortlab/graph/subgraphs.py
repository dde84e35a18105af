"""Subgraphs that ORT's memory optimizer can recompute, as ORT lists them for ORTModule.

A plan such as "BiasGelu+:1:-1" names the operators of a subgraph, the type of its recomputation
and the number of its occurrences, with -1 for all. Type 1 saves the results that are stored for the
backward pass; type 2, with compromise, a part of them. ORT's list is that of ``MemoryObserver`` in
onnxruntime/training/ortmodule/_runtime_inspector.py, its documentation docs/Memory_Optimizer.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sympy.parsing.sympy_parser import parse_expr

from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table

_OPTIONS: Final = {"1": "recompute", "2": "recompute with compromise"}
_ROW: Final = re.compile(r"\|(\d+) *\|")
_OPTION: Final = re.compile(r">>Option \d+ *: (Recompute|RecomputeWithCompromise) subgraph (\S+)")
_SHARED: Final = "- ReuseFreq"
_RESULT: Final = re.compile(r"- Output \d+ *: \[(.+)\], byte/elem: (\d+), (\d+)% saved")
_WHOLE: Final = re.compile(r"\.0+(?!\d)")
_MOST_SHAPES: Final = 3


@dataclass(frozen=True)
class Subgraph:
    """A kind of subgraphs that one of ORT's plans recomputes.

    Attributes:
        plan: Plan as the setting ``recompute`` takes it, "BiasGelu+:1:-1". Several separated by
            commas depend on each other.
        options: What the plan does: "recompute", or "recompute with compromise", which saves a
            part.
        frequency: Number of occurrences.
        shapes: Shapes of the results that are not stored, with names for sizes of the batch.
        saved_bytes: Bytes of all of them together; None if a size is unknown.
        formula: These bytes with names for the sizes, such as "8192*batch*seq".
        active: True if the graph in use applies the plan.
    """

    plan: str
    options: str
    frequency: int
    shapes: tuple[str, ...]
    saved_bytes: int | None
    formula: str
    active: bool

    @property
    def operators(self) -> str:
        """Names of the operators, as ORT joins them: "FusedMatMul+Softmax+"."""
        return ", ".join(plan.partition(":")[0] for plan in self.plan.split(","))


class Subgraphs(Sequence[Subgraph]):
    """ORT's recomputable subgraphs of a model, shown as a table, the largest savings first.

    Args:
        found: Plans with ORT's summary of each.
        results: ORT's table of the results that plans do not store.
        active: Plans that the graph in use applies.
        sizes: ORT's names of the sizes, each with the name to show and its value.
        notes: Lines shown below the table.
    """

    def __init__(
        self,
        found: Mapping[str, Any],
        results: str,
        *,
        active: Collection[str],
        sizes: Mapping[str, tuple[str, int | None]],
        notes: Sequence[str] = (),
    ) -> None:
        self._notes = tuple(notes)
        rows = [
            _subgraph(
                plan,
                summary,
                _of_plan(_nodes(results), plan, summary.freq),
                sizes,
                active=set(plan.split(",")) <= set(active),
            )
            for plan, summary in found.items()
        ]
        self._rows = sorted(rows, key=lambda row: -(row.saved_bytes or 0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def table(self) -> Table[Subgraph]:
        """Return a table with a row for each plan."""
        columns: list[Column[Subgraph]] = [
            Column("", lambda row: "x" if row.active else ""),
            Column("plan", lambda row: row.plan),
            Column("option", lambda row: row.options),
            Column("frequency", lambda row: str(row.frequency), number=True),
            Column("activations", lambda row: _listed(row.shapes)),
            Column("saved", lambda row: _told(row.saved_bytes), number=True),
            Column("in symbols", lambda row: row.formula),
        ]
        empty = "ORT finds nothing to recompute in the model's graph"
        return Table(self._rows, columns, notes=self._notes, empty=empty)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@dataclass
class _Nodes:
    """Nodes of one row of ORT's table: the last ones of a subgraph, with the same results.

    Attributes:
        plan: Plan for them.
        frequency: Number of the nodes.
        shared: True if a result shares the memory of another node's.
        results: Shape of each result in ORT's text, and the bytes saved of an element.
    """

    plan: str
    frequency: int
    shared: bool = False
    results: list[tuple[str, float]] = field(default_factory=list)


def _nodes(text: str) -> list[_Nodes]:
    """Return the rows of ORT's table of the results that plans do not store."""
    found: list[_Nodes] = []
    frequency = 0
    for line in text.splitlines():
        if match := _ROW.match(line):
            frequency = int(match[1])
        if match := _OPTION.search(line):
            kind = 1 if match[1] == "Recompute" else 2
            found.append(_Nodes(f"{match[2]}:{kind}:-1", frequency))
        elif _SHARED in line:
            found[-1].shared = True
        elif match := _RESULT.search(line):
            found[-1].results.append((match[1], int(match[2]) * int(match[3]) / 100))
    return found


def _of_plan(nodes: Sequence[_Nodes], plan: str, frequency: int) -> list[_Nodes]:
    """Return the nodes that ORT counts for a plan; none if it is not clear which they are.

    Nodes that share memory with others that have a plan count for both plans together only.
    """
    found: list[_Nodes] = []
    for part in plan.split(","):
        own = [each for each in nodes if each.plan == part]
        alone, shared = ([n for n in own if n.shared is also] for also in (False, True))
        counted = [n for n in (own, alone, shared) if sum(m.frequency for m in n) == frequency]
        if not counted:
            return []
        found += counted[0]
    return found


def _subgraph(
    plan: str,
    summary: Any,
    nodes: Sequence[_Nodes],
    sizes: Mapping[str, tuple[str, int | None]],
    *,
    active: bool,
) -> Subgraph:
    saved = summary.simplified_symbolic_saving_expr
    results = [(each.frequency, *result) for each in nodes for result in each.results]
    if results:
        # ORT's own sum has only one result of a node with several, such as LayerNormalization.
        saved = parse_expr("+".join(f"{count}*{shape}*{size}" for count, shape, size in results))
    symbols = {str(symbol): symbol for symbol in saved.free_symbols}
    shown = {dim: name for dim, (name, _) in sizes.items()}
    named = {symbol: type(symbol)(shown.get(name, name)) for name, symbol in symbols.items()}
    known = {symbols[dim]: size for dim, (_, size) in sizes.items() if dim in symbols and size}
    total = saved.subs(known)
    kinds = dict.fromkeys(_OPTIONS[each.split(":")[1]] for each in plan.split(","))
    return Subgraph(
        plan,
        " and ".join(kinds),
        summary.freq,
        tuple(dict.fromkeys(_shape(shape, shown) for _, shape, _ in results)),
        round(total) if total.is_number else None,
        _WHOLE.sub("", str(saved.subs(named))),
        active,
    )


def _shape(text: str, shown: Mapping[str, str]) -> str:
    """Return a shape in ORT's text, "((input_ids_dim0)*(32))", as "batch x 32"."""
    sizes, depth = [""], 0
    for letter in text[1:-1]:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "*" and depth == 0:
            sizes.append("")
        else:
            sizes[-1] += letter
    inside = (size[1:-1] if size.startswith("(") else size for size in sizes)
    return " x ".join(re.sub(r"\w+", lambda word: shown.get(word[0], word[0]), s) for s in inside)


def _listed(shapes: Sequence[str]) -> str:
    more = len(shapes) - _MOST_SHAPES
    return ", ".join(shapes[:_MOST_SHAPES]) + (f" and {more} more" if more > 0 else "")


def _told(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else memory(size_bytes)
