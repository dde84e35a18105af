"""Waiting in tests for effects of another thread or process.

The limit is no measure of speed: it ends what hangs, even on a machine that stalls for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.training.run import Run

HANGS_S = 180.0
"""Seconds after which a wait counts as failed."""


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` is true; raise AssertionError if it stays false."""
    assert eventually(condition)


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether `condition` becomes true in time."""
    deadline = time.monotonic() + HANGS_S
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds


class Turns:
    """A gate for the steps of a run: each step takes a turn and waits until the test gives one."""

    def __init__(self, given: int = 0) -> None:
        self.asked = 0
        """Number of requested turns, including those still awaited."""
        self._given = threading.Semaphore(given)

    def take(self) -> None:
        """Wait for a turn; raise AssertionError if none is given."""
        self.asked += 1
        assert self._given.acquire(timeout=HANGS_S)

    def give(self, turns: int = 1000) -> None:
        """Give this many turns."""
        self._given.release(turns)

    def pause(self, run: Run, at: int) -> None:
        """Pause `run` after step `at` and wait until it is paused."""
        self.until_asked(at)
        run.pause()
        self.give(1)
        until(lambda: run.state == "paused")

    def until_asked(self, turns: int) -> None:
        """Wait until this many turns were requested: the last step has ended, this one has begun.

        A pause, stop or checkpoint requested now takes effect after this step. Requested when the
        step before is counted, it could take effect before this step as well.
        """
        until(lambda: self.asked >= turns)
