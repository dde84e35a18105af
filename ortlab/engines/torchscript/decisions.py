"""Decisions that `forward` makes in Python from a tensor's value, and that a graph freezes.

The tracer records only the branch of ``if mask.any():`` that was taken. The value that was read
there becomes an additional output of the graph. After each run of the graph, the caller compares it
with the value at export and so knows whether the graph is valid for this input.
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
"""File and line number."""

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
"""Functions that return Python's True or False."""
_READS = {*_TRUTHS, *_WHOLE_NUMBERS, *_NUMBERS}
INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
MOST = 64
"""Maximum number of outputs that a graph gets for its decisions."""


class NotDecidable(RuntimeError):
    """Raised when `forward` reads a value at `place` that a graph cannot check as a decision."""

    def __init__(self, place: Place) -> None:
        where = errors.place(*place)
        super().__init__(
            f"forward reads a tensor's value in Python at {where}: the graph would freeze the "
            "value at export; compute with tensors there"
        )


class OtherDecision(RuntimeError):
    """Raised when the graph was exported for another decision at `place`."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"forward takes another branch at {place[0]}:{place[1]}")
        self.place = place


@dataclass(frozen=True)
class Decision:
    """Value that was read at export, as an int64 tensor; a boolean is 0 or 1."""

    place: Place
    value: torch.Tensor


class Listening(TorchFunctionMode):
    """Mode that calls `hear` for every tensor value that is read in Python.

    Args:
        hear: Called with the place of the read, the torch function that reads, and its positional
            arguments.
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
        """Call `func`, and report it first if it reads a value."""
        if func in _READS:
            frame = sys._getframe(1)
            given = (*args, *(kwargs or {}).values())
            self._hear((frame.f_code.co_filename, frame.f_lineno), func, given)
        return func(*args, **(kwargs or {}))


def decided(func: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor | None:
    """Return the value that `func` reads from `tensor`, as an integer tensor.

    Args:
        func: Torch function that reads a value, such as ``torch.Tensor.__bool__``.
        tensor: Tensor that it reads.
        *rest: Its other arguments.

    Returns:
        An int64 tensor; None if integers cannot represent the value.
    """
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
    """Return the result of torch.allclose for finite numbers; None if NaN shall equal NaN."""
    if equal_nan:
        return None
    b = b.detach()
    near: torch.Tensor = (a - b).abs() <= atol + rtol * b.abs()
    return near.all().to(torch.int64)


def check(decisions: Sequence[Decision], found: Sequence[torch.Tensor]) -> None:
    """Check that this call makes the same decisions as the export.

    Args:
        decisions: Decisions at export.
        found: Values that the graph returned for this call, in the same order.

    Raises:
        OtherDecision: For the first decision that differs.
    """
    for decision, value in zip(decisions, found, strict=True):
        if not torch.equal(decision.value.to(value.device), value):
            raise OtherDecision(decision.place)


# ---- graphs whose decisions are not compared at run time -----------------------------------------


@dataclass
class Frozen:
    """Places where a trace froze a value.

    Attributes:
        values: Reads of a tensor's value.
        sizes: Decisions of the user's code based on sizes.
        checks: Reads that only decide whether to raise; the graph is correct without them.
    """

    values: list[Place] = field(default_factory=list)
    sizes: list[Place] = field(default_factory=list)
    checks: list[Place] = field(default_factory=list)


@contextlib.contextmanager
def reads() -> Iterator[set[Place]]:
    """Record the places where values of tensors are read in Python.

    Yields:
        The set of places, filled as they occur.
    """
    places: set[Place] = set()
    with Listening(lambda place, *_: places.add(place)):
        yield places


@contextlib.contextmanager
def frozen_in_trace(known: frozenset[Place]) -> Iterator[Frozen]:
    """Record the values that a trace in this context freezes.

    Args:
        known: The `reads` of an ordinary call.

    Yields:
        The frozen places, filled as they occur; empty if nothing is traced.
    """
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
    """Return True if the statement at `place` is an assertion or an ``if`` that only raises."""
    file, line = place
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    except SystemError:  # CPython 3.11 miscounts recursion if another thread parses concurrently:
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
