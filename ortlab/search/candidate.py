"""One set-up that trains a copy of the compared model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torch import nn

from ortlab.bench import interleaved
from ortlab.cluster.remote import RemoteStepper
from ortlab.engines.base import LossFunction, Stepper
from ortlab.engines.registry import engine_for
from ortlab.graph.memory import MemoryPlan
from ortlab.search import memory
from ortlab.search.feed import Feed
from ortlab.settings import REFERENCE, FinetuneSettings

if TYPE_CHECKING:
    from ortlab.cluster.workers import Workers

PLAIN: Final = dict(zip(("engine", "precision"), REFERENCE, strict=True))
"""Settings of the set-up that all others are compared with."""
LONG_S = 5.0
"""Seconds from which a first step counts as slow, so it is not repeated for another batch size."""


class Candidate:
    """One set-up and the copy of the model that it trains. Its first step is made on creation.

    Args:
        settings: Settings of the set-up.
        model: Model to copy.
        loss: Loss function, or None if the model returns a loss.
        feed: Training data.
        micro: Samples in a micro-batch of the first step.
        workers: If given, these workers train copies of the copy.

    Raises:
        ValueError: If the settings are not supported, before anything is copied.
        EngineUnavailable: If the engine cannot run here, before anything is copied.
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
        """Memory plan of its graph, or None if it has none."""
        self.model = copy.deepcopy(model)
        self.steps = 1
        """Number of steps so far, which is its position in the feed."""
        self._feed = feed
        self._wrapped = self.model

        def prepare() -> Stepper:
            if workers is not None:
                return RemoteStepper(workers, self.model, loss, settings, name="a comparison")
            # The stepper applies the precision, so wrapping must not.
            plain = settings.model.replace(precision=PLAIN["precision"])
            self._wrapped = chosen.wrap(self.model, plain)
            return chosen.prepare(self._wrapped, loss, settings)

        (batches,) = feed.steps(0, 1, micro=micro)
        self.lane = interleaved.TimedTrial(
            prepare, batches, lr=settings.optim.learning_rate, seed=settings.data.seed
        )

    @property
    def slow_to_begin(self) -> bool:
        """True if its first step took longer than `LONG_S`."""
        return self.lane.first_step_s > LONG_S

    def turn(self, number: int, *, micro: int) -> float:
        """Run the next steps and return the mean time of a step in milliseconds.

        Args:
            number: Number of steps.
            micro: Samples in a micro-batch.
        """
        steps = self._feed.steps(self.steps, number, micro=micro)
        # The same dropout masks for all engines that draw them as eager torch does.
        ms = self.lane.turn(steps, seed=self.settings.data.seed + self.steps)
        self.steps += number
        return ms

    def peak_bytes(self, step: Callable[[], object]) -> tuple[float, str]:
        """Return the memory that a step takes, and the source of that value.

        Args:
            step: Function that runs one optimizer step.

        Returns:
            Bytes, and "graph" if they come from the graph's memory plan, otherwise "measured".
        """
        measured = memory.peak_bytes(self.lane.stepper, self.model, step)
        self.plan = memory.graph_plan(self._wrapped, optimizer=self.settings.optim.optimizer)
        if self.plan is None:
            return measured, "measured"
        return self.plan.peak_bytes() + self._added_up(), "graph"

    def max_batch(self, budget: int) -> int | None:
        """Return the largest micro-batch that fits according to the graph.

        Args:
            budget: Available memory in bytes.

        Returns:
            Number of samples, 0 if not even one fits, or None if the graph does not determine it.
        """
        assert self.plan is not None
        return memory.planned_batch(self.plan, budget - self._added_up())

    def _added_up(self) -> int:
        """Return the bytes for accumulated gradients, which the graph stores apart from its own."""
        return (
            memory.gradient_bytes(self.model)
            if self.settings.data.gradient_accumulation_steps > 1
            else 0
        )

    def close(self) -> None:
        """Release the engine's memory and the copy of the model."""
        self.lane.stepper.close()
        self.plan = None
        self.model = self._wrapped = nn.Module()
