"""Loss functions by their names; `ortlab.settings.LOSSES` lists the names."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from ortlab.engines.base import LossFunction
from ortlab.settings import LOSSES, unknown_name


def _of_one_shape(name: str, function: LossFunction) -> LossFunction:
    """Return a loss that refuses targets of another shape, which torch broadcasts."""

    @functools.wraps(function)
    def loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if predictions.shape != targets.shape:
            raise ValueError(
                f"loss={name!r} needs targets of the shape of the predictions, "
                f"{[*predictions.shape]}, not {[*targets.shape]}"
            )
        return function(predictions, targets)

    return loss


_LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "cross_entropy": functional.cross_entropy,
    "mse": _of_one_shape("mse", functional.mse_loss),
    "l1": _of_one_shape("l1", functional.l1_loss),
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
}


def loss_function(name: str) -> LossFunction:
    """Return the loss function with a given name.

    Args:
        name: One of `ortlab.settings.LOSSES`.

    Returns:
        The function of ``torch.nn.functional`` or one that checks shapes first, with mean
        reduction.

    Raises:
        ValueError: If the name is unknown; the message suggests the nearest one.
    """
    if name not in _LOSS_FUNCTIONS:
        raise ValueError(f"loss={name!r}: {unknown_name(name, LOSSES)}")
    return _LOSS_FUNCTIONS[name]
