"""Results of a benchmark of engines: values of its cells, as Markdown and as JSON."""

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
from ortlab.utils import svg_bars

FORM = 1
_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 2e-2, "fp16": 2e-2}
"""Relative tolerance of a mean loss or gradient norm against eager fp32, without dropout."""
_ERRORS = 6
"""Number of standard errors added to the tolerance for different dropout masks."""
AROUND, BETWEEN, OPTIMIZER = "around ORT's sessions", "between operators", "optimizer"
_SLOWED = 1.1
"""Factor by which a profiler slows a step down, from which on the table says so."""
_OPERATORS = 10
"""Number of operators that are named."""
_COLORS = (
    *("#2f7fd0", "#d9772b", "#3a9a5b", "#b84a62", "#8465b5", "#8c6d4f", "#d46bb0", "#6f7d8c"),
    *("#a8a432", "#2aa5b5", "#94c5f0", "#f2b98a", "#c9c9c9", "#5a5a5a", "#9b2226"),
)
"""Colors of the parts of a step."""


@dataclass(frozen=True)
class Difference:
    """Mean relative difference from eager fp32 with its standard error, NaN if not finite."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float], reference: Sequence[float]) -> Self:
        """Return the difference of values at the same weights and batch, paired by turn.

        Args:
            values: Values to compare.
            reference: Values of eager fp32.
        """
        pairs = list(zip(values, reference, strict=False))
        if not all(math.isfinite(value) for pair in pairs for value in pair):
            return cls(math.nan, math.nan)
        apart = [value - other for value, other in pairs]
        scale = abs(statistics.fmean(other for _, other in pairs)) or 1.0
        error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        return cls(statistics.fmean(apart) / scale, error / scale)

    def within(self, tolerance: float) -> bool:
        """Return True if rounding and dropout masks can explain the difference, False if it is NaN.

        Args:
            tolerance: Relative tolerance for rounding.
        """
        return abs(self.mean) <= tolerance + _ERRORS * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class Cell:
    """One engine in one precision on one model.

    Attributes:
        model: Name of the model.
        engine: Name of the engine.
        precision: Precision of matrix products.
        steps_per_turn: Number of steps in a turn.
        step_ms: For each round, the mean time of a turn's steps.
        first_step_s: Seconds from the plain module to the end of its first step.
        export_s: Part of `first_step_s` for ORT's exports.
        check_s: Part of `first_step_s` for checks of the exports.
        losses: Loss of each turn: the first step, the warm-up rounds, the measured rounds.
        grad_norms: Gradient norm of each turn.
        remarks: Further lines to show.
        reason: Reason why the cell was not timed, or None.
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
        """Engine and precision."""
        return self.engine, self.precision


@dataclass(frozen=True)
class Floor:
    """Least time of a step of a model in one precision. See `ortlab.bench.roofline`.

    Attributes:
        model: Name of the model.
        precision: Precision of matrix products.
        flops: Floating-point operations of matrix products and convolutions in a step.
        moved_bytes: Bytes of the activations that enter and leave these.
        product_ms: For each round, the time of `flops` at the machine's rate.
        moving_ms: For each round, the time of `moved_bytes` at the machine's rate.
        optimizer_ms: For each round, the time of the optimizer with clipping.
    """

    model: str
    precision: str
    flops: int
    moved_bytes: int
    product_ms: tuple[float, ...]
    moving_ms: tuple[float, ...]
    optimizer_ms: tuple[float, ...]

    @property
    def step_ms(self) -> tuple[float, ...]:
        """For each round, the least time of a step."""
        parts = zip(self.product_ms, self.moving_ms, self.optimizer_ms, strict=True)
        return tuple(map(sum, parts))


@dataclass(frozen=True)
class StepProfile:
    """Profile of an engine's training step. See `ortlab.bench.profiled`.

    Attributes:
        model: Name of the model.
        engine: Name of the engine.
        precision: Precision of matrix products.
        forward_ms: Time of the forward pass without instrumentation.
        backward_ms: Time of the backward pass without instrumentation.
        optimizer_ms: Time of the optimizer with clipping.
        kind_ms: Time of the operators in both passes, by kind.
        operator_ms: Same by name, in descending order.
        around_ms: Time of Python and torch around ORT's sessions in both passes, without operators
            that torch runs; 0 in engines that have none.
    """

    model: str
    engine: str
    precision: str
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    kind_ms: Mapping[str, float]
    operator_ms: Mapping[str, float]
    around_ms: float = 0.0

    @property
    def part_ms(self) -> dict[str, float]:
        """Time of each kind of operator, of the optimizer, and of both passes between operators."""
        kinds_ms, passes_ms = sum(self.kind_ms.values()), self.forward_ms + self.backward_ms
        around = {AROUND: self.around_ms} if self.around_ms else {}
        between_ms = max(0.0, passes_ms - kinds_ms - self.around_ms)
        return {**self.kind_ms, **around, BETWEEN: between_ms, OPTIMIZER: self.optimizer_ms}

    @property
    def step_ms(self) -> float:
        """Time of both passes and the optimizer without instrumentation."""
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def slowdown(self) -> float:
        """Time of the parts over that of the step; above 1 if the profiler slows operators down."""
        return sum(self.part_ms.values()) / self.step_ms


