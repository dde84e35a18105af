"""The table of recompute plans: the savings and cost of each, and the choice among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import ortlab
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.plan_names import UnknownPlan
from ortlab.graph.recompute_plans import RecomputePlans
from ortlab.session import session
from tests.support import tiny
from tests.support.needed_engines import needs_kernels

BATCH = {
    "input_ids": torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([0, 1, 1, 0]),
}
LAYER = "bert.encoder.layer.*"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    needs_kernels()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return ortlab.wrap(tiny.bert(0.1, num_hidden_layers=4), kernels="torch").train()


@pytest.fixture
def plans(model: nn.Module) -> RecomputePlans:
    ortlab.recompute_plans(model, BATCH).choose("off")
    return ortlab.recompute_plans(model, BATCH)


def test_savings_are_the_difference_of_two_memory_plans(
    model: nn.Module, plans: RecomputePlans
) -> None:
    without = ortlab.memory_plan(model, BATCH).step_bytes(batch=32, seq=24)
    saving = plans.at(batch=32, seq=24).savings(LAYER)
    plans.choose(LAYER)
    model(**BATCH).loss.backward()
    with_it = ortlab.memory_plan(model).step_bytes(batch=32, seq=24)
    assert saving.peak_bytes == without - with_it
    assert 0.6 * without < saving.peak_bytes < without
    assert saving.after_forward_bytes > saving.peak_bytes
    assert saving.occurrences == 4
    assert saving.cost_s is None


def test_sizes(plans: RecomputePlans) -> None:
    assert plans.dims == {"batch": 4, "seq": 24}
    small, large = plans.at(batch=4), plans.at(batch=8)
    assert large.dims == {"batch": 8, "seq": 24}
    assert large.savings(LAYER).peak_bytes > 1.9 * small.savings(LAYER).peak_bytes
    with pytest.raises(ValueError, match="unknown size 'rows'"):
        plans.at(rows=3)


def test_the_cost_is_of_the_nodes_that_run_twice(model: nn.Module, plans: RecomputePlans) -> None:
    weights = [parameter.clone() for parameter in model.parameters()]
    plans.measure(steps=2)
    costs = {plan: plans.savings(plan).cost_s or math.nan for plan in plans.names}
    assert all(cost > 0 for cost in costs.values())
    inner = [f"{LAYER}.attention.self", f"{LAYER}.attention.output", f"{LAYER}.intermediate"]
    assert costs[LAYER] > sum(costs[plan] for plan in inner)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert plans.at(batch=8).savings(LAYER).cost_s == costs[LAYER]


def test_the_least_time_that_fits(plans: RecomputePlans) -> None:
    plans.measure(steps=2)
    large = plans.at(batch=256, seq=24)
    costs = {plan: large.savings(plan).cost_s or math.nan for plan in plans.names}
    peak = large.memory("off").peak_bytes()
    assert plans.least_time(peak, batch=256, seq=24) == "off"
    least = large.memory(LAYER).peak_bytes()
    assert plans.least_time(least, batch=256, seq=24) == LAYER
    between = (peak + least) // 2
    chosen = plans.least_time(between, batch=256, seq=24)
    assert large.memory(chosen).peak_bytes() <= between
    cost = large.savings(chosen).cost_s or math.nan
    cheaper = [plan for plan in costs if costs[plan] < cost]
    assert all(large.memory(plan).peak_bytes() > between for plan in cheaper)
    with pytest.raises(ValueError, match="take a smaller batch"):
        plans.least_time("1KiB")


def test_the_table(plans: RecomputePlans) -> None:
    plans.choose(f"{LAYER}.attention, {LAYER}.intermediate")
    text = repr(plans.table(batch=32))
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("x")}
    assert set(lines) == {f"{LAYER}.attention", f"{LAYER}.intermediate"}
    assert "MiB" in lines[f"{LAYER}.attention"]
    assert "for batch 32, seq 24" in text
    assert "not measured yet" in text
    plans.measure(steps=1)
    assert "ms (+" in repr(plans)
    assert "ms per step" in plans._repr_html_()


def test_choosing(model: nn.Module, plans: RecomputePlans) -> None:
    with pytest.raises(UnknownPlan, match="did you mean"):
        plans.choose(f"{LAYER}.atention")
    assert plans.chosen == "off"
    plans.choose("layers")
    assert plans.chosen == "layers"
    assert execution_of(model).settings.recompute == "layers"
    entry = session.wrapped.entry(model)
    assert entry is not None
    assert entry.settings.recompute == "layers"


def test_a_run_s_model_is_changed_by_the_run() -> None:
    data = Examples()
    model = ortlab.wrap(tiny.bert(0.0), kernels="torch")
    run = ortlab.finetune(model, data, batch_size=4, num_train_epochs=10_000, engine="ortmodule")
    while run.step < 2:
        assert not run.wait_over(0.01)
    ortlab.recompute_plans(model).choose("layers")
    while run.current_settings.model.recompute != "layers":
        assert not run.wait_over(0.01)
    run.stop()
    run.result()
    (change,) = run.recorder.events("change")
    assert "recompute=layers (was off)" in change.text
    assert change.values["cost_s"] < run.result().wall_s
    assert execution_of(model).settings.recompute == "off"  # as set when the model was wrapped


class Examples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: value[index % 4] for key, value in BATCH.items()}


def unrolled() -> Any:
    return ortlab.wrap(nn.Linear(3, 2)), (torch.ones(2, 3),)


def test_models_without_plans() -> None:
    model, batch = unrolled()
    with pytest.raises(ValueError, match="has no graph yet"):
        ortlab.recompute_plans(model)
    assert "no list of layers" in repr(ortlab.recompute_plans(model, batch).table())
    with pytest.raises(ValueError, match="has no ORT graphs; wrap it"):
        ortlab.recompute_plans(nn.Linear(2, 2))
    planned = tiny.bert()
    planned.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="which ORT's own plans for recompute replace"):
        ortlab.recompute_plans(ortlab.wrap(planned, kernels="ort").train(), BATCH)
