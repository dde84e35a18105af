"""Graphs of engine ``ort``, checked against the model itself and what ORT runs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.graph import CAPTURED_STAGES
from ortlab.graph.capture import Graphs, Node, Stage
from ortlab.notebook.views import graph_view
from tests.support.called_models import bert, gpt2


def of(made: tuple[nn.Module, Any]) -> Graphs:
    model, batch = made
    return ortlab.graphs(ortlab.wrap(model, engine="ort", self_check=False), batch)


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    model, batch = bert()
    wrapped = ortlab.wrap(model, engine="ort", self_check=False)
    wrapped(**batch).loss.backward()
    model.eval()
    with torch.no_grad():
        wrapped(**batch)
    return ortlab.graphs(wrapped)


def test_the_loss_scale_of_the_last_run_is_told() -> None:
    wrapped = ortlab.wrap(nn.Linear(4, 3), engine="ort", self_check=False)
    data = [(torch.full((2, 4), size), torch.tensor([0, 1])) for size in (1.0, 1e6)]
    chosen: dict[str, Any] = {"loss": "cross_entropy", "engine": "ort", "device": "cpu"}
    told = []
    for precision in ("fp16", "fp32"):
        run = ortlab.finetune(wrapped, data, precision=precision, epochs=1, **chosen)
        assert run.wait_over(60)
        told.append(ortlab.graphs(wrapped).notes)
    (note,), none = told
    assert "multiplies the loss by the loss scale, now 32,768" in note
    assert "forward's results (tangents_1), where backward begins" in note
    assert none == ()


def test_every_stage_is_there_and_shown(graphs: Graphs) -> None:
    assert list(graphs.stages) == list(CAPTURED_STAGES)
    for name in CAPTURED_STAGES:
        assert graphs.stage(name) is graphs.stages[name]
        assert name in repr(graphs)
        assert name in graphs._repr_html_()
        assert repr(graph_view.outline_of(graphs, name))
        graph_view.tell(graphs, graph_view.outline_of(graphs, name))
    assert graphs.exported is graphs.captured
    for name in ("forward", "gradient"):  # without what is saved for the backward pass
        outputs = [each.name for each in graphs.stage(name).model.graph.output]
        parameters = len(graphs.stage(name).parameter_gradients)
        assert len(outputs) == 2 + parameters  # the loss and the logits


def test_inputs_have_the_names_of_the_arguments(graphs: Graphs) -> None:
    def inputs(found: Graphs) -> set[str]:
        stage = found.forward
        return {each.name for each in stage.model.graph.input} - set(stage.parameters)

    assert inputs(graphs) == set(bert()[1])
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    found = of((model, (torch.randn(3, 6),)))
    assert inputs(found) == {"input"}
    assert {node.module for node in found.captured.nodes} == {"0", "1"}


class Halves(nn.Module):
    """A model that computes with sizes, and has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x).view(x.shape[0] * 2, 3) * torch.tensor([1.0, 2.0, 3.0])
        return h.sum() / x.shape[0]


def of_several_sizes() -> Graphs:
    wrapped = ortlab.wrap(Halves(), engine="ort", self_check=False)
    for rows in (4, 5, 7):
        wrapped(torch.randn(rows, 6)).backward()
    return ortlab.graphs(wrapped)


@pytest.mark.parametrize("make", [lambda: of(bert()), lambda: of(gpt2()), of_several_sizes])
def test_every_tensor_is_made_before_it_is_read(make: Callable[[], Graphs]) -> None:
    for stage in make().stages.values():
        graph = stage.model.graph
        known = {each.name for each in (*graph.input, *graph.initializer)}
        assert [node.name for node in stage.nodes] == [node.name for node in graph.node]
        assert len({node.name for node in stage.nodes}) == len(stage.nodes)
        for node in stage.nodes:
            assert set(node.inputs) - {""} <= known, node
            assert known.isdisjoint(node.outputs), node
            known.update(node.outputs)
        assert {each.name for each in graph.output} <= known
        phases = [node.phase for node in stage.nodes]
        assert phases == sorted(phases, reverse=True), "forward, then backward"


@pytest.mark.parametrize("make", [bert, gpt2])
def test_gradients_are_those_of_the_parameters(make: Any) -> None:
    model, batch = make()
    graphs = of((model, batch))
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    for name in ("captured", "gradient", "execution"):
        stage = graphs.stage(name)
        found = stage.parameter_gradients
        assert {each: stage.shape_of(tensor, {}) for each, tensor in found.items()} == shapes
        assert stage.parameter_bytes >= sum(each.nbytes for each in model.parameters())
    assert not graphs.forward.parameter_gradients


def test_nodes_know_their_module_and_their_line(graphs: Graphs) -> None:
    modules = dict(bert()[0].named_modules())
    for name in ("captured", "gradient", "execution"):
        stage = graphs.stage(name)
        known = Counter(node.module for node in stage.nodes if node.module)
        assert set(known) <= set(modules)
        assert known.total() > 0.9 * len(stage.nodes)
        assert sum(bool(node.source) for node in stage.nodes) > 0.9 * len(stage.nodes)
    assert graphs.captured.ops["torch.bernoulli_"] == 8  # masks of dropout
    (gelu,) = (n for n in graphs.forward.nodes if n.op == "Gelu" and "layer.0" in n.module)
    assert gelu.module == "bert.encoder.layer.0.intermediate.intermediate_act_fn"
    for node in graphs.gradient.gradients[gelu.name]:
        assert node.module == gelu.module
        assert node.source == gelu.source


