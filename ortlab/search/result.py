"""Results of races and searches: as a table with a chart, as text and as JSON."""

from __future__ import annotations

import abc
import collections
import dataclasses
import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from ortlab.bench.interleaved import Spread, ratio_interval
from ortlab.bench.machine import Machine
from ortlab.bench.result import origin
from ortlab.search import rates
from ortlab.search.prune import RAN
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, rounded

FORM = 1
DONE = "done"
"""Value of `Cell.doing` when everything was measured."""
LONGEST = 160
"""Maximum number of characters of a reason that the table shows."""


@dataclass(frozen=True)
class TrialResult:
    """One set-up, with the settings in which it differs from others."""

    label: str
    settings: Mapping[str, Any]


E = TypeVar("E", bound=TrialResult)


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(abc.ABC, Generic[E]):
    """Measurements of set-ups that trained side by side.

    Attributes:
        model: Name of the model's class.
        samples: Samples in an optimizer step.
        budget_bytes: Memory that a step may take.
        shared: Settings that all set-ups have and that the user chose.
        environment: Versions of the installed packages.
        machine: Machine that it ran on.
        date: Date in UTC.
        interrupted: True if it was stopped before its end.
        notes: Further lines to show.
        doing: Description of the current activity, empty when it has ended.
    """

    kind: ClassVar[str]
    entries: ClassVar[tuple[str, type[TrialResult]]]
    """Name of the field that holds the set-ups, and their type."""

    model: str
    samples: int
    budget_bytes: int
    shared: Mapping[str, Any]
    environment: Mapping[str, Any]
    machine: Machine
    date: str
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    doing: str = field(default="", compare=False)

    @abc.abstractmethod
    def best(self) -> E | None:
        """Return the fastest set-up, or None before anything was measured."""

    @abc.abstractmethod
    def table(self) -> Table[E]:
        """Return a table with a row for each set-up, and notes that explain the columns."""

    @abc.abstractmethod
    def picture(self) -> str:
        """Return the rates as a bar chart in SVG, with quartiles."""

    @abc.abstractmethod
    def _ahead(self) -> str | None:
        """Return text that names the fastest set-up, or None before anything was measured."""

    @abc.abstractmethod
    def _tied(self, best: E) -> Iterator[E]:
        """Yield the other set-ups that may be as fast as the fastest one, by their rounds."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `ortlab.finetune` for the best set-up.

        Raises:
            ValueError: If nothing was measured.
        """
        best = self.best()
        if best is None:
            raise ValueError("nothing was measured yet; wait for the first result, or start again")
        return {**self.shared, **best.settings}

    @property
    def headline(self) -> str:
        """One line with the fastest set-up and the state of the comparison."""
        ahead = self._ahead()
        if ahead is None:
            return f"{self.model}: {self.doing or 'nothing was measured'}"
        state = "stopped before the end" if self.interrupted else self.doing
        return f"{self.model}: {ahead}" + (f"; {state}" if state else "")

    def __repr__(self) -> str:
        return f"{self.headline}\n\n{self.table()!r}"

    def _repr_html_(self) -> str:
        picture = svg_bars.image(self.picture(), self.headline)
        return f"<p><b>{html.escape(self.headline)}</b></p>{picture}{self.table()._repr_html_()}"

    def _circumstances(self) -> Iterator[str]:
        """Yield the last notes of a table: ties, disturbances, machine and date."""
        best = self.best()
        if best is not None and (tied := "; ".join(each.label for each in self._tied(best))):
            yield f"Within the noise of {best.label}: {tied}. More rounds may tell them apart."
        yield from self.notes
        if self.machine.busy:
            yield f"machine was busy: load average {self.machine.load:.1f} before the start"
        yield origin(self.environment, self.machine, self.date)

    def to_dict(self) -> dict[str, Any]:
        """Return all values in a form that JSON can store, with null for unknown ones."""
        figures: dict[str, Any] = _plain(dataclasses.asdict(self))
        del figures["doing"]
        best = self.best()
        return {"form": FORM, **figures, "best": None if best is None else best.label}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the result that `to_dict` stored. Values that follow from others are recomputed.

        Args:
            stored: Dictionary from `to_dict`.

        Raises:
            ValueError: If the dictionary has another format version.
        """
        if stored.get("form") != FORM:
            raise ValueError(
                f"unsupported format version {stored.get('form')!r} of a {cls.kind}; expected "
                f"{FORM}"
            )
        values = {name: stored[name] for name in stored if name not in ("form", "best")}
        values |= {"machine": Machine(**stored["machine"]), "notes": tuple(stored["notes"])}
        name, kind = cls.entries
        values[name] = tuple(_entry(kind, each) for each in stored[name])
        return cls(**values)


def _entry(kind: type[TrialResult], stored: Mapping[str, Any]) -> TrialResult:
    """Return an entry as it was stored: tuples for lists, NaN for the null of an unknown value."""
    values: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        value = stored[each.name]
        if value is None and isinstance(each.default, float):
            value = math.nan
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _plain(value: Any) -> Any:
    """Return a value as JSON stores it: lists for tuples, null for values that are not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- of a race -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell(TrialResult):
    """A set-up of a race. Values that are NaN or None are unknown.

    Attributes:
        doing: Description of the current activity.
        reason: Reason why the cell has no values, or None.
        first_step_s: Seconds from the plain module to the end of its first step.
        step_ms: For each round, the mean time of a turn's steps.
        steps: Number of steps so far.
        peak_bytes: Step memory, as `ortlab.graph.memory.MemoryPlan.peak_bytes`.
        peak_from: Source of `peak_bytes`, "graph" or "measured".
        max_batch: Largest number of samples in a micro-batch that fits into memory.
        loss: Loss of the weights after `steps` steps, in eager torch without dropout.
        finite: True if every loss during training was finite.
        remarks: Further lines to show.
    """

    doing: str = "waits"
    reason: str | None = None
    first_step_s: float = math.nan
    step_ms: tuple[float, ...] = ()
    steps: int = 0
    peak_bytes: float = math.nan
    peak_from: str = ""
    max_batch: int | None = None
    loss: float = math.nan
    finite: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def spread(self) -> Spread | None:
        """Milliseconds of a step, or None before the first measured round."""
        return Spread.of(self.step_ms) if self.step_ms and self.reason is None else None


