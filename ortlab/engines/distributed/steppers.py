"""Steppers of several processes: the class that takes the steps of a run, by its settings.

All ranks of a process group train one model together:

- **Data.** A step's micro-batches are the whole ones, and each rank trains on its own rows of them
  (`ortlab.engines.distributed.batch_split`). The gradient is that of the whole batch wherever the
  loss is a mean over samples, or over the targets that are not ignored, as `weights_of` knows it.
  Loss, samples, tokens, gradient norm and skipped steps are the same on every rank.
- **Adasum.** A rank's gradient is the mean over its own samples. Under SGD the gradients are
  combined before they are clipped. Under AdamW the weight changes of the ranks' own steps are
  combined, and the reported norm is the root mean square of the ranks' norms.
- **Dropout.** Masks differ between ranks. They come from generators that `reseed` seeds by its seed
  and the rank; the process's own generators belong to the data, and stay the same on every rank.
- **BatchNorm.** Each rank normalizes its own rows. Running statistics are rank 0's after each step;
  DistributedDataParallel's ``broadcast_buffers`` would let them differ until the next forward.
- **State.** A state dictionary has the form of one process, and is whole on every rank, both when
  it is returned and when it is loaded.
- **DeepSpeed.** It needs float32 weights and all ranks, and updates all parameters at once. A
  parameter without a gradient in any step is not changed; a parameter that has a gradient in some
  steps only is an error. With ``param_dtype="bf16"`` the model's weights are bfloat16 until
  ``close``, and float32 inputs of forward are cast to bfloat16; targets are not. At stage 3 all
  ranks call ``close``, which restores the model's whole weights.
- **FSDP2.** At stage 3 with engine ``ort`` torch's FSDP2 gathers weights layer by layer.
- **Gradient checkpointing** has to be non-reentrant (``use_reentrant=False``): with the reentrant
  variant DistributedDataParallel reports that a variable was marked ready twice.
- **Failures.** A rank that fails before its last backward of a step makes all others raise
  `RankFailed`, and no rank has taken the step. A rank that fails or dies later is noticed by the
  group's timeout, or by DeepSpeed's next collective where DeepSpeed trains.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import nn

from ortlab.engines import compatibility
from ortlab.engines.base import Engine, LossFunction
from ortlab.engines.distributed import (
    deepspeed,
    deepspeed_library,
    fully_sharded,
    pipeline_parallel,
    tensor_parallel,
    tensor_parallel_plan,
)
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.torch.stepper import TorchStepper, training_device
from ortlab.engines.torch.user_optimizer import OptimRequest
from ortlab.settings import FinetuneSettings, ParallelSettings


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup | None = None,
    given: OptimRequest | None = None,
) -> TorchStepper:
    """Return a stepper that trains a model together with the other ranks of a process group.

    Every rank calls this with a model of the same parameters, which become rank 0's, and then each
    of the stepper's methods in the same order with the same arguments; see the module's
    documentation. The stepper's ``bytes`` are the memory of this rank's state, and each result's
    ``communication_ms`` is the time that collectives were in flight.

    Args:
        engine: The engine that executes the model.
        model: The model, whose parameters are trained.
        loss: The loss function, or None where the model returns its loss.
        settings: The run's settings; ``workers`` is the size of the group.
        group: The process group; None means all ranks. Its device is the model's: gloo for a CPU.
            NCCL for CUDA has not been tested.
        given: The user's optimizer or scheduler, from factories; None for those of the settings.

    Returns:
        The stepper.

    Raises:
        ValueError: If `compatibility.group_conflict` returns a reason, or the parameters have
            several types at stage 1, or another type than float32 with DeepSpeed.
        RuntimeError: Without a process group.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group in every rank"
        )
    group = group or dist.group.WORLD
    assert group is not None
    is_world, size = group is dist.group.WORLD, dist.get_world_size(group)
    if (reason := compatibility.group_conflict(settings, size, is_world=is_world)) is not None:
        raise ValueError(reason)
    if settings.parallel.pipeline_stages > 1:
        return pipeline_parallel.prepare(engine, model, loss, settings, group)
    if compatibility.fully_sharded(settings):
        return fully_sharded.prepare(engine, model, loss, settings, group)
    ranks, kind = _classes(settings, is_world=is_world)
    processes = functools.partial(ranks, settings=settings, group=group)
    if given is not None:
        processes = functools.partial(processes, given=given.build(model, settings))
    stepper = engine.prepare(model, loss, settings, processes=processes, stepper=kind)
    assert isinstance(stepper, TorchStepper)  # all engines return one
    stepper.reseed(settings.data.seed)
    return stepper


def check_model(model: nn.Module, settings: FinetuneSettings) -> None:
    """Check that a model can be divided as the settings say, before any process is started.

    Args:
        model: The model.
        settings: The run's settings.

    Raises:
        ValueError: If it cannot; the message names the layer, and the nearest setting that works.
    """
    parallel = settings.parallel
    if parallel.pipeline_stages > 1:
        pipeline_parallel.check(model, settings)
    elif parallel.tensor_parallel > 1:
        tensor_parallel_plan.plan_for(model, parallel.tensor_parallel)
    elif parallel.workers > 1 and compatibility.fully_sharded(settings):
        fully_sharded.blocks_of(model, settings)


def load(parallel: ParallelSettings) -> None:
    """Import the libraries besides torch that ranks need, so that their memory is not the model's.

    Args:
        parallel: Settings of the processes.
    """
    if parallel.zero_stage and compatibility.deepspeed_missing() is None:
        deepspeed_library.library(training_device(parallel.device))


def _classes(
    settings: FinetuneSettings, *, is_world: bool
) -> tuple[type[Ranks], type[TorchStepper]]:
    """Return the classes of ranks and stepper; without DeepSpeed stage 1 is torch's own."""
    if settings.parallel.tensor_parallel > 1:
        return tensor_parallel.TensorRanks, TorchStepper
    if compatibility.deepspeed_serves(settings, is_world=is_world):
        return deepspeed.DeepSpeedRanks, deepspeed.DeepSpeedStepper
    return Ranks, TorchStepper
