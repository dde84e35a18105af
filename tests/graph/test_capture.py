"""Data read from ORT's graphs, checked against the model itself and onnx's own counts."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from transformers.models.bert import modeling_bert

import ortlab
from ortlab.engines.ortmodule import compat, graph_cache, kernels
from ortlab.graph import STAGES, capture
from ortlab.graph.capture import Graphs, Stage
from tests.support.called_models import BATCH, TOKENS, bert, called, gpt2

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return ortlab.graphs(called(*bert(), cache=False))


def test_every_stage_is_there_and_shown(graphs: Graphs) -> None:
    assert list(graphs.stages) == list(STAGES)
    for name in STAGES:
        assert getattr(graphs, name) is graphs.stages[name]
        assert name in repr(graphs)
        assert name in graphs._repr_html_()


def test_nodes_are_those_of_the_graph(graphs: Graphs) -> None:
    for stage in graphs.stages.values():
        assert [node.name for node in stage.nodes] == [n.name for n in stage.model.graph.node]
        assert sum(stage.ops.values()) == len(stage.model.graph.node)
    assert all(node.phase == "forward" for node in graphs.forward.nodes)
    split = [node.phase for node in graphs.gradient.nodes]
    assert split == sorted(split, reverse=True), "forward, then backward"
    assert graphs.gradient.nodes[split.index("backward") - 1].op == "com.microsoft.YieldOp"


@pytest.mark.parametrize("make", [bert, gpt2])
def test_forward_and_gradient_are_linked(make: Any) -> None:
    """A forward node is on a gradient path if one of its floating-point results has a gradient."""
    model, batch = make()
    stage = ortlab.graphs(called(model, batch)).gradient
    results = {output for node in stage.nodes for output in node.outputs}
    on_path = [
        node
        for node in stage.nodes
        if node.phase == "forward" and any(f"{name}_grad" in results for name in node.outputs)
    ]
    linked = [node for node in on_path if node.name in stage.gradients]
    assert len(on_path) > 50
    assert len(linked) >= 0.95 * len(on_path)
    forward = {node.name for node in stage.nodes if node.phase == "forward"}
    assert set(stage.gradients) <= forward
    assert set(stage.parameter_gradients) == {name for name, _ in model.named_parameters()}


def test_nodes_know_their_module(graphs: Graphs) -> None:
    modules = dict(bert()[0].named_modules())
    known = [node.module for node in graphs.gradient.nodes if node.module]
    assert set(known) <= set(modules)
    assert len(known) > 0.9 * len(graphs.gradient.nodes)
    count = Counter(known)
    assert (
        count["bert.encoder.layer.0.attention.self"] == count["bert.encoder.layer.1.attention.self"]
    )
    (gelu,) = (n for n in graphs.forward.nodes if n.op.endswith("BiasGelu") and "0" in n.module)
    assert gelu.module == "bert.encoder.layer.0.intermediate.intermediate_act_fn"
    for node in graphs.gradient.gradients[gelu.name]:  # ORT names them without a module
        assert node.module.startswith("bert.encoder.layer.0.intermediate.")


def test_a_module_that_is_called_again_has_the_nodes_of_every_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            self.block_1 = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block_1(self.block(self.block(x)))

    wrapped = ortlab.wrap(Twice(), engine="ortmodule", cache=False)
    wrapped(torch.randn(2, 3)).sum().backward()
    count = Counter(node.module for node in ortlab.graphs(wrapped).exported.nodes)
    assert (count["block.0"], count["block.1"], count["block_1"]) == (2, 2, 1)


def test_modules_in_containers_that_are_not_called() -> None:
    """The exporter omits containers from names; an ambiguous name is assigned to no module."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"fc": nn.Linear(4, 4), "act": nn.Sequential(nn.Tanh())})

        def forward(self, x: torch.Tensor) -> Any:
            return x - self.mlp["act"](self.mlp["fc"](x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = nn.ModuleList(Block() for _ in range(11))
            self.body = nn.ModuleDict({"h": blocks, "norm": nn.LayerNorm(4)})
            self.left = nn.ModuleDict({"head": nn.Linear(4, 2)})
            self.right = nn.ModuleDict({"head": nn.Linear(4, 2)})

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.body["h"]:  # type: ignore[union-attr]
                x = block(x)
            x = self.body["norm"](x)
            return (self.left["head"](x) + self.right["head"](x)).sum()

    model = ortlab.wrap(Net(), engine="ortmodule")
    model(torch.ones(2, 4)).backward()
    found = ortlab.graphs(model)
    for stage in (found.exported, found.gradient):
        of = {op: {n.module for n in stage.nodes if n.op == op} for op in stage.ops}
        assert of["Tanh"] == {f"body.h.{i}.mlp.act.0" for i in range(11)}
        assert of["Sub"] == {f"body.h.{i}" for i in range(11)}
        assert of["LayerNormalization"] == {"body.norm"}
        heads = [n.module for n in stage.nodes if n.op == "Gemm" and "/head/" in n.name]
        assert set(heads) == {""}


def test_bytes_are_those_of_the_model(graphs: Graphs) -> None:
    model, _ = bert()
    read = [p for name, p in model.named_parameters()]
    assert graphs.gradient.parameter_bytes >= sum(4 * p.numel() for p in read)
    linear = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    wrapped = ortlab.wrap(linear, engine="ortmodule", cache=False)
    wrapped(torch.randn(2, 3)).sum().backward()
    stage = ortlab.graphs(wrapped).forward
    assert stage.parameter_bytes == 4 * (3 * 5 + 5)
    batch, width = stage.dims
    # The product, ReLU's result, and the same result under the output's name.
    assert stage.activation_bytes(**{batch: 7, width: 3}) == 3 * 4 * 5 * 7
    assert not stage.unsized
    with pytest.raises(ValueError, match=f"missing sizes: {width}; pass"):
        stage.activation_bytes(**{batch: 7})
    assert [node.module for node in stage.nodes] == ["0", "1", ""]


def test_sizes_are_those_of_the_last_call_in_training() -> None:
    net, batch = bert()
    wrapped = called(net, batch, cache=False)
    assert sorted(ortlab.graphs(wrapped).sizes.values()) == [BATCH, BATCH, TOKENS]
    ids, labels = torch.ones(3, 5, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    wrapped.train()(input_ids=ids, labels=labels).loss.backward()
    graphs = ortlab.graphs(wrapped)
    assert set(graphs.sizes) == set(graphs.gradient.dims)
    assert sorted(graphs.sizes.values()) == [3, 3, 5]


def test_sizes_are_read_without_eval() -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", "m"])
    sizes = ["floor(n/2 + 1/2)", "Max(2, n)*m", "__import__('os').getpid()", "no-word", 3]
    values = [
        onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, [size])
        for i, size in enumerate(sizes)
    ]
    nodes = [onnx.helper.make_node("Foo", ["x"], [f"y{i}"]) for i in range(len(sizes))]
    graph = onnx.helper.make_graph(nodes, "graph", [x], [], value_info=values)
    stage = Stage("exported", onnx.helper.make_model(graph))
    assert stage.dims == ("n", "m")
    assert stage.unsized == ("y2", "y3")
    assert stage.activation_bytes(n=5, m=4) == 4 * (3 + 20 + 3)


def test_a_graph_from_the_cache_has_the_same_stages() -> None:
    graph_cache.clear()
    found = []
    for _ in range(2):
        wrapped = called(*bert())
        found.append({name: stage.ops for name, stage in ortlab.graphs(wrapped).stages.items()})
    notes = wrapped.__dict__["_ortlab"].report().notes
    assert any("graph from the cache" in note for note in notes)
    for name in ("forward", "gradient", "execution", "eval"):
        assert found[0][name] == found[1][name], name


def test_what_became_of_the_operators(graphs: Graphs) -> None:
    rows = {op: (before, after) for op, before, after in graphs.diff("exported", "forward")}
    assert rows["Erf"] == (2, 0)
    assert rows["com.microsoft.BiasGelu"] == (0, 2)
    assert all(before != after for before, after in rows.values())
    assert not graphs.diff("forward", "forward")
    assert "same operators" in repr(graphs.diff("forward", "forward"))


@pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
def test_kernels_that_take_the_place_of_orts_are_named() -> None:
    wrapped = called(*bert(), kernels="torch", cache=False)
    stage = ortlab.graphs(wrapped).execution
    ours = {op.rpartition(".")[2] for op in stage.ops if "ortlab_kernels." in op}
    assert ours >= {"linear", "bias_gelu", "bias_gelu_backward"}
    assert "ortlab_kernels.bias_gelu" in repr(stage)


def test_what_is_not_there_is_explained() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has no ORT graphs; wrap it"):
        ortlab.graphs(net)
    wrapped = ortlab.wrap(net, engine="ortmodule")
    with pytest.raises(ValueError, match="Linear has no graph yet; call it once"):
        ortlab.graphs(wrapped)
    wrapped(torch.randn(2, 2))
    found = ortlab.graphs(wrapped)
    with pytest.raises(ValueError, match=r"no eval graph: call .* after model\.eval\(\)"):
        found.eval  # noqa: B018
    assert "no eval" in repr(found)
    with pytest.raises(ValueError, match="did you mean 'gradient'"):
        found.stage("gradiant")


def test_a_model_that_fell_back_has_no_graph() -> None:
    class Complex(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(super().forward(x)).abs()

    wrapped = ortlab.wrap(Complex(2, 2), engine="ortmodule", fallback=True)
    wrapped(torch.randn(2, 2))
    with pytest.raises(ValueError, match="runs on engine 'eager' and has no graph"):
        capture.capture(wrapped)


def test_nodes_know_their_line(graphs: Graphs) -> None:
    """Every forward node that computes has a line, fused ones too, and most backward nodes."""
    lines = inspect.getsource(modeling_bert).splitlines()
    for stage in (graphs.exported, graphs.forward, graphs.gradient, graphs.execution):
        forward = [n for n in stage.nodes if n.phase == "forward" and n.op not in _OF_ORTS_OWN]
        assert not [n for n in forward if not n.source]
        for node in forward:
            where, _, code = node.source.partition(": ")
            file, _, line = where.partition(":")
            if file == "modeling_bert.py":
                assert lines[int(line) - 1].strip() == code
    for name, nodes in graphs.gradient.gradients.items():
        (forward_node,) = (n for n in graphs.gradient.nodes if n.name == name)
        assert {node.source for node in nodes} == {forward_node.source}
    backward = [n for n in graphs.execution.nodes if n.phase == "backward"]
    assert sum(bool(n.source) for n in backward) > 0.9 * len(backward)


_OF_ORTS_OWN = {"Constant", "Unsqueeze", "Identity", "Shape", "Reshape", "com.microsoft.YieldOp"}


def test_a_line_of_the_users_own_model() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()  # its line

    wrapped = ortlab.wrap(Net(3, 2), engine="ortmodule", cache=False)
    wrapped(torch.randn(2, 3)).sum().backward()
    sources = {node.source for node in ortlab.graphs(wrapped).execution.nodes if node.source}
    assert len(sources) == 1
    (source,) = sources
    assert source.startswith("test_capture.py:")
    assert source.endswith("return super().forward(x).tanh()  # its line")


def test_a_change_since_is_told() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    wrapped(torch.randn(2, 3)).sum().backward()
    assert not ortlab.graphs(wrapped).notes
    model[1].p = 0.5
    (note,) = ortlab.graphs(wrapped).notes
    assert note == "changed since the graph was exported: 1.p: 0.1 -> 0.5"
    assert note in repr(ortlab.graphs(wrapped))
    wrapped(torch.randn(2, 3)).sum().backward()
    assert not ortlab.graphs(wrapped).notes
