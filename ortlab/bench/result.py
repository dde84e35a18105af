"""What a benchmark found: the figures of its cells, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import Machine
from ortlab.bench.settings import BenchSettings
from ortlab.bench.settings import Cell as Key
from ortlab.settings import IN_ORT, REFERENCE

FORM = 1
_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2}
"""How far from eager fp32 a mean loss or gradient norm may be, in parts of it, masks apart."""
_ERRORS = 6
"""Standard errors that dropout's masks are given."""


@dataclass(frozen=True)
class Difference:
    """A mean difference from eager fp32 in parts of it, with its standard error; NaN for none."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], reference: Sequence[float]) -> Self:
        """Of values at the same weights and batch, taken in the same turns."""
        pairs = list(zip(values, reference, strict=False))
        if not all(math.isfinite(value) for pair in pairs for value in pair):
            return cls(math.nan, math.nan)
        apart = [value - other for value, other in pairs]
        scale = abs(statistics.fmean(other for _, other in pairs)) or 1.0
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        return cls(statistics.fmean(apart) / scale, error / scale)

    def within(self, tolerance: float) -> bool:
        """Whether rounding and dropout's masks may make it; False where it is not a number."""
        return abs(self.mean) <= tolerance + _ERRORS * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class Cell:
    """One engine in one precision on one model.

    ``step_ms`` has a figure for each round, the mean of ``steps_per_turn`` steps. ``losses`` and
    ``grad_norms`` have one for each turn: the first step, the rounds to warm up, and the others.
    ``first_step_s`` is from the plain module to the end of its first step, of which ``export_s``
    went to ORT's exports and ``check_s`` to their checks. Where ``reason`` says why a cell was not
    timed there are no figures.
    """

    model: str
    engine: str
    precision: str
    steps_per_turn: int = 1
    step_ms: tuple[float, ...] = ()
    first_step_s: float | None = None
    export_s: float = 0.0
    check_s: float = 0.0
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def key(self) -> Key:
        """Its engine and precision."""
        return self.engine, self.precision


