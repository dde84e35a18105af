"""Settings of races and searches, which compare set-ups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict

from ortlab.settings.choices import ENGINES, PRECISIONS, SAME_ENGINE
from ortlab.settings.declaration import Declaration, Settings, setting, unknown_setting
from ortlab.settings.training import CheckpointSettings, FinetuneSettings


class Parallel(TypedDict):
    """Number of workers that train together, and their ZeRO stage."""

    workers: int
    zero_stage: int


@dataclass(frozen=True, kw_only=True)
class SearchSettings(Settings):
    """Settings that races and searches share: set-ups that take turns, and a memory limit."""

    without: ClassVar[tuple[str, ...]] = (
        *("engine", "precision", "workers", "zero_stage"),  # compared, so several of each
        "isolated",
        *("param_dtype", "offload_optimizer"),  # supported by only some set-ups
        # It is not a run: its data is endless and its learning rate constant.
        *("num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_steps"),
        *CheckpointSettings.declarations(),
    )
    """Settings of `FinetuneSettings` that are not accepted."""

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
        help="precisions to compare, separated by commas",
    )
    workers: str = setting(
        "1",
        help="numbers of workers to compare: 1 for one process, or 1,2 for one process and two "
        "workers",
    )
    zero_stages: str = setting(
        "0",
        choices=("0", "1", "2", "3"),
        many=True,
        help="ZeRO stages of the workers to compare, separated by commas; see --zero-stage of "
        "finetune",
    )
    memory: str | None = setting(
        None,
        help="memory that the largest micro-batch must fit into, such as 16GiB; if not set, the "
        "free memory",
    )
    steps: int | None = setting(
        None,
        minimum=1,
        help="optimizer steps per turn; if not set, as many as eager torch runs in 30 ms",
    )

    def __post_init__(self) -> None:
        for name in ("workers", "zero_stages"):
            if isinstance(value := getattr(self, name), int):  # a single number may be an int
                object.__setattr__(self, name, str(value))
        super().__post_init__()
        numbers = self.workers.split(",")
        if not all(number.strip().isdecimal() and int(number) for number in numbers):
            raise ValueError(
                f"workers={self.workers!r} must be whole numbers above 0, separated by commas, "
                "as in 1,2"
            )
        if len(several := {int(number) for number in numbers} - {1}) > 1:
            raise ValueError(
                f"workers={self.workers!r} has several numbers above 1; choose only one of "
                f"{', '.join(map(str, sorted(several)))}, with or without 1"
            )
        if self.zero_stages != "0" and not several and getattr(self, "preset", None) is None:
            raise ValueError(
                f"zero_stages={self.zero_stages!r} needs at least 2 workers; choose "
                "workers='1,2', or leave zero_stages out"
            )

    @property
    def parallel(self) -> list[Parallel]:
        """All pairs of a number of workers and a ZeRO stage to compare; one process has stage 0."""
        numbers = dict.fromkeys(int(number) for number in self.workers.split(","))
        stages = [int(stage) for stage in self.zero_stages.split(",")]
        return [
            Parallel(workers=number, zero_stage=stage)
            for number in numbers
            for stage in (stages if number > 1 else [0])
        ]

    @classmethod
    def besides(cls) -> dict[str, Declaration]:
        """Return the settings of `FinetuneSettings` that all set-ups share."""
        declared = FinetuneSettings.declarations()
        return {name: declared[name] for name in declared if name not in cls.without}

    @classmethod
    def accepted(cls) -> dict[str, Declaration]:
        """Return all settings that such a search takes: its own, and those of `besides`."""
        return {**cls.declarations(), **cls.besides()}

    @classmethod
    def apart(cls, given: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Split keyword arguments into these settings and those that all set-ups share.

        Args:
            given: Name or alias -> value.

        Returns:
            The settings of this class, and the values of the shared settings by name.

        Raises:
            ValueError: If a name is neither, or a value of this class is not allowed.
        """
        own = cls.declarations()
        given = FinetuneSettings.canonical(given)
        known = cls.accepted()
        for name in given:
            if name not in known:
                raise ValueError(unknown_setting(name, known, cls.command))
        mine = cls.of({name: value for name, value in given.items() if name in own})
        return mine, {name: value for name, value in given.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class RaceSettings(SearchSettings):
    """Settings of a race: the options of ``%ort race`` and ``ortlab.race``."""

    command: ClassVar[str] = "race"

    rounds: int = setting(
        10, minimum=1, help="measured rounds; every set-up has one turn per round"
    )
    batches: int = setting(
        4, minimum=1, help="steps with different data, which all set-ups cycle through"
    )
    preset: str | None = setting(
        None,
        choices=("examples",),
        help="predefined set-ups to compare: examples has those of ORT's training examples, torch "
        "and ORT, without and with DeepSpeed",
    )


@dataclass(frozen=True, kw_only=True)
class TuneSettings(SearchSettings):
    """Settings of a search: the options of ``%ort tune`` and ``ortlab.tune``."""

    command: ClassVar[str] = "tune"
    # Most settings that it does not accept are results of the search.
    without = (*SearchSettings.without, "batch_size", "gradient_accumulation_steps", "recompute")

    rounds: int = setting(
        8, minimum=2, help="rounds in which set-ups that can still win are measured"
    )
    recompute: str = setting(
        "layers",
        help="activations to recompute if a micro-batch does not fit, as in finetune; off for none",
    )
    global_batch: int | None = setting(
        None,
        minimum=1,
        unit="samples",
        help="samples per optimizer step, the same for all set-ups; if not set, 16 or the batch "
        "of a DataLoader",
    )
    sizes: int = setting(
        4,
        minimum=1,
        help="number of micro-batch sizes to try: the global batch, half of it, and so on",
    )
    target: str = setting(
        "samples", choices=("samples", "tokens"), help="quantity per second to maximize"
    )
