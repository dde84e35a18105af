"""Outline of a model's modules in an ORT graph: a tree with counts and sums."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ortlab.graph.capture import Node, Overlay, Stage
from ortlab.utils.tables import Column, Table

N = TypeVar("N", int, float)
ROWS: Final = 40
"""Maximum number of rows of an outline as text or in print, which limits its depth."""


@dataclass(frozen=True)
class Module:
    """A module, including all modules within it."""

    path: str
    """Torch's name of the module, empty for the model."""
    name: str
    """Path relative to the parent."""
    parent: int
    """Index of the parent in the outline, -1 for none."""
    depth: int
    calls: int | None = None
    """Number of calls in one forward pass, None if the exported graph is not available."""
    forward: int = 0
    """Number of forward nodes."""
    backward: int = 0
    """Number of nodes that compute its gradient."""
    parameters: int = 0
    """Number of elements of its parameters and buffers."""
    activation_bytes: int | None = None
    """Total size of the outputs of its forward nodes, None if the batch's sizes are unknown."""
    forward_us: float | None = None
    """Time of its forward nodes in microseconds, None if nothing was timed."""
    backward_us: float | None = None
    """Time of its gradient's nodes in microseconds, None if nothing was timed."""


class Outline:
    """Modules of a stage, parents before children, in the order of their first nodes.

    Args:
        stage: Stage whose nodes are counted.
        exported: Exported or captured stage, if available. It has the nodes in the order of the
            user's code and shows how often each module is called.
        sizes: Values for `Stage.dims`. Unless all are given there are no activation bytes.
        time: Microseconds, keyed by node name.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        exported: Stage | None = None,
        sizes: Mapping[str, int] | None = None,
        time: Overlay | None = None,
    ) -> None:
        if stage.name in ("exported", "captured"):
            exported = stage
        traced = stage if exported is None else exported
        used = [node.module for source in (traced, stage) for node in source.nodes]
        owners = {name: name.rpartition(".")[0] for name in stage.parameters}
        rows = _tree(dict.fromkeys([*used, *owners.values()]))
        at = {row.path: i for i, row in enumerate(rows)}
        parents = [row.parent for row in rows]
        self.name = stage.name
        self.module_of = tuple(at[node.module] for node in stage.nodes)
        """Index of each node's module in `modules`."""

        def sums(phase: str, figure: Callable[[Node], N]) -> list[N | int]:
            own: list[N | int] = [0] * len(rows)
            for node, row in zip(stage.nodes, self.module_of, strict=True):
                if node.phase == phase:
                    own[row] += figure(node)
            return _upwards(own, parents)

        def microseconds(node: Node) -> float:
            return 0.0 if time is None else time.values.get(node.name, 0.0)

        def size(node: Node) -> int:
            return sum(stage.bytes_of(name, sizes or {}) or 0 for name in node.outputs)

        parameters = [0] * len(rows)
        for name, tensor in stage.parameters.items():
            parameters[at[owners[name]]] += _elements(stage, tensor)
        columns: dict[str, list[Any]] = {
            "calls": [None] * len(rows) if exported is None else _calls(rows, exported.nodes),
            "forward": sums("forward", lambda _: 1),
            "backward": sums("backward", lambda _: 1),
            "parameters": _upwards(parameters, parents),
        }
        if sizes is not None and set(stage.dims) <= set(sizes):
            columns["activation_bytes"] = sums("forward", size)
        if time is not None:
            columns["forward_us"] = sums("forward", microseconds)
            columns["backward_us"] = sums("backward", microseconds)
        self.modules = tuple(
            replace(row, **{name: column[i] for name, column in columns.items()})
            for i, row in enumerate(rows)
        )

    def table(self, rows: int = ROWS) -> Table[Module]:
        """Return a table of the outline, down to the greatest depth that fits.

        Args:
            rows: Maximum number of rows. The first level below the model is always shown.
        """
        depths = Counter(module.depth for module in self.modules)
        deepest = count = 0
        for depth in sorted(depths):
            count += depths[depth]
            if depth and count > rows:
                break
            deepest = depth
        shown = [module for module in self.modules if module.depth <= deepest]
        left = len(self.modules) - len(shown)
        first = self.modules[0]
        given = {
            "calls": first.calls,
            "activations": first.activation_bytes,
            "forward time": first.forward_us,
            "backward time": first.backward_us,
        }
        columns = [column for column in _COLUMNS if given.get(column.head, 0) is not None]
        notes = [f"{left} more modules inside these"] if left else []
        return Table(shown, columns, notes=notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _tree(used: Iterable[str]) -> list[Module]:
    """Return rows for the paths `used` and for paths where they branch, parents first."""
    within: dict[str, dict[str, None]] = {"": {}}
    for path in used:
        while path and path not in within.setdefault(above := path.rpartition(".")[0], {}):
            within[above][path] = None
            path = above
    kept = {"", *used}
    rows: list[Module] = []

    def visit(path: str, parent: int, depth: int) -> None:
        if path in kept or len(within.get(path, ())) > 1:
            above = rows[parent].path if rows else ""
            name = path.removeprefix(f"{above}.") if above else path
            rows.append(Module(path, name, parent, depth))
            parent, depth = len(rows) - 1, depth + 1
        for child in within.get(path, ()):
            visit(child, parent, depth)

    visit("", -1, 0)
    return rows


def _upwards(own: Sequence[N], parents: Sequence[int]) -> list[N]:
    """Return each row's own value plus those of all rows within it."""
    total = list(own)
    for i in range(len(total) - 1, 0, -1):
        total[parents[i]] += total[i]
    return total


def _elements(stage: Stage, tensor: str) -> int:
    return math.prod(size for size in stage.tensors[tensor][1] if isinstance(size, int))


def _calls(rows: Sequence[Module], nodes: Iterable[Node]) -> list[int]:
    """Return the number of calls of each module.

    The exporter gives every call its own scope, so calls are counted by the scopes of a module's
    nodes. A module that computes nothing itself is called as often as the modules that it calls.
    """
    scopes: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes:
        scope = node.name.rpartition("/")[0]
        if node.module:
            scopes[node.module].add(scope)
    found = [0] * len(rows)
    within: defaultdict[int, list[int]] = defaultdict(list)
    for i in range(len(rows) - 1, -1, -1):
        found[i] = len(scopes[rows[i].path]) or min(within[i], default=1)
        within[rows[i].parent].append(found[i])
    found[0] = 1
    return found


def _amount(value: int | None) -> str:
    if value is None:
        return ""
    power = min(3, max(0, value.bit_length() - 1) // 10)
    return f"{value / 1024**power:,.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value / 1000:,.2f} ms"


_COLUMNS: Final[tuple[Column[Module], ...]] = (
    # No-break spaces, because HTML collapses ordinary ones.
    Column("module", lambda row: "\N{NO-BREAK SPACE}" * 2 * row.depth + (row.name or "the model")),
    Column("calls", lambda row: str(row.calls), number=True),
    Column("nodes", lambda row: f"{row.forward:,}", number=True),
    Column("gradient nodes", lambda row: f"{row.backward:,}", number=True),
    Column("parameters", lambda row: f"{row.parameters:,}", number=True),
    Column("activations", lambda row: _amount(row.activation_bytes), number=True),
    Column("forward time", lambda row: _milliseconds(row.forward_us), number=True),
    Column("backward time", lambda row: _milliseconds(row.backward_us), number=True),
)
