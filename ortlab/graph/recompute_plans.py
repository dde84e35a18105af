"""Memory that each recompute plan saves and time that it costs, estimated before it runs.

A plan names modules whose activations are recomputed in the backward pass, see
`ortlab.engines.ortmodule.kernels.recomputed_graph` and `ortlab.engines.ort.recompute`; on engine
``ort`` it can also be a budget. The memory is computed from the graph that the plan produces, as in
`memory`. The time is the time of the kernels that run twice, from a profile of the model's own
steps.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

from ortlab.engines.base import Batch, wrapped_model
from ortlab.engines.batch import arguments
from ortlab.engines.ortmodule import options
from ortlab.engines.ortmodule.compat.gradient_checkpointing import asks_for_checkpointing
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.ortmodule.kernels.recomputed_graph import SUFFIX, Plans
from ortlab.engines.plan_names import LAYERS, OFF, UnknownPlan, split, whole_layers
from ortlab.graph import profiler
from ortlab.graph.capture import Stage, capture, execution_behind
from ortlab.graph.memory import MemoryPlan, plan, plan_of
from ortlab.graph.planned_capture import PlannedCapture, PlannedGraph
from ortlab.graph.subgraphs import Subgraphs
from ortlab.settings import EngineSettings, FinetuneSettings, unknown_name
from ortlab.utils.process_memory import memory, parse_bytes, raised
from ortlab.utils.tables import Column, Table

if TYPE_CHECKING:
    from ortlab.engines.ort.model import OrtModel

_STEPS: Final = 3
_NO_PLANS: Final[Mapping[str, Any]] = {"memory_level": 0, "memory_plans": None}
_MOST_CHOICES: Final = 64
"""Maximum number of combinations of plans that `RecomputePlans.least_time` considers."""


@dataclass(frozen=True)
class Saving:
    """A plan compared with no plan, for given sizes of the batch.

    Attributes:
        plan: Name of the plan.
        occurrences: Number of modules that the plan recomputes.
        after_forward_bytes: Activations that are not in memory when the backward pass begins.
        peak_bytes: Reduction of the step memory.
        cost_s: Additional seconds per step, or None if nothing was measured.
    """

    plan: str
    occurrences: int
    after_forward_bytes: int
    peak_bytes: int
    cost_s: float | None


class _PlannedExport:
    """Graphs of engine ``ortmodule`` under its plans; see `PlannedGraph`.

    Args:
        model: Model wrapped in that engine.
        batch: Batch whose graph is used. If None, the graph used last.
        settings: If given, use the graph that was made for these settings.

    Raises:
        ValueError: If there is no executed graph of a training step, or ORT's own recompute plans
            replace the model's checkpoints.
    """

    combines = True

    def __init__(
        self, model: nn.Module, batch: Batch | None, settings: EngineSettings | None
    ) -> None:
        graphs = capture(model, batch, settings)
        self._execution = execution_behind(model)
        self._batch = batch
        self._settings = settings or self._execution.settings
        exports = [each for each in self._execution.exports(settings) if each.gradient]
        if not exports or "execution" not in graphs.stages:
            raise ValueError(
                f"{graphs.model} has no executed graph of a training step; train a step, or give "
                "a batch, on a CPU and without save_onnx"
            )
        export = exports[-1]
        self.module = self._execution.module
        self.sizes = dict(graphs.sizes)
        self.theirs = export.ort_plans
        self._in_use, self._stage = export, graphs.stages["execution"]
        self._of_theirs: dict[tuple[str, ...], Stage] = {}
        if self.theirs:
            if asks_for_checkpointing(export.manager):
                raise ValueError(
                    f"{graphs.model} calls torch.utils.checkpoint, which ORT's own plans for "
                    "recompute replace; remove its checkpoints to choose plans"
                )
            self._of_theirs[self.theirs] = self._stage
            export = self._exported(recompute=OFF)
            self._stage = self._stage.of(export.stages()["execution"])
        self._plans = Plans(export.graph_to_run())

    def _exported(self, **changes: Any) -> Export:
        """Return an export with other settings, without ORT's own plans unless given."""
        example = self._execution.example()
        call = example if self._batch is None else arguments(self.module, self._batch)
        assert call is not None  # it has an export
        settings = self._settings.replace(**{**_NO_PLANS, **changes})
        export = self._execution.export_with(settings, *call)
        if not export.gradient:
            name = type(self.module).__name__
            raise ValueError(f"{name} is in evaluation mode; call model.train() first")
        return export

    @property
    def told(self) -> str:
        """See `PlannedGraph.told`."""
        if self.theirs:
            return "ORT's own plans run its own kernels alone"
        return "gradients are bit-identical with and without recompute"

    @functools.cached_property
    def subgraphs(self) -> tuple[Mapping[str, Any], str]:
        """See `PlannedGraph.subgraphs`."""
        if self._settings.precision == "bf16":
            raise ValueError(
                "precision='bf16' does not work with ORT's own plans, which support only ORT's own "
                "kernels; choose modules: recompute='layers'"
            )
        others = self._in_use.manager._runtime_options.torch_kernels
        export = self._exported(recompute=OFF, kernels="ort") if others else self._in_use
        return export.subgraphs()

    @property
    def names(self) -> tuple[str, ...]:
        """See `PlannedGraph.names`."""
        return tuple(self._plans.parts)

    @property
    def chosen(self) -> str:
        """See `PlannedGraph.chosen`."""
        chosen = self._execution.settings
        by_option = chosen.ortmodule.memory_level or chosen.ortmodule.memory_plans
        return ",".join(self.theirs) or OFF if by_option else chosen.recompute

    def check(self, plans: Sequence[str]) -> tuple[str, ...]:
        """See `PlannedGraph.check`."""
        if not any(map(_of_ort, plans)):
            return self._plans.check(plans)
        if tuple(plans) != self.theirs:
            options.recomputed(self._settings.replace(**_NO_PLANS, recompute=",".join(plans)))
            known = {part for each in self.subgraphs[0] for part in each.split(",")}
            for plan in plans:
                if plan not in known:
                    raise UnknownPlan(f"recompute={plan!r}: {unknown_name(plan, known)}")
        return tuple(plans)

    def count(self, plan: str) -> int:
        """See `PlannedGraph.count`."""
        return 0 if _of_ort(plan) else len(self._plans.parts[plan].occurrences)

    def stage(self, plans: Sequence[str]) -> Stage:
        """See `PlannedGraph.stage`."""
        if not any(map(_of_ort, plans)):
            return self._stage.of(self._plans.applied(plans))
        if tuple(plans) not in self._of_theirs:
            export = self._exported(recompute=",".join(plans), kernels="ort")
            self._of_theirs[tuple(plans)] = self._stage.of(export.stages()["execution"])
        return self._of_theirs[tuple(plans)]

    def settings(self, plans: Sequence[str]) -> Mapping[str, Any]:
        """See `PlannedGraph.settings`."""
        own = self._execution.settings.ortmodule
        before = _NO_PLANS if own.memory_level or own.memory_plans else {}
        return {**before, "recompute": ",".join(plans) or OFF}

    def operator_of(self, name: str) -> str:
        """See `PlannedGraph.operator_of`."""
        return name


