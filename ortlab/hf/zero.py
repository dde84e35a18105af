"""ZeRO for a Trainer: what DeepSpeed is told, and what it refuses.

transformers' own way: a DeepSpeed configuration among the TrainingArguments, in processes that a
launcher has started (https://huggingface.co/docs/transformers/deepspeed).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from transformers import TrainingArguments

from ortlab.engines.distributed import compatibility, deepspeed_library
from ortlab.settings import EngineSettings

STAGES = (0, 1, 2, 3)
_BY_ELEMENT = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers whose update of an element depends on that element alone."""


def check_stage(stage: Any) -> int:
    """`stage` as one of `STAGES`; ValueError for anything else."""
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(
            f"zero_stage={stage!r}: 1 shares out the optimizer's state, 2 the gradients too, "
            "3 the weights too; 0 shares nothing"
        )
    return int(stage)


def arguments(
    stage: int, args: TrainingArguments | None, settings: EngineSettings
) -> TrainingArguments:
    """`args` with DeepSpeed's configuration for a `stage` from 1 on.

    Of its fields those with "auto" are the arguments' own: batch, accumulation, clipping.
    The processes' group is open afterwards. ValueError where there is one process, and for what
    DeepSpeed or the engine cannot do.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count < 2:
        raise ValueError(
            f"zero_stage={stage} shares between processes, and this is one: start a script by "
            "torchrun --nproc-per-node 2 train.py; from a notebook, "
            f"%ort finetune model train --workers 2 --zero-stage {stage}"
        )
    if (reason := compatibility.deepspeed_missing()) is not None:
        raise ValueError(f"zero_stage={stage} goes through DeepSpeed: {reason}")
    if args is None:
        args = TrainingArguments()
    if args.deepspeed:
        raise ValueError(
            f"zero_stage={stage} and TrainingArguments(deepspeed=...) both configure DeepSpeed; "
            "leave one of them out"
        )
    if settings.engine not in ("eager", "ort"):
        raise ValueError(
            f"zero_stage={stage} with engine={settings.engine!r} has not been tried in a Trainer; "
            "choose engine='eager' or engine='ort'"
        )
    if stage == 3 and settings.engine == "ort":
        raise ValueError(
            "zero_stage=3 with engine='ort': it reads all weights of the model at once, so that "
            "every process would have to hold them; choose zero_stage=2, or engine='eager'"
        )
    if args.fp16 or args.bf16:
        chosen = "fp16" if args.fp16 else "bf16"
        raise ValueError(
            f"zero_stage={stage} with {chosen}=True: DeepSpeed makes the weights {chosen}, which "
            "has not been tried in a Trainer; leave it out, or train by ortlab.finetune with "
            "workers and param_dtype='bf16'"
        )
    if settings.precision != "fp32":
        raise ValueError(
            f"zero_stage={stage} with precision={settings.precision!r} has not been tried in a "
            "Trainer; leave it out, or train by ortlab.finetune with workers"
        )
    if args.load_best_model_at_end:
        refuse_checkpoint(stage, "load_best_model_at_end=True")
    deepspeed_library.library(args.device)  # over the group that `device` has opened
    return dataclasses.replace(args, deepspeed=configuration(stage))


def configuration(stage: int) -> dict[str, Any]:
    """What DeepSpeed is told (https://www.deepspeed.ai/docs/config-json/)."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,  # `check_optimizer` knows which it may have
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # A checkpoint has the whole weights.
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def check_optimizer(stage: int, optimizer: torch.optim.Optimizer) -> None:
    """ValueError for one that does not step element by element: DeepSpeed cuts tensors up."""
    if type(optimizer) not in _BY_ELEMENT:
        raise ValueError(
            f"zero_stage={stage} with {type(optimizer).__name__}: DeepSpeed gives it flat pieces "
            f"of tensors, and only {', '.join(kind.__name__ for kind in _BY_ELEMENT)} are known "
            "to step element by element; choose optim='adamw_torch'"
        )


def refuse_checkpoint(stage: int, asked: str) -> None:
    """ValueError: DeepSpeed's checkpoints are unpickled, which runs what a file says."""
    raise ValueError(
        f"zero_stage={stage} with {asked}: DeepSpeed unpickles its checkpoints, which can run "
        "code; go on from the weights with from_pretrained, or train by ortlab.finetune with "
        "workers, whose checkpoints are safetensors"
    )


def ignores_count(loss: float, with_twice: float) -> bool:
    """Whether a model's loss takes no notice of ``num_items_in_batch``.

    `loss` is that of a batch, `with_twice` that of the same batch with twice as many items told; a
    loss that is divided by the items is half as large then.
    """
    return loss != 0.0 and loss == with_twice
