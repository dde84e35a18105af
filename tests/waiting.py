"""Waiting in tests for what another thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; AssertionError when it does not within a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
