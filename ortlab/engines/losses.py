"""Loss functions by their names; `ortlab.settings.LOSSES` lists the names."""

from __future__ import annotations

import torch
from torch.nn import functional

from ortlab.engines.base import LossFunction
from ortlab.settings import LOSSES, unknown_name


def mse_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error.

    Args:
        predictions: Predictions of any shape.
        targets: Targets of the same shape.

    Raises:
        ValueError: If the shapes differ. PyTorch broadcasts them, with a warning.
    """
    _check_shapes("mse", predictions, targets)
    return functional.mse_loss(predictions, targets)


def l1_loss(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error.

    Args:
        predictions: Predictions of any shape.
        targets: Targets of the same shape.

    Raises:
        ValueError: If the shapes differ. PyTorch broadcasts them, with a warning.
    """
    _check_shapes("l1", predictions, targets)
    return functional.l1_loss(predictions, targets)


def _check_shapes(name: str, predictions: torch.Tensor, targets: torch.Tensor) -> None:
    if predictions.shape != targets.shape:
        raise ValueError(
            f"loss={name!r} needs targets of the shape of the predictions, "
            f"{[*predictions.shape]}, not {[*targets.shape]}"
        )


_LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "cross_entropy": functional.cross_entropy,
    "mse": mse_loss,
    "l1": l1_loss,
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
