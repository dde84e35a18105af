"""What an export asks of the kernel's session: which models are wrapped, in training and seen."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from ortlab.engines.wrapped_models import WrappedModels
from ortlab.training.run import Run


class Lab(Protocol):
    """The part of `ortlab.session.Session` that exports need."""

    @property
    def wrapped(self) -> WrappedModels:
        """The wrapped models."""
        ...

    def training(self, model: nn.Module) -> Run | None:
        """Return the run that trains weights of `model`, or None."""
        ...

    def last_data(self, model: nn.Module) -> Any:
        """Return the data that `model` was trained on last, or a batch of it, or None."""
        ...
