"""Time of each operator of a step on engine ``ort``, in ORT and in torch between its sessions."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ortlab.engines.base import tell
from ortlab.engines.ort.capture import CompiledGraph
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.ort.onnx_model import is_number
from ortlab.engines.ort.segments import FREE, OrtSegment
from ortlab.graph import captured, profile_ort
from ortlab.graph.capture import Node
from ortlab.graph.captured import Origin
from ortlab.graph.profile_ort import NodeTime, OrtProfile, PhaseTime
from ortlab.graph.timed_step import WARMUP, Clock, Step
from ortlab.utils.session_profile import Ran

_CPU = torch.device("cpu")


def profile(step: Step, record: OrtModel, steps: int) -> OrtProfile | None:
    """Time steps of a model, after `WARMUP` warm-up steps, without and with instrumentation.

    Args:
        step: Step to time.
        record: Record of the model.
        steps: Number of steps of each kind.

    Returns:
        The times; None if torch runs the model.

    Raises:
        ValueError: If ORT's profiler cannot record that many steps.
    """
    with torch.set_grad_enabled(step.module.training):
        record.capture(tuple(step.args), step.kwargs)
    if record.report().fallback_reason is not None:
        return None
    tell(f"timing {steps} steps in ORT")
    graphs = captured.last_graphs(record)
    known = captured.executed(record.module, graphs)
    watched, plain = Clock(_CPU), Clock(_CPU)
    for _ in range(WARMUP + steps):
        step.run(record.run, plain)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        timers = [stack.enter_context(_timed(graph, Path(folder), steps)) for graph in graphs]
        for _ in range(WARMUP + steps):
            step.run(record.run, watched)
            for timer in timers:
                timer.end_step()
        times = [(timer, timer.times()) for timer in timers]
    nodes: list[NodeTime] = []
    phases: dict[str, PhaseTime] = {}
    for phase in watched.us:
        of_phase = [(t, found[WARMUP:]) for t, found in times if t.phase == phase]
        own = [node for timer, found in of_phase for node in _nodes(timer, found, known)]
        walls = watched.us[phase][WARMUP:]
        phases[phase] = _phase(own, [found for _, found in of_phase], walls)
        nodes += own
    total = sum(node.us for node in nodes)
    names = {node.name for node in known.values()}
    joined = sum(node.us for node in nodes if node.node in names)
    share = joined / total if total else 1.0
    return OrtProfile(tuple(nodes), phases, plain.median_us(), watched.median_us(), share)


@dataclass
class _StepTimes:
    """Microseconds of one step in one graph: of nodes and operators, and of whole sessions."""

    us: dict[Origin, float] = field(default_factory=lambda: defaultdict(float))
    ops: dict[Origin, str] = field(default_factory=dict)
    sessions_us: float = 0.0
    in_torch_us: float = 0.0


class _Operators(fx.Interpreter):
    """Run of a graph that adds the time of each operator that torch runs to `us`."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.us: dict[Origin, float] = defaultdict(float)

    def run_node(self, node: fx.Node) -> Any:
        """See `torch.fx.Interpreter`."""
        if node.op != "call_function" or node.target in FREE or is_number(node):
            return super().run_node(node)
        started = time.perf_counter()
        made = super().run_node(node)
        self.us[id(self.module), node.name] += (time.perf_counter() - started) * 1e6
        return made


class _Timer:
    """Times of one graph.

    Attributes:
        phase: "forward" or "backward".
    """

    def __init__(
        self,
        graph: CompiledGraph,
        operators: Sequence[_Operators],
        profiled: Mapping[OrtSegment, Callable[[], list[Ran]]],
    ) -> None:
        self.phase = "backward" if graph.phase == "backward" else "forward"
        self._operators, self._profiled = operators, profiled
        self._in_torch: list[dict[Origin, float]] = []
        self._calls = {segment: [segment.calls] for segment in profiled}

    def end_step(self) -> None:
        """Note that a step is over."""
        self._in_torch.append({key: us for each in self._operators for key, us in each.us.items()})
        for each in self._operators:
            each.us.clear()
        for segment, calls in self._calls.items():
            calls.append(segment.calls)

    def times(self) -> list[_StepTimes]:
        """End the profiles and return the times of each step."""
        found = []
        for in_torch in self._in_torch:
            of_step = _StepTimes(in_torch_us=sum(in_torch.values()))
            of_step.us.update(in_torch)
            found.append(of_step)
        for segment, finish in self._profiled.items():
            ran, calls = iter(finish()), self._calls[segment]
            for of_step, before, after in zip(found, calls, calls[1:], strict=False):
                for run in (next(ran) for _ in range(after - before)):
                    of_step.sessions_us += run.us
                    for kernel in run.kernels:
                        key = id(segment), kernel.node
                        of_step.us[key] += kernel.us
                        of_step.ops[key] = kernel.op
            assert next(ran, None) is None, "each run belongs to a step"
        return found


@contextlib.contextmanager
def _timed(graph: CompiledGraph, folder: Path, steps: int) -> Iterator[_Timer]:
    """Run a graph with instrumentation, in sessions of its own."""
    with contextlib.ExitStack() as stack:
        profiled = {}
        for segment in graph.division.ort_segments():
            profile_ort.check_room(len(segment.lowered.model.graph.node), steps)
            own = Path(tempfile.mkdtemp(dir=folder))  # ORT's names of files can be the same
            profiled[segment] = stack.enter_context(segment.profiled(own))
        operators = []
        for part in graph.division.parts():
            operators.append(_Operators(part.module))
            part.module.forward = operators[-1].boxed_run
            stack.callback(delattr, part.module, "forward")
        yield _Timer(graph, operators, profiled)


def _nodes(
    timer: _Timer, steps: Sequence[_StepTimes], known: Mapping[Origin, Node]
) -> list[NodeTime]:
    """Return the nodes of a graph, each with its median over the steps."""
    keys = dict.fromkeys(key for step in steps for key in step.us)
    ops = {key: op for step in steps for key, op in step.ops.items()}
    found = []
    for key in keys:
        us = statistics.median(step.us.get(key, 0.0) for step in steps)
        node = known.get(key)
        if node is None:
            found.append(NodeTime(key[1], ops.get(key, "torch"), timer.phase, "", us))
        else:
            found.append(
                NodeTime(node.name, node.op, timer.phase, node.module, us, node.source)
            )
    return found


def _phase(
    nodes: Sequence[NodeTime], graphs: Sequence[Sequence[_StepTimes]], walls: Sequence[float]
) -> PhaseTime:
    between, around = [], []
    for wall, of_graphs in zip(walls, zip(*graphs, strict=True), strict=True):
        sessions = sum(each.sessions_us for each in of_graphs)
        in_torch = sum(each.in_torch_us for each in of_graphs)
        computing = sum(sum(each.us.values()) for each in of_graphs)
        between.append(sessions + in_torch - computing)
        around.append(wall - sessions - in_torch)
    return PhaseTime(
        sum(node.us for node in nodes), statistics.median(between), statistics.median(around)
    )
