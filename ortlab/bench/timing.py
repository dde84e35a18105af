"""Timing of engines: every cell of a model trains its own copy, and all cells take turns.

Other load on the machine therefore affects all of them, and speeds are compared within a round.
Weights do not change: the learning rate is 0, which does not change the time of an optimizer step.
The losses of all steps therefore have the same expected value and differ only by dropout masks, so
an engine that is fast because it computes something else is noticed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ortlab.bench import models, profiled
from ortlab.bench.interleaved import (
    SHORTEST_MS,
    WARMUP,
    TimedTrial,
    enough,
    reasons,
    rounds,
    take_turns,
)
from ortlab.bench.machine import machine
from ortlab.bench.result import Cell, EngineBench, Floor, StepProfile
from ortlab.bench.roofline import Roofline
from ortlab.bench.settings import BenchSettings
from ortlab.bench.settings import Cell as Key
from ortlab.engines import caches
from ortlab.engines.base import tell
from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import training_device
from ortlab.engines.torch.thread_count import threads
from ortlab.settings import IN_ORT, REFERENCE, FinetuneSettings
from ortlab.utils import environment
from ortlab.utils.rng import undisturbed_random

_INTERRUPTED = "interrupted before it was timed"


def engines(
    settings: BenchSettings, known: Mapping[str, models.Model] = models.MODELS
) -> EngineBench:
    """Measure engines. See `ortlab.bench.engines`.

    Args:
        settings: Settings of the benchmark.
        known: Models to choose from, keyed by name.
    """
    cells: list[Cell] = []
    floors: list[Floor] = []
    profiles: list[StepProfile] = []
    interrupted = False
    device = training_device(settings.device).type
    chosen = settings.models.split(",")
    with threads(settings.threads), undisturbed_random():
        result = EngineBench(
            settings=settings,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            environment=environment.environment(),
            machine=machine(device),
            models={name: known[name].about for name in chosen},
            cells=(),
        )
        try:
            if not settings.quick:
                with _nothing_compiled(settings):
                    _load(settings, device)
            began = time.perf_counter()
            for done, name in enumerate(chosen):
                left = _left(done, len(chosen), time.perf_counter() - began)
                tell(f"{name}, model {done + 1} of {len(chosen)}{left}")
                race = Race(name, settings, device, known)
                try:
                    with _nothing_compiled(settings):
                        race.run()
                finally:
                    cells += race.cells()
                    floors += race.floors()
                    profiles += race.profiles
                    race.close()
        except KeyboardInterrupt:
            interrupted = True
    return dataclasses.replace(
        result,
        cells=tuple(cells),
        floors=tuple(floors),
        profiles=tuple(profiles),
        interrupted=interrupted,
    )


def _left(done: int, number: int, took_s: float) -> str:
    """Return text with the estimated time left, empty for the first model."""
    if not done:
        return ""
    left_min = took_s / done * (number - done) / 60
    return f"; about {max(left_min, 1):.0f} min left, estimated from the models so far"


class Race:
    """Cells of one model that train side by side.

    Args:
        name: Name of the model.
        settings: Settings of the benchmark.
        device: "cpu" or "cuda".
        known: Models to choose from, keyed by name.
    """

    def __init__(
        self,
        name: str,
        settings: BenchSettings,
        device: str,
        known: Mapping[str, models.Model] = models.MODELS,
    ) -> None:
        self.name = name
        self.rounds: list[dict[Key, float]] = []
        """Milliseconds of a step in each measured round, keyed by cell."""
        self._settings = settings
        self._device = device
        self._model, self._batch = models.build(name, quick=settings.quick, known=known)
        self._roofline: Roofline | None = None
        self._cells = {key: Cell(name, *key, reason=_INTERRUPTED) for key in settings.cells}
        self.lanes: dict[Key, TimedTrial] = {}
        """Active set-ups, keyed by cell."""
        self.profiles: list[StepProfile] = []
        """Profiles of a step in each cell, with ``profile``."""
        self._turns = 0
        self.steps = 1
        """Number of steps in a turn, the same for all cells."""

    def run(self) -> None:
        """Run the first step of each cell, the warm-up rounds and the measured rounds."""
        for key in self._settings.cells:
            self._begin(key)
        orders = rounds(list(self.lanes), WARMUP + self._settings.rounds, seed=models.SEED)
        tell(f"{self.name}: {WARMUP} warm-up rounds")
        for order in itertools.islice(orders, WARMUP):
            self.steps = max(self.steps, self._enough(self._round(order)))
        if self._settings.roofline:
            tell(f"{self.name}: the machine's rates")
            self._roofline = Roofline(
                self.name,
                self._model.to(self._device),
                self._batch,
                self._settings.precisions.split(","),
                quick=self._settings.quick,
            )
        began = time.perf_counter()
        for number, order in enumerate(orders, start=1):
            if self._roofline is not None:
                self._roofline.turn()
            self.rounds.append(self._round(order))
            left_s = (time.perf_counter() - began) / number * (self._settings.rounds - number)
            left = f"about {left_s:.0f} s left for this model"
            tell(f"{self.name}: round {number} of {self._settings.rounds}, {left}")
        if self._settings.profile:
            for key in list(self.lanes):
                self._profile(key)

    def cells(self) -> tuple[Cell, ...]:
        """Return the results so far. A cell that cannot run or was not timed has a reason."""
        return tuple(self._cell(key) for key in self._cells)

    def floors(self) -> list[Floor]:
        """Return the least times of a step, by precision; empty without ``roofline``."""
        return [] if self._roofline is None else self._roofline.floors()

    def _profile(self, key: Key) -> None:
        """Profile further steps of a cell; a cell that cannot be profiled has a remark."""
        tell(f"{self.name}: profile of {key[0]} in {key[1]}")

        def remark(reason: str) -> None:
            cell = self._cells[key]
            remarks = (*cell.remarks, f"no profile: {reason}")
            self._cells[key] = dataclasses.replace(cell, remarks=remarks)

        settings = _finetune(key, self._device, self._settings)
        with reasons(remark):
            self.profiles.append(
                profiled.profile(
                    self.name,
                    self.lanes[key].stepper,
                    self._model,
                    self._batch,
                    settings,
                    torch.device(self._device),
                )
            )

    def close(self) -> None:
        """Release the engines' memory."""
        self._roofline = None
        while self.lanes:
            self.lanes.popitem()[1].stepper.close()
        self._model = nn.Module()
        gc.collect()

    def _begin(self, key: Key) -> None:
        """Make a cell's first step from the plain module on, with cold caches."""
        name, precision = key
        tell(f"{self.name}: first step of {name} in {precision}")
        settings = _finetune(key, self._device, self._settings)
        nothing_known = (
            contextlib.nullcontext() if self._settings.quick else caches.without_timings()
        )
        with reasons(lambda reason: self.refuse(key, reason)), nothing_known:
            # An engine that cannot run raises before the model is copied.
            chosen = engine(name)
            model = copy.deepcopy(self._model)
            lane = TimedTrial(
                lambda: chosen.prepare(model, None, settings),
                [self._batch],
                lr=0.0,
                seed=self._turns,
            )
            self.lanes[key] = lane
            report = lane.stepper.report()
            self._cells[key] = dataclasses.replace(
                self._cells[key],
                first_step_s=lane.first_step_s,
                export_s=report.export_s,
                check_s=report.check_s,
                remarks=report.remarks,
            )

    def _round(self, order: Sequence[Key]) -> dict[Key, float]:
        """Run one turn of each cell and return its milliseconds per step."""
        self._turns += 1
        going = [key for key in order if key in self.lanes]
        return take_turns(going, self._turn, self.refuse)

    def _turn(self, key: Key) -> float:
        return self.lanes[key].turn([[self._batch]] * self.steps, seed=self._turns)

    def _enough(self, took: dict[Key, float]) -> int:
        """Return the number of steps that makes a turn of eager torch long enough to time."""
        step_ms = took.get(REFERENCE, SHORTEST_MS)
        return enough(step_ms, quick=self._settings.quick)

    def refuse(self, key: Key, reason: str) -> None:
        """Drop a cell from the race.

        Args:
            key: Engine and precision.
            reason: Reason why it cannot run.
        """
        tell(f"{self.name}: {key[0]} in {key[1]} does not run: {reason}")
        self._cells[key] = Cell(self.name, *key, reason=reason)
        if (lane := self.lanes.pop(key, None)) is not None:
            lane.stepper.close()

    def _cell(self, key: Key) -> Cell:
        cell = self._cells[key]
        step_ms = tuple(took[key] for took in self.rounds if key in took)
        if key not in self.lanes or not step_ms:
            return cell
        return dataclasses.replace(
            cell,
            reason=None,
            steps_per_turn=self.steps,
            step_ms=step_ms,
            losses=tuple(self.lanes[key].losses),
            grad_norms=tuple(self.lanes[key].grad_norms),
        )


