"""Tests of settings by topic: nested inside, flat at the edge; and of their stored names."""

from __future__ import annotations

import pytest

from ortlab.settings import (
    EngineSettings,
    FinetuneSettings,
    OptimSettings,
    OrtModuleSettings,
    stored,
)

FORMER = {
    "lr": "learning_rate",
    "accumulation": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm",
    "eval_every": "eval_steps",
    "checkpoint_every": "save_steps",
    "schedule": "lr_scheduler_type",
    "epochs": "num_train_epochs",
}


def test_flat_names_reach_their_topics() -> None:
    found = FinetuneSettings.of(engine="eager", lr=0.5, opset=15, epochs=3)
    assert found.model.engine == "eager"
    assert found.model.ortmodule.opset == found["opset"] == 15
    assert found.optim.learning_rate == found["learning_rate"] == 0.5
    assert found.limits.num_train_epochs == 3
    assert FinetuneSettings.of(found.as_dict()) == found


def test_the_repr_is_the_call_that_makes_the_same() -> None:
    found = FinetuneSettings.of(engine="eager", lr=0.5, loss="mse")
    assert repr(found) == "FinetuneSettings.of(engine='eager', loss='mse', learning_rate=0.5)"
    assert eval(repr(found)) == found
    assert repr(OptimSettings()) == "OptimSettings.of()"


def test_a_copy_keeps_the_other_topics() -> None:
    before = FinetuneSettings.of(batch_size=4, engine="eager")
    after = before.replace(max_grad_norm=None)
    assert after.optim == OptimSettings(max_grad_norm=None)
    assert (after.data, after.model) == (before.data, before.model)


def test_options_that_few_people_set_come_last() -> None:
    names = list(FinetuneSettings.declarations())
    options = list(OrtModuleSettings.declarations())
    assert names[-len(options) :] == options
    assert list(EngineSettings.declarations())[-len(options) :] == options


def test_every_setting_has_a_topic_and_ten_are_common() -> None:
    declared = FinetuneSettings.declarations().values()
    assert all(each.topic for each in declared)
    assert sum(each.common for each in declared) == 10
    assert {each.alias: each.name for each in declared if each.alias} == FORMER
    assert {each.alias for each in declared if each.short} == {"lr", "epochs"}


def test_settings_of_two_topics_are_checked_together() -> None:
    with pytest.raises(ValueError, match="recompute='layers' cannot be combined with memory_level"):
        FinetuneSettings.of(recompute="layers", memory_level=1)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(KeyError):
        FinetuneSettings()["lr"]
    with pytest.raises(
        ValueError, match="unknown setting 'epoch': did you mean 'num_train_epochs'"
    ):
        FinetuneSettings.of(epoch=3)
    with pytest.raises(ValueError, match="unknown setting 'zzz': none of the 63 names is similar"):
        FinetuneSettings.of(zzz=3)


def test_stored_settings_have_their_former_names_mapped() -> None:
    of_a_file = {"engine": "ort", "lr": 0.1, "epochs": 2, "schedule": "cosine", "gone": 1}
    assert stored.current(of_a_file) == {
        "engine": "ortmodule",
        "learning_rate": 0.1,
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "gone": 1,
    }
    assert stored.current({**of_a_file, "engine": "offload"})["engine"] == "ort_fused"


def test_a_file_with_current_names_keeps_its_engine() -> None:
    """The name ``ort`` is reserved for another engine, which later versions will store."""
    found = {"engine": "ort", "learning_rate": 0.1}
    assert stored.current(found) == found