class RecomputePlans:
    """Recompute plans of a wrapped model, shown as a table.

    ``plans.choose("encoder.layer.*")`` activates a plan from the next step on. Several plans are
    separated by commas. ``plans.least_time("2GiB", batch=32)`` returns the cheapest plan that fits.

    Args:
        model: Model wrapped in engine "ortmodule" or "ort".
        batch: Batch whose graph is used. If None, the graph used last.
        optimizer: Optimizer whose state is counted.
        choose: Called with values of settings that activate a plan.
        settings: If given, use the graph that was made for these settings.

    Raises:
        ValueError: If there is no executed graph of a training step, or ORT's own recompute plans
            replace the model's checkpoints.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None,
        *,
        optimizer: str,
        choose: Callable[[Mapping[str, Any]], None],
        settings: EngineSettings | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._choose = choose
        self._optimizer = optimizer
        record = wrapped_model(model)
        self._graph: PlannedGraph
        if record is not None and record.engine == "ort":
            self._graph = PlannedCapture(cast("OrtModel", record), batch)
        else:
            self._graph = _PlannedExport(model, batch, settings)
        self._given: dict[str, int] = {}
        self._known: dict[tuple[str, ...], MemoryPlan] = {}
        self._operators_us: Mapping[str, float] | None = None
        self._step_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Available plans, outer modules before inner ones."""
        return self._graph.names

    @property
    def layers(self) -> tuple[str, ...]:
        """Plans of whole layers, one for each list of layers."""
        return whole_layers(self._graph.names)

    def parts(self, plan: str) -> tuple[str, ...]:
        """Return the plans that `plan` combines or stands for.

        Args:
            plan: Plan, or several separated by commas.

        Raises:
            UnknownPlan: If a plan does not exist. The message suggests the nearest.
        """
        return self._graph.check(split(plan))

    @property
    def chosen(self) -> str:
        """Active plan."""
        return self._graph.chosen

    @property
    def dims(self) -> dict[str, int | None]:
        """Names of the sizes that depend on the batch, with their default values."""
        return self.memory(OFF).dims

    def at(self, **sizes: int) -> RecomputePlans:
        """Return the same plans with these sizes as defaults.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a name or a value is not valid.
        """
        found = copy.copy(self)
        found._given = {**self._given, **sizes}
        found.memory(OFF)
        return found

    def choose(self, plan: str) -> None:
        """Activate `plan` from the next step on.

        While a run trains the model, the change is part of the run, as with
        ``run.apply(recompute=plan)``.

        A plan that raises the step memory is activated with a warning.

        Args:
            plan: Plan, or several separated by commas. "off" activates none.

        Raises:
            UnknownPlan: If a plan does not exist. The message suggests the nearest.
        """
        self._graph.check(split(plan))
        if more := self.raises(plan):
            warnings.warn(f"recompute={plan!r} {more}", stacklevel=2)
        self._choose(self._graph.settings(split(plan)))

    def memory(self, plan: str) -> MemoryPlan:
        """Return the memory plan of a step under `plan`, without running it.

        Args:
            plan: Plan, or several separated by commas. "off" stands for none.
        """
        return self._memory(split(plan))

    def _memory(self, plans: tuple[str, ...]) -> MemoryPlan:
        if plans not in self._known:
            graph = self._graph
            stage = graph.stage(plans)
            self._known[plans] = plan_of(stage, graph.sizes, graph.module, self._optimizer)
        return self._known[plans].at(**self._given)

    def savings(self, plan: str) -> Saving:
        """Return the memory that `plan` saves and the time that it costs.

        Args:
            plan: Plan, or several separated by commas.

        Raises:
            UnknownPlan: If a plan does not exist. The message suggests the nearest.
        """
        plans = self._graph.check(split(plan))
        before, after = self._memory(()), self._memory(plans)
        return Saving(
            plan,
            sum(map(self._graph.count, plans)),
            _after_forward(before) - _after_forward(after),
            before.peak_bytes() - after.peak_bytes(),
            self._cost_s(plans),
        )

    def raises(self, plan: str) -> str:
        """Return by how much `plan` raises the step memory, as text; "" if it does not.

        Args:
            plan: Plan, or several separated by commas.

        Raises:
            UnknownPlan: If a plan does not exist. The message suggests the nearest.
        """
        before = self._memory(()).peak_bytes()
        after = self._memory(self._graph.check(split(plan))).peak_bytes()
        return raised(before, after)

    @property
    def subgraphs(self) -> Subgraphs:
        """ORT's recomputable subgraphs, each with the plan that recomputes it.

        Engine "ortmodule" only. If the graph in use has other kernels than ORT's own, which ORT's
        plans need, the model is exported with those.
        """
        here = self.memory(OFF)
        at = ", ".join(f"{name} {size}" for name, size in self.dims.items())
        notes = [
            f"saved: activations of all occurrences, for {at}",
            "a plan runs ORT's own kernels alone, so that the step memory may change by another "
            "amount, which %ort recompute MODEL --choose PLAN tells",
        ]
        if self._graph.theirs:
            notes.append(self._told_active())
        found, active = self._graph.subgraphs, self._graph.theirs
        return Subgraphs(*found, active=active, sizes=here.ort_sizes, notes=notes)

    def measure(self, steps: int = _STEPS) -> RecomputePlans:
        """Time the kernels of the model's own steps, from which the plans' costs follow.

        The values are for the sizes of the batch or of the last call. The model is not changed.

        Args:
            steps: Number of steps to time.

        Returns:
            These plans.

        Raises:
            ValueError: If torch runs the model, or ORT's own plans are active.
        """
        if self._graph.theirs:
            raise ValueError(
                f"the model's steps run ORT's own plans ({self.chosen}) with other kernels than "
                "those of other plans; choose off first, and call the model"
            )
        found = profiler.profile(self._model, self._batch, steps)
        if found.ort is None:
            raise ValueError(f"the model runs in torch: {'; '.join(found.notes)}")
        times: defaultdict[str, float] = defaultdict(float)
        for node in found.ort.nodes:
            times[self._graph.operator_of(node.node)] += node.us
        self._operators_us = times
        self._step_s = found.ort.plain_us / 1e6
        return self

    def _cost_s(self, plans: Sequence[str]) -> float | None:
        if self._operators_us is None or any(map(_of_ort, plans)):
            return None  # ORT's own plans change the kernels of the whole graph
        us = self._operators_us
        # Torch computes cheap operators of engine ort again without a plan, too.
        more, anyway = (
            sum(us.get(operator, 0.0) for operator in self._again(each))
            for each in (tuple(plans), ())
        )
        return (more - anyway) / 1e6

    def _again(self, plans: tuple[str, ...]) -> set[str]:
        """Return the operators that run again under plans."""
        nodes = self._memory(plans).stage.nodes
        again = (node.name.removesuffix(SUFFIX) for node in nodes if node.name.endswith(SUFFIX))
        return set(map(self._graph.operator_of, again))

    def least_time(self, budget: int | str, **sizes: int) -> str:
        """Return the plan that costs the least time and fits into `budget`.

        If nothing was measured yet, call `measure` first.

        Args:
            budget: Limit of `MemoryPlan.peak_bytes`, as bytes or as text such as "2GiB".
            **sizes: Values by the names in `dims`.

        Returns:
            Plans separated by commas, or "off" if none is needed.

        Raises:
            ValueError: If no plan fits. The message says how much memory the smallest takes.
        """
        limit = parse_bytes(budget)
        if self._operators_us is None:
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
            f"a step takes at least {memory(least.peak_bytes())} with recompute, more than "
            f"{memory(limit)}; take a smaller batch"
        )

    def _choices(self) -> list[tuple[str, ...]]:
        """Return combinations of plans, none within another, including all whole layers."""
        singles = [(plan,) for plan in self.names]
        found: list[tuple[str, ...]] = [(), self.layers, *singles]
        if not self._graph.combines:
            return list(dict.fromkeys(found))
        for count in range(2, len(self.names) + 1):
            for plans in itertools.combinations(self.names, count):
                if len(found) >= _MOST_CHOICES:
                    return list(dict.fromkeys(found))
                if not any(_within(a, b) for a, b in itertools.permutations(plans, 2)):
                    found.append(plans)
        return list(dict.fromkeys(found))

    def table(self, **sizes: int) -> Table[Saving]:
        """Return a table with a row for each plan.

        If there are several lists of layers, the first row is for all layers together.

        Args:
            **sizes: Values by the names in `dims`.

        Raises:
            ValueError: If a name or a value is not valid.
        """
        here = self.at(**sizes) if sizes else self
        plans = list(self.names)
        if len(self.layers) > 1:
            plans.insert(0, LAYERS)
        rows = [here.savings(plan) for plan in plans]
        chosen = (*split(self.chosen), *self.parts(self.chosen))
        columns: list[Column[Saving]] = [
            Column("", lambda row: "x" if row.plan in chosen else ""),
            Column("recompute", lambda row: row.plan),
            Column("modules", lambda row: str(row.occurrences or ""), number=True),
            Column("saved after forward", lambda row: memory(row.after_forward_bytes), number=True),
            Column("step memory saved", lambda row: signed(row.peak_bytes), number=True),
            Column("cost per step", self.told_cost, number=True),
        ]
        return Table(
            rows,
            columns,
            notes=list(here._notes()),
            empty="the model has no list of layers whose activations could be recomputed",
        )

    def told_cost(self, saving: Saving) -> str:
        """Return a plan's cost as text: milliseconds, and percent of a step.

        Args:
            saving: Row of the table.

        Returns:
            Text such as "1.5 ms (+3%)", or a dash if nothing was measured.
        """
        if saving.cost_s is None:
            return "-"
        share = f" (+{saving.cost_s / self._step_s:.0%})" if self._step_s else ""
        return f"{saving.cost_s * 1e3:.1f} ms{share}"

    def _notes(self) -> Iterator[str]:
        before = self._memory(())
        raising = [(plan, found) for plan in self.names if (found := self.raises(plan))]
        yield from (f"{plan} {found}" for plan, found in raising)
        at = ", ".join(f"{name} {size}" for name, size in self.dims.items())
        yield (
            f"without recompute, for {at}: step memory {memory(before.peak_bytes())}, "
            f"{memory(_after_forward(before))} of activations after forward"
        )
        yield f"{self._told_active()}; {self._graph.told}"
        if self._step_s is None:
            yield "cost not measured yet: call .measure() or run %ort recompute MODEL --measure"
        else:
            yield f"cost is for the timed batch, {self._step_s * 1e3:.0f} ms per step"

    def _told_active(self) -> str:
        more = self.raises(self.chosen)
        return f"active: {self.chosen}" + (f", which {more}" if more else "")

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _after_forward(plan: MemoryPlan) -> int:
    """Return the bytes in memory when backward begins, minus those of an idle model."""
    return int(plan.curve()[plan.stage.backward - 1]) - plan.idle_bytes()


