"""The contract that every engine keeps: protocols and values."""

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

    from ortlab.settings import FinetuneSettings
    from ortlab.utils.process_memory import Memory

Batch = Any
"""What forward takes: a mapping (keyword arguments), a tuple or list (inputs, target), a tensor."""

LossFunction = Callable[..., "torch.Tensor"]


Cost = Literal["free", "rebuild", "recompile", "re-export"]
"""What other settings take when a run goes on with them: nothing, another stepper around the same
model, what torch.compile compiles too, or ORT's graph too (from the user's cache where it is)."""


progress: ContextVar[Callable[[str], None] | None] = ContextVar("progress", default=None)
"""Who hears of work that takes seconds, in this thread or task; nobody by default."""


def tell(line: str) -> None:
    """Says what takes its time just now, to whoever listens."""
    listener = progress.get()
    if listener is not None:
        listener(line)


class EngineUnavailable(Concise, RuntimeError):
    """An engine that cannot run on this machine; the message says why and what to do."""


class StepperLost(Concise, RuntimeError):
    """A stepper that is gone, and its state with it; another one goes on from a checkpoint."""


class NotFinite(Concise, RuntimeError):
    """A loss that is NaN or infinite; the optimizer did not use it."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do that not all of them can.

    ``workers`` says whether several processes can train together, ``zero_stages`` are those of ZeRO
    that it knows then, ``recompute`` says whether its backward pass can compute activations again,
    ``ort_options`` whether the options of ORT's graph mean anything to it, ``size_cost`` what
    batches of another size cost.
    """

    workers: bool = False
    zero_stages: tuple[int, ...] = (0,)
    recompute: bool = False
    ort_options: bool = False
    size_cost: Cost = "free"

    def ignores(self, engine: str, name: str) -> str | None:
        """Why the setting `name` means nothing to an `engine` with these; None where it does."""
        if self.ort_options or name in OF_ANY_ENGINE or name not in EngineSettings.declarations():
            return None
        return f"engine {engine!r} has no graph of ORT's, which is what {name} is for"


@dataclass(frozen=True)
class Report:
    """What an engine has to say about the model that it executes.

    ``engine_used`` differs from the engine asked for when a fallback runs; ``fallback_reason`` then
    says why. ``export_s`` is the time of the exports and graph builds so far, ``check_s`` that of
    the self-checks, in seconds. ``notes`` are lines for the user: what was checked, what was
    exported again and why. ``remarks`` are those that every view shows: where the engine does not
    do what eager torch does.
    """

    engine_used: str
    fallback_reason: str | None = None
    export_s: float = 0.0
    check_s: float = 0.0
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Its tensors have no dimensions, and may still be on the device.

    ``loss_scale`` is what the next step has, ``skipped`` whether this one left the weights as they
    were because its gradients overflowed; None for both without a loss scale.

    Times are milliseconds of the calling thread; on CUDA they are host times, since nothing here
    waits for the device; NaN where an engine does not tell them apart. ``tokens`` is the size of
    ``input_ids`` where a batch has them, else 0. ``communication_ms`` is the time with a collective
    under way where several processes train together, waiting for the slowest included; other times
    of the step may run meanwhile.
    ``own_loss`` and ``own_samples`` are of this process's rows alone; ``ranks`` is what each of
    several processes tells, for who stands outside.
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
    """One batch evaluated. ``correct`` of ``predicted`` are counted where targets are classes."""

    loss: torch.Tensor | None
    samples: int
    correct: int = 0
    predicted: int = 0


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one process holds of what training keeps from step to step.

    ``host`` are those among them that are in host memory because the optimizer steps there.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    host: int = 0


@dataclass(frozen=True)
class RankStep:
    """What one of several ranks tells of a step.

    ``loss`` is that of its own samples, ``base_bytes`` its resident size before it had the model.
    """

    loss: float
    samples: int
    step_ms: float
    communication_ms: float
    memory: Memory
    held: StateBytes
    base_bytes: float


class Stepper(Protocol):
    """A model in training on one engine."""

    def step(self, batches: Sequence[Batch], *, lr: float) -> StepResult:
        """One optimizer step over micro-batches: the gradient is the mean of theirs.

        A loss that is not finite changes no weight; on a device it is known only later, when
        `finite` is read. Under a loss scale such a step is skipped and others follow it.
        ValueError for a loss that is not a scalar. Where forward or backward raises, weights,
        running statistics and optimizer are as they were.
        """
        ...

    def evaluate(self, batch: Batch) -> EvalResult:
        """The loss and the hits of one batch in evaluation mode, without gradients."""
        ...

    def finite(self) -> bool:
        """Whether all losses were finite, or a loss scale could fall. Waits for the device."""
        ...

    def report(self) -> Report:
        """What the engine has to say by now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state as torch gives them, under ``model`` and ``optimizer``.

        Under ``loss_scale`` that of GradScaler, None without one.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the form of `state_dict` back, in memory of its own.

        The optimizer's rates and decays stay those of the settings; a loss scale begins anew where
        there is none. ValueError, before anything is changed, names where the state is of another
        model or optimizer.
        """
        ...

    def adopt(self, settings: FinetuneSettings) -> None:
        """Takes from `settings` what the next step can have as it is: clipping and decay."""
        ...

    def rest(self) -> None:
        """Gives back gradients, and what the engine keeps from step to step: a step makes it anew.

        For a step that found too little memory, before a smaller one.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Restarts the generators that are the engine's own and cannot be read."""
        ...

    def close(self) -> None:
        """Gives back what the engine holds; the user's model keeps the trained weights."""
        ...


