"""Tensor parallelism: ranks that have a shard each of every layer, combined with data parallelism.

The shards are plain modules, and ranks exchange activations by the operators of
`ortlab.engines.distributed.exchanges`, so that every engine that torch.compile captures for can run
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from ortlab.engines.base import LossFunction, Report
from ortlab.engines.distributed import exchanges
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.distributed.exchanges import NO_REGION, Neighbors
from ortlab.engines.distributed.layout import Layout, layout_of
from ortlab.engines.distributed.tensor_parallel_plan import FUSED, Part, plan_for
from ortlab.settings import FinetuneSettings

_APART = 1e-3
"""Relative difference of two ranks' gradients of a replicated parameter that is not rounding."""


@dataclass(frozen=True)
class _Shard:
    """Part of a tensor that each of several ranks has.

    Attributes:
        neighbors: The ranks.
        dim: Dimension that is split; None if each rank has the whole tensor.
        blocks: Number of equal blocks along that dimension that are each split.
    """

    neighbors: Neighbors
    dim: int | None
    blocks: int = 1

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of the tensor `whole`."""
        if self.dim is None:
            return whole.detach().clone()
        ranks = self.neighbors
        blocks = whole.detach().chunk(self.blocks, self.dim)
        own = [block.chunk(ranks.size, self.dim)[ranks.rank] for block in blocks]
        return torch.cat(own, self.dim)

    def whole_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks' parts; all of them call it."""
        if self.dim is None:
            return part.detach().clone()
        dim, parts = self.dim, self.neighbors.gather(part.detach())
        blocks = zip(*(each.chunk(self.blocks, dim) for each in parts), strict=True)
        return torch.cat([torch.cat(block, dim) for block in blocks], dim)


class _Layer(nn.Module):
    """This rank's shard of a Linear, or of a Conv1D of transformers, whose weight is transposed."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Module, part: Part, neighbors: Neighbors, region: int) -> None:
        super().__init__()
        self.is_linear = isinstance(layer, nn.Linear)
        self.style, self.neighbors, self.region = part.style, neighbors.number, region
        self.shards: dict[str, _Shard] = {}
        outputs = part.style != "rows"
        blocks = FUSED if part.style == "fused" else 1
        for name, whole in layer._parameters.items():
            if whole is None:
                self.register_parameter(name, None)
                continue
            if name == "bias":
                shard = _Shard(neighbors, 0 if outputs else None, blocks)
            else:
                shard = _Shard(neighbors, 0 if outputs == self.is_linear else 1, blocks)
            self.shards[name] = shard
            own = nn.Parameter(shard.part_of(whole), requires_grad=whole.requires_grad)
            setattr(self, name, own)
        self.train(layer.training)
        self.register_state_dict_post_hook(_make_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_part)  # type: ignore[no-untyped-call]
        # torch.nn.TransformerEncoderLayer would multiply by the weight itself, but for this hook.
        self.register_forward_pre_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the whole layer, or this rank's part of it."""
        region = self.region if self.training else NO_REGION
        if self.style == "rows":
            y: torch.Tensor = exchanges.summed(self._product(x), self.neighbors, region)
            return y if self.bias is None else y + self.bias
        y = self._product(exchanges.entered(x, self.neighbors, region))
        if self.bias is not None:
            y = y + self.bias
        return exchanges.gathered(y, self.neighbors) if self.style == "gathered" else y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight if self.is_linear else self.weight.t())


