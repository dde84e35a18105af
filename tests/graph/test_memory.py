"""The predicted memory of a step, checked against a hand-counted graph and measured memory."""

from __future__ import annotations

import base64
import gc
import re
import weakref
import xml.etree.ElementTree as ElementTree
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ortmodule import compat
from ortlab.graph import timeline
from ortlab.graph.capture import Node, Sessions, Stage
from ortlab.graph.captured import CapturedStage
from ortlab.graph.lifetimes import KINDS, Tensor, lifetimes
from ortlab.graph.memory import GROWTH, MemoryPlan
from ortlab.utils.process_memory import memory, parse_bytes
from tests.bench import memory as bench

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))

of_each_engine = pytest.mark.parametrize(
    "engine", ["ort", pytest.param("ortmodule", marks=needs_ort)]
)

ROOT = "_original_module"


def _by_hand() -> Stage:
    """Return two layers with a view between, forward and backward, with rows named x_dim0."""
    node = helper.make_node
    nodes = [
        node("Relu", ["x"], ["a"], "/_original_module/first/Relu"),  # 0
        node("Reshape", ["a", "s"], ["v"], "view"),  # 1
        node("MatMul", ["v", f"{ROOT}.second.w"], ["b"], "/_original_module/second/MatMul"),  # 2
        node("YieldOp", ["b"], ["b_grad"], "yield", domain="com.microsoft"),  # 3
        node("LayerNormalizationGrad", ["b_grad", "v"], ["c"], "norm", domain="com.microsoft"),  # 4
        node("MatMul", ["c", "v"], [f"{ROOT}.second.w_grad"], "w_grad"),  # 5
        node("Relu", ["c"], ["d"], "last"),  # 6
    ]

    def value(name: str, *sizes: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)

    graph = helper.make_graph(
        nodes,
        "by hand",
        [value("x", "x_dim0", 4), value(f"{ROOT}.second.w", 4, 4), value("s", 2)],
        [value(f"{ROOT}.second.w_grad", 4, 4)],
        value_info=[
            value("a", "x_dim0", 4),
            value("v", "x_dim0", 2, 2),
            value("b", "x_dim0", 4),
            value("c", "x_dim0", 4),
            value("d", "x_dim0", 4),
        ],
    )
    stage = Stage(
        "execution", helper.make_model(graph), frozenset({"", "first", "second"}), {"second.w"}
    )
    return stage


def test_a_graph_counted_by_hand() -> None:
    """Rows take 16 bytes: a stays alive for its view, b for the caller of the model."""
    rows = 10
    always = 64 + 2 * 64 + 16 * rows + 8  # w, its two moments, x and s
    row = 16 * rows
    a, b, b_grad, c, d, work, w_grad = row, row, row, row, row, 4 * row, 64
    expected = [
        a,
        a,
        a + b,
        a + b,
        a + b + b_grad + c + work,
        a + b + c + w_grad,
        b + c + d + w_grad,
        b + w_grad,  # the optimizer's step
    ]
    plan = MemoryPlan(_by_hand(), {})
    assert plan.curve(batch=rows).tolist() == [always + each for each in expected]
    assert plan.peak_bytes(batch=rows) == always + a + b + b_grad + c + work
    assert plan.step_bytes(batch=rows) == a + b + b_grad + c + work
    beside = row + 8 + a + b + b_grad + c + work  # with x and s
    assert plan.activation_bytes(batch=rows) == beside
    node = plan.peak_node(batch=rows)
    assert node is not None
    assert node.name == "norm"
    assert not plan.unsized
    late = plan.stage.parameter_gradients["second.w"]
    (gradient,) = (tensor for tensor in plan.tensors if tensor.name == late)
    assert gradient.kind == "gradient"
    without = MemoryPlan(_by_hand(), {}, optimizer="sgd")
    assert without.idle_bytes(batch=rows) == always - 64  # a single moment