class ShardedStepper(Stepper, Protocol):
    """That of one rank among several."""

    def bytes(self) -> StateBytes:
        """What this rank holds of the training's state now."""
        ...


class WrappedModel(Protocol):
    """What an engine keeps of a model that it executes; see `wrapped_model`.

    ``module`` is the user's own module, ``settings`` are those that hold now.
    """

    module: nn.Module
    settings: EngineSettings

    def report(self) -> Report:
        """Return the report of the model: engine used, fallback, export time, notes."""
        ...

    def configure(self, settings: EngineSettings) -> None:
        """Have `settings` hold from the next call on.

        Raises:
            ValueError: If an option cannot work here.
        """
        ...

    def reseed(self, seed: int) -> None:
        """Restart the engine's own random numbers, which torch's seeds do not reach."""
        ...

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return arguments in the form of the last call, of made-up values; None before a call."""
        ...


def wrapped_model(model: object) -> WrappedModel | None:
    """Return what an engine keeps of `model`, or None where no engine's wrapper is around it.

    Engines whose wrapper is a module of their own keep it there as ``_ortlab``.
    """
    found: WrappedModel | None = getattr(model, "__dict__", {}).get("_ortlab")
    return found


class Engine(Protocol):
    """A way to execute a model."""

    name: str
    capabilities: Capabilities

    def unavailable(self) -> str | None:
        """Why this engine cannot run here and what to do about it; None when it can."""
        ...

    def refuses(self, settings: EngineSettings) -> str | None:
        """Why this engine cannot run under `settings` on this machine; None when it can."""
        ...

    def cost(self, before: EngineSettings, after: EngineSettings) -> Cost:
        """What it takes to go on under `after`, which name this engine, where `before` held."""
        ...

    def graph_key(self, settings: EngineSettings) -> Hashable:
        """Return the part of `settings` that the engine's graph is made with; None without one."""
        ...

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:
        """Return the options of the graph that differ, as "opset=15, cast_level=0"; "" for none."""
        ...

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """A module that behaves as `model` does and shares its parameters."""
        ...

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The user's own module inside what `wrap` gave."""
        ...

    def report(self, wrapped: nn.Module) -> Report:
        """What there is to say by now about what `wrap` gave."""
        ...

    def kept(self, wrapped: nn.Module) -> Mapping[str, int]:
        """The bytes that wait in what `wrap` gave for a return to earlier settings, by their name.

        What has no size that could be told (torch.compile's code) is not among it.
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
        """A stepper that trains `model` in place, by `loss(output, target)` or the model's own.

        `model` is the user's module, or what this engine's `wrap` gave, which goes on with what it
        has compiled or exported. `processes` says how several take each step, and `stepper` what
        becomes of their gradients: `single_process.OneProcess` and `torch.stepper.TorchStepper`, or
        what takes their place among several; see
        `ortlab.engines.distributed.steppers.prepare`.
        """
        ...


def unfit(model: nn.Module) -> str | None:
    """Why no engine can train `model`; None when one may. The reason goes on from 'it'.

    A module without trainable parameters is one reason: ORTModule ends the process on it.
    """
    from torch import nn
    from torch.nn.parameter import is_lazy

    if is_ortmodule(model):
        return "is already an ORTModule"
    if any(map(is_ortmodule, parts(model))):
        return "contains a wrapped model; unwrap that first"
    foreign = next((m for m in model.modules() if type(m).__module__.startswith("apex.")), None)
    if foreign is not None or _apex_is_on():
        what = "apex.amp" if foreign is None else f"apex's {type(foreign).__name__}"
        return f"uses {what}, which torch has replaced: take torch.nn's layers and torch.autocast"
    parameters = list(model.parameters())
    if any(is_lazy(p) for p in parameters):
        return "has lazy parameters; put one batch through it first"
    if any(tensor.is_meta for tensor in (*parameters, *model.buffers())):
        return "is on the meta device, without weights; use to_empty() and load them first"
    if not any(p.requires_grad for p in parameters):
        return "has no parameter that requires a gradient"
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        return f"is a {type(model).__name__}, which has no forward of its own"
    return None


def _apex_is_on() -> bool:
    """Whether apex.amp.initialize was called: it rewrites forward and torch's functions."""
    state = getattr(sys.modules.get("apex.amp._amp_state"), "_amp_state", None)
    return bool(getattr(getattr(state, "opt_properties", None), "enabled", False))


def is_ortmodule(module: nn.Module) -> bool:
    """Whether `module` is an ORTModule, of ours or not; does not import ORT for it."""
    return any(cls.__module__.startswith("onnxruntime.training") for cls in type(module).__mro__)


def parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `model`. Unlike in ``modules()`` no ORTModule hides behind its own."""
    waiting, met = [model], {id(model)}
    while waiting:
        for part in waiting.pop().children():
            if id(part) not in met:
                met.add(id(part))
                waiting.append(part)
                yield part
