"""What can be chosen of a benchmark: the options of ``bench engines``, ``papers`` and ``step``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ortlab.bench.models import MODELS
from ortlab.bench.papers import PAPERS
from ortlab.settings import (
    ENGINES,
    KERNELS,
    PRECISIONS,
    REFERENCE,
    EngineSettings,
    Settings,
    setting,
    unknown_name,
)

Cell = tuple[str, str]
"""An engine and a precision."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What is measured, and how long."""

    models: str = setting(
        ",".join(MODELS),
        choices=tuple(MODELS),
        many=True,
        help="models to train, with commas; see below",
    )
    engines: str = setting(
        ",".join(ENGINES), choices=ENGINES, many=True, help="engines to compare, with commas"
    )
    precisions: str = setting(
        "fp32,bf16",
        choices=PRECISIONS,
        many=True,
        help="precisions of matrix products, with commas",
    )
    rounds: int = setting(
        10, minimum=1, help="rounds that count; in each every engine has its turn in each precision"
    )
    threads: int | None = setting(
        None,
        minimum=1,
        help="threads that torch computes with, else its own choice; ORT has one for each core",
    )
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="where the models train; cuda is not tested"
    )
    ort_options: str = setting(
        "", help="settings for the engines in ORT, as attention=fused,triton=on"
    )
    quick: bool = setting(
        False, help="tiny models, to see that everything runs here: no benchmark, and marked so"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_ort()

    def in_ort(self) -> dict[str, Any]:
        """What `ort_options` says, by name; ValueError where it is no setting of an engine's."""
        known, found = dict(EngineSettings.declarations()), {}
        del known["cache"]  # the first step is to be the first
        for each in filter(None, self.ort_options.split(",")):
            name, _, text = (part.strip() for part in each.partition("="))
            if name not in known:
                raise ValueError(f"ort_options has {name!r}: {unknown_name(name, known)}")
            found[name] = known[name].check(known[name].parse(text))
        return found

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What is measured of each model, the reference first."""
        chosen = [(e, p) for p in self.precisions.split(",") for e in self.engines.split(",")]
        return tuple(dict.fromkeys([REFERENCE, *chosen]))


@dataclass(frozen=True, kw_only=True)
class PaperSettings(BenchSettings):
    """Which published benchmarks are run, and how long."""

    models: str = setting(
        ",".join(PAPERS),
        choices=tuple(PAPERS),
        many=True,
        help="benchmarks to run, with commas; see below",
    )
    engines: str = setting(
        "eager,ort", choices=ENGINES, many=True, help="engines to compare, with commas"
    )
    precisions: str = setting(
        "fp32,bf16",
        choices=PRECISIONS,
        many=True,
        help="precisions of matrix products, with commas; on a GPU else fp16, the published one",
    )

    @classmethod
    def on(cls, device: str, options: Mapping[str, Any]) -> Self:
        """These options on `device`, cpu or cuda: in fp16 on a GPU where none says otherwise."""
        published = {} if device == "cpu" else {"precisions": "fp16"}
        return cls.of(published | dict(options))


@dataclass(frozen=True, kw_only=True)
class StepSettings(Settings):
    """Which step is taken apart, and how often."""

    model: str = setting("bert-768", choices=tuple(MODELS), help="the model to train; see below")
    precision: str = setting("fp32", choices=("fp32", "bf16"), help="precision of matrix products")
    kernels: str = setting(
        "measured",
        choices=KERNELS,
        help="what computes in ORT's graph: whichever is faster, torch's and ortlab's kernels "
        "wherever there is one, or ORT's own alone",
    )
    steps: int = setting(
        20,
        minimum=1,
        help="steps of each engine that count, in turns; a short one is the mean of several",
    )
    threads: int | None = setting(
        None,
        minimum=1,
        help="threads that torch computes with, else its own choice; ORT has one for each core",
    )
    quick: bool = setting(
        False, help="a tiny model, to see that everything runs here: no benchmark, and marked so"
    )
