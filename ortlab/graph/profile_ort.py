"""Time of each graph node in ORT's session, and of the work around the session."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ortlab.engines.ortmodule.compat import profiling
from ortlab.engines.ortmodule.export import Export
from ortlab.graph.capture import Node, Stage
from ortlab.graph.timed_step import WARMUP, Clock, Step
from ortlab.utils import session_profile
from ortlab.utils.session_profile import Ran

_ADDED = re.compile(r"(/\w*Fusion/|_recompute)$")


@dataclass(frozen=True)
class NodeTime:
    """A node in one phase, with the median time of its kernel over the steps.

    Attributes:
        node: Name of the node.
        op: Name of its operator.
        phase: "forward" or "backward".
        module: Path of its module. Empty for the model itself and for a node that is not in the
            graph.
        us: Microseconds.
        source: Line of user code that the node comes from, as in `Node.source`; empty if unknown.
    """

    node: str
    op: str
    phase: str
    module: str
    us: float
    source: str = ""


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase in ORT, in microseconds.

    Attributes:
        kernels_us: Sum of the phase's nodes.
        between_us: Time in the session outside of kernels, including the profiler's own writes.
            Median over the steps.
        around_us: Time that Python and torch take around the session. Median over the steps.
    """

    kernels_us: float
    between_us: float
    around_us: float

    @property
    def session_us(self) -> float:
        """Time of the session's run."""
        return self.kernels_us + self.between_us

    @property
    def us(self) -> float:
        """Total time of the phase."""
        return self.session_us + self.around_us


@dataclass(frozen=True)
class OrtProfile:
    """Time of a step in ORT, by node and by phase.

    Attributes:
        nodes: Nodes in the order of the first run.
        phases: Time of each phase, keyed by its name.
        plain_us: Time of a whole step without profiling.
        watched_us: Time of a whole step with profiling.
        joined: Share of the kernels' time whose nodes are in the graph, from 0 to 1.
    """

    nodes: tuple[NodeTime, ...]
    phases: dict[str, PhaseTime]
    plain_us: float
    watched_us: float
    joined: float


def profile(step: Step, export: Export, steps: int, device: torch.device) -> OrtProfile:
    """Time training steps in a session like that of `export`, after `WARMUP` warm-up steps.

    Args:
        step: Step to time.
        export: Export whose graph is run.
        steps: Number of steps.
        device: Device that the model is on.

    Raises:
        ValueError: If ORT's profiler cannot record that many steps.
    """
    graph = Stage("execution", export.graph_to_run(), frozenset(step.modules))
    check_room(len(graph.nodes), steps)
    watched, plain = Clock(device), Clock(device)
    # Dropout in torch's and ortlab's kernels draws from torch's generator.
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


def check_room(nodes: int, steps: int) -> None:
    """Raise a ValueError if ORT's profiler cannot record so many steps.

    Args:
        nodes: Number of nodes that a session runs in a step.
        steps: Number of steps, without warm-up steps.
    """
    room = session_profile.most_runs(nodes) - WARMUP
    if steps > room:
        raise ValueError(
            f"ORT's profiler can record {room} steps of this graph's {nodes} nodes, not "
            f"steps={steps}; use fewer steps"
        )


def origin(name: str, known: Container[str]) -> str | None:
    """Return the node in `known` that the node `name` is or was made from, or None.

    A session appends to the name of a node that it fuses or recomputes.

    Args:
        name: Name of a node that ran.
        known: Names of the graph's nodes.
    """
    while name not in known:
        shorter = _ADDED.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return name


def _nodes(phase: str, runs: Sequence[Ran], known: Mapping[str, Node]) -> list[NodeTime]:
    """Return the nodes of a phase, each with its median over the runs."""
    ops = {kernel.node: kernel.op for run in runs for kernel in run.kernels}
    took = [_by_node(run) for run in runs]
    found = []
    for name, op in ops.items():
        us = statistics.median(each.get(name, 0.0) for each in took)
        same, made_of = known.get(name), origin(name, known)
        op = op if same is None else same.op
        module, source = "", ""
        if made_of is not None:
            module, source = known[made_of].module, known[made_of].source
        found.append(NodeTime(name, op, phase, module, us, source))
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
