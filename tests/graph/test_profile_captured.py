"""The profile of a model on engine ``ort`` adds up, is of what ran, and changes nothing."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ort.model import OrtModel
from ortlab.graph.profile import Profile
from ortlab.utils import session_profile
from tests.support.called_models import bert
from tests.support.profiles import assert_sums_add_up


def wrapped(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return ortlab.wrap(model, engine="ort", self_check=False)


def of(model: nn.Module, *batch: Any) -> Profile:
    return ortlab.profile(wrapped(model), batch, steps=2)


@pytest.fixture(scope="module")
def profiled() -> tuple[nn.Module, Profile]:
    model, batch = bert()
    made = wrapped(model)
    return made, ortlab.profile(made, batch, steps=2)


def test_sums_add_up(profiled: tuple[nn.Module, Profile]) -> None:
    assert_sums_add_up(profiled[1])


def test_what_ran_is_what_the_execution_graph_has(profiled: tuple[nn.Module, Profile]) -> None:
    model, found = profiled
    assert found.ort is not None
    stage = ortlab.graphs(model).execution
    known = {(node.name, node.op, node.module, node.phase) for node in stage.nodes}
    ran = {(node.node, node.op, node.module, node.phase) for node in found.nodes}
    assert ran <= known
    views = {"torch.reshape", "torch.t", "torch.transpose", "torch.expand", "torch.detach"}
    assert {op for _, op, _, _ in known - ran} <= {*views, "torch.slice", "torch.select"}
    assert found.ort.joined == 1
    total = sum(node.us for node in found.nodes)
    with_line = sum(sum(row.us.values()) for row in found.by_line(999) if row.line != "(unknown)")
    assert with_line >= 0.95 * total
    assert sum(found.overlay(stage).values.values()) == pytest.approx(total)


def test_evaluation_is_a_forward_pass() -> None:
    found = of(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)).eval(), torch.randn(3, 6))
    assert found.phases == ("forward",)
    assert {node.module for node in found.nodes} == {"0", "1"}


class Parts(nn.Module):
    """Layers that are captured one by one, since each call is followed by a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.linear = nn.Linear(6, 6)  # has the path that a layer's own has within it

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.erfcx(self.linear(x)).tanh() @ self.linear.weight


def test_graphs_that_run_several_times_a_step_and_operators_in_torch() -> None:
    found = of(Parts(), torch.randn(3, 6))
    assert_sums_add_up(found)
    assert found.ort is not None
    assert found.ort.joined == 1
    in_torch = [node for node in found.nodes if node.op == "torch.special_erfcx"]
    assert all(node.us > 0 for node in in_torch)
    assert {node.phase for node in in_torch} == {"forward"}
    # They share graphs, so that only the whole model's row can be right.
    assert {node.module for node in found.nodes} == {""}


@torch.library.custom_op("ortlab_test::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    """Return a copy after 50 ms."""
    time.sleep(0.05)
    return x.clone()


@slow.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_in_torch_has_the_time_of_one_step() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return slow(x)

    model = nn.Sequential(nn.Linear(6, 4), Slow(), nn.Tanh()).eval()
    (node,) = (node for node in of(model, torch.randn(3, 6)).nodes if node.op == "torch.slow")
    assert node.module == "1"
    assert 50_000 <= node.us < 100_000  # the same again in each further step


class Everything(nn.Module):
    """Module with random draws and batch statistics, which a profile must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made


def test_the_model_is_left_as_it_was() -> None:
    model = wrapped(Everything())
    x = torch.randn(4, 6)
    model(x).sum().backward()
    record = wrapped_model(model)
    assert isinstance(record, OrtModel)
    state, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    values = [copy.deepcopy(gradient) for gradient in gradients]
    sessions = [segment._session for segment in record._segments()]
    report, seed = record.report(), torch.get_rng_state()
    ortlab.profile(model, x, steps=1)
    assert record.report() == report
    assert [segment._session for segment in record._segments()] == sessions
    assert torch.equal(torch.get_rng_state(), seed)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient, value)
    torch.manual_seed(1)
    made = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(made, ortlab.unwrap(copy.deepcopy(model))(x))


def test_without_a_batch_the_last_calls_form_is_made_up() -> None:
    model = wrapped(nn.Linear(6, 4))
    with pytest.raises(ValueError, match="not been called yet: give a batch for forward"):
        ortlab.profile(model)
    model(torch.randn(3, 6)).sum().backward()
    assert "made-up values in the shapes of the last call" in repr(ortlab.profile(model, steps=1))


def test_a_model_that_fell_back_has_eager_torch_alone() -> None:
    class Skipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.layer(x)
            return made

    found = of(Skipped(), torch.randn(3, 6))
    assert found.ort is None
    assert "the model runs on engine 'eager'" in repr(found)


def test_more_steps_than_a_profile_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_profile, "MOST_EVENTS", 30)
    with pytest.raises(ValueError, match=r"ORT's profiler can record \d+ steps"):
        of(nn.Linear(6, 4), torch.randn(3, 6))
