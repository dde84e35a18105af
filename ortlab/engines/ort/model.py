"""A model that runs in ORT: its compilation, the check of its first step, and the report on it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves, tree_map_only

from ortlab.engines import plan_names
from ortlab.engines.base import GraphCount, Report, tell
from ortlab.engines.batch import tensors
from ortlab.engines.call_signature import CallSignature
from ortlab.engines.ort import check, recompute
from ortlab.engines.ort.capture import Backend, CompiledGraph, Phase
from ortlab.engines.ort.compile_log import CompileLog
from ortlab.engines.ort.lowering.graph import HALVES
from ortlab.engines.ort.recompute import NOTHING, Recompute
from ortlab.engines.ort.segments import OrtSegment, TorchOperators
from ortlab.engines.ort.session import SILENT
from ortlab.engines.self_check import (
    Call,
    Observed,
    SelfCheckFailed,
    compare,
    differences,
    exact_results,
    observe,
    rounding,
)
from ortlab.engines.step_check import Difference, StepCheck
from ortlab.engines.torchscript.isolation import inputs_kept
from ortlab.settings import EngineSettings
from ortlab.utils.errors import Concise, out_of_memory
from ortlab.utils.process_memory import memory
from ortlab.utils.rng import RandomStates
from ortlab.utils.wording import FEW, few

_LIMITS: Final[dict[str, Any]] = {
    "recompile_limit": 64,
    "allow_rnn": True,
    "use_numpy_random_stream": True,
}
"""Options of Dynamo during a call: graphs of a model at most, RNNs, numpy's own random numbers.

Dynamo would otherwise draw the numbers of ``np.random`` from torch's generator.
"""

_ANY_SIZE: Final[dict[str, Any]] = {**_LIMITS, "specialize_float": True}
"""The same where all sizes may vary: floats are fixed, or torch captures twice to find that out."""

_CAPTURES: Final[dict[str, Any]] = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
}
"""Options of Dynamo that capture selections by a mask and ``item()``."""

_PARTS: Final[dict[str, Any]] = {"suppress_errors": True}
"""Options of Dynamo after a failed capture: code that it cannot capture runs in eager torch."""

_SEVERITIES: Final = {
    "verbose": 0, "devinfo": 1, "info": 1, "warning": 2, "error": SILENT, "fatal": SILENT
}  # fmt: skip
"""ORT's severities by the names of the setting `log_level`."""

_OF_CAPTURE: Final = (
    "torch._dynamo.convert_frame",
    "torch._functorch._aot_autograd.",
    "ortlab.engines.ort.",
)
"""Modules that raise errors of a capture; eager torch calls none of them."""

_MOST_MOVES: Final = 20


class CaptureFailed(Concise, RuntimeError):
    """Raised when torch cannot capture a model and fallback is off."""


@dataclass(frozen=True)
class _Before:
    """Random states and buffers of a model from before a call.

    Attributes:
        states: Random states.
        buffers: Buffers, each with its content.
    """

    states: RandomStates
    buffers: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        """Return the state of a model now."""
        kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        return cls(RandomStates.now(), kept)

    def give_back(self) -> None:
        """Restore the state."""
        self.states.give_back()
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)


@dataclass(frozen=True)
class _Ran:
    """Number of a graph's calls so far, and their seconds: all of them, and those in ORT."""

    calls: int = 0
    seconds: float = 0.0
    ort_s: float = 0.0

    @classmethod
    def of(cls, graph: CompiledGraph) -> _Ran:
        return cls(graph.calls, graph.call_seconds, graph.division.ort_seconds)

    def __sub__(self, other: _Ran) -> _Ran:
        return _Ran(
            self.calls - other.calls, self.seconds - other.seconds, self.ort_s - other.ort_s
        )


@dataclass(frozen=True)
class _Past:
    """Totals of a model at the beginning of a run.

    Attributes:
        graphs: Totals of each graph.
        outside_s: Seconds of calls outside of the graphs.
        check_s: Seconds of checks, without those of compilations.
        compile_s: Seconds of compilations.
        notes: Number of notes.
        recompilations: See `CompileLog.recompilations`.
    """

    graphs: tuple[_Ran, ...] = ()
    outside_s: float = 0.0
    check_s: float = 0.0
    compile_s: float = 0.0
    notes: int = 0
    recompilations: Mapping[str, int] = field(default_factory=dict)


