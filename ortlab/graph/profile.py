"""Time of a training step by phase, module, operator and node, compared with eager torch.

A value is the median over the steps, and a sum is a sum of such medians. Displayed values therefore
add up, but do not describe any single step. Values are in microseconds, tables in milliseconds.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ortlab.graph import profile_ort
from ortlab.graph.capture import Overlay, Stage
from ortlab.graph.profile_ort import NodeTime, OrtProfile, PhaseTime
from ortlab.graph.profile_torch import Eager, sums
from ortlab.utils import svg_bars
from ortlab.utils.errors import short_place
from ortlab.utils.tables import Column, Table

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

MOST_MODULES = 30
"""Maximum number of module rows if no depth is given."""
MOST_NODES, MOST_OPS, MOST_LINES = 20, 12, 12
_ITSELF, _AROUND, _UNKNOWN = "(the model itself)", "(around)", "(unknown)"
_SERIES: Final = {
    "ORT forward": ("#2f7fd0", 1.0),
    "ORT backward": ("#2f7fd0", 0.5),
    "eager forward": ("#d9772b", 1.0),
    "eager backward": ("#d9772b", 0.5),
}


@dataclass(frozen=True)
class PhaseRow:
    """A phase or the whole step. `ort` is None if torch runs the model."""

    phase: str
    ort: PhaseTime | None
    eager_us: float


@dataclass(frozen=True)
class ModuleTime:
    """A module with all modules within it: time of ORT's kernels and of eager torch, by phase.

    The row "(around)" is the time that belongs to no module. In ORT it is spent between the kernels
    and around the session. In eager torch it is spent around the model's forward and between the
    nodes of the backward pass.
    """

    module: str
    ort_us: Mapping[str, float]
    eager_us: Mapping[str, float]


@dataclass(frozen=True)
class OpTime:
    """An operator: number of nodes, and time of their kernels by phase."""

    op: str
    nodes: int
    us: Mapping[str, float]


@dataclass(frozen=True)
class LineTime:
    """A line of user code: time of its operators and their gradients by phase, and in eager."""

    line: str
    us: Mapping[str, float]
    eager_us: float


class Profile:
    """Time of a step of a model without its optimizer, as tables and a chart.

    Args:
        model: Name of the model's class.
        modules: Paths of its modules, in the model's order.
        ort: Time in ORT, or None if torch runs the model.
        eager: Time in eager torch.
        notes: Lines for the user that say what the values mean.
    """

    def __init__(
        self,
        model: str,
        modules: Iterable[str],
        *,
        ort: OrtProfile | None,
        eager: Eager,
        notes: Iterable[str] = (),
    ) -> None:
        self.model = model
        self.modules = tuple(modules)
        self.ort = ort
        self.eager = eager
        self.notes = tuple(notes)

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases: "forward", and "backward" if there is one."""
        return tuple(self.eager.unowned_us)

    @property
    def nodes(self) -> tuple[NodeTime, ...]:
        """Nodes that ORT ran, in execution order."""
        return () if self.ort is None else self.ort.nodes

    def overlay(self, stage: Stage) -> Overlay:
        """Return the time of the nodes of `stage` that ran, fused and recomputed ones included.

        A node that ran counts for the node of `stage` that ORT's session made it from. Nodes that
        were fused after an earlier stage have other names, so only the stage `execution` shows the
        full time.

        Args:
            stage: Stage whose nodes are annotated.
        """
        names = {node.name for node in stage.nodes}
        origins = ((profile_ort.origin(node.node, names), node.us) for node in self.nodes)
        us = sums((name, us) for name, us in origins if name is not None)
        return Overlay("time", "us", us)

    def by_phase(self) -> Table[PhaseRow]:
        """Return a table of the phases: ORT's kernels, time between and around them, eager."""
        rows = []
        for phase in self.phases:
            ort = None if self.ort is None else self.ort.phases[phase]
            rows.append(PhaseRow(phase, ort, self._eager_us(phase)))
        if len(rows) > 1:
            rows.append(_total(rows))
        if rows[-1].ort is None:
            return Table(rows, _EAGER_PHASE_COLUMNS)
        return Table(rows, _PHASE_COLUMNS, notes=[_shares(rows[-1].ort)])

    def by_module(self, depth: int | None = None) -> Table[ModuleTime]:
        """Return a table that compares ORT's kernels with eager torch, module by module.

        Rows are in the model's order of modules.

        Args:
            depth: Number of parts of a module's path that distinguish rows. By default, the
                greatest depth with at most 30 rows.

        Raises:
            ValueError: If `depth` is less than 1.
        """
        if depth is not None and depth < 1:
            raise ValueError(f"depth={depth} is less than 1; a module's path has at least one part")
        rows = self._rows(depth or self._deepest())
        notes = (
            ["ORT columns show kernel time only; the rest of the session belongs to no module"]
            if self.ort
            else []
        )
        return Table(rows, self._module_columns(), notes=notes)

    def by_op(self, most: int = MOST_OPS) -> Table[OpTime]:
        """Return a table of the operators whose kernels take longest.

        Args:
            most: Maximum number of rows.
        """
        us: dict[str, dict[str, float]] = {}
        for node in self.nodes:
            own = us.setdefault(node.op, dict.fromkeys(self.phases, 0.0))
            own[node.phase] += node.us
        counts = sums((node.op, 1) for node in self.nodes)
        rows = [OpTime(op, int(counts[op]), own) for op, own in us.items()]
        rows.sort(key=lambda row: -sum(row.us.values()))
        notes = _more(len(rows) - most, "operators")
        columns: list[Column[OpTime]] = [
            Column("operator", lambda row: row.op),
            Column("nodes", lambda row: str(row.nodes), number=True),
            *_times("", self.phases, lambda row: row.us),
            Column("share", lambda row: self._share(sum(row.us.values())), number=True),
        ]
        return Table(rows[:most], columns, notes=notes, empty=_NO_NODES)

    def by_line(self, most: int = MOST_LINES) -> Table[LineTime]:
        """Return a table of the lines of user code whose operators take longest.

        Gradients count for the line of their operators.

        Args:
            most: Maximum number of rows.
        """
        found = sums(((node.source, node.phase), node.us) for node in self.nodes)
        eager = sums((short_place(*place), us) for (place, _), us in self.eager.line_us.items())
        rows = [
            LineTime(
                line or _UNKNOWN, self._phased(found, line), eager.get(line.partition(": ")[0], 0.0)
            )
            for line in dict.fromkeys(line for line, _ in found)
        ]
        rows.sort(key=lambda row: -sum(row.us.values()))
        columns: list[Column[LineTime]] = [
            Column("line", lambda row: row.line),
            *_times("", self.phases, lambda row: row.us),
            Column("share", lambda row: self._share(sum(row.us.values())), number=True),
            Column("eager ms", lambda row: _ms(row.eager_us) if row.eager_us else "-", number=True),
        ]
        notes = _more(len(rows) - most, "lines")
        return Table(rows[:most], columns, notes=notes, empty=_NO_NODES)

    def by_node(self, most: int = MOST_NODES) -> Table[NodeTime]:
        """Return a table of the nodes that take longest. The attribute `nodes` has all of them.

        Args:
            most: Maximum number of rows.
        """
        rows = sorted(self.nodes, key=lambda node: -node.us)
        columns: list[Column[NodeTime]] = [
            Column("node", lambda node: node.node),
            Column("operator", lambda node: node.op),
            Column("module", lambda node: node.module or _ITSELF),
            Column("phase", lambda node: node.phase),
            Column("us", lambda node: f"{node.us:.0f}", number=True),
            Column("share", lambda node: self._share(node.us), number=True),
        ]
        notes = _more(len(rows) - most, "nodes")
        return Table(rows[:most], columns, notes=notes, empty=_NO_NODES)

    def picture(self) -> str:
        """Return the modules as a bar chart in SVG."""
        rows = []
        for row in self.by_module():
            series = {f"ORT {phase}": us for phase, us in row.ort_us.items()}
            eager = {f"eager {phase}": us for phase, us in row.eager_us.items()}
            rows.append((row.module, [series, eager] if self.ort else [eager]))
        return svg_bars.svg(rows, _SERIES)

    def __repr__(self) -> str:
        return "\n\n".join(["\n".join([self.headline, *self.notes]), *map(repr, self._tables())])

    def _repr_html_(self) -> str:
        notes = "<p>" + "<br>".join(map(html.escape, self.notes)) + "</p>"
        tables = "<br>".join(table._repr_html_() for table in self._tables())
        picture = svg_bars.image(self.picture(), self.headline)
        return f"<p><b>{html.escape(self.headline)}</b></p>{notes}{picture}{tables}"

    @property
    def headline(self) -> str:
        """One line with the time of a step that was measured without instrumentation."""
        step = "a step without its optimizer" if len(self.phases) > 1 else "a forward pass"
        takes = f"{_ms(self.eager.plain_us)} ms in eager torch"
        if self.ort is not None:
            takes = f"{_ms(self.ort.plain_us)} ms in ORT, {takes}"
        return f"{self.model}: {step} takes {takes}"

    def _tables(self) -> list[Table[Any]]:
        tables: list[Table[Any]] = [self.by_phase(), self.by_module()]
        return tables if self.ort is None else [*tables, self.by_op(), self.by_line()]

    def _eager_us(self, phase: str) -> float:
        owned = sum(us for (_, of), us in self.eager.us.items() if of == phase)
        return owned + self.eager.unowned_us[phase]

    def _share(self, us: float) -> str:
        return f"{us / (sum(node.us for node in self.nodes) or 1.0):.1%}"

    def _deepest(self) -> int:
        """Return the greatest depth with at most `MOST_MODULES` rows, or 1 if there is none."""
        longest = max(path.count(".") for path in self.modules) + 1
        fits = (d for d in range(longest, 1, -1) if len(self._rows(d)) <= MOST_MODULES)
        return next(fits, 1)

    def _rows(self, depth: int) -> list[ModuleTime]:
        def fold(path: str) -> str:
            return ".".join(path.split(".")[:depth])

        ort = sums(((fold(node.module), node.phase), node.us) for node in self.nodes)
        eager = sums(((fold(path), phase), us) for (path, phase), us in self.eager.us.items())
        seen = {path for path, _ in (*ort, *eager)}
        rows = [
            ModuleTime(path or _ITSELF, self._phased(ort, path), self._phased(eager, path))
            for path in dict.fromkeys(map(fold, self.modules))
            if path in seen
        ]
        around = {} if self.ort is None else self.ort.phases
        between = {phase: time.between_us + time.around_us for phase, time in around.items()}
        return [*rows, ModuleTime(_AROUND, between, self.eager.unowned_us)]

    def _phased(self, us: Mapping[tuple[str, str], float], path: str) -> dict[str, float]:
        return {phase: us.get((path, phase), 0.0) for phase in self.phases}

    def _module_columns(self) -> list[Column[ModuleTime]]:
        module: Column[ModuleTime] = Column("module", lambda row: row.module)
        eager: list[Column[ModuleTime]] = _times("eager ", self.phases, lambda row: row.eager_us)
        if self.ort is None:
            return [module, *eager]
        ort: list[Column[ModuleTime]] = _times("ORT ", self.phases, lambda row: row.ort_us)
        return [module, *ort, *eager, Column("eager/ORT", _module_ratio, number=True)]


