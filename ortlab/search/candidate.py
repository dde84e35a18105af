"""A set-up in training on a copy of the model that is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torch import nn

from ortlab.bench import interleaved
from ortlab.engines.base import LossFunction, Stepper
from ortlab.engines.registry import engine_for
from ortlab.graph.memory import MemoryPlan
from ortlab.search import memory
from ortlab.search.feed import Feed
from ortlab.settings import REFERENCE, FinetuneSettings

if TYPE_CHECKING:
    from ortlab.cluster.workers import Workers

PLAIN: Final = dict(zip(("engine", "precision"), REFERENCE, strict=True))
"""The settings of the set-up that others are compared with."""
LONG_S = 5.0
"""A first step that takes longer is not made for another batch without need."""


class Candidate:
    """One set-up with the copy of `model` that it trains; its first step is behind it.

    With `workers` they train copies of that copy.

    Raises what the engine raises: ValueError or EngineUnavailable, before anything is copied, where
    it cannot run.
    """

    def __init__(
        self,
        settings: FinetuneSettings,
        model: nn.Module,
        loss: LossFunction | None,
        feed: Feed,
        *,
        micro: int,
        workers: Workers | None = None,
    ) -> None:
        chosen = engine_for(settings)
        self.settings = settings
        self.plan: MemoryPlan | None = None
        """What its graph says of its memory, where it has one."""
        self.model = copy.deepcopy(model)
        self.steps = 1
        """How many it has made; where it is in the feed."""
        self._feed = feed
        self._wrapped = self.model

        def prepare() -> Stepper:
            if workers is not None:
                from ortlab.cluster.remote import RemoteStepper

                return RemoteStepper(workers, self.model, loss, settings, name="a comparison")
            # Which precision is not for wrapping to choose.
            plain = settings.replace(precision=PLAIN["precision"])
            self._wrapped = chosen.wrap(self.model, plain)
            return chosen.prepare(self._wrapped, loss, settings)

        (batches,) = feed.steps(0, 1, micro=micro)
        self.lane = interleaved.TimedTrial(prepare, batches, lr=settings.lr, seed=settings.seed)

    @property
    def slow_to_begin(self) -> bool:
        """Whether its first step took long."""
        return self.lane.first_step_s > LONG_S

    def turn(self, number: int, *, micro: int) -> float:
        """Milliseconds of a step, the mean of the next `number`, in micro-batches of `micro`."""
        steps = self._feed.steps(self.steps, number, micro=micro)
        # The same masks for all who draw them as eager torch does.
        ms = self.lane.turn(steps, seed=self.settings.seed + self.steps)
        self.steps += number
        return ms

    def peak_bytes(self, step: Callable[[], object]) -> tuple[float, str]:
        """What `step`, one optimizer step, takes of memory, and where that is known from."""
        measured = memory.peak_bytes(self.lane.stepper, self.model, step)
        self.plan = memory.graph_plan(self._wrapped, optimizer=self.settings.optimizer)
        if self.plan is None:
            return measured, "measured"
        return self.plan.peak_bytes() + self._added_up(), "graph"

    def max_batch(self, budget: int) -> int | None:
        """The largest micro-batch that fits by its graph; None where that does not tell."""
        assert self.plan is not None
        return memory.planned_batch(self.plan, budget - self._added_up())

    def _added_up(self) -> int:
        """A graph gives gradients of its own to those of the micro-batches before."""
        return memory.gradient_bytes(self.model) if self.settings.accumulation > 1 else 0

    def close(self) -> None:
        """Gives back what the engine holds, and the copy."""
        self.lane.stepper.close()
        self.plan = None
        self.model = self._wrapped = nn.Module()
