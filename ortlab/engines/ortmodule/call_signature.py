"""What a call was given, without its data: what an export must fit, and a stand-in for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ATOMS = (bool, int, float, str, type(None))
_SEED = 20210301


@dataclass(frozen=True)
class CallSignature:
    """A call's arguments: structure, types, ranks, Python values, and apart the tensors' shapes."""

    args: Hashable
    kwargs: Hashable
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        """Of one call."""
        shapes: list[torch.Size] = []
        return cls(_signature(args, shapes), _signature(kwargs, shapes), tuple(shapes))

    def placeholders(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of this form: whole numbers are 1, True too; fractions are normal, seeded.

        ValueError where an argument is neither plain nor a tensor.
        """
        shapes = iter(self.shapes)
        generator = torch.Generator().manual_seed(_SEED)
        args = _placeholder(self.args, shapes, generator)
        return args, _placeholder(self.kwargs, shapes, generator)


def _signature(value: Any, shapes: list[torch.Size]) -> Hashable:
    """What of an argument is fixed in an export; the shapes of its tensors go to `shapes`."""
    if isinstance(value, torch.Tensor):
        shapes.append(value.shape)
        return (value.dtype, value.dim(), value.requires_grad, value.device)
    if isinstance(value, _ATOMS):
        return (type(value), value if value == value else repr(value))  # NaN is not itself
    if isinstance(value, Mapping):
        return (
            type(value),
            *((name, _signature(item, shapes)) for name, item in value.items()),
        )
    if isinstance(value, tuple | list):
        return (type(value), *(_signature(item, shapes) for item in value))
    return (type(value), id(value))


def _placeholder(signature: Any, shapes: Iterator[torch.Size], generator: torch.Generator) -> Any:
    kind, *rest = signature
    if isinstance(kind, torch.dtype):
        _, requires_grad, device = rest
        return _tensor(kind, next(shapes), generator).to(device).requires_grad_(requires_grad)
    if issubclass(kind, _ATOMS):
        (value,) = rest
        return value if isinstance(value, kind) else kind(value)
    if issubclass(kind, Mapping):
        return kind({name: _placeholder(item, shapes, generator) for name, item in rest})
    if issubclass(kind, tuple | list):
        items = [_placeholder(item, shapes, generator) for item in rest]
        make = getattr(kind, "_make", kind)  # a named tuple has it
        return make(items)
    raise ValueError(f"nothing can stand in for a {kind.__name__}; give a batch")


def _tensor(dtype: torch.dtype, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.ones(shape, dtype=dtype)
