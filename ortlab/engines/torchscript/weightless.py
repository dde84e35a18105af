"""Runs of `forward` that only serve its graph: results that depend on weights have no values.

An export runs `forward` twice, once to learn the structure of its outputs and once to trace it, and
uses none of the computed numbers. Within `without_weights`, those runs compute results that depend
on the inputs alone (masks, positions, sizes) as usual. From the first operation on a parameter
onward they use torch's FakeTensors, which have a type, a shape and a device. The trace, and with it
the graph, is the same. If `forward` reads a value that a FakeTensor does not have, or writes one
into a tensor with values, the run fails, and the caller repeats it with all values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class NeedsValues(RuntimeError):
    """Raised when `forward` needs a value that was not computed; the message names the reason."""


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operations on parameters, and on their results, return results without values.

    It runs below torch's tracer, which sees each operation first. `failed` holds the error of an
    operation that had no result, because `forward` may catch the exception and take another path.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self.failed: BaseException | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute results that depend on parameters as FakeTensors; call `func` for all others."""
        named = dict(kwargs or {})
        try:
            if func in _UNHEARD:
                raise NeedsValues(
                    f"the tracer records only operations inside {func}, which were skipped"
                )
            if not any(isinstance(each, _VALUELESS) for each in _single((*args, *named.values()))):
                return func(*args, **named)
            for name, value in _written(func, args, named):
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    raise NeedsValues(f"{func} writes to {name}, which has values")
            with _unheard(), self._shapes:
                return func(*args, **named)
        except BaseException as error:
            self.failed = error
            raise


_VALUELESS = (FakeTensor, nn.Parameter)
_UNHEARD = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_overrideable.default}
"""Operators that the tracer skips in favor of the operators that they call (DONT_RECORD_TRACE in
torch's tools/autograd/gen_trace_type.py). This mode returns the result before those are called, so
the tracer would record nothing."""
_C: Any = torch._C
_TRACER = _C._dispatch_key_parse("Tracer")


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Suspend the tracer while torch computes a fake result in Python: it would record sizes."""
    if (state := _C._get_tracing_state()) is None:
        yield
        return
    # After the tracer has passed an operation on, torch refuses to change the tracer's state.
    with _C._PreserveDispatchKeyGuard():
        _C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
        _C._set_tracing_state(None)
        try:
            yield
        finally:
            _C._set_tracing_state(state)


def _single(values: Sequence[Any]) -> Iterator[Any]:
    """Yield `values` and the items of lists among them; torch's operators nest no deeper."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument that `func` changes, one pair per list item."""
    for place, name in _writes(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        for each in _single((value,)):
            yield name, each


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class _Asked(threading.local):
    """Mode in which this thread's exports run `forward`."""

    mode: _Weightless | None = None


_asked = _Asked()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Run `forward` in this thread's exports without values for results that depend on weights.

    Compare the exported graph with `forward` itself afterwards: a module that checks ``type(x)``,
    for example, sees a FakeTensor.

    Raises:
        NeedsValues: On exit, if `forward` needs such a value. Within the context the same cause
            may raise other exceptions.
    """
    before, _asked.mode = _asked.mode, _Weightless()
    # A weight that autocast converts in here is no parameter and would count as having values.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
        if _asked.mode.failed is not None:
            raise NeedsValues(str(_asked.mode.failed))
    finally:
        _asked.mode = before
        torch.set_autocast_cache_enabled(cached)


def running() -> AbstractContextManager[object]:
    """Return the context in which an export in this thread runs `forward`."""
    return _asked.mode or contextlib.nullcontext()


def is_asked() -> bool:
    """Return True if this thread is within `without_weights`."""
    return _asked.mode is not None


def twin(module: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares its parameters, which such a run never changes.

    Args:
        module: Module to copy. Its buffers and attributes are copied, its parameters are shared.
    """
    return copy.deepcopy(module, {id(each): each for each in module.parameters()})
