"""What a race found: a cell for each set-up, as a table with a picture, as text and as JSON."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from ortlab.bench.machine import Machine
from ortlab.bench.result import origin
from ortlab.graph import bars
from ortlab.graph.memory import memory
from ortlab.tables import Column, Table
from ortlab.turns import Spread

FORM = 1
DONE = "done"
"""What a cell does when all of it is known."""
LONGEST = 160
"""Letters of a reason that the table shows."""
COLOUR = "#4a86cf"
ROW, LABEL, NUMBER, LETTERS = 20, 220, 160, 36
ROOM = bars.WIDTH - LABEL - NUMBER
"""Of the picture, in its pixels: a row, the labels, the numbers, the bars; letters of a label."""


@dataclass(frozen=True)
class Cell:
    """One set-up: ``settings`` are what makes it, by their names.

    ``first_step_s`` is from the plain module to the end of its first step. ``step_ms`` has a figure
    for each round, the mean of a turn's steps. ``peak_bytes`` is what a step takes, ``peak_from``
    says where that is known from; ``max_batch`` is the most samples in a micro-batch that fits.
    ``loss`` is what eager torch says, without dropout, of the weights after ``steps`` steps;
    ``finite`` whether every loss on the way was a number. NaN and None are not known. ``reason``
    says why a cell has no figures.
    """

    label: str
    settings: Mapping[str, Any]
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


@dataclass(frozen=True)
class RaceResult:
    """All set-ups of a race, the first of them the one that others are compared with.

    ``samples`` are those of an optimizer step. ``shared`` are the settings that all cells have and
    that the user chose. ``interrupted`` where it was stopped before its end. ``date`` is in UTC.
    """

    model: str
    cells: tuple[Cell, ...]
    samples: int
    micro: int
    budget_bytes: int
    turn_steps: int
    rounds: int
    shared: Mapping[str, Any]
    environment: Mapping[str, Any]
    machine: Machine
    date: str
    dropout: bool = False
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    doing: str = field(default="", compare=False)

    def cell(self, label: str) -> Cell:
        """The cell called `label`; KeyError where there is none."""
        return {cell.label: cell for cell in self.cells}[label]

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

    @property
    def settings(self) -> dict[str, Any]:
        """What `best` would be trained with: keyword arguments of `ortlab.finetune`.

        ValueError where no set-up was timed.
        """
        best = self.best()
        if best is None:
            raise ValueError("no set-up was timed, so there is nothing to choose from")
        return {**self.shared, **best.settings}

    # ---- shown -----------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """What raced, and who is ahead."""
        best = self.best()
        rate = None if best is None else self.samples_per_s(best)
        if best is None or rate is None:
            return f"{self.model}: {self.doing}" if self.doing else f"{self.model}: nothing timed"
        ahead = f"{best.label} is fastest with {_number(rate.median)} samples/s"
        parts = [f"{self.model}: {ahead}"]
        if self.interrupted:
            parts.append("stopped before the end")
        elif self.doing:
            parts.append(self.doing)
        return "; ".join(parts)

    def table(self) -> Table[Cell]:
        """A row for each set-up; the notes say what the figures are."""
        columns: list[Column[Cell]] = [
            Column("set-up", lambda cell: cell.label),
            Column("first step", self._first, number=True),
            Column("samples/s", self._rate, number=True),
            Column("speed", self._speed, number=True),
            Column("peak memory", _peak, number=True),
            Column("largest batch", _largest, number=True),
            Column("loss", self._loss, number=True),
            Column("pays off after", self._paid, number=True),
            Column("", lambda cell: _short(cell.reason or cell.doing.replace(DONE, ""))),
        ]
        return Table(self.cells, columns, notes=list(self._notes()))

    def picture(self) -> str:
        """Samples a second as bars, in SVG; a line from the lower to the upper quartile."""
        return rates_picture(
            [
                (cell.label, self.samples_per_s(cell), "not run" if cell.reason else cell.doing)
                for cell in self.cells
            ],
            "samples",
        )

    def __repr__(self) -> str:
        return f"{self.headline}\n\n{self.table()!r}"

    def _repr_html_(self) -> str:
        picture = bars.image(self.picture(), self.headline)
        return f"<p><b>{html.escape(self.headline)}</b></p>{picture}{self.table()._repr_html_()}"

    def _first(self, cell: Cell) -> str:
        return "" if math.isnan(cell.first_step_s) else f"{_number(cell.first_step_s)} s"

    def _rate(self, cell: Cell) -> str:
        rate = self.samples_per_s(cell)
        return "" if rate is None else _with_quartiles(rate)

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
        yield from self.notes
        if self.machine.busy:
            yield f"something else was computing: the load was {self.machine.load:.1f} before"
        yield origin(self.environment, self.machine, self.date)

    # ---- JSON ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every figure, and what follows from them, as JSON has it: null for what is not known."""
        figures = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("cells", "machine", "doing")
        }
        cells = [{**_fields(cell), "derived": self._derived(cell)} for cell in self.cells]
        machine = dataclasses.asdict(self.machine)
        found: dict[str, Any] = plain({"form": FORM, **figures, "machine": machine})
        best = self.best()
        return found | {"cells": cells, "best": None if best is None else best.label}

    def _derived(self, cell: Cell) -> dict[str, Any]:
        rate, speed = self.samples_per_s(cell), self.speed(cell)
        found: dict[str, Any] = plain(
            {
                "samples_per_s": rate and dataclasses.asdict(rate),
                "speed": speed and dataclasses.asdict(speed),
                "loss_difference": self.loss_difference(cell),
                "pays_off_after_steps": self.pays_off(cell),
            }
        )
        return found

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `to_dict` gave; figures that follow from others are made anew. ValueError if not."""
        if stored.get("form") != FORM:
            raise ValueError(f"form {stored.get('form')!r} of a race, expected {FORM}")
        values = {name: stored[name] for name in stored if name not in ("form", "best", "cells")}
        values |= {"machine": Machine(**stored["machine"]), "notes": tuple(stored["notes"])}
        return cls(cells=tuple(map(_cell, stored["cells"])), **values)


_UNKNOWN: Final = ("first_step_s", "peak_bytes", "loss")
"""The fields of a cell that JSON's null stands for NaN in."""


