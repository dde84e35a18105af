"""One training step in ORT: a single call for forward, backward and optimizer.

The engine ``ortmodule`` exports the graph and checks it against eager torch; the graph of its
session is joined with the optimizer's nodes (`kernels.whole_step`). Weights and moments stay in
torch's memory, in which ORT works without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, LossFunction, tell
from ortlab.engines.ortmodule.compat.binding import Bound
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.ortmodule.export_pool import CachedExport, ExportFailed
from ortlab.engines.ortmodule.kernels import optimizers, whole_step
from ortlab.engines.ortmodule.kernels.whole_step import Update
from ortlab.utils.errors import place


class WithLoss(nn.Module):
    """Module that combines a model and its loss.

    Args:
        model: The user's module.
        loss: Loss function, or None if the module returns its own loss.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self._original_module = model  # ORTModule's name, which is omitted in names for the user
        self.loss = loss
        self.training = model.training

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the loss of a batch, a scalar.

        Args:
            *given: Positional arguments from `arguments`.
            **named: Keyword arguments from `arguments`.
        """
        batch = named or (given[0] if len(given) == 1 else list(given))
        return batches.forward(self._original_module, batch, self.loss).loss


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of `WithLoss`.

    Args:
        batch: Batch in any form.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


@dataclass(frozen=True)
class Outcome:
    """Result of one call.

    Attributes:
        outputs: Outputs of the model, the loss first.
        norm: Norm of the gradients accumulated so far, before clipping.
    """

    outputs: tuple[torch.Tensor, ...]
    norm: torch.Tensor


@dataclass(frozen=True)
class _Joined:
    """Session of a whole step.

    Attributes:
        bound: The session with its bound memory.
        graph: Graph of the session.
        names: Names of the inputs that stay the same between calls, those of the model first.
        model: The model's tensors among these inputs.
        given: Names of the inputs that change with each call.
        updated: Trained parameters, each with the keys of its optimizer state.
        accumulates: True if the graph can accumulate gradients of several micro-batches.
    """

    bound: Bound
    graph: onnx.ModelProto
    names: tuple[str, ...]
    model: tuple[torch.Tensor, ...]
    given: frozenset[str]
    updated: tuple[tuple[torch.Tensor, tuple[str, ...]], ...]
    accumulates: bool


class FusedStep:
    """Training steps in ORT of one model with its loss.

    Args:
        execution: Dispatcher of a `WithLoss`.
        optimizer: torch's optimizer, used for its groups and its state; its ``step`` is never
            called.
        bad: Scalar tensor that is set when a loss or a norm is not finite; from then on nothing is
            updated.
    """

    def __init__(
        self, execution: GraphDispatcher, optimizer: torch.optim.Optimizer, bad: torch.Tensor
    ) -> None:
        optimizers.register()
        self._execution = execution
        self._optimizer = optimizer
        self._bad = bad
        self._groups = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._joined: dict[int, tuple[CachedExport, _Joined]] = {}
        self._totals: dict[int, torch.Tensor] = {}

    def served(self, batch: Batch) -> CachedExport | None:
        """Return the checked export that serves a batch.

        Args:
            batch: Micro-batch on the CPU.

        Returns:
            The cached export, or None if the model has fallen back to torch.

        Raises:
            ExportFailed: If the graph of a whole step would compute other results than the model.
        """
        self._execution.module.training = True
        served = self._execution.served_for(*arguments(batch))
        if served is None and self._execution.report().engine_used == "ortmodule":
            raise ExportFailed(
                f"forward changes the model ({self._execution.edited()}) with every call, so that "
                "no graph fits the next call; use engine='ortmodule'"
            )
        if served is not None and id(served) not in self._joined:
            _refuse(served.export)
        return served

    def run(
        self,
        served: CachedExport,
        batch: Batch,
        *,
        number: int = 1,
        of: int = 1,
        max_grad_norm: float | None = None,
    ) -> Outcome:
        """Run the graph on one micro-batch; the last one updates the weights.

        The step uses the mean gradient of the micro-batches, and learning rate and weight decay of
        the optimizer's groups.

        Args:
            served: Result of `served` for the batch.
            batch: Micro-batch on the CPU.
            number: Number of the micro-batch in the step, from 1.
            of: Number of micro-batches in the step.
            max_grad_norm: Maximum norm of the gradients; None for no clipping.

        Returns:
            The model's outputs and the gradient norm.
        """
        joined = self._session(served, accumulates=of > 1)
        inputs = served.export.inputs(*arguments(batch))
        given = {name: tensor for name, tensor in inputs.items() if name in joined.given}
        most = math.inf if max_grad_norm is None else max_grad_norm
        given[whole_step.LOSS_GRADIENT] = torch.tensor(1.0 / of)
        given[whole_step.WISHES] = torch.tensor([most, float(number == of)])
        if joined.accumulates:
            given[whole_step.ANEW] = torch.tensor([number == 1])
        for i, group in enumerate(self._optimizer.param_groups):
            rates = [group["lr"], group["weight_decay"], *_kind(self._optimizer, group)[2]]
            given[whole_step.rates(i)] = torch.tensor(rates, dtype=torch.float64)
        *outputs, verdict, _ = joined.bound.run(joined.names, self._lasting(joined), given)
        for counter in served.counters:
            counter.add_(1)
        if number == of:
            for parameter, _ in joined.updated:
                torch.autograd.graph.increment_version(parameter)
        return Outcome(tuple(outputs), verdict[0])

    def graph(self, served: CachedExport) -> onnx.ModelProto:
        """Return the graph of the whole step.

        Args:
            served: Export that `run` has used.
        """
        return self._joined[id(served)][1].graph

    def gradient_bytes(self) -> int:
        """Return the size of the accumulated gradients, in bytes."""
        return sum(each.nbytes for each in self._totals.values())

    def close(self) -> None:
        """Release sessions and gradients."""
        self._joined.clear()
        self._totals.clear()

    def _lasting(self, joined: _Joined) -> tuple[torch.Tensor, ...]:
        """Return the tensors for `joined.names`; a loaded optimizer state has new tensors."""
        state = self._optimizer.state
        kept = [state[p][key] for p, keys in joined.updated for key in keys]
        totals = [self._totals[id(p)] for p, _ in joined.updated] if joined.accumulates else []
        return (*joined.model, *kept, *totals, self._bad)

    def _session(self, served: CachedExport, *, accumulates: bool) -> _Joined:
        found = self._joined.get(id(served))
        if found is None or (accumulates and not found[1].accumulates):
            self._joined.pop(id(served), None)  # first, so that memory is never needed for two
            self._joined[id(served)] = found = served, self._join(served.export, accumulates)
            served.rest()
        return found[1]

    def _join(self, export: Export, accumulates: bool) -> _Joined:
        tell("joining forward, backward and optimizer into one graph")
        graph, in_file_order = export.executed()
        known = {each.name for each in graph.graph.input}
        tensors = {name: each for name, each in export.own_inputs().items() if name in known}
        if gaps := [name for name, each in tensors.items() if not each.is_contiguous()]:
            raise ExportFailed(
                f"{gaps[0]} is not contiguous; make it so, or use engine='ortmodule'"
            )
        updates = list(self._updates(export, tensors))
        updated = tuple((tensors[each.parameter], each.keys) for each in updates)
        if not updates:
            raise ExportFailed("the loss does not depend on any trained parameter")
        for parameter, keys in updated:
            _begin_state(self._optimizer, parameter, keys)
            if accumulates:
                self._totals.setdefault(id(parameter), torch.zeros_like(parameter))
        given = known - set(tensors)
        names = (
            *tensors,
            *(name for each in updates for name in each.state),
            *(each.total for each in updates if accumulates),
            whole_step.BAD,
        )
        joined = whole_step.joined(graph, updates, accumulate=accumulates)
        session = export.plain_session(joined, in_file_order=in_file_order)
        outputs = [each.name for each in joined.graph.output]
        return _Joined(
            Bound(session, outputs),
            joined,
            names,
            tuple(tensors.values()),
            frozenset(given),
            updated,
            accumulates,
        )

    def _updates(self, export: Export, tensors: Mapping[str, torch.Tensor]) -> Iterator[Update]:
        for name, gradient in export.gradients().items():
            parameter = tensors.get(name)
            if parameter is None or id(parameter) not in self._groups:
                continue
            group = self._groups[id(parameter)]
            operator, keys, _ = _kind(self._optimizer, self._optimizer.param_groups[group])
            yield Update(name, gradient, operator, keys, group)


def _kind(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[str, tuple[str, ...], tuple[float, ...]]:
    """Return the operator for parameters of `group`, its state keys and its other options."""
    moments = ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.AdamW):
        # These two are options of ORTTrainer: torch always corrects the bias, and decays first.
        ways = (float(group.get("bias_correction", True)), float(group.get("decay_after", False)))
        return "adamw", (*moments, "step"), (*group["betas"], group["eps"], *ways)
    if isinstance(optimizer, torch.optim.SGD):
        momentum = float(group["momentum"])
        return ("momentum", ("momentum_buffer",), (momentum,)) if momentum else ("sgd", (), ())
    return "lamb", moments, (*group["betas"], group["eps"], float(group["adam"]))


def _begin_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, keys: Sequence[str]
) -> None:
    """Create the state that torch's optimizer has after its first step, with zeros."""
    state = optimizer.state[parameter]
    for key in keys:
        if key not in state:
            state[key] = torch.zeros(()) if key == "step" else torch.zeros_like(parameter.detach())


def _refuse(export: Export) -> None:
    """Raise ExportFailed if the graph of a whole step could compute other results."""
    if export.decisions:
        raise ExportFailed(
            f"forward decides by a tensor's value at {place(*export.decisions[0].place)}, and ORT "
            "can check the decision only after the step; use engine='ortmodule'"
        )
    if export.functions:
        names = ", ".join(each.__qualname__ for each in export.functions)
        raise ExportFailed(f"{names} runs in Python, outside of the graph; use engine='ortmodule'")
