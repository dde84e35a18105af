"""ORT's own profile of a session, read: which nodes each run computed, and what they took.

Also what the runs of a session take as Python sees them, without a profile.

The profile's file is a list of events in the form of Chrome's traces
(https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_EVENTS = 1_000_000
"""What ORT's profiler keeps, and drops the rest of (onnxruntime/core/common/profiler.h)."""
_RUN, _KERNEL = "SequentialExecutor::Execute", "_kernel_time"
_EVENTS_OF_A_NODE, _EVENTS_OF_A_RUN, _EVENTS_BEFORE = 3, 2, 2


@dataclass(frozen=True)
class Kernel:
    """One node in one run: microseconds of its kernel, which ORT gives in whole ones."""

    node: str
    op: str
    us: float


@dataclass(frozen=True)
class Ran:
    """One run of a session, microseconds from its begin to its end, and the nodes in its order."""

    us: float
    kernels: tuple[Kernel, ...]


def most_runs(nodes: int) -> int:
    """How many times all `nodes` of a graph may run before the profile is full."""
    return (MOST_EVENTS - _EVENTS_BEFORE) // (_EVENTS_OF_A_NODE * nodes + _EVENTS_OF_A_RUN)


def record(folder: Path, options: Any) -> None:
    """Has the session that is made with `options` keep a profile, for a file in `folder`."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")


def finish(manager: Any) -> list[Ran]:
    """Ends the profile of the session of `manager`, which runs on without, and reads it."""
    return read(Path(manager._execution_agent._inference_session.end_profiling()))


class SessionClock:
    """How many runs of a session there were, and their seconds, of forward and of backward."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.forward_s = self.backward_s = 0.0


class _Timed:
    """An execution agent whose runs `clock` adds up; all else of it is `agent`'s."""

    def __init__(self, agent: Any, clock: SessionClock) -> None:
        self._agent = agent
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = self._agent.run_forward(*args, **kwargs)
        self._clock.forward_s += time.perf_counter() - started
        self._clock.forwards += 1
        return found

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = self._agent.run_backward(*args, **kwargs)
        self._clock.backward_s += time.perf_counter() - started
        self._clock.backwards += 1
        return found


@contextlib.contextmanager
def timed(manager: Any, *, session_of: Any = None) -> Iterator[SessionClock]:
    """Adds up what the runs of the session of `manager` take meanwhile.

    With `session_of`, a manager of the same graph, the session of that one runs in its place.
    """
    own = manager._execution_agent
    clock = SessionClock()
    manager._execution_agent = _Timed((session_of or manager)._execution_agent, clock)
    try:
        yield clock
    finally:
        manager._execution_agent = own


def read(path: Path) -> list[Ran]:
    """The runs in the profile at `path`.

    A node with a branch or a loop in it takes the time of the nodes in there, which are left out.
    """
    found: list[tuple[float, list[Kernel]]] = []
    run_ends = kernel_ends = 0
    for event in sorted(_events(path), key=lambda event: (event["ts"], -event["dur"])):
        name, began, us = event["name"], event["ts"], event["dur"]
        if name == _RUN and began >= run_ends:
            found.append((us, []))
            run_ends = began + us
        elif name.endswith(_KERNEL) and began >= kernel_ends:
            kernel = Kernel(name.removesuffix(_KERNEL), event["args"]["op_name"], us)
            found[-1][1].append(kernel)
            kernel_ends = began + us
    return [Ran(us, tuple(kernels)) for us, kernels in found]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Runs and kernels: a line of the file each, of which it may have a million."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if _RUN in line or _KERNEL in line:
                yield json.loads(line.rstrip(",\n"))
