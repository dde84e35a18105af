"""The module that `ortlab.wrap` returns for engine ``ort``: the user's model, with another forward.

The wrapper is of a subclass of the model's class and has the same ``__dict__`` as the model, so
that parameters, submodules, hooks and attributes are the model's own, in both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ortlab.engines import outer_compile
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.replaced_forward import is_around
from ortlab.settings import EngineSettings


class _Forward:
    """Descriptor of forward: the model's in ORT, or what a library has put around it.

    A forward that does not call the one in ORT is another forward of the model, and runs in ORT.
    A data descriptor, so that a forward in the shared ``__dict__`` does not hide it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, wrapper: Any, kind: type) -> Callable[..., Any]:
        if wrapper is None:
            return self._function
        function: Callable[..., Any] = wrapper._ortlab_forward
        return function

    def __set__(self, wrapper: Any, function: Callable[..., Any]) -> None:
        if is_around(function, wrapper._ortlab_own):
            object.__setattr__(wrapper, "_ortlab_forward", function)
        else:
            wrapper._ortlab.replace_forward(function)
            self._restore(wrapper)

    def __delete__(self, wrapper: Any) -> None:
        wrapper._ortlab.replace_forward(None)
        self._restore(wrapper)

    def _restore(self, wrapper: Any) -> None:
        object.__setattr__(wrapper, "_ortlab_forward", wrapper._ortlab_own)


class _Original:
    """Descriptor of the user's module, unless an attribute or a submodule has that name."""

    def __get__(self, wrapper: Any, kind: type) -> Any:
        if wrapper is None:
            return self
        return wrapper._modules.get("module", wrapper._ortlab.module)


def _forward_of(record: OrtModel) -> Callable[..., Any]:
    @functools.wraps(record.module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return outer_compile.apart(record, args, kwargs)

    return forward


def wrapped(model: nn.Module, settings: EngineSettings) -> nn.Module:
    """Return a module that runs `model` in ORT.

    Args:
        model: The user's module.
        settings: Settings of the engine.
    """
    kind: Any = type(model)
    made: nn.Module = object.__new__(_class_for(kind))
    object.__setattr__(made, "__dict__", model.__dict__)
    record = OrtModel(model, settings)
    own = _forward_of(record)
    object.__setattr__(made, "_ortlab", record)
    for name in ("_ortlab_own", "_ortlab_forward"):
        object.__setattr__(made, name, own)
    return made


def _class_for(kind: type[nn.Module]) -> type[nn.Module]:
    def reduced(wrapper: Any, _protocol: int = 2) -> tuple[Any, ...]:
        record: OrtModel = wrapper._ortlab
        return wrapped, (record.module, record.settings)

    members: dict[str, Any] = {
        "__slots__": ("_ortlab", "_ortlab_own", "_ortlab_forward"),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": reduced,  # which copy.deepcopy calls, too
    }
    if not hasattr(kind, "module"):
        members["module"] = _Original()  # ORTModule's name for it
    metaclass: Any = type(kind)
    made: type[nn.Module] = metaclass(kind.__name__, (kind,), members)
    # Set last: each new subclass of a layer of transformers (5.24) gets another forward, around the
    # class's. FSDP2 makes one, and its forward calls this one.
    made.forward = _Forward(_of_instance(kind.forward))  # type: ignore[assignment]
    return made


def _of_instance(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a wrapper's class, which runs a wrapper in ORT."""

    @functools.wraps(function)
    def forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper._ortlab_forward(*args, **kwargs)

    return forward
