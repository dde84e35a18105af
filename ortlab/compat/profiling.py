"""ORT's own profile of a session, read: which nodes each run computed, and what they took.

The file is a list of events in the form of Chrome's traces
(https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_EVENTS = 1_000_000
"""What ORT's profiler keeps, and drops the rest of (onnxruntime/core/common/profiler.h)."""
_RUN, _KERNEL = "SequentialExecutor::Execute", "_kernel_time"
_EVENTS_OF_A_NODE = 3


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
    return MOST_EVENTS // (_EVENTS_OF_A_NODE * nodes + 2)


def record(folder: Path, options: Any) -> None:
    """Has the session that is made with `options` keep a profile, for a file in `folder`."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")


def finish(manager: Any) -> list[Ran]:
    """Ends the profile of the session of `manager`, which runs on without, and reads it."""
    return read(Path(manager._execution_agent._inference_session.end_profiling()))


def close(manager: Any) -> None:
    """Gives back the memory of the session of `manager`, which runs no more."""
    manager._execution_agent = None


def read(path: Path) -> list[Ran]:
    """The runs in the profile at `path`.

    A node with a branch or a loop in it takes the time of the nodes in there, which are left out.
    """
    found: list[tuple[float, list[Kernel]]] = []
    run_ends = kernel_ends = 0
    events = json.loads(path.read_bytes())
    for event in sorted(events, key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        name = event["name"]
        if name == _RUN and event["ts"] >= run_ends:
            found.append((event["dur"], []))
            run_ends = event["ts"] + event["dur"]
        elif name.endswith(_KERNEL) and event["ts"] >= kernel_ends:
            op = event["args"]["op_name"]
            found[-1][1].append(Kernel(name.removesuffix(_KERNEL), op, event["dur"]))
            kernel_ends = event["ts"] + event["dur"]
    return [Ran(us, tuple(kernels)) for us, kernels in found]
