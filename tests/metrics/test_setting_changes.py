"""Tests of the cost and the effect of a change of settings, read from a run's recorder."""

from __future__ import annotations

import math

import pytest

from ortlab.metrics.recorder import Event, Recorder, Sample
from ortlab.metrics.setting_changes import STEPS, changes
from tests.support.changed_runs import refusals


class Ran:
    """A recorder filled step by step; every step takes `ms` and uses `held` bytes."""

    def __init__(self, capacity: int = 4096) -> None:
        self.recorder = Recorder(capacity)
        self.step, self.time_s = 0, 0.0

    def steps(self, count: int, ms: float, held: float = 100.0, cost_s: float = 0.0) -> None:
        for at in range(count):
            took_ms = ms + (1e3 * cost_s if at == 0 else 0.0)
            self.time_s += took_ms / 1e3
            self.step += 1
            self.recorder.add(
                Sample(
                    step=self.step, time_s=self.time_s, samples=8, step_ms=took_ms, peak_bytes=held
                )
            )

    def change(self, text: str, cost_s: float = 0.0) -> None:
        event = Event("change", self.step, self.time_s + cost_s, text, {"cost_s": cost_s})
        self.recorder.event(event)


@pytest.fixture
def ran() -> Ran:
    return Ran()


def test_rates_and_memory_are_those_of_the_steps_on_either_side(ran: Ran) -> None:
    ran.steps(500, ms=40.0, held=50.0)  # too long ago to count as the state before the change
    ran.steps(100, ms=10.0, held=100.0)
    ran.change("precision=bf16 (was fp32)", cost_s=3.0)
    ran.steps(300, ms=5.0, held=70.0, cost_s=3.0)
    (found,) = changes(ran.recorder)
    assert (found.number, found.step, found.cost_s) == (1, 600, 3.0)
    assert found.text == "precision=bf16 (was fp32)"
    assert found.samples_per_s == pytest.approx((800, 1600))
    assert found.memory_bytes == (100, 70)


def test_some_changes_are_those_of_all(ran: Ran) -> None:
    for number in range(5):
        ran.steps(40, ms=10.0 + number)
        ran.change(f"lr={number}")
    ran.steps(40, ms=3.0)
    found = changes(ran.recorder)
    assert [change.number for change in found] == [1, 2, 3, 4, 5]
    assert changes(ran.recorder, known=2) == found[2:]
    assert changes(ran.recorder, known=2, most=2) == found[2:4]
    assert changes(ran.recorder, known=5) == []


def test_what_came_before_is_known_at_once_and_what_follows_with_the_steps(ran: Ran) -> None:
    ran.steps(20, ms=10.0)
    ran.change("engine=ort (was eager)", cost_s=0.5)
    (found,) = changes(ran.recorder)
    assert found.samples_per_s[0] == pytest.approx(800)
    assert math.isnan(found.samples_per_s[1])
    assert math.isnan(found.memory_bytes[1])
    assert not found.settled
    ran.steps(2, ms=20.0, cost_s=0.5)  # the first of them includes the cost
    (found,) = changes(ran.recorder)
    assert found.samples_per_s[1] == pytest.approx(400)
    assert not found.settled
    ran.steps(STEPS, ms=200.0)
    assert changes(ran.recorder)[0].settled, "two seconds and enough steps have gone by"


def test_a_change_begins_where_the_one_before_it_ends(ran: Ran) -> None:
    ran.steps(30, ms=10.0)
    ran.change("first", cost_s=1.0)
    ran.steps(2, ms=20.0, cost_s=1.0)
    ran.change("second", cost_s=2.0)
    ran.steps(30, ms=40.0, cost_s=2.0)
    first, second = changes(ran.recorder)
    assert first.samples_per_s == pytest.approx((800, 400))
    assert second.samples_per_s == pytest.approx((400, 200))
    assert first.settled


def test_a_change_before_every_step_has_nothing_before_it(ran: Ran) -> None:
    ran.change("lr=1 (was 2)")
    ran.steps(30, ms=10.0)
    (found,) = changes(ran.recorder)
    assert math.isnan(found.samples_per_s[0])
    assert found.samples_per_s[1] == pytest.approx(800)


def test_a_long_run_whose_steps_were_merged_tells_the_same() -> None:
    ran = Ran(capacity=256)
    ran.steps(5000, ms=10.0, held=100.0)
    ran.change("engine=ort (was eager)", cost_s=9.0)
    ran.steps(5000, ms=5.0, held=70.0, cost_s=9.0)
    (found,) = changes(ran.recorder)
    assert found.samples_per_s == pytest.approx((800, 1600))
    assert found.memory_bytes == (100, 70)


def test_a_refusal_is_a_warning_with_a_cost(ran: Ran) -> None:
    ran.recorder.event(Event("warning", 3, 1.0, "the disk is full"))
    ran.recorder.event(Event("warning", 4, 2.0, "the run goes on without", {"cost_s": 0.3}))
    assert [event.step for event in refusals(ran.recorder)] == [4]
    assert changes(ran.recorder) == []
