"""A model's whole step in ORT: one call for forward, backward and optimizer.

The graph is the one that the engine ``ort`` exports and checks against eager torch; what its
session runs is joined with the optimizer's nodes (`kernels.whole_step`). Weights and
moments stay where torch has them: ORT works in that memory, and nothing is copied.
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
    """`model` and its loss as one module: what a batch gives is the loss."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self._original_module = model  # ORTModule's name, which is left out where users see names
        self.loss = loss
        self.training = model.training

    def forward(self, *given: Any, **named: Any) -> Any:
        """The loss of a batch, a scalar; see `arguments`."""
        batch = named or (given[0] if len(given) == 1 else list(given))
        return batches.forward(self._original_module, batch, self.loss).loss


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`batch` as arguments of `WithLoss`."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


@dataclass(frozen=True)
class Outcome:
    """What a call gave: the model's outputs, the loss first, and what became of the step.

    ``norm`` is that of the gradients so far, before they were clipped.
    """

    outputs: tuple[torch.Tensor, ...]
    norm: torch.Tensor


@dataclass(frozen=True)
class _Joined:
    """The session of a whole step.

    ``graph`` is what it runs. ``names`` are those of its inputs that last, the ``model``'s tensors
    first; ``given`` those that come with each call. ``updated`` are the parameters, with what the
    optimizer keeps of each.
    """

    bound: Bound
    graph: onnx.ModelProto
    names: tuple[str, ...]
    model: tuple[torch.Tensor, ...]
    given: frozenset[str]
    updated: tuple[tuple[torch.Tensor, tuple[str, ...]], ...]
    accumulates: bool


class FusedStep:
    """Steps of what `execution` executes, a `WithLoss`, under `optimizer`.

    `optimizer` is one of torch's, for its groups and its state: it never steps itself. `bad` is set
    where a loss or a norm was not finite; from then on nothing is updated.
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
        """What serves `batch`, checked; None where torch has to run the model.

        ExportFailed where a whole step would not be the model's.
        """
        self._execution.module.training = True
        served = self._execution.served_for(*arguments(batch))
        if served is None and self._execution.report().engine_used == "ort":
            raise ExportFailed(
                f"forward changes the model ({self._execution.edited()}) with every call, so that "
                "no graph is the next call's; use engine='ort'"
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
        clip_norm: float | None = None,
    ) -> Outcome:
        """Puts a micro-batch, `number` of so many, through the graph; the last one ends the step.

        The gradient is the mean of theirs. The groups of the optimizer say the rates.
        """
        joined = self._session(served, accumulates=of > 1)
        inputs = served.export.inputs(*arguments(batch))
        given = {name: tensor for name, tensor in inputs.items() if name in joined.given}
        most = math.inf if clip_norm is None else clip_norm
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
        """The graph of the whole step that `run` has for `served`."""
        return self._joined[id(served)][1].graph

    def gradient_bytes(self) -> int:
        """What is kept of gradients from call to call."""
        return sum(each.nbytes for each in self._totals.values())

    def close(self) -> None:
        """Gives back sessions and gradients."""
        self._joined.clear()
        self._totals.clear()

    def _lasting(self, joined: _Joined) -> tuple[torch.Tensor, ...]:
        """What the inputs called `joined.names` are now: a state that was loaded lies elsewhere."""
        state = self._optimizer.state
        kept = [state[p][key] for p, keys in joined.updated for key in keys]
        totals = [self._totals[id(p)] for p, _ in joined.updated] if joined.accumulates else []
        return (*joined.model, *kept, *totals, self._bad)

    def _session(self, served: CachedExport, *, accumulates: bool) -> _Joined:
        found = self._joined.get(id(served))
        if found is None or (accumulates and not found[1].accumulates):
            self._joined.pop(id(served), None)  # so that there are never two with their memory
            self._joined[id(served)] = found = served, self._join(served.export, accumulates)
            served.rest()
        return found[1]

    def _join(self, export: Export, accumulates: bool) -> _Joined:
        tell("joining forward, backward and optimizer to one graph")
        graph, in_file_order = export.executed()
        known = {each.name for each in graph.graph.input}
        tensors = {name: each for name, each in export.own_inputs().items() if name in known}
        if gaps := [name for name, each in tensors.items() if not each.is_contiguous()]:
            raise ExportFailed(f"{gaps[0]} is not contiguous; make it so, or use engine='ort'")
        updates = list(self._updates(export, tensors))
        updated = tuple((tensors[each.parameter], each.keys) for each in updates)
        if not updates:
            raise ExportFailed("the loss depends on no parameter that is trained")
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
    """The operator that steps parameters of `group`, what is kept of each, and further rates."""
    moments = ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.AdamW):
        # The last two are ORTTrainer's own: torch's optimizer always corrects, and decays before.
        ways = (float(group.get("bias_correction", True)), float(group.get("decay_after", False)))
        return "adamw", (*moments, "step"), (*group["betas"], group["eps"], *ways)
    if isinstance(optimizer, torch.optim.SGD):
        momentum = float(group["momentum"])
        return ("momentum", ("momentum_buffer",), (momentum,)) if momentum else ("sgd", (), ())
    return "lamb", moments, (*group["betas"], group["eps"], float(group["adam"]))


def _begin_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, keys: Sequence[str]
) -> None:
    """What torch's optimizer would keep of `parameter` from its first step on, at zero."""
    state = optimizer.state[parameter]
    for key in keys:
        if key not in state:
            state[key] = torch.zeros(()) if key == "step" else torch.zeros_like(parameter.detach())


def _refuse(export: Export) -> None:
    """ExportFailed where a whole step would be another one than the model's."""
    if export.decisions:
        raise ExportFailed(
            f"forward decides by a tensor's value at {place(*export.decisions[0].place)}, and "
            "whether that was right is known only after a step; use engine='ort'"
        )
    if export.functions:
        names = ", ".join(each.__qualname__ for each in export.functions)
        raise ExportFailed(f"{names} runs in Python, apart from the graph; use engine='ort'")
