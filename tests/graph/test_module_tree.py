"""The outline of a graph, checked against torch's own modules and the graph's own nodes."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertForSequenceClassification

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.graph.capture import Graphs, Overlay, Stage
from ortlab.graph.module_tree import ROWS, Outline
from tests.support.called_models import called, gpt2

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, Graphs]:
    net, batch = gpt2()
    return net, ortlab.graphs(called(net, batch, cache=False))


def sizes_of(stage: Stage) -> dict[str, int]:
    return {name: 3 + i for i, name in enumerate(stage.dims)}


def test_rows_are_sums_of_what_is_within(model: tuple[nn.Module, Graphs]) -> None:
    net, graphs = model
    stage, sizes = graphs.gradient, sizes_of(graphs.gradient)
    outline = Outline(stage, exported=graphs.exported, sizes=sizes)
    for row in outline.modules:
        inside = [
            n for n in stage.nodes if f"{n.module}.".startswith(f"{row.path}.") or not row.path
        ]
        assert row.forward == sum(node.phase == "forward" for node in inside)
        assert row.backward == sum(node.phase == "backward" for node in inside)
        assert row.activation_bytes == sum(
            stage.bytes_of(name, sizes) or 0
            for node in inside
            if node.phase == "forward"
            for name in node.outputs
        )
    assert outline.modules[0].activation_bytes == stage.activation_bytes(**sizes)
    known = dict(net.named_modules())
    rows = {row.path: row for row in outline.modules}
    assert rows[""].parameters == sum(p.numel() for p in net.parameters())
    for path in ("transformer.h.1", "transformer.h.0.attn", "transformer.ln_f"):
        assert rows[path].parameters == sum(p.numel() for p in known[path].parameters())


def test_rows_are_in_the_order_of_the_code_below_their_parents(
    model: tuple[nn.Module, Graphs],
) -> None:
    _, graphs = model
    outline = Outline(graphs.gradient, exported=graphs.exported)
    for i, row in enumerate(outline.modules[1:], 1):
        parent = outline.modules[row.parent]
        assert row.parent < i
        assert row.depth == parent.depth + 1
        assert row.path == (f"{parent.path}.{row.name}" if parent.path else row.name)
    layer = next(i for i, row in enumerate(outline.modules) if row.path == "transformer.h.0")
    names = [row.name for row in outline.modules if row.parent == layer]
    assert names == ["ln_1", "attn", "ln_2", "mlp"]
    for node, at in zip(graphs.gradient.nodes, outline.module_of, strict=True):
        assert outline.modules[at].path == node.module


def test_calls_are_counted() -> None:
    config = AlbertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        embedding_size=16, vocab_size=100,
    )  # fmt: skip
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.tensor([0, 1])}
    graphs = ortlab.graphs(called(AlbertForSequenceClassification(config), batch, cache=False))
    rows = {
        row.path: row.calls for row in Outline(graphs.gradient, exported=graphs.exported).modules
    }
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    assert rows["albert.pooler"] == 1
    assert rows[layer] == rows[f"{layer}.ffn"] == rows[f"{layer}.attention.query"] == 3


def test_time_is_summed_by_phase(model: tuple[nn.Module, Graphs]) -> None:
    _, graphs = model
    stage = graphs.gradient
    timed = {node.name: 1.0 for node in stage.nodes[::2]}
    outline = Outline(stage, time=Overlay("time", "us", timed))
    forward = sum(node.name in timed for node in stage.nodes if node.phase == "forward")
    assert outline.modules[0].forward_us == forward
    assert outline.modules[0].backward_us == len(timed) - forward
    assert "forward time" in repr(outline)
    assert "forward time" not in repr(Outline(stage))


def test_text_is_as_deep_as_fits(model: tuple[nn.Module, Graphs]) -> None:
    _, graphs = model
    stage = graphs.gradient
    outline = Outline(stage, sizes=sizes_of(stage))
    assert len(outline.table()) <= ROWS
    assert len(outline.table(rows=10_000)) == len(outline.modules)
    top = [row for row in outline.modules if row.depth <= 1]
    shown = repr(outline.table(rows=len(top)))
    assert f"{len(outline.modules) - len(top)} more modules inside these" in shown
    assert "activations" in shown
    assert "activations" not in repr(Outline(stage))
    assert "calls" not in repr(Outline(stage)), "only the export tells"
    assert "transformer" in outline._repr_html_()


def graph(nodes: list[onnx.NodeProto], modules: set[str]) -> Stage:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    made = onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [x], []))
    return Stage("exported", made, frozenset(modules))


def chain(names: list[str]) -> list[onnx.NodeProto]:
    tensors = ["x", *(f"t{i}" for i in range(len(names)))]
    return [
        onnx.helper.make_node("Relu", [tensors[i]], [tensors[i + 1]], name=name)
        for i, name in enumerate(names)
    ]


def test_the_export_tells_the_order() -> None:
    names = [f"/_original_module/{module}/Relu" for module in ("norm", "attention")]
    exported, later = (graph(chain(each), {"norm", "attention"}) for each in (names, names[::-1]))
    later.name = "forward"
    for stage, order in ((None, ["attention", "norm"]), (exported, ["norm", "attention"])):
        assert [row.name for row in Outline(later, exported=stage).modules[1:]] == order


def test_a_graph_without_modules_is_one_row() -> None:
    outline = Outline(graph(chain(["", "", "a"]), set()), sizes={})
    (row,) = outline.modules
    assert (row.name, row.forward, row.calls, row.activation_bytes) == ("", 3, 1, None)


def test_ten_thousand_nodes_in_as_many_modules() -> None:
    modules = {f"layers.{i}.relu" for i in range(10_000)}
    names = [f"/_original_module/layers.{i}/relu/Relu" for i in range(10_000)]
    outline: Any = Outline(graph(chain(names), modules))
    assert len(outline.modules) == 2 + 10_000
    assert outline.modules[1].path == "layers"
    assert outline.modules[1].forward == 10_000
    assert len(outline.table()) == 2
