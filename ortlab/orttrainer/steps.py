"""Steps of an `ORTTrainer`: in one graph of ORT's, or in the engine ``ort`` with torch's optimizer.

The graph of a whole step has no loss scale and reduces no gradients, so that steps in float16 or in
several processes are those of the engine ``ort``. Each process has batches of its own, and the
gradient is the mean over the processes, as it was in ORT's trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import torch
from torch import distributed as dist
from torch import nn

from ortlab.engines.base import Batch, LossFunction
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.loss_scale import LossScale, ScaleRule
from ortlab.engines.ortmodule.engine import execution_of, reseed
from ortlab.engines.ortmodule.export_pool import CachedExport
from ortlab.engines.ortmodule.fused_step import FusedStep
from ortlab.engines.registry import engine
from ortlab.engines.single_process import OneProcess, Share
from ortlab.engines.torch.stepper import TorchStepper
from ortlab.orttrainer.objective import Objective
from ortlab.orttrainer.optimizer import groups_for, optimizer_for
from ortlab.settings import FinetuneSettings

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Taken:
    """Result of one micro-batch.

    Attributes:
        outputs: Outputs of the objective, the loss first.
        norm: Norm of the gradients before clipping; NaN if it is not known before the step's end.
        finite: False if loss or gradients are not finite: nothing has changed, and the next
            micro-batch begins a step.
        skipped: True if the step was skipped because its gradients overflowed float16.
    """

    outputs: Sequence[torch.Tensor]
    norm: float
    finite: bool
    skipped: bool = False


class Steps(Protocol):
    """Training steps of an objective.

    Attributes:
        optimizer: torch's optimizer, with the groups of the configuration.
    """

    optimizer: torch.optim.Optimizer

    def take(
        self, inputs: Sequence[torch.Tensor], *, number: int, of: int, max_grad_norm: float | None
    ) -> Taken:
        """Train on one micro-batch; the last one takes the step, with the optimizer's rates.

        Args:
            inputs: Inputs of the objective.
            number: Number of the micro-batch in the step, from 1.
            of: Number of micro-batches in the step, whose mean gradient is used.
            max_grad_norm: Maximum norm of the gradients; None for no clipping.
        """

    def evaluate(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the objective's outputs in its present mode, without a gradient.

        Args:
            inputs: Inputs of the objective.
        """

    def graphs(self) -> Sequence[onnx.ModelProto]:
        """Return the graphs of the last step, see `GRAPHS`; none if there is no such graph."""

    def remarks(self) -> Sequence[str]:
        """Return the parts of the steps so far that ran outside of ORT, and why."""

    def loss_scale(self) -> dict[str, Any] | None:
        """Return the state of the loss scale; None without one."""

    def load(self, optimizer: Mapping[str, Any], loss_scale: Mapping[str, Any] | None) -> None:
        """Restore the state of the optimizer, and then that of the loss scale.

        Args:
            optimizer: State in torch's format, which must not be used afterwards.
            loss_scale: Result of `loss_scale`, or None for the initial scale.
        """

    def reseed(self, seed: int) -> None:
        """Restart the random generators whose state cannot be read.

        Args:
            seed: New seed.
        """


