"""Timer of collectives in flight, from whichever threads begin and end them."""

from __future__ import annotations

import threading
import time


class Clock:
    """Clock that runs while any collective is in flight.

    A collective is in flight between `begin` and `end`, or within a ``with`` block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._began = 0.0
        self._taken_s = 0.0

    def begin(self) -> None:
        """Record that another collective has begun."""
        with self._lock:
            if self._under_way == 0:
                self._began = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        """Record that a collective has ended."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._taken_s += time.perf_counter() - self._began

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def taken_ms(self) -> float:
        """Return the milliseconds that the clock ran since the last call."""
        with self._lock:
            taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s * 1e3
