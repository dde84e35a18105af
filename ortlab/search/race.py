"""Race: set-ups of one model train copies of it side by side, on the same batches.

Every set-up makes its first step from the same weights. Then all take turns, in an order that is
shuffled in each round, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ortlab.bench import interleaved
from ortlab.engines.base import LossFunction, Stepper
from ortlab.engines.batch import forward, to_device
from ortlab.search import memory as footprint
from ortlab.search.candidate import PLAIN, Candidate
from ortlab.search.comparison import ALONE, Comparison, Surroundings
from ortlab.search.feed import Feed
from ortlab.search.memory import Line
from ortlab.search.prune import among
from ortlab.search.result import DONE, Cell, RaceResult
from ortlab.settings import REFERENCE, FinetuneSettings, RaceSettings
from ortlab.utils.process_memory import memory

PRESETS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    # The columns of ORT's training examples: onnxruntime-training-examples, README.md. All were
    # measured on the same GPUs, so all have the same number of workers here.
    "examples": {
        "torch": PLAIN,
        "ORT": {**PLAIN, "engine": "ortmodule"},
        "DeepSpeed": {**PLAIN, "zero_stage": 1},
        "DeepSpeed with ORT": {**PLAIN, "engine": "ortmodule", "zero_stage": 1},
    }
}
"""Named fields of set-ups: the settings of each set-up, keyed by its label."""
_EXAMPLES_WORKERS: Final = 2


def field_of(settings: RaceSettings) -> dict[str, Mapping[str, Any]]:
    """Return the set-ups of a race: what each one changes in the settings, keyed by its label.

    Args:
        settings: Settings of the race.

    Returns:
        Changes by label. The first set-up is the reference of all comparisons.
    """
    if settings.preset is not None:
        number = max(each["workers"] for each in settings.parallel)
        together = {"workers": number if number > 1 else _EXAMPLES_WORKERS}
        return {name: {**made, **together} for name, made in PRESETS[settings.preset].items()}
    chosen = [
        (engine, precision, each["workers"], each["zero_stage"])
        for each in settings.parallel
        for precision in settings.precisions.split(",")
        for engine in settings.engines.split(",")
    ]
    plain = (*REFERENCE, chosen[0][2], 0)
    return {
        f"{engine} {precision}{among(workers, stage)}": {
            "engine": engine,
            "precision": precision,
            **({"workers": workers, "zero_stage": stage} if workers > 1 else {}),
        }
        for engine, precision, workers, stage in dict.fromkeys([plain, *chosen])
    }


class Judge:
    """Evaluation of a set-up's weights: their loss in eager torch, without dropout.

    Args:
        model: Model to copy.
        loss: Loss function, or None if the model returns a loss.
        feed: Data to evaluate on.
        device: Device to evaluate on.
    """

    def __init__(
        self, model: nn.Module, loss: LossFunction | None, feed: Feed, device: torch.device
    ) -> None:
        self._model = copy.deepcopy(model).to(device).eval()
        self._loss = loss
        self._batches = [to_device(batch, device) for batch in feed.all()]

    def loss_of(self, stepper: Stepper) -> float:
        """Return the mean loss over the feed's micro-batches.

        Args:
            stepper: Stepper whose weights are evaluated.
        """
        self._model.load_state_dict(stepper.state_dict()["model"])
        with torch.no_grad():
            losses = [forward(self._model, batch, self._loss).loss for batch in self._batches]
        return statistics.fmean(float(loss) for loss in losses)


class Race(Comparison[RaceResult, Cell]):
    """Race in the background: ``await race`` or ``race.result()`` waits for its result.

    If a single set-up is not supported, its cell has the reason.

    Args:
        model: Model to train copies of.
        data: Dataset, DataLoader or list of batches.
        settings: Settings of the race.
        shared: Settings that all set-ups have and that the user chose.
        loss: Loss function, or None if the model returns a loss.
        field: Changes of each set-up, keyed by label. By default those of the settings.
        around: Access to the session.

    Raises:
        ValueError: If data or settings are not valid, before anything starts.
    """

    kind = "race"
    _entrants: dict[str, Candidate]

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: RaceSettings,
        *,
        shared: Mapping[str, Any],
        loss: LossFunction | None = None,
        field: Mapping[str, Mapping[str, Any]] | None = None,
        around: Surroundings = ALONE,
    ) -> None:
        base = FinetuneSettings.of({**PLAIN, **shared})
        feed = Feed(data, base, settings.batches)
        super().__init__(
            model,
            feed,
            base,
            settings,
            shared=shared,
            loss=loss,
            around=around,
        )
        self._settings = settings
        made = field_of(settings) if field is None else field
        self._cells = {label: Cell(label, dict(changes)) for label, changes in made.items()}
        self._result = RaceResult(
            **self._about(),
            cells=tuple(self._cells.values()),
            micro=feed.micro,
            turn_steps=settings.steps or 1,
            rounds=settings.rounds,
            dropout=any(_drops_out(module) for module in model.modules()),
        )

    def _found(self) -> dict[str, Any]:
        return {"cells": tuple(self._cells.values())}

    # ---- the work --------------------------------------------------------------------------------

    def _compare(self) -> None:
        for label in self._cells:
            self._go_on()
            self._begin(label)
        self._race()
        self._judge()
        self._fit()

    def _begin(self, label: str) -> None:
        """Make a set-up's first step with cold caches, and measure the memory of a second one."""
        self._now(label, f"{label}: first step", "first step")
        with interleaved.reasons(functools.partial(self._refuse, label)):
            changes, micro = self._cells[label].settings, self._micro(label)
            entrant = self._enter(label, changes, micro=micro)
            self._change(label, first_step_s=entrant.lane.first_step_s, doing="second step")
            peak, known_from = entrant.peak_bytes(lambda: self._turn(label, 1))
            report = entrant.lane.stepper.report()
            fallback = report.fallback_reason
            remarks = (f"fell back to {report.engine_used}: {fallback}",) if fallback else ()
            self._change(
                label,
                peak_bytes=peak,
                peak_from=known_from,
                remarks=(*report.remarks, *remarks),
                doing="ready",
            )

    def _micro(self, label: str) -> int:
        """Return the samples in a micro-batch: the set-up's own setting or the feed's."""
        micro: int = self._cells[label].settings.get("batch_size", self._feed.micro)
        return micro

    def _race(self) -> None:
        """Run the warm-up rounds and the measured rounds."""
        number = interleaved.WARMUP + self._settings.rounds
        began = time.perf_counter()
        for place, order in enumerate(interleaved.rounds(list(self._entrants), number)):
            self._go_on()
            warming = place < interleaved.WARMUP
            counted = place - interleaved.WARMUP + 1
            if counted == 1:
                began = time.perf_counter()
            left_s = (time.perf_counter() - began) / max(counted - 1, 1) * (number - place)
            left = f", about {_time(left_s)} left" if counted > 1 else ""
            of = "warming up" if warming else f"round {counted} of {self._settings.rounds}{left}"
            self._tell(of)
            took = self._round(order)
            if warming:
                self._settle_turn(took)
                continue
            for label, ms in took.items():
                timed = (*self._cells[label].step_ms, ms)
                self._change(label, step_ms=timed, doing=f"round {counted}")

    def _settle_turn(self, took: Mapping[str, float]) -> None:
        """Set the number of steps in a turn, the same for all, so that a turn is long enough."""
        reference_ms = took.get(next(iter(self._cells)))
        if self._settings.steps is None and reference_ms is not None:
            most = max(self._result.turn_steps, interleaved.enough(reference_ms))
            self._result = dataclasses.replace(self._result, turn_steps=most)

    def _round(self, order: Sequence[str]) -> dict[str, float]:
        going = [label for label in order if label in self._entrants]
        number = self._result.turn_steps
        return self._take_turns(going, lambda label: self._turn(label, number), self._refuse)

    def _turn(self, label: str, number: int) -> float:
        """Run a turn of a set-up, unless a stop was requested."""
        self._go_on()
        entrant = self._entrants[label]
        ms = entrant.turn(number, micro=self._micro(label))
        self._change(label, steps=entrant.steps)
        return ms

    def _judge(self) -> None:
        """Evaluate the trained weights of each set-up."""
        self._tell("comparing the trained weights")
        judge = Judge(self._model, self._loss, self._feed, self._device)
        for label, entrant in list(self._entrants.items()):
            self._go_on()
            finite = entrant.lane.stepper.finite()
            with interleaved.reasons(functools.partial(self._remark, label)):
                loss = judge.loss_of(entrant.lane.stepper)
                self._change(label, loss=loss if finite else math.nan, finite=finite)

    def _fit(self) -> None:
        """Find each set-up's largest batch, from its graph or from a line through two peaks."""
        within = memory(self._budget)
        for label, entrant in list(self._entrants.items()):
            self._go_on()
            self._now(label, f"{label}: largest batch within {within}", "largest batch")
            with interleaved.reasons(functools.partial(self._remark, label)):
                if entrant.plan is not None:
                    most = entrant.max_batch(self._budget)
                else:
                    most = self._line(label, entrant).max_batch(self._budget)
                self._change(label, max_batch=most)
            self._change(label, doing=DONE)

    def _line(self, label: str, entrant: Candidate) -> Line:
        """Return the line through the measured peak and a peak at half of the batch.

        For a set-up whose first step is slow, the second point is a batch of 0 samples with the
        memory that stays allocated between steps.
        """
        micro, stepper = self._micro(label), entrant.lane.stepper
        half, measured = micro // 2, (micro, self._cells[label].peak_bytes)
        if half == 0 or entrant.slow_to_begin:
            return Line(measured, (0, footprint.state_bytes(stepper, entrant.model)))
        entrant.turn(1, micro=half)  # one-time work for this size does not count
        step = functools.partial(entrant.turn, 1, micro=half)
        return Line(measured, (half, footprint.peak_bytes(stepper, entrant.model, step)))

    # ---- what is known ---------------------------------------------------------------------------

    def _now(self, label: str, line: str, doing: str) -> None:
        self._change(label, doing=doing)
        self._tell(line)

    def _change(self, label: str, **figures: Any) -> None:
        self._cells[label] = dataclasses.replace(self._cells[label], **figures)
        self.version += 1

    def _remark(self, label: str, remark: str) -> None:
        self._change(label, remarks=(*self._cells[label].remarks, remark))

    def _refuse(self, label: str, reason: str) -> None:
        """Drop a set-up from the race."""
        cell = self._cells[label]
        self._cells[label] = Cell(label, cell.settings, doing="", reason=reason)
        self.version += 1
        self._leave(label)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _drops_out(module: nn.Module) -> bool:
    """Return True if the module's attributes show that it applies dropout."""
    chances = (getattr(module, name, 0.0) for name in ("p", "dropout", "dropout_p"))
    return any(isinstance(chance, float) and chance > 0 for chance in chances)
