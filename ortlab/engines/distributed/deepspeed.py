"""ZeRO's stages 1, 2 and 3 through DeepSpeed: the one module that imports it.

Stage 1 shares out the optimizer's state, 2 the gradients too, 3 the weights too (Rajbhandari et al.
2020, arXiv:1910.02054). DeepSpeed cuts, reduces and gathers; the optimizer is torch's own.

What it updates are the model's own weights in float32, of which there is no second copy: 4+4+8
bytes a parameter. With ``param_dtype="bf16"`` weights and gradients are bfloat16, and the optimizer
has its share of a float32 copy, which it updates and which the weights are rounded from after every
step: 2+2+12 (section 3.1 there). Gradients are reduced in float32 in either case. States are those
of the copy, so nothing is lost on the way to another number of workers or another stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ortlab.checkpoint.checkpoint import check_model, check_optimizer
from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, LossFunction, Report, StateBytes
from ortlab.engines.distributed.compatibility import DEEPSPEED
from ortlab.engines.distributed.data_parallel import MOST_NUMBERS, Ranks
from ortlab.engines.torch.stepper import TorchStepper, decay_of
from ortlab.settings import FinetuneSettings

BUCKET = 25 * 1024**2 // 4
"""Elements of float32 that are reduced or gathered at once: DistributedDataParallel's 25 MiB."""
_WAYS = 1 << 20
"""Fingerprints of what ranks did: their squares add up exactly in float64."""
_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("barrier", "broadcast", "broadcast_object_list"),
)


@functools.cache
def _deepspeed(device_type: str) -> Any:
    """DeepSpeed for devices of this type, silent; a process has one type of them."""
    with _environment(DS_ACCELERATOR=device_type):
        import deepspeed
    # Its handler writes to standard output, which is the user's cell.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """`variables` for a while; what DeepSpeed's import sets does not stay either."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _collectives() -> Any:
    """What DeepSpeed communicates by: torch's process group, with a place for a watcher.

    ``watcher`` is called with each collective, and calls it; None for those that nobody watches.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if getattr(comm.cdb, "watcher", comm) is comm:
        comm.cdb = _watched_class()()
    # Else it opens a second group, with its own sockets, and keeps it when there is another world.
    groups._WORLD_GROUP = dist.group.WORLD
    return comm.cdb


@functools.cache
def _watched_class() -> type[Any]:
    from deepspeed.comm.backend import Backend
    from deepspeed.comm.torch import TorchBackend

    class Watched(TorchBackend):  # type: ignore[misc]
        def __init__(self) -> None:
            # Not TorchBackend's: that compiles and loads a kernel that inference alone uses.
            Backend.__init__(self)
            self.watcher: Callable[[Callable[[], Any]], Any] | None = None
            self.name = "torch"
            self.initialized = True
            self.using_mpi = False
            self.has_all_reduce_coalesced = True
            self.has_coalescing_manager = True
            # torch 2.13 has given them other names, and warns of the old ones.
            self.all_gather_function = _first("all_gather_single", "all_gather_into_tensor")
            self.reduce_scatter_function = _first("reduce_scatter_single", "reduce_scatter_tensor")

    def watched(name: str) -> Callable[..., Any]:
        def collective(self: Watched, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(getattr(TorchBackend, name), self, *args, **kwargs)
            return call() if self.watcher is None else self.watcher(call)

        return collective

    for name in _COLLECTIVES:
        setattr(Watched, name, watched(name))
    return Watched


def _first(*names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(dist, next(name for name in names if hasattr(dist, name)))
    return found


def library(device: torch.device) -> Any:
    """DeepSpeed for `device`, over torch's own process group."""
    found = _deepspeed(device.type)
    _collectives()
    # DeepSpeed reads it when it begins, and in every step.
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    return found


def initialised(device: torch.device, **arguments: Any) -> Any:
    """The engine of ``deepspeed.initialize``; the environment stays as it was."""
    deepspeed = library(device)
    deepspeed.utils.groups.mpu = None  # a pipeline's, which it leaves behind
    with _environment():
        engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
    return engine


