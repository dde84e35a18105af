"""Activations that engine ``ort`` computes again, by modules and under a budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ortlab
from ortlab.engines import registry
from ortlab.engines.base import wrapped_model
from ortlab.engines.ort.onnx_model import bytes_of
from ortlab.engines.ort.segments import OF_MODEL
from ortlab.engines.plan_names import UnknownPlan
from ortlab.settings import EngineSettings
from ortlab.utils.process_memory import memory
from tests.support.called_models import bert

LAYERS = 3
WIDTH = 16
LITTLE = {"activation_budget": 0.2}


class Layer(nn.Module):
    """Two products with dropout, a residual connection and a norm, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.gelu(self.wide(x)), 0.1, self.training)
        out: Tensor = self.norm(x + functional.dropout(self.narrow(hidden), 0.1, self.training))
        return out


class Stack(nn.Module):
    """Layers, with weights that are larger than the activations of a small batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


CALLS: list[int] = []
"""Sizes of the batches that eager torch has called a `Counted` layer with."""


class Counted(Layer):
    """A layer that records its calls in eager torch."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            CALLS.append(len(x))
            x = self.changed(x)
        return super().forward(x)

    def changed(self, x: Tensor) -> Tensor:
        return x


class StoresMore(Counted):
    """A layer that stores more in every first of two calls in eager torch, with the same result."""

    def changed(self, x: Tensor) -> Tensor:
        return x + 0 * x.sin() if len(CALLS) % 2 else x


class GrowsInSecondCall(Counted):
    """A layer whose second call in eager torch has another result."""

    def changed(self, x: Tensor) -> Tensor:
        return x * 2 if len(CALLS) == 2 else x


class ShortOfMemory(Counted):
    """A layer for which there is no memory in the first pass of eager torch."""

    def changed(self, x: Tensor) -> Tensor:
        if len(CALLS) == LAYERS:
            raise torch.OutOfMemoryError("the last layer does not fit")
        return x


class WritesToItsInput(Layer):
    """A layer that begins with an operator in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class WithMaximum(Layer):
    """A layer with an operator that ORT does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cummax(1).values)


class TakesOptions(Counted):
    """A layer with arguments that `torch.utils.checkpoint.checkpoint` has, too."""

    def forward(self, x: Tensor, debug: bool = True, function: float = 0.0) -> Tensor:
        return super().forward(x * 2 if debug else x + function)


class Optioned(Stack):
    """Layers that are called with options."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, debug=False, function=0.25)
        scores: Tensor = self.head(x.mean(1))
        return scores


class Images(nn.Module):
    """Convolutions whose batch norms change buffers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in "ab")
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        means: Tensor = self.blocks(x).mean((2, 3))
        return means


def tokens(batch: int, length: int = 7) -> Tensor:
    return torch.randint(2000, (batch, length), generator=torch.Generator().manual_seed(batch))


def pair(model: nn.Module, **settings: Any) -> tuple[Any, nn.Module]:
    return ortlab.wrap(model, engine="ort", self_check=False, **settings), copy.deepcopy(model)


def step(model: nn.Module, *inputs: Tensor) -> float:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(*inputs).sin().sum()
    loss.backward()
    return float(loss.detach())


def assert_equal(model: Any, reference: nn.Module, *inputs: Tensor) -> None:
    # The loss is a sum that cancels: rounding of its terms, about 1 each, remains.
    assert step(model, *inputs) == pytest.approx(step(reference, *inputs), rel=1e-5, abs=1e-6)
    assert_same_gradients(model, reference)
    for (name, p), q in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


def assert_same_gradients(model: Any, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def assert_each_has_gradients_of(reference: nn.Module, model: Any, losses: list[Tensor]) -> None:
    """Run the backward passes of several losses, the last one first."""
    for loss in reversed(losses):
        model.zero_grad()
        loss.backward()
        assert_same_gradients(model, reference)


def configure(model: Any, **settings: Any) -> None:
    record: Any = wrapped_model(model)
    record.configure(record.settings.replace(**settings))


def stored(model: Any) -> int:
    """Return the bytes that forward passes of the last call store for the backward pass."""
    record: Any = wrapped_model(model)
    return sum(graph.stored_bytes() for graph in record.last_graphs()["backward"])


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_budget": 0.6},
        {"activation_budget": 0.3},
        {"activation_budget": 0.05},
        {"recompute": "layers"},
        {"recompute": "layers.*.norm, layers.*.wide"},
        {"recompute": "layers", "activation_budget": 0.3},
    ],
    ids=str,
)
def test_gradients_are_those_of_eager_torch_at_any_size(settings: dict[str, Any]) -> None:
    model, reference = pair(Stack(), **settings)
    for batch in (3, 5, 1, 4):
        assert_equal(model, reference, tokens(batch))


@pytest.mark.parametrize("settings", [{"recompute": "layers"}, {"activation_budget": 0.2}], ids=str)
def test_buffers_change_once(settings: dict[str, Any]) -> None:
    model, reference = pair(Images(), **settings)
    for batch in (2, 3):
        assert_equal(model, reference, torch.rand(batch, 4, 8, 8))


