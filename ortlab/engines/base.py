"""The contract that every engine implements: protocols and values, no behavior of an engine.

An `Engine` executes a model. `Engine.wrap` returns a module for the user's own training loop;
`Engine.prepare` returns a `Stepper`, which trains the model one optimizer step at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ortlab.settings import OF_ANY_ENGINE, EngineSettings
from ortlab.utils.errors import Concise

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ortlab.engines.step_check import StepCheck
    from ortlab.settings import FinetuneSettings
    from ortlab.utils.process_memory import Memory

Batch = Any
"""Input of `forward`: a mapping (keyword arguments), a tuple or list (inputs, target), a tensor."""

LossFunction = Callable[..., "torch.Tensor"]
"""Function that is called as ``loss(output, target)`` and returns a scalar tensor."""


Cost = Literal["free", "rebuild", "recompile", "re-export"]
"""Work that a change of settings causes when a run continues.

``free``: none. ``rebuild``: a new stepper around the same model. ``recompile``: also a new
compilation by torch.compile. ``re-export``: also a new ORT graph, loaded from the user's cache if
it is there.
"""


progress: ContextVar[Callable[[str], None] | None] = ContextVar("progress", default=None)
"""Listener for progress lines of work that takes seconds, in this thread or task; default None."""


def tell(line: str) -> None:
    """Report one line of progress to the listener in `progress`, if there is one.

    Args:
        line: Description of the work that is going on.
    """
    listener = progress.get()
    if listener is not None:
        listener(line)


class EngineUnavailable(Concise, RuntimeError):
    """Raised when an engine cannot run on this machine; the message says why and what to do."""


class StepperLost(Concise, RuntimeError):
    """Raised when a stepper and its state are lost; a new one can resume from a checkpoint."""


class NotFinite(Concise, RuntimeError):
    """Raised when a loss is NaN or infinite; the optimizer did not apply that step."""


@dataclass(frozen=True)
class Capabilities:
    """Optional features of an engine.

    Attributes:
        workers: True if several processes can train one model together.
        zero_stages: Supported ZeRO stages in distributed training; 0 means none.
        recompute: True if the backward pass can recompute activations.
        activation_budget: True if activations can have a budget.
        ort_options: True if the options of the ORT graph have an effect.
        options: Names of the options that have an effect although the others have none.
        size_cost: Work that a batch of a new size causes.
    """

    workers: bool = False
    zero_stages: tuple[int, ...] = (0,)
    recompute: bool = False
    activation_budget: bool = False
    ort_options: bool = False
    options: tuple[str, ...] = ()
    size_cost: Cost = "free"

    def ignores(self, engine: str, name: str) -> str | None:
        """Return why a setting has no effect on an engine with these capabilities.

        Args:
            engine: Name of the engine, for the message.
            name: Name of the setting.

        Returns:
            The reason, or None if the setting has an effect.
        """
        if name == "activation_budget":
            return None if self.activation_budget else f"engine {engine!r} has no activation budget"
        used = self.ort_options or name in (*OF_ANY_ENGINE, *self.options)
        if used or name not in EngineSettings.declarations():
            return None
        graph = "graph of ORTModule" if self.options else "ORT graph"
        return f"engine {engine!r} has no {graph}, which {name} configures"


@dataclass(frozen=True)
class GraphCount:
    """Number of a model's graphs so far, and of their parts.

    Attributes:
        graphs: Number of graphs.
        ort_segments: Parts of them that ORT runs; None if they have no parts.
        torch_segments: Parts of them that torch runs; None if they have no parts.
        ort_share: Part of the time of the model's calls that ORT took; None before the first one.
        torch_share: Same for the rest of the graphs.
    """

    graphs: int
    ort_segments: int | None = None
    torch_segments: int | None = None
    ort_share: float | None = None
    torch_share: float | None = None


@dataclass(frozen=True)
class Report:
    """An engine's report on the model that it executes.

    Attributes:
        engine_used: Name of the engine that runs the model. Differs from the requested engine
            after a fallback.
        fallback_reason: Reason for the fallback; None without one.
        export_s: Total time of exports and graph builds so far, in seconds.
        check_s: Total time of self-checks so far, in seconds.
        notes: Lines for the user: completed checks, repeated exports and their reasons.
        remarks: Lines that every view shows: differences from eager torch, parts outside of ORT.
        graphs: Number of the model's graphs; None for an engine that makes none.
    """

    engine_used: str
    fallback_reason: str | None = None
    export_s: float = 0.0
    check_s: float = 0.0
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    graphs: GraphCount | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Its tensors are scalars and may still be on the device.

    Times are in milliseconds of the calling thread. On CUDA they are host times, because the
    device is not synchronized. A time is NaN if the engine does not measure it separately.

    Attributes:
        loss: Mean loss of the step's micro-batches.
        samples: Number of samples in the step.
        tokens: Total size of ``input_ids``, or 0 if the batches have none.
        grad_norm: Norm of all gradients before clipping; None if the engine does not compute it.
        lr: Learning rate of the step.
        forward_ms: Time of the forward passes.
        backward_ms: Time of the backward passes.
        optimizer_ms: Time of the optimizer step.
        loss_scale: Loss scale of the next step; None without loss scaling.
        skipped: True if gradients overflowed and the weights were not changed; None without loss
            scaling.
        communication_ms: Time with a collective in flight in distributed training, including the
            wait for the slowest rank. It can overlap with the other times.
        own_loss: Loss of the rows of this process only.
        own_samples: Number of samples of this process only.
        ranks: One result per rank, for a process that only coordinates the ranks.
    """

    loss: torch.Tensor
    samples: int
    tokens: int = 0
    grad_norm: torch.Tensor | None = None
    lr: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    loss_scale: torch.Tensor | None = None
    skipped: torch.Tensor | None = None
    communication_ms: float = 0.0
    own_loss: torch.Tensor | None = None
    own_samples: int = 0
    ranks: tuple[RankStep, ...] = ()


