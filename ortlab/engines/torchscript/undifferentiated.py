"""What gradients do not go through in forward: ``.data``, and what is computed under ``no_grad``.

Torch's tracer takes ``x.data`` for a constant and does not hear of ``torch.no_grad()``: the graph
would hold the value that was there at export, or go back where torch does not. In an export both
come of ``detach()``, which a graph has.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_DATA: Any = vars(torch._C.TensorBase)["data"]
_SET_MODE: Any = vars(torch._C)["_set_grad_enabled"]


def is_data(func: Callable[..., Any]) -> bool:
    """Whether `func`, as a TorchFunctionMode gets it, reads ``.data``."""
    return bool(func == _DATA.__get__)


def sets_data(func: Callable[..., Any]) -> bool:
    """Whether it sets ``.data``."""
    return bool(func == _DATA.__set__)


class _Asked(threading.local):
    """Whether the call that this thread's export is for has gradients on."""

    gradients: bool = False


_asked = _Asked()


@contextlib.contextmanager
def as_now() -> Iterator[None]:
    """An export within it is for a call with gradients on or off as they are now.

    ORTModule switches them off for its export.
    """
    before, _asked.gradients = _asked.gradients, torch.is_grad_enabled()
    try:
        yield
    finally:
        _asked.gradients = before


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """For an export's run of forward, in which gradients are on or off as in the call itself."""
    with torch.set_grad_enabled(_asked.gradients), _Detached(with_gradients=_asked.gradients):
        yield


class _Detached(TorchFunctionMode):
    """Has what gradients do not go through come of ``detach()``; nothing is recorded for backward.

    Whether gradients are on is torch's own state, which forward may ask for, and changes.
    """

    def __init__(self, *, with_gradients: bool) -> None:
        super().__init__()
        self._with_gradients = with_gradients

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls `func` with gradients off."""
        named = dict(kwargs or {})
        if func is _SET_MODE:
            return func(*args, **named)
        is_on = torch.is_grad_enabled() or not self._with_gradients
        with torch.no_grad():
            if is_data(func):
                return args[0].detach()
            result = func(*args, **named)
            return result if is_on else _of_detach(result, (*args, *named.values()))


def _of_detach(result: Any, given: Sequence[Any]) -> Any:
    """`result` with its tensors detached; one that was `given`, and changed, stays itself."""

    def each(tensor: torch.Tensor) -> torch.Tensor:
        fractions = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach() if fractions and not any(tensor is one for one in given) else tensor

    return pytree.tree_map_only(torch.Tensor, each, result)
