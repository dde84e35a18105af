"""Measurement of the parts of a training step, for `ortlab bench step`.

Eager torch, ORT, and ORT with idle workers that spin take turns, so
that other load on the machine affects all of them. Weights do not change, as in `timing`. The time
in ORT's session is measured around its C++ calls. ORT's own profile then shows the time inside it.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.dlpack import from_dlpack

from ortlab.bench import interleaved, models
from ortlab.bench.machine import Machine, machine
from ortlab.bench.report import Operator, SessionPhase, StepBench, StepParts
from ortlab.bench.settings import StepSettings
from ortlab.engines.base import Stepper, tell
from ortlab.engines.batch import arguments
from ortlab.engines.call_signature import CallSignature
from ortlab.engines.ortmodule.compat import profiling
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.guard import Guard
from ortlab.engines.ortmodule.kernels.kernel_choice import Timing, kept
from ortlab.engines.registry import engine
from ortlab.engines.torch.thread_count import threads
from ortlab.graph import profile_ort
from ortlab.graph.profile_ort import NodeTime
from ortlab.graph.timed_step import Step
from ortlab.settings import FinetuneSettings
from ortlab.utils import environment
from ortlab.utils.rng import undisturbed_random

EAGER, ORT, SPINNING = "eager", "ort", "spinning"
MOST_PROFILED = 20
"""Maximum number of profiled steps: ORT's profiler records 1,000,000 events, 3 for each node."""


def step(settings: StepSettings) -> StepBench:
    """Measure the parts of a step. See `ortlab.bench.step`.

    Args:
        settings: Settings of the benchmark.
    """
    chosen = FinetuneSettings.of(
        engine="ortmodule",
        precision=settings.precision,
        kernels=settings.kernels,
        cache=False,
        device="cpu",
    )
    with threads(settings.threads), undisturbed_random():
        here = machine("cpu")
        with Trial(settings, chosen) as trial:
            return _measured(trial, settings, here)


def _measured(trial: Trial, settings: StepSettings, here: Machine) -> StepBench:
    rounds = trial.race()
    alone_us = trial.alone_us()
    profiled = trial.profile()
    timings = trial.timings()
    return StepBench(
        settings=settings,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        environment=environment.environment(),
        machine=here,
        model=models.MODELS[settings.model].about,
        parameters=len(trial.trained),
        remarks=trial.steppers[ORT].report().remarks,
        steps_per_turn=trial.steps,
        eager=tuple(each[EAGER] for each in rounds),
        ort=tuple(each[ORT] for each in rounds),
        spinning=tuple(each[SPINNING] for each in rounds),
        guard_us=alone_us["guard"],
        guard_again_us=alone_us["guard again"],
        form_us=alone_us["form"],
        dlpack_us=alone_us["dlpack"],
        profiled_steps=trial.profiled_steps,
        watched_us=profiled.watched_us,
        unwatched_us=profiled.plain_us,
        phases={
            name: SessionPhase(phase.kernels_us, phase.between_us)
            for name, phase in profiled.phases.items()
        },
        operators=operators(profiled.nodes, timings),
    )