@dataclass(frozen=True)
class EvalResult:
    """Result of one evaluated batch.

    Attributes:
        loss: Loss of the batch, a scalar; None if it was not computed.
        samples: Number of samples in the batch.
        correct: Number of correct predictions; 0 if the targets are not classes.
        predicted: Number of predictions; 0 if the targets are not classes.
        predictions: What the model predicts for the batch, on the CPU, if that was asked for.
        targets: The targets of these predictions, on the CPU.
    """

    loss: torch.Tensor | None
    samples: int
    correct: int = 0
    predicted: int = 0
    predictions: torch.Tensor | None = None
    targets: torch.Tensor | None = None


@dataclass(frozen=True)
class StateBytes:
    """Size of the training state in one process, in bytes.

    Attributes:
        parameters: Bytes of the parameters.
        gradients: Bytes of the gradients.
        optimizer_state: Bytes of the optimizer state.
        host: The part of these bytes that is in host memory because the optimizer steps there.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    host: int = 0


@dataclass(frozen=True)
class RankStep:
    """Result of one step on one rank.

    Attributes:
        loss: Mean loss of the rank's own samples.
        samples: Number of the rank's own samples.
        step_ms: Time of the step, in milliseconds.
        communication_ms: Time with a collective in flight, in milliseconds.
        memory: Memory of the process after the step.
        held: Size of the rank's training state.
        base_bytes: Resident size of the process before it had the model, in bytes.
    """

    loss: float
    samples: int
    step_ms: float
    communication_ms: float
    memory: Memory
    held: StateBytes
    base_bytes: float


class Stepper(Protocol):
    """A model in training on one engine, one optimizer step at a time."""

    def step(self, batches: Sequence[Batch], *, lr: float) -> StepResult:
        """Run one optimizer step with the mean gradient of the micro-batches.

        If the loss is not finite, no weight changes. On a device this becomes known only when
        `finite` is read. With loss scaling such a step is skipped and training continues.

        Args:
            batches: Micro-batches of the step, at least one.
            lr: Learning rate of this step.

        Returns:
            The loss, the counts and the times of the step.

        Raises:
            ValueError: If the loss is not a scalar, or a batch does not fit `forward`.
            Exception: Any error of the forward or backward pass. Weights, running statistics and
                optimizer state are then unchanged.
        """
        ...

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> EvalResult:
        """Evaluate one batch in evaluation mode, without gradients.

        Args:
            batch: Batch in the same form as in `step`.
            outputs: True to return the predictions and the targets, too.

        Returns:
            The loss and the number of correct predictions.

        Raises:
            ValueError: If the loss is not a scalar, or the batch does not fit `forward`.
        """
        ...

    def evaluated(self, value: float) -> None:
        """Step the user's scheduler if it is stepped with the metric of each evaluation.

        Args:
            value: The metric.
        """
        ...

    def finite(self) -> bool:
        """Return True unless a loss was not finite and loss scaling could not handle it.

        Synchronizes with the device.
        """
        ...

    def report(self) -> Report:
        """Return the engine's report up to now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer, loss scale and scheduler.

        Returns:
            The model's ``state_dict`` under ``model``, the optimizer's under ``optimizer``, that of
            GradScaler under ``loss_scale`` (None without loss scaling) and that of the user's
            scheduler under ``scheduler`` (None without one).
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; its tensors are copied.

        Learning rates and weight decay are not restored: those of the settings apply. If the state
        has no loss scale, loss scaling starts from its initial value.

        Args:
            state: Result of `state_dict`, of the same model and optimizer.

        Raises:
            ValueError: If the state belongs to another model or optimizer. The message names the
                difference, and nothing has been changed.
        """
        ...

    def adopt(self, settings: FinetuneSettings) -> None:
        """Apply the settings that can change without a new stepper: clipping and weight decay.

        Args:
            settings: Settings from the next step on.

        Raises:
            ValueError: If this stepper cannot train with `settings`.
        """
        ...

    def rest(self) -> None:
        """Release gradients and engine memory that the next step can allocate again.

        Called after a step that ran out of memory, before a smaller one.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Restart the engine's own random generators, whose state cannot be read.

        Args:
            seed: New seed.
        """
        ...

    def close(self) -> None:
        """Release the engine's memory. The user's model keeps its trained weights."""
        ...


class ShardedStepper(Stepper, Protocol):
    """Stepper of one rank in a distributed run."""

    def bytes(self) -> StateBytes:
        """Return the size of this rank's training state."""
        ...