_WHOLES: Mapping[str, Callable[[StepProfile], float]] = {
    "forward": lambda profile: profile.forward_ms,
    "backward": lambda profile: profile.backward_ms,
    "step": lambda profile: profile.step_ms,
}
"""Times without profiler, by name."""


@dataclass(frozen=True)
class EngineBench:
    """Results of all engines in all precisions on some models.

    Attributes:
        settings: Settings of the benchmark.
        date: Date in UTC.
        environment: Versions of the installed packages.
        machine: Machine that it ran on.
        models: Description of each model, keyed by name.
        cells: Results. Incomplete if `interrupted`.
        interrupted: True if the benchmark was stopped before its end.
        floors: Least times of a step, with ``roofline``.
        profiles: Profiles of a step in each engine, with ``profile``.
    """

    settings: BenchSettings
    date: str
    environment: Mapping[str, Any]
    machine: Machine
    models: Mapping[str, str]
    cells: tuple[Cell, ...]
    interrupted: bool = False
    floors: tuple[Floor, ...] = ()
    profiles: tuple[StepProfile, ...] = ()

    def cell(self, model: str, engine: str, precision: str) -> Cell | None:
        """Return a cell, or None if it was not reached.

        Args:
            model: Name of the model.
            engine: Name of the engine.
            precision: Precision of matrix products.
        """
        names = (model, engine, precision)
        return next((c for c in self.cells if (c.model, *c.key) == names), None)

    def speed(self, cell: Cell) -> Spread | None:
        """Return the number of steps in the time of one step of eager fp32, or None if not timed.

        Args:
            cell: Cell of this benchmark.

        Returns:
            Median of the rounds, with quartiles.
        """
        reference = self.cell(cell.model, *REFERENCE)
        if reference is None or not cell.step_ms:
            return None
        pairs = zip(reference.step_ms, cell.step_ms, strict=False)
        ratios = [theirs / ours for theirs, ours in pairs]
        return Spread.of(ratios) if ratios else None

    def share(self, cell: Cell) -> Spread | None:
        """Return the least time of a step over the cell's, or None if one of them is unknown.

        Args:
            cell: Cell of this benchmark.

        Returns:
            Median of the rounds, with quartiles.
        """
        names = (cell.model, cell.precision)
        floor = next((f for f in self.floors if (f.model, f.precision) == names), None)
        if floor is None or not cell.step_ms:
            return None
        return Spread.of([a / b for a, b in zip(floor.step_ms, cell.step_ms, strict=False)])

    def loss_difference(self, cell: Cell) -> Difference | None:
        """Return the difference of the mean loss from eager fp32, or None if it is unknown.

        Args:
            cell: Cell of this benchmark.
        """
        return self._difference(cell, lambda c: c.losses)

    def grad_norm_difference(self, cell: Cell) -> Difference | None:
        """Return the difference of the mean gradient norm from eager fp32, or None if unknown.

        Args:
            cell: Cell of this benchmark.
        """
        return self._difference(cell, lambda c: c.grad_norms)

    def _difference(
        self, cell: Cell, values: Callable[[Cell], tuple[float, ...]]
    ) -> Difference | None:
        reference = self.cell(cell.model, *REFERENCE)
        if reference is None or not values(reference) or not values(cell):
            return None
        return Difference.of(values(cell), values(reference))

    def suspect(self, cell: Cell) -> bool:
        """Return True if loss or gradients differ more than rounding and masks can explain.

        Args:
            cell: Cell of this benchmark.
        """
        found = (self.loss_difference(cell), self.grad_norm_difference(cell))
        return any(d is not None and not d.within(_TOLERANCE[cell.precision]) for d in found)

    # ---- JSON ------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return all values and those derived from them in a form that JSON can store."""
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
            "floors": [_plain(floor) for floor in self.floors],
            "profiles": [dataclasses.asdict(profile) for profile in self.profiles],
        }

    def _derived(self, cell: Cell) -> dict[str, Any]:
        found = {
            "step_ms": Spread.of(cell.step_ms) if cell.step_ms else None,
            "speed": self.speed(cell),
            "share": self.share(cell),
            "loss_difference": self.loss_difference(cell),
            "grad_norm_difference": self.grad_norm_difference(cell),
        }
        figures = {name: None if v is None else _plain(v) for name, v in found.items()}
        return figures | {"suspect": self.suspect(cell)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the result that `as_dict` stored. Values that follow from others are recomputed.

        Args:
            stored: Dictionary from `as_dict`.

        Raises:
            ValueError: If the dictionary has another format version.
        """
        if stored.get("form") != FORM:
            raise ValueError(
                f"unsupported format version {stored.get('form')!r} of a benchmark; expected {FORM}"
            )
        return cls(
            settings=BenchSettings.of(stored["settings"]),
            date=stored["date"],
            environment=stored["environment"],
            machine=Machine(**stored["machine"]),
            models=stored["models"],
            cells=tuple(Cell(**_given(each)) for each in stored["cells"]),
            interrupted=stored["interrupted"],
            floors=tuple(Floor(**_given(each)) for each in stored.get("floors", ())),
            profiles=tuple(StepProfile(**each) for each in stored.get("profiles", ())),
        )

    # ---- Markdown --------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return the report: the tables of `summary`, then all cells with loss and gradients."""
        return "\n".join([*self.warnings(), self.tables(), ""])

    _repr_markdown_ = markdown

    def tables(self) -> str:
        """Return the report without its warnings."""
        return "\n".join([self.summary(), *self._details()])

    def summary(self) -> str:
        """Return tables of speed and of seconds to the first step, by model, with notes.

        README.md shows these tables.
        """
        rounds = self.settings.rounds
        cached = "cached or not" if self.settings.quick else "with nothing cached on disk"
        lines = [
            f"Speed relative to eager fp32 on the same batch, median and quartiles of {rounds} "
            "rounds; above 1 is faster:",
            "",
            *self._grid(self._speed),
            "",
            f"Seconds to the end of the first step, {cached}:",
            "",
            *self._grid(self._first),
            "",
            *self._roofline(),
            *self._profiles(),
            *(f"({number}) {reason}  " for reason, number in self._reasons().items()),
            *filter(None, [self._options()]),
            self.origin(),
        ]
        return "\n".join(lines)

    def _roofline(self) -> list[str]:
        """Return tables of the floors and of each cell's share of them."""
        if not self.floors:
            return []
        rows = [
            [
                floor.model,
                floor.precision,
                f"{floor.flops / 1e9:,.3g} GFLOP at {_rate(floor.flops, floor.product_ms):,.3g} "
                f"GFLOP/s: {milliseconds(Spread.of(floor.product_ms).median)}",
                f"{floor.moved_bytes / 1e9:,.3g} GB at "
                f"{_rate(floor.moved_bytes, floor.moving_ms):,.3g} GB/s: "
                f"{milliseconds(Spread.of(floor.moving_ms).median)}",
                milliseconds(Spread.of(floor.optimizer_ms).median),
                milliseconds(Spread.of(floor.step_ms).median),
            ]
            for floor in self.floors
        ]
        heads = ["model", "precision", "matrix products", "activations", "optimizer", "floor"]
        return [
            "Floor of a step at the rates of a large matrix product and a large copy in the same "
            "rounds:",
            "",
            *table(heads, rows),
            "",
            "Floor over step, median and quartiles; 100% is the machine's limit:",
            "",
            *self._grid(self._share),
            "",
        ]

    def _share(self, cell: Cell) -> str:
        share = self.share(cell)
        return "" if share is None else f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"

    def profiled(self, model: str) -> list[StepProfile]:
        """Return the profiles of a model.

        Args:
            model: Name of the model.
        """
        return [each for each in self.profiles if each.model == model]

    def picture(self, model: str) -> str:
        """Return the profiles of a model as a bar chart in SVG, with a bar for each engine.

        Args:
            model: Name of the model.
        """
        profiles = self.profiled(model)
        parts = _parts(profiles)
        series = {part: (_COLORS[i % len(_COLORS)], 1.0) for i, part in enumerate(parts)}
        rows = [
            (_column(each), [{part: ms for part in parts if (ms := each.part_ms.get(part))}])
            for each in profiles
        ]
        return svg_bars.svg(rows, series, told=milliseconds)

    def _profiles(self) -> list[str]:
        """Return a table for each profiled model: parts of a step by engine and precision."""
        lines = []
        for name, about in self.models.items():
            profiles = self.profiled(name)
            if not profiles:
                continue
            parts = [each.part_ms for each in profiles]
            rows = [
                [part, *(f"{each[part]:.3g}" if part in each else "-" for each in parts)]
                for part in _parts(profiles)
            ]
            rows += [
                [f"{name} without profiler", *(f"{ms(each):.3g}" for each in profiles)]
                for name, ms in _WHOLES.items()
            ]
            lines += [
                f"{about}: where a step goes, in ms:",
                "",
                *table(["", *map(_column, profiles)], rows),
                "",
                *(f"- {_column(each)}: {_longest(each)}" for each in profiles),
                "",
            ]
        return lines

    def _options(self) -> str:
        options = ", ".join(part.strip() for part in self.settings.ort_options.split(","))
        return f"ORT's engines with {options}.  " if options else ""

    def origin(self) -> str:
        """Return versions, processor and date as one line."""
        return origin(self.environment, self.machine, self.date)

    def warnings(self) -> list[str]:
        """Return the reasons why the values are not reliable, as lines of Markdown."""
        quick = self.settings.quick
        return warnings(self.machine, quick=quick, interrupted=self.interrupted)

    def _grid(self, text: Callable[[Cell], str]) -> list[str]:
        """Return a table with a row for each model and a column for each engine and precision."""
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
        return f"{spread}{wrong}"

    def _first(self, cell: Cell) -> str:
        return "" if cell.first_step_s is None else f"{cell.first_step_s:.1f}"

    def _reasons(self) -> dict[str, int]:
        """Return the reasons why cells were not timed, numbered."""
        reasons = dict.fromkeys(cell.reason for cell in self.cells if cell.reason is not None)
        return {reason: number for number, reason in enumerate(reasons, start=1)}

    def _details(self) -> list[str]:
        heads = ["model", "engine", "precision", "step", "quartiles", "speed", "first step"]
        heads += ["export", "check", "loss", "gradient norm"]
        lines = ["", *table(heads, [self._row(cell) for cell in self.cells]), ""]
        lines += [
            "Export and check are parts of the first step. Loss and gradient norm: difference of "
            "the means over all turns from eager fp32 at the same weights, with the standard error "
            "from dropout masks.",
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


def _column(profile: StepProfile) -> str:
    return f"{profile.engine} {profile.precision}"


def _parts(profiles: Sequence[StepProfile]) -> list[str]:
    """Return the parts of all profiles, those that take longest first, the optimizer last."""
    sums: dict[str, float] = {}
    for each in profiles:
        for part, ms in each.part_ms.items():
            sums[part] = sums.get(part, 0.0) + ms
    last = [part for part in (AROUND, BETWEEN, OPTIMIZER) if part in sums]
    return [*sorted(sums.keys() - set(last), key=lambda part: -sums[part]), *last]


def _longest(profile: StepProfile) -> str:
    """Return the operators that take longest, with their times."""
    shown = list(profile.operator_ms.items())[:_OPERATORS]
    told = ", ".join(f"{name} {ms:.3g}" for name, ms in shown)
    if profile.slowdown < _SLOWED:
        return told
    return f"{told}; the profiler makes the step {profile.slowdown - 1:.0%} slower"


def origin(environment: Mapping[str, Any], machine: Machine, date: str) -> str:
    """Return versions, processor and date as one line.

    Args:
        environment: Versions of the installed packages.
        machine: Machine that the benchmark ran on.
        date: Date in UTC.
    """
    packages = environment["packages"]
    versions = [f"ortlab {environment['ortlab']}", f"Python {environment['python']}"]
    for name in ("torch", "onnxruntime-training", "transformers"):
        versions.append(f"{name} {packages[name]}" if name in packages else f"no {name}")
    return f"{', '.join(versions)}; {machine}; {date}."


def warnings(machine: Machine, *, quick: bool, interrupted: bool = False) -> list[str]:
    """Return the reasons why the values are not reliable, as lines of Markdown.

    Args:
        machine: Machine that the benchmark ran on.
        quick: True if the models were tiny.
        interrupted: True if the benchmark was stopped before its end.
    """
    lines = []
    if quick:
        lines += [
            "**Not a benchmark**: tiny models (`--quick`) that test that everything runs.",
            "",
        ]
    if machine.busy:
        busy = f"load average {machine.load:.1f} before the start"
        lines += [f"**Busy machine**: {busy}.", ""]
    if interrupted:
        lines += ["**Interrupted**: measurements up to that point.", ""]
    return lines


def milliseconds(value: float) -> str:
    """Return a time as text with three significant digits, or without decimals from 100 ms on.

    Args:
        value: Time in milliseconds.
    """
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _rate(amount: int, ms: Sequence[float]) -> float:
    """Return billions per second."""
    return amount / Spread.of(ms).median / 1e6


def _plain(record: Cell | Floor | Spread | Difference) -> dict[str, Any]:
    """Return a record's fields as JSON stores them: lists for tuples, null if not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in dataclasses.asdict(record).items()}


def _given(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `_plain` stored, without derived values."""
    values = {name: value for name, value in stored.items() if name != "derived"}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(math.nan if item is None else item for item in value)
    return values


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown.

    Args:
        heads: Column headings.
        rows: Cells of each row.
    """
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