def _fields(cell: Cell) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cell)]
    found: dict[str, Any] = plain({name: getattr(cell, name) for name in names})
    return found


def _cell(stored: Mapping[str, Any]) -> Cell:
    values = {name: value for name, value in stored.items() if name != "derived"}
    values |= {name: math.nan for name in _UNKNOWN if values[name] is None}
    values |= {name: tuple(values[name]) for name in ("step_ms", "remarks")}
    return Cell(**values)


def plain(value: Any) -> Any:
    """`value` as JSON has it: lists for tuples, null for what is not finite."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def _with_quartiles(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.low)} to {_number(spread.high)})"


def _number(value: float) -> str:
    """Three digits of it, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rates_picture(rows: Sequence[tuple[str, Spread | None, str]], unit: str) -> str:
    """Rates as bars, in SVG; a line from the lower to the upper quartile.

    `rows` are a label, the rate, and what is said where there is none.
    """
    highest = max((rate.high for _, rate, _ in rows if rate is not None), default=0.0)
    scale = ROOM / (highest or 1.0)
    parts = []
    for place, (label, rate, words) in enumerate(rows):
        middle = ROW * place + ROW / 2
        parts.append(bars.text(LABEL - 8, middle, label[:LETTERS], anchor="end"))
        if rate is None:
            parts.append(bars.text(LABEL, middle, words[:LETTERS]))
            continue
        parts.append(bars.box(LABEL, middle - 6, rate.median * scale, 12, (COLOUR, 0.8)))
        low, high = LABEL + rate.low * scale, LABEL + rate.high * scale
        parts.append(bars.box(low, middle - 0.75, max(high - low, 1.0), 1.5, (bars.TEXT, 1)))
        for end in (low, high):
            parts.append(bars.box(end - 0.75, middle - 4, 1.5, 8, (bars.TEXT, 1)))
        parts.append(bars.text(high + 6, middle, f"{_number(rate.median)} {unit}/s"))
    height = ROW * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {bars.WIDTH} {height}" '
        f'width="{bars.WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="{bars.FONT}">{"".join(parts)}</svg>'
    )
