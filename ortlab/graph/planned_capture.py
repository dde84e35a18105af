"""Graphs of a model under recompute plans, and those of engine ``ort``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch import nn

from ortlab.engines import plan_names
from ortlab.engines.base import Batch, tell
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.ort.recompute import Recompute, plans_of
from ortlab.engines.plan_names import OFF, UnknownPlan
from ortlab.graph import captured
from ortlab.graph.capture import Stage
from ortlab.graph.memory import MemoryPlan, plan_of
from ortlab.settings import EngineSettings, FinetuneSettings

_BUDGET: Final = re.compile(r"budget (\d*\.?\d+)")
BUDGETS: Final = (0.75, 0.5, 0.3, 0.1)
"""Budgets that are listed as plans; any other can be chosen."""

_NODE: Final = re.compile(r"(.+?)/[A-Z]\w*\.\d+.*")
"""Name of an ONNX node: the operator that it computes for, its own operator, a number."""


class PlannedGraph(Protocol):
    """Graphs of one model under its recompute plans.

    Attributes:
        module: The original model.
        sizes: Sizes of the last call, by their names in the stages.
        names: Available plans, outer modules before inner ones.
        chosen: Active plan; several are separated by commas.
        combines: True if combinations of plans are quick to try.
        told: What holds under the active plans.
        theirs: ORT's own plans that the graph in use applies.
    """

    module: nn.Module
    sizes: dict[str, int]
    combines: bool
    theirs: tuple[str, ...]

    @property
    def told(self) -> str:
        """See above."""

    @property
    def names(self) -> tuple[str, ...]:
        """See above."""

    @property
    def chosen(self) -> str:
        """See above."""

    def check(self, plans: Sequence[str]) -> tuple[str, ...]:
        """Return the plans that `plans` stand for, or raise UnknownPlan."""

    def count(self, plan: str) -> int:
        """Return the number of modules that a plan recomputes; 0 if it names none."""

    def stage(self, plans: Sequence[str]) -> Stage:
        """Return the graph of a step under plans, without running it."""

    def settings(self, plans: Sequence[str]) -> Mapping[str, Any]:
        """Return the values of settings that activate plans."""

    @property
    def subgraphs(self) -> tuple[Mapping[str, Any], str]:
        """ORT's own plans for the model, see `Export.subgraphs`."""

    def operator_of(self, name: str) -> str:
        """Return what a node and its copy that runs again have in common, by a node's name."""


class PlannedCapture:
    """Graphs of engine ``ort`` under its plans: modules, and budgets such as "budget 0.5".

    See `PlannedGraph`.

    Args:
        record: Record of the model.
        batch: Batch to capture; None for one like that of the last capture.

    Raises:
        ValueError: If the model has not been called yet, or runs in eager torch.
    """

    combines = False
    theirs: tuple[str, ...] = ()
    told = "gradients are the same to rounding, with the same dropout masks"

    def __init__(self, record: OrtModel, batch: Batch | None) -> None:
        self.module = record.module
        self._record = record
        self._graphs, found = captured.for_any_size(record, batch)
        self.sizes = found.sizes
        self.names = (*self._modules(), *(f"budget {budget:g}" for budget in BUDGETS))

    def _modules(self) -> tuple[str, ...]:
        """Return the plans of layers and of their parts that the graph contains."""
        deepest = {plan: plan.partition("*")[2].count(".") for plan in plans_of(self.module)}
        return tuple(plan for plan, depth in deepest.items() if depth <= 1 and self.count(plan))

    @property
    def chosen(self) -> str:
        """See `PlannedGraph.chosen`."""
        settings = self._record.settings
        found = [*plan_names.split(settings.recompute)]
        if settings.activation_budget < 1:
            found.append(f"budget {settings.activation_budget:g}")
        return ",".join(found) or OFF

    def check(self, plans: Sequence[str]) -> tuple[str, ...]:
        """See `PlannedGraph.check`."""
        budgets = [plan for plan in plans if plan.startswith("budget")]
        for plan in budgets:
            _budget(plan)
        if len(budgets) > 1:
            raise UnknownPlan(f"recompute={', '.join(budgets)!r}: choose one budget")
        modules = [plan for plan in plans if plan not in budgets]
        return (*plan_names.checked(modules, plans_of(self.module)), *budgets)

    def count(self, plan: str) -> int:
        """See `PlannedGraph.count`."""
        return 0 if _BUDGET.fullmatch(plan) else self._graphs.calls_of(plan)

    def stage(self, plans: Sequence[str]) -> Stage:
        """See `PlannedGraph.stage`."""
        tell(f"planning recompute {', '.join(plans) or OFF}")
        settings = self.settings(plans)
        modules = plan_names.split(settings["recompute"])
        recompute = Recompute(self.check(modules), settings["activation_budget"])
        forward, backward = self._graphs.planned(recompute)
        return captured.execution(self.module, forward, backward)

    def settings(self, plans: Sequence[str]) -> Mapping[str, Any]:
        """See `PlannedGraph.settings`."""
        modules = [plan for plan in plans if not _BUDGET.fullmatch(plan)]
        budgets = [_budget(plan) for plan in plans if plan not in modules]
        return {
            "recompute": ",".join(modules) or OFF,
            "activation_budget": budgets[0] if budgets else 1.0,
        }

    @property
    def subgraphs(self) -> tuple[Mapping[str, Any], str]:
        """See `PlannedGraph.subgraphs`."""
        raise ValueError(
            "engine 'ort' has no subgraphs of ORT's memory optimizer: torch chooses what is "
            "computed again; use activation_budget, such as %ort recompute MODEL --choose "
            "'budget 0.5'"
        )

    def operator_of(self, name: str) -> str:
        """See `PlannedGraph.operator_of`."""
        found = _NODE.fullmatch(name)
        return found[1] if found else name


def plan_for(
    record: OrtModel, settings: FinetuneSettings, *, trains: bool
) -> tuple[MemoryPlan, EngineSettings]:
    """Return the memory plan of a training step under settings, and the settings of its graph.

    Nothing is captured: what the settings compute again is planned from the graphs that are there.

    Args:
        record: Record of the model.
        settings: Settings of the run.
        trains: True while a run trains the model, whose steps would wait for other graphs.

    Raises:
        ValueError: If there is no graph that holds for any size, or none for these settings.
    """
    found, sizes = captured.known_for_any_size(record)
    model = settings.model
    plans = plan_names.checked(plan_names.split(model.recompute), plans_of(record.module))
    forward, backward = found.planned(
        Recompute(plans, model.activation_budget), make=not trains
    )
    stage = captured.execution(record.module, forward, backward)
    return plan_of(stage, sizes, record.module, settings.optim.optimizer), model


def _budget(plan: str) -> float:
    """Return the budget that a plan names, or raise UnknownPlan."""
    found = _BUDGET.fullmatch(plan)
    if found is None:
        raise UnknownPlan(f"recompute={plan!r}: type a number, such as 'budget 0.5'")
    try:
        return EngineSettings(activation_budget=float(found[1])).activation_budget
    except ValueError as error:
        raise UnknownPlan(str(error)) from None
