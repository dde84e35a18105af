"""Settings of fine-tuning, by topic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ortlab.settings.choices import LOSSES, OPTIMIZERS
from ortlab.settings.declaration import Settings, setting
from ortlab.settings.engine import EngineSettings


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Settings):
    """Length of a run."""

    title: ClassVar[str] = "length"

    num_train_epochs: int = setting(
        1,
        alias="epochs",
        short=True,
        minimum=1,
        panel=True,
        common=True,
        help="passes over the training data",
    )
    max_steps: int | None = setting(
        None,
        minimum=1,
        panel=True,
        common=True,
        help="number of optimizer steps, however many epochs that is",
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Batches and their order."""

    title: ClassVar[str] = "data"

    batch_size: int = setting(
        16, minimum=1, panel=True, common=True, unit="samples", help="micro-batch size"
    )
    gradient_accumulation_steps: int = setting(
        1,
        alias="accumulation",
        minimum=1,
        common=True,
        help="micro-batches per optimizer step",
    )
    seed: int = setting(0, minimum=0, help="seed of the data order and of all random numbers")


@dataclass(frozen=True, kw_only=True)
class OptimSettings(Settings):
    """Loss, optimizer and learning rate."""

    title: ClassVar[str] = "optimization"

    loss: str | None = setting(
        None,
        panel=True,
        common=True,
        help=f"function of the notebook, or one of {', '.join(LOSSES)}; by default the model's own",
    )
    learning_rate: float = setting(
        5e-5,
        alias="lr",
        short=True,
        above=0,
        panel=True,
        common=True,
        several="to compare several, train a run with each, as in %ort finetune model data "
        "--lr 1e-3 --fresh --name a, then %ort compare a b",
        help="peak learning rate",
    )
    lr_scheduler_type: str = setting(
        "linear",
        alias="schedule",
        choices=("constant", "linear", "cosine"),
        own=True,
        panel=True,
        help="learning rate schedule after warmup",
    )
    warmup_steps: float = setting(
        0,
        minimum=0,
        unit="steps",
        help="warmup, in which the learning rate rises; below 1, a fraction of the run's steps",
    )
    optimizer: str = setting(
        "adamw",
        choices=OPTIMIZERS,
        own=True,
        panel=True,
        help="optimizer, for finetune also one of your own; lamb is for large batches",
    )
    weight_decay: float = setting(0.01, minimum=0, help="decoupled weight decay")
    max_grad_norm: float | None = setting(
        1.0,
        alias="clip_norm",
        above=0,
        help="maximum norm of all gradients together; larger ones are clipped; none: no clipping",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps >= 1 and not self.warmup_steps.is_integer():
            raise ValueError(
                f"warmup_steps={self.warmup_steps!r} must be a whole number of steps, or a "
                "fraction of the run below 1"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """Processes and devices that train."""

    title: ClassVar[str] = "processes and devices"

    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="device that the model is trained on"
    )
    workers: int = setting(
        1,
        minimum=1,
        panel=True,
        common=True,
        help="number of processes that train together, each on its rows of every batch",
    )
    isolated: bool = setting(
        False,
        help="train in a separate process, as workers do: if it crashes in native code or runs "
        "out of memory, the run resumes from its last checkpoint and the notebook is not affected",
    )
    zero_stage: int = setting(
        0,
        minimum=0,
        maximum=3,
        panel=True,
        help="ZeRO stage, which sets the state sharded across workers: 0 none, 1 optimizer state, "
        "2 also gradients, 3 also weights",
    )
    param_dtype: str = setting(
        "fp32",
        choices=("fp32", "bf16"),
        help="data type of weights and gradients on workers with zero_stage 1 or higher; bf16, "
        "which needs precision bf16, takes 2+2+12 bytes per parameter with an fp32 copy in the "
        "optimizer, and fp32 4+4+8",
    )
    offload_optimizer: bool = setting(
        False,
        help="keep each worker's shard of the optimizer state in host memory and run the "
        "optimizer there; needs zero_stage 1 or higher",
    )
    reduction: str = setting(
        "mean",
        choices=("mean", "adasum"),
        help="reduction of the workers' gradients: mean over samples, or Adasum's sum, which "
        "adapts to the angle between gradients",
    )
    tensor_parallel: int = setting(
        1,
        minimum=1,
        help="number of workers that each layer's matrices are sharded across, with engines "
        "eager, compile and ort; the rest of the workers are data-parallel",
    )
    pipeline_stages: int = setting(
        1,
        minimum=1,
        help="number of workers that have a stage each of a Sequential, BERT, GPT-2 or Llama; "
        "micro-batches flow through them",
    )
    pipeline_interleave: int = setting(
        1,
        minimum=1,
        help="number of stages of each worker in a pipeline; more of them leave workers idle for "
        "less time, and exchange more",
    )

    @property
    def elsewhere(self) -> bool:
        """True if the model is trained in other processes than this one."""
        return self.workers > 1 or self.isolated


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Evaluations and checkpoints during a run."""

    title: ClassVar[str] = "evaluation and checkpoints"

    eval_steps: int | None = setting(
        None,
        alias="eval_every",
        minimum=1,
        unit="steps",
        help="evaluate every N steps instead of after every epoch",
    )
    save_steps: int | None = setting(
        None,
        alias="checkpoint_every",
        minimum=1,
        unit="steps",
        help="save a checkpoint every N steps; if not set, runs on workers save one every 100 "
        "steps",
    )
    checkpoint_minutes: float | None = setting(
        10.0,
        above=0,
        unit="minutes",
        help="save a checkpoint every N minutes and during a pause",
    )
    keep_checkpoints: int = setting(
        2, minimum=1, help="number of latest checkpoints to keep, including the final one"
    )
    keep_best: str | None = setting(
        None,
        help="also keep best.safetensors, the checkpoint with the best evaluation after step 0, by "
        "loss, accuracy or the name of one of your metrics",
    )
    keep_best_mode: str = setting(
        "auto",
        choices=("auto", "max", "min"),
        help="whether more (max) or less (min) of that metric is better; auto goes by its name",
    )
    early_stopping_patience: int | None = setting(
        None,
        minimum=1,
        unit="evaluations",
        help="end the run after N evaluations in a row without a better one, by the metric of "
        "keep_best or, without it, the loss",
    )
    early_stopping_threshold: float = setting(
        0.0, minimum=0, help="improvement that counts as better for early_stopping_patience"
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Settings of fine-tuning: the options of ``%ort finetune`` and ``ortlab.finetune``."""

    command: ClassVar[str] = "finetune"

    model: EngineSettings = field(default_factory=EngineSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