def test_a_budget_is_kept_although_weights_are_larger() -> None:
    model, _ = pair(Stack())
    found = {}
    for budget in (1.0, 0.7, 0.4):
        configure(model, activation_budget=budget)
        step(model, tokens(4))
        found[budget] = stored(model)
    assert 0.4 * found[1.0] < found[0.7] <= 0.75 * found[1.0]
    assert 0.1 * found[1.0] < found[0.4] <= 0.5 * found[1.0]


@pytest.mark.parametrize(
    ("settings", "times"), [({}, 1), ({"recompute": "layers"}, 2), (LITTLE, 2)]
)
def test_the_check_in_eager_torch_recomputes_too(settings: dict[str, Any], times: int) -> None:
    """A batch that fits with recompute only would not fit in its check otherwise."""
    CALLS.clear()
    model = Stack()
    model.layers = nn.ModuleList(Counted() for _ in range(LAYERS))
    reference = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ort", **settings)
    first = step(wrapped, tokens(4))
    assert len(CALLS) == times * LAYERS
    assert any("checked on" in note for note in wrapped_model(wrapped).report().notes)
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert first == pytest.approx(step(reference, tokens(4)), rel=1e-5, abs=1e-6)


def test_the_check_recomputes_where_eager_torch_runs_out_of_memory() -> None:
    CALLS.clear()
    model = Stack()
    model.layers = nn.ModuleList(ShortOfMemory() for _ in range(LAYERS))
    wrapped = ortlab.wrap(model, engine="ort", fallback=False)
    step(wrapped, tokens(4))
    assert len(CALLS) == 3 * LAYERS  # one pass that ends early, and two of the recomputed layers
    (note,) = wrapped_model(wrapped).report().notes
    assert "gradients within" in note


def test_the_check_calls_layers_with_buffers_once() -> None:
    wrapped = ortlab.wrap(Images(), engine="ort", recompute="layers", fallback=False)
    step(wrapped, torch.randn(4, 4, 9, 9))
    (note,) = wrapped_model(wrapped).report().notes
    assert "8 gradients within" in note
    assert "buffers differ" not in note


def test_the_check_recomputes_layers_with_options_of_any_name() -> None:
    CALLS.clear()
    model = Optioned()
    model.layers = nn.ModuleList([TakesOptions()])
    wrapped = ortlab.wrap(model, engine="ort", recompute="layers", fallback=False)
    step(wrapped, tokens(4))
    assert len(CALLS) == 2
    (note,) = wrapped_model(wrapped).report().notes
    assert "gradients within" in note


@pytest.mark.parametrize("layer", [StoresMore, GrowsInSecondCall, WritesToItsInput])
def test_the_check_is_right_about_layers_that_cannot_be_recomputed(layer: type[Layer]) -> None:
    CALLS.clear()
    model = Stack()
    model.layers = nn.ModuleList([layer()])
    wrapped = ortlab.wrap(model, engine="ort", recompute="layers", fallback=False)
    step(wrapped, tokens(4))
    (note,) = wrapped_model(wrapped).report().notes
    assert "gradients within" in note


def test_of_layers_only_the_results_and_the_masks_are_stored() -> None:
    model, _ = pair(Stack())
    step(model, tokens(4))
    whole = stored(model)
    configure(model, recompute="layers")
    step(model, tokens(4))
    positions = 4 * 7
    masks = positions * (4 * WIDTH + WIDTH)  # a byte each
    results = 4 * positions * WIDTH
    # A layer's last product is stored, too: it would be repeated for the norm's input alone.
    assert LAYERS * masks < stored(model) < LAYERS * (masks + 2 * results) + 2 * results
    assert stored(model) < 0.5 * whole


def test_no_part_of_the_backward_pass_is_given_most_of_a_layer() -> None:
    """The inputs of a part are in memory until it ends, also those that it reads through views."""
    model, _ = pair(Stack(), recompute="layers")
    step(model, tokens(64))
    record: Any = wrapped_model(model)
    (backward,) = record.last_graphs()["backward"]
    given = []
    for segment in backward.division.segments:
        read = [node for node in segment.graph.graph.nodes if node.op == "placeholder"]
        given.append(sum(bytes_of(node) for node in read if not node.name.startswith(OF_MODEL)))
    one = 64 * 7 * WIDTH * 4  # bytes of a layer's result; its wide values are 4 times as large
    assert max(given) < 14 * one


