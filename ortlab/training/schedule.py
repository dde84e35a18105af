"""Length of a run in optimizer steps, and its learning rate at each step."""

from __future__ import annotations

import math
import warnings

from ortlab.checkpoint.checkpoint import Position
from ortlab.settings import FinetuneSettings
from ortlab.training.data_loading import Batches


def total_steps(
    data: Batches, settings: FinetuneSettings, begin: Position | None = None
) -> int | None:
    """Return the number of optimizer steps of the whole run.

    Args:
        data: The training data.
        settings: Epochs, batch size, accumulation and ``max_steps`` of the run.
        begin: Position that the run starts from, in the units of `data`. Its steps count as done,
            and only the rest of its data is still to be read. None for a run from the beginning.

    Returns:
        Optimizer steps, or None if both the length of the data and ``max_steps`` are unknown.
    """
    if data.length is None:
        return settings.max_steps
    done, epoch, read = (begin.step, begin.epoch, begin.read) if begin else (0, 0, 0)
    items = settings.accumulation * (1 if data.size is None else settings.batch_size)
    whole = max(settings.epochs - epoch - 1, 0) * math.ceil(data.length / items)
    here = math.ceil((data.length - read) / items) if epoch < settings.epochs else 0
    steps_ = done + here + whole
    return min(steps_, settings.max_steps or steps_)


def learning_rate(step: int, total: int | None, settings: FinetuneSettings) -> float:
    """Return the learning rate of one step.

    It rises linearly over ``warmup_steps`` to ``lr``, which the first step after the warm-up uses.
    After that it stays constant, or decays linearly or along half a cosine that would reach 0 at
    step number `total`.

    Args:
        step: Number of the step, counted from 0.
        total: Number of steps of the run; None if unknown, which keeps the rate constant.
        settings: ``lr``, ``warmup_steps`` and ``schedule`` of the run.

    Returns:
        The learning rate.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    if settings.schedule == "constant" or total is None:
        return settings.lr
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    return settings.lr * (1 + math.cos(math.pi * done)) / 2


def check_schedule(total: int | None, settings: FinetuneSettings) -> None:
    """Check the warm-up and the schedule against the length of the run.

    Warns about a decaying schedule on data of unknown length, which has no effect.

    Args:
        total: Number of steps of the run; None if unknown.
        settings: ``warmup_steps`` and ``schedule`` of the run.

    Raises:
        ValueError: If the warm-up is as long as the run or longer.
    """
    if total is not None and settings.warmup_steps >= total:
        raise ValueError(
            f"warmup_steps={settings.warmup_steps} must be less than the run's {total} steps"
        )
    if total is None and settings.schedule != "constant":
        warnings.warn(
            f"schedule={settings.schedule!r} has no effect on data of unknown length; set "
            "max_steps, or schedule='constant'",
            stacklevel=3,
        )
