"""Counts matrix products and convolutions of a step: operations, and what passes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from ortlab.engines.batch import tensors

_COUNTED: Any = flop_counter  # without types
_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: _COUNTED.sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: _COUNTED.sdpa_backward_flop_count(*shapes[:4])
    ),
}
"""Operators that torch's own counter leaves out."""


def counted(step: Callable[[], object], weights: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Run a step, and count its products.

    Args:
        step: Computes the step, forward and backward, in eager torch.
        weights: Weights of the model.

    Returns:
        Floating-point operations, as `torch.utils.flop_counter` counts them, and elements of the
        activations that enter or leave products. Each tensor counts once. A tensor with the shape
        of a weight counts as the gradient of one, which the optimizer reads, and is left out.
    """
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=_ATTENTION)
    passed = _Passed(weights, counter.flop_registry)
    with counter, passed:
        step()
    return counter.get_total_flops(), passed.elements


class _Passed(TorchDispatchMode):
    """Counts the elements that enter and leave products, without weights and their gradients.

    A tensor that a product has made counts once, although it may enter another one.
    """

    def __init__(self, weights: Iterable[torch.Tensor], products: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products
        self._weights = {_storage(each) for each in weights}
        self._shapes: set[tuple[int, ...]] = set()
        self._seen: dict[int, torch.Tensor] = {}  # kept, so that no other has its storage
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket in self._products:
            for each in tensors(args):
                if _storage(each) in self._weights:
                    self._shapes.add(tuple(sorted(each.shape)))
                else:
                    self._count(each)
            for each in tensors(found):
                if tuple(sorted(each.shape)) not in self._shapes:
                    self._count(each)
        return found

    def _count(self, tensor: torch.Tensor) -> None:
        if _storage(tensor) not in self._seen:
            self._seen[_storage(tensor)] = tensor
            self.elements += tensor.numel()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
