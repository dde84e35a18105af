"""Decisions that forward takes in Python by a tensor's value, and which an exported graph freezes.

``if mask.any():`` is traced as it went. What was read there becomes one more output of the graph:
whoever runs the graph compares it with what was read at export, and knows whether the graph fits.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlab import errors

Place = tuple[str, int]
"""A file and a line."""

_TRUTH = torch.Tensor.__bool__
_WHOLE_NUMBERS = {torch.Tensor.__int__, torch.Tensor.__index__}
_NUMBERS = {
    torch.Tensor.__float__,
    torch.Tensor.__complex__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
}
_READS = {_TRUTH, *_WHOLE_NUMBERS, *_NUMBERS}
_MOST = 64
"""Outputs that a graph gets for this."""


class NotDecidable(RuntimeError):
    """Forward reads a value at `place` that a graph would freeze, and which is no decision."""

    def __init__(self, place: Place) -> None:
        where = errors.place(*place)
        super().__init__(
            f"forward reads a tensor's value in Python at {where}: the graph would keep what it "
            "read at export; compute with tensors there"
        )


class OtherDecision(RuntimeError):
    """The graph was exported when forward decided otherwise at `place`."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"forward decides otherwise at {place[0]}:{place[1]}")
        self.place = place


@dataclass(frozen=True)
class Decision:
    """What was read at export: an int64 tensor, a truth as 0 or 1."""

    place: Place
    value: torch.Tensor


class _Listening(TorchFunctionMode):
    """Within it, `hear` is told of every value of a tensor that is read in Python: where, how."""

    def __init__(self, hear: Callable[[Place, Any, torch.Tensor], None]) -> None:
        super().__init__()
        self._hear = hear

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Passes everything on, and remembers who asked for a value."""
        if func in _READS:
            frame = sys._getframe(1)
            self._hear((frame.f_code.co_filename, frame.f_lineno), func, args[0])
        return func(*args, **(kwargs or {}))


class _Last(threading.local):
    """What this thread's last run of a model for an export has read."""

    places: frozenset[Place] = frozenset()
    decisions: tuple[Decision, ...] = ()


_last = _Last()


def last_decisions() -> tuple[Decision, ...]:
    """The decisions of this thread's last export, in the order of the graph's last outputs."""
    return _last.decisions


def with_decisions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """_FlattenedModule.forward, whose traced form gives what it decides by after its outputs.

    ORTModule runs it once as it is, to see the outputs, and then to trace it. Only what was read in
    both counts: sizes are read as tensors in a trace alone, and a model that asks whether it is
    traced may not read then. NotDecidable is raised for a fraction, since each would need a graph
    of its own, and for more than `_MOST` decisions.
    """

    @functools.wraps(forward)
    def forward_and_decide(self: Any, *args: Any) -> Any:
        if torch._C._is_tracing():
            return _traced(forward, self, args)
        places = set()
        with _Listening(lambda place, *_: places.add(place)):
            outputs = forward(self, *args)
        _last.places, _last.decisions = frozenset(places), ()
        return outputs

    return forward_and_decide


def _traced(forward: Callable[..., Any], module: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    from onnxruntime.training.ortmodule import _io

    found: list[tuple[Place, torch.Tensor | None]] = []

    def hear(place: Place, func: Any, tensor: torch.Tensor) -> None:
        if place in _last.places:
            found.append((place, _decided(func, tensor)))

    with _Listening(hear):
        outputs = forward(module, *args)
    decisions = []
    for place, value in found:
        if value is None or len(found) > _MOST:
            raise NotDecidable(place)
        decisions.append(Decision(place, value.detach()))
        outputs.append(_io._OutputIdentityOp.apply(value))
    _last.decisions = tuple(decisions)
    return list(outputs)


def _decided(func: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """What `func` reads of `tensor`, as whole numbers; None where those would not tell all."""
    tensor = tensor.detach()
    if func is _TRUTH:
        return tensor.to(torch.bool).to(torch.int64)
    if func in _WHOLE_NUMBERS or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(torch.int64)
    return None


def check(decisions: Sequence[Decision], found: Sequence[torch.Tensor]) -> None:
    """Raises OtherDecision for the first of `decisions` that `found`, of this call, is not."""
    for decision, value in zip(decisions, found, strict=True):
        if not torch.equal(decision.value.to(value.device), value):
            raise OtherDecision(decision.place)