class ShardedLayers:
    """Layers of a model replaced by sharded ones, until `restore` puts the original layers back.

    State dictionaries of the model have whole tensors, both when they are returned and when they
    are loaded; all neighbors do so together. After `restore` the model has the user's own
    layer objects again, with their own parameters and the trained weights.

    Args:
        model: The user's model.
        plan: How each module is sharded, by its name; see `plan_for`.
        neighbors: The ranks that share the layers.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, Part], neighbors: Neighbors) -> None:
        self._neighbors = neighbors
        self._replaced: list[tuple[nn.Module, str, nn.Module, _Layer]] = []
        self._hooks: list[Any] = []
        self._of: dict[int, tuple[_Shard, torch.Size]] = {}
        regions = {part.region: number for number, part in enumerate(plan.values())}
        for path, part in plan.items():
            if part.style == "summed":
                self._sum_gradients(model.get_submodule(path))
                continue
            parent, _, name = path.rpartition(".")
            region = NO_REGION if part.region is None else regions[part.region]
            self._replace(model.get_submodule(parent), name, part, region)

    def _sum_gradients(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_hook(self._neighbors.sum)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _replace(self, parent: nn.Module, name: str, part: Part, region: int) -> None:
        layer = parent.get_submodule(name)
        made = _Layer(layer, part, self._neighbors, region)
        for tensor_name, original in layer.named_parameters():
            here = made.get_parameter(tensor_name)
            self._of[id(here)] = made.shards[tensor_name], original.shape
            # Release the whole tensor: the shards replace it.
            original.data, original.grad = original.data.new_empty(0), None
        if part.style == "fused":
            around: Any = parent
            around.split_size //= self._neighbors.size
        setattr(parent, name, made)
        self._replaced.append((parent, name, layer, made))

    def shard_of(self, parameter: torch.Tensor) -> _Shard | None:
        """Return how a parameter is sharded, or None if it is not.

        Args:
            parameter: A parameter of the model.
        """
        found = self._of.get(id(parameter))
        return None if found is None else found[0]

    def whole_shape(self, parameter: torch.Tensor) -> torch.Size:
        """Return the shape that a parameter has in one process.

        Args:
            parameter: A parameter of the model, which may be sharded.
        """
        found = self._of.get(id(parameter))
        return parameter.shape if found is None else found[1]

    def is_split(self, parameter: torch.Tensor) -> bool:
        """Return whether other ranks have other parts of a parameter.

        Args:
            parameter: A parameter of the model.
        """
        shard = self.shard_of(parameter)
        return shard is not None and shard.dim is not None

    def restore(self) -> None:
        """Put the original layers back, with the current weights.

        All ranks call it; a second call does nothing.
        """
        while self._hooks:
            self._hooks.pop().remove()
        while self._replaced:
            parent, name, layer, made = self._replaced.pop()
            for tensor_name, original in layer.named_parameters():
                part = made.get_parameter(tensor_name)
                original.data = made.shards[tensor_name].whole_of(part)
            layer.train(made.training)
            if made.style == "fused":
                around: Any = parent
                around.split_size *= self._neighbors.size
            setattr(parent, name, layer)


def _make_whole(made: _Layer, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, shard in made.shards.items():
        state[prefix + name] = shard.whole_of(state[prefix + name])


def _take_part(made: _Layer, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, shard in made.shards.items():
        if prefix + name in state:
            state[prefix + name] = shard.part_of(state[prefix + name])


class TensorRanks(Ranks):
    """Ranks of which ``tensor_parallel`` neighbors share the layers and train on the same rows.

    Ranks 0 to ``tensor_parallel`` - 1 are the first neighbors, and so on. Ranks with the same
    position among their neighbors are data parallel.

    - Dropout masks are the same on all neighbors where each has the whole activation, and different
      where activations are split.
    - The norm of the gradients is that of all shards. Gradients of replicated parameters are
      compared between neighbors at every step: if they differ, the model's plan is wrong, and a
      RuntimeError names the parameter before any weight changes.
    - A rank that fails within forward while its neighbors do not is noticed only by the group's
      timeout: they wait for it in a layer.

    Args:
        module: The module that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings; ``tensor_parallel`` is above 1.
        group: The process group of all ranks.
        layout: Process groups of this rank; None to make them.
        plan: How modules of `owner` are sharded, whose weights are the same on all ranks already;
            None for that of `plan_for`, and to broadcast rank 0's weights.

    Raises:
        ValueError: If the model cannot be sharded; see `plan_for`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
        *,
        settings: FinetuneSettings,
        group: dist.ProcessGroup,
        layout: Layout | None = None,
        plan: Mapping[str, Part] | None = None,
    ) -> None:
        neighbors = settings.parallel.tensor_parallel
        if plan is None:
            plan = plan_for(owner, neighbors)
            for tensor in (*owner.parameters(), *owner.buffers()):
                dist.broadcast(tensor.detach(), group_src=0, group=group)
        self._is_closed = False
        self._layout = layout or layout_of(settings.parallel, group)
        self._neighbors = Neighbors(self._layout.tensor, device)
        before = sum(parameter.numel() for parameter in owner.parameters())
        self._layers = ShardedLayers(owner, plan, self._neighbors)
        here = sum(parameter.numel() for parameter in owner.parameters())
        self._notes = (
            f"tensor parallel {neighbors}: {len(plan)} layers are sharded, and this rank has "
            f"{here:,} of {before:,} parameters",
        )
        try:
            super().__init__(
                module,
                loss,
                owner,
                device,
                settings=settings,
                group=self._layout.data,
                everyone=group,
            )
        except BaseException:
            self._layers.restore()
            raise
        self._neighbors.clock = self._clock

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; RuntimeError after `close`."""
        if self._is_closed:
            raise RuntimeError(
                "this stepper is closed and the model has its whole layers again; prepare a new one"
            )
        self._neighbors.begin()
        with super().together(training=training):
            yield

    def anywhere(self, found: bool) -> bool:
        """See `OneProcess.anywhere`."""
        return self._neighbors.any(found)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `OneProcess.micro_batch`."""
        self._neighbors.begin()
        return super().micro_batch(last=last)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; RuntimeError if neighbors differ in a replicated gradient."""
        return self._squares(gradients).sum().sqrt().to(gradients[0].dtype)

    def _squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the square of each gradient's norm, over its shards; RuntimeError as in `norm`."""
        named = {id(p.grad): (name, p) for name, p in self.owner.named_parameters()}
        split = torch.tensor([self._layers.is_split(named[id(g)][1]) for g in gradients])
        own = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
        norms = torch.stack(self._neighbors.gather(own))
        same = torch.isclose(norms, norms[:1], rtol=_APART, atol=1e-12, equal_nan=True).all(0)
        for number in (~same & ~split.to(same.device)).nonzero().flatten().tolist():
            name, _ = named[id(gradients[number])]
            told = " and ".join(f"{norm:.3g}" for norm in norms[:, number].tolist())
            raise RuntimeError(
                f"the gradient of {name} has norm {told} on ranks that should agree: the parameter "
                "belongs to layers that tensor parallelism splits; choose tensor_parallel=1"
            )
        return torch.where(split.to(norms.device), norms.square().sum(0), norms[0].square())

    def whole_parameters(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """See `OneProcess.whole_parameters`."""
        return [
            (
                name,
                torch.empty(self._layers.whole_shape(p), dtype=p.dtype, device="meta"),
            )
            for name, p in super().whole_parameters(parameters)
        ]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `OneProcess.optimizer_state`; all ranks call it."""
        state = super().optimizer_state(optimizer)
        return {**state, "state": self._each(optimizer, state["state"], _Shard.whole_of)}

    def own(
        self, optimizer: torch.optim.Optimizer, states: Mapping[int, Mapping[str, Any]]
    ) -> Mapping[int, Mapping[str, Any]]:
        """See `OneProcess.own`."""
        return self._each(optimizer, states, _Shard.part_of)

    def _each(
        self,
        optimizer: torch.optim.Optimizer,
        states: Mapping[int, Mapping[str, Any]],
        change: Callable[[_Shard, torch.Tensor], torch.Tensor],
    ) -> dict[int, dict[str, Any]]:
        """Return `states` with `change` applied to the tensors of sharded parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        changed = {}
        for number, state in states.items():
            shard = self._layers.shard_of(parameters[number])
            changed[number] = {
                name: change(shard, value)
                if shard is not None and isinstance(value, torch.Tensor) and value.dim()
                else value
                for name, value in state.items()
            }
        return changed

    def told(self, report: Report) -> Report:
        """See `Ranks.told`."""
        found = super().told(report)
        return dataclasses.replace(found, notes=(*found.notes, *self._notes))

    def _restore(self) -> None:
        """Give the model its own layers again, with the current weights."""
        self._layers.restore()

    def close(self) -> None:
        """Restore the whole model; all ranks call it, and a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._restore()
        super().close()
        self._layout.leave()
