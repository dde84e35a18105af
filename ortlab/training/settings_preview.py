"""Preview of other settings before they are applied: validity, cost and memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.engines.base import Cost
from ortlab.engines.plan_names import LAYERS
from ortlab.engines.registry import graph_changes, ignored, refusal, resolved
from ortlab.settings import Declaration, FinetuneSettings
from ortlab.training import changes

if TYPE_CHECKING:
    from ortlab.graph.memory import MemoryPlan
    from ortlab.settings import EngineSettings

FEW = 8
"""Largest number of whole numbers that are offered one by one."""
COSTS: Mapping[Cost, str] = {
    "free": "free: takes effect in the next step",
    "rebuild": "rebuild: the engine is rebuilt around the same weights",
    "recompile": "recompile: torch compiles the model, which takes seconds to minutes",
    "re-export": "re-export: ORT's graph is exported again, or loaded from the cache",
}


@dataclass(frozen=True)
class SettingPreview:
    """Value of a setting as a user types it; ``reason`` says why it is unavailable, "" if not."""

    text: str
    reason: str = ""


@dataclass(frozen=True)
class Control:
    """Choices of one setting.

    ``choices`` are all its values; empty if any value of its type is possible. ``reason`` says why
    it cannot be changed at all. ``costs`` are the costs of changing it during a run: to the chosen
    value, or to any other if the value in effect is chosen; empty before a run.
    """

    declaration: Declaration
    value: Any
    choices: tuple[SettingPreview, ...] = ()
    reason: str = ""
    costs: tuple[Cost, ...] = ()


def controls(
    held: FinetuneSettings, chosen: FinetuneSettings, *, fixed: Mapping[str, str] | None
) -> list[Control]:
    """Return the choices of every setting, in the order of declaration.

    A value is unavailable if an engine refuses or ignores it, or if the setting is `fixed` in a
    run. A reason against the chosen settings as a whole is not repeated for each setting.

    Args:
        held: Settings in effect.
        chosen: Settings to look at.
        fixed: Fixed settings of the run, as in `Run.fixed`; None before a run.

    Returns:
        One control for each setting.
    """
    known = refused(held, chosen, fixed=fixed)
    used, _ = resolved(chosen)  # once, as "auto" asks several engines
    return [
        _control(declaration, held, chosen, used, known, fixed=fixed)
        for declaration in FinetuneSettings.declarations().values()
    ]


def refused(
    held: FinetuneSettings, chosen: FinetuneSettings, *, fixed: Mapping[str, str] | None
) -> str | None:
    """Return the reason why settings cannot be applied.

    Args:
        held: Settings in effect.
        chosen: Requested settings.
        fixed: Fixed settings of the run, as in `Run.fixed`; None before a run.

    Returns:
        The reason, or None if they can be applied.
    """
    if fixed is not None:
        try:
            changes.check_change(held, chosen, fixed)
        except ValueError as error:
            return str(error)
    return refusal(chosen)


def _control(
    declaration: Declaration,
    held: FinetuneSettings,
    chosen: FinetuneSettings,
    used: FinetuneSettings,
    known: str | None,
    *,
    fixed: Mapping[str, str] | None,
) -> Control:
    name, value = declaration.name, chosen[declaration.name]
    if fixed is not None and name in fixed:
        return Control(declaration, value, reason=fixed[name])

    def reason(other: Any) -> str:
        try:
            settings = chosen.replace(**{name: other})
        except ValueError as error:
            return str(error)
        found = refused(held, settings, fixed=fixed)
        return "" if found is None or found == known else found

    offered = tuple(_offered(declaration))
    choices = tuple(
        SettingPreview(declaration.show(other), "" if other == value else reason(other))
        for other in offered
    )
    others = [each.reason for each in choices if each.text != declaration.show(value)]
    others += [] if offered else [reason(other) for other in _beside(declaration, value)]
    always = ignored(used, name) or (others[0] if others and all(others) else "")
    costs: tuple[Cost, ...] = ()
    if fixed is not None and not always:
        now = held[name]
        able = [each for each, choice in zip(offered, choices, strict=False) if not choice.reason]
        wanted = [value] if value != now else able or list(_beside(declaration, now)) or ["another"]
        costs = tuple(_costs(held, name, [one for one in wanted if one != now]))
    return Control(declaration, value, choices, always, costs)


def _costs(held: FinetuneSettings, name: str, values: Iterable[Any]) -> Iterable[Cost]:
    """Return the distinct costs of changing one setting to each of the values."""
    found = {}
    for value in values:
        with contextlib.suppress(ValueError):  # it conflicts with the other settings in effect
            found[changes.cost(held, held.replace(**{name: value}))] = True
    return found


def _offered(declaration: Declaration) -> Iterator[Any]:
    """Yield all values of a setting, if there are few."""
    low, high = declaration.minimum, declaration.maximum
    if declaration.choices and not declaration.many:
        yield from declaration.choices
    elif declaration.type is bool:
        yield from (True, False)
    elif declaration.type is int and low is not None and high is not None and high - low < FEW:
        yield from range(int(low), int(high) + 1)
    else:
        return
    if declaration.optional:
        yield None


def _beside(declaration: Declaration, value: Any) -> Iterator[Any]:
    """Yield other values of a setting that has many. Most valid texts cannot be guessed."""
    if declaration.type is str:
        known = (LAYERS,) if declaration.name == "recompute" else declaration.choices
        yield from (name for name in known if name != value)
        return
    number = declaration.type(1 if value is None else value)
    for other in (number + 1, number - 1):
        try:
            yield declaration.check(other)
        except ValueError:  # outside the setting's bounds
            continue


def foreseen(
    plan: MemoryPlan,
    of: EngineSettings,
    settings: FinetuneSettings,
    *,
    batch: int | None = None,
) -> tuple[int | None, str]:
    """Return the predicted step memory.

    Args:
        plan: Memory plan of a graph.
        of: Settings with which the graph was exported.
        settings: Settings of the step.
        batch: Samples in a micro-batch; None for those of the graph's last call.

    Returns:
        The peak in bytes, per worker with its part of the batch, and "". If the graph cannot
        predict it, None and the reason.
    """
    model, parallel = settings.model, settings.parallel
    # An option of ORT's graphs, and one of those that torch captures for ORT.
    if all(ignored(settings, option) for option in ("kernels", "activation_budget")):
        return None, f"engine {model.engine!r} has no graph to predict it from"
    differs = graph_changes(of, settings)
    for name in ("recompute", "activation_budget"):
        if of[name] != model[name]:
            differs = ", ".join(filter(None, (differs, f"{name}={model[name]!r}")))
    if differs:
        return None, f"{differs} needs another graph, which has to be exported first"
    if parallel.tensor_parallel > 1 or parallel.pipeline_stages > 1:
        return None, "each worker has a part of the model, and the graph covers all of it"
    if parallel.param_dtype != "fp32" or parallel.offload_optimizer:
        return None, "the graph has fp32 weights that are updated in place"
    whole = plan.dims.get("batch") if batch is None else batch
    sizes = {}
    if whole is not None and "batch" in plan.dims:
        sizes["batch"] = math.ceil(whole / parallel.workers)
    try:
        stage = parallel.zero_stage
        return plan.peak_bytes_of_rank(parallel.workers, zero_stage=stage, **sizes), ""
    except ValueError as error:
        return None, str(error)
