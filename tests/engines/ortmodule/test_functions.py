"""torch.autograd.Functions train in ORT as in eager torch: loss, gradients, another batch size.

The backward of most of them is not the derivative of their forward, so that a lost backward is
detected.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from ortlab.engines.ortmodule.compat import extensions, interop
from ortlab.engines.ortmodule.engine import OrtModuleEngine, execution_of
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.settings import EngineSettings
from tests.support.needed_engines import needs


@pytest.fixture
def ort() -> OrtModuleEngine:
    """Return the engine; skip with its reason where ORT cannot run."""
    needs("ortmodule")
    return OrtModuleEngine()


Middle = Callable[[Tensor, Tensor, Tensor], Any]
"""A function of the hidden values [N, 8], a parameter [8] and a buffer [8]."""


class Net(nn.Module):
    """Two layers with `middle` between them."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.constant: Tensor
        self.register_buffer("constant", torch.linspace(0, 3, 8))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.middle(self.first(x), self.weight, self.constant)
        found: Tensor = self.second(hidden).tanh()
        return found


class Rounded(Function):
    """A function that rounds and passes the gradient through, three times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class SavedInputs(Function):
    """A function that saves both inputs as torch's documentation recommends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * x).sum(0) * 3


class SavedOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * 2


class KeptAsAttribute(Function):
    """A function that saves tensors as attributes: discouraged, but common."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.y = x, x.sin()
        return ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.x.cos() + ctx.y)


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * x.cos() * 2 + second * 5


class Materialized(Function):
    """The unused second output's gradient is a tensor of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * 3 + second.new_ones(second.shape) * 0.1


class NotMaterialized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        assert second is None
        return None if first is None else first * 3


