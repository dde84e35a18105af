"""A loop's own autocast in bfloat16 on a CPU: whether it is on, and the types of its results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlab.engines.batch import tensors


def autocast_now() -> Hashable:
    """The device types that autocast is on for, each with its type; None where it is off."""
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled) or None


def asks_for_bfloat16(module: nn.Module) -> bool:
    """Whether autocast would have `module` compute in bfloat16 on a CPU.

    ORT's CPU provider has no kernels for what that exports.
    """
    if autocast_now() != (("cpu", torch.bfloat16),):
        return False  # without a look for parameters, which takes longer, and each call asks
    first = next(module.parameters(), None)
    return first is not None and first.device.type == "cpu"


def types_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.dtype, ...] | None:
    """The types of the tensors that `module` gives in eager torch, as things stand, in order.

    None where forward has an autocast of its own, as to leave a part in float32.
    """
    with torch.no_grad(), _Watched() as watched:
        types = tuple(each.dtype for each in tensors(module(*args, **kwargs)))
    return None if watched.changed else types


class _Watched(TorchFunctionMode):
    """Tells whether a function of torch's is called under another autocast than that around it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = False
        self._around = autocast_now()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Looks, and passes everything on."""
        self.changed |= autocast_now() != self._around
        return func(*args, **(kwargs or {}))


def in_types(outputs: Any, types: Sequence[torch.dtype]) -> Any:
    """`outputs` with its tensors in `types`, in order; AssertionError for another number of them.

    What has them already is given as it is.
    """
    found = tensors(outputs)
    assert len(found) == len(types), f"{len(found)} tensors, and eager torch gives {len(types)}"
    if all(each.dtype == one for each, one in zip(found, types, strict=True)):
        return outputs
    return _cast(outputs, iter(types))


def _cast(value: Any, types: Iterator[torch.dtype]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(next(types))
    if isinstance(value, Mapping):
        made: Any = copy.copy(value)  # a result of transformers stays one
        for name, item in value.items():
            made[name] = _cast(item, types)
        return made
    if isinstance(value, tuple | list):
        items = [_cast(item, types) for item in value]
        make: Any = getattr(type(value), "_make", type(value))  # a named tuple has it
        return make(items)
    return value
