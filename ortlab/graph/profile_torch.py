"""Time of each module and of each line of code in eager torch, forward and backward.

Every moment belongs to one module and one line. While a module's forward runs, its time belongs to
that module, except for the time of the modules within it, and to the innermost line outside of
torch. The time of a node of autograd's graph belongs to the module and the line that created the
node. The node's sequence number shows which they were, because autograd numbers nodes in the order
in which forward creates them (https://docs.pytorch.org/docs/stable/autograd.html#profiler). All
times therefore add up, and time that belongs to no module is reported.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn

from ortlab.engines.torch import autograd
from ortlab.graph.capture import Place
from ortlab.graph.timed_step import PHASES, WARMUP, Clock, Step

K = TypeVar("K")

_NOT_OF_USERS: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(inspect.getfile(torch)).parent, Path(__file__).parents[1])
)
"""Folders of code whose time belongs to the line that calls it."""


class Owner(NamedTuple):
    """Module and line of code that time is charged to.

    Attributes:
        module: Path of a module, empty for the model itself, None for none.
        place: File and number of a line of code; None for none.
    """

    module: str | None = None
    place: Place | None = None


@dataclass(frozen=True)
class Eager:
    """Time of a step in eager torch, in microseconds, as medians over the steps.

    Attributes:
        us: Time by module and phase, excluding the modules within.
        unowned_us: Time of each phase that belongs to no module.
        plain_us: Time of a whole step without instrumentation.
        watched_us: Time of a whole step with the instrumentation that `us` is measured with.
        line_us: Time by line of code and phase.
    """

    us: dict[tuple[str, str], float]
    unowned_us: dict[str, float]
    plain_us: float
    watched_us: float
    line_us: dict[tuple[Place, str], float] = field(default_factory=dict)


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
    modules = _medians(
        sums(((at.module, of), us) for (at, of), us in each.items()) for each in found
    )
    lines = _medians(sums(((at.place, of), us) for (at, of), us in each.items()) for each in found)
    return Eager(
        {(path, phase): us for (path, phase), us in modules.items() if path is not None},
        {phase: modules[None, phase] for phase in PHASES if (None, phase) in modules},
        clock.median_us(),
        statistics.median(sum(each.values()) for each in found),
        {(place, phase): us for (place, phase), us in lines.items() if place is not None},
    )


def sums(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the sum of the values of each key.

    Args:
        pairs: Keys with values.
    """
    found: defaultdict[K, float] = defaultdict(float)
    for key, value in pairs:
        found[key] += value
    return dict(found)


def _medians(steps: Iterable[Mapping[K, float]]) -> dict[K, float]:
    found = list(steps)
    keys = dict.fromkeys(key for each in found for key in each)
    return {key: statistics.median(each.get(key, 0.0) for each in found) for key in keys}


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
        self._modules: list[str | None] = [None]
        self._places: list[Place | None] = [None]
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
        self._phase, self._thread = phase, threading.get_ident()
        self._modules, self._places = [None], [None]
        self._since = time.perf_counter()
        before = sys.gettrace()
        if phase == "forward":
            sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._charge()

    def _begin(self, path: str) -> None:
        self._charge()
        self._modules.append(path)
        self._mark()

    def _end(self) -> None:
        self._charge()
        self._modules.pop()
        self._mark()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:  # noqa: ARG002
        """Trace a function that is called, unless it is torch's or ortlab's."""
        if frame.f_code.co_filename.startswith(_NOT_OF_USERS):
            return None
        self._charge()
        self._places.append((frame.f_code.co_filename, frame.f_lineno))
        self._mark()
        return self._go_on

    def _go_on(self, frame: FrameType, event: str, _: Any) -> Any:
        """Hear of the next line of a function, and of its end."""
        if event in ("line", "return"):
            self._charge()
            if event == "line":
                self._places[-1] = frame.f_code.co_filename, frame.f_lineno
            else:
                self._places.pop()
            self._mark()
        return self._go_on

    def _mark(self) -> None:
        """Record that nodes created from now on belong to the current owner."""
        self._numbers.append(autograd.next_number())
        self._makers.append(self._owner)

    def _maker(self, number: int) -> Owner:
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._makers[at] if at >= 0 else Owner()

    @property
    def _owner(self) -> Owner:
        return Owner(self._modules[-1], self._places[-1])

    def _taking_over(self, owner: Owner) -> Any:
        def take_over(_: object) -> None:
            self._charge()
            # Autograd uses a separate thread for each device.
            self._modules, self._places = [owner.module], [owner.place]
            self._thread = threading.get_ident()

        return take_over

    def _charge(self) -> None:
        now = time.perf_counter()
        key = self._owner, self._phase
        self.us[key] = self.us.get(key, 0.0) + (now - self._since) * 1e6
        self._since = now
