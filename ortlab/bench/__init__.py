"""How fast each engine trains here, and where a step's time goes: what ``ortlab bench`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.bench.settings import BenchSettings, StepSettings

if TYPE_CHECKING:
    from ortlab.bench.report import StepBench
    from ortlab.bench.result import EngineBench

__all__ = ["BenchSettings", "StepSettings", "engines", "step"]


def engines(**options: Any) -> EngineBench:
    """Every engine in every precision on fixed models, in turn; minutes for each model.

    `options` are `BenchSettings` by name. The result shows itself as Markdown in a notebook and
    has ``markdown()`` and ``as_dict()``. Ctrl-C ends it early, with what was measured so far.
    ``ortlab.engines.base.progress`` names who hears how far it is. What torch.compile has in memory
    is dropped: other models compile again. ValueError for an unknown name.
    """
    settings = BenchSettings.of(options)
    from ortlab.bench import timing

    return timing.engines(settings)


def step(**options: Any) -> StepBench:
    """Where the time of a training step in ONNX Runtime goes, on a CPU; some minutes.

    `options` are `StepSettings` by name. The result shows itself as Markdown in a notebook and has
    ``markdown()`` and ``as_dict()``. ``ortlab.engines.base.progress`` names who hears how far it
    is. ValueError for what cannot be chosen; EngineUnavailable, ExportFailed or SelfCheckFailed
    where ORT cannot train the model here.
    """
    settings = StepSettings.of(options)
    from ortlab.bench import parts

    return parts.step(settings)
