"""Tests of the advisor by itself: smaller micro-batches with the same samples per step."""

from __future__ import annotations

import pytest

from ortlab.training import memory_advice
from ortlab.training.memory_advice import MemoryAdvisor
from tests.support.training_parts import chosen


def test_the_largest_micro_batches_that_fit_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_advice, "available_bytes", lambda _: 300)
    advisor = MemoryAdvisor(lambda settings: 100 * settings.data.batch_size, own_batches=False)
    settings = chosen(batch_size=16)
    assert advisor.advice(settings, "cpu") == {"batch_size": 2, "gradient_accumulation_steps": 8}
    assert advisor.advice(settings, "cpu", 200) == {
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
    }
    assert MemoryAdvisor(lambda _: None, own_batches=True).advice(settings, "cpu") == {}


def test_the_step_that_did_not_fit_is_remembered() -> None:
    advisor = MemoryAdvisor(lambda _: None, own_batches=False)
    settings = chosen()
    assert not advisor.is_too_large(3, settings)
    advisor.remember(3, settings)
    assert advisor.is_too_large(3, settings)
    assert not advisor.is_too_large(4, settings)
    assert not advisor.is_too_large(3, chosen(lr=0.5))
