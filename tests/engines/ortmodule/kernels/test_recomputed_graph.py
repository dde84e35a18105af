"""Recompute in the backward pass: the same numbers in less memory, by editing the graph alone."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForMaskedLM, T5Config, T5ForConditionalGeneration

import ortlab
from ortlab.engines.ortmodule.compat import profiling
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.kernels.recomputed_graph import Plans
from ortlab.engines.plan_names import UnknownPlan
from tests.support import tiny
from tests.support.needed_engines import needs_kernels

IDS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "attention_mask": (IDS > 3).long()}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    needs_kernels()


class Blocks(nn.Module):
    """Blocks with running statistics, whose forward must not run twice."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.2), nn.Tanh()]
        self.blocks = nn.ModuleList(nn.Sequential(*parts) for _ in range(2))
        self.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x.square().mean()


def t5(dropout: float = 0.1) -> nn.Module:
    config = T5Config(
        vocab_size=50, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, use_cache=False,
        decoder_start_token_id=0, dropout_rate=dropout,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def albert() -> nn.Module:
    config = AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=16, num_hidden_layers=3,
        num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return AlbertForMaskedLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "bert": (lambda: tiny.bert(0.1), {**TEXT, "labels": torch.tensor([0, 1, 1])}),
    "gpt2": (lambda: tiny.gpt2(0.1), {**TEXT, "labels": IDS}),
    "t5": (t5, {**TEXT, "labels": IDS}),
    "albert": (albert, {**TEXT, "labels": IDS}),
    "blocks": (Blocks, {"x": torch.linspace(-1, 1, 48).view(8, 6)}),
}


def wrapped(model: nn.Module, **settings: Any) -> tuple[nn.Module, GraphDispatcher]:
    made = ortlab.wrap(model.train(), cache=False, **settings)
    return made, execution_of(made)


