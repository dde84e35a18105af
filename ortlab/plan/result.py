"""Training plan: the best layouts, the picture of their memory, and what they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ortlab.plan import layouts
from ortlab.plan.hardware import Hardware
from ortlab.plan.launch_files import finetune_conflict, finetune_settings, write_files
from ortlab.plan.layouts import Candidate, Found
from ortlab.plan.transformer import Transformer, divisors, parse_count, transformer
from ortlab.plan.zero_memory import SERIES
from ortlab.settings import PlanSettings
from ortlab.utils import svg_bars
from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column, Table, rounded

SHOWN: Final = 10
"""Layouts that are shown."""
_PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "gathered": "gathered weights",
    "context": "CUDA",
}
_SERIES: Final = {
    **SERIES,
    "gathered weights": ("#7a4fb5", 1.0),
    "CUDA": ("#424242", 1.0),
}
_BAR: Final = 40
_DAY: Final = 86_400.0
_MOST_NODES: Final = 8192


class TrainingPlan:
    """Plan of how to train a model on a fleet of GPUs.

    Args:
        model: The shape.
        settings: The settings.
        hardware: The GPUs.
        gpus: Number of GPUs.
        batch: Samples of a step.
        found: The layouts.

    Attributes:
        best: The fastest layout that fits, with its memory and time; None if none fits.
        shown: The ten fastest ones.
    """

    def __init__(
        self,
        model: Transformer,
        settings: PlanSettings,
        hardware: Hardware,
        gpus: int,
        batch: int,
        found: Found,
    ) -> None:
        self.model, self.chosen, self.hardware = model, settings, hardware
        self.gpus, self.batch = gpus, batch
        self._found = found
        fitting: Iterator[Candidate] = iter(found.fitting)
        if settings.layout.trainer == "ortlab":
            fitting = (one for one in fitting if self._conflict(one) is None)
        self.shown = tuple(itertools.islice(fitting, SHOWN))
        self.best = self.shown[0] if self.shown else None

    def _conflict(self, one: Candidate) -> str | None:
        return finetune_conflict(one.layout, self.chosen.layout.optimizer)

    @property
    def steps(self) -> int | None:
        """Number of steps; None if no tokens are given."""
        if self.chosen.tokens is None:
            return None
        tokens = parse_count(self.chosen.tokens, of="tokens")
        return math.ceil(tokens / (self.batch * self.model.sequence))

    def days(self, one: Candidate) -> float | None:
        """Return the days that training takes with a layout; None if no tokens are given.

        Args:
            one: A layout of the plan.
        """
        return None if self.steps is None else self.steps * one.seconds / _DAY

    def table(self) -> Table[Candidate]:
        """Return the ten fastest layouts that fit."""
        columns = [
            Column[Candidate]("tensor", lambda one: f"{one.layout.tensor}", number=True),
            Column[Candidate]("pipeline", lambda one: f"{one.layout.pipeline}", number=True),
            Column[Candidate]("data", lambda one: f"{one.layout.data}", number=True),
            Column[Candidate]("ZeRO", lambda one: f"{one.layout.zero}", number=True),
            Column[Candidate]("micro-batches", _micro_batches, number=True),
            Column[Candidate]("interleaved", lambda one: f"{one.layout.interleave}", number=True),
            Column[Candidate]("recompute", lambda one: one.layout.recompute),
            Column[Candidate]("precision", lambda one: one.layout.precision),
            Column[Candidate]("memory", lambda one: memory(one.memory.total), number=True),
            Column[Candidate]("step", lambda one: _time(one.seconds), number=True),
        ]
        if self.steps is not None:
            columns += [
                Column("days", lambda one: rounded(self.days(one) or 0), number=True),
                Column("GPU hours", lambda one: f"{self._gpu_hours(one):,.0f}", number=True),
            ]
            price = self.chosen.on.price
            if price is not None:
                columns.append(
                    Column("cost", lambda one: f"{price * self._gpu_hours(one):,.0f}", number=True)
                )
        columns += [
            Column[Candidate]("compute", lambda one: _share(one, "compute"), number=True),
            Column[Candidate](
                "traffic", lambda one: _share(one, "tensor", "pipeline", "data"), number=True
            ),
            Column[Candidate]("bubble", lambda one: _share(one, "bubble"), number=True),
        ]
        return Table(self.shown, columns, notes=self._notes(), empty=self._nothing())

    def _gpu_hours(self, one: Candidate) -> float:
        return 24 * self.gpus * (self.days(one) or 0)

    def _nothing(self) -> str:
        over = self._found.over.values()
        if self._found.fitting:
            return "nothing that finetune can train fits; use more GPUs, or trainer=megatron"
        if not over:
            return "no layout has these degrees, stages of ZeRO and micro-batches; leave some out"
        least = min(over, key=lambda one: one.memory.total)
        return (
            f"nothing fits: {_named(least)} needs least, {memory(least.memory.total)}; use more "
            "GPUs, GPUs with more memory, a shorter sequence, or a smaller margin"
        )

    def _notes(self) -> list[str]:
        model, hardware, chosen = self.model, self.hardware, self.chosen
        notes = [
            f"{_count(model.parameters)} parameters, {self.gpus} {hardware.name}, "
            f"{self.batch} samples of {model.sequence} tokens a step"
        ]
        if model.about:
            notes.append(model.about)
        room = layouts.room(chosen, hardware)
        notes.append(f"fits into {memory(room)} of {memory(hardware.memory)}")
        wanted, best = chosen.days, self.best
        if wanted is not None and best is not None and (taken := self.days(best)) is not None:
            late = "" if taken <= wanted else f", not within {wanted:g}: use more GPUs"
            notes.append(f"{chosen.tokens} tokens take {rounded(taken)} days{late}")
        notes.append(
            f"computation at {hardware.efficiency:.1%} of the peak; `ortlab plan --published` "
            "compares plans with published runs"
        )
        return notes

    def others(self) -> Table[tuple[str, str, str]]:
        """Return the degrees without a layout that fits, and why."""
        rows = [
            (f"{tensor}", f"{pipeline}", self._over(one))
            for (tensor, pipeline), one in self._found.over.items()
        ]
        left = layouts.left_out(self.model, self.hardware)
        rows += [(f"{degree}", "", reason) for degree, reason in left]
        columns = [
            Column[tuple[str, str, str]]("tensor", lambda row: row[0], number=True),
            Column[tuple[str, str, str]]("pipeline", lambda row: row[1], number=True),
            Column[tuple[str, str, str]]("why not", lambda row: row[2]),
        ]
        return Table(rows, columns, empty="some layout of all degrees fits")

    def _over(self, one: Candidate) -> str:
        more = memory(one.memory.total - layouts.room(self.chosen, self.hardware))
        return f"at least {memory(one.memory.total)}, {more} too much ({_named(one)})"

    def picture(self) -> str:
        """Return an SVG bar chart of the memory of the shown layouts, with a line at the GPU's."""
        rows = [(_named(one), [_parts(one)]) for one in self.shown]
        return svg_bars.svg(rows, _SERIES, told=memory, limit=float(self.hardware.memory))

    def bars(self) -> str:
        """Return the memory of the best layout as text; "" if none fits."""
        if self.best is None:
            return ""
        parts = {**_parts(self.best), "all": float(self.best.memory.total)}
        scale = _BAR / self.hardware.memory
        lines = [
            f"{name:17}{memory(size):>11}  {'#' * max(round(size * scale), 1)}"
            for name, size in parts.items()
        ]
        full = f"{'a GPU has':17}{memory(self.hardware.memory):>11}  {'-' * _BAR}"
        return "\n".join([f"memory of {_named(self.best)}:", *lines, full])

    def settings(self) -> dict[str, Any]:
        """Return the best layout as settings of `ortlab.finetune`.

        Raises:
            ValueError: If nothing fits, or `finetune` cannot train the layout; the message says
                why, and what to plan with.
        """
        if self.best is None:
            raise ValueError(self._nothing())
        if (reason := self._conflict(self.best)) is not None:
            raise ValueError(f"finetune cannot train this layout: {reason}")
        found = finetune_settings(self.best.layout, self.chosen.layout.optimizer)
        return found if self.steps is None else {**found, "max_steps": self.steps}

    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write files that launch the best layout: ``launch.sh``, ``job.sbatch``, settings as JSON.

        Args:
            folder: Folder to write into, which is made; files with these names are not replaced.

        Raises:
            ValueError: If nothing fits, or one of the files exists.
        """
        if self.best is None:
            raise ValueError(self._nothing())
        settings = self._conflict(self.best) or self.settings()
        return write_files(
            Path(folder), self.model, self.best.layout, settings, self.hardware, self.steps
        )

    def __repr__(self) -> str:
        parts = [repr(self.table()), self.bars()]
        others = self.others()
        if len(others):
            parts.append(repr(others))
        return "\n\n".join(part for part in parts if part)

    def _repr_html_(self) -> str:
        picture = svg_bars.image(self.picture(), "Memory of a rank by layout") if self.best else ""
        others = self.others()
        more = others._repr_html_() if len(others) else ""
        return f"{picture}{self.table()._repr_html_()}{more}"


def _count(parameters: int) -> str:
    if parameters < 1e9:
        return f"{parameters / 1e6:.3g}M"
    return f"{rounded(parameters / 1e9)}B"


def _time(seconds: float) -> str:
    return f"{rounded(seconds)} s" if seconds >= 0.1 else f"{rounded(1000 * seconds)} ms"


def _micro_batches(one: Candidate) -> str:
    return f"{one.layout.micro_batches} of {one.layout.micro_batch}"


def _share(one: Candidate, *parts: str) -> str:
    assert one.time is not None
    return f"{sum(getattr(one.time, part) for part in parts) / one.seconds:.0%}"


def _named(one: Candidate) -> str:
    layout = one.layout
    words = [f"tensor {layout.tensor}", f"pipeline {layout.pipeline}", f"data {layout.data}"]
    words += [f"ZeRO-{layout.zero}"] if layout.zero else []
    return " x ".join(words[:3]) + "".join(f", {word}" for word in words[3:])


def _parts(one: Candidate) -> dict[str, float]:
    held = {told: float(getattr(one.memory, name)) for name, told in _PARTS.items()}
    return {name: size for name, size in held.items() if size}


def training_plan(model: Any, **settings: Any) -> TrainingPlan:
    """See `ortlab.api.training_plan`."""
    chosen = PlanSettings.of(settings)
    sizes = {name: size for name, size in chosen.shape.as_dict().items() if size is not None}
    shape = transformer(model, sizes)
    hardware = layouts.chosen_hardware(chosen)
    layouts.check_degrees(shape, chosen, hardware)
    if chosen.tokens is not None:
        parse_count(chosen.tokens, of="tokens")
    if chosen.on.gpus is not None:
        layouts.check_gpus(shape, chosen, hardware, chosen.on.gpus)
        return _plan(shape, chosen, hardware, chosen.on.gpus)
    if chosen.tokens is None or chosen.days is None:
        raise ValueError(
            "how many GPUs is not known; give gpus, or tokens and days for the fewest that do"
        )
    return _fewest(shape, chosen, hardware, chosen.days)


def _plan(model: Transformer, chosen: PlanSettings, hardware: Hardware, gpus: int) -> TrainingPlan:
    batch = chosen.layout.batch
    if batch is None:
        batch = layouts.default_batch(model, gpus * (chosen.layout.micro_batch or 1))
    found = layouts.search(model, chosen, hardware, gpus, batch)
    return TrainingPlan(model, chosen, hardware, gpus, batch, found)


def _fewest(
    model: Transformer, chosen: PlanSettings, hardware: Hardware, days: float
) -> TrainingPlan:
    """Return the plan of the fewest GPUs that train the tokens within the days."""
    tokens = parse_count(chosen.tokens or "", of="tokens")
    speed = max(hardware.flops.values()) * hardware.efficiency
    flops = tokens / model.sequence * model.step_flops(1, again=False)
    plan = None
    for gpus in _counts(chosen, hardware):
        if flops / (gpus * speed) > days * _DAY:
            continue  # too few even without any traffic
        plan = _plan(model, chosen, hardware, gpus)
        if plan.best is not None and (plan.days(plan.best) or 0) <= days:
            return plan
    if plan is None or plan.best is None:
        raise ValueError(
            f"no number of GPUs up to {hardware.node * _MOST_NODES} trains {chosen.tokens} tokens "
            f"within {days:g} days; give more days or a larger batch"
        )
    return plan


def _counts(chosen: PlanSettings, hardware: Hardware) -> Iterator[int]:
    """Yield numbers of GPUs, from a part of a node to many; each is a multiple of the degrees."""
    shared = (chosen.layout.tensor or 1) * (chosen.layout.pipeline or 1)
    few = [each for each in divisors(hardware.node) if each < hardware.node]
    powers = [2**n for n in range(_MOST_NODES.bit_length())]
    nodes = sorted({*powers, *(3 * each // 2 for each in powers if each > 1)})
    yield from (each for each in few if each % shared == 0)
    unit = shared * hardware.node // math.gcd(shared, hardware.node)
    yield from (unit * each for each in nodes if unit * each <= hardware.node * _MOST_NODES)
