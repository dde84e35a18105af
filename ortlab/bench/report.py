"""Where a step's time went: the figures of `ortlab bench step`, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ortlab.bench.interleaved import Spread
from ortlab.bench.machine import Machine
from ortlab.bench.result import milliseconds, origin, table, warnings
from ortlab.bench.settings import StepSettings

FORM = 1
MOST_OPERATORS = 12
_COPIES = frozenset(
    {"Cast", "Transpose", "Identity", "Reshape", "Concat", "ConcatTraining", "Split", "Slice"}
    | {"SplitTraining", "Expand", "Tile", "Pad", "Flatten", "Squeeze", "Unsqueeze"}
    | {"MemcpyFromHost", "MemcpyToHost", "ortlab_kernels.permute", "ortlab_kernels.to_bf16"}
)
"""Operators that compute nothing: they move numbers, or say that they have another form."""
_DOMAINS = ("com.microsoft.", "org.pytorch.aten.")


@dataclass(frozen=True)
class StepParts:
    """What a step takes, the mean of a turn's steps, in milliseconds.

    The last four are ORT's, 0 in eager torch: the C++ runs of its session, ``execution_ms`` from
    ortlab's look-up of the export to the outputs, and within that ``export_ms`` of the export's
    own run, which the session's forward is within.
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
        """What is neither forward, backward nor optimizer."""
        return self.step_ms - self.forward_ms - self.backward_ms - self.optimizer_ms

    @property
    def session_ms(self) -> float:
        """Both runs of ORT's session."""
        return self.session_forward_ms + self.session_backward_ms

    @property
    def around_ms(self) -> float:
        """Forward and backward without ORT's session."""
        return self.forward_ms + self.backward_ms - self.session_ms

    @property
    def caller_ms(self) -> float:
        """Of forward, what comes before ortlab's look-up and after it."""
        return self.forward_ms - self.execution_ms

    @property
    def look_up_ms(self) -> float:
        """Of forward, finding the export that serves the call."""
        return self.execution_ms - self.export_ms

    @property
    def passing_ms(self) -> float:
        """Of forward, between the export and its session."""
        return self.export_ms - self.session_forward_ms

    @property
    def around_backward_ms(self) -> float:
        """Backward without ORT's session."""
        return self.backward_ms - self.session_backward_ms


@dataclass(frozen=True)
class SessionPhase:
    """A phase of the session in ORT's own profile, in microseconds: see `PhaseTime`."""

    kernels_us: float
    between_us: float


@dataclass(frozen=True)
class Operator:
    """An operator of the graph that ran: its nodes, and what they take in a step.

    Of ``compared`` of them, or of what they took the place of, a measurement is kept: ``ort_us`` of
    ORT's kernels, and ``ours_us`` of torch's or ortlab's for the same sizes.
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
        """Of a whole step."""
        return self.forward_us + self.backward_us

    @property
    def name(self) -> str:
        """Without the domain, unless it is ortlab's own."""
        for domain in _DOMAINS:
            if self.op.startswith(domain):
                return self.op.removeprefix(domain)
        return self.op

    @property
    def copies(self) -> bool:
        """Whether it moves numbers, or changes a shape, and computes nothing."""
        return self.name in _COPIES


