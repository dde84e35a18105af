"""Settings of fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.choices import LOSSES, OPTIMIZERS
from ortlab.settings.declaration import setting
from ortlab.settings.engine import EngineSettings


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(EngineSettings):
    """Settings of fine-tuning: the options of ``%ort finetune`` and ``ortlab.finetune``."""

    loss: str | None = setting(
        None,
        help=f"loss function of the notebook, or one of {', '.join(LOSSES)}; "
        "if not set, the loss that the model returns",
    )
    epochs: int = setting(1, minimum=1, help="passes over the training data")
    max_steps: int | None = setting(None, minimum=1, help="maximum number of optimizer steps")
    workers: int = setting(
        1,
        minimum=1,
        panel=True,
        help="number of processes that train together, each on its rows of every batch",
    )
    isolated: bool = setting(
        False,
        panel=True,
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
        help="number of workers that each layer's matrices are sharded across, with engine eager; "
        "the rest of the workers are data-parallel",
    )
    pipeline_stages: int = setting(
        1,
        minimum=1,
        help="number of stages that a Sequential is partitioned into, across workers; "
        "micro-batches flow through them",
    )
    batch_size: int = setting(16, minimum=1, panel=True, unit="samples", help="micro-batch size")
    accumulation: int = setting(
        1, minimum=1, panel=True, help="micro-batches per optimizer step (gradient accumulation)"
    )
    lr: float = setting(5e-5, above=0, panel=True, help="peak learning rate")
    optimizer: str = setting(
        "adamw", choices=OPTIMIZERS, help="optimizer; lamb is for large batches"
    )
    weight_decay: float = setting(0.01, minimum=0, help="decoupled weight decay")
    schedule: str = setting(
        "linear",
        choices=("constant", "linear", "cosine"),
        help="learning rate schedule after warm-up",
    )
    warmup_steps: int = setting(
        0, minimum=0, unit="steps", help="warm-up, in which the learning rate rises"
    )
    clip_norm: float | None = setting(
        1.0,
        above=0,
        panel=True,
        help="maximum norm of all gradients together; larger ones are clipped",
    )
    eval_every: int | None = setting(
        None, minimum=1, unit="steps", help="evaluate every N steps instead of after every epoch"
    )
    checkpoint_every: int | None = setting(
        None,
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
        choices=("eval_loss", "eval_accuracy"),
        help="also keep best.safetensors, the checkpoint with the best evaluation after step 0",
    )
    seed: int = setting(0, minimum=0, help="seed of the data order and of all random numbers")
    device: str = setting(
        "auto", choices=("auto", "cpu", "cuda"), help="device that the model is trained on"
    )

    @property
    def elsewhere(self) -> bool:
        """True if the model is trained in other processes than this one."""
        return self.workers > 1 or self.isolated
