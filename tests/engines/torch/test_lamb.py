"""LAMB, compared with the paper's algorithm written out, and with steps that are skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.api import zero_plan
from ortlab.engines.registry import engine
from ortlab.engines.torch import lamb
from ortlab.graph.lifetimes import STATE
from ortlab.settings import OPTIMIZERS, FinetuneSettings
from tests.support.needed_engines import needs

LR, DECAY = 0.02, 0.1
TOLERANCE = 1e-5
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A net with a weight of norm far above 10, a zero weight, a bias, a norm, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(6, 32)
        self.norm = nn.LayerNorm(32)
        self.more = nn.Linear(32, 32, bias=False)
        self.outer = nn.Linear(32, 4)
        self.unused = nn.Linear(3, 3)
        with torch.no_grad():
            self.inner.weight *= 20
            self.more.weight.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(x))
        scores: torch.Tensor = self.outer(torch.tanh(hidden + self.more(hidden)))
        return scores


def data(count: int) -> Iterator[Batch]:
    drawn = torch.Generator().manual_seed(3)
    for _ in range(count):
        inputs = torch.randn(8, 6, generator=drawn)
        yield inputs, inputs[:, :4].argmax(1)


def stepper_for(model: nn.Module, name: str = "eager", **values: Any) -> Any:
    chosen = {"engine": name, "optimizer": "lamb", "weight_decay": DECAY, "device": "cpu", **values}
    return engine(name).prepare(model, functional.cross_entropy, FinetuneSettings.of(**chosen))


def by_hand(model: nn.Module, steps: list[Batch], clip: float) -> list[float]:
    """Run the paper's algorithm 2 in float64, without bias correction; return the losses.

    As in the authors' code, biases and norms have neither decay nor trust ratio.
    """
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in _named(model)}
    losses = []
    for inputs, target in steps:
        model.zero_grad()
        loss = functional.cross_entropy(model(inputs.double()), target)
        loss.backward()
        losses.append(float(loss.detach()))
        grads = {name: p.grad for name, p in _named(model) if p.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        for name, parameter in _named(model):
            if name not in grads:
                continue
            g = grads[name] * min(1.0, clip / norm)
            m, v = moments[name]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            moments[name] = m, v
            update, ratio = m / (v.sqrt() + eps), 1.0
            if parameter.dim() >= 2:
                update = update + DECAY * parameter.detach()
                ratio = float(parameter.detach().norm() / update.norm()) or 1.0
            with torch.no_grad():
                parameter -= LR * ratio * update
    return losses


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def state_of(stepper: Any) -> dict[str, torch.Tensor]:
    state = stepper.state_dict()
    kept = {
        f"{number} {name}": value
        for number, each in state["optimizer"]["state"].items()
        for name, value in each.items()
    }
    return copy.deepcopy({**state["model"], **kept})


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_fifty_steps_are_those_of_the_paper() -> None:
    steps = list(data(50))
    model, twin = Net(), Net().double()
    assert float(model.inner.weight.detach().norm()) > 10
    stepper = stepper_for(model, max_grad_norm=0.5)
    losses = [float(stepper.step([batch], lr=LR).loss) for batch in steps]
    assert losses == pytest.approx(by_hand(twin, steps, clip=0.5), rel=TOLERANCE)
    assert losses[-1] < losses[0]
    for (name, found), (_, expected) in zip(_named(model), _named(twin), strict=True):
        error = float(((found.double() - expected).norm() / expected.norm()).detach())
        assert error < TOLERANCE, name
    assert torch.equal(model.unused.weight, Net().unused.weight)


@pytest.mark.parametrize("name", ["compile", "ortmodule"])
def test_every_engine_has_it(name: str) -> None:
    needs(name)
    one, other = stepper_for(Net()), stepper_for(Net(), name)
    for batch in data(10):
        expected, found = one.step([batch], lr=LR).loss, other.step([batch], lr=LR).loss
        assert float(found) == pytest.approx(float(expected), rel=TOLERANCE)
    assert other.report().engine_used == name
    other.close()


def test_pieces_of_any_size_are_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for size in (2**18, 1, 200):
        monkeypatch.setattr(lamb, "_PIECE", {"cpu": size})
        stepper = stepper_for(Net())
        for batch in data(3):
            stepper.step([batch], lr=LR)
        states.append(state_of(stepper))
    first, *others = states
    for other in others:
        assert_same(first, other)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_loss_that_is_not_finite_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """No value changes where the flag is read, nor where values are restored, as on a device."""
    monkeypatch.setattr(lamb.Lamb, "_is_read_at_once", lambda self, flag: at_once)
    plain, stepper = stepper_for(Net()), stepper_for(Net())
    good, bad, late = data(3)
    plain.step([good], lr=LR)
    bad[0][0] = math.nan
    stepper.step([good], lr=LR)
    before = state_of(stepper)
    assert_same(before, state_of(plain))
    stepper.step([bad], lr=LR)
    assert not stepper.finite()
    assert_same(before, state_of(stepper))
    stepper.step([late], lr=LR)  # stepping stays disabled
    assert_same(before, state_of(stepper))


@pytest.mark.parametrize("at_once", [True, False])
def test_an_overflow_is_skipped(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """The optimizer itself skips the step; GradScaler would wait for the device."""
    asked: list[torch.Tensor] = []

    def known(_: Any, flag: torch.Tensor) -> bool:
        asked.append(flag)
        return at_once

    monkeypatch.setattr(lamb.Lamb, "_is_read_at_once", known)
    good, bad, late = data(3)
    bad[0][0] = 1e6
    states = []
    for group in ([good, bad, late], [good, late]):
        stepper = stepper_for(nn.Linear(6, 4).requires_grad_(), precision="fp16")
        stepper.load_state_dict({**stepper.state_dict(), "model": nn.Linear(6, 4).state_dict()})
        with torch.no_grad():
            for parameter in stepper._parameters:
                parameter.fill_(0.1)
        results = [stepper.step([batch], lr=LR) for batch in group]
        assert [bool(result.skipped) for result in results] == [batch is bad for batch in group]
        assert stepper.finite()
        states.append(state_of(stepper))
    assert_same(*states)
    assert [bool(flag) for flag in asked] == [False, True, False, False, False]


def test_a_state_goes_on_elsewhere() -> None:
    """The state has two moments and nothing else, to match the form of other libraries."""
    *first, batch, last = data(5)
    one, other = stepper_for(Net()), stepper_for(Net())
    for each in first:
        one.step([each], lr=LR)
    state = copy.deepcopy(one.state_dict())
    assert {name for each in state["optimizer"]["state"].values() for name in each} == {
        "exp_avg",
        "exp_avg_sq",
    }
    other.load_state_dict(state)
    for each in (batch, last):
        assert float(one.step([each], lr=LR).loss) == float(other.step([each], lr=LR).loss)
    assert_same(state_of(one), state_of(other))


def test_a_step_that_fails_leaves_a_state_that_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (batch,) = data(1)
    stepper, plain = stepper_for(Net()), lamb.PlainLamb.step

    def failing(optimizer: Any) -> None:
        plain(optimizer)
        raise MemoryError

    monkeypatch.setattr(lamb.PlainLamb, "step", failing)
    with pytest.raises(MemoryError):
        stepper.step([batch], lr=LR)
    stepper_for(Net()).load_state_dict(stepper.state_dict())


def test_decay_is_adopted() -> None:
    """A new decay applies, to the parameters of a single kind as well."""
    batch, more = data(2)
    model = Net()
    stepper = stepper_for(model, weight_decay=0.0)
    stepper.step([batch], lr=LR)
    twin = copy.deepcopy(model)
    stepper.adopt(FinetuneSettings.of(optimizer="lamb", weight_decay=100.0, device="cpu"))
    before = model.inner.weight.detach().clone()
    stepper.step([more], lr=LR)
    # The rest of the update is decay, whose trust ratio is that of x and 100 x.
    now = {name: p.detach() for name, p in _named(model)}
    assert float((now["inner.weight"] - before * (1 - LR)).norm() / before.norm()) < 1e-2
    assert float((now["norm.weight"] - twin.norm.weight.detach()).abs().max()) < 10 * LR


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plans_know_what_each_optimizer_keeps(optimizer: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(256, 256, bias=False)
    stepper = stepper_for(model, optimizer=optimizer)
    stepper.step([(torch.randn(2, 256), torch.randint(0, 256, (2,)))], lr=LR)
    kept = stepper.bytes().optimizer_state
    weights = 4 * 256 * 256
    assert kept == pytest.approx(STATE[optimizer] * weights, rel=1e-3)
    plan = zero_plan(model, optimizer=optimizer, gpus=1)
    assert kept == pytest.approx(plan.at(0).optimizer_state, rel=1e-3)
