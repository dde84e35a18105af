"""Waiting in tests for what another thread or process brings about.

How long is no matter of speed: a limit ends what hangs, on a machine that stands still for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortlab.training.run import Run

HANGS_S = 180.0
"""Seconds after which what is waited for is taken not to come."""


def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; AssertionError when it does not come to."""
    assert eventually(condition)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes to hold."""
    deadline = time.monotonic() + HANGS_S
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds


class Turns:
    """A gate in a run's steps: each step takes a turn, and waits until the test gives it one."""

    def __init__(self, given: int = 0) -> None:
        self.asked = 0
        """How many turns were asked for, those still waited for included."""
        self._given = threading.Semaphore(given)

    def take(self) -> None:
        """Returns when there is a turn; AssertionError when none comes."""
        self.asked += 1
        assert self._given.acquire(timeout=HANGS_S)

    def give(self, turns: int = 1000) -> None:
        """Lets that many pass."""
        self._given.release(turns)

    def pause(self, run: Run, at: int) -> None:
        """Pauses `run` after its step `at`; returns when it stands still."""
        self.until_asked(at)
        run.pause()
        self.give(1)
        until(lambda: run.state == "paused")

    def until_asked(self, turns: int) -> None:
        """Returns when that many were asked for: the step before is over, and this one begun.

        A pause, a stop or a checkpoint that is asked for now comes after this step. Asked for when
        the step before is counted, it may come before this step as well.
        """
        until(lambda: self.asked >= turns)
