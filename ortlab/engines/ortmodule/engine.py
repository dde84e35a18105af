"""The engine ``ortmodule``: forward and backward pass of a module in ONNX Runtime.

It adds the checks that ORTModule lacks: which exported graph fits a call, whether the graph
computes the same as eager torch, and what happens if ORT cannot run the model.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import nn

from ortlab.engines import outer_compile
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
from ortlab.engines.ortmodule.dispatch import GraphDispatcher, TakeOver, is_swapped, swapped
from ortlab.engines.replaced_forward import is_around
from ortlab.engines.single_process import OneProcess, Processes
from ortlab.engines.torch.stepper import TorchStepper, autocast_for, no_device, training_device
from ortlab.settings import EngineSettings, FinetuneSettings

_CONTAINER = ("__len__", "__getitem__", "__iter__", "__contains__")
_OF_ACCELERATE = ("_original_forward", "_is_accelerate_prepared")
"""Attributes that accelerate sets when it replaces ``forward``; they belong to the wrapper."""


class OrtModuleEngine:
    """Engine that runs a model through ORTModule on a current torch, checked against eager."""

    name = "ortmodule"
    capabilities = Capabilities(
        workers=True, zero_stages=(0, 1, 2), recompute=True, ort_options=True
    )

    def unavailable(self) -> str | None:
        """See `Engine.unavailable`."""
        return compat.unavailable()

    def refuses(self, settings: EngineSettings, device: str) -> str | None:
        """See `Engine.refuses`."""
        if (reason := self.unavailable()) is not None:
            return reason
        try:
            with warnings.catch_warnings(action="ignore"):
                options.check(settings, device)
        except ValueError as error:
            return str(error)
        return no_device(device)

    def cost(self, before: FinetuneSettings, after: FinetuneSettings) -> Cost:
        """See `Engine.cost`."""
        old, new = before.model, after.model
        same = old.engine == self.name and options.key(old) == options.key(new)
        return "rebuild" if same else "re-export"

    def graph_key(self, settings: EngineSettings) -> Hashable:
        """See `Engine.graph_key`."""
        return options.key(settings)

    def graph_changes(self, before: EngineSettings, after: EngineSettings) -> str:
        """See `Engine.graph_changes`."""
        return options.changed(before, after)

    def wrap(self, model: nn.Module, settings: EngineSettings) -> nn.Module:
        """Return an ORTModule around `model`. Nothing is exported before the first call.

        Args:
            model: The user's module.
            settings: Settings of the exports.

        Returns:
            The wrapped module, which shares the parameters of `model`.

        Raises:
            ValueError: If no engine can train the model (see `base.unfit`), or an option cannot
                work here.
            EngineUnavailable: If ORT cannot be loaded.
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
        """See `Engine.kept`: graphs without sessions; creating a session again is fast."""
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
        """See `Engine.prepare`; the exported graphs of a wrapped model are reused."""
        device = training_device(settings.parallel.device)
        wrapped = model if is_wrapped(model) else self.wrap(model, settings.model)
        wrapped.to(device)
        execution = execution_of(wrapped)
        report = execution.begin_run(settings.model)
        reseed(settings.data.seed)
        return stepper(
            wrapped,
            loss,
            settings,
            owner=execution.module,
            device=device,
            report=report,
            close=execution.end_run,
            rest=execution.rest,
            # On a CPU the graph's kernels determine the precision.
            autocast=functools.partial(
                autocast_for, "fp32" if device.type == "cpu" else settings.model.precision, device
            ),
            reseed=reseed,
            processes=processes,
        )


def reseed(seed: int) -> None:
    """Restart the random generator of ORT's own dropout, which torch's seed does not affect.

    It is used on a GPU; on a CPU dropout draws from torch's generator.

    Args:
        seed: New seed.
    """
    compat.ortmodule().set_seed(seed)