_NO_PAST: Final = _Past()


class OrtModel:
    """Record of a wrapped model.

    Attributes:
        module: The user's own module.
        settings: Settings that apply now.
        engine: Name of the engine.
        twin: Record of the same module with graphs for any size, once `for_any_size` was asked.
        anywhere: See `OneProcess.anywhere`. Processes that share layers wait for each other in each
            forward and backward pass, so they check the same number of times.
    """

    engine = "ort"

    def __init__(
        self, module: nn.Module, settings: EngineSettings, *, any_size: bool = False
    ) -> None:
        """Prepare the model to run; nothing is captured yet.

        Args:
            module: The user's module.
            settings: Settings of the engine.
            any_size: True if sizes of inputs may vary from the first call on, not from the second.
        """
        self.module = module
        self._dynamic = True if any_size else None
        self.twin: OrtModel | None = None
        self._lock = threading.RLock()  # a check must not meet another thread's call
        self._forward = module.forward
        # Torch's cache of compiled code keeps the backend, which must not keep the model.
        remember = weakref.WeakMethod(self._remember)
        self._backend = Backend(starting=lambda: (remember() or _nothing)())
        self.configure(settings)
        self._before: _Before | None = None
        self._variables = dict(_environment())
        self._compiled = self._compile()
        self._limits = _ANY_SIZE if any_size else _LIMITS
        self._options = torch._dynamo.config.patch({**self._limits, **_CAPTURES})
        self._captures = True
        self._checked: int | None = None
        self._check_s = self._outside_s = 0.0
        self._fallback: str | None = None
        self._notes: list[str] = []
        self._log = CompileLog(self._notes.append)
        self._asked: deque[StepCheck] = deque()
        self._remarks: list[str] = []
        self.anywhere: Callable[[bool], bool] = bool
        self._last_call: CallSignature | None = None

    def _compile(self) -> Callable[..., Any]:
        options: dict[str, Any] = {}
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.12
            # Each model has a limit of its own, not one for all models of its class.
            options["isolate_recompiles"] = True
        compiled: Callable[..., Any] = torch.compile(
            _with_own_code(self._forward),
            backend=self._backend.held_weakly(),
            dynamic=self._dynamic,
            **options,
        )
        return compiled

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward pass in ORT.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The module's outputs.

        Raises:
            CaptureFailed: If torch cannot capture the model and fallback is off.
            SelfCheckFailed: If results differ from eager torch and fallback is off.
        """
        with self._lock:
            return self._checked_forward(args, kwargs)

    def replace_forward(self, function: Callable[..., Any] | None) -> None:
        """Give the module another forward, which is captured anew.

        Args:
            function: The new forward; None for that of the module's class.
        """
        with self._lock:
            attributes = self.module.__dict__
            if function is not None:
                attributes["forward"] = function
            elif attributes.pop("forward", None) is None:
                return
            self._forward = self.module.forward
            self._capture_again("forward was replaced")

    def _capture_again(self, why: str) -> None:
        self._compiled = self._compile()
        if self._backend.graphs:
            self._notes.append(f"captured again: {why}")
        self._backend.graphs.clear()  # none of them runs again
        self._checked, self._outside_s = None, 0.0

    def _checked_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fallback is not None:
            self._answer(self._fallback, passed=False)
            return self._run(args, kwargs)
        if self._variables != _environment():  # which torch's guards do not cover
            self._variables = dict(_environment())
            self._capture_again("an environment variable has changed")
        if self._asked or (self._checked is None and self.settings.self_check):
            self._check(args, kwargs)  # before the call, which then starts from the same state
        self._before = None
        outputs = self._run(args, kwargs)
        if len(self._backend.graphs) > (self._checked or 0) and self.settings.self_check:
            before, buffers = self._before, tuple(self.module.buffers())
            # The graph of these outputs may have saved buffers, which the check restores.
            with _unsafe_preserve_version_counter(buffers):
                right = self._check(args, kwargs)
            if not right and before is not None:
                before.give_back()
                outputs = self._run(args, kwargs)
        self._before = None
        return outputs

    def _remember(self) -> None:
        """Keep the state from before a call that may have to be repeated, as it compiles."""
        if self._before is None:
            self._before = _Before.of(self.module)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled forward, or the model's own after a fallback."""
        if self._fallback is not None:
            return self._forward(*args, **kwargs)
        self._backend.call += 1
        compiled, known = len(self._backend.graphs), self._log.count
        calls, graphs_s = self._executed()
        started = time.perf_counter()
        try:
            with self._options, self._log:
                outputs = self._compiled(*args, **kwargs)
        except Exception as error:
            if not _is_of_capture(error):
                raise
            return self._captured_otherwise(error, args, kwargs)
        now, now_s = self._executed()
        if len(self._backend.graphs) > compiled:
            self._last_call = CallSignature.of(args, kwargs)
            tell(f"captured {len(self._backend.graphs)} graphs of {type(self.module).__name__}")
        elif self._log.count == known:
            self._outside_s += time.perf_counter() - started - (now_s - graphs_s)
        if now == calls and _computed(outputs, args, kwargs):
            self._fallback = f"torch captured no graph of it: {self._log.why_nothing_ran}"
        return outputs

    def _captured_otherwise(
        self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Try again to capture less of the model; if that fails, too, run it in eager torch.

        An error that the model raises in eager torch, too, is raised as it is there, and the next
        call is captured as if this one had not been.
        """
        before = self._before or _Before.of(self.module)
        before.give_back()
        try:
            self._forward(*args, **kwargs)
        except Exception as own:
            raise own from None
        before.give_back()
        if self._captures:
            self._options = torch._dynamo.config.patch({**self._limits, **_PARTS})
            self._captures = False
            self._compiled = self._compile()
            self._log = CompileLog(self._notes.append, seconds=self._log.seconds)
            return self._run(args, kwargs)
        reason = f"torch cannot capture it ({_first_line(error)})"
        if not self.settings.fallback:
            raise CaptureFailed(f"engine 'ort': {reason}; use engine='eager'") from error
        self._fallback = reason
        return self._run(args, kwargs)

    def _executed(self) -> tuple[int, float]:
        """Return the number of calls of graphs so far, and their time in seconds."""
        graphs = self._backend.graphs
        return sum(each.calls for each in graphs), sum(each.call_seconds for each in graphs)

    @property
    def _compile_s(self) -> float:
        """Seconds of compilations so far: torch's capture, and ORT's sessions."""
        return self._log.seconds + self._backend.late_s

    # Check

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare a step with eager torch, and move what is wrong to torch.

        Both steps start from the same state, draw the same random numbers and leave no trace.
        Return True if nothing was wrong.
        """
        started, compiled_s = time.perf_counter(), self._compile_s
        tell("checking ORT against eager torch")
        try:
            return self._compared(args, kwargs)
        finally:
            self._checked = len(self._backend.graphs)
            compiled_s = self._compile_s - compiled_s
            self._check_s += max(0.0, time.perf_counter() - started - compiled_s)

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        reference, recomputed = self._reference(args, kwargs)
        before = len(self._remarks)
        right = True
        for _ in range(_MOST_MOVES + recomputed):
            found = self._observed(self._run, args, kwargs)
            if self._fallback is not None:
                self._answer(self._fallback, passed=False)
                return True
            wrong: SelfCheckFailed | None = None
            try:
                verdict: object = compare(reference, found, low_precision=_is_low(self.module))
            except SelfCheckFailed as error:
                wrong = error
            if self.anywhere(wrong is not None):
                failure = wrong or SelfCheckFailed("results differ on another rank")
                if recomputed:
                    reference, recomputed = self._observed(self._eager, args, kwargs), False
                    continue
                with check.recorded(self._segments()) as inputs:
                    self._observed(self._run, args, kwargs)
                moves = check.mended(inputs)
                if self.anywhere(bool(moves)):
                    right = False
                    for i in range(len(self._backend.graphs)):
                        self._backend.save(i)
                    self._remarks += map(str, moves)
                    continue
                call = (args, kwargs)
                why = rounding(self.module, call, reference, found, self._of_copy, self.anywhere)
                if not self.anywhere(not why):
                    verdict = f"{why}; {failure}"
                else:
                    self._answer(str(failure), call, (reference, found), passed=False)
                    return self._wrong(failure)
            shapes = ", ".join(str(list(value.shape)) for value in tensors([args, kwargs]))
            self._notes.append(f"checked on {shapes}: {verdict}")
            told = "; ".join([f"{verdict}, for inputs of shape {shapes}", *self._remarks[before:]])
            self._answer(told, (args, kwargs), (reference, found), passed=True)
            return right
        raise AssertionError("every check found another operator")

    def _answer(
        self,
        verdict: str,
        call: Call = ((), {}),
        results: tuple[Observed, Observed] | None = None,
        *,
        passed: bool,
    ) -> None:
        """Give the result of a comparison to the checks that the user has asked for."""
        rows: tuple[Difference, ...] = ()
        if self._asked and results:
            rows = differences(*results, exact_results(self.module, call, self._of_copy))
        while self._asked:
            self._asked.popleft().finish(passed, verdict, rows)

    def _wrong(self, error: SelfCheckFailed) -> bool:
        reason = f"its results would differ from eager torch: {error}"
        if not self.settings.fallback:
            raise SelfCheckFailed(f"engine 'ort': {reason}; use engine='eager'")
        self._fallback = reason
        return False

    def _reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Observed, bool]:
        """Return results of eager torch, and whether layers were recomputed.

        They are if the step recomputes as well, or if memory runs out. Layers that cannot be
        recomputed may raise any error, or have other results.
        """
        if self._backend.recompute == NOTHING:
            try:
                return self._observed(self._eager, args, kwargs), False
            except Exception as error:
                if not out_of_memory(error):
                    raise
        with contextlib.suppress(Exception), check.layers_recomputed(self.module):
            return self._observed(self._eager, args, kwargs), True
        return self._observed(self._eager, args, kwargs), False

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._forward(*args, **kwargs)

    def _observed(
        self,
        function: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Observed:
        given = tensors([args, kwargs])
        with inputs_kept(given):
            return observe(
                functools.partial(function, args, kwargs),
                module or self.module,
                inputs=[each for each in given if each.requires_grad],
                gradients=torch.is_grad_enabled(),
            )

    def _of_copy(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Observed:
        return self._observed(lambda args, kwargs: module(*args, **kwargs), args, kwargs, module)

    def _segments(self) -> list[OrtSegment]:
        return [each for graph in self._backend.graphs for each in graph.division.ort_segments()]

    # Graphs

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a training step of its own, so that its graphs are there, and leave no trace.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        with self._lock:
            self._observed(self._run, args, kwargs)

    def for_any_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OrtModel:
        """Return another record of the module, with the same settings and graphs for any size.

        Args:
            args: Positional arguments of a call to capture.
            kwargs: Keyword arguments of the call.
        """
        if self.twin is None:
            self.twin = OrtModel(self.module, self.settings, any_size=True)
        self.twin.configure(self.settings.replace(self_check=False, save_onnx=None))
        # A size of 1 would be fixed: torch treats 0 and 1 as sizes of their own.
        self.twin.capture(*tree_map_only(torch.Tensor, _several, (args, kwargs)))
        return self.twin

    def planned(
        self, recompute: Recompute, *, make: bool = True
    ) -> tuple[list[CompiledGraph], list[CompiledGraph]]:
        """Return forward and backward graphs of the last call under a plan, without running them.

        Args:
            recompute: What the backward pass is to compute again.
            make: True to make graphs that are not there yet; calls wait for seconds meanwhile.

        Raises:
            ValueError: If the graphs are not there, or torch would have to capture them again.
        """
        with self._lock:
            forward = self.last_graphs().get("forward", [])
            pairs = [graph.step.pair(recompute, make=make) for graph in forward]
        made = [(each.forward, each.backward) for each in pairs if each and each.backward]
        if len(made) < len(pairs) and not make:
            raise ValueError("its graphs are made in the first step after the change")
        if len(made) < len(pairs):
            raise ValueError("this graph cannot be planned: torch has to capture it again")
        return [one for one, _ in made], [other for _, other in reversed(made)]

    def calls_of(self, plan: str) -> int:
        """Return the number of calls of the modules that a plan names, in the last call.

        Args:
            plan: Plan, see `plan_names`.
        """
        forward = self.last_graphs().get("forward", [])
        return sum(graph.step.calls_of(plan) for graph in forward)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let calls of other threads wait, and keep the times of calls within out of the report."""
        with self._lock:
            graphs, outside_s = list(self._backend.graphs), self._outside_s
            parts = [part for graph in graphs for part in graph.division.parts()]
            segments = [segment for part in parts for segment in part.segments]
            graph_s = [graph.call_seconds for graph in graphs]
            segment_s = [segment.seconds for segment in segments]
            try:
                yield
            finally:
                self._outside_s = outside_s
                for graph, seconds in zip(graphs, graph_s, strict=True):
                    graph.call_seconds = seconds
                for segment, seconds in zip(segments, segment_s, strict=True):
                    segment.seconds = seconds

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass without any check.

        Args:
            *args: Positional arguments of the call.
            **kwargs: Keyword arguments of the call.
        """
        return self._run(args, kwargs)

    def last_graphs(self) -> dict[Phase, list[CompiledGraph]]:
        """Return the graphs of each phase that ran in its last call, in the order of that call."""
        found: dict[Phase, list[CompiledGraph]] = {}
        for phase in ("forward", "inference"):
            graphs = [graph for graph in self._backend.graphs if graph.phase == phase]
            last = max((graph.last_call for graph in graphs), default=0)
            if last:
                found[phase] = [graph for graph in graphs if graph.last_call == last]
        order = [(graph.step, graph.recompute) for graph in found.get("forward", ())]
        backward = [graph for graph in self._backend.graphs if graph.phase == "backward"]
        found["backward"] = sorted(
            (graph for graph in backward if (graph.step, graph.recompute) in order),
            key=lambda graph: -order.index((graph.step, graph.recompute)),
        )
        return found

    # Report

    def begin_run(self, settings: EngineSettings) -> Callable[[], Report]:
        """Use settings from now on, and return a function that reports on what runs from now on.

        Args:
            settings: See `WrappedModel.configure`.
        """
        self.configure(settings)
        now = _Past(
            tuple(map(_Ran.of, self._backend.graphs)),
            self._outside_s,
            self._check_s,
            self._compile_s,
            len(self._notes),
            self._log.recompilations(),
        )
        return functools.partial(self.report, now)

    def end_run(self, settings: EngineSettings) -> None:
        """Use settings of before a run again.

        Args:
            settings: See `WrappedModel.configure`.
        """
        self.configure(settings)
        self.anywhere = bool

    def report(self, past: _Past = _NO_PAST) -> Report:
        """See `WrappedModel.report`.

        Args:
            past: What to leave out.
        """
        remarks = list(self._remarks)
        if self._fallback is None:
            remarks += [*self._parts(past), *self._stored(), *self._zero_gradients()]
        return Report(
            engine_used="eager" if self._fallback else "ort",
            fallback_reason=self._fallback,
            export_s=self._compile_s - past.compile_s,
            check_s=self._check_s - past.check_s,
            notes=tuple(self._notes[past.notes :]),
            remarks=tuple(remarks),
            graphs=self._counted(past),
        )

    def _counted(self, past: _Past) -> GraphCount:
        graphs = list(self._backend.graphs)
        parts = [part for graph in graphs for part in graph.division.parts()]
        since = self._since(graphs, past)
        whole = self._outside_s - past.outside_s + sum(each.seconds for each in since)
        ort_s = sum(each.ort_s for each in since)
        return GraphCount(
            len(graphs),
            sum(1 for graph in graphs for _ in graph.division.ort_segments()),
            sum(part.torch_segments for part in parts),
            ort_s / whole if whole else None,
            (sum(each.seconds for each in since) - ort_s) / whole if whole else None,
        )

    def _since(self, graphs: Sequence[CompiledGraph], past: _Past) -> list[_Ran]:
        """Return what each graph ran in since then."""
        ran = [_Ran.of(graph) for graph in graphs]
        return [now - was for now, was in zip_longest(ran, past.graphs, fillvalue=_Ran())]

    def _parts(self, past: _Past) -> list[str]:
        """Return lines on ORT's share of the time, on compilations, and on operators in torch."""
        graphs = list(self._backend.graphs)
        since = self._since(graphs, past)
        used = [graph for graph, each in zip(graphs, since, strict=True) if each.calls]
        operators = [each for graph in used for each in graph.division.torch_operators()]
        in_torch = list(_in_torch(operators))
        whole = self._outside_s - past.outside_s + sum(each.seconds for each in since)
        told = self._log.remarks(past.recompilations)
        if used and whole:
            share = sum(each.ort_s for each in since) / whole
            first = [f"ORT {share:.1%} of the step (forward and backward)"]
            if len(in_torch) == 1:
                first.append(in_torch.pop())
            told.insert(0, "; ".join(first))
        return [*told, *in_torch]

    def _stored(self) -> list[str]:
        """Return lines on what the forward passes of the last call store, if that was chosen."""
        if self._backend.recompute == NOTHING:
            return []
        last = self.last_graphs()
        for graph in last.get("forward", []):
            if graph.step.unmet:
                return [f"recompute has no effect: {graph.step.unmet}"]
        stored = sum(graph.stored_bytes() for graph in last["backward"])
        return [f"recompute: {memory(stored)} stored for the backward pass"] if stored else []

    def _zero_gradients(self) -> list[str]:
        """Return a line on parameters whose gradient is zero where eager torch's is None."""
        steps = {graph.step for graph in self._backend.graphs}
        names = sorted({name for step in steps for name in step.zero_gradients(self.module)})
        if not names:
            return []
        return [
            f"gradient zero where eager torch's is None: {few(names)}; the loss uses no output "
            "that depends on it, and it has a hook"
        ]

    def configure(self, settings: EngineSettings) -> None:
        """See `WrappedModel.configure`."""
        known = recompute.plans_of(self.module)
        plans = plan_names.checked(plan_names.split(settings.recompute), known)
        self.settings = settings
        self._backend.recompute = Recompute(plans, settings.activation_budget)
        options = self._backend.options
        options.severity = _SEVERITIES[settings.ortmodule.log_level]
        options.arena = settings.ortmodule.arena
        self._backend.save_onnx = settings.ortmodule.save_onnx

    def reseed(self, seed: int) -> None:
        """See `WrappedModel.reseed`: all random numbers are torch's."""

    def check_next(self, check: StepCheck) -> None:
        """See `WrappedModel.check_next`."""
        self._asked.append(check)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """See `WrappedModel.example`; of the last call that made a graph."""
        return None if self._last_call is None else self._last_call.placeholders()


def _several(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of two samples for one of one sample."""
    return torch.cat([tensor, tensor]) if tensor.shape[:1] == (1,) else tensor


def _environment() -> dict[Any, Any]:
    """Return the environment variables, as the dictionary that `os.environ` encodes them in."""
    variables: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    return variables


def _nothing() -> None:
    """Do nothing."""


def _computed(outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if outputs contain anything but numbers, text and the call's own tensors."""
    given = {id(each) for each in tensors([args, kwargs])}
    plain = (bool, int, float, str, type(None))
    return not all(isinstance(each, plain) or id(each) in given for each in tree_leaves(outputs))


def _is_low(module: nn.Module) -> bool:
    """Return True if products are in half precision."""
    on_cpu = torch.is_autocast_enabled("cpu")
    return on_cpu or any(each.dtype in HALVES for each in module.parameters())


def _in_torch(operators: Iterable[TorchOperators]) -> Iterator[str]:
    """Yield a line for each operator in torch, or one for many that are there for one reason."""
    by_reason: dict[str, dict[str, str]] = defaultdict(dict)
    for each in sorted(operators, key=lambda each: (each.operator, each.lines)):
        lines = f" at {few(each.lines)}" if each.lines else ""
        by_reason[each.reason][f"{each.operator}{lines}"] = each.operator
    for reason, told in sorted(by_reason.items()):
        names = sorted({*told.values()})
        together = [few(names)] if len(names) > FEW else told
        yield from (f"{each} in torch: {reason}" for each in together)


def _is_of_capture(error: Exception) -> bool:
    """Return True if torch's compiler or this engine raised an error, not the model in eager torch.

    Dynamo does not wrap all of its errors, such as a failed assertion of its own.
    """
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return True
    trace = error.__traceback__ and error.__traceback__.tb_next  # without the frame of `_run`
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(_OF_CAPTURE):
            return True
        trace = trace.tb_next
    return False


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a method or function that lets go of what torch compiles of it.

    Torch keeps that with the code object, and a code object that it has compiled is never freed:
    with a class's own forward, graphs and sessions of all its models would stay. The copy has a
    code object of its own, which is emptied when the copy is dropped.
    """
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    if not isinstance(function, types.FunctionType):
        return forward
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copied, name, getattr(function, name))
    copied.__dict__.update(function.__dict__)
    empty = torch._dynamo.reset_code  # type: ignore[attr-defined]
    weakref.finalize(copied, empty, copied.__code__).atexit = False
    if isinstance(forward, types.MethodType):
        return types.MethodType(copied, forward.__self__)
    return copied
