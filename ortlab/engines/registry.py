"""Engines by name: the only module that imports all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Final, TypeVar, cast

from ortlab.engines import compatibility
from ortlab.engines.base import Cost, Engine, EngineUnavailable, wrapped_model
from ortlab.settings import (
    AUTO,
    REFERENCE,
    SAME_ENGINE,
    EngineSettings,
    FinetuneSettings,
    OrtModuleSettings,
    ParallelSettings,
    unknown_name,
)

if TYPE_CHECKING:
    from torch import nn

_BEST: Final = "ortmodule"
"""Engine that "auto" is where it runs."""

_ANYWHERE: Final = "ort"
"""Engine that "auto" is where that one does not run."""

Chosen = EngineSettings | FinetuneSettings
"""Settings of a wrapped model or of a run."""

S = TypeVar("S", bound=Chosen)


def engine(name: str) -> Engine:
    """Return the engine with a given name.

    Args:
        name: One of `ortlab.settings.ENGINES`, or "auto".

    Returns:
        The engine.

    Raises:
        ValueError: If the name is unknown; the message suggests the nearest one.
        EngineUnavailable: If the engine cannot run on this machine.
    """
    if name == AUTO:
        name = _model(EngineSettings(engine=AUTO)).engine
    found = _engine(name)
    reason = found.unavailable()
    if reason is not None:
        raise EngineUnavailable(reason)
    return found


def _engine(name: str) -> Engine:
    from ortlab.engines.ort import engine as ort  # heavy: torch
    from ortlab.engines.ortmodule import engine as ortmodule  # heavy: torch and ORT
    from ortlab.engines.ortmodule import fused_engine  # heavy: torch and ORT
    from ortlab.engines.torch import stepper as torch_native  # heavy: torch

    engines: dict[str, Engine] = {
        "eager": torch_native.Eager(),
        "compile": torch_native.Compile(),
        "ort": ort.OrtEngine(),
        "ortmodule": ortmodule.OrtModuleEngine(),
        "ort_fused": fused_engine.FusedEngine(),
    }
    if name not in engines:
        raise ValueError(
            f"engine={name!r}: {unknown_name(name, (AUTO, *engines), accepted=SAME_ENGINE)}"
        )
    return engines[name]


def resolved(
    settings: S, *, missing: str | None = None, in_torch: str | None = None
) -> tuple[S, str]:
    """Return settings whose engine is not "auto".

    The engine "auto" is the first of ``ortmodule`` and ``ort`` that runs on this machine with the
    settings, else eager torch. In 16 bits on a CPU without instructions for them it is ``ort``. A
    model that ``ortmodule`` refuses once it is called is taken over by ``ort``, see `succeed`. It
    is ``ortmodule``, whose reason then is the error, if eager torch does not run with them either,
    or if they choose options that only ORT has: a choice is never ignored in silence.

    Args:
        settings: Settings of a run or of a wrapped model.
        missing: Why ``ortmodule`` cannot run here, if that is known already.
        in_torch: Why neither of both may run the model.

    Returns:
        The settings with the name of the engine that runs, and the reason of the choice; "" if
        the settings name an engine.
    """
    if _of_model(settings).engine != AUTO:
        return settings, ""
    chosen, why, _ = _auto(settings, missing, in_torch)
    return chosen, why


def _auto(
    settings: S, missing: str | None = None, in_torch: str | None = None
) -> tuple[S, str, str | None]:
    """Return what `resolved` returns for "auto", and what `refusal` returns for it."""
    in_ort = cast(S, settings.replace(engine=_BEST))
    reason = in_torch or missing or _refusal(in_ort)
    anywhere = cast(S, settings.replace(engine=_ANYWHERE))
    if reason is None and _is_emulated(settings) and _fits(anywhere):
        lacks = f"this CPU has no instructions for {_of_model(settings).precision}"
        return anywhere, f"engine auto: {_ANYWHERE}, because {lacks}, which {_BEST} would use", None
    if reason is None:
        return in_ort, f"engine auto: chose {_BEST}, which runs here", None
    model, eager = _of_model(settings), cast(S, settings.replace(engine=REFERENCE[0]))
    missing_too = _engine(_ANYWHERE).unavailable()
    if in_torch is None and _fits(anywhere):
        lacking = reason.partition(". ")[0]  # what to do about it is no advice while this one runs
        return anywhere, f"engine auto: {_ANYWHERE}, because {_BEST} cannot run: {lacking}", None
    own_loop = isinstance(settings, EngineSettings)  # sets the precision itself in eager torch
    if _for_ort(model) or (own_loop and model.precision != REFERENCE[1]) or _refusal(eager):
        return in_ort, reason, reason
    if in_torch is not None:
        return eager, f"engine auto: {REFERENCE[0]}, because {in_torch}", None
    name, reason = (_BEST, reason) if missing_too is None else (_ANYWHERE, missing_too)
    why = f"engine auto: {REFERENCE[0]}, because {name} cannot run: {reason}"
    return eager, why, None


def _of_model(settings: Chosen) -> EngineSettings:
    return settings if isinstance(settings, EngineSettings) else settings.model


def _fits(settings: Chosen) -> bool:
    """Return whether the engine that these settings name runs here, and ignores no choice."""
    model = _of_model(settings)
    found = _engine(model.engine)
    # Whether a model has layers to gather one by one is not known from settings.
    by_layers = isinstance(settings, FinetuneSettings) and compatibility.fully_sharded(settings)
    # In half precision nearly all of its operators would run in torch, if the CPU can do that.
    return (
        (model.precision == REFERENCE[1] or _is_emulated(settings))
        and not by_layers
        and not any(found.capabilities.ignores(found.name, name) for name in _for_ort(model))
        and _refusal(settings) is None
    )


def _is_emulated(settings: Chosen) -> bool:
    """Return whether torch's kernels compute a run's precision without instructions of the CPU."""
    from ortlab.engines.torch import stepper  # heavy: torch

    if isinstance(settings, EngineSettings):  # in your own loop, autocast is yours
        return False
    return stepper.is_emulated(settings.model.precision, settings.parallel.device)


def _for_ort(model: EngineSettings) -> list[str]:
    """Return the options of the ORT graph that were chosen; standing values do not count."""
    standing = EngineSettings()
    names = ("kernels", "attention", *OrtModuleSettings.declarations())
    return [name for name in names if model[name] != standing[name]]


def succeed(wrapped: nn.Module, *, chosen: bool) -> None:
    """Let engine ``ort`` take a model over if ORTModule refuses it, at its first call or later.

    Args:
        wrapped: A wrapped model of any engine; the others need nothing.
        chosen: True if the engine was chosen by "auto"; False if the user named it.
    """
    from ortlab.engines.ortmodule.dispatch import GraphDispatcher  # heavy: torch

    record = wrapped_model(wrapped)
    if isinstance(record, GraphDispatcher):
        record.take_over = _taken_over if chosen else None


def _taken_over(model: nn.Module, settings: EngineSettings) -> nn.Module | None:
    """Return `model` wrapped in engine ``ort``; None if that cannot run with the settings."""
    anywhere = settings.replace(engine=_ANYWHERE)
    return _engine(_ANYWHERE).wrap(model, anywhere) if _fits(anywhere) else None


def _model(settings: Chosen) -> EngineSettings:
    """Return the settings of the model, with the name of an engine."""
    return _of_model(resolved(settings)[0])


def refusal(settings: Chosen) -> str | None:
    """Return why these settings cannot run on this machine.

    Args:
        settings: Settings of a run or of a wrapped model.

    Returns:
        The reason and what to do about it, or None if the settings can run.
    """
    return _auto(settings)[2] if _of_model(settings).engine == AUTO else _refusal(settings)


def _refusal(settings: Chosen) -> str | None:
    """Return `refusal` of settings that name an engine."""
    run = settings if isinstance(settings, FinetuneSettings) else None
    model, parallel = _of_model(settings), ParallelSettings() if run is None else run.parallel
    found = _engine(model.engine)
    reason = compatibility.engine_conflict(found.name, found.capabilities, model, parallel)
    reason = reason or found.refuses(model, parallel.device)
    if reason is None and run is not None:
        reason = compatibility.own_optimizer_conflict(run)
    if reason is not None or run is None or parallel.workers == 1:
        return reason
    return compatibility.ranks_conflict(run, parallel.workers)


def ignored(settings: Chosen, name: str) -> str | None:
    """Return why a setting has no effect on the engine of `settings`.

    Args:
        settings: Settings that name the engine.
        name: Name of the setting.

    Returns:
        The reason, or None if the setting has an effect.
    """
    found = _engine(_model(settings).engine)
    return found.capabilities.ignores(found.name, name)


def cost(before: FinetuneSettings, after: FinetuneSettings) -> Cost:
    """Return the work that a change of settings causes; see `Engine.cost`.

    Args:
        before: Settings up to now.
        after: New settings, which name the engine that is asked.
    """
    new, _ = resolved(after)
    return _engine(new.model.engine).cost(resolved(before)[0], new)


def graph_key(settings: Chosen) -> Hashable:
    """Return the part of the settings that determines the graph; see `Engine.graph_key`.

    Args:
        settings: Settings that name the engine.
    """
    model = _model(settings)
    return _engine(model.engine).graph_key(model)


def graph_changes(before: Chosen, after: Chosen) -> str:
    """Return the graph options that differ, as text; see `Engine.graph_changes`.

    Args:
        before: Settings up to now.
        after: New settings, which name the engine that is asked.
    """
    new = _model(after)
    return _engine(new.engine).graph_changes(_model(before), new)


def size_cost(settings: Chosen) -> Cost:
    """Return the work that a batch of a new size causes; see `Capabilities.size_cost`.

    Args:
        settings: Settings that name the engine.
    """
    return _engine(_model(settings).engine).capabilities.size_cost


def engine_for(settings: Chosen) -> Engine:
    """Return the engine of the settings, checked to run with them on this machine.

    Args:
        settings: Settings that name the engine.

    Returns:
        The engine.

    Raises:
        ValueError: If the engine cannot run with these settings.
        EngineUnavailable: If the engine cannot run at all.
    """
    found = engine(_model(settings).engine)
    reason = refusal(settings)
    if reason is not None:
        raise ValueError(reason)
    return found
