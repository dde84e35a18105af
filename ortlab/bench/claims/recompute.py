"""Claim that recomputation pays off: speed at the largest batch, and memory against time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortlab.bench.claims.batch import LargestBatches
from ortlab.bench.claims.children import Child, Request, SetUp, TrialFailed, child
from ortlab.bench.claims.search import SET_UPS, RecomputeSettings, ort_with_budget
from ortlab.bench.interleaved import WARMUP, Spread, rounds, take_turns
from ortlab.bench.result import milliseconds, table
from ortlab.engines.base import tell
from ortlab.utils.process_memory import memory

CURVE: dict[str, tuple[SetUp, ...]] = {
    "eager": SET_UPS["eager"],
    "ort": (
        SET_UPS["ort"][0],
        *map(ort_with_budget, (0.7, 0.5, 0.3, 0.1)),
        SET_UPS["ort"][1],
    ),
    "ortmodule": (
        SET_UPS["ortmodule"][0],
        *(SetUp.of("ortmodule", arena=False, memory_level=level) for level in (1, 2)),
        SET_UPS["ortmodule"][1],
    ),
}
"""Set-ups of the curve of each engine: activation budgets of ort, ORT's own subgraph plans."""
_BAR = 20
_TIMED = (
    "Steps are timed without the limit: memory that glibc returns at once, as the search needs it, "
    "has to be touched again in each step, which takes up to half of its time. What glibc, and "
    "ORT's arena where it is on, keep counts in these peaks."
)


@dataclass(frozen=True)
class Timed:
    """A set-up whose steps were timed.

    Attributes:
        model: Name of the model.
        set_up: Label of the set-up.
        rows: Samples of the batch.
        peak_bytes: Peak of the process beyond the libraries, None if it did not start.
        step_ms: Milliseconds of a step in each round.
        reason: Reason why it was not timed.
    """

    model: str
    set_up: str
    rows: int
    peak_bytes: int | None = None
    step_ms: tuple[float, ...] = ()
    reason: str = ""

    @property
    def samples_per_s(self) -> Spread | None:
        """Samples per second over the rounds, None if it was not timed."""
        return Spread.of([1e3 * self.rows / ms for ms in self.step_ms]) if self.step_ms else None

    def gain(self, other: Timed | None) -> Spread | None:
        """Return this one's samples per second over another's, compared in each round.

        Args:
            other: What it is compared with; None gives None.
        """
        pairs = list(zip(self.step_ms, other.step_ms if other else (), strict=False))
        if other is None or not pairs:
            return None
        more = self.rows / other.rows
        return Spread.of([more * theirs / ours for ours, theirs in pairs])


class Side:
    """Set-ups of one model that train side by side in processes of their own.

    Args:
        model: Name of the model.
        set_ups: Set-ups with the samples of their batches.
        settings: Settings of the claim.
    """

    def __init__(
        self, model: str, set_ups: Sequence[tuple[SetUp, int]], settings: RecomputeSettings
    ) -> None:
        self._settings = settings
        self._requests = {
            set_up.label: Request(
                model,
                set_up.engine,
                rows,
                options=set_up.options,
                checkpointing=set_up.checkpointing,
                threads=settings.threads,
                quick=settings.quick,
            )
            for set_up, rows in set_ups
        }
        self._children: dict[str, Child] = {}
        self.timed = {
            label: Timed(model, label, request.rows, reason="interrupted")
            for label, request in self._requests.items()
        }
        """Results so far, by label."""

    def run(self) -> None:
        """Start all, then let them take turns."""
        with contextlib.ExitStack() as stack:
            for label, request in self._requests.items():
                tell(f"{request.model}, {label}: batch {request.rows}")
                started = stack.enter_context(child(request))
                try:
                    answer = started.answer()
                except TrialFailed as error:
                    self._refuse(label, str(error))
                    continue
                if not answer["fits"]:
                    self._refuse(label, answer["why"])
                    continue
                self._children[label] = started
                self._note(label, peak_bytes=answer["peak_bytes"])
            orders = rounds(list(self._children), WARMUP + self._settings.rounds)
            for order in itertools.islice(orders, WARMUP):
                self._round(order)
            for number, order in enumerate(orders, start=1):
                for label, ms in self._round(order).items():
                    self._note(label, step_ms=(*self.timed[label].step_ms, ms), reason="")
                tell(f"round {number} of {self._settings.rounds}")

    def _round(self, order: Sequence[str]) -> dict[str, float]:
        running = [label for label in order if label in self._children]
        return take_turns(running, lambda label: self._children[label].turn(), self._refuse)

    def _refuse(self, label: str, reason: str) -> None:
        self._children.pop(label, None)
        self._note(label, reason=reason, step_ms=())

    def _note(self, label: str, **values: Any) -> None:
        self.timed[label] = dataclasses.replace(self.timed[label], **values)


