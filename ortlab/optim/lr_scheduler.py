"""Schedules of the learning rate, by their names in ORT's first training API.

Each is the schedule of that name in transformers (``transformers.optimization``). A scheduler of
one's own has ``get_lr(info)``, which gives a list with one learning rate.
"""

from __future__ import annotations

import abc
import math
from typing import Protocol


class OptimizerLike(Protocol):
    """What has the learning rate to start from."""

    @property
    def lr(self) -> float:
        """The learning rate without a schedule."""
        ...


class StepInfo(Protocol):
    """What a scheduler is told before a step: how many were made, and with which optimizer."""

    @property
    def optimization_step(self) -> int:
        """The number of optimizer steps so far."""
        ...

    @property
    def optimizer_config(self) -> OptimizerLike:
        """The optimizer's configuration."""
        ...


class _WarmupScheduler(abc.ABC):
    """Rises in equal parts from 0 over the share `warmup` of `total_steps`; then `_after` holds."""

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps!r} must be at least 1")
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup={warmup!r} is a share of total_steps: at least 0 and below 1, as 0.1"
            )
        self.total_steps = total_steps
        self.warmup = warmup
        self._last_lr: list[float] = []

    @property
    def _warmup_steps(self) -> float:
        return self.warmup * self.total_steps

    def get_lr(self, train_step_info: StepInfo) -> list[float]:
        """The learning rate of the step to come, in a list."""
        step, lr = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self._warmup_steps:
            factor = step / max(1.0, self._warmup_steps)
        else:
            factor = self._after(step, lr)
        self._last_lr = [lr * factor]
        return self._last_lr

    def get_last_lr(self) -> list[float]:
        """What `get_lr` gave last."""
        return self._last_lr

    @abc.abstractmethod
    def _after(self, step: int, lr: float) -> float:
        """The factor of `lr` after the warm-up."""

    def _done(self, step: int) -> float:
        """The share of the steps behind the warm-up that is over."""
        return (step - self._warmup_steps) / max(1.0, self.total_steps - self._warmup_steps)


class ConstantWarmupLRScheduler(_WarmupScheduler):
    """The same learning rate after a warm-up, in which it rises in equal parts from 0.

    `warmup` is a share of `total_steps`, which are optimizer steps; ValueError for one below 0 or
    not below 1.
    """

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return 1.0


class CosineWarmupLRScheduler(_WarmupScheduler):
    """Down a cosine of `cycles` waves after the warm-up; the default of half a wave ends at 0.

    `total_steps` and `warmup` are those of `ConstantWarmupLRScheduler`; ValueError for `cycles` of
    0 and less.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if cycles <= 0:
            raise ValueError(f"cycles={cycles!r} must be above 0")
        self.cycles = cycles

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * self._done(step))))


class LinearWarmupLRScheduler(_WarmupScheduler):
    """Down in equal parts to 0 after the warm-up.

    `total_steps` and `warmup` are those of `ConstantWarmupLRScheduler`.
    """

    def _after(self, step: int, lr: float) -> float:  # noqa: ARG002
        return max(0.0, 1.0 - self._done(step))


class PolyWarmupLRScheduler(_WarmupScheduler):
    """Down a polynomial of degree `power` to the learning rate `lr_end`, after the warm-up.

    `total_steps` and `warmup` are those of `ConstantWarmupLRScheduler`. ValueError where `lr_end`
    or `power` is negative, and at a step where `lr_end` is not below the optimizer's rate.
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