def test_what_forward_leaves_counted_by_hand() -> None:
    """Tensors that the backward pass reads are saved, those that it computes again are not."""
    node = helper.make_node
    nodes = [
        node("Relu", ["x"], ["a"], "relu"),
        node("Exp", ["a"], ["b"], "exp"),
        node("YieldOp", ["b"], ["b_grad"], "yield", domain="com.microsoft"),
        node("Tanh", ["a"], ["t"], "tanh_recompute"),
        node("Mul", ["b_grad", "t"], ["x_grad"], "mul"),
    ]

    def value(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["x_dim0", 4])

    graph = helper.make_graph(
        nodes, "by hand", [value("x")], [value("x_grad")], value_info=[*map(value, "abt")]
    )
    plan = MemoryPlan(Stage("execution", helper.make_model(graph), frozenset({""}), set()), {})
    saved = plan.saved(batch=10)
    assert [(held.tensor.name, held.size_bytes) for held in saved] == [("a", 160), ("b", 160)]


def test_buffers_of_sessions_counted_by_hand() -> None:
    """Two sessions with an operator in torch between, of rows that all take 4 bytes."""
    rows = [
        (0, "Transpose", ["x"], ["a"]),
        (0, "Relu", ["a"], ["b"]),  # in place
        (0, "Exp", ["b"], ["c"]),
        (0, "Neg", ["c"], ["d"]),  # in the buffer of a, which is free since c is there
        (0, "Add", ["d", "d"], ["e"]),  # leaves the session
        (None, "torch.erfcx", ["e"], ["f"]),
        (1, "Neg", ["f"], ["g"]),
        (1, "Exp", ["g"], ["h"]),
        (1, "Neg", ["h"], ["y"]),
    ]
    ends = {0: 4, 1: 8, None: None}
    made = [
        helper.make_node(op.split(".")[-1], i, o, f"n{n}") for n, (_, op, i, o) in enumerate(rows)
    ]
    names = ("x", *(node.output[0] for node in made))
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names}
    graph = helper.make_graph(
        made, "by hand", [values["x"]], [values["y"]], value_info=list(values.values())[1:-1]
    )
    nodes = [
        Node(f"n{n}", op, tuple(i), tuple(o), "forward" if n < 6 else "backward", "", None)
        for n, (_, op, i, o) in enumerate(rows)
    ]
    sessions = Sessions([ends[session] for session, *_ in rows], {})
    stage = CapturedStage("execution", helper.make_model(graph), nodes, {}, {}, sessions)
    found = {each.name: (each.born, each.dies) for each in lifetimes(stage, "adamw")}
    assert found == {
        "x": (0, 9),
        "a": (0, 4),  # Relu's result and d are in it
        "c": (2, 3),
        "e": (4, 5),
        "f": (5, 8),  # what a session is given stays until it ends
        "g": (6, 7),
        "h": (7, 8),
        "y": (8, 9),
    }


def test_what_goes_to_torch_is_a_copy() -> None:
    """Outputs to torch are copies: ORT's planner shares no storage with the yield.

    Source: allocation_planner.cc.
    """
    stage = _by_hand()
    nodes = stage.model.graph.node
    nodes[3].input[0] = "out"
    nodes.insert(3, helper.make_node("Identity", ["b"], ["out"], "copy"))
    stage.model.graph.value_info.append(
        helper.make_tensor_value_info("out", TensorProto.FLOAT, ["x_dim0", 4])
    )
    row = 160
    plan = MemoryPlan(stage, {"x_dim0": 10})
    above = plan.curve() - plan.idle_bytes()
    assert above[2:5].tolist() == [2 * row, 3 * row, 2 * row]  # a and b, out too, then without b
    assert above[-1] == row + 64  # out, and the gradient of w


def test_what_is_there_at_the_peak() -> None:
    plan = MemoryPlan(_by_hand(), {"x_dim0": 100})
    held = plan.at_peak()
    assert sum(each.size_bytes for each in held) == plan.peak_bytes()
    assert [each.size_bytes for each in held] == sorted((e.size_bytes for e in held), reverse=True)
    kinds = {each.tensor.name: each.tensor.kind for each in held}
    assert kinds["norm"] == "workspace"
    assert kinds["a"] == "activation"
    assert kinds["c"] == "gradient"
    assert kinds["second.w"] in ("parameter", "optimizer state")
    modules = {each.tensor.name: each.tensor.module for each in held}
    assert modules["a"] == "first"
    assert modules["b"] == modules["second.w"] == "second"
    text = repr(plan)
    assert "batch 100" in text
    assert "workspace" in text


