"""Record a step of this rank: torch's profiler, and the bytes that its sockets send."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist

from ortlab.engines.torch import phases
from ortlab.metrics.timeline import COMMUNICATION, OTHER, RankTimeline, Span

R = TypeVar("R")

_STEP: Final = phases.PREFIX + "step"
_BACKENDS: Final = ("gloo:", "nccl:", "mpi:", "ucc:")
"""Prefixes of the names of collectives in torch's profiler, by backend of the process group."""
_WAITS: Final = ("c10d::", "_c10d_functional::", "record_param_comms", *_BACKENDS)
"""Operators that wait for a collective rather than compute."""
_SIZES: Final = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
}
"""Bytes of an element by the profiler's name of its type; 1 for all others."""
_ACKED: Final = 120
"""Offset of tcpi_bytes_acked, a 64-bit integer, in Linux's struct tcp_info (linux/tcp.h)."""


def recorded(step: Callable[[], R]) -> tuple[R, RankTimeline]:
    """Take a step under torch's profiler; all ranks call it.

    Args:
        step: Takes the step.

    Returns:
        The step's result, and its timeline.
    """
    with torch.profiler.profile(record_shapes=True) as profiler, phases.labeled():
        dist.barrier()
        before = _sent()
        with torch.profiler.record_function(_STEP):
            result = step()
        dist.barrier()  # what this rank has sent has arrived
        after = _sent()
    sent = None
    if before is not None and after is not None:
        sent = sum(count - before.get(one, 0) for one, count in after.items())
    return result, timeline(_events(profiler), rank=dist.get_rank(), wire_bytes=sent)


def timeline(
    events: Sequence[Mapping[str, Any]], *, rank: int, wire_bytes: int | None
) -> RankTimeline:
    """Return the timeline in the events of a profiler.

    Args:
        events: Complete events in Chrome's trace format.
        rank: Number of the rank.
        wire_bytes: Bytes that it has sent.
    """
    whole = next(event for event in events if event["name"] == _STEP)
    began, ended = whole["ts"], whole["ts"] + whole["dur"]
    within = [e for e in events if e["ts"] < ended and e["ts"] + e["dur"] > began]
    collectives = [event for event in within if event["name"].startswith(_BACKENDS)]
    labels = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(phases.PREFIX))
        for event in within
        if event["name"].startswith(phases.PREFIX) and event is not whole
    ]
    spans = []
    for start, end in _computation(within):
        spans += [
            Span(kind, kind, (a - began) / 1e3, (b - began) / 1e3)
            for kind, a, b in _by_phase(max(start, began), min(end, ended), labels)
        ]
    spans += [
        Span(
            COMMUNICATION,
            event["name"].partition(":")[2],
            (max(event["ts"], began) - began) / 1e3,
            (min(event["ts"] + event["dur"], ended) - began) / 1e3,
            _bytes(event),
        )
        for event in collectives
    ]
    trace = tuple({**event, "ts": event["ts"] - began} for event in within)
    return RankTimeline(rank, whole["dur"] / 1e3, tuple(spans), wire_bytes, trace)


def _computation(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return when any thread runs an operator that does not wait for a collective."""
    changes: list[tuple[float, int]] = []
    threads: dict[Any, list[tuple[float, int, int]]] = defaultdict(list)
    for event in events:
        waits = event["name"].startswith(_WAITS)
        if event["cat"] == "cpu_op" or waits:
            start, end = event["ts"], event["ts"] + event["dur"]
            threads[event["tid"]] += [
                (start, 0, 1) if waits else (start, 1, 0),
                (end, 0, -1) if waits else (end, -1, 0),
            ]
    for thread in threads.values():
        running = waiting = 0
        for at, runs, wait in sorted(thread):
            before = running > 0 and not waiting
            running, waiting = running + runs, waiting + wait
            now = running > 0 and not waiting
            if now != before:
                changes.append((at, 1 if now else -1))
    found, active, since = [], 0, 0.0
    for at, change in sorted(changes):
        if active == 0 and change > 0:
            since = at
        active += change
        if active == 0:
            found.append((since, at))
    return found


def _by_phase(
    start: float, end: float, labels: Iterable[tuple[float, float, str]]
) -> list[tuple[str, float, float]]:
    """Divide an interval into phases; what has no label is `OTHER`."""
    found = []
    for began, ended, kind in sorted(labels):
        if began >= end or ended <= start:
            continue
        if began > start:
            found.append((OTHER, start, began))
        found.append((kind, max(start, began), min(end, ended)))
        start = min(end, ended)
    if start < end:
        found.append((OTHER, start, end))
    return found


def _bytes(event: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors that a collective is given."""
    told = event.get("args", {})
    total = 0
    for sizes, kind in zip(told.get("Input Dims", ()), told.get("Input type", ()), strict=False):
        count = _SIZES.get(kind, 1)
        for size in sizes:
            count *= size
        total += count if sizes else 0
    return total


def _events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return a profiler's complete events, which torch gives as a file only."""
    with tempfile.TemporaryDirectory(prefix="ortlab-timeline-") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        told = json.loads(file.read_bytes())["traceEvents"]
    return [event for event in told if event.get("ph") == "X" and "dur" in event]


def _sent() -> dict[str, int] | None:
    """Return the bytes that each TCP socket of this process has sent; None if it is unknown."""
    if sys.platform != "linux":
        return None
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED + 8)
                    (found[name],) = struct.unpack_from("Q", info, _ACKED)
    return found
