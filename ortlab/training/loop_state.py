"""State of a user's own training loop: what its checkpoints hold, and how they are restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

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

    Raises:
        ValueError: `optimizer` or `scheduler` has no ``state_dict``, or the optimizer has no
            parameter of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
        # A loop trains for hours, so that its end is too late to find out.
        _check_stateful("optimizer", optimizer, "a torch.optim.Optimizer")
        if scheduler is not None:
            _check_stateful("lr_scheduler", scheduler, "a scheduler of torch.optim.lr_scheduler")
        own = set(map(id, model.parameters()))
        groups = getattr(optimizer, "param_groups", [])
        trained = [id(each) for group in groups for each in group["params"]]
        # What wraps several optimizers may have no groups, as schedulers have none.
        known = hasattr(optimizer, "param_groups") or isinstance(optimizer, LRScheduler)
        if known and own.isdisjoint(trained):
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} has no parameter of this {type(model).__name__}; create it for this "
                f"model: {name}(model.parameters(), ...)"
            )
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


def _check_stateful(name: str, given: Any, wanted: str) -> None:
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(given, method, None)):
            raise ValueError(f"{name}={given!r:.60} has no {method}(); give {wanted}")
