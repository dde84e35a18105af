"""Reader of ORT's session profiles: the nodes that each run computed and their times.

A profile is a list of events in Chrome's trace format
(https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_EVENTS = 1_000_000
"""Number of events that ORT's profiler records before it drops further ones
(onnxruntime/core/common/profiler.h)."""
_RUN, _KERNEL = "SequentialExecutor::Execute", "_kernel_time"
_EVENTS_OF_A_NODE, _EVENTS_OF_A_RUN, _EVENTS_BEFORE = 3, 2, 2


@dataclass(frozen=True)
class Kernel:
    """One node in one run; `us` is its kernel time in microseconds, an integer in ORT's profile."""

    node: str
    op: str
    us: float


@dataclass(frozen=True)
class Ran:
    """One run of a session; `us` is its duration in microseconds, `kernels` are in run order."""

    us: float
    kernels: tuple[Kernel, ...]


def most_runs(nodes: int) -> int:
    """Return how many runs of a graph fit into a profile.

    Args:
        nodes: Number of nodes of the graph.
    """
    return (MOST_EVENTS - _EVENTS_BEFORE) // (_EVENTS_OF_A_NODE * nodes + _EVENTS_OF_A_RUN)


def record(folder: Path, options: Any) -> None:
    """Enable profiling for the session that is created with `options`.

    Args:
        folder: Folder of the profile's file.
        options: ORT's session options.
    """
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")


def read(path: Path) -> list[Ran]:
    """Read the runs from a profile.

    The time of a node with a branch or loop includes the nodes inside it, which are omitted.

    Args:
        path: The profile's file.
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
    """Yield the events of runs and kernels; the file has one event per line, up to a million."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if _RUN in line or _KERNEL in line:
                yield json.loads(line.rstrip(",\n"))
