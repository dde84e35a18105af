"""What of a step depends on how many processes take it; here it is one.

`ortlab.engines.distributed.data_parallel.Ranks` is the same for several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, LossFunction, Report
from ortlab.settings import FinetuneSettings


@dataclass(frozen=True)
class Share:
    """What one process takes of a batch.

    ``part`` is that of its loss in the batch's, ``factor`` what its loss is multiplied by before
    backward.
    """

    batch: Batch
    part: float = 1.0
    factor: float = 1.0


class OneProcess:
    """Everything is here: nothing is shared out, nobody is waited for.

    `module` is what an engine executes, `owner` the user's own module inside it.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
    ) -> None:
        self.module = module
        self.loss = loss
        self.owner = owner
        self.device = device

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """The optimizer `kind` of the parameter `groups`."""
        return kind(groups, **defaults)

    def together(self, *, training: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around a step, or without `training` an evaluation: if one process fails, all do."""
        return contextlib.nullcontext()

    def share(self, batch: Batch) -> Share:
        """What this process takes of `batch`."""
        return Share(batch)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Around forward and backward: gradients are reduced in those of the `last` one."""
        return contextlib.nullcontext()

    def objective(self, batch: Batch) -> torch.Tensor:
        """The loss of `batch`, to go backward from."""
        return batches.forward(self.module, batch, self.loss).loss

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of `loss`, which is of an `objective`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def forward(self, batch: Batch) -> batches.Forward:
        """What `batch` gives in evaluation."""
        return batches.forward(self.module, batch, self.loss)

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:  # noqa: ARG002
        """The sum of the `losses` of micro-batches, which have so many `samples` together."""
        return losses[0] if len(losses) == 1 else torch.stack(tuple(losses)).sum()

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients, after their reduction."""
        return nn.utils.get_total_norm(gradients)

    def equalise(self, statistics: Sequence[torch.Tensor]) -> None:
        """Makes running statistics the same in all processes, in place."""

    def evaluated(
        self,
        loss: torch.Tensor,
        part: float,  # noqa: ARG002
        correct: int,
        predicted: int,
    ) -> tuple[torch.Tensor, int, int]:
        """The loss and the hits of a batch, of which this process has found these."""
        return loss, correct, predicted

    def reseeded(self, seed: int) -> int:
        """Restarts its own generators; what the engine's are to be restarted with."""
        return seed

    def weights(self) -> dict[str, Any]:
        """The whole model's state, named as `owner` has it."""
        return self.owner.state_dict()

    def take_weights(self, state: Mapping[str, Any]) -> None:
        """Takes what `weights` gave."""
        self.owner.load_state_dict(state)

    def whole_parameters(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's `parameters` with their names, in the shapes of the whole model."""
        names = {id(p): name for name, p in self.owner.named_parameters()}
        return [(names[id(p)], p) for p in parameters]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of `optimizer` for the whole model."""
        return optimizer.state_dict()

    def own(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
        states: Mapping[int, Mapping[str, Any]],
    ) -> Mapping[int, Mapping[str, Any]]:
        """What `optimizer` takes here of the `states` of all parameters, by their numbers."""
        return states

    def communication_ms(self) -> float:
        """Milliseconds with a collective under way since this was asked the last time."""
        return 0.0

    def check(self, settings: FinetuneSettings) -> None:
        """ValueError where it cannot train under `settings`."""

    def told(self, report: Report) -> Report:
        """The engine's `report`, with what else there is to say."""
        return report

    def close(self) -> None:
        """Gives back what it holds."""


Processes = Callable[[nn.Module, LossFunction | None, nn.Module, torch.device], OneProcess]
"""Makes one of a module, a loss, the user's own module and a device: the class, or a partial."""
