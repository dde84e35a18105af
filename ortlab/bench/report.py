"""Results of `ortlab bench step`, the parts of a step's time, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import Machine
from ortlab.bench.result import milliseconds, origin, table, warnings
from ortlab.bench.settings import StepSettings

FORM = 2
MOST_OPERATORS = 12
_COPIES = frozenset(
    {"Cast", "Transpose", "Identity", "Reshape", "Concat", "ConcatTraining", "Split", "Slice"}
    | {"SplitTraining", "Expand", "Tile", "Pad", "Flatten", "Squeeze", "Unsqueeze"}
    | {"MemcpyFromHost", "MemcpyToHost", "ortlab_kernels.permute", "ortlab_kernels.to_bf16"}
)
"""Operators that compute nothing: they copy values or change a shape."""
_DOMAINS = ("com.microsoft.", "org.pytorch.aten.")


@dataclass(frozen=True)
class StepParts:
    """Time of a step and its parts in milliseconds, as means over a turn's steps.

    The last four are for ORT and 0 in eager torch.

    Attributes:
        step_ms: Whole step.
        forward_ms: Forward pass.
        backward_ms: Backward pass.
        optimizer_ms: Optimizer, with gradient clipping.
        session_forward_ms: C++ run of ORT's session in forward.
        session_backward_ms: C++ run of ORT's session in backward.
        execution_ms: Forward from ortlab's lookup of the export to the outputs.
        export_ms: Part of `execution_ms` in the export's own run, which includes the session's
            forward.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    session_forward_ms: float = 0.0
    session_backward_ms: float = 0.0
    execution_ms: float = 0.0
    export_ms: float = 0.0

    @property
    def rest_ms(self) -> float:
        """Time that is not in forward, backward or optimizer."""
        return self.step_ms - self.forward_ms - self.backward_ms - self.optimizer_ms

    @property
    def session_ms(self) -> float:
        """Time in ORT's session, forward and backward."""
        return self.session_forward_ms + self.session_backward_ms

    @property
    def around_ms(self) -> float:
        """Time of forward and backward outside of ORT's session."""
        return self.forward_ms + self.backward_ms - self.session_ms

    @property
    def caller_ms(self) -> float:
        """Time of forward before ortlab's lookup and after it."""
        return self.forward_ms - self.execution_ms

    @property
    def look_up_ms(self) -> float:
        """Time of forward to find the export that serves the call."""
        return self.execution_ms - self.export_ms

    @property
    def passing_ms(self) -> float:
        """Time of forward between the export and its session."""
        return self.export_ms - self.session_forward_ms

    @property
    def around_backward_ms(self) -> float:
        """Time of backward outside of ORT's session."""
        return self.backward_ms - self.session_backward_ms


@dataclass(frozen=True)
class SessionPhase:
    """A phase of the session in ORT's own profile, in microseconds. See `PhaseTime`."""

    kernels_us: float
    between_us: float


@dataclass(frozen=True)
class Operator:
    """An operator of the graph that ran, with the time of its nodes in a step.

    Attributes:
        op: Name with domain.
        nodes: Number of nodes.
        forward_us: Time in forward.
        backward_us: Time in backward.
        compared: Number of nodes with cached times, of the node or of what it replaced.
        ort_us: Time of ORT's kernels for those nodes.
        ours_us: Time of torch's or ortlab's kernels for the same sizes.
    """

    op: str
    nodes: int
    forward_us: float
    backward_us: float
    compared: int = 0
    ort_us: float = 0.0
    ours_us: float = 0.0

    @property
    def us(self) -> float:
        """Time in a whole step."""
        return self.forward_us + self.backward_us

    @property
    def name(self) -> str:
        """Name without its domain, unless that is ortlab's own."""
        for domain in _DOMAINS:
            if self.op.startswith(domain):
                return self.op.removeprefix(domain)
        return self.op

    @property
    def copies(self) -> bool:
        """True if it copies values or changes a shape, and computes nothing."""
        return self.name in _COPIES


