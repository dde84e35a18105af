"""ORT's recomputable subgraphs: frequency, shapes and bytes, and plans that raise the peak."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils.data import Dataset

import ortlab
from ortlab.graph.subgraphs import Subgraphs
from ortlab.notebook.views.recompute_view import RecomputeView
from ortlab.utils.process_memory import raised
from tests.support import tiny
from tests.support.needed_engines import needs_kernels

BATCH = {
    "input_ids": torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([0, 1, 1, 0]),
}
GELU = "BiasGelu+:1:-1"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    needs_kernels()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    wrapped = ortlab.wrap(tiny.bert(0.1), engine="ortmodule", kernels="torch").train()
    wrapped(**BATCH).loss.backward()
    return wrapped


def test_the_table(model: nn.Module) -> None:
    before = ortlab.memory_plan(model).peak_bytes()
    found = ortlab.recompute_plans(model).subgraphs
    gelu = next(row for row in found if row.plan == GELU)
    assert gelu.operators == "BiasGelu+"
    assert gelu.options == "recompute"
    assert gelu.frequency == 2
    assert gelu.shapes == ("batch x seq x 64",)
    assert gelu.formula == "512*batch*seq"
    assert gelu.saved_bytes == 2 * 4 * 24 * 64 * 4
    assert not gelu.active
    # ORT's own kernels compute the attention, torch's and ortlab's those of the graph in use.
    softmax = next(row for row in found if row.plan == "FusedMatMul+Softmax+:1:-1")
    assert softmax.shapes == ("batch x 4 x seq x seq",)
    assert not [row for row in found if "Dropout" in row.plan]  # its copy draws another mask
    assert [row.saved_bytes for row in found] == sorted(
        (row.saved_bytes or 0 for row in found), reverse=True
    )
    assert "for batch 4, seq 24" in repr(found)
    assert "512*batch*seq" in found._repr_html_()
    assert ortlab.memory_plan(model).peak_bytes() == before, "the model keeps its own graph"


def test_sizes(model: nn.Module) -> None:
    found = ortlab.recompute_plans(model).at(batch=32, seq=100).subgraphs
    assert "for batch 32, seq 100" in repr(found)
    assert next(row for row in found if row.plan == GELU).saved_bytes == 512 * 32 * 100


def test_the_bytes_are_those_that_a_plan_does_not_store() -> None:
    """ORT's own sums have one result of each LayerNormalization, and here that of another node."""
    text = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    wrapped = ortlab.wrap(tiny.gpt2(), engine="ortmodule", kernels="ort").train()
    wrapped(input_ids=text, labels=text).loss.backward()
    plans = ortlab.recompute_plans(wrapped)
    rows = {row.plan: row for row in plans.subgraphs}
    both = rows["LayerNormalization+:1:-1,Reshape+:1:-1"]
    assert both.formula == "680*batch*seq"
    assert "batch*seq x 32" in both.shapes
    for plan in (both.plan, "LayerNormalization+:1:-1", "FastGelu+Reshape+:1:-1"):
        saved = plans.savings(plan).after_forward_bytes
        # One of five norms is the first operator of the backward pass, which needs its results.
        assert 0.79 * (rows[plan].saved_bytes or 0) < saved <= (rows[plan].saved_bytes or 0)


def test_a_plan_that_raises_the_peak_says_so() -> None:
    wrapped = ortlab.wrap(tiny.bert(0.1), engine="ortmodule", kernels="torch").train()
    plans = ortlab.recompute_plans(wrapped, BATCH)
    before = ortlab.memory_plan(wrapped).peak_bytes()
    with pytest.warns(UserWarning, match=r"'BiasGelu\+:1:-1' raises the peak by [\d.]+ KiB \("):
        plans.choose(GELU)
    wrapped(**BATCH).loss.backward()
    after = ortlab.memory_plan(wrapped).peak_bytes()
    assert after > before
    now = ortlab.recompute_plans(wrapped)
    assert now.savings(GELU).peak_bytes == before - after
    raised = f"raises the peak by {(after - before) / 1024:.1f} KiB ("
    assert now.raises(GELU).startswith(raised)
    assert f"active: {GELU}, which {raised}" in repr(now)
    assert f"active: {GELU}, which {raised}" in repr(now.subgraphs)
    assert [row.plan for row in now.subgraphs if row.active] == [GELU]
    assert now.raises("layers") == ""
    assert any("%ort recompute compares the peaks" in note for note in ortlab.models().notes)
    with pytest.raises(ValueError, match="choose off first"):
        now.measure()
    view = RecomputeView(now)
    saved = raised.removeprefix("raises the peak by ").removesuffix(" (")
    assert view._apply.description == f"Recompute nothing: saves {saved} (predicted)"
    view._apply_ticks()
    assert ortlab.recompute_plans(wrapped, BATCH).chosen == "off"
    view.close()


