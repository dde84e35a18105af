"""Tests of the evaluator by itself: when it evaluates, what it records, and the best scores."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.training import data_loading
from ortlab.training.evaluator import Evaluation, Evaluator, best, better
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

    def fails(_: Any) -> Any:
        raise KeyError("the column is gone")

    monkeypatch.setattr(parts.state.stepper, "evaluate", fails)
    with pytest.raises(KeyError) as raised:
        evaluator(parts).evaluate()
    assert raised.value.__notes__ == ["the evaluation before the first step failed"]


def test_scores_that_are_nan_are_never_the_best() -> None:
    nan, low, high = Evaluation(1, math.nan), Evaluation(2, 1.0), Evaluation(3, 2.0)
    assert best([nan, high, low]) is low
    assert best([nan]) is None
    assert better(low, None, "eval_loss")
    assert not better(nan, high, "eval_loss")
    assert not better(high, low, "eval_loss")