def test_the_largest_batch() -> None:
    plan = MemoryPlan(_by_hand(), {})
    most = plan.max_batch("1MiB")
    assert plan.process_bytes(batch=most) <= 2**20 < plan.process_bytes(batch=most + 1)
    assert plan.process_bytes(batch=8) == int(
        plan.idle_bytes(batch=8) + GROWTH * plan.step_bytes(batch=8)
    )
    with pytest.raises(ValueError, match=r"batch 1 takes .* more than"):
        plan.max_batch(64)
    with pytest.raises(ValueError, match="dim='seq': choose from batch"):
        plan.max_batch("1MiB", dim="seq")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "missing sizes: batch; pass them as keyword arguments"),
        ({"batsh": 2}, "did you mean 'batch'"),
        ({"batch": 0}, "positive integer"),
        ({"batch": 1.5}, "positive integer"),
        ({"batch": True}, "positive integer"),
    ],
)
def test_sizes_that_are_none(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MemoryPlan(_by_hand(), {}).peak_bytes(**sizes)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("2KiB", 2048), ("1.5 GB", 1_500_000_000), ("16gib", 16 * 2**30)],
)
def test_sizes_of_memory(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "GiB", "0", 0, -1, "-1GiB", "1 PB", True, "1e9"])
def test_sizes_of_memory_that_are_none(text: int | str) -> None:
    with pytest.raises(ValueError, match="not a memory size"):
        parse_bytes(text)


def test_memory_reads_as_people_write_it() -> None:
    assert memory(2**30) == "1.00 GiB"
    assert memory(3 * 2**19) == "1.5 MiB"
    assert memory(2**9) == "0.5 KiB"


def test_an_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        MemoryPlan(_by_hand(), {}, optimizer="adam")


def test_the_picture_has_every_tensor_by_name() -> None:
    """Names from the model appear as text in the picture, never as markup."""
    stage = _by_hand()
    evil = "</title><script>alert(1)</script>"
    for node in stage.model.graph.node:
        for names in (node.input, node.output):
            names[:] = [evil if name == "a" else name for name in names]
    for value in stage.model.graph.value_info:
        value.name = evil if value.name == "a" else value.name
    plan = MemoryPlan(stage, {"x_dim0": 1000})
    root = ElementTree.fromstring(plan.picture())
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    for name in (evil, "b", "c", "norm"):
        assert any(title.startswith(f"{name}\n") for title in titles), titles
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert f"step memory {memory(plan.peak_bytes())}" in titles[0]
    page = plan._repr_html_()
    assert "<svg" not in page, "a page that shows no svg would show its titles as text"
    pictures = {base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", page)}
    assert pictures == {plan.picture()}


def test_the_picture_goes_from_the_first_node_to_the_last() -> None:
    """With more nodes than columns too, each column is as wide as the nodes it shows."""
    length = 2 * timeline.COLUMNS + 7
    always = timeline.Area("w", "parameter", "", 0, length - 1, 2**20)
    most = timeline.Area("t", "activation", "", length - 2, length - 2, 2**20)
    picture = timeline.svg([always, most], length=length, phases=[], kinds=KINDS)
    across = [
        [float(x) for x in re.findall(r"[ML](\S+)", path.get("d", ""))]
        for path in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}path")
    ]
    right = timeline.WIDTH - timeline.RIGHT
    assert (min(across[0]), max(across[0])) == (timeline.LEFT, right)
    assert max(across[1]) == right


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("/_original_module/fc/layer.0/MatMul_output_0", "MatMul_output_0"),
        ("_original_module.fc.weight_grad", "weight_grad"),
        ("fc.weight", "weight"),
        ("fc2.weight", "fc2.weight"),
        ("a/b", "a/b"),
    ],
)
def test_a_tensor_is_called_without_its_scope(name: str, label: str) -> None:
    assert Tensor(name, "activation", "fc", "node", 0, 0, name).label == label


