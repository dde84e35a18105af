"""Dynamic loss scaling for float16, whose gradients would underflow without it.

Uses torch's GradScaler (https://docs.pytorch.org/docs/stable/amp.html): a step whose gradients
overflow is skipped and halves the scale; 2000 steps in a row without overflow double it. Nothing
here synchronizes with the device, except `LossScale.state_dict`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortlab.settings import LOWEST_LOSS_SCALE

_FLOAT32 = torch.finfo(torch.float32)
_STATE: Mapping[str, tuple[type[float], float, float]] = {
    "scale": (float, _FLOAT32.tiny, _FLOAT32.max),
    "growth_factor": (float, 1.0, _FLOAT32.max),
    "backoff_factor": (float, 0.0, 1.0),
    "growth_interval": (int, 0, 2**31),
    "_growth_tracker": (int, -1, 2**31),
}
"""Entries of GradScaler's state: type, and the bounds that a value lies between."""


def check_loss_scale(state: Mapping[str, Any] | None) -> None:
    """Check the state of a loss scale in a checkpoint.

    Args:
        state: Result of `LossScale.state_dict`, or None for the initial scale.

    Raises:
        ValueError: An entry is missing, or is not a value that a loss scale has.
    """
    if state is None:
        return
    for name, (kind, least, most) in _STATE.items():
        value: Any = state.get(name)
        if type(value) is not kind or not least < value < most:
            raise ValueError(
                f"the checkpoint's loss scale has {name}={reprlib.repr(value)}; use another "
                "checkpoint, such as those in the run's folder"
            )


def held_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return this process's part of an optimizer.

    Args:
        optimizer: Optimizer, possibly partitioned by ZeRO.

    Returns:
        The optimizer of the local shard with ZeRO, else `optimizer` itself.
    """
    part: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return part


@dataclass(frozen=True)
class ScaleRule:
    """Initial value, growth and bounds of a loss scale, by default those of torch's GradScaler.

    Attributes:
        initial: Scale of the first step.
        window: Number of steps in a row without overflow after which the scale doubles.
        least: Lower bound of the scale.
        most: Upper bound of the scale.
    """

    initial: float = 2.0**16
    window: int = 2000
    least: float = 0.0
    most: float = math.inf


_USUAL = ScaleRule()


class LossScale:
    """Dynamic loss scale of an optimizer.

    Args:
        optimizer: Optimizer of float32 parameters.
        device: Device of the loss and the gradients.
        rule: Initial value, growth and bounds of the scale.

    Raises:
        ValueError: If a parameter is in float16: unscaling its gradients would lose precision.
    """

    collapsed: torch.Tensor
    """True after an overflow at the lowest scale; from then on no weight changes."""
    _scaler: torch.amp.GradScaler

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        rule: ScaleRule = _USUAL,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "precision='fp16' needs float32 weights, and the model has float16 weights; call "
                "model.float() first"
            )
        self._optimizer = optimizer
        self._rule = rule
        self._one = torch.ones((), device=device)
        self.load(None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, for the backward pass.

        Args:
            loss: Unscaled loss.
        """
        return self._scaler.scale(loss)

    def unscale(self, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Unscale the gradients in place, before their norm is computed.

        If the loss is not finite, one gradient becomes NaN, so that the step is skipped.

        Args:
            loss: Unscaled loss.
            gradients: Gradients of the optimizer's parameters.
        """
        # The scaler reads only gradients, so a NaN gradient signals the other reasons to skip.
        step = torch.isfinite(loss) & ~self.collapsed
        min(gradients, key=torch.numel).mul_(torch.where(step, 1.0, torch.nan))
        self._scaler.unscale_(self._optimizer)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run or skip the optimizer step and update the scale.

        Returns:
            The loss scale of the next step, and whether this step was skipped, as scalar tensors.
        """
        self._scaler.step(self._optimizer)
        before = self._now()
        self._scaler.update()
        scale = self._now()
        skipped = scale < before
        if self._rule.least < self._rule.most:  # a static scale stays where it is
            self.collapsed = self.collapsed | (skipped & (scale < LOWEST_LOSS_SCALE))
        within = scale.clamp(self._rule.least, self._rule.most)
        self._scaler.update(within)
        return within, skipped

    def _now(self) -> torch.Tensor:
        return self._scaler.scale(self._one)  # `get_scale` would synchronize with the device

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's state as plain numbers. Synchronizes with the device."""
        return self._scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore a saved state, or start with the initial scale.

        Call this after the optimizer's state has been loaded.

        Args:
            state: Result of `state_dict`, or None for the initial scale.
        """
        self.collapsed = torch.zeros_like(self._one, dtype=torch.bool)
        self._scaler = torch.amp.GradScaler(
            self._one.device.type,
            init_scale=self._rule.initial,
            growth_interval=self._rule.window,
        )
        if state is not None:
            self._scaler.load_state_dict(dict(state))
        # torch's fused SGD allocates its momentum in its first step. If that step is skipped, the
        # memory stays uninitialized (torch 2.13, `_fused_sgd` in torch/optim/sgd.py).
        part = held_part(self._optimizer)
        for group in part.param_groups:
            for parameter in group["params"] if group.get("momentum") and group["fused"] else ():
                kept = part.state[parameter]
                if kept.get("momentum_buffer") is None:
                    kept["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
