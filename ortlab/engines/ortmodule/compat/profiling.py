"""Times of an execution manager's session: from its profile, or measured in Python without one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortlab.utils.session_profile import Ran, read


def finish(manager: Any) -> list[Ran]:
    """End the profile of a session, which keeps running without it, and return its runs.

    Args:
        manager: ORT's execution manager whose session is profiled.
    """
    return read(Path(manager._execution_agent._inference_session.end_profiling()))


class SessionClock:
    """Number of a session's forward and backward runs, and their total times in seconds."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.forward_s = self.backward_s = 0.0


class _Timed:
    """Execution agent whose run times are added to `clock`; otherwise the same as `agent`."""

    def __init__(self, agent: Any, clock: SessionClock) -> None:
        self._agent = agent
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and add its time to the clock."""
        started = time.perf_counter()
        found = self._agent.run_forward(*args, **kwargs)
        self._clock.forward_s += time.perf_counter() - started
        self._clock.forwards += 1
        return found

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward and add its time to the clock."""
        started = time.perf_counter()
        found = self._agent.run_backward(*args, **kwargs)
        self._clock.backward_s += time.perf_counter() - started
        self._clock.backwards += 1
        return found


@contextlib.contextmanager
def timed(manager: Any, *, session_of: Any = None) -> Iterator[SessionClock]:
    """Measure the times of a session's runs.

    Args:
        manager: ORT's execution manager whose runs are measured.
        session_of: Another manager of the same graph, whose session is run instead; None for the
            manager's own.

    Yields:
        The clock, updated with each run.
    """
    own = manager._execution_agent
    clock = SessionClock()
    manager._execution_agent = _Timed((session_of or manager)._execution_agent, clock)
    try:
        yield clock
    finally:
        manager._execution_agent = own
