"""Steppers of several processes: which class takes the steps under which settings."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import nn

from ortlab.engines.base import Engine, LossFunction
from ortlab.engines.distributed import (
    compatibility,
    deepspeed,
    deepspeed_library,
    pipeline_parallel,
    tensor_parallel,
)
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.torch.stepper import TorchStepper, training_device
from ortlab.settings import FinetuneSettings


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup | None = None,
) -> TorchStepper:
    """A stepper that trains `model` together with the other ranks of `group` (None: all of them).

    Every rank calls this with a model of the same parameters, which become rank 0's, and then each
    of the stepper's methods in the same order with the same arguments. Group and model are of one
    device: gloo's on a CPU; NCCL's on CUDA has not been tried.

    - A step's micro-batches are the whole ones: each rank trains on its own rows (see
      `ortlab.engines.distributed.batch_split`), and the gradient is that of the whole batch
      wherever the loss is a mean over samples, or over the targets that are not ignored, as
      `weights_of` knows it. Loss, samples, tokens, gradient norm and skipped steps are the same on
      every rank.
    - With Adasum a rank's gradient is the mean over its own samples. Under SGD the gradients are
      combined, before they are clipped; under AdamW what each rank's own step changes, and the
      norm that is told is the root of the mean of the squares of the ranks' norms.
    - Dropout draws other masks on each rank, from generators that `reseed` restarts by its seed and
      the rank; those of the process are the data's, and stay the same on every rank.
    - BatchNorm normalises each rank's rows by themselves. Running statistics are rank 0's after
      each step, where DistributedDataParallel's ``broadcast_buffers`` would let them differ
      until the next forward.
    - States have the form of one process, whole on every rank, in both directions.
    - DeepSpeed takes float32 weights and all ranks, and steps all parameters at once: one without
      a gradient in any step is left alone, one that has a gradient in some steps is refused there.
      With ``param_dtype="bf16"`` the model's weights are bfloat16 until ``close``, and what forward
      takes in float32 is cast to that; targets are not.
      At stage 3 all ranks call ``close`` too, which gives the model its whole weights.
    - Gradient checkpointing has to be that without reentry (``use_reentrant=False``): of the other
      kind DistributedDataParallel says that a variable was marked ready twice.

    The stepper's ``bytes`` tells what this rank holds, and each result's ``communication_ms`` how
    long collectives were under way.

    A rank that fails before its last backward of a step makes all others raise `RankFailed`, and
    none has taken the step. One that fails or dies later is noticed by the group's timeout; by
    DeepSpeed's next collective where that shares out.

    ValueError where `compatibility` has a reason, ``workers`` is not the group's size, or the
    parameters are of several types at stage 1, of another than float32 by DeepSpeed; RuntimeError
    without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group in every rank"
        )
    group = group or dist.group.WORLD
    assert group is not None
    size = dist.get_world_size(group)
    if settings.workers != size:
        raise ValueError(
            f"workers={settings.workers}, and the process group has {size} ranks; start as many"
        )
    if (reason := compatibility.ranks_conflict(settings, size)) is not None:
        raise ValueError(reason)
    shares_model = settings.tensor_parallel > 1 or settings.pipeline_stages > 1
    if shares_model and group is not dist.group.WORLD:
        raise ValueError(
            "tensor_parallel and pipeline_stages are for all ranks together; leave `group` out"
        )
    if settings.pipeline_stages > 1:
        return pipeline_parallel.prepare(engine, model, loss, settings, group)
    made, kind = _means(settings, group)
    ranks = functools.partial(made, settings=settings, group=group)
    stepper = engine.prepare(model, loss, settings, processes=ranks, stepper=kind)
    assert isinstance(stepper, TorchStepper)  # as those of all engines are
    stepper.reseed(settings.seed)
    return stepper


def load(settings: FinetuneSettings) -> None:
    """Imports what ranks need for `settings` besides torch, where there is something."""
    stages = settings.zero_stage or settings.pipeline_stages > 1
    if stages and compatibility.deepspeed_missing() is None:
        deepspeed_library.library(training_device(settings.device))


def _means(
    settings: FinetuneSettings, group: dist.ProcessGroup
) -> tuple[type[Ranks], type[TorchStepper]]:
    """Who takes steps: DeepSpeed where it can and something is shared out; else torch's own."""
    if settings.tensor_parallel > 1:
        return tensor_parallel.TensorRanks, TorchStepper
    if settings.zero_stage == 0:
        return Ranks, TorchStepper
    reason = compatibility.deepspeed_conflict(settings)
    if reason is None and group is not dist.group.WORLD:
        reason = f"zero_stage={settings.zero_stage}: DeepSpeed trains with all ranks, not with some"
    if reason is None:
        return deepspeed.DeepSpeedRanks, deepspeed.DeepSpeedStepper
    if compatibility.needs_deepspeed(settings) is not None:
        raise ValueError(f"{reason}; choose zero_stage=1 and no more")
    return Ranks, TorchStepper
