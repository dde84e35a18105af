"""The parts of a step that depend on the number of processes, for a single process.

`ortlab.engines.distributed.data_parallel.Ranks` is the counterpart for several processes.
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
from ortlab.engines.own_optimizer import OwnOptim
from ortlab.settings import FinetuneSettings


@dataclass(frozen=True)
class Share:
    """The part of a batch that one process computes.

    Attributes:
        batch: Rows of this process.
        part: Weight of this process's loss in the loss of the whole batch.
        factor: Factor of this process's loss before the backward pass.
    """

    batch: Batch
    part: float = 1.0
    factor: float = 1.0


class OneProcess:
    """Process group of a single process: nothing is partitioned or synchronized.

    Args:
        module: Module that the engine executes.
        loss: Loss function, or None if the module returns its own loss.
        owner: The user's own module inside `module`.
        device: Device of the training.
        given: The user's optimizer or scheduler; None for those of the settings.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
        given: OwnOptim | None = None,
    ) -> None:
        self.module = module
        self.loss = loss
        self.owner = owner
        self.device = device
        self.given = given

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Return a new optimizer, partitioned across processes if they use ZeRO.

        Args:
            kind: Class of the optimizer.
            groups: Parameter groups.
            **defaults: Default options of the groups.
        """
        return kind(groups, **defaults)

    def together(self, *, training: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context around a step or an evaluation; if one process fails, all fail.

        Args:
            training: True for a training step, False for an evaluation.
        """
        return contextlib.nullcontext()

    def share(self, batch: Batch) -> Share:
        """Return the part of a batch that this process computes.

        Args:
            batch: Whole batch.
        """
        return Share(batch)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context around the forward and backward pass of one micro-batch.

        Args:
            last: True for the last micro-batch of the step, which reduces the gradients.
        """
        return contextlib.nullcontext()

    def objective(self, batch: Batch) -> torch.Tensor:
        """Return the loss that the backward pass starts from.

        Args:
            batch: Rows of this process.
        """
        return batches.forward(self.module, batch, self.loss).loss

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss.

        Args:
            loss: Loss computed from `objective`.
        """
        loss.backward()  # type: ignore[no-untyped-call]

    def forward(self, batch: Batch) -> batches.Forward:
        """Run a forward pass in evaluation.

        Args:
            batch: Rows of this process.
        """
        return batches.forward(self.module, batch, self.loss)

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:  # noqa: ARG002
        """Return the sum of the losses of the micro-batches, over all processes.

        Args:
            losses: Loss of each micro-batch, already divided by their number.
            samples: Number of samples in all micro-batches together.
        """
        return losses[0] if len(losses) == 1 else torch.stack(tuple(losses)).sum()

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the norm of all gradients, after they were reduced.

        Args:
            gradients: Gradients of this process.
        """
        return nn.utils.get_total_norm(gradients)

    def equalize(self, statistics: Sequence[torch.Tensor]) -> None:
        """Synchronize running statistics across processes, in place.

        Args:
            statistics: Buffers of the module.
        """

    def evaluated(
        self,
        loss: torch.Tensor,
        part: float,  # noqa: ARG002
        correct: int,
        predicted: int,
    ) -> tuple[torch.Tensor, int, int]:
        """Return the results of an evaluated batch, summed over all processes.

        Args:
            loss: Loss of this process's rows.
            part: Weight of that loss in the loss of the whole batch.
            correct: Number of correct predictions in this process.
            predicted: Number of predictions in this process.

        Returns:
            Loss, correct predictions and predictions of the whole batch.
        """
        return loss, correct, predicted

    def reseeded(self, seed: int) -> int:
        """Restart this object's random generators and return the seed for the engine's.

        Args:
            seed: Seed of the run.
        """
        return seed

    def weights(self) -> dict[str, Any]:
        """Return the state of the whole model, with the names of the user's module."""
        return self.owner.state_dict()

    def take_weights(self, state: Mapping[str, Any]) -> None:
        """Load a state that `weights` returned.

        Args:
            state: State of the whole model.
        """
        self.owner.load_state_dict(state)

    def whole_parameters(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's parameters with their names, in the shapes of the whole model.

        Args:
            parameters: Parameters in the optimizer's order.
        """
        names = {id(p): name for name, p in self.owner.named_parameters()}
        return [(names[id(p)], p) for p in parameters]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer for the whole model.

        Args:
            optimizer: Result of `optimizer`.
        """
        return optimizer.state_dict()

    def own(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
        states: Mapping[int, Mapping[str, Any]],
    ) -> Mapping[int, Mapping[str, Any]]:
        """Return the part of the optimizer state that belongs to this process.

        Args:
            optimizer: Result of `optimizer`.
            states: State of every parameter of the whole model, by parameter number.

        Returns:
            State of this process's parameters, by parameter number.
        """
        return states

    def anywhere(self, found: bool) -> bool:
        """Return whether something holds in any process that runs this model's layers together.

        Args:
            found: The answer of this process.
        """
        return found

    def communication_ms(self) -> float:
        """Return the time with a collective in flight since the last call, in milliseconds."""
        return 0.0

    def check(self, settings: FinetuneSettings) -> None:
        """Check that training can continue with these settings.

        Args:
            settings: New settings.

        Raises:
            ValueError: If it cannot.
        """

    def told(self, report: Report) -> Report:
        """Return the engine's report, with additional remarks about the processes.

        Args:
            report: Report of the engine.
        """
        return report

    def close(self) -> None:
        """Release all resources."""


Processes = Callable[[nn.Module, LossFunction | None, nn.Module, torch.device], OneProcess]
"""Factory of a process group from module, loss, the user's module and device."""
