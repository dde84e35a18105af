"""Runs forward for its graph alone: what depends on weights has a shape and no values.

An export runs forward twice, once to see the form of its outputs and once to trace it, and no
number that comes out is used. Within `without_weights` those runs compute what follows from the
inputs alone (masks, positions, sizes), as ever; from the first operation with a parameter on,
torch's FakeTensors take over, which have type, shape and device. The trace, and with it the graph,
is the same. Where forward asks for a value that they do not have, or writes one into a tensor that
is there, the run fails, and whoever began it begins again with all values.
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
    """Forward needs what was not computed; the message says for what."""


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every operation on a parameter, or on what follows from one, a result without values.

    It runs below torch's tracer, which sees each operation before. `failed` tells that one could
    not be answered, whatever became of the exception: forward may catch it and go another way.
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
        """Answers what depends on parameters, and passes everything else on."""
        named = dict(kwargs or {})
        try:
            if func in _UNHEARD:
                raise NeedsValues(f"the tracer hears of what {func} is made, which stays unseen")
            if not any(isinstance(each, _VALUELESS) for each in _single((*args, *named.values()))):
                return func(*args, **named)
            for name, value in _written(func, args, named):
                if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                    raise NeedsValues(f"{func} writes into {name}, which has values")
            with _unheard(), self._shapes:
                return func(*args, **named)
        except BaseException as error:
            self.failed = error
            raise


_VALUELESS = (FakeTensor, nn.Parameter)
_UNHEARD = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_overrideable.default}
"""The tracer leaves these out and notes what they call (DONT_RECORD_TRACE in torch's
tools/autograd/gen_trace_type.py), which for it is behind the answer that is given here."""
_C: Any = torch._C
_TRACER = _C._dispatch_key_parse("Tracer")


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Keeps the tracer from what torch does in Python to answer: it keeps each size it is given."""
    if (state := _C._get_tracing_state()) is None:
        yield
        return
    # Where the tracer has handed an operation on, torch refuses to change its state.
    with _C._PreserveDispatchKeyGuard():
        _C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
        _C._set_tracing_state(None)
        try:
            yield
        finally:
            _C._set_tracing_state(state)


def _single(values: Sequence[Any]) -> Iterator[Any]:
    """`values` one by one, those of a list among them too; torch's operators nest no deeper."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments that `func` changes, by name; those of a list one by one."""
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
    """What this thread's exports run forward in."""

    mode: _Weightless | None = None


_asked = _Asked()


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Within it, an export in this thread runs forward without computing what follows from weights.

    NeedsValues at the end where that will not do; other exceptions may come of the same. A graph
    that was made is to be compared with forward itself: a class that asks for ``type(x)`` sees
    another one, say.
    """
    before, _asked.mode = _asked.mode, _Weightless()
    # A weight that autocast has converted within it would be taken for one that has values.
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
    """What an export in this thread is to run forward in."""
    return _asked.mode or contextlib.nullcontext()


def is_asked() -> bool:
    """Whether this thread's exports run forward so."""
    return _asked.mode is not None


def twin(module: nn.Module) -> nn.Module:
    """A copy of `module` with the very same parameters, which no such run changes."""
    return copy.deepcopy(module, {id(each): each for each in module.parameters()})
