"""ZeRO for a Trainer: its DeepSpeed configuration, and what is refused.

This is transformers' own way: a DeepSpeed configuration in the TrainingArguments, in processes that
a launcher has started (https://huggingface.co/docs/transformers/deepspeed).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from transformers import TrainingArguments

from ortlab.engines import compatibility
from ortlab.engines.distributed import deepspeed_library
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
"""Optimizers whose update of an element depends on that element only."""


def check_stage(stage: Any) -> int:
    """Return a valid stage of ZeRO.

    Args:
        stage: The stage, 0 to 3.

    Raises:
        ValueError: If it is anything else.
    """
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(
            f"zero_stage={stage!r} must be 0 to 3: 1 partitions the optimizer state, 2 the "
            "gradients too, 3 the weights too; 0 partitions nothing"
        )
    return int(stage)


def arguments(
    stage: int, args: TrainingArguments | None, settings: EngineSettings
) -> TrainingArguments:
    """Return a Trainer's arguments with the DeepSpeed configuration of a stage.

    Fields that are "auto" in the configuration come from the arguments: batch size, accumulation,
    clipping. The process group is initialized afterwards.

    Args:
        stage: Stage of ZeRO, 1 to 3.
        args: The Trainer's arguments; None for the defaults.
        settings: Settings of the engine.

    Raises:
        ValueError: If there is a single process, or DeepSpeed or the engine does not support the
            arguments.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count < 2:
        raise ValueError(
            f"zero_stage={stage} needs at least 2 processes, and this is one: start a script with "
            "torchrun --nproc-per-node 2 train.py; in a notebook, "
            f"%ort finetune model train --workers 2 --zero-stage {stage}"
        )
    if (reason := compatibility.deepspeed_missing()) is not None:
        raise ValueError(f"zero_stage={stage} needs DeepSpeed: {reason}")
    if args is None:
        args = TrainingArguments()
    if args.deepspeed:
        raise ValueError(
            f"zero_stage={stage} and TrainingArguments(deepspeed=...) both configure DeepSpeed; "
            "remove one of them"
        )
    if (reason := compatibility.trainer_conflict(stage, settings)) is not None:
        raise ValueError(reason)
    if args.fp16 or args.bf16:
        chosen = "fp16" if args.fp16 else "bf16"
        raise ValueError(
            f"zero_stage={stage} with {chosen}=True: DeepSpeed converts the weights to {chosen}, "
            "which is not tested in a Trainer; remove it, or train with ortlab.finetune, workers "
            "and param_dtype='bf16'"
        )
    if args.load_best_model_at_end:
        refuse_checkpoint(stage, "load_best_model_at_end=True")
    deepspeed_library.library(args.device)  # `device` has initialized the process group
    return dataclasses.replace(args, deepspeed=configuration(stage))


def configuration(stage: int) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a stage (https://www.deepspeed.ai/docs/config-json/).

    Args:
        stage: Stage of ZeRO.
    """
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,  # `check_optimizer` checks it
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # A checkpoint contains all weights.
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def check_optimizer(stage: int, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer updates element by element.

    DeepSpeed passes it flat pieces of tensors.

    Args:
        stage: Stage of ZeRO, for the message.
        optimizer: The optimizer.

    Raises:
        ValueError: If it is not known to do so.
    """
    if type(optimizer) not in _BY_ELEMENT:
        raise ValueError(
            f"zero_stage={stage} with {type(optimizer).__name__}: DeepSpeed passes it flat pieces "
            f"of tensors, and only {', '.join(kind.__name__ for kind in _BY_ELEMENT)} are known "
            "to update element by element; choose optim='adamw_torch'"
        )


def refuse_checkpoint(stage: int, asked: str) -> None:
    """Refuse to resume: DeepSpeed unpickles its checkpoints, which can execute code in them.

    Args:
        stage: Stage of ZeRO, for the message.
        asked: The argument that asks for it.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"zero_stage={stage} with {asked}: DeepSpeed unpickles its checkpoints, which can run "
        "code; start from the weights with from_pretrained, or train with ortlab.finetune and "
        "workers, whose checkpoints are safetensors"
    )


def ignores_count(loss: float, with_twice: float) -> bool:
    """Return whether a model's loss ignores ``num_items_in_batch``.

    Args:
        loss: Loss of a batch.
        with_twice: Loss of the same batch with twice the number of items; half as large if the
            loss is divided by it.
    """
    return loss != 0.0 and loss == with_twice
