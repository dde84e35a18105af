"""Scores of a model on held-out data, and which of them are the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ortlab.metrics.recorder import NAN, Event, Recorder
from ortlab.settings.training import CheckpointSettings

if TYPE_CHECKING:
    from ortlab.metrics.user_metrics import UserMetrics

SHOWN = 6
"""Number of scores that charts and lines of text show."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores of a model on held-out data.

    Attributes:
        step: Optimizer steps done.
        loss: Mean loss over samples.
        accuracy: Share of correct predictions; NaN if the targets are not classes.
        metrics: The user's own metrics, by name; NaN for one that failed.
    """

    step: int
    loss: float
    accuracy: float = NAN
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, step: int, values: Mapping[str, float]) -> Evaluation:
        """Return an evaluation from the values of its event.

        Args:
            step: Optimizer steps done.
            values: ``loss``, ``accuracy`` and other metrics.
        """
        known = {"loss": NAN, "accuracy": NAN, **values}
        return cls(step, known.pop("loss"), known.pop("accuracy"), known)

    @property
    def values(self) -> dict[str, float]:
        """All scores by name."""
        return {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}

    def __repr__(self) -> str:
        return f"Evaluation(step {self.step:,}: {self})"

    def __str__(self) -> str:
        known = [(name, value) for name, value in self.metrics.items() if not math.isnan(value)]
        hits = [] if math.isnan(self.accuracy) else [f"accuracy {self.accuracy:.3f}"]
        others = [f"{name} {value:.4g}" for name, value in known[:SHOWN]]
        if len(known) > SHOWN:
            others.append(f"{len(known) - SHOWN} more")
        if others and not hits and math.isnan(self.loss):  # a loop may log metrics without a loss
            return ", ".join(others)
        return ", ".join([f"loss {self.loss:.4g}", *hits, *others])


def evaluations_of(recorder: Recorder) -> list[Evaluation]:
    """Return the evaluations of a run so far, the first one first.

    Args:
        recorder: Recorder of the run.
    """
    return [Evaluation.of(event.step, event.values) for event in recorder.events("eval")]


def told_last(last: Evaluation) -> str:
    """Return the line of a run's view about its last evaluation.

    Args:
        last: The evaluation.
    """
    return f"evaluation (last, step {last.step:,}): {last}"


def scores(event: Event) -> dict[str, float]:
    """Return the scores of an evaluation that its chart shows: all finite ones but the loss.

    Args:
        event: Event of the evaluation.
    """
    known = {n: v for n, v in event.values.items() if n != "loss" and math.isfinite(v)}
    return dict(list(known.items())[:SHOWN])


@dataclass(frozen=True)
class Goal:
    """Criterion by which the evaluations of a run are compared.

    Attributes:
        name: Name of a score of `Evaluation.values`.
        way: Whether the largest or the smallest value is the best.
    """

    name: str = "loss"
    way: Literal["max", "min"] = "min"

    def best(self, evaluations: Sequence[Evaluation]) -> Evaluation | None:
        """Return the best evaluation.

        Args:
            evaluations: Evaluations of one run. Those whose score is NaN are skipped.

        Returns:
            The best evaluation, or None if there is none.
        """
        found = None
        for each in evaluations:
            if self.better(each, found):
                found = each
        return found

    def better(
        self, found: Evaluation, before: Evaluation | None, *, threshold: float = 0.0
    ) -> bool:
        """Return whether an evaluation is better than the best one so far.

        Args:
            found: The new evaluation. It is never better if its score is NaN.
            before: The best evaluation so far; None before the first.
            threshold: Improvement that counts as better, in units of the score.

        Returns:
            True if `found` has the better score.
        """
        here = self._score(found)
        there = NAN if before is None else self._score(before)
        return not math.isnan(here) and not here <= there + threshold

    def since_best(self, evaluations: Sequence[Evaluation], threshold: float = 0.0) -> int:
        """Return the number of evaluations after the best one.

        Args:
            evaluations: Evaluations of one run.
            threshold: Improvement that counts as better, in units of the score.

        Returns:
            0 if the last evaluation is the best one, or there is none.
        """
        best, since = None, 0
        for each in evaluations:
            since += 1
            if self.better(each, best, threshold=threshold):
                best, since = each, 0
        return since

    def _score(self, evaluation: Evaluation) -> float:
        """Return the score, negative where less is better."""
        return (1 if self.way == "max" else -1) * evaluation.values.get(self.name, NAN)


def goal(checkpoint: CheckpointSettings, metrics: UserMetrics | None = None) -> Goal:
    """Return what the best evaluation of a run is.

    Args:
        checkpoint: Settings with ``keep_best`` and ``keep_best_mode``.
        metrics: The user's metrics.

    Raises:
        ValueError: If there is no such metric, or it is not known whether more or less is better.
    """
    from ortlab.metrics.user_metrics import UserMetrics  # heavy: torch

    name = (checkpoint.keep_best or "loss").removeprefix("eval_")
    known = UserMetrics([]) if metrics is None else metrics
    if unknown := known.unknown(name):
        more = "; for a metric of your own, pass metrics=..." if metrics is None else ""
        raise ValueError(f"keep_best={checkpoint.keep_best!r}: {unknown}{more}")
    if checkpoint.keep_best_mode != "auto":
        return Goal(name, "max" if checkpoint.keep_best_mode == "max" else "min")
    way = known.direction(name)
    if way is None:
        raise ValueError(
            f"keep_best={checkpoint.keep_best!r}: say whether more or less of it is better, "
            "with keep_best_mode='max' or 'min'"
        )
    return Goal(name, way)
