"""State of a DeepSpeed run in the form of one process: gathered from the ranks' shards, and back.

Weights and optimizer state have the names and shapes of the whole model, so that a checkpoint moves
between numbers of workers and ZeRO stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.base import StateBytes
from ortlab.engines.distributed.comm_timer import Clock
from ortlab.engines.distributed.deepspeed_library import imported, repartition


@dataclass(frozen=True)
class Layout:
    """Model and optimizer as one process has them, and how the ranks shard them.

    ``groups`` are the trained parameters by the optimizer's groups. ``has_copies`` says that the
    weights are bfloat16 and the optimizer updates a float32 copy, ``offloads`` that the optimizer
    runs in host memory.
    """

    owner: nn.Module
    optimizer: torch.optim.Optimizer
    groups: list[list[nn.Parameter]]
    names: Mapping[int, str]
    stage: int
    has_copies: bool
    offloads: bool
    group: dist.ProcessGroup
    device: torch.device
    clock: Clock

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trained parameters, in the optimizer's order."""
        return [parameter for group in self.groups for parameter in group]

    @property
    def is_apart(self) -> bool:
        """True if the optimizer updates memory that is not the weights' own."""
        return self.has_copies or self.offloads

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name that `parameter` has in the user's model."""
        return self.names[id(parameter)]

    def forms(self) -> dict[str, Any]:
        """Return the model's state dictionary without values, for `check_model` to compare.

        Returns:
            Float32 tensors on the device "meta", in the shapes of the whole model; buffers as they
            are.
        """
        state = self.owner.state_dict()
        for name, parameter in self.owner.named_parameters(remove_duplicate=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            state[name] = torch.empty(shape, dtype=torch.float32, device="meta")
        return state

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and form of each trained parameter, in the optimizer's order."""
        forms = self.forms()
        return [(self.name_of(p), forms[self.name_of(p)]) for p in self.trained]

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the ``param_groups`` of the optimizer's state dictionary in one process."""
        found, number = [], 0
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            rest = {name: value for name, value in group.items() if name != "params"}
            found.append({**rest, "params": list(range(number, number + len(parameters)))})
            number += len(parameters)
        return found

    def check_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Check that the parameters of each group have taken the same number of steps.

        DeepSpeed has one flat tensor, and with it one step count, for each group.

        Args:
            states: The optimizer's state by the number of the parameter.

        Raises:
            ValueError: If two parameters of a group differ.
        """
        number = 0
        for parameters in self.groups:
            found = []
            for parameter in parameters:
                state = states.get(number)
                number += 1
                if state:
                    single = {name: float(v) for name, v in state.items() if v.dim() == 0}
                    found.append((self.name_of(parameter), single))
            for name, single in found[1:]:
                if single != found[0][1]:
                    raise ValueError(
                        f"zero_stage={self.stage} by DeepSpeed steps all parameters at once, and "
                        f"the checkpoint has {single} for {name} and {found[0][1]} for "
                        f"{found[0][0]}; choose zero_stage=0"
                    )


class ShardedState:
    """Shards of one DeepSpeed engine: this rank's parts, and the whole that they make.

    Args:
        layout: Model and optimizer, and how the ranks shard them.
        engine: The DeepSpeed engine, whose optimizer holds the shards.
    """

    def __init__(self, layout: Layout, engine: Any) -> None:
        self._layout = layout
        self._root: nn.Module = engine.module
        self._zero = engine.optimizer
        self._stage = layout.stage
        self._device = layout.device
        self._rank = dist.get_rank(layout.group)
        self._size = dist.get_world_size(layout.group)
        self._trained = layout.trained
        self._frozen: dict[int, torch.Tensor] = {}
        self.idle: torch.Tensor | None = None
        """Which trained parameters no step has had a gradient of, [parameters]; None if unknown."""

    # --- this rank's parts

    def link_weights(self) -> None:
        """Make the optimizer update this rank's parts of the weights in place.

        Otherwise DeepSpeed trains copies of the parts and writes them back.
        """
        for part, flat in zip(self._parts(), self._flats(), strict=True):
            flat.data = part.data
        if self._stage < 3:
            self._zero._link_all_hp_params()

    def _parts(self) -> list[torch.Tensor]:
        """Return this rank's parts of the weights, by the optimizer's groups."""
        if self._stage == 3:
            return list(self._zero.fp16_partitioned_groups_flat)
        return [parts[self._rank] for parts in self._zero.parallel_partitioned_bit16_groups]

    def _flats(self) -> list[torch.Tensor]:
        """Return the flat tensors that the optimizer updates, by group."""
        if self._stage < 3:
            return list(self._zero.single_partition_of_fp32_groups)
        return list(self._zero.fp32_partitioned_groups_flat)

    def part_of_weight(self, parameter: Any) -> torch.Tensor:
        """Return this rank's part of the weight `parameter`; below stage 3 the whole weight."""
        part: torch.Tensor = parameter.data if self._stage < 3 else parameter.ds_tensor.data
        return part

    def updated_part(self, parameter: Any) -> torch.Tensor | None:
        """Return this rank's part of the tensor that the optimizer updates, or None.

        Args:
            parameter: A trained parameter.

        Returns:
            The part, or None where other ranks have all of it.
        """
        if self._stage == 3:
            part, _ = self._zero._get_fp32_opt_state_partition(parameter, False)
        elif parameter._hp_mapping is None:
            return None
        else:
            part = parameter._hp_mapping.hp_fragment
        found: torch.Tensor = part.data
        return found

    def _cut(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """Return this rank's part of `value`, in parts of `size` of which the last is padded."""
        flat = nn.functional.pad(value.reshape(-1), (0, size * self._size - value.numel()))
        return flat[size * self._rank : size * (self._rank + 1)]

    # --- weights

    def gathered(self, source: int | None = None) -> Any:
        """Return a context in which all weights of the model are whole.

        Args:
            source: The rank whose changes within the context are kept; None keeps no changes.

        Returns:
            A context manager; below stage 3 the weights are always whole, and it does nothing.
        """
        if self._stage < 3:
            return contextlib.nullcontext()
        repartition(self._zero, self._root)
        zero = imported(self._device.type).zero
        parameters = list(self._layout.owner.parameters())
        return zero.GatheredParameters(parameters, modifier_rank=source)

    def whole_parameters(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return the whole values of all of the model's parameters; all ranks call it.

        Args:
            parameters: The model's parameters.

        Returns:
            Copies; float32 where the optimizer has float32 copies of the weights.
        """
        if self._layout.has_copies:
            return [self._copy(parameter) for parameter in parameters]
        with self.gathered():
            return [parameter.detach().clone() for parameter in parameters]

    def weights(self) -> dict[str, Any]:
        """Return the model's whole state dictionary, on every rank; all of them call it."""
        owner = self._layout.owner
        if self._layout.has_copies:
            state = owner.state_dict()
            whole = {id(p): self._copy(p) for p in owner.parameters()}
            for name, parameter in owner.named_parameters(remove_duplicate=False):
                state[name] = whole[id(parameter)]
            return state
        with self.gathered():
            state = owner.state_dict()
            if self._stage == 3:
                for name, value in state.items():
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            return state

    def set_weights(self, state: Mapping[str, Any]) -> None:
        """Load a whole state dictionary; all ranks call it.

        Args:
            state: A state dictionary as `weights` returns it.
        """
        owner = self._layout.owner
        with self.gathered(source=0):
            owner.load_state_dict(state)
        if self._layout.is_apart:
            for name, parameter in owner.named_parameters():
                self.set_copy(parameter, state[name])

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the whole float32 copy of `parameter`; all ranks call it."""
        if parameter.requires_grad:
            utils = imported(self._device.type).utils
            whole: torch.Tensor = utils.safe_get_full_fp32_param(parameter)
            return whole
        shape = getattr(parameter, "ds_shape", parameter.shape)
        own = self._frozen[id(parameter)]
        flat = own.new_zeros(own.numel() * self._size)
        flat[own.numel() * self._rank :][: own.numel()] = own
        with self._layout.clock:
            dist.all_reduce(flat, group=self._layout.group)
        return flat[: shape.numel()].view(shape)

    def set_copy(self, parameter: Any, value: torch.Tensor) -> None:
        """Set this rank's part of the float32 copy of a parameter.

        DeepSpeed has no copy of a frozen parameter, so this object stores that part.

        Args:
            parameter: A parameter of the model.
            value: Its whole value.
        """
        value = value.to(self._device, torch.float32)
        utils = imported(self._device.type).utils
        if not parameter.requires_grad:
            own = self._cut(value, -(-value.numel() // self._size))
            self._frozen[id(parameter)] = own.clone()
        elif self._stage < 3:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            own = self._cut(value, parameter.partition_numel())
            utils.safe_set_local_fp32_param(parameter, own)

    # --- the optimizer's state

    @property
    def _moments(self) -> dict[torch.Tensor, Any]:
        """The optimizer's state by its flat tensors."""
        return self._layout.optimizer.state

    def moments(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's whole state on every rank; all of them call it.

        Returns:
            The state by the number of the parameter, without those that never had a gradient.
        """
        found: dict[int, dict[str, Any]] = {}
        number = 0
        utils = imported(self._device.type).utils
        self._link_moments()
        for flat, parameters in zip(self._flats(), self._layout.groups, strict=True):
            state = self._moments.get(flat, {})
            for parameter in parameters:
                if state and not self._is_idle(number):
                    found[number] = {
                        name: utils.safe_get_full_optimizer_state(parameter, name)
                        if value.dim()
                        else value.clone()
                        for name, value in state.items()
                    }
                number += 1
        return found

    def set_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Load this rank's part of an optimizer state.

        Args:
            states: The whole state as `moments` returns it.
        """
        self._moments.clear()
        number = 0
        for flat, parameters in zip(self._flats(), self._layout.groups, strict=True):
            numbers = range(number, number + len(parameters))
            number += len(parameters)
            some = [states[each] for each in numbers if states.get(each)]
            if not some:
                continue
            here = self._moments[flat]
            for name, value in some[0].items():
                shaped = isinstance(value, torch.Tensor) and value.dim() > 0
                here[name] = (
                    torch.zeros_like(flat, requires_grad=False) if shaped else value.clone()
                )
        self._link_moments()
        for number, parameter in enumerate(self._trained):
            for name, value in states.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    self._set_moment(parameter, name, value)
        idle = [number not in states for number in range(len(self._trained))]
        self.idle = torch.tensor(idle, device=self._device) if states else None

    def _set_moment(self, parameter: Any, name: str, value: torch.Tensor) -> None:
        utils = imported(self._device.type).utils
        value = value.to(self._device, torch.float32)
        if self._stage < 3:
            utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        own = self._cut(value, parameter.partition_numel())
        utils.safe_set_local_optimizer_state(parameter, own, name)

    def _link_moments(self) -> None:
        """Make DeepSpeed find the optimizer's state; it looks for it once, before there is any."""
        if self._stage < 3 and self._moments:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _is_idle(self, number: int) -> bool:
        return self.idle is not None and bool(self.idle[number])

    # --- memory

    def gradient_bytes(self, arriving: int) -> int:
        """Return the bytes of gradients in memory now; at stage 2 without those being reduced.

        Args:
            arriving: Number of the parameter whose gradient came last.
        """
        zero = self._zero
        if self._stage == 3:
            size: int = zero.grad_partitions_flat_buffer.nbytes
            return size
        numbered = enumerate(p.grad for p in self._trained)
        kept = {number: grad for number, grad in numbered if grad is not None}
        if self._stage == 1:
            return sum(each.nbytes for each in kept.values())
        kept.pop(arriving, None)
        held = list(kept.values())
        for groups in (zero.averaged_gradients, zero.all_grad_tensors):
            held += [each for group in groups.values() if group is not None for each in group]
        buckets = zero.ipg_buckets.values()
        return _memory_bytes(held, without=[each for bucket in buckets for each in bucket.buffer])

    def bytes(self, gradients: int) -> StateBytes:
        """Return the memory that this rank's state takes.

        Args:
            gradients: The most bytes of gradients that a step has had.

        Returns:
            The bytes. At stage 2 with several micro-batches DeepSpeed holds this rank's part of the
            newest gradients in addition to its part of their sum.
        """
        owner = self._layout.owner
        weights = [p.data for p in owner.parameters()]
        if self._stage == 3:
            weights += [self.part_of_weight(p) for p in owner.parameters()]
        flats = self._flats()
        moments = batches.tensors([list(each.values()) for each in self._moments.values()])
        # Without copies the flat tensors share the weights' memory, and are counted there.
        updated = _memory_bytes([*flats, *moments], without=weights)
        optimizer_state = updated + _memory_bytes(self._frozen.values())
        host = 0
        if self._layout.offloads:
            kept = [flat.grad for flat in flats if flat.grad is not None]
            gradients += _memory_bytes(kept)
            kept += [self._zero.grad_partitions_flat_buffer] if self._stage == 3 else []
            host = updated + _memory_bytes(kept)
        return StateBytes(_memory_bytes(weights), gradients, optimizer_state, host)


def _memory_bytes(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the storages of `tensors`, each once, except those of `without`."""
    others = {each.untyped_storage().data_ptr() for each in without}
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(memory.nbytes() for place, memory in memories.items() if place not in others)
