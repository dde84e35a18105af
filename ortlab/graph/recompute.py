"""What each recompute plan saves and costs, before it is run.

A plan names modules whose activations are computed again in the backward pass, see
`ortlab.engines.ortmodule.kernels.recompute`. The memory is read from the graph that the plan makes,
as in `memory`; the time is that of the kernels that run twice, from a profile of the model's own
steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from ortlab.engines.base import Batch
from ortlab.engines.ortmodule import options
from ortlab.engines.ortmodule.kernels.recompute import LAYERS, SUFFIX, Plans
from ortlab.graph import profiler
from ortlab.graph.capture import capture, execution_behind
from ortlab.graph.memory import MemoryPlan, plan, plan_of
from ortlab.settings import EngineSettings, FinetuneSettings
from ortlab.utils.process_memory import memory, parse_bytes
from ortlab.utils.tables import Column, Table

OFF: Final = "off"
_YIELD: Final = "com.microsoft.YieldOp"
_STEPS: Final = 3
_MOST_CHOICES: Final = 64
"""Of plans together that `RecomputePlans.least_time` looks at, the cheapest first."""


@dataclass(frozen=True)
class Saving:
    """A plan beside no plan: bytes for the sizes that were asked for, seconds of one step.

    ``after_forward_bytes`` are activations that are not there when backward begins, ``peak_bytes``
    what the step's peak falls by. ``cost_s`` is None where nothing was measured.
    """

    plan: str
    occurrences: int
    after_forward_bytes: int
    peak_bytes: int
    cost_s: float | None


class RecomputePlans:
    """The plans of a wrapped model; shown as a table, `at` sizes that are given by name.

    ``plans.choose("encoder.layer.*")`` lets one hold from the next step on; several are joined by
    commas. ``plans.least_time("2GiB", batch=32)`` names what costs least of those that fit. With
    `settings` they are those of the graph that was made for these.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None,
        *,
        optimizer: str,
        choose: Callable[[str], None],
        settings: EngineSettings | None = None,
    ) -> None:
        graphs = capture(model, batch, settings)
        execution = execution_behind(model)
        exports = [each for each in execution.exports(settings) if each.gradient]
        if not exports or "execution" not in graphs.stages:
            raise ValueError(
                f"{graphs.model} has no graph of a training step that its session tells: train a "
                "step, or give a batch, on a CPU and without save_onnx"
            )
        if exports[-1].manager._runtime_options.memory_optimizer_is_enabled():
            raise ValueError(
                f"{graphs.model} is recomputed by ORT's own plans, which are in its graph already; "
                "wrap it without them"
            )
        self._model, self._original = model, execution.module
        self._batch = batch
        self._choose = choose
        self._optimizer = optimizer
        self._stage = graphs.stages["execution"]
        self._sizes = dict(graphs.sizes)
        self._graph = Plans(exports[-1].graph_to_run())
        self._given: dict[str, int] = {}
        self._known: dict[tuple[str, ...], MemoryPlan] = {}
        self._kernels_us: Mapping[str, float] | None = None
        self._step_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The plans that there are, outer modules before those within."""
        return tuple(self._graph.parts)

    @property
    def layers(self) -> tuple[str, ...]:
        """The plans of whole layers, one for each list of them."""
        return self._graph.layers

    def parts(self, plan: str) -> tuple[str, ...]:
        """The plans that `plan` joins, or stands for; UnknownPlan names the nearest."""
        return self._graph.check(_split(plan))

    @property
    def chosen(self) -> str:
        """What holds now, as the setting `recompute` has it."""
        return execution_behind(self._model).settings.recompute

    @property
    def dims(self) -> dict[str, int | None]:
        """The sizes that a batch decides, by name, and what they are where none is given."""
        return self.memory(OFF).dims

    def at(self, **sizes: int) -> RecomputePlans:
        """The same for these sizes: what the table shows; ValueError names one that is unknown."""
        found = copy.copy(self)
        found._given = {**self._given, **sizes}
        found.memory(OFF)
        return found

    def choose(self, plan: str) -> None:
        """Lets `plan` hold from the next step on, "off" none. UnknownPlan names the nearest.

        While a run trains the model it is the run's, as ``run.apply(recompute=plan)`` makes it.
        """
        self._graph.check(_split(plan))
        self._choose(plan)

    def memory(self, plan: str) -> MemoryPlan:
        """The memory of a step under `plan`: its peak, its picture; nothing is run."""
        return self._memory(_split(plan))

    def _memory(self, plans: tuple[str, ...]) -> MemoryPlan:
        if plans not in self._known:
            stage = self._stage.of(self._graph.applied(plans))
            self._known[plans] = plan_of(stage, self._sizes, self._original, self._optimizer)
        return self._known[plans].at(**self._given)

    def savings(self, plan: str) -> Saving:
        """What `plan` saves and costs."""
        plans = self._graph.check(_split(plan))
        before, after = self._memory(()), self._memory(plans)
        return Saving(
            plan,
            sum(len(self._graph.parts[each].occurrences) for each in plans),
            _after_forward(before) - _after_forward(after),
            before.peak_bytes() - after.peak_bytes(),
            self._cost_s(plans),
        )

    def measure(self, steps: int = _STEPS) -> RecomputePlans:
        """Times the kernels of the model's own steps, from which the costs follow; seconds.

        The figures are of the sizes of the batch, or of the last call. The model is left as it is.
        """
        found = profiler.profile(self._model, self._batch, steps)
        if found.ort is None:
            raise ValueError(f"the model runs in torch: {'; '.join(found.notes)}")
        self._kernels_us = {node.node: node.us for node in found.ort.nodes}
        self._step_s = found.ort.plain_us / 1e6
        return self

    def _cost_s(self, plans: Sequence[str]) -> float | None:
        if self._kernels_us is None:
            return None
        nodes = self._memory(tuple(plans)).stage.nodes
        again = (node.name.removesuffix(SUFFIX) for node in nodes if node.name.endswith(SUFFIX))
        return sum(self._kernels_us.get(name, 0.0) for name in again) / 1e6

    def least_time(self, budget: int | str, **sizes: int) -> str:
        """The plan that costs least time of those whose peak is within `budget`, "off" for none.

        `budget` is bytes, or text such as "2GiB", of what `MemoryPlan.peak_bytes` counts. What was
        not measured is, as of `measure`. ValueError says what the least takes where nothing fits.
        """
        limit = parse_bytes(budget)
        if self._kernels_us is None:
            self.measure()
        here = self.at(**sizes)
        ranked = sorted(here._choices(), key=lambda plans: here._cost_s(plans) or 0.0)
        least = here._memory(())
        for plans in ranked:
            found = here._memory(plans)
            if found.peak_bytes() <= limit:
                return ",".join(plans) or OFF
            least = min(least, found, key=lambda each: each.peak_bytes())
        raise ValueError(
            f"the least that a step takes with recompute is {memory(least.peak_bytes())}, more "
            f"than {memory(limit)}: take a smaller batch"
        )

    def _choices(self) -> list[tuple[str, ...]]:
        """Plans that go together, none within another; whole layers of all lists are among them."""
        singles = [(plan,) for plan in self.names]
        found: list[tuple[str, ...]] = [(), self._graph.layers, *singles]
        for count in range(2, len(self.names) + 1):
            for plans in itertools.combinations(self.names, count):
                if len(found) >= _MOST_CHOICES:
                    return list(dict.fromkeys(found))
                if not any(_within(a, b) for a, b in itertools.permutations(plans, 2)):
                    found.append(plans)
        return list(dict.fromkeys(found))

    def table(self, **sizes: int) -> Table[Saving]:
        """A row for each plan, and for all layers where there are several lists of them."""
        here = self.at(**sizes) if sizes else self
        plans = list(self.names)
        if len(self._graph.layers) > 1:
            plans.insert(0, LAYERS)
        rows = [here.savings(plan) for plan in plans]
        chosen = (*_split(self.chosen), *self.parts(self.chosen))
        columns: list[Column[Saving]] = [
            Column("", lambda row: "x" if row.plan in chosen else ""),
            Column("compute again", lambda row: row.plan),
            Column("modules", lambda row: str(row.occurrences), number=True),
            Column("saved after forward", lambda row: memory(row.after_forward_bytes), number=True),
            Column("saved at the peak", lambda row: signed(row.peak_bytes), number=True),
            Column("costs a step", self.told_cost, number=True),
        ]
        return Table(
            rows,
            columns,
            notes=list(here._notes()),
            empty="the model has no list of layers whose activations could be computed again",
        )

    def told_cost(self, saving: Saving) -> str:
        """Its cost in milliseconds and beside a step; a dash where nothing was measured."""
        if saving.cost_s is None:
            return "-"
        share = f" (+{saving.cost_s / self._step_s:.0%})" if self._step_s else ""
        return f"{saving.cost_s * 1e3:.1f} ms{share}"

    def _notes(self) -> Iterator[str]:
        before = self._memory(())
        at = ", ".join(f"{name} {size}" for name, size in self.dims.items())
        yield (
            f"without any, for {at}: {memory(before.peak_bytes())} at the peak, "
            f"{memory(_after_forward(before))} of activations after forward"
        )
        yield f"now: {self.chosen}; gradients stay the same, bit for bit"
        if self._step_s is None:
            yield "what it costs is not measured yet: .measure(), or %ort recompute MODEL --measure"
        else:
            yield f"costs are of the batch that was timed, {self._step_s * 1e3:.0f} ms a step"

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _after_forward(plan: MemoryPlan) -> int:
    """Bytes beyond those of an idle model when torch has the outputs and backward begins."""
    nodes = plan.stage.nodes
    at = next(i for i, node in enumerate(nodes) if node.op == _YIELD)
    return int(plan.curve()[at]) - plan.idle_bytes()


def _split(plan: str) -> tuple[str, ...]:
    names: Iterable[str] = (name.strip() for name in plan.split(","))
    return tuple(name for name in names if name and name != OFF)


def _within(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}.")


def signed(size_bytes: int) -> str:
    """Bytes in words, which may be less than none."""
    return memory(size_bytes) if size_bytes >= 0 else f"-{memory(-size_bytes)}"


def plan_for(
    model: nn.Module, settings: FinetuneSettings, *, choose: Callable[[str], None]
) -> tuple[MemoryPlan, EngineSettings]:
    """Return the memory plan of the wrapped `model`, and the settings that its graph has.

    The graph is the one that was made for `settings`, with what they have computed again in it,
    or else the one that is in use; nothing is exported.

    Raises:
        ValueError: If ORT has made no graph yet, or cannot compute that again.
    """
    execution, optimizer = execution_behind(model), settings.optimizer
    made = [each for each in execution.exports(settings) if each.gradient]
    if not made:
        return plan(capture(model), model, optimizer=optimizer), execution.settings
    if made[-1].plans == options.recomputed(settings):
        return plan(capture(model, settings=settings), model, optimizer=optimizer), settings
    again = RecomputePlans(model, None, optimizer=optimizer, choose=choose, settings=settings)
    return again.memory(settings.recompute), settings