@dataclass(frozen=True)
class StepBench:
    """Results of `ortlab bench step`.

    Attributes:
        settings: Settings of the benchmark.
        date: Date in UTC.
        environment: Versions of the installed packages.
        machine: Machine that it ran on.
        model: Description of the model.
        parameters: Number of trained parameter tensors.
        remarks: Further lines to show.
        steps_per_turn: Number of steps in a turn.
        eager: Eager torch's turn in each round.
        ort: ORT's turn in each round.
        spinning: Turn of ORT with idle workers that spin in each round.
        guard_us: Time of the guard's key, called alone after a step.
        guard_again_us: Time of the guard's key, called again at once.
        form_us: Time of the call signature, called alone after a step.
        dlpack_us: Time to pass all parameters through DLPack and back, after a step.
        profiled_steps: Number of steps in ORT's own profile, without their optimizer.
        watched_us: Time of a profiled step.
        unwatched_us: Time of such a step without profiling.
        phases: Phases of ORT's profile.
        operators: Operators of ORT's profile.
    """

    settings: StepSettings
    date: str
    environment: Mapping[str, Any]
    machine: Machine
    model: str
    parameters: int
    remarks: tuple[str, ...]
    steps_per_turn: int
    eager: tuple[StepParts, ...]
    ort: tuple[StepParts, ...]
    spinning: tuple[StepParts, ...]
    guard_us: tuple[float, ...]
    guard_again_us: tuple[float, ...]
    form_us: tuple[float, ...]
    dlpack_us: tuple[float, ...]
    profiled_steps: int
    watched_us: float
    unwatched_us: float
    phases: Mapping[str, SessionPhase]
    operators: tuple[Operator, ...]

    @property
    def speed(self) -> Spread:
        """Number of ORT's steps in the time of one of eager torch, compared in each round."""
        return _ratio(self.eager, self.ort)

    @property
    def cost_of_spinning(self) -> Spread:
        """Time of a step with spinning workers relative to sleeping ones, compared by round."""
        return _ratio(self.spinning, self.ort)

    # ---- JSON ------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return all values of every round in a form that JSON can store."""
        plain = dataclasses.asdict(self) | {"settings": self.settings.as_dict()}
        return {"form": FORM, "benchmark": not self.settings.quick, **plain}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the result that `as_dict` stored.

        Args:
            stored: Dictionary from `as_dict`.

        Raises:
            ValueError: If the dictionary has another format version.
        """
        if stored.get("form") != FORM:
            raise ValueError(
                f"unsupported format version {stored.get('form')!r} of a benchmark; expected {FORM}"
            )
        values = {field.name: stored[field.name] for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        for name in ("eager", "ort", "spinning"):
            values[name] = tuple(StepParts(**each) for each in stored[name])
        phases = {name: SessionPhase(**each) for name, each in stored["phases"].items()}
        return cls(
            **values
            | {
                "settings": StepSettings.of(stored["settings"]),
                "machine": Machine(**stored["machine"]),
                "phases": phases,
                "operators": tuple(Operator(**each) for each in stored["operators"]),
            }
        )

    # ---- Markdown --------------------------------------------------------------------------------

    def markdown(self) -> str:
        """Return the report: whole step, time around and in ORT's session, and idle workers."""
        return "\n".join(
            [
                *warnings(self.machine, quick=self.settings.quick),
                *self._head(),
                *self._whole(),
                *self._around(),
                *self._inside(),
                *self._workers(),
                *(f"- {remark}" for remark in self.remarks),
                *([""] if self.remarks else []),
                origin(self.environment, self.machine, self.date),
                "",
            ]
        )

    _repr_markdown_ = markdown

    def _head(self) -> list[str]:
        settings, each = self.settings, self.steps_per_turn
        of = "steps" if each == 1 else f"turns of {each} steps"
        return [
            f"Parts of a training step of {self.model}, in {settings.precision} with "
            f"`--kernels {settings.kernels}`: medians of {settings.steps} {of} and their "
            "quartiles. Parts add up within a step, but their medians need not.",
            "",
        ]

    def _whole(self) -> list[str]:
        def row(what: str, of: Callable[[StepParts], float]) -> list[str]:
            return [what, _spread(self.eager, of), _spread(self.ort, of)]

        def session(of: Callable[[StepParts], float]) -> list[str]:
            return ["in ORT's session", "", _spread(self.ort, of)]

        rows = [
            row("step", lambda parts: parts.step_ms),
            row("forward", lambda parts: parts.forward_ms),
            session(lambda parts: parts.session_forward_ms),
            row("backward", lambda parts: parts.backward_ms),
            session(lambda parts: parts.session_backward_ms),
            row("optimizer, with clipping", lambda parts: parts.optimizer_ms),
            row("rest: release of old gradients", lambda parts: parts.rest_ms),
        ]
        speed = self.speed
        return [
            "## Whole step",
            "",
            *table(["", "eager torch", "ORT"], rows),
            "",
            f"ORT makes {speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f}) steps in the time "
            "of one step of eager torch.",
            "",
            "**Forward and backward without session: "
            f"{_spread(self.ort, lambda parts: parts.around_ms)} for {self.parameters} parameter "
            "tensors.**",
            "",
        ]

    def _around(self) -> list[str]:
        guard, form = Spread.of(self.guard_us), Spread.of(self.form_us)
        look_up = Spread.of([parts.look_up_ms for parts in self.ort]).median * 1e3
        rows = [
            [
                "forward: stepper and call of the module",
                _micro(parts.caller_ms for parts in self.ort),
            ],
            [
                "forward: lookup of the export that serves the call",
                _micro(parts.look_up_ms for parts in self.ort),
            ],
            ["lookup: the guard's key, called alone after a step", _us(guard)],
            ["lookup: the call signature, called alone after a step", _us(form)],
            [
                "lookup: remainder of the medians",
                f"{look_up - guard.median - form.median:,.0f} us",
            ],
            [
                "forward: remainder between export and session (flattening of inputs, DLPack, "
                "torch's autograd, assembly of outputs)",
                _micro(parts.passing_ms for parts in self.ort),
            ],
            [
                "backward: remainder around the session (torch's autograd, DLPack, assignment of "
                "`.grad`)",
                _micro(parts.around_backward_ms for parts in self.ort),
            ],
        ]
        return [
            "## Around ORT's session",
            "",
            *table(["", "ORT"], rows),
            "",
            f"For comparison: passing {self.parameters} tensors through DLPack and back takes "
            f"{_us(Spread.of(self.dlpack_us))} in torch alone, after a step. The guard's key takes "
            f"{_us(Spread.of(self.guard_again_us))} when it is called again at once, because a "
            "step replaces the contents of the processor's caches.",
            "",
        ]

    def _inside(self) -> list[str]:
        kernels = {name: phase.kernels_us for name, phase in self.phases.items()}
        between = {name: phase.between_us for name, phase in self.phases.items()}
        session = {name: kernels[name] + between[name] for name in kernels}
        moved = [each for each in self.operators if each.copies]
        copies = {
            "forward": sum(each.forward_us for each in moved),
            "backward": sum(each.backward_us for each in moved),
        }

        def row(what: str, us: Mapping[str, float]) -> list[str]:
            whole = sum(us.values())
            figures = [milliseconds(each / 1e3) for each in (*us.values(), whole)]
            return [what, *figures, f"{whole / sum(session.values()):.1%}"]

        rows = [
            row("session", session),
            row("kernels", kernels),
            row("kernels: copies and changes of shape", copies),
            row("between kernels, including the profiler's own writes", between),
        ]
        watched, plain = (milliseconds(us / 1e3) for us in (self.watched_us, self.unwatched_us))
        return [
            "## In ORT's session",
            "",
            f"ORT's own profile of {self.profiled_steps} other steps, without their optimizer: "
            f"sums of the nodes' medians. Such a step takes {watched} with profiling and {plain} "
            "right afterwards without.",
            "",
            *table(["", *self.phases, "step", "share"], rows),
            "",
            *self._operators(),
        ]

    def _operators(self) -> list[str]:
        total = sum(each.us for each in self.operators) or 1.0
        longest = sorted(self.operators, key=lambda each: -each.us)
        shown, others = longest[:MOST_OPERATORS], longest[MOST_OPERATORS:]
        rows = [
            [
                each.name,
                str(each.nodes),
                milliseconds(each.us / 1e3),
                f"{each.us / total:.1%}",
                *_compared(each),
            ]
            for each in shown
        ]
        if others:
            us = sum(each.us for each in others)
            count, nodes = len(others), sum(each.nodes for each in others)
            figures = [str(nodes), milliseconds(us / 1e3), f"{us / total:.1%}", "-", "-", "-"]
            rows.append([f"{count} more operators", *figures])
        heads = [
            "operator",
            "nodes",
            "time per step",
            "share",
            "nodes compared",
            "ORT kernels",
            "torch or ortlab kernels",
        ]
        return [
            *table(heads, rows),
            "",
            "The last columns compare ORT's kernels with equivalent ones of torch or ortlab, as "
            "cached by `ortlab bench kernels` for these nodes and sizes. A kernel that replaces "
            "several nodes is listed with the first.",
            "",
        ]

    def _workers(self) -> list[str]:
        rows = []
        for does, arm in (("sleep, as configured", self.ort), ("spin", self.spinning)):
            figures: list[Callable[[StepParts], float]] = [
                lambda parts: parts.step_ms,
                lambda parts: parts.session_ms,
                lambda parts: parts.around_ms,
                lambda parts: parts.optimizer_ms,
            ]
            rows.append([does, *(_spread(arm, of) for of in figures)])
        cost = self.cost_of_spinning
        heads = ["ORT's idle workers", "step", "session", "around session", "optimizer"]
        return [
            "## Contention between threads",
            "",
            *table(heads, rows),
            "",
            f"With spinning workers a step takes {cost.median:.2f} ({cost.low:.2f} to "
            f"{cost.high:.2f}) times as long. Torch's own workers spin as configured for OpenMP; "
            "with OMP_WAIT_POLICY=passive in the environment they sleep.",
            "",
        ]


def _ratio(these: Sequence[StepParts], those: Sequence[StepParts]) -> Spread:
    return Spread.of([a.step_ms / b.step_ms for a, b in zip(these, those, strict=True)])


def _spread(arm: Sequence[StepParts], of: Callable[[StepParts], float]) -> str:
    found = Spread.of([of(parts) for parts in arm])
    low, high = (milliseconds(each).removesuffix(" ms") for each in (found.low, found.high))
    return f"{milliseconds(found.median)} ({low} to {high})"


def _micro(ms: Iterable[float]) -> str:
    return _us(Spread.of([each * 1e3 for each in ms]))


def _us(found: Spread) -> str:
    return f"{found.median:,.0f} us ({found.low:,.0f} to {found.high:,.0f})"


def _compared(each: Operator) -> list[str]:
    """Return the number of nodes with cached times, ORT's time and the other kernels' time."""
    if not each.compared:
        return ["-", "-", "-"]
    return [str(each.compared), *(milliseconds(us / 1e3) for us in (each.ort_us, each.ours_us))]