class _Work:
    """A collective under way, which tells when it was waited for."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work = work
        self._ended: Callable[[], None] | None = ended

    def wait(self, *args: Any) -> Any:
        """Until it is done."""
        try:
            return self._work.wait(*args)
        finally:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Root(nn.Module):
    """What DeepSpeed takes for the model: from a batch to its loss, its scores and targets."""

    def __init__(self, module: nn.Module, loss: LossFunction | None, *, halves: bool) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self._halves = halves
        self.context: AbstractContextManager[Any] = contextlib.nullcontext()

    def forward(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """The fields of `batches.Forward`: a tuple, in which DeepSpeed finds tensors."""
        if self._halves:  # autocast leaves them to norms, which take what their weights are
            batch = batches.with_inputs_of(batch, torch.bfloat16, self._loss)
        with self.context:
            found = batches.forward(self.module, batch, self._loss)
        return found.loss, found.scores, found.target


class DeepSpeedRanks(Ranks):
    """Ranks of which each holds its share, as DeepSpeed cuts it.

    Before each of DeepSpeed's collectives the ranks agree that none has failed, and that their
    layers ran and their gradients came in the same order: it gathers and adds up by place,
    whatever parameters are meant.
    """

    sharer = f"DeepSpeed {DEEPSPEED}"

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
        self._names = {id(p): name for name, p in owner.named_parameters()}
        self._settings = settings
        self._has_copies = settings.param_dtype == "bf16"
        self._engine: Any = None
        self._is_broken = False
        super().__init__(module, loss, owner, device, settings=settings, group=group)

    def _made_parallel(self) -> Any:
        return self._engine  # `optimizer` makes it: DeepSpeed begins with the optimizer

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """See `OneProcess.optimizer`: one of flat tensors, which are this rank's parts.

        ValueError for parameters that are not float32.
        """
        for parameter in self.owner.parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"zero_stage={self._stage} by DeepSpeed trains float32 weights, and "
                    f"{self._names[id(parameter)]} is {parameter.dtype}; call model.float(), or "
                    "choose zero_stage=0"
                )
        if self._has_copies:
            _refuse_statistics(self.owner)
        self._inner = kind(groups, **defaults)
        self._grouped = [list(group["params"]) for group in self._inner.param_groups]
        self._trained = [parameter for group in self._grouped for parameter in group]
        self._used = torch.zeros(len(self._trained), device=self.device)
        self._idle: torch.Tensor | None = None
        self._order = 0
        self._arriving = -1
        self._gradient_bytes = 0
        self._begin()
        return self._inner

    def _begin(self) -> None:
        """Cuts the model; `_end` makes it whole again."""
        self._before = _Attributes(self.owner)
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, number))
            for number, parameter in enumerate(self._trained)
        ]
        if self._stage == 3:
            self._hooks += [
                module.register_forward_pre_hook(functools.partial(self._runs, number))
                for number, module in enumerate(self.owner.modules())
                if module._parameters
            ]
        for group, parameters in zip(self._inner.param_groups, self._grouped, strict=True):
            group["params"] = list(parameters)
        self._inner.state.clear()
        self._laid = [(parameter, parameter.stride()) for parameter in self.owner.parameters()]
        for parameter, _ in self._laid:  # DeepSpeed broadcasts them byte by byte
            parameter.data = parameter.data.contiguous()
            if self._has_copies:  # of which it would broadcast what it has rounded
                self.equalise([parameter.data])
        whole = [(parameter, parameter.data) for parameter, _ in self._laid if self._has_copies]
        self._root = _Root(self.module, self.loss, halves=self._has_copies)
        self._engine = initialised(
            self.device,
            model=self._root,
            optimizer=self._inner,
            config=_configuration(self._settings, self.device),
        )
        self._parallel = self._engine
        self._zero = self._engine.optimizer
        self._frozen: dict[int, torch.Tensor] = {}
        for parameter, value in whole:  # it has made its copies of what it has rounded
            self._set_copy(parameter, value)
        if self._is_apart:
            return
        # It would train copies of this rank's parts and then write them back.
        for part, flat in zip(self._parts(), self._flats(), strict=True):
            flat.data = part.data
        if self._stage < 3:
            self._zero._link_all_hp_params()

    @property
    def offloads(self) -> bool:
        """Whether the optimizer steps in the host's memory."""
        return self._settings.offload_optimizer

    @property
    def _is_apart(self) -> bool:
        """Whether what the optimizer updates has memory of its own."""
        return self._has_copies or self.offloads

    def _parts(self) -> list[torch.Tensor]:
        """This rank's parts of the weights, by the optimizer's groups."""
        zero = self._zero
        if self._stage == 3:
            return list(zero.fp16_partitioned_groups_flat)
        return [parts[self._rank] for parts in zero.parallel_partitioned_bit16_groups]

    def _flats(self) -> list[torch.Tensor]:
        """What the optimizer updates, by group."""
        if self._stage < 3:
            return list(self._zero.single_partition_of_fp32_groups)
        return list(self._zero.fp32_partitioned_groups_flat)

    def _end(self) -> None:
        """Gives the model its whole weights, and takes away all that DeepSpeed put on it."""
        parameters = [parameter for parameter, _ in self._laid]
        if self._has_copies:
            whole = [self._copy(parameter) for parameter in parameters]
        else:
            with self._gathered(parameters):
                whole = [parameter.detach().clone() for parameter in parameters]
        self._engine.destroy()
        # Collected as garbage it does that again, by then to what another has put there.
        self._engine.optimizer = None
        for hook in self._hooks:
            hook.remove()
        self._before.restore()
        _forget(self._root)
        for (parameter, stride), value in zip(self._laid, whole, strict=True):
            shape, kind, place = value.shape, value.dtype, value.device
            laid = torch.empty_strided(shape, stride, dtype=kind, device=place)
            parameter.data = laid.copy_(value)
            parameter.grad = None
        self._engine = self._parallel = self._zero = None
        del self._root

    def _gathered(self, parameters: Sequence[nn.Parameter], source: int | None = None) -> Any:
        """Within it `parameters` are whole; what the rank `source` makes of them is then kept."""
        if self._stage < 3:
            return contextlib.nullcontext()
        self._put_away()
        zero = _deepspeed(self.device.type).zero
        return zero.GatheredParameters(list(parameters), modifier_rank=source)

    # --- the float32 copy

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole float32 copy of a `parameter`; all ranks call it."""
        if parameter.requires_grad:
            utils = _deepspeed(self.device.type).utils
            whole: torch.Tensor = utils.safe_get_full_fp32_param(parameter)
            return whole
        shape = getattr(parameter, "ds_shape", parameter.shape)
        own = self._frozen[id(parameter)]
        flat = own.new_zeros(own.numel() * self._size)
        flat[own.numel() * self._rank :][: own.numel()] = own
        with self._clock:
            dist.all_reduce(flat, group=self._group)
        return flat[: shape.numel()].view(shape)

    def _set_copy(self, parameter: Any, value: torch.Tensor) -> None:
        """Takes this rank's part of the whole float32 `value` of a `parameter`.

        Of one that is not trained DeepSpeed has no copy, so that its part is kept here.
        """
        value = value.to(self.device, torch.float32)
        utils = _deepspeed(self.device.type).utils
        if not parameter.requires_grad:
            own = self._part_of(value, -(-value.numel() // self._size))
            self._frozen[id(parameter)] = own.clone()
        elif self._stage < 3:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            own = self._part_of(value, parameter.partition_numel())
            utils.safe_set_local_fp32_param(parameter, own)

    def _part_of(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """This rank's part of a `value` that is cut into parts of `size`, the last one padded."""
        flat = nn.functional.pad(value.reshape(-1), (0, size * self._size - value.numel()))
        return flat[size * self._rank : size * (self._rank + 1)]

    def _own_copy(self, parameter: Any) -> torch.Tensor | None:
        """This rank's part of what the optimizer updates of `parameter`, where it has one."""
        if self._stage == 3:
            part, _ = self._zero._get_fp32_opt_state_partition(parameter, False)
        elif parameter._hp_mapping is None:
            return None
        else:
            part = parameter._hp_mapping.hp_fragment
        found: torch.Tensor = part.data
        return found

    def _put_away(self) -> None:
        """Cuts what is whole still, or on its way, of a pass that came to no end."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        offload = self._zero.parameter_offload
        offload.param_coordinator._clean_inflight_param_registry()
        parameter: Any  # DeepSpeed has put more on it
        for parameter in self._root.parameters():
            if (
                parameter.ds_status == ZeroParamStatus.INFLIGHT
            ):  # it was to be, and a rank had failed
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        offload.partition_all_parameters()

    # --- watched

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        backend = _collectives()
        before, backend.watcher = backend.watcher, self._watch
        try:
            yield
        finally:
            backend.watcher = before

    def _watch(self, collective: Callable[[], Any]) -> Any:
        """Calls `collective` if all ranks come to it alike, and takes its time."""
        self._note_gradients()
        self._agree([])
        self._clock.begin()
        try:
            work = collective()
        except BaseException:
            self._clock.end()
            raise
        if hasattr(work, "wait"):
            return _Work(work, self._clock.end)
        self._clock.end()
        return work

    def _agree(self, numbers: Sequence[torch.Tensor], *, failed: bool = False) -> torch.Tensor:
        """See `Ranks._agree`; RuntimeError on all ranks where they came here by other ways."""
        way = (self._order * 31 + len(numbers)) % _WAYS
        told = [torch.zeros((), device=self.device)] * MOST_NUMBERS
        told[: len(numbers)] = numbers
        told[-2:] = torch.tensor([way, way * way], dtype=torch.float64, device=self.device)
        agreed = super()._agree([] if failed else told, failed=failed)
        if not failed:
            if float(agreed[-1]) != (float(agreed[-2]) / self._size) ** 2 * self._size:
                raise RuntimeError(
                    f"zero_stage={self._stage}: the ranks used different layers, or in another "
                    "order; choose zero_stage=0 for a model whose layers depend on its data"
                )
            self._agreed = False  # there are more to come
        return agreed[: len(numbers)]

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        """Hears that the gradient of a parameter is there, before DeepSpeed does."""
        self._used[number] = 1
        self._arriving = number
        self._count(2 * number)

    def _runs(self, number: int, *_: Any) -> None:
        """Hears that a layer is about to run, before DeepSpeed gathers its weights."""
        self._count(2 * number + 1)

    def _count(self, event: int) -> None:
        self._order = (self._order * 31 + event + 1) % _WAYS

    def _note_gradients(self) -> None:
        """Takes down the most bytes of gradients, at stage 2 without those on their way."""
        zero = self._zero
        if self._stage == 3:
            self._gradient_bytes = zero.grad_partitions_flat_buffer.nbytes
            return
        numbered = enumerate(p.grad for p in self._trained)
        kept = {number: grad for number, grad in numbered if grad is not None}
        if self._stage == 1:
            found = sum(each.nbytes for each in kept.values())
        else:
            kept.pop(self._arriving, None)
            held = list(kept.values())
            for groups in (zero.averaged_gradients, zero.all_grad_tensors):
                held += [each for group in groups.values() if group is not None for each in group]
            buckets = zero.ipg_buckets.values()
            found = _held(held, without=[each for bucket in buckets for each in bucket.buffer])
        self._gradient_bytes = max(self._gradient_bytes, found)

    # --- a step

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; after one that failed DeepSpeed begins anew."""
        self._recover()
        if training:
            self._used.zero_()
            self._order = 0
            if self._stage == 3:  # it copies what comes, and leaves the rest from the step before
                self._zero.grad_partitions_flat_buffer.zero_()
        try:
            with self._watching(), super().together(training=training):
                yield
        except BaseException:
            self._is_broken = True
            raise

    def _recover(self) -> None:
        """Begins anew with the state before a step that failed half way."""
        if not self._is_broken:
            return
        self._is_broken = False
        self._order = 0
        moments = self.moments()
        with self._watching():
            self._end()
        self._begin()
        self.set_moments(moments)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `OneProcess.micro_batch`; from stage 2 on those of all others are reduced too."""
        self._engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def objective(self, batch: Batch) -> torch.Tensor:
        """See `OneProcess.objective`."""
        kind = self.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # On CUDA DeepSpeed turns autocast off inside its forward (runtime/torch_autocast.py).
        self._root.context = torch.autocast(kind, dtype, enabled=enabled)
        loss: torch.Tensor = self._engine(batch)[0]
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """See `OneProcess.backward`: DeepSpeed divides the sum over ranks by their number."""
        self._engine.backward(loss * self._size)

    def forward(self, batch: Batch) -> batches.Forward:
        """See `OneProcess.forward`."""
        self._root.context = contextlib.nullcontext()
        return batches.Forward(*self._root(batch))

    def update(self) -> torch.Tensor:
        """Takes the optimizer's step; the norm of all gradients, infinite where none was taken.

        ValueError where parameters that were used in a step are not in another.
        """
        kept = self._spared()
        self._engine.step()
        for tensor, before in kept:
            tensor.copy_(before)
        norm = float("inf") if self._zero.overflow else self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _spared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weights of no gradient, with copies: one process would not let them decay."""
        used = self._used.clone()
        with self._clock:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        idle = used == 0
        if self._idle is None:
            self._idle = idle
        if not torch.equal(self._idle, idle):
            changed = (self._idle != idle).nonzero()
            name = self._names[id(self._trained[int(changed[0])])]
            self._agreed = True  # all raise it
            raise ValueError(
                f"zero_stage={self._stage} by DeepSpeed steps all parameters at once, and {name} "
                "has a gradient in some steps alone; choose zero_stage=0"
            )
        spared = [self._trained[int(number)] for number in idle.nonzero()]
        held = [p.data if self._stage < 3 else self._part(p) for p in spared]
        if self._is_apart:
            copies = map(self._own_copy, spared)
            held += [copy for copy in copies if copy is not None]
        return [(tensor, tensor.clone()) for tensor in held]

    # --- the state

    def bytes(self) -> StateBytes:
        """What this rank holds; of gradients the most that it has held in a step.

        At stage 2 with several micro-batches DeepSpeed holds this rank's part of the newest one
        beside that of their sum.
        """
        weights = [p.data for p in self.owner.parameters()]
        if self._stage == 3:
            weights += [self._part(p) for p in self.owner.parameters()]
        flats, state = self._flats(), self._inner.state
        moments = batches.tensors([list(each.values()) for each in state.values()])
        # What is no copy lies in the weights, and counts there.
        updated = _held([*flats, *moments], without=weights)
        optimizer_state = updated + _held(self._frozen.values())
        gradients, host = self._gradient_bytes, 0
        if self.offloads:
            kept = [flat.grad for flat in flats if flat.grad is not None]
            gradients += _held(kept)
            kept += [self._zero.grad_partitions_flat_buffer] if self._stage == 3 else []
            host = updated + _held(kept)
        return StateBytes(_held(weights), gradients, optimizer_state, host)

    def _part(self, parameter: Any) -> torch.Tensor:
        """This rank's part of `parameter` at stage 3."""
        part: torch.Tensor = parameter.ds_tensor.data
        return part

    def weights(self) -> dict[str, Any]:
        """The model's whole state dictionary, on every rank; all of them call it."""
        self._recover()
        if self._has_copies:
            state = self.owner.state_dict()
            with self._watching():
                whole = {id(p): self._copy(p) for p in self.owner.parameters()}
            for name, parameter in self.owner.named_parameters(remove_duplicate=False):
                state[name] = whole[id(parameter)]
            return state
        with self._watching(), self._gathered(list(self.owner.parameters())):
            state = self.owner.state_dict()
            if self._stage == 3:
                for name, value in state.items():
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            return state

    def set_weights(self, state: Mapping[str, Any]) -> None:
        """Takes what `weights` gives; all ranks call it."""
        self._recover()
        with self._watching(), self._gathered(list(self.owner.parameters()), source=0):
            self.owner.load_state_dict(state)
        if self._is_apart:
            for name, parameter in self.owner.named_parameters():
                self._set_copy(parameter, state[name])

    def forms(self) -> dict[str, Any]:
        """The model's state dictionary, as `check_model` compares it: without values."""
        state = self.owner.state_dict()
        for name, parameter in self.owner.named_parameters(remove_duplicate=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            state[name] = torch.empty(shape, dtype=torch.float32, device="meta")
        return state

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """What is trained, with its name and its shape, in the optimizer's order."""
        forms = self.forms()
        return [(self._names[id(p)], forms[self._names[id(p)]]) for p in self._trained]

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as its state dictionary has them in one process."""
        found, number = [], 0
        for group, parameters in zip(self._inner.param_groups, self._grouped, strict=True):
            rest = {name: value for name, value in group.items() if name != "params"}
            found.append({**rest, "params": list(range(number, number + len(parameters)))})
            number += len(parameters)
        return found

    def moments(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state by the number of the parameter, whole on every rank."""
        found: dict[int, dict[str, Any]] = {}
        number = 0
        utils = _deepspeed(self.device.type).utils
        self._link()
        with self._watching():
            for flat, parameters in zip(self._flats(), self._grouped, strict=True):
                state = self._inner.state.get(flat, {})
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

    def _link(self) -> None:
        """Lets DeepSpeed find the optimizer's state, which it looks for when there is but one."""
        if self._stage < 3 and self._inner.state:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _is_idle(self, number: int) -> bool:
        return self._idle is not None and bool(self._idle[number])

    def check_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """ValueError for a state that no flat tensor has: of other numbers of steps."""
        number = 0
        for parameters in self._grouped:
            found = []
            for parameter in parameters:
                state = states.get(number)
                number += 1
                if state:
                    single = {name: float(v) for name, v in state.items() if v.dim() == 0}
                    found.append((self._names[id(parameter)], single))
            for name, single in found[1:]:
                if single != found[0][1]:
                    raise ValueError(
                        f"zero_stage={self._stage} by DeepSpeed steps all parameters at once, and "
                        f"the checkpoint has {single} for {name} and {found[0][1]} for "
                        f"{found[0][0]}; choose zero_stage=0"
                    )

    def set_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Takes this rank's part of what `moments` gives."""
        self._inner.state.clear()
        number = 0
        for flat, parameters in zip(self._flats(), self._grouped, strict=True):
            numbers = range(number, number + len(parameters))
            number += len(parameters)
            some = [states[each] for each in numbers if states.get(each)]
            if not some:
                continue
            here = self._inner.state[flat]
            for name, value in some[0].items():
                shaped = isinstance(value, torch.Tensor) and value.dim() > 0
                here[name] = (
                    torch.zeros_like(flat, requires_grad=False) if shaped else value.clone()
                )
        self._link()
        for number, parameter in enumerate(self._trained):
            for name, value in states.get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    self._set_moment(parameter, name, value)
        idle = [number not in states for number in range(len(self._trained))]
        self._idle = torch.tensor(idle, device=self.device) if states else None

    def _set_moment(self, parameter: Any, name: str, value: torch.Tensor) -> None:
        utils = _deepspeed(self.device.type).utils
        value = value.to(self.device, torch.float32)
        if self._stage < 3:
            utils.safe_set_full_optimizer_state(parameter, value, name)
            return
        own = self._part_of(value, parameter.partition_numel())
        utils.safe_set_local_optimizer_state(parameter, own, name)

    def adopt(self, settings: FinetuneSettings) -> None:
        """Takes the clipping and the decay of `settings`."""
        self._settings = settings
        self._zero.clip_grad = settings.clip_norm or 0.0
        forms = dict(self.named())
        for group, parameters in zip(self._inner.param_groups, self._grouped, strict=True):
            group["weight_decay"] = decay_of(forms[self._names[id(parameters[0])]], settings)

    def told(self, report: Report) -> Report:
        """See `Ranks.told`; what types there are, and where the optimizer steps."""
        report, settings = super().told(report), self._settings
        notes, remarks = [], []
        if self._has_copies:
            adds = "fp32" if adds_up_in_fp32(settings) else "bf16"
            notes.append(
                "weights and gradients in bf16, an fp32 copy with the optimizer; gradients are "
                f"reduced in fp32 and kept in {adds}"
            )
            if settings.accumulation > 1 and adds == "bf16":
                remarks.append(
                    "zero_stage=1 adds up the gradients of micro-batches in bf16; zero_stage=2 "
                    "adds them up in fp32"
                )
        if self.offloads:
            notes.append(
                "the optimizer's share is in host memory"
                + ("; on a CPU that saves nothing" if self.device.type == "cpu" else "")
            )
        return dataclasses.replace(
            report, notes=(*report.notes, *notes), remarks=(*report.remarks, *remarks)
        )

    def close(self) -> None:
        """Makes the user's model whole; at stage 3 all ranks call it."""
        if self._engine is not None:
            with self._watching():
                self._end()


def _refuse_statistics(model: nn.Module) -> None:
    """ValueError for a layer with float32 statistics beside its weights: torch wants one type."""
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._NormBase):
            continue
        if layer.affine and layer.track_running_stats:
            raise ValueError(
                f"param_dtype='bf16': {name or 'it'} is a {type(layer).__name__}, whose statistics "
                "stay in fp32, and torch takes weights of the same type; choose param_dtype='fp32'"
            )


