"""State that forward keeps between calls or hides from autograd is correct, or refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ortlab
from ortlab.engines.ortmodule.engine import OrtModuleEngine
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.self_check import SelfCheckFailed
from ortlab.engines.torchscript.isolation import NotInGraph
from ortlab.settings import EngineSettings

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A layer whose forward is `how`."""

    def __init__(self, how: Forward) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def _wrap(model: nn.Module, **settings: Any) -> nn.Module:
    return OrtModuleEngine().wrap(model, EngineSettings.of(**settings))


def _assert_trains_as_eager(model: nn.Module) -> nn.Module:
    """Compare three SGD steps, a batch each: outputs, gradients and buffers; return the wrapper."""
    twin = copy.deepcopy(model)
    wrapped = _wrap(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.03) for each in (model, twin)]
    for i in range(3):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        found, expected = wrapped(x), twin(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for output, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            output.square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    return wrapped


# --- buffers that forward replaces


def _averaged(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    model.mean = 0.9 * model.mean + 0.1 * y.detach().mean(0)
    return torch.sub(y, model.mean)


def _averaged_before(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x) - model.mean
    model.mean = 0.9 * model.mean + 0.1 * y.detach().mean(0)
    return torch.as_tensor(y)


def _first_mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.mean is None:
        model.mean = model.layer(x).detach().mean(0)
    return torch.sub(model.layer(x), model.mean)


@pytest.mark.parametrize("how", [_averaged, _averaged_before, _first_mean])
def test_a_buffer_that_forward_sets_anew_is_refused(how: Forward) -> None:
    """A replaced buffer is refused: ORT's session would end the process or compute a wrong mean.

    The first case ends the process; the last would keep the mean of a quarter of the batch.
    """
    model = Layer(how)
    before = None if how is _first_mean else torch.zeros(3)
    model.register_buffer("mean", before)
    with pytest.raises(ExportFailed, match=r"replaces its buffer mean.*engine='eager'"):
        _wrap(model)(torch.randn(8, 3))
    assert model.mean is before
    fallen_back = _wrap(model, fallback=True)
    fallen_back(torch.randn(8, 3))
    assert model.mean is not before


def test_a_buffer_that_forward_makes_anew_as_it_was_trains() -> None:
    """A buffer that forward recreates with equal values trains, such as rotary frequencies."""

    def tabled(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return torch.mul(model.layer(x), model.table)

    model = Layer(tabled)
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    _assert_trains_as_eager(model)


def test_a_buffer_that_forward_changes_in_place_is_refused() -> None:
    """The graph cannot hold the change; only BatchNorm's own buffers are supported."""

    def averaged(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.layer(x)
        model.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return torch.sub(y, model.mean)

    model = Layer(averaged)
    model.register_buffer("mean", torch.zeros(3))
    with pytest.raises(SelfCheckFailed, match=r"1 of 1 buffers differ.*mean.*engine='eager'"):
        _wrap(model)(torch.randn(8, 3))
    assert not model.mean.any()


# --- tensors other than parameters and buffers, which a graph holds as constants

KEPT = {"mean": torch.zeros(3)}
COUNT = torch.zeros(3)


def _in_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    model.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return torch.sub(y, model.mean)


def _in_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    KEPT["mean"].add_(y.detach().mean(0))
    return torch.sub(y, KEPT["mean"])


def _counted(model: Any, x: torch.Tensor) -> torch.Tensor:
    COUNT.add_(1)
    return torch.mul(model.layer(x), COUNT)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (_in_attribute, "Layer.mean"),
        (_in_global, "tests.engines.ortmodule.test_forward_state.KEPT.mean"),
        (_counted, "tests.engines.ortmodule.test_forward_state.COUNT"),
    ],
)
def test_a_constant_that_forward_changes_in_place_is_refused(how: Forward, name: str) -> None:
    """The call is refused: eager torch gives another result each time, so no check can compare."""
    model: Any = Layer(how)
    model.mean = torch.zeros(3)
    with pytest.raises(ExportFailed, match=rf"forward changes {name} in place.*engine='eager'"):
        _wrap(model)(torch.randn(8, 3))
    assert not any(each.any() for each in (model.mean, COUNT, *KEPT.values()))


def test_a_constant_that_forward_reads_trains() -> None:
    model: Any = Layer(lambda model, x: model.layer(x) - model.mean)
    model.mean = torch.ones(3)
    _assert_trains_as_eager(model)


# --- .data, which torch's tracer takes for a constant


def _straight_through(model: Any, x: torch.Tensor) -> torch.Tensor:
    soft = model.layer(x).sigmoid()
    return torch.add(((soft > 0.5).float() - soft).data, soft)


@pytest.mark.parametrize(
    "how",
    [
        _straight_through,
        lambda model, x: functional.linear(x, model.layer.weight.data) + model.layer(x),
        lambda model, x: model.layer(x) / model.layer.weight.data.norm(),
        lambda model, x: functional.linear(x, model.layer.weight.detach()) + model.layer(x),
        lambda model, x: model.layer(model.layer(x).data),
    ],
    ids=["straight-through", "weight", "norm", "detached weight", "between"],
)
def test_data_is_what_it_is_at_each_call(how: Forward) -> None:
    _assert_trains_as_eager(Layer(how))


def test_what_is_detached_is_not_written_over() -> None:
    """ORT reuses memory without further readers, and used to count only one of two readers."""

    def distilled(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = model.layer(x)
        return torch.mul(y.detach().softmax(-1), y.log_softmax(-1))

    _assert_trains_as_eager(Layer(distilled))


def test_a_parameter_whose_data_forward_changes_is_refused() -> None:
    def clamped(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.layer.weight.data.clamp_(-0.1, 0.1)
        return torch.as_tensor(model.layer(x))

    with pytest.raises(ExportFailed, match=r"parameter layer\.weight in place.*engine='eager'"):
        _wrap(Layer(clamped))(torch.randn(8, 3))


def test_data_that_forward_sets_is_refused() -> None:
    def set_anew(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.layer.weight.data = model.layer.weight.data.clamp(-0.1, 0.1)
        return torch.as_tensor(model.layer(x))

    with pytest.raises(NotInGraph, match=r"sets a tensor's \.data.*engine='eager'"):
        _wrap(Layer(set_anew))(torch.randn(8, 3))


# --- computations while gradients are off


def _under_no_grad(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = model.layer(x).relu()
    return torch.mul(model.layer(h), x)


def _taught(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(False):
        taught = model.layer(x).softmax(-1)
        with torch.enable_grad():
            y = model.layer(x)
        best = taught.max(-1)
    return torch.mul(taught * best.values[:, None], y.log_softmax(-1))


@torch.no_grad()
def _decorated(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layer(x)
    return found.tanh_()


def _under_decorator(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.add(_decorated(model.layer, x), model.layer(x).tanh())


def _by_mode(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.layer(x)
    return torch.as_tensor(y * 2 if torch.is_grad_enabled() else y)


@pytest.mark.parametrize("how", [_under_no_grad, _taught, _under_decorator, _by_mode])
def test_what_is_computed_under_no_grad_has_no_gradient(how: Forward) -> None:
    wrapped = _assert_trains_as_eager(Layer(how))
    x = torch.randn(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), OrtModuleEngine().unwrap(wrapped)(x))


def test_what_needs_no_gradient_costs_no_detach() -> None:
    """No detach node is added for positions and masks, which each layer computes under no_grad."""

    def positioned(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = torch.outer(torch.arange(x.shape[0]).float(), model.frequencies).cos()
        return torch.mul(model.layer(x), angles)

    model = Layer(positioned)
    model.register_buffer("frequencies", torch.rand(3))
    wrapped = _assert_trains_as_eager(model)
    assert not [node for node in ortlab.graphs(wrapped).gradient.nodes if node.op == "ATen"]


# --- inputs that change between a call and its backward


def _embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 3), nn.Tanh())


def _judged(model: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.layer(torch.ones(4, 3)), x.view(-1))


def _shifted(model: Any, x: torch.Tensor) -> torch.Tensor:
    labels = functional.pad(x, (0, 1))[..., 1:].reshape(-1)
    return functional.cross_entropy(model.layer(torch.ones(4, 3)), labels)


NUMBERS = torch.tensor([[0, 1], [2, 1]])


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (nn.Linear(3, 3), torch.randn(4, 3)),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), torch.randn(4, 3, 1)),
        (_embedded(), NUMBERS),
        (Layer(_judged), NUMBERS),
        (Layer(_shifted), NUMBERS),
        (Layer(lambda model, x: model.layer(torch.ones(4, 3)) + x), torch.randn(4, 3)),
        (Layer(lambda model, x: model.layer((x * 2).tanh())), torch.randn(4, 3)),
        (Layer(lambda model, x: model.layer(torch.ones_like(x))), torch.randn(4, 3)),
        (nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Tanh(), nn.Linear(3, 3)),
         torch.randn(4, 3)),
        (nn.Linear(3, 3), torch.randn(3, 4).t()),
    ],
    ids=["linear", "flattened", "ids", "labels", "shifted labels", "added", "computed", "shape",
         "frozen", "transposed"],
)  # fmt: skip
def test_an_input_is_changed_where_eager_torch_lets_it(
    model: nn.Module, given: torch.Tensor
) -> None:
    """A reused batch buffer is refused or works as in eager; ORT used the next batch's values."""
    twin, given = copy.deepcopy(model), given.clone()
    wrapped = _wrap(model)
    for each in (wrapped, twin):  # one call without the change, so that the first check is over
        each(given).sum().backward()
    now, then = given.clone(), given.clone()
    outputs = wrapped(now).sum(), twin(then).sum()
    for value in (now, then):
        value.copy_(value.flip(0))
    try:
        outputs[1].backward()
    except RuntimeError:
        with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
            outputs[0].backward()
        return
    outputs[0].backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_inputs_are_let_go_of_by_backward() -> None:
    x = torch.randn(4, 3)
    wrapped = _wrap(nn.Linear(3, 3))
    wrapped(x)
    alive, loss = weakref.ref(x), wrapped(x).sum()
    loss.backward()
    wrapped(torch.randn(4, 3))
    del x
    assert alive() is None


def test_an_input_of_inference_mode_is_taken() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 3)
    _wrap(nn.Linear(3, 3))(x).sum().backward()
