"""Recompute plans of engine ``ort``: what they say, and what the model then stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ortmodule.kernels.recomputed_graph import SUFFIX
from ortlab.engines.plan_names import UnknownPlan
from ortlab.graph.recompute_plans import RecomputePlans
from tests.support.called_models import bert

LAYERS = "bert.encoder.layer.*"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch._dynamo.reset()
    made, batch = bert()
    wrapped = ortlab.wrap(made, engine="ort", self_check=False)
    wrapped(**batch).loss.backward()
    return wrapped


@pytest.fixture(scope="module")
def plans(model: nn.Module) -> RecomputePlans:
    return ortlab.recompute_plans(model).measure(1)


def stored(model: nn.Module) -> int:
    """Return the bytes that the model's next forward pass stores."""
    record: Any = wrapped_model(model)
    model(**bert()[1]).loss.backward()
    return sum(graph.stored_bytes() for graph in record.last_graphs()["backward"])


def test_layers_their_parts_and_budgets_are_listed(plans: RecomputePlans) -> None:
    assert plans.names[:2] == (LAYERS, f"{LAYERS}.attention")
    assert plans.names[-2:] == ("budget 0.3", "budget 0.1")
    assert plans.layers == (LAYERS,)
    assert set(plans.dims) == {"batch", "seq"}
    here = plans.at(batch=8, seq=64)
    rows = {plan: here.savings(plan) for plan in plans.names}
    assert rows[LAYERS].occurrences == 2
    assert rows["budget 0.5"].occurrences == 0
    saved = [rows[f"budget {budget}"].after_forward_bytes for budget in (0.75, 0.5, 0.3, 0.1)]
    assert 0 < saved[0] < saved[1] < saved[2] < saved[3]
    costs = [rows[plan].cost_s for plan in (f"{LAYERS}.attention", LAYERS)]
    assert 0 < costs[0] < costs[1]
    assert "budget 0.5" in repr(plans)


def test_a_cost_leaves_out_what_torch_computes_again_without_a_plan(plans: RecomputePlans) -> None:
    assert any(node.name.endswith(SUFFIX) for node in plans.memory("off").stage.nodes)
    assert plans.savings("off").cost_s == 0


@pytest.mark.parametrize("plan", [LAYERS, "budget 0.3", f"{LAYERS}.attention,budget 0.5"])
def test_the_model_stores_what_the_plan_says(
    model: nn.Module, plans: RecomputePlans, plan: str
) -> None:
    plans.choose("off")
    before = stored(model)
    try:
        plans.choose(plan)
        assert plans.chosen == plan
        saved = before - stored(model)
    finally:
        plans.choose("off")
    assert saved > 0
    assert plans.savings(plan).after_forward_bytes == pytest.approx(saved, rel=0.15)


def test_the_plan_of_least_time_fits(plans: RecomputePlans) -> None:
    here = plans.at(batch=64, seq=64)
    peaks = {plan: here.memory(plan).peak_bytes() for plan in ("off", LAYERS)}
    assert peaks[LAYERS] < peaks["off"]
    assert here.least_time(peaks["off"]) == "off"
    chosen = here.least_time(peaks[LAYERS])
    assert here.memory(chosen).peak_bytes() <= peaks[LAYERS]
    with pytest.raises(ValueError, match="a step takes at least"):
        here.least_time(1000)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("budget 2", "activation_budget=2.0 must be at most 1"),
        ("budget much", "type a number, such as 'budget 0.5'"),
        ("budget 0.5,budget 0.3", "choose one budget"),
        ("bert.encoder.layr.*", "did you mean 'bert.encoder.layer"),
    ],
)
def test_plans_that_do_not_exist(plans: RecomputePlans, plan: str, said: str) -> None:
    with pytest.raises(UnknownPlan, match=said):
        plans.choose(plan)


def test_ort_s_subgraphs_are_of_the_other_engine(plans: RecomputePlans) -> None:
    with pytest.raises(ValueError, match=r"engine 'ort' has no .*; use activation_budget"):
        _ = plans.subgraphs


def test_a_model_that_was_never_called() -> None:
    wrapped = ortlab.wrap(bert()[0], engine="ort")
    with pytest.raises(ValueError, match="call it once, or give a batch"):
        ortlab.recompute_plans(wrapped)
