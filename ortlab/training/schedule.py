"""Length of a run in optimizer steps, and its learning rate at each step."""

from __future__ import annotations

import math
import warnings

from ortlab.checkpoint.checkpoint import Position
from ortlab.settings import FinetuneSettings, LimitSettings, OptimSettings, is_own
from ortlab.training.data_loading import Batches


def total_steps(
    data: Batches, settings: FinetuneSettings, begin: Position | None = None
) -> int | None:
    """Return the number of optimizer steps of the whole run.

    Args:
        data: The training data.
        settings: Limits of the run, its batch size and its gradient accumulation.
        begin: Position that the run starts from, in the units of `data`. Its steps count as done,
            and only the rest of its data is still to be read. None for a run from the beginning.

    Returns:
        ``max_steps``, whatever the number of epochs; without it the steps of all epochs, or None
        if the length of the data is unknown.
    """
    limits = settings.limits
    if limits.max_steps is not None or data.length is None:
        return limits.max_steps
    done, epoch, read = (begin.step, begin.epoch, begin.read) if begin else (0, 0, 0)
    items = _items_per_step(data, settings)
    whole = max(limits.num_train_epochs - epoch - 1, 0) * math.ceil(data.length / items)
    here = math.ceil((data.length - read) / items) if epoch < limits.num_train_epochs else 0
    return done + here + whole


def length_note(data: Batches, settings: FinetuneSettings) -> str | None:
    """Return how many epochs a run with ``max_steps`` takes, in words.

    Args:
        data: The training data.
        settings: Limits of the run, its batch size and its gradient accumulation.

    Returns:
        The note, or None without ``max_steps`` or if the length of the data is unknown.
    """
    limits = settings.limits
    if limits.max_steps is None or data.length is None:
        return None
    steps = math.ceil(data.length / _items_per_step(data, settings))
    told = f"max_steps={limits.max_steps} is {limits.max_steps / steps:.3g} epochs of {steps} steps"
    if limits.num_train_epochs == LimitSettings.declarations()["num_train_epochs"].default:
        return told
    return f"{told}; num_train_epochs={limits.num_train_epochs} has no effect"


def _items_per_step(data: Batches, settings: FinetuneSettings) -> int:
    micro_batches = settings.data.gradient_accumulation_steps
    return micro_batches * (1 if data.size is None else settings.data.batch_size)


def warmup(total: int | None, optim: OptimSettings) -> int:
    """Return the number of warmup steps of a run.

    Args:
        total: Number of steps of the run; None if unknown.
        optim: Settings with ``warmup_steps``, a number of steps or, below 1, a fraction of `total`
            that is rounded up, as in transformers' TrainingArguments.

    Raises:
        ValueError: If the warmup is a fraction of a run of unknown length.
    """
    if optim.warmup_steps >= 1 or not optim.warmup_steps:
        return int(optim.warmup_steps)
    if total is None:
        raise ValueError(
            f"warmup_steps={optim.warmup_steps:g} is a fraction of a run of unknown length; set "
            "max_steps, or give a number of steps"
        )
    return math.ceil(total * optim.warmup_steps)


def learning_rate(step: int, total: int | None, optim: OptimSettings) -> float:
    """Return the learning rate of one step.

    It rises linearly during the warmup to ``learning_rate``, which the first step after it uses.
    After that it stays constant, or decays linearly or along half a cosine that would reach 0 at
    step number `total`.

    Args:
        step: Number of the step, counted from 0.
        total: Number of steps of the run; None if unknown, which keeps the rate constant.
        optim: ``learning_rate``, ``warmup_steps`` and ``lr_scheduler_type`` of the run. A scheduler
            of the user's sets the rate itself.

    Returns:
        The learning rate.

    Raises:
        ValueError: As for `warmup`.
    """
    if is_own(optim.lr_scheduler_type):
        return optim.learning_rate  # the stepper has the scheduler's
    rising = warmup(total, optim)
    if step < rising:
        return optim.learning_rate * (step + 1) / (rising + 1)
    if optim.lr_scheduler_type == "constant" or total is None:
        return optim.learning_rate
    done = min((step - rising) / max(total - rising, 1), 1.0)
    if optim.lr_scheduler_type == "linear":
        return optim.learning_rate * (1 - done)
    return optim.learning_rate * (1 + math.cos(math.pi * done)) / 2


def check_schedule(total: int | None, optim: OptimSettings) -> None:
    """Check the warmup and the schedule against the length of the run.

    Warns about a decaying schedule on data of unknown length, which has no effect.

    Args:
        total: Number of steps of the run; None if unknown.
        optim: ``warmup_steps`` and ``lr_scheduler_type`` of the run.

    Raises:
        ValueError: If the warmup is as long as the run or longer, or a fraction of a run of
            unknown length.
    """
    if is_own(optim.lr_scheduler_type):
        return
    rising = warmup(total, optim)
    # A fraction of a short run may round up to the whole run, which only delays the peak.
    if total is not None and optim.warmup_steps >= 1 and rising >= total:
        raise ValueError(f"warmup_steps={rising} must be less than the run's {total} steps")
    if total is None and optim.lr_scheduler_type != "constant":
        warnings.warn(
            f"lr_scheduler_type={optim.lr_scheduler_type!r} has no effect on data of unknown "
            "length; set max_steps, or lr_scheduler_type='constant'",
            stacklevel=3,
        )
