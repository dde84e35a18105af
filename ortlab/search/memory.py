"""Memory of a set-up and the largest batch that fits, from its graph or measured.

A process does not shrink to the memory that it needs, so its size says little about one of several
set-ups. Memory that stays allocated between steps is counted tensor by tensor. The additional
memory of a step is the growth of the process during one step, after freed memory was returned to
the system.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ortlab.engines.base import Stepper, wrapped_model
from ortlab.graph.capture import capture
from ortlab.graph.memory import MemoryPlan, plan
from ortlab.utils.process_memory import SAMPLER
from ortlab.utils.threads import trim

LEAST_BYTES = 2 * 2**20
"""Smallest difference between two measured peaks that is significant."""
MARGIN = 0.01
"""Share of the available memory that a step has to leave free."""


@dataclass(frozen=True)
class Line:
    """Memory of a step as a linear function of the micro-batch, through two measured peaks.

    Attributes:
        at: Samples in a micro-batch and peak in bytes.
        other: The same of another micro-batch.
    """

    at: tuple[int, float]
    other: tuple[int, float]

    def peak_bytes(self, samples: int) -> float:
        """Return the expected peak in bytes, or NaN if the two peaks do not determine it.

        Args:
            samples: Samples in a micro-batch.
        """
        (size, peak), (other_size, other_peak) = self.at, self.other
        if abs(peak - other_peak) < LEAST_BYTES or (peak - other_peak) * (size - other_size) <= 0:
            return math.nan
        return peak + (samples - size) * (peak - other_peak) / (size - other_size)

    def max_batch(self, budget: int) -> int | None:
        """Return the largest micro-batch that fits, leaving 1% of the budget free.

        Args:
            budget: Available memory in bytes.

        Returns:
            Number of samples, 0 if not even one fits, or None if the peaks do not determine it.
        """
        slope = self.peak_bytes(self.at[0] + 1) - self.at[1]
        if math.isnan(slope):
            return None
        room = budget * (1 - MARGIN) - self.at[1]
        return max(0, self.at[0] + math.floor(room / slope))


@runtime_checkable
class Elsewhere(Protocol):
    """Stepper that uses the memory of other processes. Values are of the largest process."""

    def peak_bytes(self, step: Callable[[], object]) -> float:
        """See `peak_bytes`."""
        ...

    def state_bytes(self) -> int:
        """See `state_bytes`."""
        ...


def peak_bytes(stepper: Stepper, model: nn.Module, step: Callable[[], object]) -> float:
    """Return the peak memory of a set-up during a step: its state and the growth of the process.

    Args:
        stepper: Stepper of the set-up.
        model: Model that it trains.
        step: Function that runs one optimizer step.
    """
    if isinstance(stepper, Elsewhere):
        return stepper.peak_bytes(step)
    trim()
    meter = SAMPLER.start()
    now = meter.take()
    on_cuda = not math.isnan(now.cuda_allocated_bytes)
    before = now.cuda_allocated_bytes if on_cuda else now.rss_bytes
    try:
        step()
    finally:
        SAMPLER.end(meter)
    return state_bytes(stepper, model) + max(meter.highest_peak_bytes() - before, 0.0)


def state_bytes(stepper: Stepper, model: nn.Module) -> int:
    """Return the bytes of weights, buffers, gradients and optimizer state after a step.

    Args:
        stepper: Stepper of the set-up.
        model: Model that it trains.
    """
    if isinstance(stepper, Elsewhere):
        return stepper.state_bytes()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {t.data_ptr(): t for t in _tensors([stepper.state_dict(), gradients])}
    return sum(t.numel() * t.element_size() for t in held.values())


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients of a step.

    Args:
        model: Model whose trainable parameters are counted.
    """
    trained = (p for p in model.parameters() if p.requires_grad)
    return sum(p.numel() * p.element_size() for p in trained)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def graph_plan(module: nn.Module, *, optimizer: str) -> MemoryPlan | None:
    """Return the memory plan of the graph that a module trained with, or None if it has none.

    Args:
        module: Model, wrapped or not.
        optimizer: Optimizer whose state is counted.
    """
    if wrapped_model(module) is None:
        return None
    try:
        found = plan(capture(module), module, optimizer=optimizer)
        found.peak_bytes()
    except ValueError:  # the model runs in torch, or sizes are unknown
        return None
    return found


def planned_batch(found: MemoryPlan, budget: int) -> int | None:
    """Return the largest batch that fits according to a memory plan.

    Args:
        found: Plan of the model's graph.
        budget: Available memory in bytes.

    Returns:
        Number of samples, 0 if not even one fits, or None if the batch does not change the memory.
    """
    if "batch" not in found.dims or found.peak_bytes(batch=1) == found.peak_bytes(batch=2):
        return None
    try:
        return found.max_batch(budget)
    except ValueError:
        return 0
