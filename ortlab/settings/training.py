"""How a model is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.choices import LOSSES, OPTIMIZERS
from ortlab.settings.declaration import setting
from ortlab.settings.engine import EngineSettings


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(EngineSettings):
    """How a model is fine-tuned; the options of ``%ort finetune`` and ``ortlab.finetune``."""

    loss: str | None = setting(
        None,
        help=f"a loss function of the notebook, or one of {', '.join(LOSSES)}; "
        "the model's own where it returns one",
    )
    epochs: int = setting(1, minimum=1, help="passes over the training data")
    max_steps: int | None = setting(None, minimum=1, help="end after so many optimizer steps")
    workers: int = setting(
        1,
        minimum=1,
        panel=True,
        help="processes that train together, each on its rows of every batch",
    )
    isolated: bool = setting(
        False,
        panel=True,
        help="train in a process of its own, as workers do: where it dies, of native code or for "
        "want of memory, the run goes on from its last checkpoint and the notebook is untouched",
    )
    zero_stage: int = setting(
        0,
        minimum=0,
        maximum=3,
        panel=True,
        help="what workers share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too",
    )
    param_dtype: str = setting(
        "fp32",
        choices=("fp32", "bf16"),
        help="type of weights and gradients on workers from zero_stage 1 on; bf16, with precision "
        "bf16, takes 2+2+12 bytes a parameter with an fp32 copy in the optimizer, and fp32 4+4+8",
    )
    offload_optimizer: bool = setting(
        False,
        help="keep each worker's share of the optimizer in host memory and step there, from "
        "zero_stage 1 on",
    )
    reduction: str = setting(
        "mean",
        choices=("mean", "adasum"),
        help="how the workers' gradients become one: their mean over samples, or Adasum's sum, "
        "which adapts to their angle",
    )
    tensor_parallel: int = setting(
        1,
        minimum=1,
        help="workers that share each layer's matrices, with engine eager; the others share data",
    )
    pipeline_stages: int = setting(
        1,
        minimum=1,
        help="parts of a Sequential that workers have one after the other; micro-batches flow "
        "through them",
    )
    batch_size: int = setting(
        16, minimum=1, panel=True, unit="samples", help="samples in a micro-batch"
    )
    accumulation: int = setting(
        1, minimum=1, panel=True, help="micro-batches for one optimizer step"
    )
    lr: float = setting(5e-5, above=0, panel=True, help="the highest learning rate")
    optimizer: str = setting(
        "adamw", choices=OPTIMIZERS, help="the update rule; lamb is for large batches"
    )
    weight_decay: float = setting(0.01, minimum=0, help="decoupled weight decay")
    schedule: str = setting(
        "linear", choices=("constant", "linear", "cosine"), help="the learning rate after warm-up"
    )
    warmup_steps: int = setting(0, minimum=0, unit="steps", help="steps of rising learning rate")
    clip_norm: float | None = setting(
        1.0, above=0, panel=True, help="the largest norm of all gradients"
    )
    eval_every: int | None = setting(
        None, minimum=1, unit="steps", help="evaluate every so many steps, not after every epoch"
    )
    checkpoint_every: int | None = setting(
        None,
        minimum=1,
        unit="steps",
        help="keep a checkpoint every so many steps; else a run on workers every 100",
    )
    checkpoint_minutes: float | None = setting(
        10.0,
        above=0,
        unit="minutes",
        help="keep a checkpoint after so many minutes, and in a pause",
    )
    keep_checkpoints: int = setting(
        2, minimum=1, help="so many of the last checkpoints stay, that of the end among them"
    )
    keep_best: str | None = setting(
        None,
        choices=("eval_loss", "eval_accuracy"),
        help="keep best.safetensors too: the checkpoint of the best evaluation after step 0",
    )
    seed: int = setting(0, minimum=0, help="seeds the order of the data and every random number")
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="where the model trains")

    @property
    def elsewhere(self) -> bool:
        """Whether the model trains in other processes than this one."""
        return self.workers > 1 or self.isolated
