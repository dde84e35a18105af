"""The thread that draws a view a few times a second until what it shows is over."""

from __future__ import annotations

import contextvars
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ortlab.utils.threads import Thread

if TYPE_CHECKING:
    pass


class Ending(Protocol):
    """What comes to its end: a run, a race."""

    def over(self) -> bool:
        """Whether it has."""
        ...


class Pump:
    """Calls `draw` a few times a second until the run is over, then `finish`, in one thread.

    It draws every quarter of a second, or less often where `draw` would use more than `SHARE` of
    a core; more often for a moment after somebody woke it, who waits for what he asked for.
    Prints and displays land in the cell that made the pump.
    """

    PERIOD_S = 0.25
    SLOWEST_S = 1.0
    SHARE = 0.002
    AWAKE_S = 1.0
    AWAKE_PERIOD_S = 0.1

    def __init__(
        self, watched: Ending, draw: Callable[[], None], finish: Callable[[], None]
    ) -> None:
        self._watched = watched
        self._draw = draw
        self._finish = finish
        self._wake = threading.Event()
        self._closed = threading.Event()
        self.finished = False
        """Whether the run was over, and `finish` is called or was."""
        self._costs_s = deque([0.0] * 5, maxlen=5)  # the median: a first update loads modules
        self._awake_until = -math.inf
        self._thread = Thread(contextvars.copy_context().run, self._work, name="ortlab-view")
        self._thread.start()

    def wake(self) -> None:
        """Draws now rather than at the end of the period, and often for a while."""
        self._awake_until = time.monotonic() + self.AWAKE_S
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until the last update was sent; returns whether it was."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread although the run goes on; `finish` is not called. Twice is fine."""
        self._closed.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            over = self._watched.over()  # before drawing: what came last is drawn too
            began = time.thread_time()
            self._draw()
            self._costs_s.append(time.thread_time() - began)
            if over:
                self.finished = True
                self._finish()
                return
            self._wake.wait(self._period_s())
            self._wake.clear()

    def _period_s(self) -> float:
        if time.monotonic() < self._awake_until:
            return self.AWAKE_PERIOD_S
        cost_s = statistics.median(self._costs_s)
        return min(self.SLOWEST_S, max(self.PERIOD_S, cost_s / self.SHARE))
