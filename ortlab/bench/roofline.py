"""Least time of a training step at this machine's own rates, measured between the engines' turns.

A step's floor is the time of its matrix products and convolutions at the rate of a large matrix
product, plus the time to write the activations that enter them and to read those that leave them at
the rate of a large copy, as if everything between two products were one operator, plus the time of
torch's fused AdamW with clipping. A step can be faster than that if activations stay in the caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn

from ortlab.bench.interleaved import SHORTEST_MS, no_gc, synchronize
from ortlab.bench.result import Floor
from ortlab.engines.base import Batch
from ortlab.engines.batch import arguments, to_device
from ortlab.engines.torch.products import counted
from ortlab.graph.timed_step import Clock, Step

_SIZES: Final = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the large matrix product, by device."""
_COPIED_BYTES: Final = 256 << 20
_QUICK: Final = 32
"""The large product and copy are this much smaller in each direction for tiny models."""
_TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Roofline:
    """Measures the floors of a model in some precisions.

    Args:
        name: Name of the model.
        model: The model in training mode, on its device.
        batch: The batch of a step.
        precisions: Precisions to measure; others than fp32, bf16 and fp16 are left out.
        quick: True for smaller products and copies, as for tiny models.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        batch: Batch,
        precisions: Sequence[str],
        *,
        quick: bool = False,
    ) -> None:
        device = next(model.parameters()).device
        size = _SIZES[device.type] // (_QUICK if quick else 1)
        self._matrices = {
            precision: torch.randn(size, size, device=device, dtype=_TYPES[precision])
            for precision in precisions
            if precision in _TYPES
        }
        copied = _COPIED_BYTES // (_QUICK**2 if quick else 1)
        self._copied = torch.ones(copied // 4, device=device)
        self._copy = torch.empty_like(self._copied)
        trained = [each for each in model.parameters() if each.requires_grad]
        self._parameters = [each.detach().clone().requires_grad_() for each in trained]
        for each in self._parameters:
            each.grad = torch.ones_like(each)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0, fused=True)
        self._flops, self._elements = _counted(model, batch)
        self._name = name
        self._took: dict[str, list[tuple[float, float, float]]] = {
            precision: [] for precision in self._matrices
        }

    def turn(self) -> None:
        """Measure the machine's rates and the optimizer once."""
        copy_s = _time_s(lambda: self._copy.copy_(self._copied))
        bytes_per_ms = 2 * self._copied.nbytes / copy_s / 1e3
        optimizer_ms = 1e3 * _time_s(self._optimize)
        for precision, matrix in self._matrices.items():
            product_s = _time_s(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
            flops_per_ms = 2 * len(matrix) ** 3 / product_s / 1e3
            moving_ms = self._moved(precision) / bytes_per_ms
            self._took[precision].append((self._flops / flops_per_ms, moving_ms, optimizer_ms))

    def floors(self) -> list[Floor]:
        """Return the floors of the turns so far, by precision."""
        return [
            Floor(
                self._name,
                precision,
                self._flops,
                self._moved(precision),
                *zip(*took, strict=True),
            )
            for precision, took in self._took.items()
            if took
        ]

    def _moved(self, precision: str) -> int:
        return self._elements * _TYPES[precision].itemsize

    def _optimize(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, math.inf)
        self._optimizer.step()


def _time_s(call: Callable[[], object]) -> float:
    """Return the mean time of a call in seconds, over calls of `SHORTEST_MS` together."""
    call()
    once_ms = 1e3 * _calls_s(call, 1)
    calls = math.ceil(SHORTEST_MS / once_ms)
    return _calls_s(call, calls) / calls


def _calls_s(call: Callable[[], object], calls: int) -> float:
    with no_gc():
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()  # once: a GPU takes calls in advance
        return time.perf_counter() - began


def _counted(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """Return operations of the products in a step, and elements of what enters and leaves them."""
    own = to_device(batch, next(model.parameters()).device)
    step, clock = Step(model, *arguments(model, own)), Clock(torch.device("cpu"))
    return counted(lambda: step.run(model, clock), model.parameters())