class WrappedModel(Protocol):
    """An engine's record of a model that it executes; see `wrapped_model`.

    Attributes:
        module: The user's own module.
        settings: Settings that apply now.
        engine: Name of the engine.
    """

    module: nn.Module
    settings: EngineSettings
    engine: str

    def report(self) -> Report:
        """Return the report of the model: engine used, fallback, export time, notes."""
        ...

    def configure(self, settings: EngineSettings) -> None:
        """Apply `settings` from the next call on.

        Args:
            settings: New settings.

        Raises:
            ValueError: If an option cannot work here.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Restart the engine's own random generators, which torch's seed does not affect.

        Args:
            seed: New seed.
        """
        ...

    def check_next(self, check: StepCheck) -> None:
        """Compare the next call with eager torch, whatever ``self_check`` says.

        Args:
            check: Check that gets the result.
        """
        ...

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return synthetic arguments with the structure, types and shapes of the last call.

        Returns:
            Positional and keyword arguments, or None before the first call.
        """
        ...


def wrapped_model(model: object) -> WrappedModel | None:
    """Return the engine's record of a wrapped model.

    Engines whose wrapper is a module of their own store the record there as ``_ortlab``.

    Args:
        model: Any object.

    Returns:
        The record, or None if `model` is not wrapped by such an engine.
    """
    found: WrappedModel | None = getattr(model, "__dict__", {}).get("_ortlab")
    if found is None and hasattr(type(model), "_ortlab"):  # a slot: the __dict__ is the model's
        found = model._ortlab  # type: ignore[attr-defined]
    return found


class Engine(Protocol):
    """A backend that executes a model.

    Attributes:
        name: Name of the engine in the settings.
        capabilities: Optional features of the engine.
    """

    name: str
    capabilities: Capabilities

    def unavailable(self) -> str | None:
        """Return why this engine cannot run on this machine.

        Returns:
            The reason and what to do about it, or None if the engine can run.
        """
        ...

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """Return why this engine cannot run with `settings` on this machine.

        Args:
            settings: Settings that name this engine.
            device: Chosen device, "auto" for the best one.

        Returns:
            The reason and what to do about it, or None if the engine can run.
        """
        ...

    def cost(self, before: FinetuneSettings, after: FinetuneSettings) -> Cost:
        """Return the work that a change of settings causes when a run continues.

        Args:
            before: Settings up to now, of any engine.
            after: New settings, which name this engine.

        Returns:
            The most expensive kind of work; see `Cost`.
        """
        ...

    def graph_key(self, settings: EngineSettings) -> Hashable:
        """Return the part of `settings` that determines the engine's graph.

        Args:
            settings: Settings that name this engine.

        Returns:
            A key that is equal for settings with the same graph, or None if the engine has no
            graph.
        """
        ...

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:
        """Return the graph options that differ between two settings.

        Args:
            before: Settings up to now.
            after: New settings, which name this engine.

        Returns:
            The new values as text, such as "opset=15, cast_level=0"; "" if none differs.
        """
        ...

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return a module that behaves like `model`, shares its parameters and runs on this engine.

        Args:
            model: The user's module.
            settings: Settings that name this engine.

        Returns:
            The wrapped module. Nothing is compiled or exported before its first call.

        Raises:
            ValueError: If the engine cannot wrap this model or use these settings.
            EngineUnavailable: If the engine cannot run on this machine.
        """
        ...

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's own module inside a wrapped module.

        Args:
            wrapped: Result of `wrap`.
        """
        ...

    def report(self, wrapped: nn.Module) -> Report:
        """Return the report of a wrapped model: engine used, fallback, export time, notes.

        Args:
            wrapped: Result of `wrap`.
        """
        ...

    def kept(self, wrapped: nn.Module) -> Mapping[str, int]:
        """Return the size of the graphs that are cached for earlier settings.

        Args:
            wrapped: Result of `wrap`.

        Returns:
            Bytes by a name for the settings. Objects whose size is unknown, such as the code of
            torch.compile, are not included.
        """
        ...

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Callable[..., Any] = ...,
        stepper: type[Any] = ...,
    ) -> Stepper:
        """Return a stepper that trains `model` in place.

        Args:
            model: The user's module, or a result of this engine's `wrap`, whose compiled code or
                exported graphs are reused.
            loss: Loss function, called as ``loss(output, target)``; None if the model returns its
                own loss.
            settings: Settings of the run.
            processes: Type of the process group: `single_process.OneProcess` by default, or its
                counterpart for several processes; see
                `ortlab.engines.distributed.steppers.prepare`.
            stepper: Class of the stepper: `torch.stepper.TorchStepper` by default, or a subclass
                that handles gradients across processes.

        Returns:
            The stepper, with the model on the device of the settings.

        Raises:
            ValueError: If the engine cannot train this model with these settings.
            EngineUnavailable: If the engine cannot run on this machine.
        """
        ...


def unfit(model: nn.Module) -> str | None:
    """Return why no engine can train a model.

    A module without trainable parameters is refused because ORTModule ends the process on it.

    Args:
        model: The user's module.

    Returns:
        The reason as the rest of a sentence that starts with "it", or None if the model can be
        trained.
    """
    from torch import nn  # heavy: torch
    from torch.nn.parameter import is_lazy  # heavy: torch

    if is_ortmodule(model):
        return "is already an ORTModule"
    if any(map(is_ortmodule, parts(model))):
        return "contains a wrapped model; unwrap that first"
    foreign = next((m for m in model.modules() if type(m).__module__.startswith("apex.")), None)
    if foreign is not None or _apex_is_on():
        what = "apex.amp" if foreign is None else f"apex's {type(foreign).__name__}"
        return f"uses {what}, which is obsolete; use the layers of torch.nn and torch.autocast"
    parameters = list(model.parameters())
    if any(is_lazy(p) for p in parameters):
        return "has lazy parameters; run one batch through it first"
    if any(tensor.is_meta for tensor in (*parameters, *model.buffers())):
        return "is on the meta device, without weights; use to_empty() and load them first"
    if not any(p.requires_grad for p in parameters):
        return "has no parameter that requires a gradient"
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        return f"is a {type(model).__name__}, which has no forward of its own"
    return None


def _apex_is_on() -> bool:
    """Return True if apex.amp.initialize was called, which patches forward and torch functions."""
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    return bool(getattr(getattr(state, "opt_properties", None), "enabled", False))


def is_ortmodule(module: nn.Module) -> bool:
    """Return True if a module is an ORTModule, wrapped by ortlab or not. Does not import ORT.

    Args:
        module: Any module.
    """
    return any(cls.__module__.startswith("onnxruntime.training") for cls in type(module).__mro__)


def parts(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules inside a model.

    Unlike ``modules()``, which ORTModule overrides, this also yields each ORTModule itself.

    Args:
        model: Any module; it is not yielded itself.

    Yields:
        Each submodule once.
    """
    waiting, met = [model], {id(model)}
    while waiting:
        for part in waiting.pop().children():
            if id(part) not in met:
                met.add(id(part))
                waiting.append(part)
                yield part
