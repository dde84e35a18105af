"""Tests of the preview of settings: made from declarations, refused by engines, with their cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ortlab.engines import registry
from ortlab.engines.base import Capabilities
from ortlab.engines.torch import stepper
from ortlab.settings import AUTO, ENGINES, Declaration, FinetuneSettings
from ortlab.training import data_loading, settings_preview
from ortlab.training.changes import cost as change_costs
from ortlab.training.changes import fixed
from ortlab.training.settings_preview import Control
from tests.support.needed_engines import needs
from tests.support.resuming import examples

EAGER = FinetuneSettings.of(engine="eager")
FIXED = fixed(data_loading.batches(examples(), EAGER))


def needs_ort() -> None:
    needs("ortmodule")


def control(
    name: str, held: FinetuneSettings, *, fixed: Mapping[str, str] | None = FIXED, **edits: Any
) -> Control:
    chosen = held.replace(**edits)
    found = settings_preview.controls(held, chosen, fixed=fixed)
    return next(each for each in found if each.declaration.name == name)


def reasons(found: Control) -> dict[str, str]:
    return {choice.text: choice.reason for choice in found.choices}


def test_every_declaration_has_a_control() -> None:
    found = settings_preview.controls(EAGER, EAGER, fixed=None)
    assert [each.declaration for each in found] == [*FinetuneSettings.declarations().values()]
    assert list(reasons(control("engine", EAGER))) == [AUTO, *ENGINES]
    assert list(reasons(control("self_check", EAGER))) == ["on", "off"]
    assert list(reasons(control("zero_stage", EAGER))) == ["0", "1", "2", "3"]
    assert control("learning_rate", EAGER).choices == ()
    assert control("skip_checks", EAGER).choices == (), "several of the choices are a value"


def test_zero_waits_for_workers() -> None:
    assert control("workers", EAGER).reason == ""
    found = reasons(control("zero_stage", EAGER))
    assert found["0"] == ""
    assert "zero_stage=1 needs at least 2 workers (workers=1)" in found["1"]
    found = reasons(control("zero_stage", EAGER, workers=2))
    assert [found[stage] for stage in "01"] == ["", ""]
    assert control("workers", EAGER, workers=2).costs != ()


def test_an_engine_says_whether_it_trains_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper.Eager, "capabilities", Capabilities())
    with pytest.raises(ValueError, match="workers=2: engine 'eager' trains in one process"):
        registry.engine_for(EAGER.replace(workers=2))
    monkeypatch.setattr(stepper.Eager, "capabilities", Capabilities(workers=True))
    assert registry.refusal(EAGER.replace(workers=2)) is None
    refused = registry.refusal(EAGER.replace(workers=2, zero_stage=1))
    assert refused == "zero_stage=1: engine 'eager' supports 0; choose one of those"


@pytest.mark.parametrize("name", ["seed", "optimizer", "loss", "device"])
def test_a_run_keeps_what_it_began_with(name: str) -> None:
    kept = control(name, EAGER)
    assert f"a run keeps the {name}" in kept.reason
    assert kept.costs == ()
    assert "run keeps" not in control(name, EAGER, fixed=None).reason


def test_options_of_orts_graph_are_for_an_engine_that_has_one() -> None:
    needs_ort()
    for name in ("opset", "kernels", "self_check", "save_onnx"):
        found = control(name, EAGER)
        assert found.reason == (f"engine 'eager' has no ORT graph, which {name} configures")
        assert found.costs == ()
        assert not control(name, EAGER, engine="ortmodule").reason
    assert not control("precision", EAGER).reason
    assert not control("learning_rate", EAGER).reason


def test_a_combination_that_cannot_work_is_refused_by_its_engine() -> None:
    needs_ort()
    held = FinetuneSettings.of(engine="ortmodule")
    assert not any(reasons(control("kernels", held)).values())
    edited = reasons(control("kernels", held, precision="bf16"))
    assert edited["ort"].startswith("precision='bf16' needs torch's kernels")
    assert not edited["torch"]
    level = control("memory_level", held, precision="bf16")
    assert "recompute plans" in level.reason, "no value but the one that holds can be had"


def test_a_reason_against_all_that_is_chosen_is_not_held_against_each_setting() -> None:
    needs_ort()
    held = FinetuneSettings.of(engine="ortmodule", kernels="ort")
    chosen = held.replace(precision="bf16")
    assert settings_preview.refused(held, chosen, fixed=FIXED)
    found = {c.declaration.name: c for c in settings_preview.controls(held, chosen, fixed=FIXED)}
    assert found["learning_rate"].reason == found["opset"].reason == ""
    assert not reasons(found["precision"])["fp32"], "the way out"
    assert not reasons(found["kernels"])["torch"], "and the other one"


def test_two_settings_that_exclude_each_other_are_told_apart() -> None:
    held = EAGER.replace(memory_plans="plans.json")
    assert "choose one" in reasons(control("memory_level", held))["1"]


def test_batches_of_a_loaders_own_keep_their_size() -> None:
    own = fixed(data_loading.batches(DataLoader(examples()), EAGER))
    reason = "the DataLoader makes its own batches; pass the Dataset itself"
    assert control("batch_size", EAGER, fixed=own).reason.startswith(reason)
    assert not control("batch_size", EAGER).reason
    assert control("batch_size", EAGER).costs == ("free",)
    assert control("batch_size", EAGER.replace(engine="compile")).costs == ("recompile",)


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        (
            {
                "learning_rate": 1.0,
                "max_grad_norm": None,
                "gradient_accumulation_steps": 2,
                "batch_size": 3,
            },
            "free",
        ),
        ({"precision": "bf16"}, "rebuild"),
        ({"engine": "compile"}, "recompile"),
        ({"engine": "ortmodule"}, "re-export"),
        ({"engine": "ortmodule", "learning_rate": 1.0}, "re-export"),
    ],
)
def test_a_change_costs_what_its_engine_says(changes: dict[str, Any], cost: str) -> None:
    assert change_costs(EAGER, EAGER.replace(**changes)) == cost
    assert cost in settings_preview.COSTS


def test_the_engine_that_stays_goes_on_with_what_it_has() -> None:
    ort, compiled = FinetuneSettings.of(engine="ortmodule"), FinetuneSettings.of(engine="compile")
    assert change_costs(ort, ort.replace(self_check=False)) == "rebuild"
    assert change_costs(ort, ort.replace(opset=15)) == "re-export"
    assert change_costs(compiled, compiled.replace(cache=False)) == "rebuild"
    assert change_costs(compiled, compiled.replace(precision="bf16")) == "recompile"
    assert change_costs(compiled, compiled.replace(param_dtype="bf16")) == "recompile"


def test_how_gradients_of_16_bit_weights_add_up_is_another_stepper_s() -> None:
    halves = EAGER.replace(param_dtype="bf16")
    assert change_costs(EAGER, halves) == "rebuild"
    assert change_costs(EAGER, EAGER.replace(offload_optimizer=True)) == "rebuild"
    assert change_costs(halves, halves.replace(gradient_accumulation_steps=2)) == "rebuild"
    assert (
        change_costs(
            halves.replace(gradient_accumulation_steps=2),
            halves.replace(gradient_accumulation_steps=4),
        )
        == "free"
    )


def test_a_control_tells_the_cost_of_what_is_chosen_else_of_all_that_can_be() -> None:
    assert control("learning_rate", EAGER).costs == ("free",)
    assert set(control("engine", EAGER).costs) >= {"recompile"}
    assert control("engine", EAGER, engine="compile").costs == ("recompile",)
    assert control("learning_rate", EAGER, fixed=None).costs == (), (
        "before a run nothing is rebuilt"
    )


@pytest.mark.parametrize("declaration", FinetuneSettings.declarations().values())
def test_what_is_shown_can_be_typed(declaration: Declaration) -> None:
    values = [declaration.default, *declaration.choices[:1], *([None] * declaration.optional)]
    values += [1e-4, 0.1 + 0.2] if declaration.type is float else []
    for value in values:
        assert declaration.parse(declaration.show(value)) == value
