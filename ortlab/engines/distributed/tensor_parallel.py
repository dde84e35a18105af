"""Tensor parallelism: ranks that have a shard each of every layer, combined with data parallelism.

It uses torch.distributed.tensor
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

from ortlab.engines.base import LossFunction, Report
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.distributed.tensor_parallel_plan import Part, plan_for
from ortlab.settings import FinetuneSettings
from ortlab.utils.rng import RandomStates

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rows": RowwiseParallel,
}
_APART = 1e-3
"""Relative difference of two ranks' gradients of a replicated parameter that is not rounding."""


_NUMBERS = itertools.count(1)
_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Any, tuple[DeviceMesh, DeviceMesh]]]
_MESHES = WeakKeyDictionary()


def _meshes(
    device_type: str, neighbors: int, everyone: dist.ProcessGroup
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of the ranks that share this rank's layers, and its data parallel mesh.

    A process group has one such pair. torch caches what it derives from a mesh, including the
    process groups of the first equal mesh even after they were destroyed (2.13: "could not resolve
    the process group"); a unique name makes each mesh different from all others.
    """
    known = _MESHES.setdefault(everyone, {})
    if (device_type, neighbors) not in known:
        name = f"tensor{next(_NUMBERS)}"
        shape = dist.get_world_size(everyone) // neighbors, neighbors
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", name))
        known[device_type, neighbors] = mesh[name], mesh["data"]
    return known[device_type, neighbors]


class _Shard(nn.Module):
    """Parametrization that presents a rank's part of a tensor to its layer as the whole tensor."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements = tuple(placements)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, a DTensor, of which this rank has `part`."""
        whole: torch.Tensor = DTensor.from_local(part, self.mesh, self.placements, run_check=False)
        return whole

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of the tensor `whole`."""
        shared = distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)
        return shared.to_local().detach().clone()

    def whole_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks' parts; all of them call it."""
        shared: Any = self(part.detach().contiguous())
        whole: torch.Tensor = shared.full_tensor()
        return whole


class _Regions:
    """Regions of a model whose activations are split, where each rank draws its own dropout masks.

    Outside of the regions, ranks that share a layer draw the same numbers. The seed of a region is
    the next number drawn outside, so a region that is recomputed (gradient checkpointing restores
    the generator's state) draws the same masks again.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._inside: str | None = None
        self._outside: RandomStates | None = None

    def begin(self) -> None:
        """Close any open region, such as one whose recomputation stopped early."""
        self._inside = self._outside = None

    def enter(self, region: str) -> None:
        """Open `region`, unless another of its layers has opened it."""
        if self._inside == region:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._inside, self._outside = region, RandomStates.now()
        own = int(np.random.SeedSequence([seed, self._rank]).generate_state(1)[0])
        torch.manual_seed(own)

    def leave(self, region: str) -> None:
        """Close `region` and restore the generators that all ranks share."""
        if self._inside == region and self._outside is not None:
            self._outside.give_back()
            self.begin()


class ShardedLayers:
    """Layers of a model replaced by sharded ones, until `restore` puts the original layers back.

    State dictionaries of the model have whole tensors, both when they are returned and when they
    are loaded; all ranks of the mesh do so together. After `restore` the model has the user's own
    layer objects again, with their own parameters and the trained weights.

    Args:
        model: The user's model.
        plan: How each module is sharded, by its name; see `plan_for`.
        mesh: The ranks that share the layers, of one dimension.
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, Part], mesh: DeviceMesh) -> None:
        self.regions = _Regions(mesh.get_local_rank())
        self._replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self._hooks: list[Any] = []
        self._of: dict[int, tuple[_Shard, torch.Size]] = {}
        for path, part in plan.items():
            if part.style == "summed":
                self._sum_gradients(model.get_submodule(path), mesh)
                continue
            parent, _, name = path.rpartition(".")
            self._replace(model.get_submodule(parent), name, part, mesh)

    def _sum_gradients(self, module: nn.Module, mesh: DeviceMesh) -> None:
        group = mesh.get_group()

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        for parameter in module.parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(summed))  # type: ignore[no-untyped-call]

    def _replace(self, parent: nn.Module, name: str, part: Part, mesh: DeviceMesh) -> None:
        layer = parent.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        own = layer.bias is not None
        made = nn.Linear(layer.in_features, layer.out_features, bias=own, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        made.train(layer.training)
        parallelize_module(made, mesh, _STYLES[part.style](), src_data_rank=None)
        for tensor_name, original in list(layer.named_parameters()):
            shared: Any = getattr(made, tensor_name)
            shard = _Shard(mesh, shared.placements)
            here = nn.Parameter(
                shared.to_local().detach().clone(), requires_grad=original.requires_grad
            )
            setattr(made, tensor_name, here)
            parametrize.register_parametrization(made, tensor_name, shard, unsafe=True)
            self._of[id(parameter_of(made, tensor_name))] = shard, original.shape
            # Release the whole tensor: the shards replace it.
            original.data, original.grad = original.data.new_empty(0), None
        made.register_state_dict_post_hook(_make_whole)  # type: ignore[no-untyped-call]
        made.register_load_state_dict_pre_hook(_take_part)  # type: ignore[no-untyped-call]
        if (region := part.region) is not None and part.style == "columns":
            made.register_forward_hook(lambda module, *_: self._enter(module, region))
        elif region is not None:
            made.register_forward_pre_hook(lambda *_: self.regions.leave(region), prepend=True)
        setattr(parent, name, made)
        self._replaced.append((parent, name, layer, made))

    def _enter(self, module: nn.Module, region: str) -> None:
        if module.training:
            self.regions.enter(region)

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
        return shard is not None and any(each.is_shard() for each in shard.placements)

    @property
    def is_restored(self) -> bool:
        """True if the model has its original layers again."""
        return not self._replaced

    def restore(self) -> None:
        """Put the original layers back, with the current weights.

        All ranks call it; a second call does nothing.
        """
        while self._hooks:
            self._hooks.pop().remove()
        while self._replaced:
            parent, name, layer, made = self._replaced.pop()
            for tensor_name, original in layer.named_parameters():
                part = parameter_of(made, tensor_name)
                shard = self._of[id(part)][0]
                original.data = shard.whole_of(part)
            layer.train(made.training)
            setattr(parent, name, layer)


def parameter_of(made: nn.Module, name: str) -> torch.Tensor:
    """Return this rank's part of a parameter of a sharded layer.

    Args:
        made: The sharded layer.
        name: The parameter's name in the original layer.
    """
    part: torch.Tensor = made.get_parameter(_inner(name))
    return part


def _inner(name: str) -> str:
    return f"parametrizations.{name}.original"


def _shards(made: nn.Module) -> Iterator[tuple[str, _Shard]]:
    parametrizations: Any = made.parametrizations
    return ((name, each[0]) for name, each in parametrizations.items())


def _make_whole(made: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, shard in _shards(made):
        state[prefix + name] = shard.whole_of(state.pop(prefix + _inner(name)))


def _take_part(made: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, shard in _shards(made):
        if prefix + name in state:
            state[prefix + _inner(name)] = shard.part_of(state.pop(prefix + name))


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
    - ``communication_ms`` does not include the exchanges within the layers.

    Args:
        module: The module that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings; ``tensor_parallel`` is above 1.
        group: The process group of all ranks.

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
    ) -> None:
        neighbors = settings.parallel.tensor_parallel
        plan = plan_for(owner, neighbors)
        self._neighbors, data = _meshes(device.type, neighbors, group)
        for tensor in (*owner.parameters(), *owner.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        before = sum(parameter.numel() for parameter in owner.parameters())
        self._layers = ShardedLayers(owner, plan, self._neighbors)
        here = sum(parameter.numel() for parameter in owner.parameters())
        self._note = (
            f"tensor parallel {neighbors}: {len(plan)} layers are sharded, and this rank has "
            f"{here:,} of {before:,} parameters"
        )
        try:
            super().__init__(
                module,
                loss,
                owner,
                device,
                settings=settings,
                group=data.get_group(),
                everyone=group,
            )
        except BaseException:
            self._layers.restore()
            raise

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; RuntimeError after `close`."""
        if self._layers.is_restored:
            raise RuntimeError(
                "this stepper is closed and the model has its whole layers again; prepare a new one"
            )
        self._layers.regions.begin()
        with super().together(training=training):
            yield

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `OneProcess.micro_batch`."""
        self._layers.regions.begin()
        return super().micro_batch(last=last)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; RuntimeError if neighbors differ in a replicated gradient."""
        named = {id(p.grad): (name, p) for name, p in self.owner.named_parameters()}
        split = torch.tensor([self._layers.is_split(named[id(g)][1]) for g in gradients])
        own = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
        found = [torch.empty_like(own) for _ in range(self._neighbors.size())]
        with self._clock:
            dist.all_gather(found, own, group=self._neighbors.get_group())
        norms = torch.stack(found)
        same = torch.isclose(norms, norms[:1], rtol=_APART, atol=1e-12, equal_nan=True).all(0)
        for number in (~same & ~split.to(same.device)).nonzero().flatten().tolist():
            name, _ = named[id(gradients[number])]
            told = " and ".join(f"{norm:.3g}" for norm in norms[:, number].tolist())
            raise RuntimeError(
                f"the gradient of {name} has norm {told} on ranks that should agree: the parameter "
                "belongs to layers that tensor parallelism splits; choose tensor_parallel=1"
            )
        squares = torch.where(split.to(norms.device), norms.square().sum(0), norms[0].square())
        return squares.sum().sqrt().to(gradients[0].dtype)

    def whole_parameters(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """See `OneProcess.whole_parameters`."""
        return [
            (
                name.replace("parametrizations.", "").removesuffix(".original")
                if self._layers.shard_of(p) is not None
                else name,
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
        return dataclasses.replace(found, notes=(*found.notes, self._note))

    def close(self) -> None:
        """Restore the model's whole layers; all ranks call it, and a second call does nothing."""
        if self._layers.is_restored:
            return
        self._layers.restore()
        super().close()