class NotDifferentiable(Function):
    """The second output is part of the loss and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.detach().abs() + 1
        ctx.mark_non_differentiable(scale)
        return x * 2, scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _scale: Tensor) -> Tensor:
        return gradient * 5


class NeedsInputGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, constant: Tensor) -> Tensor:
        assert not (torch.is_grad_enabled() and not ctx.needs_input_grad[0])
        ctx.save_for_backward(weight)
        return x * weight + constant

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.needs_input_grad == (True, True, False)
        (weight,) = ctx.saved_tensors
        return gradient * weight, gradient.sum(0) * 2, None


class NoGradientForSome(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class PlainArguments(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factor: float, flip: bool, mode: str, dims: tuple[int, ...], _no: None
    ) -> Tensor:
        ctx.factor = factor
        x = -x if flip else x
        return (x.sum(dims, keepdim=True) if mode == "sum" else x) * factor + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient * ctx.factor * 7, None, None, None, None, None


class WithSetup(Function):
    """The setup_context style, which takes arguments by name."""

    @staticmethod
    def forward(x: Tensor, scale: float = 3.0) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _x, ctx.scale = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * ctx.scale + y, None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Reversed(Function):
    """The gradient reversal of domain adaptation, which returns its input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Chosen(Function):
    """The outputs include a boolean mask and integer indices; one input is a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = (x > 0) & allowed
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask, x.argmax(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_others: Any) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradient * mask + gradient * 0.1, None


class Listed(Function):
    """Tensors in a list get no gradient; their values are passed anew in each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:
        return x + others[0] * 2 + others[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class Deciding(Function):
    """A function that branches on a tensor's value, which the graph must not freeze."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2.0 if x.shape[0] > 4 and x.sum() < 1e6 else 5.0
        return x * ctx.factor * float(x[0, 0] ** 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor


class WithSymbolic(Function):
    """A function with a symbolic; an export by it would lose the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op("Round", x)


class Outer(Function):
    """A function that calls another Function; its own backward is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner: Tensor = Rounded.apply(x)
        return inner + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 11


def bound(function: Callable[..., Tensor], x: Tensor, weight: Tensor, _constant: Tensor) -> Tensor:
    return function(x, weight)


def in_place(x: Tensor, _weight: Tensor, _constant: Tensor) -> Tensor:
    x = x + 1
    InPlace.apply(x)
    return x * 2 + 1  # reads the value that the function left in x


def reversed_and_straight(x: Tensor, _weight: Tensor, _constant: Tensor) -> Tensor:
    x = x.tanh()
    return Reversed.apply(x) * 2 + x * 5


def three_times(x: Tensor, weight: Tensor, _constant: Tensor) -> Tensor:
    x = SavedInputs.apply(x, weight)
    y = SavedInputs.apply(x, weight.exp())
    return SavedInputs.apply(x, weight) + y


def chosen(x: Tensor, weight: Tensor, constant: Tensor) -> Tensor:
    y, mask, best = Chosen.apply(x, constant > 1)
    return torch.where(mask, y * 2, y - weight) + best.unsqueeze(1)


def listed(x: Tensor, _weight: Tensor, constant: Tensor) -> Tensor:
    return Listed.apply(x, [constant, x[:1]])


def plain_arguments(x: Tensor, _weight: Tensor, _constant: Tensor) -> Tensor:
    return PlainArguments.apply(x, 0.5, True, "sum", (1,), None)


def the_number_of_rows(x: Tensor, _weight: Tensor, _constant: Tensor) -> Tensor:
    return PlainArguments.apply(x, x.shape[0], False, "", (), None)


MIDDLES: dict[str, Middle] = {
    "straight through": lambda x, w, c: Rounded.apply(x),
    "saved inputs": lambda x, w, c: SavedInputs.apply(x, w),
    "taken as a bound method": functools.partial(bound, SavedInputs.apply),
    "saved output": lambda x, w, c: SavedOutput.apply(x) + w,
    "kept as attributes": lambda x, w, c: (KeptAsAttribute.apply(x) * 2).relu(),
    "two outputs": lambda x, w, c: torch.mul(*TwoOutputs.apply(x)),
    "one of two outputs": lambda x, w, c: TwoOutputs.apply(x)[1] + w,
    "materialized": lambda x, w, c: Materialized.apply(x)[0],
    "not materialized": lambda x, w, c: NotMaterialized.apply(x)[0],
    "not differentiable": lambda x, w, c: torch.mul(*NotDifferentiable.apply(x)) * w,
    "needs_input_grad": lambda x, w, c: NeedsInputGradient.apply(x, w, c),
    "no gradient for some": lambda x, w, c: NoGradientForSome.apply(x, w),
    "plain arguments": plain_arguments,
    "the number of rows": the_number_of_rows,
    "setup_context": lambda x, w, c: WithSetup.apply(x) + WithSetup.apply(x, scale=2.0),
    "in place": in_place,
    "reversed": reversed_and_straight,
    "several calls": three_times,
    "other types": chosen,
    "no trainable input": lambda x, w, c: x + Rounded.apply(c),
    "tensors in a list": listed,
    "decides by values": lambda x, w, c: Deciding.apply(x),
    "symbolic": lambda x, w, c: WithSymbolic.apply(x * 3),
    "nobody reads it": lambda x, w, c: (Rounded.apply(w * c), x + c)[1] + w,
    "nested": lambda x, w, c: Outer.apply(x) * w,
    "checkpointed": lambda x, w, c: checkpoint(SavedInputs.apply, x, w, use_reentrant=False),
    "checkpointed with re-entry": lambda x, w, c: checkpoint(
        SavedInputs.apply, x, w, use_reentrant=True
    ),
}


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradient of every parameter; zeros stand for None, as ORT has no other form."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def assert_trains_as_eager(ort: OrtModuleEngine, model: nn.Module, **settings: Any) -> nn.Module:
    """Compare the loss and all gradients, of the input too, for two batches of different sizes."""
    eager = copy.deepcopy(model)
    wrapped = ort.wrap(model, EngineSettings.of(**settings))
    for rows in (5, 3):
        torch.manual_seed(rows)
        x = torch.randn(rows, 6)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        losses = []
        for each, value in zip((eager, wrapped), inputs, strict=True):
            each.zero_grad(set_to_none=True)
            loss = (each(value) * torch.linspace(-1, 2, 4)).pow(2).sum()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        pairs = zip(gradients(model), gradients(eager), strict=True)
        for ours, theirs in [*pairs, (inputs[1].grad, inputs[0].grad)]:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return wrapped


@pytest.mark.parametrize("name", MIDDLES)
def test_trains_as_eager_torch_does(ort: OrtModuleEngine, name: str) -> None:
    torch.manual_seed(0)
    wrapped = assert_trains_as_eager(ort, Net(MIDDLES[name]))
    notes = ort.report(wrapped).notes
    assert sum(note.startswith("checked on") for note in notes) == 2, notes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_modes(ort: OrtModuleEngine, training: bool, grad: bool) -> None:
    """Forward is the same in evaluation mode and without gradients."""
    model = Net(three_times).train(training)
    wrapped = ort.wrap(model, EngineSettings())
    x = torch.randn(4, 6)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(wrapped(x), model(x))


CELL = """
import torch

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * {forward}

    @staticmethod
    def backward(ctx, gradient):
        return gradient * {backward}

def middle(x, weight, constant):
    return Scaled.apply(x) * weight
"""


@pytest.fixture
def cell() -> Iterator[types.ModuleType]:
    """Return a stand-in for a notebook's __main__, in which later definitions replace earlier."""
    module = types.ModuleType("a_notebook")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_a_function_that_is_defined_again(ort: OrtModuleEngine, cell: types.ModuleType) -> None:
    """A rerun of the cell with another forward and backward replaces the old function."""
    exec(CELL.format(forward=2, backward=3), cell.__dict__)
    model = Net(lambda x, w, c: cell.middle(x, w, c))
    wrapped = ort.wrap(model, EngineSettings())
    x = torch.randn(4, 6)
    for forward, backward in ((2, 3), (5, 7), (5, 7)):
        if "Scaled" not in vars(cell) or cell.Scaled.apply(torch.ones(1)) != forward:
            exec(CELL.format(forward=forward, backward=backward), cell.__dict__)
        model.zero_grad()
        eager = copy.deepcopy(model)
        for each in (wrapped, eager):
            each(x).sum().backward()
        for ours, theirs in zip(gradients(model), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    again = [note for note in ort.report(wrapped).notes if note.startswith("exported again")]
    assert len(again) == 1
    assert "a_notebook." in again[0]  # whichever of the cell's definitions is found first


def test_a_backward_that_is_replaced(
    ort: OrtModuleEngine, cell: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    exec(CELL.format(forward=2, backward=3), cell.__dict__)
    model = Net(lambda x, w, c: cell.middle(x, w, c))
    wrapped = ort.wrap(model, EngineSettings.of(self_check=False))
    x = torch.randn(4, 6)
    wrapped(x).sum().backward()
    before = gradients(model)[1].clone()
    model.zero_grad()
    monkeypatch.setattr(cell.Scaled, "backward", staticmethod(lambda _ctx, gradient: gradient * 6))
    wrapped(x).sum().backward()
    torch.testing.assert_close(gradients(model)[1], before * 2)


class Holder:
    """An object that holds a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TakesAnything(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, what: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class ReturnsMore(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _number: Any) -> Tensor:
        return gradient


def made_inside(x: Tensor, *_others: Tensor) -> Tensor:
    class Inside(Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * x  # a tensor of this call only

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * x

    return Inside.apply(x + 1)


REFUSED: list[tuple[Middle, str]] = [
    (
        lambda x, w, c: TakesAnything.apply(x, Holder(x)),
        r"TakesAnything takes a Holder, whose",
    ),
    (lambda x, w, c: x + TakesAnything.apply(3, None) + w, r"TakesAnything takes no tensor"),
    (
        lambda x, w, c: ReturnsMore.apply(x)[0],
        r"ReturnsMore returns int, but ORT passes only ten",
    ),
    (made_inside, r"made_inside\.<locals>\.Inside is created in every forward"),
]


@pytest.mark.parametrize(("middle", "message"), REFUSED)
def test_what_a_graph_cannot_hold_is_refused(
    ort: OrtModuleEngine, middle: Middle, message: str
) -> None:
    wrapped = ort.wrap(Net(middle), EngineSettings())
    with pytest.raises(ExportFailed, match=message):
        wrapped(torch.randn(4, 6))


def test_without_what_it_is_built_with(
    ort: OrtModuleEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the function and what to install; models without functions still run.

    The function cannot be built here, because Python.h is missing.
    """
    interop._ready.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(extensions, "python_header", lambda: tmp_path / "Python.h")
    wrapped = ort.wrap(Net(lambda x, w, c: Rounded.apply(x)), EngineSettings())
    with pytest.raises(ExportFailed, match=r"test_functions\.Rounded.*Python\.h.*python3-dev"):
        wrapped(torch.randn(4, 6))
    plain = ort.wrap(Net(lambda x, w, c: x), EngineSettings())
    assert plain(torch.randn(4, 6)).shape == (4, 4)
    fallen = ort.wrap(Net(lambda x, w, c: Rounded.apply(x)), EngineSettings.of(fallback=True))
    fallen(torch.randn(4, 6)).sum().backward()
    assert ort.report(fallen).engine_used == "eager"


class Raises(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("no batches of 3")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.shape[0] == 4:
            raise ValueError("no gradients of 4")
        return gradient


def test_what_a_function_raises_is_said(ort: OrtModuleEngine) -> None:
    wrapped = ort.wrap(Net(lambda x, w, c: Raises.apply(x)), EngineSettings.of(self_check=False))
    wrapped(torch.randn(5, 6)).sum().backward()
    with pytest.raises(Exception, match=r"Raises.*ValueError: no batches of 3"):
        wrapped(torch.randn(3, 6))
    with pytest.raises(Exception, match=r"Raises.*ValueError: no gradients of 4"):
        wrapped(torch.randn(4, 6)).sum().backward()
    wrapped(torch.randn(5, 6)).sum().backward()


class Watched(Function):
    """A function that remembers the tensors its last forward saved."""

    kept: weakref.ref[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.copy = x.clone()
        Watched.kept = weakref.ref(ctx.copy)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.copy


@pytest.mark.parametrize("backward", [True, False])
def test_what_is_kept_for_backward_is_let_go(ort: OrtModuleEngine, backward: bool) -> None:
    """Saved tensors are released after backward, or with the outputs where there is no backward."""
    wrapped = ort.wrap(Net(lambda x, w, c: Watched.apply(x)), EngineSettings.of(self_check=False))
    outputs = wrapped(torch.randn(4, 6))
    gc.collect()
    assert Watched.kept() is not None
    if backward:
        outputs.sum().backward()
    else:
        del outputs
    gc.collect()
    assert Watched.kept() is None


class Noisy(Function):
    """A function with its own dropout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = (torch.rand_like(x) < 0.5) * 2.0
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


def test_a_random_function_draws_anew_in_every_call(ort: OrtModuleEngine) -> None:
    """Two calls on the same input draw twice, although ORT merges equal nodes."""
    # A sum, because ORT may run either of them first.
    wrapped = ort.wrap(Net(lambda x, w, c: Noisy.apply(x) + Noisy.apply(x)), EngineSettings())
    x = torch.randn(64, 6)
    model = execution_of(wrapped).module
    torch.manual_seed(3)
    found = wrapped(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, model(x))
    assert found.std(0).min() > 0.01
    assert any("random numbers besides dropout" in note for note in ort.report(wrapped).notes)


def test_two_forwards_before_their_backwards(ort: OrtModuleEngine) -> None:
    model = Net(three_times)
    eager = copy.deepcopy(model)
    wrapped = ort.wrap(model, EngineSettings())
    batches = [torch.randn(5, 6), torch.randn(2, 6)]
    for each in (wrapped, eager):
        losses = [each(x).pow(2).sum() for x in batches]
        for loss in losses:
            loss.backward()
    for ours, theirs in zip(gradients(model), gradients(eager), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def multiplied(factor: float) -> Middle:
    return lambda x, w, c: PlainArguments.apply(x, factor, True, "", (), None) + w


def test_two_models_with_the_same_function(ort: OrtModuleEngine) -> None:
    for factor in (1.0, 4.0):
        assert_trains_as_eager(ort, Net(multiplied(factor)))
