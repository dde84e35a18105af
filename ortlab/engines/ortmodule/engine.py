"""The engine ``ort``: a module's forward and backward in ONNX Runtime, through ORTModule.

What ORTModule leaves to luck is decided here: which exported graph fits a call, whether the graph
computes what eager torch computes, and what happens when ORT cannot run the model.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from ortlab.engines.base import (
    Capabilities,
    Cost,
    EngineUnavailable,
    LossFunction,
    Report,
    tell,
    unfit,
)
from ortlab.engines.ortmodule import compat, options
from ortlab.engines.ortmodule.compat import base
from ortlab.engines.ortmodule.dispatch import GraphDispatcher, is_swapped, swapped
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.stepper import TorchStepper, autocast_for, no_device, training_device
from ortlab.settings import EngineSettings, FinetuneSettings

_CONTAINER = ("__len__", "__getitem__", "__iter__", "__contains__")
_OF_ACCELERATE = ("_original_forward", "_is_accelerate_prepared")
"""What accelerate sets where it replaces ``forward``: that of the wrapper, so not the model's."""


class OrtModuleEngine:
    """ORTModule on today's torch, checked against eager torch."""

    name = "ort"
    capabilities = Capabilities(
        workers=True, zero_stages=(0, 1, 2), recompute=True, ort_options=True
    )

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`."""
        return compat.unavailable()

    def refuses(self, settings: EngineSettings) -> str | None:
        """See `Engine.refuses`."""
        if (reason := self.unavailable()) is not None:
            return reason
        try:
            with warnings.catch_warnings(action="ignore"):
                options.check(settings)
        except ValueError as error:
            return str(error)
        return no_device(settings)

    def cost(self, before: EngineSettings, after: EngineSettings) -> Cost:
        """See `Engine.cost`."""
        same = before.engine == self.name and options.key(before) == options.key(after)
        return "rebuild" if same else "re-export"

    def graph_key(self, settings: EngineSettings) -> Hashable:
        """See `Engine.graph_key`."""
        return options.key(settings)

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:
        """See `Engine.graph_changes`."""
        return options.changed(before, after)

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """An ORTModule around `model`. Nothing is exported before the first call.

        ValueError for one that no engine can train (see `base.unfit`); EngineUnavailable when ORT
        cannot be loaded.
        """
        reason = unfit(model)
        if reason is not None:
            raise ValueError(f"cannot wrap this {type(model).__name__}: it {reason}")
        options.check(settings)
        try:
            return _class_for(model)(model, settings)
        except base.OrtUnavailable as error:
            raise EngineUnavailable(str(error)) from error

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """See `Engine.unwrap`."""
        return execution_of(wrapped).module

    def report(self, wrapped: nn.Module) -> Report:
        """See `Engine.report`."""
        return execution_of(wrapped).report()

    def kept(self, wrapped: nn.Module) -> Mapping[str, int]:
        """See `Engine.kept`: graphs without their sessions, which take a moment to make again."""
        return execution_of(wrapped).kept()

    def prepare(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        *,
        processes: Processes = OneProcess,
        stepper: type[TorchStepper] = TorchStepper,
    ) -> TorchStepper:
        """See `Engine.prepare`; `model` may be wrapped already, and keeps its exported graphs."""
        device = training_device(settings.device)
        wrapped = model if is_wrapped(model) else self.wrap(model, settings)
        wrapped.to(device)
        execution = execution_of(wrapped)
        report = execution.begin_run(settings)
        reseed(settings.seed)
        return stepper(
            wrapped,
            loss,
            settings,
            owner=execution.module,
            device=device,
            report=report,
            close=execution.end_run,
            rest=execution.rest,
            # On a CPU it is a matter of the graph's kernels.
            autocast=functools.partial(
                autocast_for, "fp32" if device.type == "cpu" else settings.precision, device
            ),
            reseed=reseed,
            processes=processes,
        )


def reseed(seed: int) -> None:
    """Restarts the generator of ORT's own dropout, which torch's seeds do not reach.

    It draws on a GPU; on a CPU torch's generator does.
    """
    compat.ortmodule().set_seed(seed)


def is_wrapped(module: object) -> bool:
    """Whether `module` is what `OrtModuleEngine.wrap` gives."""
    return isinstance(getattr(module, "__dict__", {}).get("_ortlab"), GraphDispatcher)


def execution_of(wrapped: nn.Module) -> GraphDispatcher:
    """How `wrapped`, which `OrtModuleEngine.wrap` gave, is executed."""
    execution = wrapped.__dict__["_ortlab"]
    assert isinstance(execution, GraphDispatcher)
    return execution


@functools.cache
def _wrapper_class() -> type[nn.Module]:
    ort = compat.ortmodule(on_progress=tell)

    class OrtModel(ort.ORTModule):  # type: ignore[misc, name-defined]
        """An ORTModule that picks the export that fits each call, and checks it."""

        def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
            # Before ORTModule's own __init__: afterwards every new attribute goes to the model.
            self._ortlab = GraphDispatcher(model, settings)
            super().__init__(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
            self._ortlab.attach(self, ort.FallbackPolicy.FALLBACK_DISABLE)
            self.__dict__["forward"] = _forward_like(model, self._ortlab)
            # ORTModule binds the model's methods to itself, and transformers' generate looks others
            # up in the class. It also needs the decoder's cache, which no graph has: plain torch.
            generate = getattr(model, "generate", None)
            if getattr(generate, "__module__", "").startswith("transformers."):
                self.__dict__["generate"] = generate
            self.__dict__["_is_accelerate_prepared"] = False

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            """The model's, so that libraries which ask for their own kind of model find it."""
            return execution_of(self).module.__class__

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _OF_ACCELERATE:
                self.__dict__[name] = value
            elif is_swapped(value) and name in execution_of(self).module._parameters:
                raise ValueError(swapped(name))
            else:
                super().__setattr__(name, value)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """The model's: ORTModule's own do without the arguments that torch has added."""
            return execution_of(self).module.load_state_dict(*args, **kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """The model's."""
            yield from execution_of(self).module.named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """The model's."""
            yield from execution_of(self).module.named_buffers(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            execution = execution_of(self)
            return _rewrap(copy.deepcopy(execution.module, memo), execution.settings)

        def __reduce__(self) -> tuple[Any, ...]:
            execution = execution_of(self)
            return _rewrap, (execution.module, execution.settings)

    return OrtModel


def _class_for(model: nn.Module) -> type[nn.Module]:
    names = tuple(name for name in _CONTAINER if hasattr(type(model), name))
    return _container_class(names) if names else _wrapper_class()


@functools.cache
def _container_class(names: tuple[str, ...]) -> type[nn.Module]:
    """The wrapper's class for a model that is a container: with those of `_CONTAINER` it has.

    Python looks them up in classes alone.
    """

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(execution_of(self).module, name)(*args)

    base: Any = _wrapper_class()
    made: type[nn.Module] = type(base)(base.__name__, (base,), {n: method(n) for n in names})
    return made


def _rewrap(model: nn.Module, settings: EngineSettings) -> nn.Module:
    return OrtModuleEngine().wrap(model, settings)


def _forward_like(model: nn.Module, execution: GraphDispatcher) -> Callable[..., Any]:
    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return execution.forward(args, kwargs)

    return forward
