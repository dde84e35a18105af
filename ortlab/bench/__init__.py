"""Benchmarks of ``ortlab bench``: speed of each engine, and where the time of a step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ortlab.bench import claims
from ortlab.bench.settings import BenchSettings, PaperSettings

if TYPE_CHECKING:
    from ortlab.bench.claims.claim import ClaimBench
    from ortlab.bench.paper_report import PaperBench
    from ortlab.bench.result import EngineBench

__all__ = ["BenchSettings", "PaperSettings", "engines", "papers"]


def __getattr__(name: str) -> Any:
    if name in ("step", "StepSettings"):
        instead = "use ortlab.bench.engines(profile=True)"
        raise AttributeError(f"ortlab.bench.{name} was removed; {instead}")
    raise AttributeError(f"module 'ortlab.bench' has no attribute {name!r}")


def engines(**options: Any) -> EngineBench:
    """Measure every engine in every precision on fixed models, in turn. Takes minutes per model.

    The result displays itself as Markdown in a notebook and has ``markdown()`` and ``as_dict()``.
    Ctrl-C ends the benchmark early and keeps all measurements so far. Progress is reported to the
    callback in ``ortlab.engines.base.progress``. Code that torch.compile has in memory is
    discarded, so other models are compiled again.

    Args:
        **options: Fields of `BenchSettings`.

    Raises:
        ValueError: If a name or a value is not valid.
    """
    settings = BenchSettings.of(options)
    from ortlab.bench import timing  # heavy: torch

    return timing.engines(settings)


@overload
def papers(*, claim: None = None, **options: Any) -> PaperBench: ...
@overload
def papers(*, claim: str, **options: Any) -> ClaimBench: ...
def papers(*, claim: str | None = None, **options: Any) -> PaperBench | ClaimBench:
    """Measure the benchmarks published for ORT's training, and compare with the published values.

    On a GPU, which is not tested, models have the published shapes and train in fp16. On a CPU they
    are scaled down. Everything else is as in `engines`.

    Args:
        claim: Another published claim to measure, one of `ortlab.bench.claims.CLAIMS`.
        **options: Fields of `PaperSettings`, or of the claim's settings.

    Raises:
        ValueError: If a name or a value is not valid.
    """
    if claim is not None:
        return claims.measured(claim, options)
    # heavy: torch
    from ortlab.bench import paper_report, timing
    from ortlab.bench.papers import PAPERS, models
    from ortlab.engines.torch.stepper import training_device

    device = training_device(PaperSettings.of(options).device).type
    settings = PaperSettings.on(device, options)
    names = settings.models.split(",")
    shapes = {name: PAPERS[name].shape(device, quick=settings.quick) for name in names}
    return paper_report.PaperBench(timing.engines(settings, models(shapes)), device, shapes)
