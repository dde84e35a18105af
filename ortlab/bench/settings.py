"""Settings of benchmarks: options of ``bench engines`` and ``bench papers``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ortlab.bench.models import MODELS
from ortlab.bench.papers import PAPERS
from ortlab.settings import (
    ENGINES,
    PRECISIONS,
    REFERENCE,
    SAME_ENGINE,
    EngineSettings,
    Settings,
    setting,
    unknown_name,
)

Cell = tuple[str, str]
"""An engine and a precision."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Settings of ``bench engines``."""

    models: str = setting(
        ",".join(MODELS),
        choices=tuple(MODELS),
        many=True,
        help="models to train, separated by commas; see below",
    )
    engines: str = setting(
        ",".join(ENGINES),
        choices=ENGINES,
        renamed=SAME_ENGINE,
        many=True,
        help="engines to compare, separated by commas",
    )
    precisions: str = setting(
        "fp32,bf16",
        choices=PRECISIONS,
        many=True,
        help="precisions of matrix products, separated by commas",
    )
    rounds: int = setting(
        10, minimum=1, help="measured rounds; in each, every engine has a turn in each precision"
    )
    threads: int | None = setting(
        None,
        minimum=1,
        help="threads that torch and ORT compute with, torch's default if unset",
    )
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="device to train on; cuda is not tested"
    )
    ort_options: str = setting(
        "", help="settings for the engines in ORT, such as attention=fused,triton=on"
    )
    roofline: bool = setting(
        False,
        help="measure the machine's rates, too, and how close each engine comes to them",
    )
    profile: bool = setting(
        False, help="show where each engine's step goes, by kind of operator, side by side"
    )
    quick: bool = setting(
        False, help="tiny models, to test that everything runs here; not a benchmark"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_ort()

    def in_ort(self) -> dict[str, Any]:
        """Return the settings in `ort_options`, keyed by name.

        Raises:
            ValueError: If a name or a value is not a valid engine setting.
        """
        known, found = dict(EngineSettings.declarations()), {}
        del known["cache"]  # the first step must not use a cached export
        for each in filter(None, self.ort_options.split(",")):
            name, _, text = (part.strip() for part in each.partition("="))
            if name not in known:
                raise ValueError(f"ort_options has {name!r}: {unknown_name(name, known)}")
            found[name] = known[name].check(known[name].parse(text))
        return found

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Engines and precisions to measure for each model, the reference first."""
        chosen = [(e, p) for p in self.precisions.split(",") for e in self.engines.split(",")]
        return tuple(dict.fromkeys([REFERENCE, *chosen]))


@dataclass(frozen=True, kw_only=True)
class PaperSettings(BenchSettings):
    """Settings of ``bench papers``."""

    models: str = setting(
        ",".join(PAPERS),
        choices=tuple(PAPERS),
        many=True,
        help="benchmarks to run, separated by commas; see below",
    )
    engines: str = setting(
        "eager,compile,ort,ortmodule",
        choices=ENGINES,
        renamed=SAME_ENGINE,
        many=True,
        help="engines to compare, separated by commas",
    )
    precisions: str = setting(
        "fp32,bf16",
        choices=PRECISIONS,
        many=True,
        help="precisions of matrix products, separated by commas; on a GPU by default fp16, as "
        "published",
    )

    @classmethod
    def on(cls, device: str, options: Mapping[str, Any]) -> Self:
        """Return the settings for a device, with fp16 as the default precision on a GPU.

        Args:
            device: "cpu" or "cuda".
            options: Fields of these settings.

        Raises:
            ValueError: If a name or a value is not valid.
        """
        published = {} if device == "cpu" else {"precisions": "fp16"}
        return cls.of(published | dict(options))