class Recomputing:
    """Measurement of the claim.

    Args:
        settings: Settings of the claim.

    Raises:
        ValueError: As for `LargestBatches`.
    """

    def __init__(self, settings: RecomputeSettings) -> None:
        self._settings = settings
        self._largest = LargestBatches(settings)
        self._sides: list[tuple[str, Side]] = []

    def run(self) -> None:
        """See `Measurement.run`."""
        self._largest.run()
        engines = self._settings.engines.split(",")
        for model in self._settings.models.split(","):
            found = {each.set_up: each.rows for each in self._largest.found if each.model == model}
            own = [
                (_in_use(set_up), rows)
                for each in SET_UPS.values()
                for set_up in each
                if (rows := found.get(set_up.label))
            ]
            self._side(f"{model}, each with its largest batch", model, own)
            rows = found.get("eager") or max((rows for _, rows in own), default=0)
            few = 1 if self._settings.quick else None
            curve = [
                (set_up, rows)
                for engine in engines
                for set_up in CURVE.get(engine, ())[:few]
                if rows
            ]
            self._side(f"{model}, batch {rows}", model, curve)

    def _side(self, title: str, model: str, set_ups: Sequence[tuple[SetUp, int]]) -> None:
        side = Side(model, set_ups, self._settings)
        self._sides.append((title, side))
        side.run()

    def as_dict(self) -> dict[str, Any]:
        """See `Measurement.as_dict`."""
        sides = [
            {"title": title, "timed": [dataclasses.asdict(each) for each in side.timed.values()]}
            for title, side in self._sides
        ]
        return {**self._largest.as_dict(), "sides": sides}

    def tables(self) -> list[str]:
        """See `Measurement.tables`."""
        lines = self._largest.tables()
        for title, side in self._sides:
            lines += ["", f"Samples/s: {title}. Medians of the rounds, with quartiles:", ""]
            lines += shown(list(side.timed.values()))
        return [*lines, "", _TIMED]


def _in_use(set_up: SetUp) -> SetUp:
    """Return a set-up as users have it, with the arena that the search leaves out."""
    options = {name: value for name, value in set_up.options.items() if name != "arena"}
    return SetUp.of(set_up.engine, **options) if set_up.options else set_up


def shown(found: Sequence[Timed]) -> list[str]:
    """Return a table of set-ups with bars of their memory and time, as lines of Markdown.

    Args:
        found: Set-ups; the one labeled "eager" is what the others are compared with.
    """
    eager = next((each for each in found if each.set_up == "eager"), None)
    most_bytes = max((each.peak_bytes or 0 for each in found), default=0)
    each_ms = {each.set_up: Spread.of(each.step_ms).median for each in found if each.step_ms}
    most_ms = max((ms / each.rows for each in found if (ms := each_ms.get(each.set_up))), default=0)
    rows = []
    for each in found:
        names = [each.set_up, str(each.rows)]
        speed, gain = each.samples_per_s, each.gain(eager)
        if each.reason or speed is None or each.peak_bytes is None:
            rows.append([*names, f"not timed: {each.reason}", *[""] * 5])
            continue
        ms = each_ms[each.set_up]
        rows.append(
            [
                *names,
                f"{speed.median:.3g} ({speed.low:.3g} to {speed.high:.3g})",
                "" if gain is None else str(gain),
                milliseconds(ms),
                bar(ms / each.rows, most_ms),
                memory(each.peak_bytes),
                bar(each.peak_bytes, most_bytes),
            ]
        )
    heads = ["set-up", "batch", "samples/s", "of eager's", "step", "time per sample", "peak", ""]
    return table(heads, rows)


def bar(value: float, most: float) -> str:
    """Return a bar of letters, as a chart that every page shows.

    Args:
        value: Its length.
        most: Length of the longest bar.
    """
    return "█" * max(1, round(_BAR * value / most)) if most else ""
