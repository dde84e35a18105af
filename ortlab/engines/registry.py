"""Engines by name: the only module that imports all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from ortlab.engines import compatibility
from ortlab.engines.base import Cost, Engine, EngineUnavailable
from ortlab.settings import EngineSettings, FinetuneSettings, unknown_name


def engine(name: str) -> Engine:
    """Return the engine with a given name.

    Args:
        name: One of `ortlab.settings.ENGINES`.

    Returns:
        The engine.

    Raises:
        ValueError: If the name is unknown; the message suggests the nearest one.
        EngineUnavailable: If the engine cannot run on this machine.
    """
    found = _engine(name)
    reason = found.unavailable()
    if reason is not None:
        raise EngineUnavailable(reason)
    return found


def _engine(name: str) -> Engine:
    from ortlab.engines.ortmodule import engine as ortmodule  # heavy: torch and ORT
    from ortlab.engines.ortmodule import fused_engine  # heavy: torch and ORT
    from ortlab.engines.torch import stepper as torch_native  # heavy: torch

    engines: dict[str, Engine] = {
        "eager": torch_native.Eager(),
        "compile": torch_native.Compile(),
        "ort": ortmodule.OrtModuleEngine(),
        "offload": fused_engine.FusedEngine(),
    }
    if name not in engines:
        raise ValueError(f"engine={name!r}: {unknown_name(name, engines)}")
    return engines[name]


def refusal(settings: EngineSettings) -> str | None:
    """Return why these settings cannot run on this machine.

    Args:
        settings: Settings with an engine, and for a run with a number of workers.

    Returns:
        The reason and what to do about it, or None if the settings can run.
    """
    found = _engine(settings.engine)
    reason = compatibility.engine_conflict(found.name, found.capabilities, settings)
    reason = reason or found.refuses(settings)
    workers = getattr(settings, "workers", 1)
    if reason is not None or workers == 1:
        return reason
    return compatibility.ranks_conflict(cast(FinetuneSettings, settings), workers)


def ignored(settings: EngineSettings, name: str) -> str | None:
    """Return why a setting has no effect on the engine of `settings`.

    Args:
        settings: Settings that name the engine.
        name: Name of the setting.

    Returns:
        The reason, or None if the setting has an effect.
    """
    found = _engine(settings.engine)
    return found.capabilities.ignores(found.name, name)


def cost(before: EngineSettings, after: EngineSettings) -> Cost:
    """Return the work that a change of settings causes; see `Engine.cost`.

    Args:
        before: Settings up to now.
        after: New settings, which name the engine that is asked.
    """
    return _engine(after.engine).cost(before, after)


def graph_key(settings: EngineSettings) -> Hashable:
    """Return the part of the settings that determines the graph; see `Engine.graph_key`.

    Args:
        settings: Settings that name the engine.
    """
    return _engine(settings.engine).graph_key(settings)


def graph_changes(before: EngineSettings, after: EngineSettings) -> str:
    """Return the graph options that differ, as text; see `Engine.graph_changes`.

    Args:
        before: Settings up to now.
        after: New settings, which name the engine that is asked.
    """
    return _engine(after.engine).graph_changes(before, after)


def size_cost(settings: EngineSettings) -> Cost:
    """Return the work that a batch of a new size causes; see `Capabilities.size_cost`.

    Args:
        settings: Settings that name the engine.
    """
    return _engine(settings.engine).capabilities.size_cost


def engine_for(settings: EngineSettings) -> Engine:
    """Return the engine of the settings, checked to run with them on this machine.

    Args:
        settings: Settings that name the engine.

    Returns:
        The engine.

    Raises:
        ValueError: If the engine cannot run with these settings.
        EngineUnavailable: If the engine cannot run at all.
    """
    found = engine(settings.engine)
    reason = refusal(settings)
    if reason is not None:
        raise ValueError(reason)
    return found