def test_layers_with_an_operator_in_torch_are_computed_again_one_by_one() -> None:
    built = Stack()
    built.layers = nn.ModuleList(WithMaximum() for _ in range(LAYERS))
    model, reference = pair(built, recompute="layers")
    assert_equal(model, reference, tokens(16))
    record: Any = wrapped_model(model)
    (backward,) = record.last_graphs()["backward"]
    nodes = list(backward.division.module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    again = [node for node in nodes if node.meta.get("partitioner_tag") == "is_forward"]
    made = [node for node in again if isinstance(node.meta.get("val"), Tensor) and node.users]
    life = {node: (place[node], max(place[each] for each in node.users)) for node in made}
    held = [
        sum(bytes_of(node) for node, (first, last) in life.items() if first <= i < last)
        for i in range(len(nodes))
    ]
    assert 0 < max(held) < 0.5 * sum(map(bytes_of, made))


def test_a_change_captures_nothing_and_spares_earlier_forward_passes() -> None:
    model, reference = pair(Stack())
    record: Any = wrapped_model(model)
    step(model, tokens(4))
    made = len(record._backend.graphs)
    losses = []
    for settings in ({}, {"activation_budget": 0.3}, {"recompute": "layers"}):
        configure(model, **settings)
        torch.manual_seed(5)
        losses.append(model(tokens(4)).sin().sum())
    assert len(record._backend.graphs) == made + 4
    step(reference, tokens(4))
    assert_each_has_gradients_of(reference, model, losses)
    configure(model, activation_budget=0.3, recompute="off")  # made already
    assert_equal(model, reference, tokens(4))
    assert len(record._backend.graphs) == made + 4
    assert "captured" not in str(record._log.remarks())


def test_plans_that_store_as_many_tensors_are_told_apart() -> None:
    model, reference = pair(Stack())
    step(model, tokens(4))
    losses = []
    for settings in ({"activation_budget": 0.95}, {"recompute": "layers"}):
        configure(model, **{"activation_budget": 1.0, **settings})
        torch.manual_seed(5)
        losses.append(model(tokens(4)).sin().sum())
    record: Any = wrapped_model(model)
    first, second = (
        len(graph.division.module.graph.find_nodes(op="placeholder"))
        for graph in record._backend.graphs[-4:]
        if graph.phase == "backward"
    )
    assert first == second
    step(reference, tokens(4))
    assert_each_has_gradients_of(reference, model, losses)


class Cheap(nn.Module):
    """A layer that torch would compute again from the input of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x + functional.gelu(x * self.scale))


def test_results_of_layers_are_stored_although_they_are_cheap() -> None:
    made = Stack()
    made.layers = nn.ModuleList(Cheap() for _ in range(6))
    model, reference = pair(made, recompute="layers")
    assert_equal(model, reference, tokens(4))
    assert stored(model) >= 5 * 4 * tokens(4).numel() * WIDTH


def test_changes_between_sizes() -> None:
    model, reference = pair(Stack())
    for batch, settings in (
        (3, {}),
        (5, {"activation_budget": 0.3}),
        (6, {}),
        (3, {"recompute": "layers", "activation_budget": 1.0}),
        (7, {"recompute": "off"}),
        (1, {"recompute": "layers"}),
    ):
        configure(model, **settings)
        assert_equal(model, reference, tokens(batch))


def test_the_report_says_what_is_stored() -> None:
    model, _ = pair(Stack(), recompute="layers")
    step(model, tokens(4))
    record: Any = wrapped_model(model)
    said = memory(stored(model))
    assert f"recompute: {said} stored for the backward pass" in record.report().remarks


def test_a_transformer_at_several_sizes() -> None:
    """The numbers of saved sizes differ between the graphs of its plans."""
    made, batch = bert()
    model, reference = pair(made)
    losses = []
    for each in (model, reference):
        for rows, settings in (
            (4, {}),
            (3, {}),
            (2, LITTLE),
            (4, {"recompute": "layers"}),
            (3, {}),
        ):
            if each is model:
                configure(model, **settings)
            torch.manual_seed(5)
            each.zero_grad()
            loss = each(**{name: tensor[:rows] for name, tensor in batch.items()}).loss
            loss.backward()
            losses.append(float(loss.detach()))
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-5)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_change_before_the_first_backward_pass_waits_for_it() -> None:
    model, reference = pair(Stack())
    first = model(tokens(4)).sin().sum()
    configure(model, activation_budget=0.3)
    model(tokens(4))
    record: Any = wrapped_model(model)
    assert any("recompute has no effect" in line for line in record.report().remarks)
    first.backward()
    assert_equal(model, reference, tokens(4))
    assert not any("recompute has no effect" in line for line in record.report().remarks)


class Split(nn.Module):
    """Layers that torch captures one by one, after a graph break in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.filterwarnings("ignore")
def test_plans_without_effect_are_named() -> None:
    model, reference = pair(Split(), recompute="layers")
    x = torch.rand(2, 3, WIDTH)
    assert_equal(model, reference, x)
    record: Any = wrapped_model(model)
    assert "recompute has no effect: a graph does not contain layers.*" in record.report().remarks


def test_wrong_plans_and_budgets_are_refused() -> None:
    with pytest.raises(UnknownPlan, match=r"recompute='layer\.\*': .* did you mean 'layers\.\*'"):
        ortlab.wrap(Stack(), engine="ort", recompute="layer.*")
    with pytest.raises(UnknownPlan, match="no list of layers"):
        ortlab.wrap(nn.Linear(2, 2), engine="ort", recompute="layers")
    with pytest.raises(ValueError, match="activation_budget"):
        ortlab.wrap(Stack(), engine="ort", activation_budget=0)
    said = registry.refusal(EngineSettings(engine="eager", activation_budget=0.5))
    assert "is for engine 'ort'" in str(said)
