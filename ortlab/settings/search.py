"""How races and searches compare set-ups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict

from ortlab.settings.choices import ENGINES, PRECISIONS
from ortlab.settings.declaration import Declaration, Settings, setting, unknown_name
from ortlab.settings.training import FinetuneSettings


class Parallel(TypedDict):
    """How many train together, and what of ZeRO's they share out."""

    workers: int
    zero_stage: int


@dataclass(frozen=True, kw_only=True)
class SearchSettings(Settings):
    """What a race and a search have in common: set-ups that take turns, and a memory."""

    without: ClassVar[tuple[str, ...]] = (
        *("engine", "precision", "workers", "zero_stage"),  # it has several
        "isolated",
        *("param_dtype", "offload_optimizer"),  # for some of those alone
        # It is no run: its data has no end, its learning rate is one.
        *("epochs", "max_steps", "schedule", "warmup_steps", "eval_every", "checkpoint_every"),
        *("checkpoint_minutes", "keep_checkpoints", "keep_best"),
    )
    """The settings of `FinetuneSettings` that it does not take."""

    engines: str = setting(
        ",".join(ENGINES), choices=ENGINES, many=True, help="engines to compare, with commas"
    )
    precisions: str = setting(
        "fp32,bf16", choices=PRECISIONS, many=True, help="their precisions, with commas"
    )
    workers: str = setting(
        "1", help="processes that train together, as in 1,2: one process, and so many workers"
    )
    zero_stages: str = setting(
        "0",
        choices=("0", "1", "2", "3"),
        many=True,
        help="what workers share out, with commas; see --zero-stage of finetune",
    )
    memory: str | None = setting(
        None, help="what the largest micro-batch is to fit into, as in 16GiB; else what is free"
    )
    steps: int | None = setting(
        None, minimum=1, help="optimizer steps of a turn; else what eager torch does in 30 ms"
    )

    def __post_init__(self) -> None:
        for name in ("workers", "zero_stages"):
            if isinstance(value := getattr(self, name), int):  # of a single one its number will do
                object.__setattr__(self, name, str(value))
        super().__post_init__()
        numbers = self.workers.split(",")
        if not all(number.strip().isdecimal() and int(number) for number in numbers):
            raise ValueError(f"workers={self.workers!r}: numbers with commas, as in 1,2")
        if len(several := {int(number) for number in numbers} - {1}) > 1:
            raise ValueError(
                f"workers={self.workers!r}: there are so many workers or so many; choose one of "
                f"{', '.join(map(str, sorted(several)))} beside 1"
            )
        if self.zero_stages != "0" and not several and getattr(self, "preset", None) is None:
            raise ValueError(
                f"zero_stages={self.zero_stages!r} are for workers, and there are none; choose "
                "workers='1,2', or leave zero_stages out"
            )

    @property
    def parallel(self) -> list[Parallel]:
        """The numbers of workers with the stages of ZeRO that there are to each."""
        numbers = dict.fromkeys(int(number) for number in self.workers.split(","))
        stages = [int(stage) for stage in self.zero_stages.split(",")]
        return [
            Parallel(workers=number, zero_stage=stage)
            for number in numbers
            for stage in (stages if number > 1 else [0])
        ]

    @classmethod
    def besides(cls) -> dict[str, Declaration]:
        """The settings of `FinetuneSettings` that all set-ups share."""
        declared = FinetuneSettings.declarations()
        return {name: declared[name] for name in declared if name not in cls.without}

    @classmethod
    def apart(cls, given: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Keyword arguments by whose they are: these settings, and what all set-ups share.

        ValueError for one that is neither.
        """
        own = cls.declarations()
        given = FinetuneSettings.canonical(given)
        known = {**own, **cls.besides()}
        for name in given:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        mine = cls.of({name: value for name, value in given.items() if name in own})
        return mine, {name: value for name, value in given.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class RaceSettings(SearchSettings):
    """Who races and how long; the options of ``%ort race`` and ``ortlab.race``."""

    rounds: int = setting(10, minimum=1, help="rounds that count; in each every set-up has a turn")
    batches: int = setting(
        4, minimum=1, help="different steps of data, which all set-ups go through in turn"
    )
    preset: str | None = setting(
        None,
        choices=("examples",),
        help="another field: examples is that of ORT's training examples, torch and ORT, without "
        "DeepSpeed and with",
    )


@dataclass(frozen=True, kw_only=True)
class TuneSettings(SearchSettings):
    """What is searched, and for how long; the options of ``%ort tune`` and ``ortlab.tune``."""

    # Most of what it does not take it finds.
    without = (*SearchSettings.without, "batch_size", "accumulation", "recompute")

    rounds: int = setting(8, minimum=2, help="rounds among those that may win")
    recompute: str = setting(
        "layers", help="what may be computed again where a micro-batch does not fit; off: nothing"
    )
    global_batch: int | None = setting(
        None,
        minimum=1,
        unit="samples",
        help="samples of an optimizer step, which stay the same; else 16, or a loader's own batch",
    )
    sizes: int = setting(
        4, minimum=1, help="micro-batches to choose from: the global batch, its half, and so on"
    )
    target: str = setting(
        "samples", choices=("samples", "tokens"), help="what a second shall have most of"
    )