@dataclass(frozen=True)
class EngineBench:
    """All engines in all precisions on some models. ``date`` is a day in UTC.

    ``models`` says in words what each model is. Without all cells where ``interrupted``.
    """

    settings: BenchSettings
    date: str
    environment: Mapping[str, Any]
    machine: Machine
    models: Mapping[str, str]
    cells: tuple[Cell, ...]
    interrupted: bool = False

    def cell(self, model: str, engine: str, precision: str) -> Cell | None:
        """The cell, or None where it was not reached."""
        names = (model, engine, precision)
        return next((c for c in self.cells if (c.model, *c.key) == names), None)

    def speed(self, cell: Cell) -> Spread | None:
        """How many steps `cell` makes in the time of one of eager fp32, compared in each round."""
        reference = self.cell(cell.model, *REFERENCE)
        if reference is None or not cell.step_ms:
            return None
        pairs = zip(reference.step_ms, cell.step_ms, strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        return Spread.of(ratios) if ratios else None

    def loss_difference(self, cell: Cell) -> Difference | None:
        """How far its mean loss is from eager fp32's."""
        return self._difference(cell, lambda c: c.losses)

    def grad_norm_difference(self, cell: Cell) -> Difference | None:
        """How far the mean norm of its gradients is from eager fp32's."""
        return self._difference(cell, lambda c: c.grad_norms)

    def _difference(
        self, cell: Cell, values: Callable[[Cell], tuple[float, ...]]
    ) -> Difference | None:
        reference = self.cell(cell.model, *REFERENCE)
        if reference is None or not values(reference) or not values(cell):
            return None
        return Difference.of(values(cell), values(reference))

    def suspect(self, cell: Cell) -> bool:
        """Whether loss or gradients are further from eager fp32's than rounding and masks make."""
        found = (self.loss_difference(cell), self.grad_norm_difference(cell))
        return any(d is not None and not d.within(_TOLERANCE[cell.precision]) for d in found)

    # ---- JSON ------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Every figure of every round, and what follows from them, as JSON holds it."""
        return {
            "form": FORM,
            "benchmark": not self.settings.quick,
            "interrupted": self.interrupted,
            "date": self.date,
            "settings": self.settings.as_dict(),
            "environment": dict(self.environment),
            "machine": dataclasses.asdict(self.machine),
            "models": dict(self.models),
            "cells": [_plain(cell) | {"derived": self._derived(cell)} for cell in self.cells],
        }

    def _derived(self, cell: Cell) -> dict[str, Any]:
        found = {
            "step_ms": Spread.of(cell.step_ms) if cell.step_ms else None,
            "speed": self.speed(cell),
            "loss_difference": self.loss_difference(cell),
            "grad_norm_difference": self.grad_norm_difference(cell),
        }
        figures = {name: None if v is None else _plain(v) for name, v in found.items()}
        return figures | {"suspect": self.suspect(cell)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `as_dict` gave; figures that follow from others are made anew. ValueError if not."""
        if stored.get("form") != FORM:
            raise ValueError(f"form {stored.get('form')!r} of a benchmark, expected {FORM}")
        return cls(
            settings=BenchSettings.of(stored["settings"]),
            date=stored["date"],
            environment=stored["environment"],
            machine=Machine(**stored["machine"]),
            models=stored["models"],
            cells=tuple(map(_record, stored["cells"])),
            interrupted=stored["interrupted"],
        )

    # ---- Markdown --------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Everything: the two tables of `summary`, then every cell with its loss and gradients."""
        return "\n".join([*self.warnings(), self.tables(), ""])

    _repr_markdown_ = markdown

    def tables(self) -> str:
        """What `markdown` has below its warnings."""
        return "\n".join([self.summary(), *self._details()])

    def summary(self) -> str:
        """Speed beside eager fp32 and seconds to the first step, one row a model; then the notes.

        This is what README.md shows.
        """
        rounds = self.settings.rounds
        cached = "cached or not" if self.settings.quick else "with nothing cached on disk"
        lines = [
            f"Speed beside eager fp32 on the same batch, the median of {rounds} rounds and its "
            "quartiles; above 1 is faster:",
            "",
            *self._grid(self._speed),
            "",
            f"Seconds to the end of the first step, {cached}:",
            "",
            *self._grid(self._first),
            "",
            *(f"({number}) {reason}  " for reason, number in self._reasons().items()),
            *filter(None, [self._options()]),
            self.origin(),
        ]
        return "\n".join(lines)

    def _options(self) -> str:
        options = ", ".join(part.strip() for part in self.settings.ort_options.split(","))
        return f"ORT's engines with {options}.  " if options else ""

    def origin(self) -> str:
        """Versions, processor and date in a line."""
        return origin(self.environment, self.machine, self.date)

    def warnings(self) -> list[str]:
        """Why its figures are none to go by, in lines of Markdown."""
        lines = warnings(self.machine, quick=self.settings.quick)
        if self.interrupted:
            lines += ["**Interrupted**: what was measured until then.", ""]
        return lines

    def _grid(self, text: Callable[[Cell], str]) -> list[str]:
        """A row for each model, a column for each engine and precision."""
        keys = self.settings.cells
        rows = [
            [about, *(self._figure(self.cell(name, *key), text) for key in keys)]
            for name, about in self.models.items()
        ]
        return table(["model", *(" ".join(key) for key in keys)], rows)

    def _figure(self, cell: Cell | None, text: Callable[[Cell], str]) -> str:
        if cell is None:
            return "not reached"
        if cell.reason is None or text(cell):
            return text(cell)
        return f"not run ({self._reasons()[cell.reason]})"

    def _speed(self, cell: Cell) -> str:
        if not cell.step_ms:
            return ""
        if cell.key == REFERENCE:
            return f"1: {milliseconds(Spread.of(cell.step_ms).median)}"
        spread = self.speed(cell)
        if spread is None:
            return milliseconds(Spread.of(cell.step_ms).median)
        wrong = " **wrong?**" if self.suspect(cell) else ""
        return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f}){wrong}"

    def _first(self, cell: Cell) -> str:
        return "" if cell.first_step_s is None else f"{cell.first_step_s:.1f}"

    def _reasons(self) -> dict[str, int]:
        """Why cells were not timed, each reason with its number."""
        reasons = dict.fromkeys(cell.reason for cell in self.cells if cell.reason is not None)
        return {reason: number for number, reason in enumerate(reasons, start=1)}

    def _details(self) -> list[str]:
        heads = ["model", "engine", "precision", "a step", "quartiles", "speed", "first step"]
        heads += ["of it export", "of it check", "loss", "gradient norm"]
        lines = ["", *table(heads, [self._row(cell) for cell in self.cells]), ""]
        lines += [
            "Loss and gradient norm: their means over all turns beside those of eager fp32, at the "
            "same weights, with the standard error that dropout's masks make.",
        ]
        remarks = dict.fromkeys(
            f"{cell.model}, {cell.engine} {cell.precision}: {remark}"
            for cell in self.cells
            for remark in cell.remarks
        )
        return [*lines, *(f"- {remark}" for remark in remarks)]

    def _row(self, cell: Cell) -> list[str]:
        names = [cell.model, cell.engine, cell.precision]
        if cell.reason is not None:
            return [*names, f"not run ({self._reasons()[cell.reason]})", *[""] * 7]
        ms = Spread.of(cell.step_ms)
        differences = (self.loss_difference(cell), self.grad_norm_difference(cell))
        if cell.key == REFERENCE:
            means = (statistics.fmean(values) for values in (cell.losses, cell.grad_norms))
            compared = [f"{mean:.4g}" for mean in means]
        else:
            compared = ["" if found is None else str(found) for found in differences]
        ort = cell.engine in IN_ORT
        return [
            *names,
            milliseconds(ms.median),
            f"{milliseconds(ms.low)} to {milliseconds(ms.high)}",
            self._speed(cell) if cell.key != REFERENCE else "1",
            f"{self._first(cell)} s",
            f"{cell.export_s:.1f} s" if ort else "",
            f"{cell.check_s:.1f} s" if ort else "",
            *compared,
        ]


