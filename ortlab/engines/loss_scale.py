"""The dynamic loss scale of float16, whose gradients would else be too small for it.

torch's GradScaler decides (https://docs.pytorch.org/docs/stable/amp.html): a step whose gradients
overflow is skipped and halves the scale, 2000 steps without one double it. Nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortlab.settings import LOWEST_LOSS_SCALE


def held_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What this process holds of `optimizer`: all of it, or the shard that ZeRO gives it."""
    part: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return part


class LossScale:
    """Scales the losses that `optimizer` steps on; the first scale is 2**16.

    ValueError for parameters in float16: their gradients cannot be unscaled without a loss.
    """

    collapsed: torch.Tensor
    """Whether gradients overflowed at the lowest scale; from then on no weight changes."""
    _scaler: torch.amp.GradScaler

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.dtype == torch.float16 for p in parameters):
            raise ValueError(
                "precision='fp16' trains float32 weights, and the model has float16 ones; call "
                "model.float() before"
            )
        self._optimizer = optimizer
        self._one = torch.ones((), device=device)
        self.load(None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward is to begin with."""
        return self._scaler.scale(loss)

    def unscale(self, loss: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Makes the optimizer's `gradients` those of `loss`, in place; before their norm."""
        # The scaler reads gradients alone. One that is NaN tells it what else skips a step.
        step = torch.isfinite(loss) & ~self.collapsed
        min(gradients, key=torch.numel).mul_(torch.where(step, 1.0, torch.nan))
        self._scaler.unscale_(self._optimizer)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps or skips; the scale that the next step has, and whether this one was skipped."""
        self._scaler.step(self._optimizer)
        before = self._now()
        self._scaler.update()
        scale = self._now()
        skipped = scale < before
        self.collapsed = self.collapsed | (skipped & (scale < LOWEST_LOSS_SCALE))
        return scale, skipped

    def _now(self) -> torch.Tensor:
        return self._scaler.scale(self._one)  # `get_scale` would wait for the device

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, as GradScaler has them. Waits for the device."""
        return self._scaler.state_dict()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from `state`, or begins where there is none; the optimizer has its state."""
        self.collapsed = torch.zeros_like(self._one, dtype=torch.bool)
        self._scaler = torch.amp.GradScaler(self._one.device.type)
        if state is not None:
            self._scaler.load_state_dict(dict(state))
        # torch's fused SGD makes its momentum in its first step, and does not write it where that
        # is skipped: what was in the memory stays (torch 2.13, `_fused_sgd` in torch/optim/sgd.py).
        part = held_part(self._optimizer)
        for group in part.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                kept = part.state[parameter]
                if kept.get("momentum_buffer") is None:
                    kept["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
