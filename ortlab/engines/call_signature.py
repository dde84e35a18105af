"""Signature of a call: the form of its arguments without their data, and synthetic arguments."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ATOMS = (bool, int, float, str, type(None))
_SEED = 20210301


@dataclass(frozen=True)
class CallSignature:
    """Form of a call's arguments.

    Attributes:
        args: Structure, types, ranks and Python values of the positional arguments.
        kwargs: The same for the keyword arguments.
        shapes: Shapes of all tensors, in order. They are separate because an export should fit
            every shape.
    """

    args: Hashable
    kwargs: Hashable
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
        """Return the signature of a call.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        shapes: list[torch.Size] = []
        return cls(_signature(args, shapes), _signature(kwargs, shapes), tuple(shapes))

    def placeholders(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return synthetic arguments of this form.

        Floating-point tensors are drawn from a normal distribution with a fixed seed; integer
        tensors are all 1 and boolean tensors all True.

        Returns:
            Positional arguments and keyword arguments.

        Raises:
            ValueError: If an argument is neither a plain value nor a tensor.
        """
        shapes = iter(self.shapes)
        generator = torch.Generator().manual_seed(_SEED)
        args = _placeholder(self.args, shapes, generator)
        return args, _placeholder(self.kwargs, shapes, generator)


def _signature(value: Any, shapes: list[torch.Size]) -> Hashable:
    """Return the part of an argument that an export fixes; append tensor shapes to `shapes`."""
    if isinstance(value, torch.Tensor):
        shapes.append(value.shape)
        return (value.dtype, value.dim(), value.requires_grad, value.device)
    if isinstance(value, _ATOMS):
        return (type(value), value if value == value else repr(value))  # NaN != NaN
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
        make = getattr(kind, "_make", kind)  # for named tuples
        return make(items)
    raise ValueError(f"cannot create a placeholder for a {kind.__name__}; pass a batch")


def _tensor(dtype: torch.dtype, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.ones(shape, dtype=dtype)