def origin(environment: Mapping[str, Any], machine: Machine, date: str) -> str:
    """Versions, processor and date in a line."""
    packages = environment["packages"]
    versions = [f"ortlab {environment['ortlab']}", f"Python {environment['python']}"]
    for name in ("torch", "onnxruntime-training", "transformers"):
        versions.append(f"{name} {packages[name]}" if name in packages else f"no {name}")
    return f"{', '.join(versions)}; {machine}; {date}."


def warnings(machine: Machine, *, quick: bool) -> list[str]:
    """Why figures are none to go by, in lines of Markdown."""
    lines = []
    if quick:
        lines += ["**No benchmark**: tiny models (`--quick`), to see that everything runs.", ""]
    if machine.busy:
        busy = f"something else was computing: the load was {machine.load:.1f} before"
        lines += [f"**Busy machine**: {busy}.", ""]
    return lines


def milliseconds(value: float) -> str:
    """Three digits of it, or all before the point."""
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _plain(record: Cell | Spread | Difference) -> dict[str, Any]:
    """Its fields as JSON has them: lists for tuples, null for what is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in dataclasses.asdict(record).items()}


def _record(stored: Mapping[str, Any]) -> Cell:
    """The cell that `_plain` made, without the figures that follow from others."""
    values = {name: value for name, value in stored.items() if name != "derived"}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(math.nan if item is None else item for item in value)
    return Cell(**values)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
