"""Trainers of ORT's first training API."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ortlab import ORTTrainer, optim


def trainer(
    model: nn.Module,
    config: Any = None,
    loss: Any = None,
    *,
    sizes: tuple[int, int] = (8, 3),
    **options: Any,
) -> ORTTrainer:
    """Return a trainer of a classifier.

    Args:
        model: Model to train.
        config: Configuration of the optimizer; SGD by default.
        loss: Loss function; cross entropy by default.
        sizes: Number of features and of classes.
        **options: Options of the trainer.
    """
    features, classes = sizes
    described = {"inputs": [("x", ["batch", features])], "outputs": [("y", ["batch", classes])]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label and a loss were added
        return ORTTrainer(
            model,
            described,
            config or optim.SGDConfig(lr=0.1),
            loss or nn.CrossEntropyLoss(),
            options,
        )