def test_every_operator_with_a_gradient_is_linked_to_it(graphs: Graphs) -> None:
    stage = graphs.captured
    forward = {node.name for node in stage.nodes if node.phase == "forward"}
    assert set(stage.gradients) <= forward
    linked = [node for node in stage.nodes if node.op == "torch.addmm" and node.name in forward]
    assert len(linked) > 10
    for node in linked:
        assert "torch.mm" in {each.op for each in stage.gradients[node.name]}


class Twice(nn.Module):
    """A module that is called twice, an operator without a rule, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.special.erfcx(self.layer(self.layer(x)))
        torch._dynamo.graph_break()
        made: Tensor = self.head(h)
        return made


def erfcx_of(stage: Stage) -> Node:
    (found,) = (node for node in stage.nodes if node.op == "torch.special_erfcx")
    return found


class Counted(nn.Module):
    """Operators that are followed by others that no gradient belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(1, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) + 1  # where an addition has a number of autograd's
        self.calls = self.calls + 1  # this one has the same
        return x @ x.transpose(1, 2).softmax(-1)


def test_a_gradient_is_linked_to_its_operator_not_to_one_after_it() -> None:
    found = of((Counted(), (torch.randn(2, 3, 8, 8),))).captured
    of_each = {node.op.removeprefix("torch."): node.of for node in found.nodes if node.of}
    by_op = {node.op.removeprefix("torch."): node.name for node in found.nodes}
    for gradient, operator in {
        "convolution_backward": "convolution",
        "native_batch_norm_backward": "_native_batch_norm_legit_functional",
        "_softmax_backward_data": "_softmax",
    }.items():
        assert of_each[gradient] == by_op[operator]
    (product,) = (n.name for n in found.nodes if n.op == "torch.bmm" and n.phase == "forward")
    products = [n for n in found.nodes if n.op == "torch.bmm" and n.phase == "backward"]
    assert {node.of for node in products} == {product}


def test_calls_operators_in_torch_and_both_sides_of_a_graph_break() -> None:
    wrapped = ortlab.wrap(Twice(), engine="ort", self_check=False)
    for rows in (4, 5, 7):
        wrapped(torch.randn(rows, 6)).sum().backward()
    graphs = ortlab.graphs(wrapped)
    assert graphs.sizes == {"x_dim0": 7}
    # What Python hands over at the break is one tensor in the graphs on both sides.
    head = next(n for n in graphs.forward.nodes if n.module == "head")
    assert set(head.inputs) & set(erfcx_of(graphs.forward).outputs)
    given = {value.name for value in graphs.gradient.model.graph.input}
    assert given & {"h", "tangents_1.2"} == set()
    assert set(graphs.gradient.dims) == set(graphs.sizes)
    assert graphs.gradient.ops["torch.special_erfcx"] == 1
    erfcx = erfcx_of(graphs.gradient)
    assert erfcx.source.endswith("h = torch.special.erfcx(self.layer(self.layer(x)))")
    assert set(graphs.gradient.parameter_gradients) == {
        f"{module}.{kind}" for module in ("layer", "head") for kind in ("weight", "bias")
    }
    rows = {row.path: row.calls for row in graph_view.outline_of(graphs, "gradient").modules}
    assert (rows["layer"], rows["head"]) == (2, 1)
    found = graphs.gradient.bytes_of(erfcx.outputs[0], {"x_dim0": 10})
    assert found == 10 * 6 * 4


@pytest.mark.parametrize("stage", ["gradient", "execution"])
def test_gradients_of_a_norm_read_its_own_mean_and_deviation(graphs: Graphs, stage: str) -> None:
    nodes = {node.name: node for node in graphs.stages[stage].nodes}
    norms = [node for node in nodes.values() if node.op == "LayerNormalization"]
    assert len(norms) == 5
    of_norms = {name for norm in norms for name in norm.outputs[1:]}
    for norm in norms:
        gradients = graphs.stages[stage].gradients[norm.name]
        read = {name for node in gradients for name in node.inputs}
        assert read & of_norms == set(norm.outputs[1:])


def test_an_operator_that_was_moved_to_torch_is_shown_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ortlab.engines.ort.lowering import graph as lowering

    monkeypatch.setitem(
        lowering.RULES, torch.ops.aten.tanh.default, lambda graph, _, x: graph.unary("Sin", x)
    )
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    wrapped = ortlab.wrap(model, engine="ort")
    wrapped(torch.randn(4, 6)).sum().backward()
    forward = ortlab.graphs(wrapped).forward
    assert forward.ops["torch.tanh"] == 1
    assert forward.ops["Gemm"] == 2
    assert "Sin" not in forward.ops


def test_a_batch_captures_the_graphs_and_leaves_no_trace() -> None:
    model, batch = bert()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    graphs = of((model, batch))
    assert "gradient" in graphs.stages
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_not_there_is_explained() -> None:
    wrapped = ortlab.wrap(Twice(), engine="ort", self_check=False)
    with pytest.raises(ValueError, match=r"Twice has no graph yet; call it once, or give a batch"):
        ortlab.graphs(wrapped)
    with torch.no_grad():
        wrapped.eval()(torch.randn(3, 6))
    with pytest.raises(ValueError, match="no gradient graph: call the model once"):
        _ = ortlab.graphs(wrapped).gradient
    with pytest.raises(ValueError, match="unknown stage 'graident'"):
        ortlab.graphs(wrapped).stage("graident")
    assert ortlab.memory_plan(wrapped).dims == {"batch": 3}  # of a training step of its own
