"""ZeRO's stage 3 with engine ``ort``: torch's FSDP2, and each block of the model in ORT.

torch.distributed.fsdp.fully_shard (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
gathers the weights of a block before it runs and releases them afterwards, forward and backward, so
that a rank has the whole weights of one block at a time. An engine that reads all weights at once
would need them all; a block that is wrapped alone does not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ortlab.engines.base import (
    Batch,
    Engine,
    GraphCount,
    LossFunction,
    Report,
    StateBytes,
    wrapped_model,
)
from ortlab.engines.distributed.data_parallel import Ranks
from ortlab.engines.single_process import OneProcess, Share
from ortlab.engines.torch.stepper import Eager, TorchStepper, training_device
from ortlab.settings import FinetuneSettings


def prepare(
    engine: Engine,
    model: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    group: dist.ProcessGroup,
) -> TorchStepper:
    """Return a stepper of one rank's shards; `steppers.prepare` calls it.

    The blocks are the layers of the model's lists of layers, or the children of an nn.Sequential.
    What is outside of them, such as embeddings and a head, runs in eager torch.

    Args:
        engine: The engine that executes each block.
        model: The model. Its own weights are released until the stepper is closed.
        loss: The loss function, or None where the model returns its loss.
        settings: The run's settings; ``zero_stage`` is 3.
        group: The process group of all ranks.

    Returns:
        The stepper.

    Raises:
        ValueError: See `blocks_of`.
    """
    record = wrapped_model(model)
    model = model if record is None else record.module
    names = blocks_of(model, settings)
    device = training_device(settings.parallel.device)
    model.to(device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=group)
    sharded = copy.deepcopy(model)
    own = settings.model.replace(precision="fp32")  # the stepper sets the precision
    wrapped = []
    for name in names:
        parent, _, last = name.rpartition(".")
        block = engine.wrap(sharded.get_submodule(name), own)
        sharded.get_submodule(parent)._modules[last] = block
        wrapped.append(block)
    mesh = DeviceMesh.from_group(group, device.type)
    for block in (*wrapped, sharded):
        fully_shard(block, mesh=mesh)
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data.new_empty(0), None
    processes = functools.partial(
        ShardedRanks, settings=settings, group=group, mesh=mesh, whole=model
    )
    stepper = Eager().prepare(sharded, loss, settings, processes=processes, stepper=ShardedStepper)
    stepper = cast("ShardedStepper", stepper)
    stepper.reports = [functools.partial(engine.report, block) for block in wrapped]
    stepper.reseed(settings.data.seed)
    return stepper


def blocks_of(model: nn.Module, settings: FinetuneSettings) -> list[str]:
    """Return the names of the modules whose weights are gathered together.

    Args:
        model: The model.
        settings: The run's settings, for the message.

    Returns:
        Names of the members of the outermost lists of layers that have parameters.

    Raises:
        ValueError: If there are none, or if two of them share a parameter.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(name == each or name.startswith(f"{each}.") for each in found):
            continue
        for child, part in module.named_children():
            if any(True for _ in part.parameters()):
                found.append(f"{name}.{child}".lstrip("."))
    if not found:
        raise ValueError(
            f"zero_stage=3 with engine={settings.model.engine!r} shards layers in a ModuleList or "
            f"a Sequential, and {type(model).__name__} has none; choose zero_stage=2, or "
            "engine='eager'"
        )
    inside = [{id(p) for p in model.get_submodule(name).parameters()} for name in found]
    rest = {
        id(p) for name, p in model.named_parameters(remove_duplicate=False) if not _in(name, found)
    }
    places = Counter(each for group in (*inside, rest) for each in group)
    for name, parameter in model.named_parameters():
        if places[id(parameter)] > 1:
            raise ValueError(
                f"zero_stage=3 with engine={settings.model.engine!r}: {name} is shared with "
                "another layer, and each is gathered by itself; choose zero_stage=2, or "
                "engine='eager'"
            )
    return found


def _in(name: str, modules: Sequence[str]) -> bool:
    """Return whether a parameter is in one of the modules, by name."""
    return name.startswith(tuple(f"{each}." for each in modules))


