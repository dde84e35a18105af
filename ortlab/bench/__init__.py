"""How fast each engine trains here, and where a step's time goes: what ``ortlab bench`` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.bench.settings import BenchSettings, PaperSettings, StepSettings

if TYPE_CHECKING:
    from ortlab.bench.paper_report import PaperBench
    from ortlab.bench.report import StepBench
    from ortlab.bench.result import EngineBench

__all__ = ["BenchSettings", "PaperSettings", "StepSettings", "engines", "papers", "step"]


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


def papers(**options: Any) -> PaperBench:
    """The benchmarks that ORT's training was published with, here, beside the published figures.

    `options` are `PaperSettings` by name: on a GPU, which is not tested, the published shapes in
    fp16, on a CPU scaled-down ones. As `engines` in everything else.
    """
    from ortlab.bench import paper_report, timing
    from ortlab.bench.papers import PAPERS, models
    from ortlab.engines.torch.stepper import training_device

    device = training_device(PaperSettings.of(options).device).type
    settings = PaperSettings.on(device, options)
    names = settings.models.split(",")
    shapes = {name: PAPERS[name].shape(device, quick=settings.quick) for name in names}
    return paper_report.PaperBench(timing.engines(settings, models(shapes)), device, shapes)


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
