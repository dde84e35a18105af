"""Tensor parallelism: ranks that share each layer of a model, beside those that share the data.

By torch.distributed.tensor (https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
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
"""The relative difference of two ranks' gradients of what both have whole that is no rounding."""


_NUMBERS = itertools.count(1)
_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Any, tuple[DeviceMesh, DeviceMesh]]]
_MESHES = WeakKeyDictionary()


def _meshes(
    device_type: str, neighbours: int, everyone: dist.ProcessGroup
) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks that share this one's layers, and those that have its place in theirs.

    A process group has one such pair. torch keeps what it works out for a mesh, and with it the
    process groups of the first mesh that is equal, alive or not (2.13: "could not resolve the
    process group"); a name of its own makes each unlike all others.
    """
    known = _MESHES.setdefault(everyone, {})
    if (device_type, neighbours) not in known:
        name = f"tensor{next(_NUMBERS)}"
        shape = dist.get_world_size(everyone) // neighbours, neighbours
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", name))
        known[device_type, neighbours] = mesh[name], mesh["data"]
    return known[device_type, neighbours]


class _Shard(nn.Module):
    """A rank's part of a tensor, seen by its layer as the whole."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements = tuple(placements)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, of which this rank has `part`."""
        whole: torch.Tensor = DTensor.from_local(part, self.mesh, self.placements, run_check=False)
        return whole

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        shared = distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)
        return shared.to_local().detach().clone()

    def whole_of(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, put together from all ranks' parts; all of them call it."""
        shared: Any = self(part.detach().contiguous())
        whole: torch.Tensor = shared.full_tensor()
        return whole


class _Regions:
    """Random numbers where activations are split: each rank's own, so that masks differ.

    Elsewhere ranks that share a layer draw the same. A region's numbers depend on what would be
    drawn next outside of it, so that one that is computed again (gradient checkpointing gives the
    state of before back) draws what it drew.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._inside: str | None = None
        self._outside: RandomStates | None = None

    def begin(self) -> None:
        """No region is open; one may have been left when its second forward stopped early."""
        self._inside = self._outside = None

    def enter(self, region: str) -> None:
        """Begins `region`, unless another of its layers did."""
        if self._inside == region:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._inside, self._outside = region, RandomStates.now()
        own = int(np.random.SeedSequence([seed, self._rank]).generate_state(1)[0])
        torch.manual_seed(own)

    def leave(self, region: str) -> None:
        """Goes on with what all ranks draw."""
        if self._inside == region and self._outside is not None:
            self._outside.give_back()
            self.begin()


class ShardedLayers:
    """Shards in the places of a model's layers, until `restore` puts the layers back.

    State dictionaries of the model are the whole one's, both ways; all ranks of `mesh`, which has
    one dimension, ask for them together. The layers are the user's own objects in the end, with
    their own parameters and the trained weights.
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
            original.data, original.grad = original.data.new_empty(0), None  # shards are enough
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
        """How `parameter` is a part of a whole; None where it is one."""
        found = self._of.get(id(parameter))
        return None if found is None else found[0]

    def whole_shape(self, parameter: torch.Tensor) -> torch.Size:
        """The shape that `parameter` has in one process."""
        found = self._of.get(id(parameter))
        return parameter.shape if found is None else found[1]

    def is_split(self, parameter: torch.Tensor) -> bool:
        """Whether other ranks hold other parts of `parameter`."""
        shard = self.shard_of(parameter)
        return shard is not None and any(each.is_shard() for each in shard.placements)

    @property
    def is_restored(self) -> bool:
        """Whether the layers are back in their places."""
        return not self._replaced

    def restore(self) -> None:
        """Puts the layers back, with the weights of now; all ranks call it. Twice is fine."""
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
    """This rank's part of the parameter `name` of a sharded layer."""
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
    """Ranks of which ``tensor_parallel`` neighbours share the layers, and take the same rows.

    Ranks 0 to ``tensor_parallel`` - 1 are the first such neighbours, and so on; those with the same
    place among their neighbours are data parallel.

    - Dropout where every neighbour has the whole activation draws the same mask on all of them; in
      a region where activations are split each has a mask of its own.
    - The norm of the gradients is that of all shards. Gradients of what neighbours have whole are
      compared at every step: where they differ a model's plan is wrong, and RuntimeError says which
      parameter's, before any weight changes.
    - A rank that fails within forward where its neighbours do not is noticed by the group's timeout
      alone: they wait for it in a layer.
    - ``communication_ms`` is without what the layers themselves exchange.
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
        neighbours = settings.tensor_parallel
        plan = plan_for(owner, neighbours)
        self._neighbours, data = _meshes(device.type, neighbours, group)
        for tensor in (*owner.parameters(), *owner.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        before = sum(parameter.numel() for parameter in owner.parameters())
        self._layers = ShardedLayers(owner, plan, self._neighbours)
        here = sum(parameter.numel() for parameter in owner.parameters())
        self._note = (
            f"tensor parallel {neighbours}: {len(plan)} layers are shared, and this rank has "
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
                "this stepper is closed, and the model has its whole layers again; prepare another"
            )
        self._layers.regions.begin()
        with super().together(training=training):
            yield

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `OneProcess.micro_batch`."""
        self._layers.regions.begin()
        return super().micro_batch(last=last)

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`; RuntimeError where neighbours differ in what all have whole."""
        named = {id(p.grad): (name, p) for name, p in self.owner.named_parameters()}
        split = torch.tensor([self._layers.is_split(named[id(g)][1]) for g in gradients])
        own = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients])
        found = [torch.empty_like(own) for _ in range(self._neighbours.size())]
        with self._clock:
            dist.all_gather(found, own, group=self._neighbours.get_group())
        norms = torch.stack(found)
        same = torch.isclose(norms, norms[:1], rtol=_APART, atol=1e-12, equal_nan=True).all(0)
        for number in (~same & ~split.to(same.device)).nonzero().flatten().tolist():
            name, _ = named[id(gradients[number])]
            told = " and ".join(f"{norm:.3g}" for norm in norms[:, number].tolist())
            raise RuntimeError(
                f"the gradient of {name} has norm {told} on ranks that all have it whole: it "
                "belongs to what tensor parallelism splits; choose tensor_parallel=1"
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
                torch.empty(self._layers.whole_shape(p), device="meta"),
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
        """`states` with what has a shard's dimensions changed."""
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
        """Gives the model its whole layers back; all ranks call it. Twice is fine."""
        if self._layers.is_restored:
            return
        self._layers.restore()
        super().close()
