"""ZeRO stages 1, 2 and 3 through DeepSpeed: the ranks that take steps with it, and their stepper.

Stage 1 shards the optimizer's state across the ranks, stage 2 also the gradients, stage 3 also the
weights (Rajbhandari et al. 2020, arXiv:1910.02054). DeepSpeed partitions, reduces and gathers; the
optimizer is torch's own.

DeepSpeed updates the model's own float32 weights in place, without a second copy: 4+4+8 bytes a
parameter for weights, gradients and optimizer state. With ``param_dtype="bf16"`` weights and
gradients are bfloat16. The optimizer then updates its shard of a float32 copy, from which the
weights are rounded after every step: 2+2+12 bytes (section 3.1 of the paper). Gradients are reduced
in float32 in either case. Checkpoints contain the float32 copy, so a run can continue with another
number of workers or another stage without losing precision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ortlab.checkpoint.checks import check_model, check_optimizer
from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, LossFunction, Report, StateBytes
from ortlab.engines.compatibility import DEEPSPEED
from ortlab.engines.distributed.data_parallel import MOST_NUMBERS, Ranks
from ortlab.engines.distributed.deepspeed_checkpoint import Layout, ShardedState
from ortlab.engines.distributed.deepspeed_config import accumulates_in_fp32, configuration
from ortlab.engines.distributed.deepspeed_library import (
    Attributes,
    collectives,
    forget,
    initialized,
)
from ortlab.engines.torch.stepper import TorchStepper, decay_of
from ortlab.settings import FinetuneSettings

_FINGERPRINTS = 1 << 20
"""Fingerprints are below this number, so that their squares add up exactly in float64."""


class _Work:
    """Handle of an asynchronous collective that calls `ended` once it was waited for."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work = work
        self._ended: Callable[[], None] | None = ended

    def wait(self, *args: Any) -> Any:
        """Wait for the end of the collective."""
        try:
            return self._work.wait(*args)
        finally:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Root(nn.Module):
    """Model that is passed to DeepSpeed: maps a batch to its loss, scores and targets."""

    def __init__(self, module: nn.Module, loss: LossFunction | None, *, halves: bool) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self._halves = halves
        self.context: AbstractContextManager[Any] = contextlib.nullcontext()

    def forward(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """Return the fields of `batches.Forward` as a tuple, in which DeepSpeed finds tensors."""
        if self._halves:  # autocast does not cast the inputs of norms, which need the weights' type
            batch = batches.with_inputs_of(batch, torch.bfloat16, self._loss)
        with self.context:
            found = batches.forward(self.module, batch, self._loss)
        return found.loss, found.scores, found.target


class DeepSpeedRanks(Ranks):
    """Ranks that hold one shard each of the training's state, partitioned by DeepSpeed.

    Before each of DeepSpeed's collectives the ranks verify that none of them has failed, and that
    their layers ran and their gradients arrived in the same order. DeepSpeed gathers and reduces
    by position, without checking which parameters are meant.

    Args:
        module: The module that the engine executes.
        loss: The loss function, or None where the model returns its loss.
        owner: The user's model inside `module`.
        device: The device that this rank trains on.
        settings: The run's settings; ``zero_stage`` is 1, 2 or 3.
        group: The process group of all ranks.
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
        parallel = settings.parallel
        self._names = {id(p): name for name, p in owner.named_parameters()}
        self._settings = settings
        self._has_copies = parallel.param_dtype == "bf16"
        self.offloads = parallel.offload_optimizer
        """True if the optimizer runs in host memory."""
        self._engine: Any = None
        self._is_broken = False
        super().__init__(module, loss, owner, device, settings=settings, group=group)

    def _made_parallel(self) -> Any:
        return self._engine  # made in `optimizer`: DeepSpeed needs the optimizer first

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Iterable[dict[str, Any]],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Return the optimizer, which updates flat tensors: this rank's parts of the parameters.

        Args:
            kind: The optimizer's class.
            groups: Parameter groups as torch's optimizers take them.
            **defaults: Further arguments of the class.

        Returns:
            The optimizer.

        Raises:
            ValueError: For parameters that are not float32, and for layers with statistics that
                bfloat16 weights cannot be combined with.
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
        inner = kind(groups, **defaults)
        self._layout = Layout(
            owner=self.owner,
            optimizer=inner,
            groups=[list(group["params"]) for group in inner.param_groups],
            names=self._names,
            stage=self._stage,
            has_copies=self._has_copies,
            offloads=self.offloads,
            group=self._group,
            device=self.device,
            clock=self._clock,
        )
        self._trained = self._layout.trained
        self._used = torch.zeros(len(self._trained), device=self.device)
        self._order = 0
        self._arriving = -1
        self._gradient_bytes = 0
        self._begin()
        return inner

    def _begin(self) -> None:
        """Partition the model; `_end` makes it whole again."""
        self._before = Attributes(self.owner)
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._arrived, number)
            )
            for number, parameter in enumerate(self._trained)
        ]
        if self._stage == 3:
            self._hooks += [
                module.register_forward_pre_hook(functools.partial(self._runs, number))
                for number, module in enumerate(self.owner.modules())
                if module._parameters
            ]
        layout, inner = self._layout, self._layout.optimizer
        for group, parameters in zip(inner.param_groups, layout.groups, strict=True):
            group["params"] = list(parameters)
        inner.state.clear()
        self._laid = [(parameter, parameter.stride()) for parameter in self.owner.parameters()]
        for parameter, _ in self._laid:  # DeepSpeed broadcasts them byte by byte
            parameter.data = parameter.data.contiguous()
            if self._has_copies:  # DeepSpeed would broadcast the rounded values only
                self.equalize([parameter.data])
        whole = [(parameter, parameter.data) for parameter, _ in self._laid if self._has_copies]
        self._root = _Root(self.module, self.loss, halves=self._has_copies)
        self._engine = self._parallel = initialized(
            self.device,
            model=self._root,
            optimizer=inner,
            config=configuration(self._settings, self.device),
        )
        self._state = ShardedState(layout, self._engine)
        for parameter, value in whole:  # DeepSpeed made its copies from the rounded values
            self._state.set_copy(parameter, value)
        if not layout.is_apart:
            self._state.link_weights()

    def _end(self) -> None:
        """Restore the model's whole weights, and remove everything that DeepSpeed added to it."""
        parameters = [parameter for parameter, _ in self._laid]
        whole = self._state.whole_parameters(parameters)
        self._engine.destroy()
        # Otherwise garbage collection destroys it again, by then with what a newer engine has made.
        self._engine.optimizer = None
        for hook in self._hooks:
            hook.remove()
        self._before.restore()
        forget(self._root)
        for (parameter, stride), value in zip(self._laid, whole, strict=True):
            shape, kind, place = value.shape, value.dtype, value.device
            laid = torch.empty_strided(shape, stride, dtype=kind, device=place)
            parameter.data = laid.copy_(value)
            parameter.grad = None
        self._engine = self._parallel = None
        del self._root, self._state

    # --- watched collectives

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        backend = collectives()
        before, backend.watcher = backend.watcher, self._watch
        try:
            yield
        finally:
            backend.watcher = before

    def _watch(self, collective: Callable[[], Any]) -> Any:
        """Call `collective` if all ranks have reached it in the same way, and time it."""
        found = self._state.gradient_bytes(self._arriving)
        self._gradient_bytes = max(self._gradient_bytes, found)
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
        """See `Ranks._agree`; RuntimeError on all ranks if they took different ways to get here."""
        way = (self._order * 31 + len(numbers)) % _FINGERPRINTS
        told = [torch.zeros((), device=self.device)] * MOST_NUMBERS
        told[: len(numbers)] = numbers
        told[-2:] = torch.tensor([way, way * way], dtype=torch.float64, device=self.device)
        agreed = super()._agree([] if failed else told, failed=failed)
        if not failed:
            if float(agreed[-1]) != (float(agreed[-2]) / self._size) ** 2 * self._size:
                raise RuntimeError(
                    f"zero_stage={self._stage}: the ranks used different layers, or used them in a "
                    "different order; choose zero_stage=0 for a model whose layers depend on its "
                    "data"
                )
            self._agreed = False  # more collectives follow
        return agreed[: len(numbers)]

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        """Record that a parameter's gradient was accumulated; runs before DeepSpeed's hook."""
        self._used[number] = 1
        self._arriving = number
        self._count(2 * number)

    def _runs(self, number: int, *_: Any) -> None:
        """Record that a layer is about to run; runs before DeepSpeed gathers its weights."""
        self._count(2 * number + 1)

    def _count(self, event: int) -> None:
        self._order = (self._order * 31 + event + 1) % _FINGERPRINTS

    # --- a step

    @contextlib.contextmanager
    def together(self, *, training: bool) -> Iterator[None]:
        """See `OneProcess.together`; DeepSpeed is initialized again after a step that failed."""
        self._recover()
        if training:
            self._used.zero_()
            self._order = 0
            if self._stage == 3:
                # DeepSpeed overwrites only the gradients that arrive; the rest would be of the
                # step before.
                self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        try:
            with self._watching(), super().together(training=training):
                yield
        except BaseException:
            self._is_broken = True
            raise

    def _recover(self) -> None:
        """Initialize DeepSpeed again, with the state before a step that failed halfway."""
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
        """See `OneProcess.micro_batch`; from stage 2 on every micro-batch is reduced."""
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
        """See `OneProcess.backward`; DeepSpeed divides the sum over the ranks by their number."""
        self._engine.backward(loss * self._size)

    def forward(self, batch: Batch) -> batches.Forward:
        """See `OneProcess.forward`."""
        self._root.context = contextlib.nullcontext()
        return batches.Forward(*self._root(batch))

    def update(self) -> torch.Tensor:
        """Take the optimizer's step.

        Returns:
            The norm of all gradients; infinite where a gradient was not finite and the step was
            skipped.

        Raises:
            ValueError: If a parameter has a gradient in some steps but not in others.
        """
        kept = self._spared()
        self._engine.step()
        for tensor, before in kept:
            tensor.copy_(before)
        overflow = self._engine.optimizer.overflow
        norm = float("inf") if overflow else self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def _spared(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the weights without a gradient and their copies, which must not decay.

        Training in one process does not decay them either.
        """
        used = self._used.clone()
        with self._clock:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        idle = used == 0
        if self._state.idle is None:
            self._state.idle = idle
        if not torch.equal(self._state.idle, idle):
            changed = (self._state.idle != idle).nonzero()
            name = self._names[id(self._trained[int(changed[0])])]
            self._agreed = True  # all ranks raise it
            raise ValueError(
                f"zero_stage={self._stage} by DeepSpeed steps all parameters at once, and {name} "
                "has a gradient in some steps only; choose zero_stage=0"
            )
        spared = [self._trained[int(number)] for number in idle.nonzero()]
        held = [self._state.part_of_weight(p) for p in spared]
        if self._layout.is_apart:
            copies = map(self._state.updated_part, spared)
            held += [copy for copy in copies if copy is not None]
        return [(tensor, tensor.clone()) for tensor in held]

    # --- the state

    @property
    def layout(self) -> Layout:
        """Model and optimizer in the form of one process."""
        return self._layout

    def bytes(self) -> StateBytes:
        """Return the memory of this rank's state, with the most gradients that a step has had."""
        return self._state.bytes(self._gradient_bytes)

    def weights(self) -> dict[str, Any]:
        """Return the model's whole state dictionary, on every rank; all of them call it."""
        self._recover()
        with self._watching():
            return self._state.weights()

    def set_weights(self, state: Mapping[str, Any]) -> None:
        """Load a whole state dictionary; all ranks call it.

        Args:
            state: A state dictionary as `weights` returns it.
        """
        self._recover()
        with self._watching():
            self._state.set_weights(state)

    def moments(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's whole state on every rank; see `ShardedState.moments`."""
        with self._watching():
            return self._state.moments()

    def set_moments(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Load this rank's part of an optimizer state.

        Args:
            states: The whole state as `moments` returns it.
        """
        self._state.set_moments(states)

    def adopt(self, settings: FinetuneSettings) -> None:
        """Apply the gradient clipping and the weight decay of new settings.

        Args:
            settings: The settings from the next step on.
        """
        self._settings = settings
        self._engine.optimizer.clip_grad = settings.optim.max_grad_norm or 0.0
        layout, forms, decay = self._layout, dict(self._layout.named()), settings.optim.weight_decay
        for group, parameters in zip(layout.optimizer.param_groups, layout.groups, strict=True):
            group["weight_decay"] = decay_of(forms[layout.name_of(parameters[0])], decay)

    def told(self, report: Report) -> Report:
        """Return the report with notes on data types and on where the optimizer runs.

        Args:
            report: The engine's report.

        Returns:
            The report with the notes of `Ranks.told` and of DeepSpeed.
        """
        report, settings = super().told(report), self._settings
        notes, remarks = [], []
        if self._has_copies:
            adds = "fp32" if accumulates_in_fp32(settings) else "bf16"
            notes.append(
                "weights and gradients in bf16, an fp32 copy with the optimizer; gradients are "
                f"reduced in fp32 and kept in {adds}"
            )
            if settings.data.gradient_accumulation_steps > 1 and adds == "bf16":
                remarks.append(
                    "zero_stage=1 adds up the gradients of micro-batches in bf16; zero_stage=2 "
                    "adds them up in fp32"
                )
        if self.offloads:
            notes.append(
                "the optimizer's shard is in host memory"
                + ("; on a CPU that saves nothing" if self.device.type == "cpu" else "")
            )
        return dataclasses.replace(
            report, notes=(*report.notes, *notes), remarks=(*report.remarks, *remarks)
        )

    def close(self) -> None:
        """Make the user's model whole again; at stage 3 all ranks call it."""
        if self._engine is not None:
            with self._watching():
                self._end()


def _refuse_statistics(model: nn.Module) -> None:
    """Raise ValueError for layers with running statistics, which torch wants in the weights' type.

    The statistics stay float32 while the weights become bfloat16.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._NormBase):
            continue
        if layer.affine and layer.track_running_stats:
            raise ValueError(
                f"param_dtype='bf16': {name or 'it'} is a {type(layer).__name__}, whose statistics "
                "stay in fp32, and torch needs weights of the same type; choose param_dtype='fp32'"
            )


class DeepSpeedStepper(TorchStepper):
    """Stepper of `DeepSpeedRanks`, which hold weights, gradients and the optimizer's state."""

    _processes: DeepSpeedRanks

    def _update(
        self, loss: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """See `TorchStepper._update`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._bad = torch.maximum(self._bad, (~torch.isfinite(loss)).to(self._bad))
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        # An offloaded optimizer would copy a flag from the device without waiting for its value.
        flag = self._bad.cpu() if self._processes.offloads else self._bad
        self._optimizer.found_inf = flag  # type: ignore[attr-defined]
        grad_norm = self._processes.update()
        self._bad = torch.maximum(self._bad, (~torch.isfinite(grad_norm)).to(self._bad))
        return grad_norm, None, None

    def _forget_gradients(self) -> None:
        """Do nothing: DeepSpeed clears them after a step, and reuses its buffers on the host."""

    def bytes(self) -> StateBytes:
        """See `TorchStepper.bytes`."""
        return self._processes.bytes()

    def state_dict(self) -> dict[str, Any]:
        """See `Stepper.state_dict`; all ranks call it."""
        return {
            "model": self._processes.weights(),
            "optimizer": {
                "state": self._processes.moments(),
                "param_groups": self._processes.layout.param_groups(),
            },
            "loss_scale": None,
            "scheduler": None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`; all ranks call it."""
        zero, kept = self._processes, state["optimizer"]
        layout = zero.layout
        check_model(state["model"], layout.forms())
        own = {"param_groups": layout.param_groups()}
        check_optimizer(kept, own, layout.named(), self._kind)
        layout.check_moments(kept["state"])
        zero.set_weights(state["model"])
        zero.set_moments(kept["state"])

    def adopt(self, settings: FinetuneSettings) -> None:
        """See `Stepper.adopt`."""
        self._processes.check(settings)
        self._processes.adopt(settings)
