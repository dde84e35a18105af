"""What each step does once for every parameter, in C++: too much for Python, and the same in it.

Where `extensions.NATIVE` could not be built it is done in Python.
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
"""Takes the gradients of the outputs, gives capsules of those of the inputs; None for none."""


def record(inputs: Tensors, outputs: Tensors, without: Tensors, backward: Backward) -> Tensors:
    """`outputs` that torch goes back from to `inputs` by `backward`; those `without` have no way.

    It is what ``torch.autograd.Function`` does, with no Python object for each gradient.
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
    """Where `tensors` lie, their type and how they are laid out, and whether they need a gradient.

    Equal where nothing of that has changed.
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
    """Equal where none of `tensors` was changed in place since, as far as torch counts that."""
    function = _functions().get("edits")
    if function is None:
        return tuple(each._version for each in tensors)
    told: bytes = function(tensors)
    return told


def versions(dictionaries: tuple[dict[Any, Any], ...]) -> bytes | None:
    """Equal where no entry of `dictionaries` was set since; None where Python does not tell.

    PEP 509: a dictionary gets another version with every entry that is set; up to Python 3.11.
    """
    function = _functions().get("versions")
    return None if function is None else function(dictionaries)


class _Function(torch.autograd.Function):
    """`record` in Python."""

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
    """Those of native.cc by name; none where it could not be built."""
    try:
        addresses = extensions.load_native()
    except OrtUnavailable:
        return {}
    arguments = {"record": 4, "layout": 1, "edits": 1, "versions": 1}
    return {
        name: ctypes.PYFUNCTYPE(*[ctypes.py_object] * (1 + number))(addresses[f"{name}_address"])
        for name, number in arguments.items()
    }
