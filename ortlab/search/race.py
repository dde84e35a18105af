"""The race: set-ups of one model in training side by side, on copies, on the same batches.

Every set-up makes its first step, from the same weights. Then all take turns, in an order that is
shuffled in each round, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ortlab import history, turns
from ortlab.bench.machine import machine
from ortlab.engines.base import LossFunction, Stepper, engine_for
from ortlab.engines.batch import forward, to_device
from ortlab.engines.torch_native import training_device
from ortlab.graph.memory import MemoryPlan, memory, parse_bytes
from ortlab.memory import free_bytes
from ortlab.search import footprint
from ortlab.search.background import Background
from ortlab.search.feed import Feed
from ortlab.search.footprint import Line
from ortlab.search.result import DONE, Cell, RaceResult
from ortlab.settings import REFERENCE, FinetuneSettings, RaceSettings

if TYPE_CHECKING:
    from ortlab.runs import Run

PLAIN: Final = dict(zip(("engine", "precision"), REFERENCE, strict=True))
"""The settings of the set-up that others are compared with."""
LONG_S = 5.0
"""A first step that takes longer is not made for another batch without need."""
PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    # The columns of ORT's training examples: onnxruntime-training-examples, README.md.
    "examples": {
        "torch": PLAIN,
        "ORT": {**PLAIN, "engine": "ort"},
        "DeepSpeed": {**PLAIN, "zero_stage": 1},
        "DeepSpeed with ORT": {**PLAIN, "engine": "ort", "zero_stage": 1},
    }
}
"""Other fields than engines times precisions: the settings of each set-up by its name."""


def field_of(settings: RaceSettings) -> dict[str, Mapping[str, Any]]:
    """Who races: what makes each set-up, by its name. The first is the one to compare with."""
    if settings.preset is not None:
        return dict(PRESETS[settings.preset])
    chosen = [(e, p) for p in settings.precisions.split(",") for e in settings.engines.split(",")]
    return {
        f"{name} {precision}": {"engine": name, "precision": precision}
        for name, precision in dict.fromkeys([REFERENCE, *chosen])
    }


class Entrant:
    """One set-up with the copy of the model that it trains. `begin` gives it its `lane`."""

    def __init__(self, settings: FinetuneSettings) -> None:
        self.settings = settings
        self.lane: turns.Lane | None = None
        self.plan: MemoryPlan | None = None
        """What its graph says of its memory, where it has one."""
        self.model = nn.Module()
        self._wrapped = self.model

    def begin(
        self, model: nn.Module, loss: LossFunction | None, feed: Feed, *, micro: int | None = None
    ) -> turns.Lane:
        """Its first step, on a copy of `model`. Raises what the engine raises.

        ValueError or EngineUnavailable, before anything is copied, where the engine cannot run.
        """
        chosen = engine_for(self.settings)
        self.model = copy.deepcopy(model)

        def prepare() -> Stepper:
            # Which precision is not for wrapping to choose.
            plain = self.settings.replace(precision=PLAIN["precision"])
            self._wrapped = chosen.wrap(self.model, plain)
            return chosen.prepare(self._wrapped, loss, self.settings)

        (batches,) = feed.steps(0, 1, micro=micro)
        lr, seed = self.settings.lr, self.settings.seed
        self.lane = turns.Lane(prepare, batches, lr=lr, seed=seed)
        return self.lane

    def peak_bytes(self, step: Callable[[], object]) -> tuple[float, str]:
        """What `step`, one optimizer step, takes of memory, and where that is known from."""
        assert self.lane is not None
        measured = footprint.peak_bytes(self.lane.stepper, self.model, step)
        self.plan = footprint.graph_plan(self._wrapped, optimizer=self.settings.optimizer)
        if self.plan is None:
            return measured, "measured"
        return self.plan.peak_bytes() + self._added_up(), "graph"

    def max_batch(self, budget: int) -> int | None:
        """The largest micro-batch that fits by its graph; None where that does not tell."""
        assert self.plan is not None
        return footprint.planned_batch(self.plan, budget - self._added_up())

    def _added_up(self) -> int:
        """A graph gives gradients of its own to those of the micro-batches before."""
        return footprint.gradient_bytes(self.model) if self.settings.accumulation > 1 else 0

    def close(self) -> None:
        """Gives back what the engine holds, and the copy."""
        if self.lane is not None:
            self.lane.stepper.close()
        self.lane = self.plan = None
        self.model = self._wrapped = nn.Module()


class Judge:
    """Says what the weights of a set-up are worth: their loss in eager torch, without dropout."""

    def __init__(
        self, model: nn.Module, loss: LossFunction | None, feed: Feed, device: torch.device
    ) -> None:
        self._model = copy.deepcopy(model).to(device).eval()
        self._loss = loss
        self._batches = [to_device(batch, device) for batch in feed.all()]

    def loss_of(self, stepper: Stepper) -> float:
        """The mean over the feed's micro-batches."""
        self._model.load_state_dict(stepper.state_dict()["model"])
        with torch.no_grad():
            losses = [forward(self._model, batch, self._loss).loss for batch in self._batches]
        return statistics.fmean(float(loss) for loss in losses)


