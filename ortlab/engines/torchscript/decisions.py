"""Decisions that forward takes in Python by a tensor's value, and which an exported graph freezes.

``if mask.any():`` is traced as it went. What was read there becomes one more output of the graph:
whoever runs the graph compares it with what was read at export, and knows whether the graph fits.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortlab.utils import errors

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
_NONZERO = {torch.is_nonzero, torch.Tensor.is_nonzero}
_EQUAL = {torch.equal, torch.Tensor.equal}
_CLOSE = {torch.allclose, torch.Tensor.allclose}
_CONTAINS = torch.Tensor.__contains__
_TRUTHS = {_TRUTH, _CONTAINS, *_NONZERO, *_EQUAL, *_CLOSE}
"""What gives Python's True or False."""
_READS = {*_TRUTHS, *_WHOLE_NUMBERS, *_NUMBERS}
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
MOST = 64
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


class Listening(TorchFunctionMode):
    """Within it, `hear` is told of every value of a tensor that is read in Python: where, how.

    How is a function of torch's and its arguments, given by place.
    """

    def __init__(self, hear: Callable[[Place, Any, tuple[Any, ...]], None]) -> None:
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
            given = (*args, *(kwargs or {}).values())
            self._hear((frame.f_code.co_filename, frame.f_lineno), func, given)
        return func(*args, **(kwargs or {}))


def decided(func: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor | None:
    """What `func` reads of `tensor`, as whole numbers; None where those would not tell all."""
    tensor = tensor.detach()
    if func is _TRUTH or func in _NONZERO:
        return tensor.to(torch.bool).to(torch.int64)
    if func is _CONTAINS:
        return torch.eq(tensor, rest[0]).any().to(torch.int64)
    if func in _EQUAL:
        if tensor.shape != rest[0].shape:
            return None
        return torch.eq(tensor, rest[0].detach()).all().to(torch.int64)
    if func in _CLOSE:
        return _are_close(tensor, *rest)
    if func in _WHOLE_NUMBERS or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(torch.int64)
    return None


def _are_close(
    a: torch.Tensor,
    b: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> torch.Tensor | None:
    """What torch.allclose says, of finite numbers; None where NaN shall equal NaN."""
    if equal_nan:
        return None
    b = b.detach()
    near: torch.Tensor = (a - b).abs() <= atol + rtol * b.abs()
    return near.all().to(torch.int64)


def check(decisions: Sequence[Decision], found: Sequence[torch.Tensor]) -> None:
    """Raises OtherDecision for the first of `decisions` that `found`, of this call, is not."""
    for decision, value in zip(decisions, found, strict=True):
        if not torch.equal(decision.value.to(value.device), value):
            raise OtherDecision(decision.place)


# ---- graphs that nobody compares with anything ---------------------------------------------------


@dataclass
class Frozen:
    """What a trace froze, by place: ``values`` of tensors, and truths of ``sizes``.

    Sizes are those that code of the user's decides by. What only decides whether to raise is in
    ``checks``: the graph is right without it.
    """

    values: list[Place] = field(default_factory=list)
    sizes: list[Place] = field(default_factory=list)
    checks: list[Place] = field(default_factory=list)


@contextlib.contextmanager
def reads() -> Iterator[set[Place]]:
    """The set of places where values of tensors are read in Python meanwhile."""
    places: set[Place] = set()
    with Listening(lambda place, *_: places.add(place)):
        yield places


@contextlib.contextmanager
def frozen_in_trace(known: frozenset[Place]) -> Iterator[Frozen]:
    """What the trace that runs meanwhile freezes; `known` are the `reads` of an ordinary call."""
    found = Frozen()

    def hear(place: Place, func: Any, _: tuple[Any, ...]) -> None:
        by_value = place in known
        by_size = func in _TRUTHS and not place[0].startswith(INSTALLED)
        if not (by_value or by_size):
            return
        if func in _TRUTHS and _only_checks(place):
            found.checks.append(place)
        elif by_value:
            found.values.append(place)
        else:
            found.sizes.append(place)

    if not torch._C._is_tracing():
        yield found
        return
    with Listening(hear):
        yield found


def _only_checks(place: Place) -> bool:
    """Whether the statement at `place` is an assertion, or an ``if`` that only raises."""
    file, line = place
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    except SystemError:  # CPython 3.11 counts wrongly where another thread parses meanwhile:
        tree = ast.parse(source)  # github.com/python/cpython/issues/106905
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return False
    innermost = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    if isinstance(innermost, ast.If):
        return not innermost.orelse and all(isinstance(each, ast.Raise) for each in innermost.body)
    return isinstance(innermost, ast.Assert)
