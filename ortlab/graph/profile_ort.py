"""What each node of a graph takes in ORT's session, and what goes on around it."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ortlab.engines.ortmodule.compat import profiling
from ortlab.engines.ortmodule.compat.profiling import Ran
from ortlab.engines.ortmodule.export import Export
from ortlab.graph.capture import Node, Stage
from ortlab.graph.timed_step import WARMUP, Clock, Step

_ADDED = re.compile(r"(/\w*Fusion/|_recompute)$")


@dataclass(frozen=True)
class NodeTime:
    """A node in one phase: microseconds of its kernel, the median of the steps.

    `module` is empty for the model itself and for a node that the graph does not have.
    """

    node: str
    op: str
    phase: str
    module: str
    us: float


@dataclass(frozen=True)
class PhaseTime:
    """A phase in ORT, in microseconds.

    ``kernels_us`` is the sum of its nodes, ``between_us`` what the session takes besides, its
    profiler's writing too, ``around_us`` what Python and torch take around it; the last two are
    medians of the steps.
    """

    kernels_us: float
    between_us: float
    around_us: float

    @property
    def session_us(self) -> float:
        """The session's run."""
        return self.kernels_us + self.between_us

    @property
    def us(self) -> float:
        """All of it."""
        return self.session_us + self.around_us


@dataclass(frozen=True)
class OrtProfile:
    """ORT's time: of the nodes, in the order of the first run, and of the phases.

    ``plain_us`` is a whole step without a profile, ``watched_us`` one with it. ``joined`` is the
    share of the kernels' time whose nodes the graph has.
    """

    nodes: tuple[NodeTime, ...]
    phases: dict[str, PhaseTime]
    plain_us: float
    watched_us: float
    joined: float


def profile(step: Step, export: Export, steps: int, device: torch.device) -> OrtProfile:
    """Times `steps` steps in a session like that of `export`, after some to warm up.

    ValueError where ORT's profile does not hold so many.
    """
    graph = Stage("execution", export.graph_to_run(), frozenset(step.modules))
    room = profiling.most_runs(len(graph.nodes)) - WARMUP
    if steps > room:
        raise ValueError(
            f"ORT's profile holds {room} steps of this graph's {len(graph.nodes)} nodes, not "
            f"{steps}: take fewer steps"
        )
    watched, plain = Clock(device), Clock(device)
    # Dropouts of torch's and of ortlab's kernels draw from torch's generator.
    with torch.random.fork_rng(devices=[]):
        with tempfile.TemporaryDirectory() as folder:
            twin = export.profiled(Path(folder))
            for _ in range(WARMUP + steps):
                step.run(twin.manager.forward, watched)
            ran = profiling.finish(twin.manager)
        for _ in range(WARMUP + steps):
            step.run(twin.manager.forward, plain)
    twin.close()
    phases = list(watched.us)
    assert len(ran) == len(phases) * (WARMUP + steps), "one run of the session for each phase"
    known = {node.name: node for node in graph.nodes}
    nodes: list[NodeTime] = []
    times: dict[str, PhaseTime] = {}
    for i, phase in enumerate(phases):
        runs = ran[i :: len(phases)][WARMUP:]
        own = _nodes(phase, runs, known)
        times[phase] = _phase(own, runs, watched.us[phase][WARMUP:])
        nodes += own
    total = sum(node.us for node in nodes)
    joined = sum(node.us for node in nodes if origin(node.node, known) is not None)
    share = joined / total if total else 1.0
    return OrtProfile(tuple(nodes), times, plain.median_us(), watched.median_us(), share)


def origin(name: str, known: Container[str]) -> str | None:
    """The name among `known` of the node that `name` is or was made of; None without one.

    Where a session fuses or recomputes a node it adds to its name.
    """
    while name not in known:
        shorter = _ADDED.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return name


def _nodes(phase: str, runs: Sequence[Ran], known: Mapping[str, Node]) -> list[NodeTime]:
    """The nodes of a phase, each with the median of the runs."""
    ops = {kernel.node: kernel.op for run in runs for kernel in run.kernels}
    took = [_by_node(run) for run in runs]
    found = []
    for name, op in ops.items():
        us = statistics.median(each.get(name, 0.0) for each in took)
        same, made_of = known.get(name), origin(name, known)
        op = op if same is None else same.op
        module = "" if made_of is None else known[made_of].module
        found.append(NodeTime(name, op, phase, module, us))
    return found


def _by_node(run: Ran) -> dict[str, float]:
    found: dict[str, float] = {}
    for kernel in run.kernels:
        found[kernel.node] = found.get(kernel.node, 0.0) + kernel.us
    return found


def _phase(nodes: Sequence[NodeTime], runs: Sequence[Ran], walls: Sequence[float]) -> PhaseTime:
    between = [run.us - sum(kernel.us for kernel in run.kernels) for run in runs]
    around = [wall - run.us for run, wall in zip(runs, walls, strict=True)]
    return PhaseTime(
        sum(node.us for node in nodes), statistics.median(between), statistics.median(around)
    )
