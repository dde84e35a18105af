"""Tests of changes of settings and their outcomes: applied, refused, dropped, and withdrawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ortlab
from ortlab.engines.base import StepResult
from ortlab.training import data_loading
from ortlab.training.control import ChangeOutcome, Control
from ortlab.training.run import Run
from ortlab.training.trainer import Trainer
from tests.support.training_parts import Parts, examples
from tests.support.waiting import HANGS_S, until


class Loop:
    """A trainer whose steps the test makes one by one."""

    def __init__(self, **values: Any) -> None:
        parts = Parts(**values)
        self.control = Control()
        self.trainer = Trainer(
            parts.state.stepper,
            data_loading.batches(examples(), parts.settings),
            parts.settings,
            control=self.control,
            recorder=parts.recorder,
            prepare=parts.prepare,
        )
        self.steps: Iterator[StepResult] = self.trainer.steps()


def test_a_change_is_applied_once_its_step_was_handled() -> None:
    loop = Loop()
    next(loop.steps)
    request = loop.control.apply({"learning_rate": 0.5})
    assert not request.done()
    assert repr(request) == "<ChangeRequest learning_rate=0.5: pending>"
    next(loop.steps)
    assert not request.done(), "whoever handles the step learns of the settings first"
    next(loop.steps)
    assert request.result(0) == ChangeOutcome("applied", "learning_rate=0.5 (was 5e-05)", 1, 0.0)
    assert repr(request) == "<ChangeRequest learning_rate=0.5: applied after step 1>"


def test_a_change_of_the_engine_has_a_cost() -> None:
    loop = Loop()
    request = loop.control.apply({"precision": "bf16"})
    next(loop.steps)
    next(loop.steps)
    outcome = request.result(0)
    assert (outcome.state, outcome.step) == ("applied", 0)
    assert outcome.cost_s > 0


def test_values_in_effect_already_are_applied_at_no_cost() -> None:
    loop = Loop(learning_rate=0.5)
    request = loop.control.apply({"learning_rate": 0.5})
    next(loop.steps)
    next(loop.steps)
    assert request.result(0) == ChangeOutcome("applied", "", 0)


def test_a_change_that_cannot_be_applied_is_refused_with_the_reason() -> None:
    loop = Loop()
    next(loop.steps)
    request = loop.control.apply({"seed": 7})
    next(loop.steps)
    outcome = request.result(0)
    assert (outcome.state, outcome.step, outcome.cost_s) == ("refused", 1, 0.0)
    assert "seed=7 cannot be applied" in outcome.text
    assert repr(request).startswith("<ChangeRequest seed=7: refused after step 1: ")


def test_a_change_that_fails_in_its_first_step_is_refused_with_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    step = loop.trainer.stepper.step

    def fails(group: Any, *, lr: float) -> Any:
        if lr > 0.1:
            raise ValueError("no kernel for this rate")
        return step(group, lr=lr)

    monkeypatch.setattr(loop.trainer.stepper, "step", fails)
    request = loop.control.apply({"learning_rate": 0.5})
    next(loop.steps)
    outcome = request.result(0)
    assert outcome.state == "refused"
    assert outcome.text.endswith("no kernel for this rate")
    assert loop.trainer.settings.optim.learning_rate < 0.1


def test_two_changes_before_one_step_share_their_outcome() -> None:
    loop = Loop()
    first = loop.control.apply({"learning_rate": 0.5, "max_grad_norm": 2.0})
    second = loop.control.apply({"learning_rate": 0.25})
    next(loop.steps)
    next(loop.steps)
    assert first.result(0) is second.result(0)
    assert loop.trainer.settings.optim.learning_rate == 0.25
    assert loop.trainer.settings.optim.max_grad_norm == 2.0


def test_two_changes_in_a_row_have_an_outcome_each() -> None:
    loop = Loop()
    first = loop.control.apply({"learning_rate": 0.5})
    next(loop.steps)
    second = loop.control.apply({"learning_rate": 0.25})
    next(loop.steps)
    assert first.result(0).text == "learning_rate=0.5 (was 5e-05)"
    assert not second.done()
    next(loop.steps)
    assert second.result(0).text == "learning_rate=0.25 (was 0.5)"


@pytest.mark.parametrize("closes", [False, True])
def test_a_change_is_dropped_by_the_end_of_the_loop(closes: bool) -> None:
    loop = Loop()
    next(loop.steps)
    request = loop.control.apply({"learning_rate": 0.5})
    if closes:
        loop.control.close()  # as if the loop hung while reading data
    else:
        loop.control.stop()
        assert not list(loop.steps)
    assert request.result(0).state == "dropped"
    assert request.result(0).step is None
    loop.control.close()
    assert loop.control.apply({"learning_rate": 0.5}).result(0).state == "dropped"


def test_the_last_step_applies_a_change_before_the_end() -> None:
    loop = Loop(max_steps=1)
    request = loop.control.apply({"learning_rate": 0.5})
    assert len(list(loop.steps)) == 1
    assert request.result(0).state == "applied"


def test_a_request_can_be_withdrawn() -> None:
    loop = Loop()
    request = loop.control.apply({"learning_rate": 0.5})
    assert request.cancel()
    assert repr(request) == "<ChangeRequest learning_rate=0.5: canceled>"
    next(loop.steps)
    assert loop.trainer.settings.optim.learning_rate != 0.5


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_end: None) -> Iterator[Run]:
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    run = ortlab.finetune(
        nn.Linear(4, 3), examples(), loss="cross_entropy", engine="eager", device="cpu",
        num_train_epochs=10**7,
    )  # fmt: skip
    yield run
    run.stop()
    assert run.wait_over(HANGS_S)


def test_a_paused_run_applies_a_change_when_it_is_resumed(run: Run) -> None:
    run.pause()
    until(lambda: run.state == "paused")
    request = run.apply(learning_rate=0.5)
    with pytest.raises(TimeoutError):
        request.result(0.05)
    run.resume()
    assert request.result(HANGS_S).state == "applied"
    assert run.current_settings.optim.learning_rate == 0.5
    undone = run.undo().result(HANGS_S)
    assert undone.text == "learning_rate=5e-05 (was 0.5)"
    assert run.current_settings == run.settings


def test_a_run_raises_at_once_what_it_can_check_at_once(run: Run) -> None:
    with pytest.raises(ValueError, match="seed=7 cannot be applied"):
        run.apply(seed=7)
    with pytest.raises(ValueError, match="unknown setting"):
        run.apply(learning_rat=7)
    run.pause()
    until(lambda: run.state == "paused")
    request = run.apply(learning_rate=0.5)
    run.stop()
    assert request.result(HANGS_S).state == "dropped"
    assert run.wait_over(HANGS_S)
    with pytest.raises(ValueError, match="is over"):
        run.apply(learning_rate=0.5)
