"""Tests of the evaluator by itself: when it evaluates, what it records, and the best scores."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.metrics.evaluation import Evaluation, Goal, goal
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings.training import CheckpointSettings
from ortlab.training import data_loading
from ortlab.training.evaluator import Evaluator
from ortlab.training.failures import FailureHandler, FailurePolicy
from ortlab.training.memory_advice import MemoryAdvisor
from tests.support.training_parts import Parts, examples


def evaluator(parts: Parts, **options: Any) -> Evaluator:
    failures = FailureHandler(
        parts.state,
        FailurePolicy(),
        control=parts.control,
        advisor=MemoryAdvisor(lambda _: None, own_batches=False),
        proceed=lambda: True,
    )
    data = data_loading.batches(examples(), parts.settings, evaluation=True)
    options = {"proceed": lambda: True, **options}
    return Evaluator(parts.state, data, failures=failures, **options)


def test_a_step_is_evaluated_once_and_recorded() -> None:
    parts = Parts()
    one = evaluator(parts)
    for _ in range(2):
        one.evaluate()
    (event,) = parts.recorder.events("eval")
    assert event.step == parts.state.evaluated == 0
    assert math.isfinite(event.values["loss"])
    parts.step()
    one.evaluate()
    assert len(parts.recorder.events("eval")) == 2


def test_the_best_checkpoint_is_reported() -> None:
    parts = Parts(keep_best="eval_loss")
    kept: list[Checkpoint] = []
    one = evaluator(parts, keep_best=kept.append, best=Evaluation(0, loss=1e9))
    one.evaluate()
    assert not kept, "nothing was trained yet"
    parts.step()
    one.evaluate()
    assert [taken.position.step for taken in kept] == [1]


def test_an_evaluation_that_is_stopped_records_nothing() -> None:
    parts = Parts()
    evaluator(parts, proceed=lambda: False).evaluate()
    assert not parts.recorder.events("eval")
    assert parts.state.evaluated == -1


def test_the_error_of_the_first_evaluation_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()

    def fails(_: Any, **__: Any) -> Any:
        raise KeyError("the column is gone")

    monkeypatch.setattr(parts.state.stepper, "evaluate", fails)
    with pytest.raises(KeyError) as raised:
        evaluator(parts).evaluate()
    assert raised.value.__notes__ == ["the evaluation before the first step failed"]


def test_scores_that_are_nan_are_never_the_best() -> None:
    nan, low, high = Evaluation(1, math.nan), Evaluation(2, 1.0), Evaluation(3, 2.0)
    least = Goal()
    assert least.best([nan, high, low]) is low
    assert least.best([nan]) is None
    assert least.better(low, None)
    assert not least.better(nan, high)
    assert not least.better(high, low)


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        (None, "auto", Goal("loss", "min")),
        ("eval_loss", "auto", Goal("loss", "min")),
        ("eval_accuracy", "auto", Goal("accuracy", "max")),
        ("f1", "auto", Goal("f1", "max")),
        ("mine", "min", Goal("mine", "min")),
    ],
)
def test_which_evaluation_is_the_best(name: str | None, mode: str, expected: Goal) -> None:
    metrics = UserMetrics({"f1": lambda *_: 0.0, "mine": lambda *_: 0.0})
    assert goal(CheckpointSettings(keep_best=name, keep_best_mode=mode), metrics) == expected


def test_what_is_shown_of_an_evaluation() -> None:
    values = {"loss": 0.5, "accuracy": math.nan, "f1": 0.25, "failed": math.nan}
    found = Evaluation.of(3, values | {f"m{i}": float(i) for i in range(7)})
    assert str(found) == "loss 0.5, f1 0.25, m0 0, m1 1, m2 2, m3 3, m4 4, 2 more"
    assert repr(Evaluation(1200, 0.25)) == "Evaluation(step 1,200: loss 0.25)"