class Race(Background[RaceResult]):
    """A race in the background: ``await race`` or ``race.result()`` waits for its result.

    `standing` is what there is so far, which every view shows. It trains copies; the model that is
    raced stays as it is. `beside` names what else trains in this process, and `prefer`
    has settings hold for the model: those of the best set-up, and all of its run.

    ValueError, before anything starts, for data that cannot be raced on and settings that are
    wrong. What a single set-up cannot do is a reason in its cell.
    """

    kind = "race"

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: RaceSettings,
        *,
        shared: Mapping[str, Any],
        loss: LossFunction | None = None,
        field: Mapping[str, Mapping[str, Any]] | None = None,
        beside: Callable[[], Sequence[str]] = tuple,
        prefer: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None,
    ) -> None:
        base = FinetuneSettings.of({**PLAIN, **shared})
        device = training_device(base.device)
        budget = settings.memory
        budget_bytes = free_bytes(device.type) if budget is None else parse_bytes(budget)
        self._feed = Feed(data, base, settings.batches)
        super().__init__()
        self._model = copy.deepcopy(model)
        self._loss = loss
        self._device = device
        self._settings = settings
        self._shared = dict(shared)
        self._beside = beside
        self._prefer = prefer
        self._disturbed: dict[str, None] = {}
        self._turns = 0
        self._entrants: dict[str, Entrant] = {}
        made = field_of(settings) if field is None else field
        self._cells = {label: Cell(label, dict(changes)) for label, changes in made.items()}
        self._result = RaceResult(
            model=type(model).__name__,
            cells=tuple(self._cells.values()),
            samples=self._feed.samples,
            micro=self._feed.micro,
            budget_bytes=budget_bytes,
            turn_steps=1 if settings.steps is None else settings.steps,
            rounds=settings.rounds,
            shared=self._shared,
            environment=history.environment(),
            machine=machine(device.type),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            dropout=any(_drops_out(module) for module in model.modules()),
        )

    @property
    def standing(self) -> RaceResult:
        """What was measured so far."""
        over = self.over()
        return dataclasses.replace(
            self._result,
            cells=tuple(self._cells.values()),
            interrupted=over and self._cut_short,
            notes=tuple(f"{name} trained beside it" for name in self._disturbed),
            doing="" if over else self.doing,
        )

    def table(self) -> Any:
        """The table of what was measured so far; see `RaceResult.table`."""
        return self.standing.table()

    def best(self) -> Cell | None:
        """See `RaceResult.best`."""
        return self.standing.best()

    @property
    def settings(self) -> dict[str, Any]:
        """See `RaceResult.settings`; a loss function of the user's own is among them."""
        found = self.standing.settings
        own = self._loss is not None and "loss" not in self._shared
        return found | {"loss": self._loss} if own else found

    def apply(self, run: Run | None = None) -> str:
        """Has the best settings hold in `run`; says in words what it did.

        Without one in the run that trains the model, or else in the model's next runs. ValueError
        where there is no best yet, or the run cannot take them (see `Run.apply`).
        """
        settings, best = self.standing.settings, self.best()
        assert best is not None
        if run is not None:
            run.apply(**best.settings)
            return f"{run.name} goes on with {best.label}"
        if self._prefer is None:
            raise ValueError(f"{self.name} knows of no run: give one, {self.kind}.apply(run)")
        return self._prefer(best.settings, settings)

    def to_dict(self) -> dict[str, Any]:
        """See `RaceResult.to_dict`."""
        return self.standing.to_dict()

    def __repr__(self) -> str:
        return repr(self.standing) if self.over() else f"<Race {self.name}: {self.doing}>"

    def _repr_html_(self) -> str:
        return self.standing._repr_html_()

    # ---- the work --------------------------------------------------------------------------------

    _cut_short = True

    def _work(self) -> None:
        if "torch._dynamo" in sys.modules and not self._beside():
            # Code that torch.compile has met with other sizes it would compile for any, and slower.
            torch.compiler.reset()
        try:
            for label in self._cells:
                self._go_on()
                self._begin(label)
            self._race()
            self._judge()
            self._fit()
            self._cut_short = False
        finally:
            self._close()

    def _begin(self, label: str) -> None:
        """The first step of a set-up, everything cold, and a second one that is measured."""
        self._now(label, f"{label}: first step", "first step")
        with turns.reasons(functools.partial(self._refuse, label)):
            self._entrants[label] = entrant = Entrant(self._chosen(label))
            lane = entrant.begin(self._model, self._loss, self._feed, micro=self._micro(label))
            self._change(label, first_step_s=lane.first_step_s, doing="second step")
            peak, known_from = entrant.peak_bytes(lambda: self._turn(label, number=1, begin=1))
            report = lane.stepper.report()
            fallback = report.fallback_reason
            remarks = (f"fell back to {report.engine_used}: {fallback}",) if fallback else ()
            self._change(
                label,
                peak_bytes=peak,
                peak_from=known_from,
                remarks=(*report.remarks, *remarks),
                doing="ready",
            )

    def _chosen(self, label: str) -> FinetuneSettings:
        """The settings of a set-up."""
        return FinetuneSettings.of({**PLAIN, **self._shared, **self._cells[label].settings})

    def _micro(self, label: str) -> int:
        """Samples in a micro-batch: the feed's, or those that make this set-up."""
        micro: int = self._cells[label].settings.get("batch_size", self._feed.micro)
        return micro

    def _race(self) -> None:
        """Rounds to warm up, and those that count."""
        done = 2  # of every set-up
        number = turns.WARMUP + self._settings.rounds
        began = time.perf_counter()
        for place, order in enumerate(turns.rounds(list(self._entrants), number)):
            self._go_on()
            warming = place < turns.WARMUP
            counted = place - turns.WARMUP + 1
            if counted == 1:
                began = time.perf_counter()
            left_s = (time.perf_counter() - began) / max(counted - 1, 1) * (number - place)
            left = f", about {_time(left_s)} left" if counted > 1 else ""
            of = "warming up" if warming else f"round {counted} of {self._settings.rounds}{left}"
            self._tell(of)
            took = self._round(order, done)
            done += self._result.turn_steps
            if warming:
                self._settle_turn(took)
                continue
            for label, ms in took.items():
                timed = (*self._cells[label].step_ms, ms)
                self._change(label, step_ms=timed, doing=f"round {counted}")

    def _settle_turn(self, took: Mapping[str, float]) -> None:
        """Makes a turn long enough to time, as long for all."""
        reference_ms = took.get(next(iter(self._cells)))
        if self._settings.steps is None and reference_ms is not None:
            most = max(self._result.turn_steps, turns.enough(reference_ms))
            self._result = dataclasses.replace(self._result, turn_steps=most)

    def _round(self, order: Sequence[str], done: int) -> dict[str, float]:
        going = [label for label in order if label in self._entrants]
        self._disturbed |= dict.fromkeys(self._beside())
        return turns.take_turns(going, lambda label: self._turn(label, begin=done), self._refuse)

    def _turn(self, label: str, *, begin: int, number: int | None = None) -> float:
        """A turn of a set-up from its step `begin` on, unless a stop was asked for."""
        self._go_on()
        lane = self._entrants[label].lane
        assert lane is not None
        micro = self._micro(label)
        steps = self._feed.steps(begin, number or self._result.turn_steps, micro=micro)
        # The same masks for all who draw them as eager torch does.
        ms = lane.turn(steps, seed=self._entrants[label].settings.seed + begin)
        self._change(label, steps=begin + len(steps))
        return ms

    def _judge(self) -> None:
        """What each made of the weights."""
        self._tell("comparing the weights that came of it")
        judge = Judge(self._model, self._loss, self._feed, self._device)
        for label, entrant in list(self._entrants.items()):
            self._go_on()
            assert entrant.lane is not None
            finite = entrant.lane.stepper.finite()
            with turns.reasons(functools.partial(self._remark, label)):
                loss = judge.loss_of(entrant.lane.stepper)
                self._change(label, loss=loss if finite else math.nan, finite=finite)

    def _fit(self) -> None:
        """The largest batch of each: by its graph, or by a line through two peaks."""
        budget = self._result.budget_bytes
        for label, entrant in list(self._entrants.items()):
            self._go_on()
            self._now(label, f"{label}: the largest batch in {memory(budget)}", "largest batch")
            with turns.reasons(functools.partial(self._remark, label)):
                if entrant.plan is not None:
                    most = entrant.max_batch(budget)
                else:
                    most = self._line(label, entrant).max_batch(budget)
                self._change(label, max_batch=most)
            self._change(label, doing=DONE)

    def _line(self, label: str, entrant: Entrant) -> Line:
        """Through what was measured and a peak at half of the batch.

        A set-up that takes long to begin with another batch has in its place what stays between
        steps, which a batch of nothing would take.
        """
        lane, cell, micro = entrant.lane, self._cells[label], self._micro(label)
        assert lane is not None
        half, measured = micro // 2, (micro, cell.peak_bytes)
        if half == 0 or lane.first_step_s > LONG_S:
            return Line(measured, (0, footprint.state_bytes(lane.stepper, entrant.model)))
        steps = self._feed.steps(cell.steps, 1, micro=half)
        lane.turn(steps, seed=0)  # what it makes for this size is not the step's
        peak = footprint.peak_bytes(lane.stepper, entrant.model, lambda: lane.turn(steps, seed=0))
        return Line(measured, (half, peak))

    def _close(self) -> None:
        while self._entrants:
            self._entrants.popitem()[1].close()
        self._model = nn.Module()
        self._feed.close()
        gc.collect()

    # ---- what is known ---------------------------------------------------------------------------

    def _now(self, label: str, line: str, doing: str) -> None:
        self._cells[label] = dataclasses.replace(self._cells[label], doing=doing)
        self._tell(line)

    def _change(self, label: str, **figures: Any) -> None:
        self._cells[label] = dataclasses.replace(self._cells[label], **figures)
        self.version += 1

    def _remark(self, label: str, remark: str) -> None:
        self._change(label, remarks=(*self._cells[label].remarks, remark))

    def _refuse(self, label: str, reason: str) -> None:
        """Leaves a set-up out from now on."""
        cell = self._cells[label]
        self._cells[label] = Cell(label, cell.settings, doing="", reason=reason)
        self.version += 1
        if (entrant := self._entrants.pop(label, None)) is not None:
            entrant.close()


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _drops_out(module: nn.Module) -> bool:
    """Whether it draws masks, as far as its own attributes tell."""
    chances = (getattr(module, name, 0.0) for name in ("p", "dropout", "dropout_p"))
    return any(isinstance(chance, float) and chance > 0 for chance in chances)