@dataclass(frozen=True, kw_only=True, repr=False)
class RaceResult(Result[Cell]):
    """Results of a race. The first cell is the reference of all comparisons.

    Attributes:
        cells: Set-ups.
        micro: Samples in a micro-batch.
        turn_steps: Number of steps in a turn.
        rounds: Number of measured rounds.
        dropout: True if the model applies dropout.
    """

    kind = "race"
    entries = ("cells", Cell)

    cells: tuple[Cell, ...]
    micro: int
    turn_steps: int
    rounds: int
    dropout: bool = False

    def cell(self, label: str) -> Cell:
        """Return the cell with this label.

        Args:
            label: Label of the set-up.

        Raises:
            KeyError: If there is none.
        """
        return {cell.label: cell for cell in self.cells}[label]

    @property
    def _on_workers(self) -> bool:
        return any(cell.settings.get("workers", 1) > 1 for cell in self.cells)

    @property
    def reference(self) -> Cell:
        """Cell that all others are compared with."""
        return self.cells[0]

    def samples_per_s(self, cell: Cell) -> Spread | None:
        """Return the samples per second, or None if the cell was not timed.

        Args:
            cell: Set-up of this race.

        Returns:
            Median of the rounds, with quartiles.
        """
        if cell.spread is None:
            return None
        return Spread.of([self.samples / ms * 1e3 for ms in cell.step_ms])

    def speed(self, cell: Cell) -> Spread | None:
        """Return the speed relative to the reference, compared in each round.

        Args:
            cell: Set-up of this race.

        Returns:
            Number of steps in the time of one step of the reference: median of the rounds, with
            quartiles. None if one of the two was not timed.
        """
        if cell.spread is None or self.reference.spread is None:
            return None
        pairs = zip(self.reference.step_ms, cell.step_ms, strict=False)
        return Spread.of([theirs / ours for theirs, ours in pairs])

    def loss_difference(self, cell: Cell) -> float:
        """Return the difference from the reference's loss after the same number of steps.

        Args:
            cell: Set-up of this race.

        Returns:
            The difference, or NaN if it is unknown.
        """
        if cell.steps != self.reference.steps:
            return math.nan
        return cell.loss - self.reference.loss

    def pays_off(self, cell: Cell) -> float:
        """Return the number of steps after which a set-up has caught up with the reference.

        Its first step takes longer, but the others are shorter: 1 + ceil((first - reference's
        first) / (reference's step - step)).

        Args:
            cell: Set-up of this race.

        Returns:
            Number of steps. Infinity if its steps are not shorter, NaN if unknown.
        """
        ours, theirs = cell.spread, self.reference.spread
        behind_ms = 1e3 * (cell.first_step_s - self.reference.first_step_s)
        if ours is None or theirs is None or math.isnan(behind_ms):
            return math.nan
        if theirs.median <= ours.median:
            return math.inf
        return 1 + max(0, math.ceil(behind_ms / (theirs.median - ours.median)))

    def best(self) -> Cell | None:
        """Return the cell with the most samples per second and a finite loss, or None.

        A loss that differs from the reference's is left for the reader to judge.
        """
        timed = [
            (rate.median, cell)
            for cell in self.cells
            if cell.finite and (rate := self.samples_per_s(cell)) is not None
        ]
        return max(timed, key=lambda pair: pair[0], default=(0.0, None))[1]

    def _tied(self, best: Cell) -> Iterator[Cell]:
        for cell in self.cells:
            if cell is not best and cell.spread is not None and cell.finite:
                _, high = ratio_interval(zip(best.step_ms, cell.step_ms, strict=False))
                if high >= 1:
                    yield cell

    # ---- shown -----------------------------------------------------------------------------------

    def _ahead(self) -> str | None:
        best = self.best()
        rate = None if best is None else self.samples_per_s(best)
        if best is None or rate is None:
            return None
        return f"{best.label} is fastest with {rounded(rate.median)} samples/s"

    def table(self) -> Table[Cell]:
        """Return a table with a row for each set-up, and notes that explain the columns."""
        columns: list[Column[Cell]] = [
            Column("set-up", lambda cell: cell.label),
            Column("first step", self._first, number=True),
            Column("samples/s", lambda c: rates.with_quartiles(self.samples_per_s(c)), number=True),
            Column("speed", self._speed, number=True),
            Column("step memory", _peak, number=True),
            Column("largest batch", _largest, number=True),
            Column("loss", self._loss, number=True),
            Column("pays off after", self._paid, number=True),
            Column("", lambda cell: _short(cell.reason or cell.doing.replace(DONE, ""))),
        ]
        return Table(self.cells, columns, notes=list(self._notes()))

    def picture(self) -> str:
        """Return samples per second as a bar chart in SVG, with quartiles.

        A set-up that was not timed has text instead of a bar.
        """
        shown = [
            (cell.label, self.samples_per_s(cell), "not run" if cell.reason else cell.doing)
            for cell in self.cells
        ]
        return rates.picture(shown, "samples")

    def _first(self, cell: Cell) -> str:
        return "" if math.isnan(cell.first_step_s) else f"{rounded(cell.first_step_s)} s"

    def _speed(self, cell: Cell) -> str:
        speed = self.speed(cell)
        if speed is None:
            return ""
        if cell is self.reference:
            return "1"
        return f"{speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f})"

    def _loss(self, cell: Cell) -> str:
        if not cell.finite:
            return "not a number"
        if math.isnan(cell.loss):
            return ""
        apart = self.loss_difference(cell)
        if cell is self.reference or math.isnan(apart):
            return f"{cell.loss:.4g}"
        return f"{cell.loss:.4g} ({apart:+.1e})"

    def _paid(self, cell: Cell) -> str:
        after = self.pays_off(cell)
        if cell is self.reference or math.isnan(after):
            return ""
        if math.isinf(after):
            return "never"
        return "at once" if after <= 1 else f"{after:,.0f} steps"

    def _notes(self) -> Iterator[str]:
        first = self.reference.label
        micro = f", in micro-batches of {self.micro}" if self.micro != self.samples else ""
        turn = "1 step" if self.turn_steps == 1 else f"{self.turn_steps} steps"
        yield (
            f"Optimizer steps of {self.samples} samples{micro}: median and quartiles of "
            f"{self.rounds} rounds with a turn of {turn} each. Speed and pays off: relative to "
            f"{first}."
        )
        yield (
            "First step: from the plain model to the end of its first step, including the use of "
            "caches on disk (compiled code, exported graphs; --cache off disables them)."
        )
        yield (
            "Step memory: weights, gradients, optimizer and one step, without Python and "
            "libraries. Measured: counted state plus growth of the process during a step. "
            "Graph: from ORT's memory plan, without memory reserved by its arena."
            + (" On workers: the largest of all workers." if self._on_workers else "")
        )
        yield (
            f"Largest batch: samples in a micro-batch, predicted for {memory(self.budget_bytes)}"
            " from the graph or from a line through the step memory of two batches (of one batch "
            "and the state, if another would need compilation). Unknown: the two are too close."
        )
        masks = "; dropout masks differ between engines and contribute to the difference"
        yield (
            f"Loss: of the weights after {self.reference.steps} steps, on the race's batches, in "
            f"eager torch without dropout; in parentheses the difference from {first}. All trained "
            f"on the same batches from the same weights{masks if self.dropout else ''}."
        )
        for cell in self.cells:
            if cell.reason is not None and len(cell.reason) > LONGEST:
                yield f"{cell.label} did not run: {cell.reason}"
            yield from (f"{cell.label}: {remark}" for remark in cell.remarks)
        yield from self._circumstances()

    # ---- JSON ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all values and those derived from them in a form that JSON can store.

        Unknown values are null.
        """
        found = super().to_dict()
        for cell, stored in zip(self.cells, found["cells"], strict=True):
            stored["derived"] = self._derived(cell)
        return found

    def _derived(self, cell: Cell) -> dict[str, Any]:
        rate, speed = self.samples_per_s(cell), self.speed(cell)
        found: dict[str, Any] = _plain(
            {
                "samples_per_s": rate and dataclasses.asdict(rate),
                "speed": speed and dataclasses.asdict(speed),
                "loss_difference": self.loss_difference(cell),
                "pays_off_after_steps": self.pays_off(cell),
            }
        )
        return found


def _peak(cell: Cell) -> str:
    if math.isnan(cell.peak_bytes):
        return ""
    return f"{memory(cell.peak_bytes)} ({cell.peak_from})"


def _largest(cell: Cell) -> str:
    if cell.max_batch is None:
        return "unknown" if cell.doing == DONE else ""
    return "not even 1" if cell.max_batch < 1 else f"{cell.max_batch:,}"


def _short(words: str) -> str:
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


# ---- of a search ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row(TrialResult):
    """A candidate of a search.

    Attributes:
        state: "waits", "measured", "slower", "left out" or "failed".
        reason: Reason of the state.
        rates: Rate in each round, corrected for rounds that were slower or faster for all.
        peak_bytes: Step memory, NaN if unknown.
    """

    state: str
    reason: str = ""
    rates: tuple[float, ...] = ()
    peak_bytes: float = math.nan

    @property
    def spread(self) -> Spread | None:
        """Rate per second, the median with quartiles, or None if it was not measured."""
        return Spread.of(self.rates) if self.rates and self.state != "failed" else None

    @property
    def score(self) -> float:
        """Rate by which rows are ordered: the median, or 0 if it did not run or does not fit."""
        return self.spread.median if self.spread is not None and self.state in RAN else 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Result[Row]):
    """Results of a search: fastest first, then the candidates that did not run or do not fit.

    Attributes:
        rows: Candidates.
        target: Unit whose rate per second is maximized, "samples" or "tokens".
        took_s: Seconds that the search took.
    """

    kind = "search"
    entries = ("rows", Row)

    rows: tuple[Row, ...]
    target: str
    took_s: float

    def best(self) -> Row | None:
        """Return the first row, which is the fastest, or None before anything was measured."""
        return next((row for row in self.rows if row.score), None)

    def _tied(self, best: Row) -> Iterator[Row]:
        return (row for row in self.rows if row.state == "measured" and row is not best)

    def _ahead(self) -> str | None:
        best = self.best()
        if best is None or best.spread is None:
            return None
        rate = rounded(best.spread.median)
        return f"{best.label} is fastest with {rate} {self.target}/s after {self.took_s:.0f} s"

    def table(self) -> Table[Row]:
        """Return a table with a row for each candidate, and notes that explain the columns."""
        columns: list[Column[Row]] = [
            Column("candidate", lambda row: row.label),
            Column(f"{self.target}/s", lambda row: rates.with_quartiles(row.spread), number=True),
            Column("rounds", lambda row: str(len(row.rates) or ""), number=True),
            Column("step memory", _needs, number=True),
            Column("", lambda row: row.state),
            Column("why", lambda row: row.reason),
        ]
        counts = collections.Counter(row.state for row in self.rows)
        unmeasured = sum(not row.rates for row in self.rows)
        notes = [
            f"Optimizer steps of {self.samples} samples, in micro-batches of the given batch size: "
            "median and quartiles of the rounds, corrected for rounds that were slower or faster "
            f"for all. {len(self.rows)} candidates, {unmeasured} of them never measured; "
            f"{counts['slower']} slower, {counts['left out']} left out, {counts['failed']} failed.",
            f"A step may take {memory(self.budget_bytes)}, according to graph or measurement.",
            *self._circumstances(),
        ]
        return Table(self.rows, columns, notes=notes)

    def picture(self) -> str:
        """Return the measured rates as a bar chart in SVG, with quartiles."""
        shown = [(row.label, row.spread, "") for row in self.rows if row.spread is not None]
        return rates.picture(shown, self.target)


def _needs(row: Row) -> str:
    return "" if math.isnan(row.peak_bytes) else memory(row.peak_bytes)
