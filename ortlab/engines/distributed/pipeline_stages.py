"""Stages of a sequential model: how it is split, and the stage that this rank has."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ortlab.engines.torch.stepper import training_device
from ortlab.settings import FinetuneSettings


def cut(model: nn.Module, stages: int) -> list[list[str]]:
    """Split a sequential model into stages with about the same number of parameters.

    Args:
        model: The model.
        stages: Number of stages.

    Returns:
        The names of the model's children, by stage.

    Raises:
        ValueError: If the model is no nn.Sequential, if a stage would have nothing to train, or if
            two stages would share a parameter.
    """
    own = f"pipeline_stages={stages}"
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{own} needs an nn.Sequential, whose layers run one after the other, and the model is "
            f"a {type(model).__name__}; choose pipeline_stages=1"
        )
    children = list(model._modules.items())
    weights = [sum(p.numel() for p in part.parameters() if p.requires_grad) for _, part in children]
    trained = sum(1 for weight in weights if weight)
    if trained < stages:
        raise ValueError(
            f"{own} needs that many layers with parameters to train, and the model has {trained}; "
            f"choose pipeline_stages={max(trained, 1)} or fewer"
        )
    bounds = _balanced(weights, stages)
    found = [children[begin:end] for begin, end in itertools.pairwise(bounds)]
    places = Counter(
        parameter
        for each in found
        for parameter in {id(p) for _, m in each for p in m.parameters()}
    )
    for name, parameter in model.named_parameters():
        if places[id(parameter)] > 1:
            raise ValueError(
                f"{own}: layers of two stages share the parameter {name}; choose pipeline_stages=1"
            )
    return [[name for name, _ in each] for each in found]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of stages of which the largest is as small as possible.

    Every stage has a weight above zero; DeepSpeed's ``partition_balanced`` leaves some empty.
    """
    sums = [0, *itertools.accumulate(weights)]

    @functools.cache
    def best(begin: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            size = sums[-1] - sums[begin]
            return (size if size else float("inf")), (len(weights),)
        found: tuple[float, tuple[int, ...]] = (float("inf"), (len(weights),) * left)
        for end in range(begin + 1, len(weights)):
            size = sums[end] - sums[begin]
            if not size:
                continue
            largest, bounds = best(end, left - 1)
            found = min(found, (max(size, largest), (end, *bounds)))
        return found

    return [0, *best(0, stages)[1]]


class Stages:
    """Model of which this rank has one stage, until `restore` loads the weights of all stages.

    Consecutive ranks have the same stage: with 4 ranks and 2 stages, ranks 0 and 1 have the first.

    Args:
        model: The whole model; its parameters and buffers become rank 0's.
        settings: The run's settings.
        group: The process group of all ranks.

    Raises:
        ValueError: If the model cannot be split; see `cut`.
    """

    def __init__(
        self, model: nn.Module, settings: FinetuneSettings, group: dist.ProcessGroup
    ) -> None:
        parallel = settings.parallel
        names = cut(model, parallel.pipeline_stages)
        self.count = parallel.pipeline_stages
        self.device = training_device(parallel.device)
        mesh = init_device_mesh(
            self.device.type,
            (self.count, dist.get_world_size(group) // self.count),
            mesh_dim_names=("stage", "data"),
        )
        self.data, self.between = mesh["data"].get_group(), mesh["stage"].get_group()
        self.place = mesh.get_local_rank("stage")
        model.to(self.device)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), group_src=0, group=group)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.matrices = [name for name, p in trained if p.dim() >= 2]
        self.vectors = [name for name, p in trained if p.dim() < 2]
        self.forms = {name: torch.empty_like(p, device="meta") for name, p in trained}
        self._parts = [
            nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in each))
            for each in names
        ]
        self.own = self._parts[self.place]
        self.note = (
            f"stage {self.place + 1} of {self.count}: layers {names[self.place][0]} to "
            f"{names[self.place][-1]}, "
            f"{sum(p.numel() for p in self.own.parameters()):,} of "
            f"{sum(p.numel() for p in model.parameters()):,} parameters"
        )
        self._others = [
            (place, tensor, tensor.shape)
            for place, part in enumerate(self._parts)
            if place != self.place
            for tensor in (*part.parameters(), *part.buffers())
        ]
        for _, tensor, _ in self._others:
            tensor.data, tensor.grad = tensor.data.new_empty(0), None

    @property
    def is_last(self) -> bool:
        """True for the last stage, which computes the loss."""
        return self.place == self.count - 1

    def together(self, own: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the union of the stages' dictionaries on every rank, in the stages' order.

        Args:
            own: This stage's dictionary.

        Returns:
            The dictionary; its tensors are copies on this rank's device.
        """
        described = {
            name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in own.items()
        }
        all_described: list[Any] = [None] * self.count
        dist.all_gather_object(all_described, described, group=self.between)
        found = {}
        for place, each in enumerate(all_described):
            for name, form in each.items():
                if not _is_form(form):
                    found[name] = form
                    continue
                if place == self.place:
                    value = own[name].detach().clone(memory_format=torch.contiguous_format)
                else:
                    value = torch.empty(form[0], dtype=form[1], device=self.device)
                dist.broadcast(value, group_src=place, group=self.between)
                found[name] = value
        return found

    def restore(self) -> None:
        """Load the weights of the other stages into the model.

        All ranks call it; a second call does nothing.
        """
        for place, part in enumerate(self._parts):
            theirs = [each for each in self._others if each[0] == place]
            whole = [*part.parameters(), *part.buffers()]
            for number, tensor in enumerate(whole if self._others else ()):
                if place != self.place:
                    tensor.data = tensor.data.new_empty(theirs[number][2])
                # The receiving tensor has to be contiguous as well.
                value = tensor.detach().contiguous()
                dist.broadcast(value, group_src=place, group=self.between)
        self._others = []


def _is_form(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], torch.Size)
