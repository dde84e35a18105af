"""One contract for every engine: it computes the same results as eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.engines.base import Engine, EngineUnavailable, NotFinite
from ortlab.engines.registry import engine
from ortlab.settings import ENGINES, EngineSettings, FinetuneSettings
from tests.support import tiny

LOSS_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Dict(nn.Module):
    """A model that returns a dictionary with a nested list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layer(x).tanh() * scale
        return {"logits": hidden, "more": [hidden.sum(-1), hidden * 2]}


class Tied(nn.Module):
    """A model that uses one weight twice, as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.output(self.norm(self.embedding(ids)))
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def _frozen() -> nn.Module:
    model = _mlp()
    model[0].weight.requires_grad_(False)
    return model


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def _rows(batch: int, _length: int) -> Inputs:
    return (torch.randn(batch, 6),), {}


def _tokens(batch: int, length: int) -> Inputs:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    ids = torch.randint(0, 50, (batch, length))
    return (), {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(batch) % 2}


def _sequences(batch: int, length: int) -> Inputs:
    ids = torch.randint(0, 50, (batch, length))
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _ids(batch: int, length: int) -> Inputs:
    return (torch.randint(0, 11, (batch, length)),), {}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]] = {
    "mlp": (_mlp, _rows),
    "frozen": (_frozen, _rows),
    "batchnorm": (_normed, _rows),
    "dict": (Dict, _rows),
    "tied": (Tied, _ids),
    "bert": (tiny.bert, _tokens),
    "gpt2": (tiny.gpt2, _sequences),
}


@pytest.fixture(params=ENGINES)
def each(request: pytest.FixtureRequest) -> Engine:
    """Return each engine available here; skip the others with the missing requirement."""
    try:
        return engine(request.param)
    except EngineUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[int, int], Inputs]]:
    """Return a model and the function that makes its inputs."""
    torch.manual_seed(7)
    make, inputs = MODELS[request.param]
    return make(), inputs


SLOW = {("compile", "gpt2")}
"""Cases that take a CPU minute where nothing is compiled; "bert" and "tied" are similar."""

every_model = pytest.mark.parametrize(
    ("each", "case"),
    [
        pytest.param(name, model, marks=[pytest.mark.nightly] if (name, model) in SLOW else [])
        for name in ENGINES
        for model in MODELS
    ],
    indirect=True,
)


def _settings(name: str, **changes: Any) -> FinetuneSettings:
    return FinetuneSettings.of(engine=name, device="cpu", max_grad_norm=None, **changes)


def _flat(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output
    return [tensor for value in values for tensor in _flat(value)]


def _scalar(output: Any) -> torch.Tensor:
    """Return a scalar that depends on every output."""
    total = torch.zeros(())
    for i, value in enumerate(_flat(output)):
        total = total + (value * (i + 1)).sum() / max(value.numel(), 1)
    return total


def _assert_close(reference: torch.Tensor, other: torch.Tensor, tolerance: float) -> None:
    error = (reference - other).norm() / reference.norm().clamp(min=1e-8)
    assert error <= tolerance, f"relative error {error:.1e} above {tolerance:.0e}"


def _compare(reference: nn.Module, original: nn.Module, wrapped: nn.Module, inputs: Inputs) -> None:
    args, kwargs = inputs
    reference.zero_grad()
    original.zero_grad()
    expected, found = reference(*args, **kwargs), wrapped(*args, **kwargs)
    for a, b in zip(_flat(expected), _flat(found), strict=True):
        _assert_close(a, b, LOSS_TOLERANCE)
    _scalar(expected).backward()
    _scalar(found).backward()
    _compare_gradients(reference, original)


def _compare_gradients(reference: nn.Module, original: nn.Module) -> None:
    whole = torch.stack(
        [p.grad.norm() for p in reference.parameters() if p.grad is not None]
    ).norm()
    assert whole > 0
    for (name, a), b in zip(reference.named_parameters(), original.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None and a.grad.norm() > 1e-6 * whole:
            _assert_close(a.grad, b.grad, GRADIENT_TOLERANCE)


@every_model
def test_loss_and_every_gradient(each: Engine, case: Any) -> None:
    """Results match in train mode, for other batch sizes, and in eval mode with gradients."""
    original, inputs = case
    reference = copy.deepcopy(original)
    wrapped = each.wrap(original, _settings(each.name).model)
    for module in (reference, original):
        module.train()
    _compare(reference, original, wrapped, inputs(4, 8))
    _compare(reference, original, wrapped, inputs(6, 13))
    for a, b in zip(reference.buffers(), original.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)
    reference.eval()
    wrapped.eval()
    _compare(reference, original, wrapped, inputs(4, 8))


@every_model
def test_evaluation_without_gradients(each: Engine, case: Any) -> None:
    original, inputs = case
    reference = copy.deepcopy(original).eval()
    wrapped = each.wrap(original, _settings(each.name).model).eval()
    with torch.no_grad():
        for shape in ((4, 8), (2, 5)):
            args, kwargs = inputs(*shape)
            expected, found = reference(*args, **kwargs), wrapped(*args, **kwargs)
            for a, b in zip(_flat(expected), _flat(found), strict=True):
                assert not b.requires_grad
                _assert_close(a, b, LOSS_TOLERANCE)


def test_two_forwards_before_one_backward(each: Engine) -> None:
    torch.manual_seed(3)
    original = _mlp()
    reference = copy.deepcopy(original)
    wrapped = each.wrap(original, _settings(each.name).model)
    first, second = torch.randn(4, 6), torch.randn(5, 6)
    for module in (reference, wrapped):
        (module(first).sin().sum() + module(second).cos().sum()).backward()
    _compare_gradients(reference, original)


def test_results_keep_their_type(each: Engine) -> None:
    wrapped = each.wrap(Dict(), _settings(each.name).model)
    output = wrapped(torch.randn(2, 6))
    assert set(output) == {"logits", "more"}
    assert [tuple(value.shape) for value in output["more"]] == [(2,), (2, 4)]
    bert = each.wrap(tiny.bert(), _settings(each.name).model)
    _, batch = _tokens(2, 6)
    assert bert(**batch).loss.shape == ()
    assert bert(**batch).logits.shape == (2, 2)


def test_ten_steps_follow_eager(each: Engine) -> None:
    """Loss, schedule, update and evaluation of a stepper match over ten AdamW steps."""
    torch.manual_seed(5)
    model = tiny.bert()
    reference = engine("eager").prepare(copy.deepcopy(model), None, _settings("eager"))
    stepper = each.prepare(model, None, _settings(each.name))
    for i in range(10):
        _, batch = _tokens(4, 8 + i % 3)
        a = reference.step([batch], lr=1e-3)
        b = stepper.step([batch], lr=1e-3)
        assert a.samples == b.samples == 4
        assert a.tokens == b.tokens == batch["input_ids"].numel()
        _assert_close(a.loss, b.loss, 10 * LOSS_TOLERANCE)
    _, batch = _tokens(8, 9)
    one, other = reference.evaluate(batch), stepper.evaluate(batch)
    assert (one.correct, one.predicted) == (other.correct, other.predicted)
    assert one.predicted == 8
    stepper.close()


def test_accumulation_is_the_mean_of_the_gradients(each: Engine) -> None:
    torch.manual_seed(5)
    model = _mlp()
    loss = functional.cross_entropy
    settings = _settings(each.name, optimizer="sgd", weight_decay=0.0)
    whole = engine("eager").prepare(copy.deepcopy(model), loss, settings)
    parts = each.prepare(model, loss, settings)
    x, y = torch.randn(8, 6), torch.arange(8) % 4
    whole.step([(x, y)], lr=0.1)
    result = parts.step([(x[:4], y[:4]), (x[4:], y[4:])], lr=0.1)
    assert result.samples == 8
    expected, found = whole.state_dict()["model"], parts.state_dict()["model"]
    for name in expected:
        _assert_close(expected[name], found[name], GRADIENT_TOLERANCE)


def test_a_loss_that_is_not_finite_changes_no_weight(each: Engine) -> None:
    torch.manual_seed(5)
    stepper = each.prepare(_mlp(), functional.cross_entropy, _settings(each.name))
    x, y = torch.randn(4, 6), torch.arange(4)
    stepper.step([(x, y)], lr=0.1)
    assert stepper.finite()
    before = {k: v.clone() for k, v in stepper.state_dict()["model"].items()}
    stepper.step([(x * float("nan"), y)], lr=0.1)
    stepper.step([(x, y)], lr=0.1)
    assert not stepper.finite()
    after = stepper.state_dict()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_changes_no_weight(each: Engine) -> None:
    """An infinite gradient changes no weight: at 0, the square root's loss is still finite."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    stepper = each.prepare(model, lambda y, _: y.abs().sqrt().sum(), _settings(each.name))
    result = stepper.step([(torch.ones(2, 3), torch.zeros(2))], lr=0.1)
    assert result.loss == 0.0
    assert not stepper.finite()
    assert not model.weight.any()