_NO_NODES = "no ORT graph: torch runs the model"


def _total(rows: Sequence[PhaseRow]) -> PhaseRow:
    times = [row.ort for row in rows if row.ort is not None]
    ort = PhaseTime(
        sum(time.kernels_us for time in times),
        sum(time.between_us for time in times),
        sum(time.around_us for time in times),
    )
    return PhaseRow("step", ort if times else None, sum(row.eager_us for row in rows))


def _shares(ort: PhaseTime) -> str:
    return (
        f"ORT's time: {ort.kernels_us / ort.us:.0%} in kernels, {ort.between_us / ort.us:.0%} "
        f"between them in the session, {ort.around_us / ort.us:.0%} around it in Python and torch"
    )


def _more(count: int, what: str) -> list[str]:
    return [f"and {count} {what} more"] if count > 0 else []


def _ms(us: float) -> str:
    return f"{us / 1000:.2f}"


def _ratio(eager_us: float, ort_us: float) -> str:
    return f"{eager_us / ort_us:.2f}" if eager_us and ort_us else "-"


def _module_ratio(row: ModuleTime) -> str:
    if row.module == _AROUND:
        return "-"
    return _ratio(sum(row.eager_us.values()), sum(row.ort_us.values()))


def _times(
    of: str, phases: Iterable[str], us: Callable[[R], Mapping[str, float]]
) -> list[Column[R]]:
    """Return a column of milliseconds for each phase."""

    def column(phase: str) -> Column[R]:
        return Column(f"{of}{phase} ms", lambda row: _ms(us(row)[phase]), number=True)

    return [column(phase) for phase in phases]


def _of_ort(head: str, us: Callable[[PhaseTime], float]) -> Column[PhaseRow]:
    return Column(head, lambda row: _ms(us(row.ort)) if row.ort else "-", number=True)


_PHASE: Final[Column[PhaseRow]] = Column("phase", lambda row: row.phase)
_EAGER: Final[Column[PhaseRow]] = Column("eager ms", lambda row: _ms(row.eager_us), number=True)
_EAGER_PHASE_COLUMNS: Final[tuple[Column[PhaseRow], ...]] = (_PHASE, _EAGER)
_PHASE_COLUMNS: Final[tuple[Column[PhaseRow], ...]] = (
    _PHASE,
    _of_ort("kernels ms", lambda time: time.kernels_us),
    _of_ort("between ms", lambda time: time.between_us),
    _of_ort("around ms", lambda time: time.around_us),
    _of_ort("ORT ms", lambda time: time.us),
    _EAGER,
    Column(
        "eager/ORT",
        lambda row: _ratio(row.eager_us, row.ort.us) if row.ort else "-",
        number=True,
    ),
)
