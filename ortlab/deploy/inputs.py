"""Inputs on which an exported graph is tested: the example, random values and edge cases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ortlab.deploy.axes import BATCH, Axes, Axis, resized
from ortlab.deploy.call import ModelCall

_SEED = 20210301
_EXTREME = 100.0
"""Factor by which extreme floats exceed random ones."""


@dataclass(frozen=True)
class Trial:
    """Inputs of one test.

    Attributes:
        name: Name of the test.
        tensors: Inputs by name.
        known: Inputs of the same sizes that forward is known to accept, as it may reject random
            values; None if there are none.
        axis: The axis whose size differs from the example's; None if there is none.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    known: dict[str, torch.Tensor] | None = None
    axis: Axis | None = None


class Values:
    """Random and extreme values of a call's inputs.

    Integers that index an embedding are drawn from its rows, other integers from the example's
    values, and floats from a normal distribution with the example's mean and standard deviation.
    Masks are not changed.

    Attributes:
        masks: Names of the mask inputs; see `ModelCall.masks`.
    """

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._rows = _rows(call)
        self._generator = torch.Generator().manual_seed(_SEED)
        self.masks = call.masks()

    def random(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return random values; masks are not changed.

        Args:
            tensors: Tensors of the wanted shapes, by name.
        """
        return {
            name: tensor if name in self.masks else self._drawn(name, tensor)
            for name, tensor in tensors.items()
        }

    def _drawn(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        shape = tensor.shape
        example = self._call.tensors[name].cpu()
        if tensor.is_floating_point():
            noise = torch.randn(shape, generator=self._generator, dtype=torch.float64)
            spread = example.double().std().nan_to_num(1.0) if example.numel() > 1 else 1.0
            drawn = noise * spread + example.double().mean().nan_to_num()
        elif name in self._rows:
            drawn = torch.randint(self._rows[name], shape, generator=self._generator)
        else:
            order = torch.randint(example.numel(), shape, generator=self._generator)
            drawn = example.reshape(-1)[order]
        return drawn.to(tensor.device, tensor.dtype)

    def extreme(self, *, high: bool) -> dict[str, torch.Tensor]:
        """Return extreme values; masks are not changed.

        Args:
            high: Whether to return the largest values instead of the smallest.
        """
        return {name: self._end(name, tensor, high) for name, tensor in self._call.tensors.items()}

    def _end(self, name: str, tensor: torch.Tensor, high: bool) -> torch.Tensor:
        if name in self.masks or not tensor.numel():
            return tensor
        if tensor.is_floating_point():
            drawn = self._drawn(name, tensor)
            return drawn * _EXTREME if high else torch.zeros_like(tensor)
        if name in self._rows:
            return torch.full_like(tensor, self._rows[name] - 1 if high else 0)
        ends = tensor.max() if high else tensor.min()
        return ends.expand_as(tensor).contiguous()


def trials(call: ModelCall, axes: Axes) -> Iterator[Trial]:
    """Yield the tests: the example, random values, other sizes, padding and extreme values.

    Args:
        call: The call of the model.
        axes: Sizes that may vary.
    """
    values = Values(call)
    yield Trial("the example", dict(call.tensors))
    yield Trial("random values", values.random(call.tensors))
    for axis in axes.found:
        for size in axis.others:
            name = "a batch of 1" if (axis.name, size) == (BATCH, 1) else f"{axis.name} {size}"
            known = resized(call.tensors, axis, size)
            yield Trial(name, values.random(known), known, axis)
    if values.masks:
        yield Trial("padded rows", call.padded(left=False))
        yield Trial("rows padded on the left", call.padded(left=True))
    yield Trial("largest values", values.extreme(high=True))
    yield Trial("smallest values", values.extreme(high=False))


def _rows(call: ModelCall) -> dict[str, int]:
    """Return the number of rows of the embedding that an input indexes directly, by input name."""
    given = {name: tensor.clone() for name, tensor in call.tensors.items()}
    places = {tensor.data_ptr(): name for name, tensor in given.items() if tensor.numel()}
    found: dict[str, int] = {}

    def see(module: nn.Module, args: tuple[object, ...]) -> None:
        for ids in args[:1]:
            if isinstance(ids, torch.Tensor) and ids.data_ptr() in places:
                name = places[ids.data_ptr()]
                rows = getattr(module, "num_embeddings", None)
                if isinstance(rows, int):
                    found[name] = min(rows, found.get(name, rows))

    with contextlib.ExitStack() as hooks:
        for part in call.module.modules():
            if isinstance(part, nn.Embedding):
                handle = part.register_forward_pre_hook(see)
                hooks.callback(handle.remove)
        with torch.no_grad():
            call.results(list(given.values()))
    return found
