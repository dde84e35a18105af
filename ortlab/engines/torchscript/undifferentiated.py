"""Parts of `forward` without gradients: ``.data``, and results computed under ``no_grad``.

Torch's tracer treats ``x.data`` as a constant and does not record ``torch.no_grad()``: the graph
would contain the value at export, or backpropagate where torch does not. During an export both are
replaced with ``detach()``, which a graph can represent.
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
    """Return True if `func` reads ``.data``.

    Args:
        func: Function as a TorchFunctionMode receives it.
    """
    return bool(func == _DATA.__get__)


def sets_data(func: Callable[..., Any]) -> bool:
    """Return True if `func` sets ``.data``.

    Args:
        func: Function as a TorchFunctionMode receives it.
    """
    return bool(func == _DATA.__set__)


class _Asked(threading.local):
    """State that says if gradients are enabled in the call that this thread exports for."""

    gradients: bool = False


_asked = _Asked()


@contextlib.contextmanager
def as_now() -> Iterator[None]:
    """Use the current gradient mode for exports in this context.

    ORTModule disables gradients during its export, so the mode of the call itself is recorded here.
    """
    before, _asked.gradients = _asked.gradients, torch.is_grad_enabled()
    try:
        yield
    finally:
        _asked.gradients = before


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Run an export's `forward` in the call's gradient mode, with ``detach()`` where needed."""
    with torch.set_grad_enabled(_asked.gradients), _Detached(with_gradients=_asked.gradients):
        yield


class _Detached(TorchFunctionMode):
    """Mode in which results without a gradient come from ``detach()``; autograd records nothing.

    The gradient mode remains torch's own state, which `forward` may read and change.
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
        """Call `func` with gradients disabled."""
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
    """Detach the tensors of `result`, except those in `given`, which `func` changed in place."""

    def each(tensor: torch.Tensor) -> torch.Tensor:
        fractions = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach() if fractions and not any(tensor is one for one in given) else tensor

    return pytree.tree_map_only(torch.Tensor, each, result)
