"""What a race and a search found: as a table with a picture, as text and as JSON."""

from __future__ import annotations

import abc
import dataclasses
import html
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import Machine
from ortlab.bench.result import origin
from ortlab.search import rates
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, rounded

FORM = 1
DONE = "done"
"""What a cell does when all of it is known."""
LONGEST = 160
"""Letters of a reason that the table shows."""


@dataclass(frozen=True)
class TrialResult:
    """One set-up: ``settings`` are what makes it, by their names."""

    label: str
    settings: Mapping[str, Any]


E = TypeVar("E", bound=TrialResult)


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(abc.ABC, Generic[E]):
    """What was found of set-ups that trained side by side.

    ``samples`` are those of an optimizer step. ``shared`` are the settings that all set-ups have
    and that the user chose. ``interrupted`` where it was stopped before its end. ``date`` is in
    UTC.
    """

    kind: ClassVar[str]
    entries: ClassVar[tuple[str, type[TrialResult]]]
    """The field that the set-ups are in, and what they are."""

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
        """Who is ahead; None before anyone is."""

    @abc.abstractmethod
    def table(self) -> Table[E]:
        """A row for each set-up; the notes say what the figures are."""

    @abc.abstractmethod
    def picture(self) -> str:
        """What a second has of each, as bars in SVG, with quartiles."""

    @abc.abstractmethod
    def _ahead(self) -> str | None:
        """Who is ahead, in words; None before anyone is."""

    @property
    def settings(self) -> dict[str, Any]:
        """What `best` would be trained with: keyword arguments of `ortlab.finetune`.

        ValueError where nothing was measured.
        """
        best = self.best()
        if best is None:
            raise ValueError("nothing was measured, so there is nothing to choose from")
        return {**self.shared, **best.settings}

    @property
    def headline(self) -> str:
        """Who is ahead, and how far it is."""
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
        """The last notes of a table: what disturbed it, and where and when it was."""
        yield from self.notes
        if self.machine.busy:
            yield f"something else was computing: the load was {self.machine.load:.1f} before"
        yield origin(self.environment, self.machine, self.date)

    def to_dict(self) -> dict[str, Any]:
        """Every figure as JSON has it: null for what is not known."""
        figures: dict[str, Any] = _plain(dataclasses.asdict(self))
        del figures["doing"]
        best = self.best()
        return {"form": FORM, **figures, "best": None if best is None else best.label}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; figures that follow from others are made anew. ValueError if not."""
        if stored.get("form") != FORM:
            raise ValueError(f"form {stored.get('form')!r} of a {cls.kind}, expected {FORM}")
        values = {name: stored[name] for name in stored if name not in ("form", "best")}
        values |= {"machine": Machine(**stored["machine"]), "notes": tuple(stored["notes"])}
        name, kind = cls.entries
        values[name] = tuple(_entry(kind, each) for each in stored[name])
        return cls(**values)


def _entry(kind: type[TrialResult], stored: Mapping[str, Any]) -> TrialResult:
    """An entry as it was: tuples for lists, NaN for the null of a figure that is not known."""
    values: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        value = stored[each.name]
        if value is None and isinstance(each.default, float):
            value = math.nan
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _plain(value: Any) -> Any:
    """`value` as JSON has it: lists for tuples, null for what is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- of a race -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell(TrialResult):
    """A set-up of a race.

    ``first_step_s`` is from the plain module to the end of its first step. ``step_ms`` has a figure
    for each round, the mean of a turn's steps. ``peak_bytes`` is what a step takes, ``peak_from``
    says where that is known from; ``max_batch`` is the most samples in a micro-batch that fits.
    ``loss`` is what eager torch says, without dropout, of the weights after ``steps`` steps;
    ``finite`` whether every loss on the way was a number. NaN and None are not known. ``reason``
    says why a cell has no figures.
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
        """Milliseconds of a step; None before the first round that counts."""
        return Spread.of(self.step_ms) if self.step_ms and self.reason is None else None


@dataclass(frozen=True, kw_only=True, repr=False)
class RaceResult(Result[Cell]):
    """All set-ups of a race, the first of them the one that others are compared with."""

    kind = "race"
    entries = ("cells", Cell)

    cells: tuple[Cell, ...]
    micro: int
    turn_steps: int
    rounds: int
    dropout: bool = False

    def cell(self, label: str) -> Cell:
        """The cell called `label`; KeyError where there is none."""
        return {cell.label: cell for cell in self.cells}[label]

    @property
    def _on_workers(self) -> bool:
        return any(cell.settings.get("workers", 1) > 1 for cell in self.cells)

    @property
    def reference(self) -> Cell:
        """The cell that others are compared with."""
        return self.cells[0]

    def samples_per_s(self, cell: Cell) -> Spread | None:
        """Samples a second, the median of the rounds with quartiles; None where not timed."""
        if cell.spread is None:
            return None
        return Spread.of([self.samples / ms * 1e3 for ms in cell.step_ms])

    def speed(self, cell: Cell) -> Spread | None:
        """How many steps it makes in the time of one of the reference, compared in each round."""
        if cell.spread is None or self.reference.spread is None:
            return None
        pairs = zip(self.reference.step_ms, cell.step_ms, strict=False)
        return Spread.of([theirs / ours for theirs, ours in pairs])

    def loss_difference(self, cell: Cell) -> float:
        """How far its loss is from the reference's, after as many steps; NaN where not known."""
        if cell.steps != self.reference.steps:
            return math.nan
        return cell.loss - self.reference.loss

    def pays_off(self, cell: Cell) -> float:
        """After how many steps it is no longer behind the reference; infinite for never.

        Its first step takes longer, the others are shorter: 1 + ceil((first - reference's first) /
        (reference's step - step)). One with longer steps falls behind for good: never. NaN where
        not known.
        """
        ours, theirs = cell.spread, self.reference.spread
        behind_ms = 1e3 * (cell.first_step_s - self.reference.first_step_s)
        if ours is None or theirs is None or math.isnan(behind_ms):
            return math.nan
        if theirs.median <= ours.median:
            return math.inf
        return 1 + max(0, math.ceil(behind_ms / (theirs.median - ours.median)))

    def best(self) -> Cell | None:
        """The cell with the most samples a second whose loss is a number; None before there is one.

        What has another loss than the reference is for the reader to judge.
        """
        timed = [cell for cell in self.cells if cell.spread is not None and cell.finite]
        return min(timed, key=lambda cell: statistics.median(cell.step_ms), default=None)

    # ---- shown -----------------------------------------------------------------------------------

    def _ahead(self) -> str | None:
        best = self.best()
        rate = None if best is None else self.samples_per_s(best)
        if best is None or rate is None:
            return None
        return f"{best.label} is fastest with {rounded(rate.median)} samples/s"

    def table(self) -> Table[Cell]:
        """A row for each set-up; the notes say what the figures are."""
        columns: list[Column[Cell]] = [
            Column("set-up", lambda cell: cell.label),
            Column("first step", self._first, number=True),
            Column("samples/s", lambda c: rates.with_quartiles(self.samples_per_s(c)), number=True),
            Column("speed", self._speed, number=True),
            Column("peak memory", _peak, number=True),
            Column("largest batch", _largest, number=True),
            Column("loss", self._loss, number=True),
            Column("pays off after", self._paid, number=True),
            Column("", lambda cell: _short(cell.reason or cell.doing.replace(DONE, ""))),
        ]
        return Table(self.cells, columns, notes=list(self._notes()))

    def picture(self) -> str:
        """Samples a second as bars, in SVG, with quartiles; in words what was not measured."""
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
            f"An optimizer step of {self.samples} samples{micro}: the median of the rounds "
            f"({self.rounds} of them, a turn of {turn} each) and its quartiles. Speed and pays "
            f"off: beside {first}."
        )
        yield (
            "First step: from the plain model to the end of its first step, with what the caches "
            "on disk have (compiled code, exported graphs: --cache off)."
        )
        yield (
            "Peak memory: of weights, gradients, optimizer and one step, without Python and "
            "libraries. Measured: what stays, counted, and how far the process grew in a step. "
            "From the graph: ORT's plan of it, without what its arena keeps."
            + (" Of workers: that of the one which takes most." if self._on_workers else "")
        )
        yield (
            f"Largest batch: of samples in a micro-batch, predicted for {memory(self.budget_bytes)}"
            ": from the graph, or by a line through the peaks of two batches (of one, and what "
            "stays, where another would be compiled). Unknown: the peaks do not tell."
        )
        masks = ", so dropout's masks, which are not the same in all engines, are in the difference"
        yield (
            f"Loss: of the weights after {self.reference.steps} steps, on the race's batches, by "
            f"eager torch without dropout; in brackets less that of {first}. All trained on the "
            f"same batches from the same weights{masks if self.dropout else ''}."
        )
        for cell in self.cells:
            if cell.reason is not None and len(cell.reason) > LONGEST:
                yield f"{cell.label} did not run: {cell.reason}"
            yield from (f"{cell.label}: {remark}" for remark in cell.remarks)
        yield from self._circumstances()

    # ---- JSON ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every figure, and what follows from them, as JSON has it: null for what is not known."""
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
    """A candidate: ``settings`` are what a run takes to train so, ``rates`` its rounds.

    ``state`` is "waits", "measured", "left out" or "failed", and ``reason`` says why.
    """

    state: str
    reason: str = ""
    rates: tuple[float, ...] = ()
    peak_bytes: float = math.nan

    @property
    def spread(self) -> Spread | None:
        """What a second has, the median with quartiles; None where it was not measured."""
        return Spread.of(self.rates) if self.rates and self.state != "failed" else None


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult(Result[Row]):
    """What a search found, the fastest first. ``target`` is what a second has most of."""

    kind = "search"
    entries = ("rows", Row)

    rows: tuple[Row, ...]
    target: str
    took_s: float

    def best(self) -> Row | None:
        """The candidate that is ahead of all that were not left out; None before there is one."""
        going = [row for row in self.rows if row.state == "measured" and row.rates]
        return max(going, key=lambda row: statistics.median(row.rates), default=None)

    def _ahead(self) -> str | None:
        best = self.best()
        if best is None or best.spread is None:
            return None
        rate = rounded(best.spread.median)
        return f"{best.label} is ahead with {rate} {self.target}/s after {self.took_s:.0f} s"

    def table(self) -> Table[Row]:
        """A row for each candidate; the notes say what the figures are."""
        columns: list[Column[Row]] = [
            Column("candidate", lambda row: row.label),
            Column(f"{self.target}/s", lambda row: rates.with_quartiles(row.spread), number=True),
            Column("rounds", lambda row: str(len(row.rates) or ""), number=True),
            Column("peak memory", _needs, number=True),
            Column("", lambda row: row.state),
            Column("why", lambda row: row.reason),
        ]
        counts = {s: sum(row.state == s for row in self.rows) for s in ("left out", "failed")}
        unmeasured = sum(not row.rates for row in self.rows)
        notes = [
            f"An optimizer step of {self.samples} samples, in micro-batches of so many at a time: "
            f"median and quartiles of the rounds. {len(self.rows)} candidates, {unmeasured} of "
            f"them never measured; {counts['left out']} left out, {counts['failed']} failed.",
            f"A step may take {memory(self.budget_bytes)}: by the graph, or by what was measured.",
            *self._circumstances(),
        ]
        return Table(self.rows, columns, notes=notes)

    def picture(self) -> str:
        """What was measured as bars, in SVG, with quartiles."""
        shown = [(row.label, row.spread, "") for row in self.rows if row.spread is not None]
        return rates.picture(shown, self.target)


def _needs(row: Row) -> str:
    return "" if math.isnan(row.peak_bytes) else memory(row.peak_bytes)