def _finetune(key: Key, device: str, settings: BenchSettings) -> FinetuneSettings:
    options = settings.in_ort() if key[0] in IN_ORT else {}
    # Without the cache of exports, which would make the first step faster.
    of_all = {"engine": key[0], "precision": key[1], "cache": False, "device": device}
    return FinetuneSettings.of(options | of_all)


def _load(settings: BenchSettings, device: str) -> None:
    """Load each engine's libraries, so that no model's first step includes that time."""
    for name in dict.fromkeys(name for name, _ in settings.cells):
        tell(f"loading what {name} needs")
        # Errors of an engine are reported in its cells.
        with contextlib.suppress(Exception):
            model = nn.Linear(2, 2)
            stepper = engine(name).prepare(
                model, nn.functional.mse_loss, _finetune((name, "fp32"), device, settings)
            )
            stepper.step([(torch.ones(2, 2), torch.ones(2, 2))], lr=0.0)
            stepper.close()


@contextlib.contextmanager
def _nothing_compiled(settings: BenchSettings) -> Iterator[None]:
    """Start torch.compile with nothing in memory and, unless quick, nothing on disk.

    Otherwise it would compile code that it has seen with another model for dynamic shapes, which is
    slower.
    """
    torch.compiler.reset()
    with contextlib.nullcontext() if settings.quick else _empty_cache():
        try:
            yield
        finally:
            torch.compiler.reset()


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory(prefix="ortlab-bench-", ignore_cleanup_errors=True) as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before
