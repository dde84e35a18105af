"""Tests of the change of settings by itself: applied, refused, and undone after a failure."""

from __future__ import annotations

import pytest

from ortlab.settings import FinetuneSettings
from ortlab.training.changes import SettingChanger
from tests.support.training_parts import Parts


def changer(parts: Parts, *, rebuilds: bool = True) -> SettingChanger:
    return SettingChanger(parts.state, parts.control, parts.prepare if rebuilds else None)


def switched(parts: Parts, one: SettingChanger) -> FinetuneSettings:
    wanted = one.requested()
    one.begin(wanted, 0.0)
    return wanted


def test_a_change_is_recorded_once_its_first_step_is_done() -> None:
    parts = Parts()
    one = changer(parts)
    parts.control.apply({"learning_rate": 0.5})
    switched(parts, one)
    assert parts.state.settings.optim.learning_rate == 0.5
    assert not parts.told("change")
    one.settle()
    one.settle()
    assert parts.told("change") == [f"learning_rate=0.5 (was {parts.settings.optim.learning_rate})"]


@pytest.mark.parametrize(
    "change", [{"learning_rate": 0.5}, {"precision": "bf16"}], ids=["adopt", "rebuild"]
)
def test_a_change_that_fails_is_undone(change: dict[str, float | str]) -> None:
    parts = Parts()
    one = changer(parts)
    stepper = parts.state.stepper
    parts.control.apply(change)
    wanted = switched(parts, one)
    assert parts.state.settings == wanted
    assert (parts.state.stepper is stepper) == ("learning_rate" in change)
    one.revert(ValueError("no such kernel"))
    assert parts.state.settings == parts.settings
    assert one.trial is None
    assert "no such kernel" in parts.told("warning")[0]


def test_what_a_run_cannot_change_is_refused_with_a_warning() -> None:
    parts = Parts()
    parts.control.apply({"seed": 7})
    one = changer(parts)
    assert one.requested() is parts.settings
    assert not one.pending
    parts.control.apply({"precision": "bf16"})
    assert changer(parts, rebuilds=False).requested() is parts.settings
    seed, precision = parts.told("warning")
    assert "seed=7" in seed
    assert "another engine" in precision
