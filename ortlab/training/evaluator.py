"""Evaluation of a model on held-out data, by itself and in the course of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Stepper, StepperLost
from ortlab.metrics.recorder import NAN
from ortlab.training.data_loading import Batches
from ortlab.training.failures import FailureHandler
from ortlab.training.training_state import TrainingState
from ortlab.utils.errors import out_of_memory
from ortlab.utils.rng import RandomStates, undisturbed_random


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on held-out data; ``accuracy`` is NaN if the targets are not classes."""

    step: int
    loss: float
    accuracy: float = NAN

    def __str__(self) -> str:
        hits = "" if math.isnan(self.accuracy) else f", accuracy {self.accuracy:.3f}"
        return f"loss {self.loss:.4g}{hits}"


def best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the lowest loss.

    Args:
        evaluations: Evaluations of one run. Those whose loss is NaN are skipped.

    Returns:
        The best evaluation, or None if there is none.
    """
    known = [each for each in evaluations if not math.isnan(each.loss)]
    return min(known, key=lambda each: each.loss, default=None)


def better(found: Evaluation, before: Evaluation | None, metric: str) -> bool:
    """Return whether an evaluation is better than the best one so far.

    Args:
        found: The new evaluation. It is never better if its score is NaN.
        before: The best evaluation so far; None before the first.
        metric: "eval_loss" or "eval_accuracy".

    Returns:
        True if `found` has the better score.
    """
    sign, name = (-1, "loss") if metric == "eval_loss" else (1, "accuracy")
    here = sign * getattr(found, name)
    there = NAN if before is None else sign * getattr(before, name)
    return not math.isnan(here) and not here <= there


def evaluate(
    stepper: Stepper,
    data: Batches,
    *,
    step: int,
    size: int | None = None,
    proceed: Callable[[], bool] = lambda: True,
) -> Evaluation | None:
    """Return the mean loss over samples and the accuracy on held-out data.

    The random states are restored afterwards, so that the number of evaluations does not change
    training.

    Args:
        stepper: Stepper of the model.
        data: The held-out data.
        step: Optimizer steps done.
        size: Samples per micro-batch; None for the size that `data` was created with.
        proceed: Called before each micro-batch; False ends the evaluation.

    Returns:
        The evaluation, or None if `proceed` ended it.

    Raises:
        ValueError: If the data is empty.
    """
    loss = torch.zeros(())
    samples = measured = correct = predicted = 0
    with undisturbed_random():
        for batch in data.epoch(0, size=size):
            if not proceed():
                return None
            result = stepper.evaluate(batch)
            samples += result.samples
            correct += result.correct
            predicted += result.predicted
            if result.loss is not None:
                loss = loss.to(result.loss.device) + result.loss.float() * result.samples
                measured += result.samples
    if samples == 0:
        raise ValueError("the evaluation data is empty")
    return Evaluation(
        step,
        loss=loss.item() / measured if measured else NAN,
        accuracy=correct / predicted if predicted else NAN,
    )


class Evaluator:
    """Evaluates a run on held-out data, records the scores, and reports the best checkpoint.

    Args:
        state: State of the run.
        data: The held-out data; None if the run has none.
        failures: Handler for evaluations that fail.
        proceed: Waits while the run is paused, and returns False if the run is to end.
        keep_best: Receives the checkpoint of each evaluation that is better than all before.
        best: Best evaluation before this run.
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
    ) -> None:
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
        state.tell("eval", str(found), {"loss": found.loss, "accuracy": found.accuracy})
        metric = state.settings.checkpoint.keep_best
        if metric and state.step and better(found, self._best, metric):
            self._best = found
            self._keep_best(state.copy())
        if not math.isfinite(found.loss):
            state.tell(
                "warning",
                f"the held-out loss is {found.loss} at step {state.step}; look for NaN in the "
                "evaluation data, or in the model's outputs in evaluation mode",
            )

    def _measure(self, data: Batches) -> Evaluation | None:
        """Return the scores; None if the run is to end or to continue without them.

        If memory does not suffice for as many samples as a step has, fewer at a time give the same
        mean.
        """
        state = self._state
        while True:
            size = min(state.settings.data.batch_size, self._most)
            try:
                return evaluate(
                    state.stepper, data, step=state.step, size=size, proceed=self._proceed
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
