"""Loss functions by their names; `ortlab.settings.LOSSES` lists the names."""

from __future__ import annotations

from torch.nn import functional

from ortlab.engines.base import LossFunction
from ortlab.settings import LOSSES, unknown_name

_LOSS_FUNCTIONS: dict[str, LossFunction] = {
    "cross_entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
}


def loss_function(name: str) -> LossFunction:
    """Return the loss function with a given name.

    Args:
        name: One of `ortlab.settings.LOSSES`.

    Returns:
        The function from ``torch.nn.functional``, with its default mean reduction.

    Raises:
        ValueError: If the name is unknown; the message suggests the nearest one.
    """
    if name not in _LOSS_FUNCTIONS:
        raise ValueError(f"loss={name!r}: {unknown_name(name, LOSSES)}")
    return _LOSS_FUNCTIONS[name]