def _whole(value: Any) -> Any:
    """Return a sharded tensor as a whole one, gathered from all ranks, and anything else as is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class ShardedRanks(Ranks):
    """Ranks that have a shard each of weights, gradients and the optimizer's state.

    A rank that fails within forward while others do not is noticed only by the group's timeout:
    they wait for it in the next block.

    Args:
        module: The sharded copy of the model.
        loss: The loss function, or None where the model returns its loss.
        owner: The same.
        device: The device that this rank trains on.
        settings: The run's settings.
        group: The process group of all ranks.
        mesh: The ranks, of one dimension.
        whole: The user's model, which gets the trained weights on `close`.
    """

    sharer = "torch's FSDP2"

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        owner: nn.Module,
        device: torch.device,
        *,
        settings: FinetuneSettings,
        group: dist.ProcessGroup,
        mesh: DeviceMesh,
        whole: nn.Module,
    ) -> None:
        self._mesh = mesh
        self._whole: nn.Module | None = whole
        self.sharded: dict[int, torch.Tensor] = {}
        super().__init__(module, loss, owner, device, settings=settings, group=group)

    def _made_parallel(self) -> Any:
        return OneProcess(self.module, self.loss, self.owner, self.device).objective

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """See `OneProcess.optimizer`; it updates this rank's shards, as plain tensors."""
        return kind(
            [{**group, "params": self._locals(group["params"])} for group in groups], **defaults
        )

    def _locals(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards, in the same memory as FSDP2's."""
        found: list[torch.Tensor] = []
        for parameter in parameters:
            own = nn.Parameter(_local(parameter.detach()))
            self.sharded[id(own)] = parameter
            found.append(own)
        return found

    def share(self, batch: Batch) -> Share:
        """See `Ranks.share`; FSDP2 averages the gradients."""
        share = super().share(batch)
        return dataclasses.replace(share, factor=share.factor * self._size)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `OneProcess.micro_batch`; each adds to the shards of the gradients."""
        return contextlib.nullcontext()

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `OneProcess.norm`."""
        own = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
        squares = torch.stack(own).square().sum()
        return self._agree([squares])[0].sqrt().to(gradients[0].dtype)

    def weights(self) -> dict[str, Any]:
        """See `OneProcess.weights`; all ranks call it."""
        return {name: _whole(value) for name, value in self.owner.state_dict().items()}

    def take_weights(self, state: Mapping[str, Any]) -> None:
        """See `OneProcess.take_weights`."""
        own = self.owner.state_dict()
        self.owner.load_state_dict({name: self._part(state[name], own[name]) for name in own})

    def _part(self, value: Any, like: Any) -> Any:
        """Return this rank's shard of a whole tensor, if `like` is sharded."""
        if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        return distribute_tensor(value, self._mesh, like.placements, src_data_rank=None)

    def whole_parameters(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[str, torch.Tensor]]:
        """See `OneProcess.whole_parameters`."""
        return [
            (name, torch.empty(p.shape, dtype=p.dtype, device="meta"))
            for name, p in super().whole_parameters([self.sharded[id(p)] for p in parameters])
        ]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `OneProcess.optimizer_state`; all ranks call it."""
        state = super().optimizer_state(optimizer)
        likes = self._likes(optimizer)
        whole = {
            number: {name: self._gathered(value, likes[number]) for name, value in each.items()}
            for number, each in state["state"].items()
        }
        return {**state, "state": whole}

    def _likes(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return FSDP2's parameters in the order of the optimizer's."""
        return [self.sharded[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def _gathered(self, value: Any, like: torch.Tensor) -> Any:
        """Return the whole tensor of which this rank has a shard, if `like` is sharded."""
        if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or not value.dim():
            return value
        form: dict[str, Any] = {"shape": like.shape, "stride": like.stride(), "run_check": False}
        return _whole(DTensor.from_local(value, self._mesh, like.placements, **form))

    def own(
        self, optimizer: torch.optim.Optimizer, states: Mapping[int, Mapping[str, Any]]
    ) -> Mapping[int, Mapping[str, Any]]:
        """See `OneProcess.own`."""
        likes = self._likes(optimizer)
        return {
            number: {name: _local(self._part(value, likes[number])) for name, value in each.items()}
            for number, each in states.items()
        }

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; RuntimeError after `close`."""
        if self._whole is None:
            raise RuntimeError(
                "this stepper is closed and the model has all its weights again; prepare a new one"
            )
        with super().together(training=training):
            yield

    def close(self) -> None:
        """Give the user's model all weights; all ranks call it, and a second call does nothing."""
        if self._whole is None:
            return
        for own, sharded in zip(self._whole.parameters(), self.owner.parameters(), strict=True):
            own.data = _whole(sharded.detach()).clone()
        for ours, buffer in zip(self._whole.buffers(), self.owner.buffers(), strict=True):
            ours.copy_(buffer)
        self._whole = None
        super().close()


def _local(value: Any) -> Any:
    """Return this rank's shard of a sharded tensor, and anything else as is."""
    return value.to_local() if isinstance(value, DTensor) else value


class ShardedStepper(TorchStepper):
    """Stepper of shards, whose report is that of the blocks.

    Attributes:
        reports: Functions that return the report of each block.
    """

    reports: Sequence[Any] = ()
    _processes: ShardedRanks

    def _update(
        self, loss: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See `TorchStepper._update`; of the shards."""
        for own in self._parameters:
            gradient = self._processes.sharded[id(own)].grad
            own.grad = None if gradient is None else _local(gradient)
        return super()._update(loss, lr)

    def _forget_gradients(self) -> None:
        """See `TorchStepper._forget_gradients`."""
        super()._forget_gradients()
        self._owner.zero_grad(set_to_none=True)

    def bytes(self) -> StateBytes:
        """See `TorchStepper.bytes`."""
        held = sum(_local(p).nbytes for p in self._owner.parameters())
        return dataclasses.replace(super().bytes(), parameters=held)

    def report(self) -> Report:
        """See `Stepper.report`; the notes are those of each block, once."""
        found = [report() for report in self.reports]
        notes = dict.fromkeys(note for each in found for note in each.notes)
        # Each block tells ORT's share of its own time.
        remarks = dict.fromkeys(
            remark for each in found for remark in each.remarks if "% of the step" not in remark
        )
        counts = [each.graphs for each in found if each.graphs is not None]
        reasons = [each.fallback_reason for each in found if each.fallback_reason]
        return self._processes.told(
            dataclasses.replace(
                found[0],
                engine_used=found[0].engine_used if not reasons else "eager",
                fallback_reason=reasons[0] if reasons else None,
                export_s=sum(each.export_s for each in found),
                check_s=sum(each.check_s for each in found),
                notes=(*notes, f"{len(found)} blocks, each sharded and in ORT by itself"),
                remarks=tuple(remarks),
                graphs=GraphCount(
                    sum(each.graphs for each in counts),
                    sum(each.ort_segments or 0 for each in counts),
                    sum(each.torch_segments or 0 for each in counts),
                    None,
                    None,
                ),
            )
        )
