"""Thread that redraws a view a few times per second until the work it shows has ended."""

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
    """Something that ends: a run or a race."""

    def over(self) -> bool:
        """Return whether it has ended."""
        ...


class Pump:
    """Thread that calls `draw` repeatedly until the run has ended, then `finish` once.

    It draws every `PERIOD_S`, or less often if `draw` would use more than `SHARE` of a core, and
    more often for `AWAKE_S` after `wake`, when a user waits for the result of a click. Prints and
    displays appear in the cell that created the pump.

    Args:
        watched: The run or race.
        draw: Updates the view.
        finish: Draws the final state.

    Attributes:
        finished: Whether the run has ended and `finish` was or is being called.
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
        self._costs_s = deque([0.0] * 5, maxlen=5)  # median used: the first update loads modules
        self._awake_until = -math.inf
        self._thread = Thread(contextvars.copy_context().run, self._work, name="ortlab-view")
        self._thread.start()

    def wake(self) -> None:
        """Draw now instead of at the end of the period, and more often for `AWAKE_S`."""
        self._awake_until = time.monotonic() + self.AWAKE_S
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the last update was sent.

        Args:
            timeout: Maximum time in seconds; None for no limit.

        Returns:
            Whether it was sent.
        """
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread before the run ends, without calling `finish`. Idempotent."""
        self._closed.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            over = self._watched.over()  # before drawing, so that the final state is drawn
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
