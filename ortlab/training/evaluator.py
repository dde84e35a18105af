"""Evaluation of a model on held-out data, by itself and in the course of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Stepper, StepperLost
from ortlab.metrics.evaluation import Evaluation, evaluations_of, goal
from ortlab.metrics.recorder import NAN
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings import is_own, unknown_name
from ortlab.training.data_loading import Batches
from ortlab.training.failures import FailureHandler
from ortlab.training.training_state import TrainingState
from ortlab.utils.errors import out_of_memory
from ortlab.utils.rng import RandomStates, undisturbed_random
from ortlab.utils.wording import counted


def evaluate(
    stepper: Stepper,
    data: Batches,
    *,
    step: int,
    size: int | None = None,
    proceed: Callable[[], bool] = lambda: True,
    metrics: UserMetrics | None = None,
) -> tuple[Evaluation, list[str]] | None:
    """Return the mean loss over samples, the accuracy and the user's metrics on held-out data.

    The random states are restored afterwards, so that the number of evaluations does not change
    training.

    Args:
        stepper: Stepper of the model.
        data: The held-out data.
        step: Optimizer steps done.
        size: Samples per micro-batch; None for the size that `data` was created with.
        proceed: Called before each micro-batch; False ends the evaluation.
        metrics: The user's metrics.

    Returns:
        The evaluation, and lines about metrics that failed; None if `proceed` ended it.

    Raises:
        ValueError: If the data is empty.
    """
    loss = torch.zeros(())
    samples = measured = correct = predicted = 0
    own: dict[str, float] = {}
    told: list[str] = []
    with undisturbed_random():
        if metrics is not None:
            metrics.begin()
        for batch in data.epoch(0, size=size):
            if not proceed():
                return None
            result = stepper.evaluate(batch, outputs=metrics is not None)
            if metrics is not None:
                metrics.add(result.predictions, result.targets)
            samples += result.samples
            correct += result.correct
            predicted += result.predicted
            if result.loss is not None:
                loss = loss.to(result.loss.device) + result.loss.float() * result.samples
                measured += result.samples
        if samples and metrics is not None:
            own, told = metrics.end()
    if samples == 0:
        raise ValueError("the evaluation data is empty")
    values = {
        "loss": loss.item() / measured if measured else NAN,
        "accuracy": correct / predicted if predicted else NAN,
        **own,
    }
    return Evaluation.of(step, values), told


class Evaluator:
    """Evaluates a run on held-out data, records the scores, and reports the best checkpoint.

    Args:
        state: State of the run.
        data: The held-out data; None if the run has none.
        failures: Handler for evaluations that fail.
        proceed: Waits while the run is paused, and returns False if the run is to end.
        keep_best: Receives the checkpoint of each evaluation that is better than all before.
        best: Best evaluation before this run.
        metrics: The user's metrics.
        after: Called after each evaluation.
    """

    def __init__(
        self,
        state: TrainingState,
        data: Batches | None,
        *,
        failures: FailureHandler,
        proceed: Callable[[], bool],
        keep_best: Callable[[Checkpoint], object] = lambda _: None,
        best: Evaluation | None = None,
        metrics: UserMetrics | None = None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._after = after
        self._told: set[str] = set()  # what failed in the user's metrics, which is told once
        self._state = state
        self._data = data
        self._failures = failures
        self._proceed = proceed
        self._keep_best = keep_best
        self._best = best
        self._most = sys.maxsize  # samples at a time, once memory did not suffice for more

    def evaluate(self) -> None:
        """Evaluate at the current step, unless that was done already."""
        state = self._state
        if self._data is None or state.evaluated == state.step:
            return
        # During an evaluation, as in a pause there, the random states are the evaluation's.
        state.drawn = RandomStates.now()
        found = self._measure(self._data)
        state.drawn = None
        if found is None:
            return
        state.evaluated = state.step
        state.tell("eval", str(found), found.values)
        self._step_scheduler(found)
        self._see_the_best(found)
        if not math.isfinite(found.loss):
            state.tell(
                "warning",
                f"the evaluation loss is {found.loss} at step {state.step}; look for NaN in the "
                "evaluation data, or in the model's outputs in evaluation mode",
            )
        self._stop_early()
        self._after()

    def _stop_early(self) -> None:
        """End the run if the evaluations since the best one are as many as the patience."""
        state, settings = self._state, self._state.settings.checkpoint
        patience = settings.early_stopping_patience
        if patience is None or state.done:
            return
        wanted = goal(settings, self._metrics)
        # As for the best checkpoint, the evaluation before the first step does not count.
        found = [each for each in evaluations_of(state.recorder) if each.step]
        if wanted.since_best(found, settings.early_stopping_threshold) >= patience:
            state.stopped_early = True
            best = wanted.best(found)
            if best is None:
                told = f"{wanted.name} has no value after {counted(patience, 'evaluation')}"
            else:
                told = (
                    f"{wanted.name} has not improved for {counted(patience, 'evaluation')}; "
                    f"best {best.values[wanted.name]:.4g} at step {best.step:,}"
                )
            state.tell("early_stop", f"stopped early at step {state.step:,}: {told}")

    def _step_scheduler(self, found: Evaluation) -> None:
        """Step the user's scheduler if it needs a metric; the one before training is no result."""
        settings = self._state.settings
        if self._state.step and is_own(settings.optim.lr_scheduler_type):
            wanted = goal(settings.checkpoint, self._metrics)
            if wanted.name in found.values:
                self._state.stepper.evaluated(found.values[wanted.name])

    def _see_the_best(self, found: Evaluation) -> None:
        """Report the checkpoint if this evaluation is the best so far."""
        state, settings = self._state, self._state.settings.checkpoint
        if not settings.keep_best:
            return
        wanted = goal(settings, self._metrics)
        if wanted.name not in found.values:
            told = f"keep_best={settings.keep_best!r}: {unknown_name(wanted.name, found.values)}"
            failed = any(math.isnan(value) for value in found.metrics.values())
            if state.step == state.began_at and not failed:
                raise ValueError(told)
            state.tell("warning", told)
        if state.step and wanted.better(found, self._best):
            self._best = found
            self._keep_best(state.copy())

    def _measure(self, data: Batches) -> Evaluation | None:
        """Return the scores; None if the run is to end or to continue without them.

        If memory does not suffice for as many samples as a step has, fewer at a time give the same
        mean.
        """
        state = self._state
        while True:
            size = min(state.settings.data.batch_size, self._most)
            try:
                found = evaluate(
                    state.stepper,
                    data,
                    step=state.step,
                    size=size,
                    proceed=self._proceed,
                    metrics=self._metrics,
                )
            except StepperLost:
                raise
            except Exception as error:
                memory = out_of_memory(error)
                when = f"after step {state.step}" if state.step else "before the first step"
                error.add_note(f"the evaluation {when} failed")
                if state.settings.parallel.pipeline_stages > 1 or state.step == state.began_at:
                    raise  # nothing is lost by starting over
                if memory:
                    self._failures.free_memory(error)
                if memory and data.size is not None and size > 1:
                    self._most = size // 2
                    told = f"not enough memory to evaluate {size} samples at a time"
                    state.tell("warning", f"{told}: using {size // 2} from now on")
                    continue
                if not self._failures.evaluation_failed(error, memory=memory):
                    return None
            else:
                if found is None:
                    return None
                evaluation, failed = found
                for line in failed:
                    if line not in self._told:
                        self._told.add(line)
                        state.tell("metric_failed", f"{line} (evaluation at step {state.step:,})")
                return evaluation
