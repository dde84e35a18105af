"""LAMB optimizer (You et al. 2020, arXiv:1904.00962), based on pytorch_optimizer.

It follows the authors' own code and ORT's ``LambConfig``: no bias correction (warm-up replaces
it), weight decay inside the trust ratio, and no trust ratio for tensors without weight decay
(biases and norms). Unlike the library's class it can skip a step without synchronizing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from pytorch_optimizer.optimizer.lamb import Lamb as PlainLamb

_PIECE = {"cpu": 2**18}
_LARGE_PIECE = 2**24
"""Elements that are updated at once: the size of a CPU cache, or 64 MiB of fp32 elsewhere."""
_DIAGNOSES = ("weight_norm", "adam_norm", "trust_ratio")


class Lamb(PlainLamb):
    """LAMB optimizer that skips a step without synchronizing with the device.

    With the update u = m / (sqrt(v) + eps) + decay x, a matrix x is changed by
    x -= lr |x| / |u| u, where the ratio is 1 if one of the norms is 0. Vectors and scalars are
    changed by x -= lr u. Like torch's fused optimizers it reads ``found_inf``: if that is not 0,
    nothing changes. On a device the previous values are copied and restored by a device operation.

    Args:
        groups: Parameter groups.
        **defaults: Default options of the groups; see ``pytorch_optimizer.Lamb``.
    """

    clamp = math.inf
    """Limit of the weight norm; the library's 10 would slow large layers, embeddings first."""
    _step_supports_amp_scaling = True
    """Tells GradScaler that this optimizer reads ``found_inf``."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        plain = [{**group, "adam": all(p.dim() < 2 for p in group["params"])} for group in groups]
        # The library's default divides the learning rate by 1 - beta1**step, which no version of
        # the paper does: the first step would have ten times the learning rate.
        super().__init__(plain, weight_decouple=False, adam_debias=True, **defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one optimizer step.

        Parameters are updated in pieces, so that the copy of the previous values stays small.

        Args:
            closure: Function that recomputes the loss, or None.

        Returns:
            The result of `closure`, or None.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        void: torch.Tensor | None = getattr(self, "found_inf", None)
        if void is not None and self._is_read_at_once(void):
            if void:
                return loss
            void = None
        groups = self.param_groups
        try:
            for piece in (piece for group in groups for piece in _pieces(group)):
                self.param_groups = [piece]
                self._step_unless(void, piece)
        finally:
            self.param_groups = groups
        return loss

    def _is_read_at_once(self, flag: torch.Tensor) -> bool:
        """Return True if reading `flag` does not synchronize with a device."""
        return flag.device.type == "cpu"

    def _step_unless(self, void: torch.Tensor | None, piece: dict[str, Any]) -> None:
        """Update the parameters of `piece`; restore the previous values if `void` is set."""
        self.init_group(piece)
        values = [value for p in piece["params"] for value in (p, *self.state[p].values())]
        before = [] if void is None else [value.clone() for value in values]
        try:
            super().step()
        finally:
            for parameter in piece["params"]:
                for name in _DIAGNOSES:
                    self.state[parameter].pop(name, None)
        if void is not None:
            for value, kept in zip(values, before, strict=True):
                value.copy_(torch.where(void.bool(), kept, value))


def _pieces(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a group into smaller ones with the same options, without parameters without gradient.

    The library counts steps in the piece, not in `group`; without bias correction the number has
    no effect.
    """
    piece: list[torch.Tensor] = []
    for parameter in (p for p in group["params"] if p.grad is not None):
        most = _PIECE.get(parameter.device.type, _LARGE_PIECE)
        if piece and sum(map(torch.numel, piece)) + parameter.numel() > most:
            yield {**group, "params": piece}
            piece = []
        piece.append(parameter)
    if piece:
        yield {**group, "params": piece}