def trained(
    model: nn.Module, batch: dict[str, torch.Tensor], seed: int = 7
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, gradients and buffers of a step with this seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = model(**batch)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    loss.backward()
    values = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    values |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return loss.detach(), values


def assert_same(a: Any, b: Any) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    for name, value in a[1].items():
        assert torch.equal(value, b[1][name]), name


def choose(execution: GraphDispatcher, plan: str) -> None:
    execution.configure(execution.settings.replace(recompute=plan))


def again(model: nn.Module) -> list[str]:
    """Return the nodes of the session's graph that recompute something."""
    names = [node.name for node in ortlab.graphs(model).stages["execution"].nodes]
    return [name for name in names if name.endswith("_recompute")]


def peak_bytes(model: nn.Module, **sizes: int) -> int:
    return ortlab.memory_plan(model).step_bytes(**sizes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", ["torch", "ort"])
def test_loss_and_gradients_stay_bit_for_bit(name: str, kernels: str) -> None:
    """Numbers are identical with dropout, for later shapes, and after the plan is removed."""
    make, batch = MODELS[name]
    if (name, kernels) == ("t5", "ort"):
        # Without a plan ORT optimizes again and interleaves the order of encoder and decoder.
        make = functools.partial(t5, dropout=0.0)
    torch.manual_seed(0)
    model = make()
    start = {n: buffer.clone() for n, buffer in model.named_buffers()}
    wrapper, execution = wrapped(model, kernels=kernels)
    longer = {n: torch.cat([value, value]) for n, value in batch.items()}

    def results() -> list[Any]:
        found = []
        for given in (batch, longer, batch):
            for n, buffer in model.named_buffers():
                buffer.copy_(start[n])
            found.append(trained(wrapper, given))
        return found

    results()  # each shape is checked once
    without = results()
    exported = execution.report().export_s
    choose(execution, "layers")
    for a, b in zip(without, results(), strict=True):
        assert_same(a, b)
    assert again(wrapper)
    choose(execution, "off")
    for a, b in zip(without, results(), strict=True):
        assert_same(a, b)
    assert not again(wrapper)
    assert execution.report().export_s == exported


def test_every_plan_alone_and_two_together() -> None:
    make, batch = MODELS["bert"]
    wrapper, execution = wrapped(make(), kernels="torch")
    without = trained(wrapper, batch)
    graph = ortlab.graphs(wrapper).stages["execution"].model
    plans = list(Plans(graph).parts)
    assert plans == [
        "bert.encoder.layer.*",
        "bert.encoder.layer.*.attention",
        "bert.encoder.layer.*.attention.self",
        "bert.encoder.layer.*.attention.output",
        "bert.encoder.layer.*.intermediate",
        "bert.encoder.layer.*.output",
    ]
    counts = {}
    for plan in (*plans, f"{plans[2]}, {plans[4]}", f"{plans[0]},{plans[2]}"):
        choose(execution, plan)
        assert_same(without, trained(wrapper, batch))
        counts[plan] = len(again(wrapper))
    assert all(counts.values())
    assert counts[f"{plans[2]}, {plans[4]}"] == counts[plans[2]] + counts[plans[4]]
    assert counts[f"{plans[0]},{plans[2]}"] == counts[plans[0]]


def test_what_a_layer_gives_is_kept_and_running_statistics_move_once() -> None:
    make, batch = MODELS["blocks"]
    model = make()
    wrapper, _ = wrapped(model, kernels="torch", recompute="layers")
    trained(wrapper, batch)
    nodes = ortlab.graphs(wrapper).stages["execution"].nodes
    twins = {node.name.removesuffix("_recompute") for node in nodes} & set(again(wrapper))
    assert not twins
    ops = [node.op for node in nodes if node.name.endswith("_recompute")]
    assert ops
    assert not any("batch_norm" in op.lower() or "BatchNorm" in op for op in ops)
    assert [int(b) for n, b in model.named_buffers() if n.endswith("tracked")] == [1, 1]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("kernels", ["torch", "ort"])
def test_the_last_product_of_a_layer_does_not_run_again(name: str, kernels: str) -> None:
    """The replacement is small: the input of a norm and a dropout's mask are saved instead."""
    make, batch = MODELS[name]
    wrapper, execution = wrapped(make(), kernels=kernels)
    trained(wrapper, batch)
    choose(execution, "layers")
    trained(wrapper, batch)
    last = {"bert": "layer.0/output/dense", "gpt2": "h.0/mlp/c_proj"}[name]
    first = {"bert": "layer.0/intermediate/dense", "gpt2": "h.0/mlp/c_fc"}[name]
    names = again(wrapper)
    assert any(first in each for each in names)
    assert not [each for each in names if last in each and "Reshape" not in each]
    plans = Plans(execution.exports()[-1].graph_to_run())
    alone = {"bert": "bert.encoder.layer.*.output", "gpt2": "transformer.h.*.mlp"}[name]
    assert plans.check([alone]) == (alone,), "where nothing else is saved it may be chosen"


def test_the_plan_of_memory_sees_it() -> None:
    wrapper, execution = wrapped(tiny.bert(0.1, num_hidden_layers=6), kernels="torch")
    batch = MODELS["bert"][1]
    trained(wrapper, batch)
    sizes = {"batch": 16, "seq": 32}
    without = peak_bytes(wrapper, **sizes)
    assert not ortlab.memory_plan(wrapper).unsized
    choose(execution, "layers")
    trained(wrapper, batch)
    assert peak_bytes(wrapper, **sizes) < 0.45 * without
    assert not ortlab.memory_plan(wrapper).unsized
    choose(execution, "bert.encoder.layer.*.attention.self")
    trained(wrapper, batch)
    assert 0.45 * without < peak_bytes(wrapper, **sizes) < 0.9 * without


def test_nodes_run_in_the_order_that_the_memory_plan_counts_on(tmp_path: Path) -> None:
    """ORT's own profile shows the planned order; nodes that compute sizes may run at any time."""
    wrapper, execution = wrapped(tiny.gpt2(0.1), kernels="torch", recompute="layers")
    batch = MODELS["gpt2"][1]
    trained(wrapper, batch)
    (export,) = [each for each in execution.exports() if each.gradient]
    stage = ortlab.graphs(wrapper).stages["execution"]
    told = [node.name for node in stage.nodes if node.op not in ("Shape", "Size")]
    twin = export.profiled(tmp_path)
    arguments: dict[str, Any] = {**batch}
    twin.run((), arguments).loss.backward()
    ran = [kernel.node for each in profiling.finish(twin.manager) for kernel in each.kernels]
    position = {name: i for i, name in enumerate(ran)}
    order = [name for name in told if name in position]
    assert len(order) > 200
    assert sum(name.endswith("_recompute") for name in order) > 50
    assert [position[name] for name in order] == sorted(position[name] for name in order)


def test_bfloat16_products() -> None:
    make, batch = MODELS["gpt2"]
    wrapper, execution = wrapped(make(), kernels="torch", precision="bf16")
    trained(wrapper, batch)
    without = trained(wrapper, batch)
    choose(execution, "layers")
    assert_same(without, trained(wrapper, batch))
    assert again(wrapper)


def test_a_graph_from_the_cache() -> None:
    """The cached graph has no recompute plans: they are applied, or not, at each load."""
    make, batch = MODELS["bert"]
    torch.manual_seed(0)
    model = make()
    first = ortlab.wrap(model.train(), recompute="layers")
    trained(first, batch)
    without = trained(first, batch)
    ortlab.unwrap(first)
    for plan in ("off", "layers"):
        second = ortlab.wrap(model, recompute=plan)
        trained(second, batch)
        assert "graph from the cache" in str(execution_of(second).report().notes)
        assert_same(without, trained(second, batch))
        assert bool(again(second)) == (plan == "layers")
        ortlab.unwrap(second)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("bert.encoder.layer.*.atention", "did you mean 'bert.encoder.layer.*.attention'?"),
        ("layer", "did you mean 'layers'?"),
        ("Gelu+:1:-1", "did you mean 'BiasGelu+:1'?"),
    ],
)
def test_a_plan_that_fits_nothing(plan: str, said: str) -> None:
    make, batch = MODELS["bert"]
    wrapper, _ = wrapped(make(), recompute=plan)
    with pytest.raises(UnknownPlan, match=re.escape(said)):
        wrapper(**batch)


