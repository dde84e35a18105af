"""Support for the user's own autocast in bfloat16 on a CPU: detection and output types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortlab.engines.batch import tensors


def autocast_now() -> Hashable:
    """Return the device types with autocast enabled, each with its dtype; None if it is off."""
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled) or None


def asks_for_bfloat16(module: nn.Module) -> bool:
    """Return True if the active autocast makes a module compute in bfloat16 on a CPU.

    ORT's CPU provider has no kernels for the graph that such an export contains.

    Args:
        module: Module about to be called.
    """
    if autocast_now() != (("cpu", torch.bfloat16),):
        return False  # every call asks, so skip the slower search for parameters
    first = next(module.parameters(), None)
    return first is not None and first.device.type == "cpu"


def types_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.dtype, ...] | None:
    """Return the types of a module's output tensors in eager torch, in order.

    Args:
        module: Module to call, in its current mode and under the active autocast.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        The types, or None if forward changes the autocast itself, for example to compute a part in
        float32.
    """
    with torch.no_grad(), _Watched() as watched:
        types = tuple(each.dtype for each in tensors(module(*args, **kwargs)))
    return None if watched.changed else types


class _Watched(TorchFunctionMode):
    """Function mode that detects torch calls under another autocast than the surrounding one."""

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
        """Compare the autocast state and call the function."""
        self.changed |= autocast_now() != self._around
        return func(*args, **(kwargs or {}))


def in_types(outputs: Any, types: Sequence[torch.dtype]) -> Any:
    """Return outputs with their tensors cast to given types.

    Args:
        outputs: Result of a module: a tensor, or containers of tensors.
        types: Type of each tensor, in order.

    Returns:
        `outputs` itself if all types match already, else a copy.

    Raises:
        AssertionError: If the number of tensors differs from the number of types.
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
        made: Any = copy.copy(value)  # preserves the output classes of transformers
        for name, item in value.items():
            made[name] = _cast(item, types)
        return made
    if isinstance(value, tuple | list):
        items = [_cast(item, types) for item in value]
        make: Any = getattr(type(value), "_make", type(value))  # for named tuples
        return make(items)
    return value
