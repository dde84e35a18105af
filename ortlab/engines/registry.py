"""Engines by name: the only module that imports all of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from ortlab.engines.base import Cost, Engine, EngineUnavailable
from ortlab.engines.distributed import compatibility
from ortlab.settings import EngineSettings, FinetuneSettings, unknown_name


def engine(name: str) -> Engine:
    """The engine called `name`; EngineUnavailable when it cannot run here."""
    found = _engine(name)
    reason = found.unavailable()
    if reason is not None:
        raise EngineUnavailable(reason)
    return found


def _engine(name: str) -> Engine:
    # Heavy: torch and what ORT needs beside it.
    from ortlab.engines.ortmodule import engine as ortmodule
    from ortlab.engines.ortmodule import fused_engine
    from ortlab.engines.torch import stepper as torch_native

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
    """Why nothing can run under `settings` on this machine; None when their engine can."""
    found = _engine(settings.engine)
    reason = compatibility.engine_conflict(found.name, found.capabilities, settings)
    reason = reason or found.refuses(settings)
    workers = getattr(settings, "workers", 1)
    if reason is not None or workers == 1:
        return reason
    return compatibility.ranks_conflict(cast(FinetuneSettings, settings), workers)


def ignored(settings: EngineSettings, name: str) -> str | None:
    """Why the setting `name` means nothing to the engine of `settings`; None where it does."""
    found = _engine(settings.engine)
    return found.capabilities.ignores(found.name, name)


def cost(before: EngineSettings, after: EngineSettings) -> Cost:
    """What it takes to go on under `after` where `before` held, as the engine of `after` says."""
    return _engine(after.engine).cost(before, after)


def graph_key(settings: EngineSettings) -> Hashable:
    """Return the part of `settings` that their engine's graph is made with; None without one."""
    return _engine(settings.engine).graph_key(settings)


def graph_changes(before: EngineSettings, after: EngineSettings) -> str:
    """Return the options of the graph that differ, as the engine of `after` names them."""
    return _engine(after.engine).graph_changes(before, after)


def size_cost(settings: EngineSettings) -> Cost:
    """What it takes to go on with batches of another size, as the engine of `settings` says."""
    return _engine(settings.engine).capabilities.size_cost


def engine_for(settings: EngineSettings) -> Engine:
    """The engine that `settings` name; ValueError where it cannot run under them here.

    EngineUnavailable when it cannot run at all.
    """
    found = engine(settings.engine)
    reason = refusal(settings)
    if reason is not None:
        raise ValueError(reason)
    return found
