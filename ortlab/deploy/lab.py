"""Interface that exports need of the kernel's session: wrapped models, active runs, seen data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from ortlab.engines.wrapped_models import WrappedModels
    from ortlab.training.run import Run


class Lab(Protocol):
    """The part of `ortlab.session.Session` that exports need."""

    @property
    def wrapped(self) -> WrappedModels:
        """Registry of the wrapped models."""
        ...

    def training(self, model: nn.Module) -> Run | None:
        """Return the run that trains a model's weights, or None.

        Args:
            model: The user's model.
        """
        ...

    def last_data(self, model: nn.Module) -> Any:
        """Return the data of a model's last run, or a batch of it, or None.

        Args:
            model: The user's model.
        """
        ...