def test_figures_for_a_view() -> None:
    stage = _by_hand()
    overlay = MemoryPlan(stage, {"x_dim0": 10}).overlay(stage)
    assert (overlay.name, overlay.unit) == ("memory", "bytes")
    assert overlay.values["/_original_module/first/Relu"] == 160
    assert "view" not in overlay.values
    assert overlay.values["norm"] == 160 + 4 * 160  # includes the kernel's own workspace


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@of_each_engine
def test_a_model_that_was_never_called(engine: str) -> None:
    model = ortlab.wrap(_Net(), engine=engine)
    with pytest.raises(ValueError, match=r"give a batch for forward\(x\)"):
        ortlab.memory_plan(model)
    plan = ortlab.memory_plan(model, torch.randn(5, 6))
    assert plan.dims == {"batch": 5}
    assert plan.peak_bytes() == plan.peak_bytes(batch=5) < plan.peak_bytes(batch=50)
    assert all(p.grad is None for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert plan.idle_bytes() == 3 * 4 * count + 5 * 6 * 4
    assert plan.at(batch=50).peak_bytes() == plan.peak_bytes(batch=50)


@of_each_engine
def test_a_plan_does_not_keep_the_one_before(engine: str) -> None:
    model = ortlab.wrap(_Net(), engine=engine)
    for rows in (4, 5):
        model(torch.randn(rows, 6)).sum().backward()
    first = weakref.ref(ortlab.memory_plan(model))
    ortlab.graphs(model)
    second = ortlab.memory_plan(model)
    gc.collect()
    assert first() is None
    (shown,) = ortlab.graphs(model).overlays(second.stage.name)
    assert shown.values == second.overlay(second.stage).values


@of_each_engine
def test_a_decoder_has_two_lengths(engine: str) -> None:
    config = T5Config(
        vocab_size=50, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = ortlab.wrap(T5ForConditionalGeneration(config), engine=engine, cache=False)
    batch = {
        "input_ids": torch.ones(2, 7, dtype=torch.long),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "labels": torch.ones(2, 5, dtype=torch.long),
    }
    plan = ortlab.memory_plan(model, batch)
    assert plan.dims == {"batch": 2, "source": 7, "target": 5}
    assert plan.peak_bytes(target=500) > plan.peak_bytes()
    assert plan.peak_bytes(source=700) > plan.peak_bytes()


@of_each_engine
def test_a_step_takes_what_was_predicted(engine: str) -> None:
    """The prediction agrees with a step measured in its own process."""
    predicted, measured = bench.predicted_and_measured(bench.CASES[1], engine)
    assert measured > 200e6
    assert predicted == pytest.approx(measured, rel=bench.BAR)


def test_what_a_convolution_lays_out_anew_is_at_the_peak() -> None:
    """In its backward pass, the gradient of its result and its input, each once more."""
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 32, 3, padding=1))
    model = ortlab.wrap(net, engine="ort", self_check=False)
    x = torch.randn(16, 8, 32, 32)
    model(x).sum().backward()
    held = ortlab.memory_plan(model, x).at_peak()
    found = sorted(each.size_bytes for each in held if each.tensor.kind == "workspace")
    assert found == [x.nbytes, 4 * x.nbytes]


def test_a_batch_of_one_predicts_others() -> None:
    model = ortlab.wrap(_Net(), engine="ort", self_check=False)
    plan = ortlab.memory_plan(model, torch.randn(1, 6))
    assert plan.dims == {"batch": 1}
    assert plan.peak_bytes(batch=50) == ortlab.memory_plan(model, torch.randn(50, 6)).peak_bytes()


def test_graphs_for_any_size_are_not_captured_again() -> None:
    model = ortlab.wrap(_Net(), engine="ort", self_check=False)
    for rows in (3, 5):
        model(torch.randn(rows, 6)).sum().backward()
    record: Any = wrapped_model(model)
    plan = ortlab.memory_plan(model)
    assert plan.dims == {"batch": 5}
    assert record.twin is None


@pytest.mark.nightly
@needs_ort
@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: f"{case.kind}-{case.width}")
def test_every_step_takes_what_was_predicted(case: bench.Case) -> None:
    predicted, measured = bench.predicted_and_measured(case)
    assert measured > 200e6
    bar = bench.BAR_PLANNED if case.plans else bench.BAR
    assert predicted == pytest.approx(measured, rel=bar)


@pytest.mark.nightly
@needs_ort
@pytest.mark.parametrize("number", range(bench.TRIES))
def test_the_largest_batch_keeps_to_its_budget(number: int) -> None:
    budget, taken = bench.at_the_limit(number)
    assert bench.keeps_to(budget, taken), f"{taken:,.0f} of {budget:,.0f} bytes"
