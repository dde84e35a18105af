"""The engines ``eager`` and ``compile`` (torch.compile), and the stepper of all modules.

`TorchStepper` trains any module through autograd and a torch optimizer, including the wrapped
modules of the ORT engines.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlab.checkpoint.checks import check_model, check_optimizer, check_own_optimizer
from ortlab.checkpoint.nested_values import rebuilt
from ortlab.engines import batch as batches
from ortlab.engines.base import (
    Batch,
    Capabilities,
    Cost,
    EvalResult,
    LossFunction,
    Report,
    StateBytes,
    StepResult,
)
from ortlab.engines.loss_scale import LossScale, check_loss_scale, held_part
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.cpu import has_instructions
from ortlab.engines.torch.phases import phase
from ortlab.engines.torch.thread_count import suited_threads
from ortlab.settings import EngineSettings, FinetuneSettings, is_own

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OF_CODE = {"params", "foreach", "fused", "capturable", "differentiable", "maximize"}
"""Options of a parameter group that are not part of a run's state."""
_NO_CUDA = "device='cuda': torch sees no CUDA device; use device='cpu'"


def training_device(name: str) -> torch.device:
    """Return the device for a name in the settings.

    Args:
        name: "cpu", "cuda" or "auto", which means CUDA if torch sees a CUDA device.

    Returns:
        The device.

    Raises:
        ValueError: If the name is "cuda" and torch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(_NO_CUDA)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def no_device(device: str) -> str | None:
    """Return why a device is not available.

    Args:
        device: Chosen device, "auto" for the best one.

    Returns:
        The reason and what to do about it, or None if the device is available.
    """
    missing = device == "cuda" and not torch.cuda.is_available()
    return _NO_CUDA if missing else None


def trains_on_cpu(device: str) -> bool:
    """Return True if a model trains on a CPU.

    Args:
        device: Chosen device, "auto" for the best one.
    """
    return device == "cpu" or not torch.cuda.is_available()


def is_emulated(precision: str, device: str) -> bool:
    """Return True if torch computes in a precision without instructions of the CPU for it.

    Args:
        precision: Chosen precision.
        device: Chosen device, "auto" for the best one.
    """
    dtype = _HALVES.get(precision)
    return dtype is not None and trains_on_cpu(device) and not has_instructions(dtype)


def refuses_precision(precision: str, device: str) -> str | None:
    """Return why torch cannot compute in a precision.

    Args:
        precision: Chosen precision.
        device: Chosen device, "auto" for the best one.

    Returns:
        The reason and what to do about it, or None if torch can.
    """
    if precision == "tf32" and trains_on_cpu(device):
        return "precision='tf32' is for CUDA devices, and this is a CPU; choose precision='fp32'"
    return None


def optimizer_for(
    module: nn.Module, settings: FinetuneSettings, processes: OneProcess
) -> torch.optim.Optimizer:
    """Create the optimizer of the settings, in torch's fused implementation if there is one.

    Weight decay applies only to matrices. Biases and norms (fewer than two dimensions) have none,
    as in the recipes of BERT and GPT.

    Args:
        module: Module whose parameters are trained.
        settings: Settings with optimizer, learning rate and weight decay.
        processes: Process group, which may partition the optimizer into shards.

    Returns:
        The optimizer.

    Raises:
        ValueError: If no parameter requires a gradient, or the settings name no optimizer of these.
    """
    if is_own(settings.optim.optimizer):
        raise ValueError(
            f"optimizer={settings.optim.optimizer!r} is the name of an object, which only finetune "
            "and resume take; choose optimizer='adamw', 'sgd' or 'lamb'"
        )
    groups = [
        {
            "params": [p for _, p in named],
            "weight_decay": decay_of(named[0][1], settings.optim.weight_decay),
        }
        for named in trained_groups(module)
    ]
    if not groups:
        raise ValueError("no parameter of the model requires a gradient: nothing to train")
    if settings.optim.optimizer == "sgd":
        return processes.optimizer(
            torch.optim.SGD, groups, lr=settings.optim.learning_rate, momentum=0.9, fused=True
        )
    if settings.optim.optimizer == "lamb":
        from ortlab.engines.torch.lamb import Lamb  # heavy: pytorch_optimizer

        return processes.optimizer(Lamb, groups, lr=settings.optim.learning_rate)
    return processes.optimizer(
        torch.optim.AdamW, groups, lr=settings.optim.learning_rate, fused=True
    )


def trained_groups(module: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the names and parameters of each group of `optimizer_for`: matrices, then the others.

    Args:
        module: Module whose parameters are trained.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.dim() >= 2]
    others = [(name, p) for name, p in trained if p.dim() < 2]
    return [group for group in (matrices, others) if group]


def decay_of(parameter: torch.Tensor, weight_decay: float) -> float:
    """Return the weight decay of a parameter: 0 for biases and norms.

    Args:
        parameter: Parameter of the model.
        weight_decay: Weight decay of matrices.
    """
    return weight_decay if parameter.dim() >= 2 else 0.0


class Sums(NamedTuple):
    """Totals over the micro-batches of a step.

    Attributes:
        loss: Mean loss of the micro-batches.
        samples: Number of samples.
        tokens: Number of tokens.
        forward_s: Time of the forward passes, in seconds.
        backward_s: Time of the backward passes, in seconds.
        own_loss: Loss of the rows of this process only.
        own_samples: Number of samples of this process only.
    """

    loss: torch.Tensor
    samples: int
    tokens: int
    forward_s: float
    backward_s: float
    own_loss: torch.Tensor | None
    own_samples: int


class TorchStepper:
    """Stepper that trains a module through autograd and a torch optimizer.

    A loss or a gradient norm that is not finite sets a flag on the device, which the fused
    optimizer reads as ``found_inf``: from that step on no weight changes, without a
    synchronization. In fp16 only that step is skipped, and the loss scale decreases (see
    `LossScale`).

    Args:
        module: Module that the engine executes.
        loss: Loss function, or None if the module returns its own loss.
        settings: Settings of the run.
        owner: The user's own module, whose parameters are trained and whose names are saved.
        device: Device of the module.
        report: Function that returns the engine's report.
        close: Function that releases the engine's resources.
        rest: Function that releases engine memory that the next step can allocate again.
        autocast: Function that returns the context of the forward pass and the loss.
        reseed: Function that restarts random generators that torch does not seed.
        processes: Factory of the process group; a single process by default.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        owner: nn.Module,
        device: torch.device,
        report: Callable[[], Report],
        close: Callable[[], None] = lambda: None,
        rest: Callable[[], None] = lambda: None,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        reseed: Callable[[int], None] = lambda _: None,
        processes: Processes = OneProcess,
    ) -> None:
        # Counted first: DeepSpeed's stage 3 leaves each parameter without elements.
        self._elements = sum(p.numel() for p in owner.parameters())
        self._processes = processes(module, loss, owner, device)
        self._module = module
        self._owner = owner
        self._close, self._rest = close, rest
        self._modes = modes_of(owner)
        self._changing = [buffer for buffer in owner.buffers() if _may_change(buffer)]
        self._device = device
        self._max_grad_norm = settings.optim.max_grad_norm
        self._report = report
        self._autocast = autocast
        self._reseed = reseed
        self._own = self._processes.given
        if self._own is None:
            self._optimizer = optimizer_for(module, settings, self._processes)
        else:
            self._own.attach(owner)
            self._optimizer = self._own.optimizer
        self._kind = settings.optim.optimizer
        self._parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._bad = torch.zeros((), device=device)
        self._scale = (
            LossScale(self._optimizer, device) if settings.model.precision == "fp16" else None
        )
        self._products = _tf32 if settings.model.precision == "tf32" else contextlib.nullcontext

    def step(self, batches_: Sequence[Batch], *, lr: float) -> StepResult:
        """See `Stepper.step`."""
        kept = [buffer.clone() for buffer in self._changing]
        with self._training(batches_, kept):
            return self._step(batches_, lr, kept)

    @contextlib.contextmanager
    def _training(self, batches_: Sequence[Batch], kept: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run a step or one of its micro-batches; an error undoes it."""
        try:
            with (
                suited_threads(self._elements, batches_),
                self._products(),
                self._processes.together(training=True),
            ):
                yield
        except Exception:
            for buffer, before in zip(self._changing, kept, strict=True):
                buffer.copy_(before)
            self._forget_gradients()  # after an out-of-memory error a smaller step may then fit
            raise

    def _step(
        self, batches_: Sequence[Batch], lr: float, kept: Sequence[torch.Tensor]
    ) -> StepResult:
        if not self._module.training:
            self._module.train()
        self._forget_gradients()
        if self._own is not None:
            lr = self._own.begin(lr)
        sums = self._accumulate(batches_)
        started = time.perf_counter()
        with phase("optimizer"):
            grad_norm, loss_scale, skipped = self._update(sums.loss, lr)
            if self._own is not None:
                self._own.stepped(skipped)
            self._processes.equalize(self._changing)
            self._keep_finite(kept, self._bad.bool() if skipped is None else skipped)
        return StepResult(
            loss=sums.loss,
            samples=sums.samples,
            tokens=sums.tokens,
            grad_norm=grad_norm,
            lr=lr,
            forward_ms=sums.forward_s * 1e3,
            backward_ms=sums.backward_s * 1e3,
            optimizer_ms=(time.perf_counter() - started) * 1e3,
            communication_ms=self._processes.communication_ms(),
            loss_scale=loss_scale,
            skipped=skipped,
            own_loss=sums.own_loss,
            own_samples=sums.own_samples,
        )

    def _forget_gradients(self) -> None:
        """Release the gradients of the previous step."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._own is not None:  # it may leave out parameters that have gradients
            self._owner.zero_grad(set_to_none=True)

    def _accumulate(self, batches_: Sequence[Batch]) -> Sums:
        """Accumulate the mean gradient of the micro-batches in the parameters."""
        return self._add(batches_, before=0, of=len(batches_))

    def _add(self, batches_: Sequence[Batch], *, before: int, of: int) -> Sums:
        """Accumulate more of a step's `of` micro-batches, `before` of which are accumulated."""
        forward_s = backward_s = 0.0
        samples = tokens = own_samples = 0
        losses = []
        own_loss: torch.Tensor | None = None
        for number, batch in enumerate(batches_, before + 1):
            started = time.perf_counter()
            more_samples, more_tokens = batches.count(batch)
            samples += more_samples
            tokens += more_tokens
            share = self._processes.share(batch)
            own = batches.to_device(share.batch, self._device)
            with self._processes.micro_batch(last=number == of):
                with phase("forward"), self._autocast():
                    loss = self._processes.objective(own) / of
                losses.append(loss.detach() * share.part)
                own_loss = loss.detach() if own_loss is None else own_loss + loss.detach()
                own_samples += batches.count(share.batch)[0] if share.part else 0
                forward_s += time.perf_counter() - started
                if len(losses) == len(batches_):
                    total = self._processes.total(losses, samples)
                started = time.perf_counter()
                loss = loss * share.factor
                scaled = loss if self._scale is None else self._scale.scaled(loss)
                with phase("backward"):
                    self._processes.backward(scaled)
                backward_s += time.perf_counter() - started
        return Sums(total, samples, tokens, forward_s, backward_s, own_loss, own_samples)

    def _update(
        self, loss: torch.Tensor, lr: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Run the optimizer step; return gradient norm, loss scale and whether it was skipped."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scale is not None:
            self._scale.unscale(loss, gradients)
        grad_norm = self._processes.norm(gradients)
        if self._max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, grad_norm)
        if self._own is None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        if self._scale is not None:
            loss_scale, skipped = self._scale.step()
            self._bad = self._scale.collapsed
            return grad_norm, loss_scale, skipped
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        self._bad = torch.maximum(self._bad, bad.to(self._bad))
        if self._own is not None and not self._own.reads_flag:
            if not self._bad:
                self._optimizer.step()
            return grad_norm, None, None
        # torch.amp.GradScaler sets these attributes to make a fused optimizer skip a step.
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        if len(self._optimizer.state) < len(gradients):
            self._make_room()
        self._optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        self._optimizer.step()
        return grad_norm, None, None

    def _make_room(self) -> None:
        """Allocate AdamW's state of every parameter without changing any weight.

        AdamW allocates group by group in its first step (torch 2.13, `_init_group`). If memory ran
        out at the second group, the weights of the first would already have changed, and one
        parameter could have half of its state.
        """
        if type(self._optimizer) is not torch.optim.AdamW:
            return
        known = set(self._optimizer.state)
        self._optimizer.found_inf = torch.ones_like(self._bad)  # type: ignore[attr-defined]
        try:
            self._optimizer.step()
        except Exception:
            for parameter in set(self._optimizer.state) - known:
                del self._optimizer.state[parameter]
            raise

    def _keep_finite(self, kept: Sequence[torch.Tensor], bad: torch.Tensor) -> None:
        """Restore the running statistics of before a `bad` step, on the device."""
        for buffer, before in zip(self._changing, kept, strict=True):
            buffer.copy_(torch.where(bad, before, buffer))

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> EvalResult:
        """See `Stepper.evaluate`."""
        modes, was_training = modes_of(self._owner), self._module.training
        self._module.eval()
        try:
            with (
                torch.no_grad(),
                suited_threads(self._elements, [batch]),
                self._products(),
                self._autocast(),
                self._processes.together(training=False),
            ):
                share = self._processes.share(batch)
                own = batches.to_device(share.batch, self._device)
                result = self._processes.forward(own)
                loss, correct, predicted = self._processes.evaluated(
                    result.loss.detach(), share.part, *batches.hits(result)
                )
                # A rank without samples evaluates a row of another one.
                found = batches.on_host(result) if outputs and share.part else (None, None)
        finally:
            self._module.training = was_training
            set_modes(modes)
        samples, _ = batches.count(batch)
        return EvalResult(loss, samples, correct, predicted, *found)

    def evaluated(self, value: float) -> None:
        """See `Stepper.evaluated`."""
        if self._own is not None:
            self._own.evaluated(value)

    def finite(self) -> bool:
        """See `Stepper.finite`."""
        return not bool(self._bad)

    def anywhere(self, found: bool) -> bool:
        """See `OneProcess.anywhere`."""
        return self._processes.anywhere(found)

    def report(self) -> Report:
        """See `Stepper.report`."""
        return self._processes.told(self._report())

    def bytes(self) -> StateBytes:
        """Return the size of this process's training state."""
        return StateBytes(
            parameters=sum(p.nbytes for p in self._owner.parameters()),
            gradients=sum(p.grad.nbytes for p in self._parameters if p.grad is not None),
            optimizer_state=sum(
                tensor.nbytes
                for state in held_part(self._optimizer).state.values()
                for tensor in batches.tensors(state)
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """See `Stepper.state_dict`."""
        return {
            "model": self._processes.weights(),
            "optimizer": self._processes.optimizer_state(self._optimizer),
            "loss_scale": None if self._scale is None else self._scale.state_dict(),
            "scheduler": None if self._own is None else self._own.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`."""
        kept, whole = state["optimizer"], self._processes.optimizer_state(self._optimizer)
        check_model(state["model"], self._processes.weights())
        named = self._processes.whole_parameters(self._parameters)
        if self._own is None or self._own.named:
            check_optimizer(kept, whole, named, self._kind)
        else:
            check_own_optimizer(kept, whole)
        if self._own is not None:
            self._own.check(state.get("scheduler"))
        if self._scale is not None:
            check_loss_scale(state["loss_scale"])
        self._processes.take_weights(state["model"])
        states = self._laid_out(kept["state"])
        groups = torch.optim.Optimizer.state_dict(self._optimizer)["param_groups"]
        if self._own is not None:  # a scheduler may have changed other options than the rate, too
            groups = groups_with(kept["param_groups"], groups)
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        if self._own is not None:
            self._own.load(state.get("scheduler"))
        if self._scale is not None:
            self._scale.load(state["loss_scale"])

    def _laid_out(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Copy this process's part of an optimizer's states, in the layout of the parameters."""
        return {
            number: {name: _like(value, self._parameters[number]) for name, value in each.items()}
            for number, each in self._processes.own(self._optimizer, states).items()
        }

    def adopt(self, settings: FinetuneSettings) -> None:
        """See `Stepper.adopt`."""
        self._processes.check(settings)
        self._max_grad_norm = settings.optim.max_grad_norm
        if self._own is not None and not self._own.named:
            return
        for group in self._optimizer.param_groups:
            group["weight_decay"] = decay_of(group["params"][0], settings.optim.weight_decay)

    def rest(self) -> None:
        """See `Stepper.rest`."""
        self._forget_gradients()
        self._rest()

    def reseed(self, seed: int) -> None:
        """See `Stepper.reseed`."""
        self._reseed(self._processes.reseeded(seed))

    def close(self) -> None:
        """See `Stepper.close`."""
        self._forget_gradients()
        if self._own is not None:
            self._own.release()
        set_modes(self._modes)
        self._module.training = self._owner.training
        self._processes.close()
        self._close()


def groups_with(
    kept: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups with the saved options that are part of a run's state.

    Args:
        kept: Saved groups.
        own: The optimizer's groups, whose other options are unchanged.
    """
    return [
        {**here, **{name: there[name] for name in here.keys() & there.keys() - _OF_CODE}}
        for here, there in zip(own, kept, strict=True)
    ]


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """Copy an optimizer's `value` for `parameter` to new memory with the same layout.

    The fused optimizers iterate over both in memory order, without regard to strides.
    """
    if not isinstance(value, torch.Tensor):
        return rebuilt(value, torch.clone)
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def modes_of(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the training mode of every submodule; a frozen part may be in evaluation mode.

    Args:
        module: Module to read.
    """
    return [(child, child.training) for child in module.modules()]


def set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Restore training modes.

    Args:
        modes: Result of `modes_of`.
    """
    for module, training in modes:
        module.training = training


def _may_change(buffer: torch.Tensor) -> bool:
    """Return True for statistics and counters; masks and position ids are large and constant."""
    return buffer.is_floating_point() or buffer.dim() == 0


class _TorchEngine:
    """The part that both engines of PyTorch have in common: they make no graph of their own."""

    name: str

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`."""
        return None

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """See `Engine.refuses`."""
        reason = self.unavailable() or no_device(device)
        return reason or refuses_precision(settings.precision, device)

    def graph_key(self, settings: EngineSettings) -> Hashable:  # noqa: ARG002
        """See `Engine.graph_key`."""
        return None

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:  # noqa: ARG002
        """See `Engine.graph_changes`."""
        return ""

    def report(self, wrapped: nn.Module) -> Report:  # noqa: ARG002
        """See `Engine.report`."""
        return Report(engine_used=self.name)

    def kept(self, wrapped: nn.Module) -> Mapping[str, int]:  # noqa: ARG002
        """See `Engine.kept`."""
        return {}


class Eager(_TorchEngine):
    """Engine that runs the model in eager torch: the reference for every other engine."""

    name = "eager"
    capabilities = Capabilities(workers=True, zero_stages=(0, 1, 2, 3))

    def cost(self, before: FinetuneSettings, after: FinetuneSettings) -> Cost:  # noqa: ARG002
        """See `Engine.cost`."""
        return "rebuild"

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return `model` itself.

        Args:
            model: The user's module.
            settings: Settings that name this engine.

        Raises:
            ValueError: If the precision is not fp32; the user's loop sets that by autocast.
        """
        refuse_precision(settings)
        return model

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """See `Engine.unwrap`."""
        return wrapped

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`."""
        return stepper_for(self, model, loss, settings, processes, stepper)


class Compile(_TorchEngine):
    """Engine that runs the model through torch.compile with its default backend, Inductor."""

    name = "compile"
    capabilities = Capabilities(workers=True, zero_stages=(0, 1, 2), size_cost="recompile")

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`; on a CPU, Inductor needs a C++ compiler."""
        if torch.cuda.is_available() or any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
            return None
        return "engine 'compile' needs a C++ compiler: apt-get install g++, or use engine='eager'"

    def cost(self, before: FinetuneSettings, after: FinetuneSettings) -> Cost:
        """See `Engine.cost`; torch recompiles for another precision or another type of weights."""
        names = ("engine", "precision", "param_dtype")
        same = all(before[name] == after[name] for name in names)
        return "rebuild" if same else "recompile"

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return torch.compile's module; the first call with a new kind of input compiles.

        Args:
            model: The user's module.
            settings: Settings that name this engine.

        Raises:
            ValueError: If the precision is not fp32; the user's loop sets that by autocast.
        """
        refuse_precision(settings)
        return _compiled(model)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """See `Engine.unwrap`."""
        original: nn.Module = wrapped._orig_mod  # type: ignore[assignment]
        return original

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`."""
        compiled = model if hasattr(model, "_orig_mod") else _compiled(model)
        return stepper_for(self, compiled, loss, settings, processes, stepper)


def _compiled(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def refuse_precision(settings: EngineSettings) -> None:
    """Raise for a precision other than fp32: a wrapped model runs in the user's own loop.

    Args:
        settings: Settings of the wrapped model.

    Raises:
        ValueError: If the precision is not fp32.
    """
    if settings.precision != "fp32":
        raise ValueError(
            f"precision={settings.precision!r} of engine {settings.engine!r} applies only to runs "
            "of finetune; in your own loop use torch.autocast around forward and loss"
        )


def autocast_for(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which torch computes the forward pass in a precision.

    Args:
        precision: Precision of the settings.
        device: Device of the module.

    Returns:
        torch.autocast for fp16 and bf16, else a context without effect.
    """
    if precision in ("fp32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, _HALVES[precision])


def _slowness(precision: str) -> tuple[str, ...]:
    """Return a remark if a precision is slower than fp32 on a CPU."""
    if precision == "fp16":
        return ("fp16 on a CPU is for checking numerics: it is slower than fp32",)
    if is_emulated(precision, "cpu"):
        return (
            "this CPU has no instructions for bf16, so that torch takes many times as long as in "
            "fp32; engine='ort' takes about as long",
        )
    return ()


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Enable TF32 for CUDA's float32 products, process-wide: backward runs in other threads."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        yield  # if torch's newer API enabled it, its older one would raise
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def stepper_for(
    engine: Eager | Compile,
    module: nn.Module,
    loss: LossFunction | None,
    settings: FinetuneSettings,
    processes: Processes,
    stepper: type[TorchStepper],
    *,
    report: Callable[[], Report] | None = None,
    close: Callable[[], None] = lambda: None,
) -> TorchStepper:
    """Return a stepper that trains a module under autocast.

    Args:
        engine: Engine that has wrapped the module.
        module: The wrapped module.
        loss: Loss function, or None if the module returns its own loss.
        settings: Settings of the run.
        processes: Factory of the process group.
        stepper: Class of the stepper.
        report: Function that returns the engine's report; by default it names the engine alone.
        close: Function that is called when the stepper is closed.

    Raises:
        ValueError: If torch cannot compute in the precision of the settings on their device.
    """
    if (
        reason := refuses_precision(settings.model.precision, settings.parallel.device)
    ) is not None:
        raise ValueError(reason)
    device = training_device(settings.parallel.device)
    module.to(device)
    remarks = _slowness(settings.model.precision) if device.type == "cpu" else ()
    return stepper(
        module,
        loss,
        settings,
        owner=engine.unwrap(module),
        device=device,
        report=report or functools.partial(Report, engine.name, notes=remarks, remarks=remarks),
        close=close,
        autocast=functools.partial(autocast_for, settings.model.precision, device),
        processes=processes,
    )
