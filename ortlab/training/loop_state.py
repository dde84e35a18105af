"""State of a user's own training loop: what its checkpoints hold, and how they are restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ortlab.checkpoint.checkpoint import Checkpoint, Position
from ortlab.checkpoint.checks import check_model, check_own_optimizer
from ortlab.utils.rng import RandomStates

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class LoopState:
    """Model, optimizer and scheduler of a loop.

    The place in the data is up to the loop.

    Args:
        model: The model, as the user made it.
        optimizer: The optimizer.
        scheduler: Learning rate scheduler; None if the loop has none.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler

    def take(self, step: int, settings: Mapping[str, Any]) -> Checkpoint:
        """Return a checkpoint that shares memory with the model.

        Args:
            step: Optimizer steps done.
            settings: Settings of the run.
        """
        return Checkpoint(
            self._model.state_dict(),
            self._optimizer.state_dict(),
            Position(step, 0, 0, None, "micro-batches", step, RandomStates.now(), None, 0),
            settings,
            scheduler=None if self._scheduler is None else dict(self._scheduler.state_dict()),
        )

    def load(self, taken: Checkpoint) -> None:
        """Restore weights, optimizer, scheduler and random states.

        Args:
            taken: The checkpoint.

        Raises:
            ValueError: If it is of another model, optimizer or scheduler. Nothing has changed then.
        """
        check_model(taken.model, self._model.state_dict())
        check_own_optimizer(taken.optimizer, self._optimizer.state_dict())
        if (taken.scheduler is None) != (self._scheduler is None):
            has = "no" if taken.scheduler is None else "an"
            raise ValueError(f"the checkpoint has {has} lr_scheduler; give what the loop had then")
        self._model.load_state_dict(taken.model)
        self._optimizer.load_state_dict(dict(taken.optimizer))
        if self._scheduler is not None:
            self._scheduler.load_state_dict(dict(taken.scheduler or {}))
        taken.position.random.give_back()
