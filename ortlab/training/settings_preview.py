"""What other settings would mean, before they hold: whether they can, their cost, their memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.engines.base import Cost
from ortlab.engines.registry import graph_changes, ignored, refusal
from ortlab.settings import Declaration, FinetuneSettings
from ortlab.training import changes

if TYPE_CHECKING:
    from ortlab.graph.memory import MemoryPlan
    from ortlab.settings import EngineSettings

FEW = 8
"""Whole numbers that are offered one by one."""
COSTS: Mapping[Cost, str] = {
    "free": "free: the next step has it",
    "rebuild": "rebuild: the engine is made anew around the same weights",
    "recompile": "recompile: torch compiles the model, which takes seconds to minutes",
    "re-export": "re-export: ORT's graph is made anew, or comes from the cache",
}


@dataclass(frozen=True)
class SettingPreview:
    """A value of a setting as it is typed, and why it cannot be had; "" where it can."""

    text: str
    reason: str = ""


@dataclass(frozen=True)
class Control:
    """How one setting can be chosen now.

    ``choices`` are all its values; none where any value of its type may be typed. ``reason`` says
    why it cannot be changed at all. ``costs`` are what it takes a run to change it: to the value
    that is chosen, or to any other where that is the one that holds; none before a run.
    """

    declaration: Declaration
    value: Any
    choices: tuple[SettingPreview, ...] = ()
    reason: str = ""
    costs: tuple[Cost, ...] = ()


def controls(
    held: FinetuneSettings, chosen: FinetuneSettings, *, fixed: Mapping[str, str] | None
) -> list[Control]:
    """Every setting, in the order of declaration, where `held` holds and `chosen` is looked at.

    What cannot be had is what an engine refuses or makes nothing of, or what is `fixed` in a run
    (see `Run.fixed`; None before a run). A reason that stands against `chosen` anyhow is no reason
    against each of its settings.
    """
    known = refused(held, chosen, fixed=fixed)
    return [
        _control(declaration, held, chosen, known, fixed=fixed)
        for declaration in FinetuneSettings.declarations().values()
    ]


def refused(
    held: FinetuneSettings, chosen: FinetuneSettings, *, fixed: Mapping[str, str] | None
) -> str | None:
    """Why `chosen` cannot take the place of `held`; None when it can."""
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
    known: str | None,
    *,
    fixed: Mapping[str, str] | None,
) -> Control:
    name, value = declaration.name, getattr(chosen, declaration.name)
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
    always = ignored(chosen, name) or (others[0] if others and all(others) else "")
    costs: tuple[Cost, ...] = ()
    if fixed is not None and not always:
        now = getattr(held, name)
        able = [each for each, choice in zip(offered, choices, strict=False) if not choice.reason]
        wanted = [value] if value != now else able or list(_beside(declaration, now)) or ["another"]
        costs = tuple(_costs(held, name, [one for one in wanted if one != now]))
    return Control(declaration, value, choices, always, costs)


def _costs(held: FinetuneSettings, name: str, values: Iterable[Any]) -> Iterable[Cost]:
    """What it takes to go on with each of these values of one setting, each cost once."""
    found = {}
    for value in values:
        with contextlib.suppress(ValueError):  # it does not go with the others that hold
            found[changes.cost(held, held.replace(**{name: value}))] = True
    return found


def _offered(declaration: Declaration) -> Iterator[Any]:
    """All values that a setting may have, where they are few."""
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
    """Other values, for a setting that has many. Which texts are right nobody can guess."""
    if declaration.type is str:
        yield from (name for name in declaration.choices if name != value)
        return
    number = declaration.type(1 if value is None else value)
    for other in (number + 1, number - 1):
        try:
            yield declaration.check(other)
        except ValueError:  # beyond the setting's own bounds
            continue


def foreseen(
    plan: MemoryPlan,
    of: EngineSettings,
    settings: FinetuneSettings,
    *,
    batch: int | None = None,
) -> tuple[int | None, str]:
    """The peak of a step under `settings` in bytes, by a `plan` of a graph that `of` made.

    On workers that of each of them, which has its share of the batch. None where that graph does
    not tell, with the reason. `batch` is the size of a micro-batch where it is not the last call's.
    """
    if ignored(settings, "kernels") is not None:  # an option of ORT's graph
        return None, f"engine {settings.engine!r} has no graph to read it from"
    differs = graph_changes(of, settings)
    if of.recompute != settings.recompute:
        differs = ", ".join(filter(None, (differs, f"recompute={settings.recompute!r}")))
    if differs:
        return None, f"{differs} makes another graph, which tells once it is exported"
    if settings.tensor_parallel > 1 or settings.pipeline_stages > 1:
        return None, "each worker has a part of the model, and the graph is of all of it"
    if settings.param_dtype != "fp32" or settings.offload_optimizer:
        return None, "the graph is of fp32 weights that are updated where they are"
    whole = plan.dims.get("batch") if batch is None else batch
    sizes = {}
    if whole is not None and "batch" in plan.dims:
        sizes["batch"] = math.ceil(whole / settings.workers)
    try:
        stage = settings.zero_stage
        return plan.peak_bytes_of_rank(settings.workers, zero_stage=stage, **sizes), ""
    except ValueError as error:
        return None, str(error)
