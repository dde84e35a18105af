"""Passes through ORT's session behave alike in C++ and Python: moved parameters and errors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import native, passes

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


@pytest.fixture(params=["C++", "Python"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the built extension, and as if nothing could be built."""
    if request.param == "Python":
        monkeypatch.setattr(native, "_functions", dict)
    elif not native._functions():
        pytest.fail("the C++ could not be built")
    return str(request.param)


def _models() -> tuple[nn.Module, nn.Module]:
    """Return a model and its twin; the last of the outputs has no gradient."""
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)
            self.other = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = self.square(x).tanh()
            return self.last(hidden), self.other(hidden), (hidden > 0).float()

    model = Two()
    return model, copy.deepcopy(model)


def _same(wrapped: nn.Module, twin: nn.Module, *, outputs: tuple[int, ...] = (0, 1)) -> None:
    """Assert the same outputs, and the same gradients from some of them."""
    x = torch.randn(4, 6)
    grads = []
    for each in (wrapped, twin):
        each.zero_grad()
        given = x.clone().requires_grad_()
        found = each(given)
        sum(found[i].sin().sum() for i in outputs).backward()  # type: ignore[union-attr]
        grads.append([given.grad, *(p.grad for p in each.parameters()), *found[:2]])
        assert not found[2].requires_grad
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_eager_torchs(either: str) -> None:
    model, twin = _models()
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    for _ in range(3):
        _same(wrapped, twin)
    _same(wrapped, twin, outputs=(1,))  # the first has none, and self.last gets None


def _new(p: nn.Parameter) -> None:
    p.data = p.data + 1.0


def _transposed(p: nn.Parameter) -> None:
    """Transpose a parameter in place: the same memory with other strides."""
    p.data = p.data.t()


def _in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2.0)


def _by_data(p: nn.Parameter) -> None:
    p.data.mul_(0.5)


@pytest.mark.parametrize("move", [_new, _transposed, _in_place, _by_data])
def test_parameters_are_read_where_they_are(
    either: str, move: Callable[[nn.Parameter], None]
) -> None:
    model, twin = _models()
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    _same(wrapped, twin)
    for each in (model, twin):
        move(each.get_parameter("square.weight"))
    _same(wrapped, twin)
    _same(wrapped, twin)


def test_a_view_of_other_sizes_is_noticed(either: str) -> None:
    """A weight with as many elements in the same memory but another shape is noticed."""
    model = nn.Linear(4, 9, bias=False)
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    assert wrapped(torch.ones(2, 4)).shape == (2, 9)
    model.weight.data = model.weight.data.view(6, 6)
    assert wrapped(torch.ones(2, 6)).shape == (2, 6)


def test_what_backward_raises_is_shown_as_it_is(either: str) -> None:
    model, _ = _models()
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    loss = wrapped(torch.randn(4, 6))[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can run backward only once per forward"):
        loss.backward()
    out = wrapped(torch.randn(4, 6))[0]
    with torch.no_grad():
        model.get_parameter("square.weight").add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place between"):
        out.sum().backward()


def test_a_pass_leaves_nothing_behind(either: str) -> None:
    """A forward without a backward releases its state and its inputs with its outputs."""
    model, _ = _models()
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    x = torch.randn(4, 6)
    before = _ways_back()  # objects of other tests may remain, for example in a failure's frames
    wrapped(x)[0].sum().backward()
    out = wrapped(x)[0]
    assert len(_ways_back()) == len(before) + 1
    del out
    assert len(_ways_back()) == len(before)


def _ways_back() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) is passes._Backward]


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.__setitem__("a", 2),
        lambda d: d.__setitem__("b", 2),
        lambda d: d.pop("a"),
        lambda d: d.update(a=1.0),
        lambda d: d.clear(),
        lambda d: d.setdefault("c", 1),
    ],
)
def test_every_edit_is_another_version(edit: Callable[[dict[str, Any]], Any]) -> None:
    watched: dict[str, Any] = {"a": 1}
    before = native.versions((watched, {}))
    assert before is not None
    assert native.versions((watched, {})) is not None
    edit(watched)
    assert native.versions((watched,)) != before[:8]