def _configuration(settings: FinetuneSettings, device: torch.device) -> dict[str, Any]:
    """What DeepSpeed is told (https://www.deepspeed.ai/docs/config-json/)."""
    halves = settings.param_dtype == "bf16"
    # At stage 1 it would be another optimizer of DeepSpeed's, whose gradients are 6 bytes each.
    sums = "fp32" if not halves or adds_up_in_fp32(settings) else "bf16"
    away = {"offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"}}
    return {
        "train_micro_batch_size_per_gpu": 1,  # it is told where a step ends
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own steps on the host as well
        "bf16": {"enabled": halves, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": sums},
        "communication_data_type": "fp32",
        "zero_optimization": {
            **(away if settings.offload_optimizer else {}),
            "stage": settings.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 2 * BUCKET,
            "stage3_max_reuse_distance": BUCKET,  # by default a smaller model is never cut again
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 10**15,  # one for each of the optimizer's groups
        },
    }


def adds_up_in_fp32(settings: FinetuneSettings) -> bool:
    """Whether micro-batches' bfloat16 gradients are added up in float32: 4 bytes each, not 2."""
    return settings.accumulation > 1 and settings.zero_stage > 1


def _forget(root: nn.Module) -> None:
    """Lets go of what stage 3 would keep for ever: modules in a list, and in a method's cache."""
    from deepspeed.runtime.zero import parameter_offload as offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    own = {id(module) for module in root.modules()}
    stack = offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if id(module) not in own]
    method = getattr(Coordinator, f"_{Coordinator.__name__}__params_to_release")
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