def is_wrapped(module: object) -> bool:
    """Return True if a module is a result of `OrtModuleEngine.wrap`.

    Args:
        module: Any object.
    """
    return isinstance(getattr(module, "__dict__", {}).get("_ortlab"), GraphDispatcher)


def execution_of(wrapped: nn.Module) -> GraphDispatcher:
    """Return the dispatcher that executes a wrapped module.

    Args:
        wrapped: Result of `OrtModuleEngine.wrap`.
    """
    execution = wrapped.__dict__["_ortlab"]
    assert isinstance(execution, GraphDispatcher)
    return execution


@functools.cache
def _wrapper_class() -> type[nn.Module]:
    ort = compat.ortmodule(on_progress=tell)

    class OrtModel(ort.ORTModule):  # type: ignore[misc, name-defined]
        """ORTModule that selects the export that fits each call, and checks it."""

        def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
            # Set before ORTModule's __init__: afterwards new attributes are set on the model.
            self._ortlab = GraphDispatcher(model, settings)
            super().__init__(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
            self._ortlab.attach(self, ort.FallbackPolicy.FALLBACK_DISABLE)
            own = _forward_like(model, self._ortlab)
            self.__dict__["forward"] = self.__dict__["_ortlab_own"] = own
            # ORTModule binds the model's methods to itself, and transformers' generate looks other
            # methods up in the class. It also needs the decoder's cache, which no graph has. So
            # generate runs in eager torch.
            generate = getattr(model, "generate", None)
            if getattr(generate, "__module__", "").startswith("transformers."):
                self.__dict__["generate"] = generate
            self.__dict__["_is_accelerate_prepared"] = False

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            """Class of the model, so that a library's isinstance checks accept the wrapper."""
            return execution_of(self).module.__class__

        def __setattr__(self, name: str, value: Any) -> None:
            own = self.__dict__.get("_ortlab_own")
            if name in _OF_ACCELERATE:
                self.__dict__[name] = value
            elif name == "forward" and own is not None and not is_around(value, own):
                execution_of(self).module.forward = value  # which the guard notices
                self.__dict__["forward"] = own
            elif is_swapped(value) and name in execution_of(self).module._parameters:
                raise ValueError(swapped(name))
            else:
                super().__setattr__(name, value)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Call the model's method: ORTModule's lacks the arguments that torch has added."""
            return execution_of(self).module.load_state_dict(*args, **kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """Call the model's method."""
            yield from execution_of(self).module.named_parameters(*args, **kwargs)

        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            """Call the model's method."""
            yield from execution_of(self).module.named_buffers(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            execution = execution_of(self)
            copied = copy.deepcopy(execution.module, memo)
            return _rewrap(copied, execution.settings, execution.take_over)

        def __reduce__(self) -> tuple[Any, ...]:
            execution = execution_of(self)
            return _rewrap, (execution.module, execution.settings, execution.take_over)

    return OrtModel


def _class_for(model: nn.Module) -> type[nn.Module]:
    names = tuple(name for name in _CONTAINER if hasattr(type(model), name))
    return _container_class(names) if names else _wrapper_class()


@functools.cache
def _container_class(names: tuple[str, ...]) -> type[nn.Module]:
    """Return a wrapper class with the given container methods, which Python looks up in classes."""

    def method(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(execution_of(self).module, name)(*args)

    base: Any = _wrapper_class()
    made: type[nn.Module] = type(base)(base.__name__, (base,), {n: method(n) for n in names})
    return made


def _rewrap(
    model: nn.Module, settings: EngineSettings, take_over: TakeOver | None = None
) -> nn.Module:
    wrapped = OrtModuleEngine().wrap(model, settings)
    execution_of(wrapped).take_over = take_over
    return wrapped


def _forward_like(model: nn.Module, execution: GraphDispatcher) -> Callable[..., Any]:
    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if outer_compile.is_possible():
            return outer_compile.apart(execution, args, kwargs)
        return execution.forward(args, kwargs)

    return forward