def test_statistics_stay_what_they_were_before_a_step_that_is_not_finite(each: Engine) -> None:
    torch.manual_seed(5)
    model = _normed()
    stepper = each.prepare(model, functional.cross_entropy, _settings(each.name))
    x, y = torch.randn(4, 6), torch.arange(4)
    stepper.step([(x, y)], lr=0.1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stepper.step([(x * float("nan"), y)], lr=0.1)
    assert not stepper.finite()
    for name, buffer in model.named_buffers():
        assert torch.equal(before[name], buffer), name


def test_evaluation_leaves_a_frozen_part_frozen(each: Engine) -> None:
    """Evaluation keeps a frozen part frozen, and the model in its original mode."""
    model = _normed().eval()
    model.train()
    model[1].eval()
    stepper = each.prepare(model, functional.cross_entropy, _settings(each.name))
    x, y = torch.randn(4, 6), torch.arange(4)
    stepper.step([(x, y)], lr=0.1)
    stepper.evaluate((x, y))
    assert model.training
    assert not model[1].training
    assert torch.equal(model[1].running_mean, torch.zeros(8))
    stepper.close()
    evaluating = _normed().eval()
    stepper = each.prepare(evaluating, functional.cross_entropy, _settings(each.name))
    stepper.step([(x, y)], lr=0.1)
    stepper.close()
    assert not any(module.training for module in evaluating.modules())


def test_state_comes_back(each: Engine) -> None:
    """The weights and optimizer state of one stepper continue in another."""
    torch.manual_seed(5)
    model = _mlp()
    loss = functional.cross_entropy
    x, y = torch.randn(4, 6), torch.arange(4)
    first = each.prepare(model, loss, _settings(each.name))
    for _ in range(3):
        first.step([(x, y)], lr=0.01)
    state = copy.deepcopy(first.state_dict())
    assert set(state["model"]) == set(_mlp().state_dict())
    second = each.prepare(_mlp(), loss, _settings(each.name))
    second.load_state_dict(state)
    for stepper in (first, second):
        stepper.step([(x, y)], lr=0.01)
    one, other = first.state_dict()["model"], second.state_dict()["model"]
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ({"x": torch.zeros(2, 6), "typo": 1}, None, "does not fit forward"),
        ((torch.zeros(2, 6), torch.zeros(2)), None, "name a loss"),
        ((torch.zeros(2, 6),), functional.cross_entropy, r"\(inputs, target\)"),
        (torch.zeros(2, 6), None, "returns no loss"),
        ((torch.zeros(2, 6), torch.tensor([0, 1])), lambda a, _: a, "not a scalar"),
    ],
)
def test_a_batch_that_does_not_fit(each: Engine, batch: Any, loss: Any, message: str) -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    stepper = each.prepare(Net(6, 4), loss, _settings(each.name))
    with pytest.raises(ValueError, match=message):
        stepper.step([batch], lr=0.1)


def test_not_finite_is_an_error_of_its_own() -> None:
    assert issubclass(NotFinite, RuntimeError)


def test_an_unknown_engine_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'eager'"):
        engine("eagr")


def test_bf16_steps_are_those_of_autocast() -> None:
    model, call = tiny.bert(), _tokens(4, 8)[1]
    twin = copy.deepcopy(model)
    settings = FinetuneSettings.of(
        engine="eager", precision="bf16", max_grad_norm=None, device="cpu", weight_decay=0.0
    )
    stepper = engine("eager").prepare(model, None, settings)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for _ in range(3):
        loss = stepper.step([call], lr=1e-3).loss
        with torch.autocast("cpu", torch.bfloat16):
            expected = twin(**call).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert float(loss) == float(expected.detach())


@pytest.mark.parametrize("name", ["eager", "compile"])
def test_a_wrapped_torch_model_leaves_autocast_to_its_loop(name: str) -> None:
    with pytest.raises(ValueError, match=r"use torch\.autocast around"):
        engine(name).wrap(_mlp(), EngineSettings.of(engine=name, precision="bf16"))
