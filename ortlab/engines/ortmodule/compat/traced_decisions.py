"""Decisions that the forward of an ORTModule took in its export, for the graph that came of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
    """What this thread's last run of a model for an export has read."""

    places: frozenset[Place] = frozenset()
    decisions: tuple[Decision, ...] = ()
    by_size: bool = False


_last = _Last()


def last_decisions() -> tuple[Decision, ...]:
    """The decisions of this thread's last export, in the order of the graph's last outputs."""
    return _last.decisions


def last_by_size() -> bool:
    """Whether in this thread's last export code of the user's read a value in the trace alone.

    It reads sizes, which are tensors in a trace and numbers elsewhere: the graph holds the way that
    was taken, as in ``for i in range(x.shape[1] // 16)``, and may be wrong for any other size. What
    is handed on to torch, as in ``x.view(rows, -1)``, is read by nobody and stays a size. Installed
    packages read so in nearly every model, mostly to raise: theirs does not count.
    """
    return _last.by_size


def with_decisions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """_FlattenedModule.forward, whose traced form gives what it decides by after its outputs.

    ORTModule runs it once as it is, to see the outputs, and then to trace it. Only what was read in
    both counts: sizes are read as tensors in a trace alone, and a model that asks whether it is
    traced may not read then. NotDecidable is raised for a fraction, since each would need a graph
    of its own, and for more than `MOST` decisions.
    """

    @functools.wraps(forward)
    def forward_and_decide(self: Any, *args: Any) -> Any:
        if torch._C._is_tracing():
            with weightless.running():
                return _traced(forward, self, args)
        places = set()
        # ORTModule has made a copy of its own where this is no run without weights.
        module = weightless.twin(self) if weightless.is_asked() else self
        listening = Listening(lambda place, *_: places.add(place))
        with weightless.running(), undifferentiated.detached(), listening:
            outputs = forward(module, *args)
        self._output_schema = module._output_schema
        _last.places, _last.decisions = frozenset(places), ()
        return outputs

    return forward_and_decide


def _traced(forward: Callable[..., Any], module: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    from onnxruntime.training.ortmodule import _io

    found: list[tuple[Place, torch.Tensor | None]] = []

    by_size = False

    def hear(place: Place, func: Any, given: tuple[Any, ...]) -> None:
        nonlocal by_size
        if place in _last.places:
            found.append((place, decided(func, *given)))
        elif not place[0].startswith(INSTALLED):
            by_size = True

    with undifferentiated.detached(), Listening(hear):
        outputs = forward(module, *args)
    decisions = []
    for place, value in found:
        if value is None or len(found) > MOST:
            raise NotDecidable(place)
        decisions.append(Decision(place, value.detach()))
        outputs.append(_io._OutputIdentityOp.apply(value))
    _last.decisions, _last.by_size = tuple(decisions), by_size
    return list(outputs)
