"""Decisions that an ORTModule's `forward` made during export, recorded for the exported graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlab.engines.torchscript import undifferentiated, weightless
from ortlab.engines.torchscript.decisions import (
    INSTALLED,
    MOST,
    Decision,
    Listening,
    NotDecidable,
    Place,
    decided,
)


class _Last(threading.local):
    """Reads of tensor values in this thread's last run of a model for an export."""

    places: frozenset[Place] = frozenset()
    decisions: tuple[Decision, ...] = ()
    by_size: bool = False


_last = _Last()


def last_decisions() -> tuple[Decision, ...]:
    """Return the decisions of this thread's last export, in the order of the graph's outputs."""
    return _last.decisions


def last_by_size() -> bool:
    """Return True if, in this thread's last export, the user's code read a value only in the trace.

    Such code reads sizes, which are tensors in a trace and numbers elsewhere. The graph then
    contains the path that was taken, as in ``for i in range(x.shape[1] // 16)``, and may be wrong
    for any other size. A size that is passed on to torch, as in ``x.view(rows, -1)``, is not read
    and stays symbolic. Reads in installed packages are not counted: nearly every model has some,
    mostly in checks that raise.
    """
    return _last.by_size


def with_decisions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap _FlattenedModule.forward so that its trace returns the decisions after its outputs.

    ORTModule runs it once normally, to learn the outputs, and then again to trace it. Only values
    that are read in both runs count: sizes are read as tensors only in a trace, and a model that
    checks whether it is being traced may read nothing then.

    The wrapped function raises NotDecidable for a fraction, since each value would need its own
    graph, and for more than `MOST` decisions.

    Args:
        forward: Method to wrap.

    Returns:
        The wrapped method.
    """

    @functools.wraps(forward)
    def forward_and_decide(self: Any, *args: Any) -> Any:
        if torch._C._is_tracing():
            with weightless.running():
                return _traced(forward, self, args)
        places = set()
        # In a run with weights, ORTModule has already made a copy.
        module = weightless.twin(self) if weightless.is_asked() else self
        listening = Listening(lambda place, *_: places.add(place))
        with weightless.running(), undifferentiated.detached(), listening:
            outputs = forward(module, *args)
        self._output_schema = module._output_schema
        _last.places, _last.decisions = frozenset(places), ()
        return outputs

    return forward_and_decide


class _Squeezes(TorchFunctionMode):
    """Mode that leaves out squeezes of sizes other than 1, which torch's exporter takes for 1.

    Args:
        depends_on_sizes: Called if the graph is right only for these sizes.
    """

    def __init__(self, depends_on_sizes: Callable[[], None]) -> None:
        super().__init__()
        self._depends_on_sizes = depends_on_sizes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or return its input if there is nothing to squeeze."""
        given = (*args, *(kwargs or {}).values())
        if func in _SQUEEZES and len(given) == 2:
            x, dims = given
            if not x.dim():  # a scalar has a dimension 0 to squeeze for torch, but not for ONNX
                return x
            dims = (dims,) if isinstance(dims, int) else tuple(dims)
            ones = tuple(dim for dim in dims if int(x.shape[dim]) == 1)
            if len(ones) < len(dims):
                self._depends_on_sizes()
                return func(x, ones) if ones else x
        return func(*args, **(kwargs or {}))


_SQUEEZES = {torch.squeeze, torch.Tensor.squeeze}


def _traced(forward: Callable[..., Any], module: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    from onnxruntime.training.ortmodule import _io  # optional: onnxruntime-training

    found: list[tuple[Place, torch.Tensor | None]] = []

    by_size = False

    def depends_on_sizes() -> None:
        nonlocal by_size
        by_size = True

    def hear(place: Place, func: Any, given: tuple[Any, ...]) -> None:
        if place in _last.places:
            found.append((place, decided(func, *given)))
        elif not place[0].startswith(INSTALLED):
            depends_on_sizes()

    # The innermost mode is called first, by the code that reads a value.
    with undifferentiated.detached(), _Squeezes(depends_on_sizes), Listening(hear):
        outputs = forward(module, *args)
    decisions = []
    for place, value in found:
        if value is None or len(found) > MOST:
            raise NotDecidable(place)
        decisions.append(Decision(place, value.detach()))
        outputs.append(_io._OutputIdentityOp.apply(value))
    _last.decisions, _last.by_size = tuple(decisions), by_size
    return list(outputs)