def test_a_plan_that_fits_nothing_leaves_the_one_before() -> None:
    make, batch = MODELS["bert"]
    wrapper, execution = wrapped(make(), recompute="layers")
    trained(wrapper, batch)
    choose(execution, "head")
    with pytest.raises(UnknownPlan, match=r"recompute='head': choose from layers, bert\.encoder"):
        wrapper(**batch)
    choose(execution, "layers")
    trained(wrapper, batch)
    assert again(wrapper)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute": "BiasGelu+:3:-1"}, "is not a valid plan, such as BiasGelu+:1:-1"),
        ({"recompute": "BiasGelu+:1:2"}, "is not a valid plan, such as BiasGelu+:1:-1"),
        ({"recompute": "layers,BiasGelu+:1:-1"}, "'layers' is not a plan of ORT's"),
        ({"recompute": "layers", "memory_level": 1}, "choose one"),
        ({"recompute": "BiasGelu+:1:-1", "precision": "bf16"}, "or choose modules"),
    ],
)
def test_what_is_refused_before_anything_runs(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ortlab.wrap(tiny.bert(), **settings)


def test_ort_s_own_plans_by_their_strings() -> None:
    make, batch = MODELS["bert"]
    wrapper, execution = wrapped(make(), recompute="BiasGelu+:1:-1")
    trained(wrapper, batch)
    stage = ortlab.graphs(wrapper).stages["execution"]
    assert sum(name.startswith("BiasGelu") for name in again(wrapper)) == 2
    ours = {op.rpartition(".")[2] for op in stage.ops if "ortlab_kernels" in op}
    assert ours == {"dropout", "dropout_backward"}
    choose(execution, "layers")
    trained(wrapper, batch)
    stage = ortlab.graphs(wrapper).stages["execution"]
    assert any(op.endswith("ortlab_kernels.cross_entropy") for op in stage.ops)


def test_where_the_session_does_not_tell_its_graph(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapper, _ = wrapped(tiny.bert(), recompute="layers", save_onnx=str(tmp_path / "net"))
        with pytest.raises(UnknownPlan, match="needs the graph that the session runs"):
            wrapper(**MODELS["bert"][1])
