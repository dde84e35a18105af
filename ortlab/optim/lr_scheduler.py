"""Learning rate schedules of ORT's first training API.

Each computes the schedule of the same name in ``transformers.optimization``. A custom scheduler
needs a method ``get_lr(info)`` that returns a list with one learning rate.
"""

from __future__ import annotations

import abc
import math
from typing import Protocol


class OptimizerLike(Protocol):
    """Object with the base learning rate that a schedule scales."""

    @property
    def lr(self) -> float:
        """Base learning rate."""
        ...


class StepInfo(Protocol):
    """Information that a scheduler gets before a step."""

    @property
    def optimization_step(self) -> int:
        """Number of completed optimizer steps."""
        ...

    @property
    def optimizer_config(self) -> OptimizerLike:
        """Configuration of the optimizer."""
        ...


class _WarmupScheduler(abc.ABC):
    """Linear warmup from 0 over the fraction `warmup` of `total_steps`, then `_after`."""

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps!r} must be at least 1")
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup={warmup!r} must be a fraction of total_steps, at least 0 and below 1"
            )
        self.total_steps = total_steps
        self.warmup = warmup
        self._last_lr: list[float] = []

    @property
    def _warmup_steps(self) -> float:
        return self.warmup * self.total_steps

    def get_lr(self, train_step_info: StepInfo) -> list[float]:
        """Return the learning rate of the next step.

        Args:
            train_step_info: Completed steps, and the configuration of the optimizer.

        Returns:
            A list with one learning rate.

        Raises:
            ValueError: The schedule does not fit the optimizer's learning rate.
        """
        step, lr = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self._warmup_steps:
            factor = step / max(1.0, self._warmup_steps)
        else:
            factor = self._after(step, lr)
        self._last_lr = [lr * factor]
        return self._last_lr

    def get_last_lr(self) -> list[float]:
        """Return the last result of `get_lr`."""
        return self._last_lr

    @abc.abstractmethod
    def _after(self, step: int, lr: float) -> float:
        """Return the factor of `lr` after the warmup."""

    def _done(self, step: int) -> float:
        """Return the completed fraction of the steps after the warmup."""
        return (step - self._warmup_steps) / max(1.0, self.total_steps - self._warmup_steps)


class ConstantWarmupLRScheduler(_WarmupScheduler):
    """Linear warmup from 0, then a constant learning rate.

    Args:
        total_steps: Number of optimizer steps.
        warmup: Fraction of `total_steps`, from 0 to below 1.

    Raises:
        ValueError: `total_steps` is below 1, or `warmup` is out of range.
    """

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return 1.0


class CosineWarmupLRScheduler(_WarmupScheduler):
    """Linear warmup from 0, then a cosine.

    Args:
        total_steps: Number of optimizer steps.
        cycles: Number of cosine waves; the default of half a wave decays to 0.
        warmup: Fraction of `total_steps`, from 0 to below 1.

    Raises:
        ValueError: `total_steps` is below 1, `warmup` is out of range, or `cycles` is not positive.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if cycles <= 0:
            raise ValueError(f"cycles={cycles!r} must be above 0")
        self.cycles = cycles

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * self._done(step))))


class LinearWarmupLRScheduler(_WarmupScheduler):
    """Linear warmup from 0, then linear decay to 0.

    Args:
        total_steps: Number of optimizer steps.
        warmup: Fraction of `total_steps`, from 0 to below 1.

    Raises:
        ValueError: `total_steps` is below 1, or `warmup` is out of range.
    """

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return max(0.0, 1.0 - self._done(step))


class PolyWarmupLRScheduler(_WarmupScheduler):
    """Linear warmup from 0, then polynomial decay to `lr_end`.

    `get_lr` raises ValueError if the optimizer's learning rate is not above `lr_end`.

    Args:
        total_steps: Number of optimizer steps.
        lr_end: Learning rate at the end.
        power: Degree of the polynomial.
        warmup: Fraction of `total_steps`, from 0 to below 1.

    Raises:
        ValueError: `total_steps` is below 1, `warmup` is out of range, or `lr_end` or `power` is
            negative.
    """

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if lr_end < 0 or power < 0:
            raise ValueError(f"lr_end={lr_end!r} and power={power!r} must be at least 0")
        self.lr_end = lr_end
        self.power = power

    def _after(self, step: int, lr: float) -> float:
        if lr <= self.lr_end:
            raise ValueError(f"lr_end={self.lr_end!r} must be below the optimizer's lr={lr!r}")
        if step > self.total_steps:
            return self.lr_end / lr
        left = math.pow(1.0 - self._done(step), self.power)
        return ((lr - self.lr_end) * left + self.lr_end) / lr
