"""Per-parameter work of each step, in C++ because Python is too slow for it.

If `extensions.NATIVE` could not be built, equivalent Python code is used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import OrtUnavailable

Tensors = tuple[torch.Tensor, ...]
Backward = Callable[[tuple[torch.Tensor | None, ...]], list[Any]]
"""Takes the outputs' gradients and returns DLPack capsules of the inputs'; None for no gradient."""


def record(inputs: Tensors, outputs: Tensors, without: Tensors, backward: Backward) -> Tensors:
    """Record in autograd that `outputs` were computed from `inputs`.

    This does the work of ``torch.autograd.Function`` without a Python object per gradient.

    Args:
        inputs: Inputs of the computation.
        outputs: Its outputs.
        without: Those of `outputs` that are not differentiable.
        backward: Computes the gradients of `inputs`.

    Returns:
        The outputs, connected to autograd's graph.
    """
    function = _functions().get("record")
    if function is None:
        recorded: Tensors = _Function.apply(  # type: ignore[no-untyped-call]
            outputs, without, backward, *inputs
        )
        return recorded
    made: Tensors = function(inputs, outputs, without, backward)
    return made


def layout(tensors: Tensors) -> Hashable:
    """Return a key of the addresses, types, shapes, strides and ``requires_grad`` of `tensors`.

    Args:
        tensors: Tensors to describe.

    Returns:
        A value that compares equal as long as none of these changes.
    """
    function = _functions().get("layout")
    if function is None:
        return tuple(
            (each.data_ptr(), each.dtype, each.requires_grad, each.shape, each.stride())
            for each in tensors
        )
    told: bytes = function(tensors)
    return told


def edits(tensors: Tensors) -> Hashable:
    """Return a key of the version counters of `tensors`.

    Args:
        tensors: Tensors to check.

    Returns:
        A value that compares equal as long as torch counts no in-place change of any of them.
    """
    function = _functions().get("edits")
    if function is None:
        return tuple(each._version for each in tensors)
    told: bytes = function(tensors)
    return told


def versions(dictionaries: tuple[dict[Any, Any], ...]) -> bytes | None:
    """Return a key of the versions of `dictionaries`; None if Python does not provide them.

    PEP 509: setting an entry changes a dictionary's version; up to Python 3.11.

    Args:
        dictionaries: Dictionaries to check.

    Returns:
        A value that compares equal as long as no entry is set.
    """
    function = _functions().get("versions")
    return None if function is None else function(dictionaries)


class _Function(torch.autograd.Function):
    """Python implementation of `record`."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensors, without: Tensors, backward: Backward, *_inputs: torch.Tensor
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*without)
        ctx.ortlab_backward = backward
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found = ctx.ortlab_backward(gradients)
        return (None, None, None, *(None if c is None else from_dlpack(c) for c in found))


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of native.cc by name; empty if it could not be built."""
    try:
        addresses = extensions.load_native()
    except OrtUnavailable:
        return {}
    arguments = {"record": 4, "layout": 1, "edits": 1, "versions": 1}
    return {
        name: ctypes.PYFUNCTYPE(*[ctypes.py_object] * (1 + number))(addresses[f"{name}_address"])
        for name, number in arguments.items()
    }
