"""Time of each module in eager torch, forward and backward.

Every moment belongs to one owner. While a module's forward runs, its time belongs to that module,
except for the time of the modules within it. The time of a node of autograd's graph belongs to the
module that created the node. The node's sequence number shows which module that was, because
autograd numbers nodes in the order in which forward creates them
(https://docs.pytorch.org/docs/stable/autograd.html#profiler). All times therefore add up, and time
that belongs to no module is reported.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortlab.engines.torch import autograd
from ortlab.graph.timed_step import PHASES, WARMUP, Clock, Step

Owner = str | None
"""Path of a module, empty for the model itself, None for time that belongs to no module."""


@dataclass(frozen=True)
class Eager:
    """Time of a step in eager torch, in microseconds, as medians over the steps.

    Attributes:
        us: Time by module and phase, excluding the modules within.
        unowned_us: Time of each phase that belongs to no module.
        plain_us: Time of a whole step without instrumentation.
        watched_us: Time of a whole step with the instrumentation that `us` is measured with.
    """

    us: dict[tuple[str, str], float]
    unowned_us: dict[str, float]
    plain_us: float
    watched_us: float


def profile(step: Step, steps: int, device: torch.device) -> Eager:
    """Time steps in eager torch, first without and then with instrumentation.

    Args:
        step: Step to time.
        steps: Number of steps of each kind, after `WARMUP` warm-up steps.
        device: Device that the model is on.
    """
    clock, ledger = Clock(device), Ledger(step.module, device)
    for _ in range(WARMUP + steps):
        step.run(step.module, clock)
    found = []
    with ledger.watching():
        for i in range(WARMUP + steps):
            ledger.us = {}
            step.run(step.module, ledger)
            if i >= WARMUP:
                found.append(ledger.us)
    us = {
        key: statistics.median(each.get(key, 0.0) for each in found)
        for key in dict.fromkeys(key for each in found for key in each)
    }
    return Eager(
        {(owner, phase): value for (owner, phase), value in us.items() if owner is not None},
        {phase: us[None, phase] for phase in PHASES if (None, phase) in us},
        clock.median_us(),
        statistics.median(sum(each.values()) for each in found),
    )


class Ledger:
    """Microseconds by owner and phase, in `us`, updated whenever the owner changes.

    Calls from threads that do not work on the step are ignored.

    Args:
        module: Model to instrument.
        device: Device that the model is on.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.us: dict[tuple[Owner, str], float] = {}
        self._module = module
        self._device = device
        self._phase = ""
        self._owners: list[Owner] = [None]
        self._thread = 0
        self._since = 0.0
        self._numbers: list[int] = []
        self._makers: list[Owner] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Register hooks that record when each module's forward begins and ends."""
        handles: list[Any] = []

        def watch(path: str, module: nn.Module) -> None:
            def begin(*_: object) -> None:
                if threading.get_ident() == self._thread:
                    self._begin(path)

            def end(*_: object) -> None:
                if threading.get_ident() == self._thread:
                    self._end()

            handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles.append(module.register_forward_hook(end, always_call=True))

        for path, module in self._module.named_modules():
            watch(path, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def within(self, phase: str, roots: Sequence[torch.Tensor]) -> Iterator[None]:
        """See `Watch`."""
        if phase == "forward":
            self._numbers, self._makers = [], []
        for node, number in autograd.nodes(roots):
            node.register_prehook(self._taking_over(self._maker(number)))
        self._phase, self._owners, self._thread = phase, [None], threading.get_ident()
        self._since = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._charge()

    def _begin(self, path: str) -> None:
        self._charge()
        self._owners.append(path)
        self._mark()

    def _end(self) -> None:
        self._charge()
        self._owners.pop()
        self._mark()

    def _mark(self) -> None:
        """Record that nodes created from now on belong to the current owner."""
        self._numbers.append(autograd.next_number())
        self._makers.append(self._owners[-1])

    def _maker(self, number: int) -> Owner:
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._makers[at] if at >= 0 else None

    def _taking_over(self, owner: Owner) -> Any:
        def take_over(_: object) -> None:
            self._charge()
            # Autograd uses a separate thread for each device.
            self._owners, self._thread = [owner], threading.get_ident()

        return take_over

    def _charge(self) -> None:
        now = time.perf_counter()
        key = self._owners[-1], self._phase
        self.us[key] = self.us.get(key, 0.0) + (now - self._since) * 1e6
        self._since = now
