"""What a set-up takes of memory, and the largest batch that fits: read from its graph, or measured.

A process does not shrink to what it needs, so its size alone says little of one set-up among
several. What stays between steps is counted tensor by tensor; what a step takes beyond is how far
the process grows in one, with the freed memory given back to the system before.
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
"""A difference between two measured peaks that says something."""
MARGIN = 0.01
"""Of the memory that there is, what a step leaves free."""


@dataclass(frozen=True)
class Line:
    """Memory of a step as a line over the samples of a micro-batch, through two measured peaks."""

    at: tuple[int, float]
    other: tuple[int, float]

    def peak_bytes(self, samples: int) -> float:
        """What a micro-batch of `samples` is expected to take; NaN where the peaks do not tell."""
        (size, peak), (other_size, other_peak) = self.at, self.other
        if abs(peak - other_peak) < LEAST_BYTES or (peak - other_peak) * (size - other_size) <= 0:
            return math.nan
        return peak + (samples - size) * (peak - other_peak) / (size - other_size)

    def max_batch(self, budget: int) -> int | None:
        """The largest micro-batch that is within `budget` bytes, 0 where none is; None if unknown.

        A hundredth of the budget is left free.
        """
        slope = self.peak_bytes(self.at[0] + 1) - self.at[1]
        if math.isnan(slope):
            return None
        room = budget * (1 - MARGIN) - self.at[1]
        return max(0, self.at[0] + math.floor(room / slope))


@runtime_checkable
class Elsewhere(Protocol):
    """A stepper whose memory is that of other processes; figures are of the largest."""

    def peak_bytes(self, step: Callable[[], object]) -> float:
        """See `peak_bytes`."""
        ...

    def state_bytes(self) -> int:
        """See `state_bytes`."""
        ...


def peak_bytes(stepper: Stepper, model: nn.Module, step: Callable[[], object]) -> float:
    """The most that there is of a set-up while `step` runs: what stays, and how far it grows."""
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
    """Weights, buffers, gradients and the optimizer's state of a set-up after a step."""
    if isinstance(stepper, Elsewhere):
        return stepper.state_bytes()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {t.data_ptr(): t for t in _tensors([stepper.state_dict(), gradients])}
    return sum(t.numel() * t.element_size() for t in held.values())


def gradient_bytes(model: nn.Module) -> int:
    """Of the gradients of a step."""
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
    """The plan of what `module` takes, from the graph that it trained with; None without one."""
    if wrapped_model(module) is None:
        return None
    try:
        found = plan(capture(module), module, optimizer=optimizer)
        found.peak_bytes()
    except ValueError:  # it runs in torch, or its sizes are not known
        return None
    return found


def planned_batch(found: MemoryPlan, budget: int) -> int | None:
    """The largest batch that is within `budget` bytes, 0 where none is; None if it cannot vary."""
    if "batch" not in found.dims or found.peak_bytes(batch=1) == found.peak_bytes(batch=2):
        return None
    try:
        return found.max_batch(budget)
    except ValueError:
        return 0