class Trial:
    """A model that is trained in eager torch and in ORT, and the measurements on it.

    Args:
        settings: Settings of the benchmark.
        chosen: Settings of ORT.
    """

    def __init__(self, settings: StepSettings, chosen: FinetuneSettings) -> None:
        self._settings = settings
        self.steps = 1
        """Number of steps in a turn."""
        self.profiled_steps = min(settings.steps, MOST_PROFILED)
        # An engine that cannot run raises before the model is built.
        ort = engine("ortmodule")
        self._model, self._batch = models.build(settings.model, quick=settings.quick)
        self._args, self._kwargs = arguments(self._model, self._batch)
        self.trained = [p for p in self._model.parameters() if p.requires_grad]
        wrapped = ort.wrap(self._model, chosen.model)
        self._execution = execution_of(wrapped)
        other = FinetuneSettings.of(engine="eager", precision=settings.precision, device="cpu")
        self.steppers: dict[str, Stepper] = {
            EAGER: engine("eager").prepare(copy.deepcopy(self._model), None, other),
            ORT: ort.prepare(wrapped, None, chosen),
        }
        for name, stepper in self.steppers.items():
            tell(f"{settings.model}: first step of {name}")
            stepper.step([self._batch], lr=0.0)
        export = self._execution.export_for(self._args, self._kwargs)
        assert export is not None, "the model must not fall back to torch"
        self.export = export
        self._twin = export.spinning_twin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the engines' memory."""
        while self.steppers:
            self.steppers.popitem()[1].close()
        self._twin.close()
        gc.collect()

    def race(self) -> list[dict[str, StepParts]]:
        """Run the warm-up rounds and the measured rounds, in which each engine has a turn.

        Returns:
            Parts of a step by engine, for each measured round.
        """
        orders = interleaved.rounds(
            (EAGER, ORT, SPINNING), interleaved.WARMUP + self._settings.steps
        )
        tell(f"{self._settings.model}: {interleaved.WARMUP} warm-up rounds")
        for order in itertools.islice(orders, interleaved.WARMUP):
            step_ms = self._round(order)[EAGER].step_ms
            self.steps = max(self.steps, interleaved.enough(step_ms, quick=self._settings.quick))
        found = []
        began = time.perf_counter()
        for number, order in enumerate(orders, start=1):
            found.append(self._round(order))
            left_s = (time.perf_counter() - began) / number * (self._settings.steps - number)
            of = f"round {number} of {self._settings.steps}"
            tell(f"{self._settings.model}: {of}, about {left_s:.0f} s of rounds left")
        return found

    def alone_us(self) -> dict[str, tuple[float, ...]]:
        """Time the guard's key, the call signature and DLPack individually, in microseconds.

        Each is called once after a step. In a loop its data would already be in the processor's
        caches.

        Returns:
            Time of each call, keyed by what was timed.
        """
        tell(f"{self._settings.model}: timing guard, call signature and DLPack individually")
        guard = Guard(self._model)
        tensors = [parameter.detach() for parameter in self.trained]
        calls: dict[str, Callable[[], object]] = {
            "guard": guard.key,
            "form": lambda: CallSignature.of(self._args, self._kwargs),
            "dlpack": lambda: [from_dlpack(tensor) for tensor in tensors],
            "guard again": guard.key,
        }
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self._settings.steps):
            self.steppers[ORT].step([self._batch], lr=0.0)
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                found[name].append((time.perf_counter() - started) * 1e6)
        return {name: tuple(us) for name, us in found.items()}

    def profile(self) -> profile_ort.OrtProfile:
        """Profile further steps, forward and backward only, with ORT's own profiler."""
        tell(f"{self._settings.model}: profiling {self.profiled_steps} steps with ORT's profiler")
        taken = Step(self._model, self._args, self._kwargs)
        with interleaved.no_gc():
            return profile_ort.profile(taken, self.export, self.profiled_steps, torch.device("cpu"))

    def timings(self) -> dict[str, Timing]:
        """Return the times of ORT's nodes and of their replacements, keyed by node name."""
        tell(f"{self._settings.model}: comparing ORT's kernels with torch's")
        low = self._settings.precision != "fp32"
        return kept(self.export.ort_graph(), self.export.input_shapes(), low=low)

    def _round(self, order: Iterable[str]) -> dict[str, StepParts]:
        gc.collect()
        found = {}
        for name in order:
            time.sleep(interleaved.PAUSE_S)
            found[name] = self._turn(EAGER) if name == EAGER else self._ort_turn(name)
        return found

    def _ort_turn(self, name: str) -> StepParts:
        session_of = self._twin if name == SPINNING else self.export
        with (
            profiling.timed(self.export.manager, session_of=session_of.manager) as session,
            _timed(self._execution, "forward") as execution_s,
            _timed(self.export, "run") as export_s,
        ):
            parts = self._turn(ORT)
        ran = {session.forwards, session.backwards, len(execution_s), len(export_s)}
        assert ran == {self.steps}, "each step is one run of the export, forward and backward"
        mean_ms = 1e3 / self.steps
        return StepParts(
            parts.step_ms,
            parts.forward_ms,
            parts.backward_ms,
            parts.optimizer_ms,
            session_forward_ms=session.forward_s * mean_ms,
            session_backward_ms=session.backward_s * mean_ms,
            execution_ms=sum(execution_s) * mean_ms,
            export_ms=sum(export_s) * mean_ms,
        )

    def _turn(self, name: str) -> StepParts:
        stepper, number = self.steppers[name], self.steps
        results = []
        with interleaved.no_gc():
            started = time.perf_counter()
            for _ in range(number):
                results.append(stepper.step([self._batch], lr=0.0))
            took_s = time.perf_counter() - started
        return StepParts(
            step_ms=took_s / number * 1e3,
            forward_ms=sum(each.forward_ms for each in results) / number,
            backward_ms=sum(each.backward_ms for each in results) / number,
            optimizer_ms=sum(each.optimizer_ms for each in results) / number,
        )


def operators(nodes: Iterable[NodeTime], timings: Mapping[str, Timing]) -> tuple[Operator, ...]:
    """Return the nodes' times, summed by operator.

    Args:
        nodes: Profiled nodes.
        timings: Times of nodes and their replacements, keyed by node name.
    """
    found: dict[str, Operator] = {}
    for node in nodes:
        own = found.get(node.op, Operator(node.op, 0, 0.0, 0.0))
        timing_ = timings.get(node.node)
        found[node.op] = Operator(
            node.op,
            own.nodes + 1,
            own.forward_us + (node.us if node.phase == "forward" else 0.0),
            own.backward_us + (node.us if node.phase == "backward" else 0.0),
            compared=own.compared + (timing_ is not None),
            ort_us=own.ort_us + (timing_.ort_us if timing_ else 0.0),
            ours_us=own.ours_us + (timing_.torch_us if timing_ else 0.0),
        )
    return tuple(found.values())


@contextlib.contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Record the seconds of each call of a method of `owner`."""
    method, took = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = method(*args, **kwargs)
        took.append(time.perf_counter() - started)
        return found

    vars(owner)[name] = call
    try:
        yield took
    finally:
        del vars(owner)[name]
