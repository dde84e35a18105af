"""How long collectives were under way, whichever threads began and ended them."""

from __future__ import annotations

import threading
import time


class Clock:
    """Runs while anything is under way: between `begin` and `end`, or within ``with``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._began = 0.0
        self._taken_s = 0.0

    def begin(self) -> None:
        """One more is under way."""
        with self._lock:
            if self._under_way == 0:
                self._began = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        """One less is under way."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._taken_s += time.perf_counter() - self._began

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def taken_ms(self) -> float:
        """Milliseconds that it ran since this was asked the last time."""
        with self._lock:
            taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s * 1e3