def _of_ort(plan: str) -> bool:
    """Return True for a plan of ORT's own, such as "BiasGelu+:1:-1"."""
    return ":" in plan


def _within(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}.")


def signed(size_bytes: int) -> str:
    """Return a number of bytes as text, with a minus sign if it is negative.

    Args:
        size_bytes: Number of bytes, which may be negative.
    """
    return memory(size_bytes) if size_bytes >= 0 else f"-{memory(-size_bytes)}"


def plan_for(
    model: nn.Module, settings: FinetuneSettings, *, choose: Callable[[Mapping[str, Any]], None]
) -> tuple[MemoryPlan, EngineSettings]:
    """Return the memory plan of the wrapped `model`, and the settings of its graph.

    The graph is the one made for `settings`, with their recompute plan applied, or else the one in
    use. Nothing is exported.

    Args:
        model: Model wrapped in engine "ortmodule".
        settings: Settings of the run.
        choose: Called with values of settings that activate a recompute plan.

    Raises:
        ValueError: If ORT has built no graph yet, or cannot recompute those activations.
    """
    execution, optimizer = execution_behind(model), settings.optim.optimizer
    graph = settings.model
    made = [each for each in execution.exports(graph) if each.gradient]
    if not made:
        return plan(capture(model), model, optimizer=optimizer), execution.settings
    if made[-1].plans == options.recomputed(graph):
        return plan(capture(model, settings=graph), model, optimizer=optimizer), graph
    again = RecomputePlans(model, None, optimizer=optimizer, choose=choose, settings=graph)
    return again.memory(graph.recompute), graph