class Examples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: value[index % 4] for key, value in BATCH.items()}


def test_a_run_whose_plan_raises_the_peak_says_so() -> None:
    data: Any = Examples()
    settings: dict[str, Any] = {"engine": "ortmodule", "kernels": "torch", "batch_size": 4}
    run = ortlab.finetune(tiny.bert(0.1), data, num_train_epochs=10_000, **settings)
    while run.step < 2:
        assert not run.wait_over(0.01)
    for plan in ("layers", GELU):
        run.apply(recompute=plan)
        while run.current_settings.model.recompute != plan:
            assert not run.wait_over(0.01)
    run.stop()
    run.result()
    told = [event.text for event in run.recorder.events("warning") if "peak" in event.text]
    assert len(told) == 1, told  # layers do not raise it
    assert re.match(rf"recompute={re.escape(GELU)} raises the peak by [\d.]+ [KM]iB \(", told[0])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("BiasGelu:1:-1", r"did you mean 'BiasGelu\+:1:-1'"),
        (f"{GELU},{GELU}", r"names the subgraph BiasGelu\+ twice"),
        (f"{GELU},layers", "'layers' is not a plan of ORT's"),
    ],
)
def test_plans_that_cannot_be_chosen(model: nn.Module, plan: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ortlab.recompute_plans(model).choose(plan)


def test_levels_are_replaced_by_other_plans() -> None:
    wrapped = ortlab.wrap(tiny.bert(), engine="ortmodule", memory_level=1).train()
    wrapped(**BATCH).loss.backward()
    plans = ortlab.recompute_plans(wrapped)
    assert GELU in plans.chosen
    assert next(row for row in plans.subgraphs if row.plan == GELU).active
    plans.choose("layers")
    wrapped(**BATCH).loss.backward()
    assert ortlab.recompute_plans(wrapped).chosen == "layers"


def test_half_precision_has_no_kernels_of_ort_s() -> None:
    wrapped = ortlab.wrap(tiny.bert(), engine="ortmodule", precision="bf16").train()
    with pytest.raises(ValueError, match="precision='bf16' does not work with ORT's own plans"):
        _ = ortlab.recompute_plans(wrapped, BATCH).subgraphs


def test_a_compromise_saves_a_part() -> None:
    """The text is that of ORT's docs/Memory_Optimizer.md; graphs in fp32 on a CPU have none."""
    results = """
|6      |For each row options are mutually exclusive, only one of them can be enabled. |
|       |>>Option 1     : Recompute subgraph Sub+Mul+Cast+                            |
|       |  Stashed Activations:                                                       |
|       |   - Output 0  : [((ids_dim0)*(1)*((ids_dim1 - 1)))], byte/elem: 4, 100% saved |
|       |>>Option 2     : RecomputeWithCompromise subgraph Cast+                      |
|       |   - Output 0  : [((ids_dim0)*(1)*((ids_dim1 - 1)))], byte/elem: 4, 50% saved |
"""
    summary = SimpleNamespace(freq=6, simplified_symbolic_saving_expr=sympy.Integer(0))
    plans = {"Sub+Mul+Cast+:1:-1": summary, "Cast+:2:-1": summary}
    sizes = {"ids_dim0": ("batch", 2), "ids_dim1": ("seq", 5)}
    whole, part = Subgraphs(plans, results, active=["Cast+:2:-1"], sizes=sizes)
    assert whole.shapes == part.shapes == ("batch x 1 x (seq - 1)",)
    assert whole.saved_bytes == 6 * 2 * 4 * 4
    assert part.saved_bytes == 6 * 2 * 4 * 2
    assert (part.options, part.active, whole.active) == ("recompute with compromise", True, False)
    unknown = Subgraphs(plans, results, active=(), sizes={"ids_dim0": ("batch", None)})
    assert unknown[0].saved_bytes is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (1938, 1996, "raises the peak by 5.8 MiB (193.8 MiB to 199.6 MiB)"),
        (19380, 19381, ""),  # rounding
        (1938, 1900, ""),
    ],
)
def test_how_much_the_peak_is_raised(before: int, after: int, said: str) -> None:
    assert raised(before * 2**20 // 10, after * 2**20 // 10) == said