class _Attributes:
    """The attributes of a model's modules and parameters, to take away those that were added."""

    def __init__(self, owner: nn.Module) -> None:
        self._modules = [(each, set(vars(each)), each._parameters) for each in owner.modules()]
        self._parameters = [(each, set(vars(each))) for each in owner.parameters()]

    def restore(self) -> None:
        """Only what was there before is there now."""
        for module, names, parameters in self._modules:
            for name in set(vars(module)) - names:
                delattr(module, name)
            module._parameters = parameters
        for parameter, names in self._parameters:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)


def _held(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the memory that `tensors` lie in, each counted once, and not that of others."""
    others = {each.untyped_storage().data_ptr() for each in without}
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(memory.nbytes() for place, memory in memories.items() if place not in others)


class DeepSpeedStepper(TorchStepper):
    """Trains by `DeepSpeedRanks`, which has weights, gradients and the optimizer's state."""

    _processes: DeepSpeedRanks

    def _update(
        self, loss: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See `TorchStepper._update`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._bad = torch.maximum(self._bad, (~torch.isfinite(loss)).to(self._bad))
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        # Offloaded, it would copy a flag of the device's and not wait until that is there.
        flag = self._bad.cpu() if self._processes.offloads else self._bad
        self._optimizer.found_inf = flag  # type: ignore[attr-defined]
        grad_norm = self._processes.update()
        self._bad = torch.maximum(self._bad, (~torch.isfinite(grad_norm)).to(self._bad))
        return grad_norm, None, None

    def _forget_gradients(self) -> None:
        """DeepSpeed does at the end of a step, and keeps its buffers for them in host memory."""

    def bytes(self) -> StateBytes:
        """See `TorchStepper.bytes`."""
        return self._processes.bytes()

    def state_dict(self) -> dict[str, Any]:
        """See `Stepper.state_dict`; all ranks call it."""
        return {
            "model": self._processes.weights(),
            "optimizer": {
                "state": self._processes.moments(),
                "param_groups": self._processes.groups(),
            },
            "loss_scale": None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`; all ranks call it."""
        zero, kept = self._processes, state["optimizer"]
        check_model(state["model"], zero.forms())
        check_optimizer(kept, {"param_groups": zero.groups()}, zero.named())
        zero.check_moments(kept["state"])
        zero.set_weights(state["model"])
        zero.set_moments(kept["state"])

    def adopt(self, settings: FinetuneSettings) -> None:
        """See `Stepper.adopt`."""
        self._processes.check(settings)
        self._processes.adopt(settings)