def check_world(size: int, rank: int) -> None:
    """Check that this process is in a process group.

    Args:
        size: Number of processes.
        rank: Number of this process.

    Raises:
        ValueError: If there is no group, or this process has another number in it.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"distributed.world_size={size}, but there is no process group; start the script by "
            f"torchrun --nproc-per-node {size}, and call "
            "torch.distributed.init_process_group('gloo') in it"
        )
    if (size, rank) != (found := (dist.get_world_size(), dist.get_rank())):
        raise ValueError(
            f"distributed.world_size={size} and world_rank={rank}, but the process group has size "
            f"{found[0]} and this process rank {found[1]}; pass those"
        )


def in_first_process(action: Callable[[], object]) -> None:
    """Call a function in rank 0 of all processes, while the others wait for it.

    Args:
        action: The function.
    """
    try:
        if dist.get_rank() == 0:
            action()
    finally:
        dist.barrier()


class FusedSteps:
    """Steps in one graph of ORT's, see `FusedStep`.

    Args:
        objective: The objective.
        config: Configuration of the optimizer.
        parameters: The model's parameters by name.
        settings: Settings of the engine ``ort_fused``.
    """

    def __init__(
        self,
        objective: Objective,
        config: Any,
        parameters: Mapping[str, nn.Parameter],
        settings: FinetuneSettings,
    ) -> None:
        self._wrapped = engine("ortmodule").wrap(objective, settings.model)
        self.optimizer = optimizer_for(config, parameters)
        self._bad = torch.zeros(())
        self._step = FusedStep(execution_of(self._wrapped), self.optimizer, self._bad)
        self._served: CachedExport | None = None

    def take(
        self, inputs: Sequence[torch.Tensor], *, number: int, of: int, max_grad_norm: float | None
    ) -> Taken:
        """See `Steps.take`."""
        self._served = self._step.served(tuple(inputs))
        assert self._served is not None  # fallbacks are off
        outcome = self._step.run(
            self._served, tuple(inputs), number=number, of=of, max_grad_norm=max_grad_norm
        )
        finite = not self._bad
        self._bad.zero_()
        return Taken(outcome.outputs, float(outcome.norm), finite)

    def evaluate(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `Steps.evaluate`."""
        with torch.no_grad():
            found: Sequence[torch.Tensor] = self._wrapped(*inputs)
        return found

    def graphs(self) -> Sequence[onnx.ModelProto]:
        """See `Steps.graphs`."""
        assert self._served is not None
        stages = self._served.export.stages()
        return stages["forward"], stages["gradient"], self._step.graph(self._served)

    def remarks(self) -> Sequence[str]:
        """See `Steps.remarks`; the graph has the whole step."""
        return ()

    def loss_scale(self) -> None:
        """See `Steps.loss_scale`; the graph has none."""

    def load(self, optimizer: Mapping[str, Any], loss_scale: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """See `Steps.load`."""
        self.optimizer.load_state_dict(dict(optimizer))

    def reseed(self, seed: int) -> None:
        """See `Steps.reseed`."""
        reseed(seed)


class TorchSteps:
    """Steps with forward and backward in the engine ``ort``, and the optimizer in torch.

    Args:
        objective: The objective.
        config: Configuration of the optimizer.
        parameters: The model's parameters by name.
        settings: Settings of the engine ``ort``.
        rule: How the loss scale begins and changes; None without one.

    Raises:
        ValueError: If torch's optimizer cannot do what the configuration says.
    """

    def __init__(
        self,
        objective: Objective,
        config: Any,
        parameters: Mapping[str, nn.Parameter],
        settings: FinetuneSettings,
        rule: ScaleRule | None,
    ) -> None:
        groups = groups_for(config, parameters, in_torch=True)

        def processes(
            module: nn.Module, loss: LossFunction | None, owner: nn.Module, device: torch.device
        ) -> OneProcess:
            self._called = _Called(module)
            given = self._called, loss, owner, device
            if settings.parallel.workers == 1:
                return _Alone(*given, groups=groups)
            return _Several(*given, groups=groups, settings=settings, group=dist.group.WORLD)

        stepper = engine("ort").prepare(
            objective, None, settings, processes=processes, stepper=_MicroStepper
        )
        assert isinstance(stepper, _MicroStepper)
        if rule is not None:
            stepper.scale_by(rule)
        self._stepper = stepper
        self.optimizer = stepper.optimizer

    def take(
        self, inputs: Sequence[torch.Tensor], *, number: int, of: int, max_grad_norm: float | None
    ) -> Taken:
        """See `Steps.take`."""
        norm, finite, skipped = self._stepper.take(
            list(inputs), number=number, of=of, max_grad_norm=max_grad_norm
        )
        return Taken(self._called.outputs, norm, finite, skipped)

    def evaluate(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See `Steps.evaluate`."""
        with torch.no_grad(), self._stepper.lowered():
            self._called(*inputs)
        return self._called.outputs

    def graphs(self) -> Sequence[onnx.ModelProto]:
        """See `Steps.graphs`; the optimizer is in no graph."""
        return ()

    def remarks(self) -> Sequence[str]:
        """See `Steps.remarks`."""
        told = self._stepper.report().remarks
        return [each for each in told if not each.startswith("ORT ")]  # its share, which changes

    def loss_scale(self) -> dict[str, Any] | None:
        """See `Steps.loss_scale`."""
        return self._stepper.loss_scale()

    def load(self, optimizer: Mapping[str, Any], loss_scale: Mapping[str, Any] | None) -> None:
        """See `Steps.load`."""
        self._stepper.restore(optimizer, loss_scale)

    def reseed(self, seed: int) -> None:
        """See `Steps.reseed`."""
        self._stepper.reseed(seed)


class _Called(nn.Module):
    """Module whose last outputs can be read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.outputs: Sequence[torch.Tensor] = ()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the module."""
        found = self.module(*inputs)
        self.outputs = [each.detach() for each in found]
        return found


class _Alone(OneProcess):
    """Single process whose optimizer has given parameter groups.

    Args:
        *args: See `OneProcess`.
        groups: Parameter groups.
        **kwargs: Further arguments of the class.
    """

    def __init__(self, *args: Any, groups: Groups, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Any,  # noqa: ARG002
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """See `OneProcess.optimizer`."""
        return super().optimizer(kind, self._groups, **defaults)


class _Several(_Alone, Ranks):
    """Ranks that are given batches of their own."""

    def share(self, batch: Batch) -> Share:
        """Return the whole batch of this rank, whose loss has the weight of every other rank's."""
        part = 1 / self._size
        return Share(batch, part, part if self._reduction == "mean" else 1.0)

    def total(self, losses: Sequence[torch.Tensor], samples: int) -> torch.Tensor:  # noqa: ARG002
        """See `OneProcess.total`; the ranks may have batches of different sizes."""
        return super().total(losses, 1)


class _MicroStepper(TorchStepper):
    """Stepper that is given the micro-batches of a step one by one."""

    _kept: Sequence[torch.Tensor] = ()
    """Running statistics from before the step."""
    _loss: torch.Tensor | float = 0.0
    """Sum of the losses of the step."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer of torch."""
        return self._optimizer

    def scale_by(self, rule: ScaleRule) -> None:
        """Scale the loss by a rule.

        Args:
            rule: How the loss scale begins and changes.
        """
        self._scale = LossScale(self._optimizer, self._device, rule)

    def take(
        self, batch: Batch, *, number: int, of: int, max_grad_norm: float | None
    ) -> tuple[float, bool, bool]:
        """Train on one micro-batch.

        Args:
            batch: The micro-batch.
            number: Number of the micro-batch in the step, from 1.
            of: Number of micro-batches in the step.
            max_grad_norm: Maximum norm of the gradients; None for no clipping.

        Returns:
            Gradient norm, whether it and the loss are finite, and whether the step was skipped.
        """
        self._max_grad_norm = max_grad_norm
        if number == 1:
            self._kept = [buffer.clone() for buffer in self._changing]
            self._loss = 0.0
            self._forget_gradients()
        with self._training([batch], self._kept):
            if not self._module.training:
                self._module.train()
            self._loss = self._loss + self._add([batch], before=number - 1, of=of).loss
            if number < of:
                finite = self._scale is not None or bool(torch.isfinite(self._loss))
                self._keep_finite(self._kept, torch.tensor(not finite))
                return math.nan, finite, False
            norm, _, skipped = self._update(self._loss, self._optimizer.param_groups[0]["lr"])
            self._processes.equalize(self._changing)
            self._keep_finite(self._kept, self._bad.bool() if skipped is None else skipped)
        finite = self.finite()
        self._bad = torch.zeros_like(self._bad)
        if self._scale is not None:
            self._scale.collapsed = torch.zeros_like(self._scale.collapsed)
        return float(norm), finite, bool(skipped)

    def lowered(self) -> AbstractContextManager[Any]:
        """Return the context in which forward computes in the precision of the settings."""
        return self._autocast()

    def loss_scale(self) -> dict[str, Any] | None:
        """Return the state of the loss scale; None without one."""
        return None if self._scale is None else self._scale.state_dict()

    def restore(self, optimizer: Mapping[str, Any], loss_scale: Mapping[str, Any] | None) -> None:
        """Restore the state of the optimizer, and then that of the loss scale.

        Args:
            optimizer: State in torch's format.
            loss_scale: Result of `loss_scale`, or None for the initial scale.
        """
        states = self._laid_out(optimizer["state"])
        self._optimizer.load_state_dict(
            {"state": states, "param_groups": optimizer["param_groups"]}
        )
        if self._scale is not None:
            self._scale.load(loss_scale)
