"""LAMB (You et al. 2020, arXiv:1904.00962), by pytorch_optimizer, for steps that may be void.

As in the authors' own code and ORT's ``LambConfig``: without bias correction (a warm-up takes its
place), decay within the ratio, and no ratio for tensors that have no decay: biases and norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from pytorch_optimizer.optimizer.lamb import Lamb as PlainLamb

_PIECE = {"cpu": 2**18}
_LARGE_PIECE = 2**24
"""Elements that are stepped at once: what a CPU's cache holds, or else 64 MiB of fp32."""
_DIAGNOSES = ("weight_norm", "adam_norm", "trust_ratio")


class Lamb(PlainLamb):
    """Of each matrix x with the update u = m / (sqrt(v) + eps) + decay x: x -= lr |x| / |u| u.

    Where one of the norms is 0 the ratio is 1. Vectors and scalars move by lr u. Like torch's fused
    optimizers it reads ``found_inf``: where that is not 0 nothing changes. Nobody waits for a
    device to know: there the values before are kept, and given back.
    """

    clamp = math.inf
    """Of the norm of weights; the library's 10 would slow large layers, embeddings first."""
    _step_supports_amp_scaling = True
    """How GradScaler knows an optimizer that reads ``found_inf``."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        plain = [{**group, "adam": all(p.dim() < 2 for p in group["params"])} for group in groups]
        # The library's own default divides the rate by 1 - beta1**step, which no version of the
        # paper does: ten times the rate in the first step.
        super().__init__(plain, weight_decouple=False, adam_debias=True, **defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, a piece at a time: what is kept of the values before takes little memory."""
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
        """Whether nobody waits for a device to read `flag`."""
        return flag.device.type == "cpu"

    def _step_unless(self, void: torch.Tensor | None, piece: dict[str, Any]) -> None:
        """Steps the parameters of `piece`, and gives back what was where the device says `void`."""
        self.init_group(piece)
        values = [value for p in piece["params"] for value in (p, *self.state[p].values())]
        before = [] if void is None else [value.clone() for value in values]
        super().step()
        for parameter in piece["params"]:
            for name in _DIAGNOSES:
                del self.state[parameter][name]
        if void is not None:
            for value, kept in zip(values, before, strict=True):
                value.copy_(torch.where(void.bool(), kept, value))


def _pieces(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Groups of the same settings, each with parameters that have a gradient; the library counts.

    Its step number is of no use without bias correction, and stays what it was.
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