@dataclass(frozen=True)
class StepBench:
    """Where the time of a step goes. ``date`` is a day in UTC, ``model`` the model in words.

    ``eager``, ``ort`` and ``other`` have an item for each round, in which all had a turn of
    ``steps_per_turn`` steps; ``other`` is ORT with its idle workers the other way, where
    ``spinning`` says what they do in ``ort``. ``guard_us``, ``form_us`` and ``dlpack_us`` are what
    the guard's key, the arguments' form, and all parameters through DLPack and back take, each
    called by itself after a step; ``guard_again_us`` the key at once after that. ``phases`` and
    ``operators`` are of ORT's own profile of ``profiled_steps`` steps without their optimizer; one
    took ``watched_us``, and ``unwatched_us`` without the profile.
    """

    settings: StepSettings
    date: str
    environment: Mapping[str, Any]
    machine: Machine
    model: str
    parameters: int
    remarks: tuple[str, ...]
    spinning: bool
    steps_per_turn: int
    eager: tuple[StepParts, ...]
    ort: tuple[StepParts, ...]
    other: tuple[StepParts, ...]
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
        """How many steps ORT makes in the time of one of eager torch's, compared in each round."""
        return _ratio(self.eager, self.ort)

    @property
    def cost_of_spinning(self) -> Spread:
        """What a step takes with spinning workers, in steps with sleeping ones, in each round."""
        spins, sleeps = (self.ort, self.other) if self.spinning else (self.other, self.ort)
        return _ratio(spins, sleeps)

    # ---- JSON ------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Every figure of every round, as JSON holds it."""
        plain = dataclasses.asdict(self) | {"settings": self.settings.as_dict()}
        return {"form": FORM, "benchmark": not self.settings.quick, **plain}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `as_dict` gave. ValueError where it is of another form."""
        if stored.get("form") != FORM:
            raise ValueError(f"form {stored.get('form')!r} of a benchmark, expected {FORM}")
        values = {field.name: stored[field.name] for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
        for name in ("eager", "ort", "other"):
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
        """The step as a whole, what is around ORT's session, what is in it, and ORT's workers."""
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
            f"Where a training step of {self.model} goes, in {settings.precision} with "
            f"`--kernels {settings.kernels}`: medians of {settings.steps} {of}, and their "
            "quartiles. Parts add up within a step; medians of them need not.",
            "",
        ]

    def _whole(self) -> list[str]:
        def row(what: str, of: Callable[[StepParts], float]) -> list[str]:
            return [what, _spread(self.eager, of), _spread(self.ort, of)]

        def session(of: Callable[[StepParts], float]) -> list[str]:
            return ["of it ORT's session", "", _spread(self.ort, of)]

        rows = [
            row("a step", lambda parts: parts.step_ms),
            row("forward", lambda parts: parts.forward_ms),
            session(lambda parts: parts.session_forward_ms),
            row("backward", lambda parts: parts.backward_ms),
            session(lambda parts: parts.session_backward_ms),
            row("optimizer, with clipping", lambda parts: parts.optimizer_ms),
            row("the rest: old gradients freed", lambda parts: parts.rest_ms),
        ]
        speed = self.speed
        return [
            "## A step as a whole",
            "",
            *table(["", "eager torch", "ORT"], rows),
            "",
            f"ORT makes {speed.median:.2f} ({speed.low:.2f} to {speed.high:.2f}) steps in the time "
            "of one of eager torch's.",
            "",
            "**Forward and backward less session: "
            f"{_spread(self.ort, lambda parts: parts.around_ms)} for {self.parameters} parameter "
            "tensors.**",
            "",
        ]

    def _around(self) -> list[str]:
        guard, form = Spread.of(self.guard_us), Spread.of(self.form_us)
        look_up = Spread.of([parts.look_up_ms for parts in self.ort]).median * 1e3
        rows = [
            [
                "forward: the stepper, and the module's call",
                _micro(parts.caller_ms for parts in self.ort),
            ],
            [
                "forward: the look-up of the export that serves the call",
                _micro(parts.look_up_ms for parts in self.ort),
            ],
            ["of that the guard's key, called by itself after a step", _us(guard)],
            ["of that the arguments' form, called by itself after a step", _us(form)],
            [
                "of that the remainder, of the medians",
                f"{look_up - guard.median - form.median:,.0f} us",
            ],
            [
                "forward: the remainder between export and session: inputs flattened, DLPack, "
                "torch's autograd, outputs put together",
                _micro(parts.passing_ms for parts in self.ort),
            ],
            [
                "backward: the remainder around the session: torch's autograd, DLPack, gradients "
                "put into `.grad`",
                _micro(parts.around_backward_ms for parts in self.ort),
            ],
        ]
        return [
            "## Around ORT's session",
            "",
            *table(["", "ORT"], rows),
            "",
            f"For scale: {self.parameters} tensors through DLPack and back take "
            f"{_us(Spread.of(self.dlpack_us))} in torch alone, after a step. The guard's key takes "
            f"{_us(Spread.of(self.guard_again_us))} when it is called again at once: a step leaves "
            "the processor's caches with other things in them.",
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
            row("the session", session),
            row("kernels", kernels),
            row("of them copies and changes of shape", copies),
            row("between kernels, the profile's own writing too", between),
        ]
        watched, plain = (milliseconds(us / 1e3) for us in (self.watched_us, self.unwatched_us))
        return [
            "## In ORT's session",
            "",
            f"ORT's own profile of {self.profiled_steps} other steps, without their optimizer: "
            f"sums of the nodes' medians. Such a step takes {watched}, and right after that "
            f"{plain} without a profile.",
            "",
            *table(["", *self.phases, "a step", "share"], rows),
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
            rows.append([f"{count} operators more", *figures])
        heads = [
            "operator",
            "nodes",
            "a step",
            "share",
            "nodes compared",
            "ORT's",
            "torch's or ours",
        ]
        return [
            *table(heads, rows),
            "",
            "ORT's kernels beside those of torch or ortlab that compute the same: what "
            "`ortlab bench kernels` has kept, for these nodes and sizes. Where one takes the place "
            "of several nodes it stands with the first.",
            "",
        ]

    def _workers(self) -> list[str]:
        names = {True: "spin", False: "sleep"}
        rows = []
        for does, arm, note in (
            (self.spinning, self.ort, ", as set"),
            (not self.spinning, self.other, ""),
        ):
            figures: list[Callable[[StepParts], float]] = [
                lambda parts: parts.step_ms,
                lambda parts: parts.session_ms,
                lambda parts: parts.around_ms,
                lambda parts: parts.optimizer_ms,
            ]
            rows.append([f"{names[does]}{note}", *(_spread(arm, of) for of in figures)])
        cost = self.cost_of_spinning
        heads = ["ORT's idle workers", "a step", "session", "around it", "optimizer"]
        return [
            "## Threads in each other's way",
            "",
            *table(heads, rows),
            "",
            f"With spinning workers a step takes {cost.median:.2f} ({cost.low:.2f} to "
            f"{cost.high:.2f}) times as long. torch's own workers spin as OpenMP has them: with "
            "OMP_WAIT_POLICY=passive in the environment they sleep.",
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
    """How many of its nodes were measured before, and what ORT's kernels and the others took."""
    if not each.compared:
        return ["-", "-", "-"]
    return [str(each.compared), *(milliseconds(us / 1e3) for us in (each.ort_us, each.ours_us))]
