"""The comparison finds every difference, reports its size, and has no side effects."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.engines import self_check
from ortlab.engines.self_check import (
    Observed,
    SelfCheckFailed,
    compare,
    in_double,
    is_at_a_kink,
    is_rounding,
    nudged,
    observe,
    parts_of,
)
from ortlab.engines.torchscript.isolation import NoDropout


def _observed(**changes: Any) -> Observed:
    torch.manual_seed(2)
    values: dict[str, Any] = {
        "outputs": {"output": torch.randn(4, 3)},
        "gradients": {"weight": torch.randn(3, 3), "bias": torch.randn(3)},
        "buffers": {"mean": torch.randn(3)},
        "drew": False,
    }
    return Observed(**{**values, **changes})


def test_equal_is_equal() -> None:
    verdict = compare(_observed(), _observed(), low_precision=False)
    assert (verdict.outputs, verdict.gradients) == (1, 2)
    assert verdict.output_error == verdict.gradient_error == 0.0


@pytest.mark.parametrize("scale", [1e-14, 1e-7, 1.0, 1e14, 1e30, 1e37])
@pytest.mark.parametrize("error", [0.0, 1e-5, 1e-2])
def test_errors_are_relative_at_any_scale(scale: float, error: float) -> None:
    """Errors are relative at any scale; single precision holds squares from 1e-45 to 1e38."""
    torch.manual_seed(5)
    values = torch.randn(100_000).double() * scale
    other = values * (1 + error)
    found = _error_of(values.float(), other.float())
    assert found == pytest.approx(error, rel=2e-2)


@pytest.mark.parametrize("at", [5, 70_002, 199_999])
def test_one_number_among_many(at: int) -> None:
    """One wrong number among 200,000 is found, with infinities and NaN equal on both sides."""
    torch.manual_seed(4)
    values = torch.randn(200_000)
    values[::1000] = float("inf")
    values[1::1000] = float("nan")
    other = values.clone()
    other[at] += 1.0
    finite = values[values.isfinite()].double()
    kept = _error_of(values, values.clone())
    error = _error_of(values, other)
    assert kept == 0.0
    assert error == pytest.approx(float((other[at] - values[at]).double() / finite.norm()))
    other[at] = float("inf")
    error = _error_of(values, other)
    assert error == float("inf")


def _error_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative error of a single output, without a tolerance."""
    return self_check._errors({"output": a}, {"output": b})["output"]


@pytest.mark.parametrize(
    ("kind", "name", "factor", "passes"),
    [
        ("outputs", "output", 1 + 5e-5, True),
        ("outputs", "output", 1 + 5e-4, False),
        ("buffers", "mean", 1 + 5e-4, False),
        ("gradients", "bias", 1 + 5e-4, True),
        ("gradients", "bias", 1 + 5e-3, False),
        ("gradients", "bias", float("nan"), False),
    ],
)
def test_tolerances(kind: str, name: str, factor: float, passes: bool) -> None:
    values = dict(getattr(_observed(), kind))
    values[name] = values[name] * factor
    other = _observed(**{kind: values})
    if passes:
        assert compare(_observed(), other, low_precision=False)
    else:
        with pytest.raises(SelfCheckFailed, match=name):
            compare(_observed(), other, low_precision=False)


def test_another_shape_or_type_is_a_difference() -> None:
    for value in (torch.zeros(4, 4), torch.zeros(4, 3, dtype=torch.float16)):
        reference = _observed(outputs={"output": torch.zeros(4, 3)})
        with pytest.raises(SelfCheckFailed, match="output"):
            compare(reference, _observed(outputs={"output": value}), low_precision=True)


def test_rounding_in_a_gradient_that_is_zero_is_no_difference() -> None:
    noise = {"weight": torch.ones(3, 3), "bias": torch.full((3,), 1e-8)}
    other = {"weight": torch.ones(3, 3), "bias": torch.full((3,), -1e-8)}
    compare(_observed(gradients=noise), _observed(gradients=other), low_precision=False)
    other = {"weight": torch.ones(3, 3), "bias": torch.full((3,), 1e-3)}
    with pytest.raises(SelfCheckFailed, match="bias"):
        compare(_observed(gradients=noise), _observed(gradients=other), low_precision=False)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def _positional_attention(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, None, 0.5)


class _SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x, x, x)


DROPOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "alpha": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "channels": lambda x: functional.dropout1d(x, 0.5),
    "attention": _attention,
    "positional attention": _positional_attention,
    "module": nn.Dropout(0.5),
    "lstm": nn.LSTM(8, 8, num_layers=2, dropout=0.5),
    "gru": nn.GRU(8, 8, num_layers=2, dropout=0.5),
    "multihead": _SelfAttention(8, 2, dropout=0.5),
    "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_no_dropout_is_left(name: str) -> None:
    call = functools.partial(DROPOUTS[name], torch.randn(5, 4, 8))

    def twice() -> list[torch.Tensor]:
        return [
            value if isinstance(value, torch.Tensor) else value[0] for value in (call(), call())
        ]

    noisy, other = twice()
    assert not torch.equal(noisy, other)
    with NoDropout():
        quiet, same = twice()
    assert torch.equal(quiet, same)


@pytest.mark.parametrize("drop", [functools.partial(functional.dropout, p=1.0), nn.Dropout(1.0)])
def test_a_dropout_of_everything_stays(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A dropout with ratio 1 stays: in a graph it is a product with 0."""
    mode = NoDropout()
    with mode:
        assert not drop(torch.ones(3)).any()
    assert not mode.used


class Counts(nn.Module):
    """A layer that changes a buffer and draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, noisy: bool) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layer(x)
        return result + torch.randn(3) if noisy else result


@pytest.mark.parametrize("noisy", [True, False])
def test_observing_leaves_no_trace(noisy: bool) -> None:
    model = Counts()
    state = torch.get_rng_state()
    call = functools.partial(model, torch.ones(2, 3), noisy=noisy)
    seen = observe(call, model, inputs=[], gradients=True)
    assert seen.drew is noisy
    assert seen.buffers["calls"] == 1
    assert set(seen.gradients) == {"layer.weight", "layer.bias"}
    assert model.calls == 0
    assert model.layer.weight.grad is None
    assert torch.equal(state, torch.get_rng_state())
    again = observe(call, model, inputs=[], gradients=True)
    assert torch.equal(seen.gradients["layer.weight"], again.gradients["layer.weight"])


class _HookedWhenCalled(nn.Linear):
    """A layer that records that it installed its hooks, as transformers' models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "hooked", False):
            self.register_forward_hook(lambda *_: None)
            self.hooked = True
        return super().forward(x)


def test_hooks_that_forward_registers_go_with_their_note() -> None:
    model = _HookedWhenCalled(3, 3)
    for _ in range(2):
        observe(lambda: model(torch.ones(1, 3)), model, inputs=[], gradients=True)
    assert not model._forward_hooks
    model(torch.ones(1, 3))
    model(torch.ones(1, 3))
    assert len(model._forward_hooks) == 1


def test_gradients_of_inputs_are_compared_too() -> None:
    model = Counts()
    x = torch.ones(2, 3, requires_grad=True)
    seen = observe(functools.partial(model, x, noisy=False), model, inputs=[x], gradients=True)
    assert "input 0" in seen.gradients
    assert x.grad is None


def test_every_place_of_a_large_output_counts_by_another_number() -> None:
    scale = nn.Parameter(torch.ones(3 * 65_537 + 5))
    model = nn.Module()
    model.register_parameter("scale", scale)
    seen = observe(lambda: scale * 1.0, model, inputs=[], gradients=True)
    cotangent = seen.gradients["scale"]  # the gradient of y = scale is the cotangent
    assert (cotangent != 0).all()
    assert len(set(cotangent[:1000].tolist())) > 990
    rows = cotangent[: 3 * 65_536].reshape(3, -1)
    assert not torch.equal(rows[0], rows[1])
    assert abs(float(cotangent.std()) - 1) < 0.02


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),  # their sum is not finite
        ([float("inf"), 1.0], False),
        ([float("inf"), float("-inf")], False),
        ([float("nan"), 1.0], False),
        ([], True),
    ],
    ids=str,
)
def test_finite_are_all_numbers_or_none(values: list[float], finite: bool) -> None:
    assert _observed(gradients={"weight": torch.tensor(values)}).is_finite() is finite
    assert _observed(outputs={"output": torch.tensor(values)}).is_finite() is finite


def test_rows_are_a_quarter_of_the_batch() -> None:
    ids, mask = torch.arange(36).reshape(9, 4), torch.ones(9, 4, requires_grad=True)
    call = (ids, 0.5), {"more": {"mask": [mask], "name": "x"}}
    (((rows, number), named),) = parts_of(nn.Linear(4, 4), *call)
    assert torch.equal(rows, ids[[0, 4]])
    assert (number, named["more"]["name"]) == (0.5, "x")
    (taken,) = named["more"]["mask"]
    assert torch.equal(taken, mask[[0, 4]])
    assert taken.is_leaf
    assert taken.requires_grad


@pytest.mark.parametrize(
    ("count", "taken"),
    [(4, [0, 2]), (7, [0, 3]), (9, [0, 4]), (12, [0, 4, 8]), (19, [0, 4, 8, 12])],
)
def test_rows_are_two_at_least_and_spread(count: int, taken: list[int]) -> None:
    assert rows_of(count) == taken


@pytest.mark.parametrize(("count", "taken"), [(4, [3]), (9, [8]), (16, [7, 15]), (19, [8, 17])])
def test_a_second_look_takes_half_as_many(count: int, taken: list[int]) -> None:
    assert rows_of(count, again=True) == taken


def rows_of(count: int, **looks: bool) -> list[int]:
    ((args, _),) = parts_of(nn.Linear(4, 4), (torch.arange(count),), {}, **looks)
    return args[0].tolist()


@pytest.mark.parametrize(
    ("rows", "tokens", "taken"),
    [(4, 256, (2, 32)), (8, 1024, (2, 128)), (8, 100, (2, 34)), (2, 256, (2, 32))],
)
def test_of_token_ids_an_eighth_will_do(rows: int, tokens: int, taken: tuple[int, int]) -> None:
    ids, mask = torch.arange(rows * tokens).reshape(rows, tokens), torch.ones(rows, tokens) > 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows)}
    (_, few), *more = parts_of(nn.Linear(4, 4), (), given)
    assert few["input_ids"].shape == few["attention_mask"].shape == taken
    first, second = few["input_ids"][:, :2].unbind(1)
    assert (second - first == (tokens - 1) // (taken[1] - 1)).all()
    assert few["labels"].tolist() == [0, rows // 2 if rows > 3 else 1]
    assert [call["input_ids"].shape for _, call in more] == [(2, tokens)] * (rows > 3)


@pytest.mark.parametrize(
    "given",
    [
        (torch.ones(8, 256),),
        (torch.ones(8, 256, dtype=torch.int64), torch.ones(8, 256, 4)),
        (torch.ones(8, 256, dtype=torch.int64), torch.ones(8, 64, dtype=torch.int64)),
        (torch.ones(8, 63, dtype=torch.int64),),
        (torch.ones(8, dtype=torch.int64),),
    ],
    ids=["features", "embeddings", "two lengths", "short", "numbers"],
)
def test_all_of_what_may_be_no_token_stays(given: tuple[torch.Tensor, ...]) -> None:
    ((args, _),) = parts_of(nn.Linear(4, 4), given, {})
    assert [each.shape[1:] for each in args] == [each.shape[1:] for each in given]


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (nn.Linear(4, 4), (torch.ones(3, 4),)),
        (nn.Linear(4, 4), (torch.ones(8, 4), torch.ones(4, 8))),
        (nn.Linear(4, 4), (torch.ones(8, 4), object())),
        (nn.Linear(4, 4), (torch.tensor(8.0),)),
        (nn.Sequential(nn.BatchNorm1d(4)), (torch.ones(8, 4),)),
    ],
    ids=["few", "another dimension", "an object", "a number", "BatchNorm"],
)
def test_no_rows_where_they_cannot_be_told(module: nn.Module, args: tuple[Any, ...]) -> None:
    assert parts_of(module, args, {}) == []


@pytest.mark.parametrize(
    ("theirs", "ours", "rounding"),
    [
        (0.0, 5e-4, True),
        (0.0, 5e-3, False),
        (1e-2, 2e-2, True),
        (1e-2, 4e-2, False),
        (float("inf"), 0.5, False),
        (float("nan"), 0.5, False),
    ],
)
def test_an_error_is_rounding_where_eager_torch_has_one_like_it(
    theirs: float, ours: float, rounding: bool
) -> None:
    """An error counts as rounding if eager torch has a similar one against double precision."""
    exact, seen = _observed(), {}
    for name, off in (("eager", theirs), ("ortmodule", ours)):
        bias = exact.gradients["bias"] * (1 + off)
        seen[name] = _observed(gradients={**exact.gradients, "bias": bias})
    doubled = self_check._in_double(exact)
    assert is_rounding([seen["eager"]], seen["ortmodule"], doubled) is rounding


def _wide(activation: nn.Module, hidden: int = 2048) -> tuple[nn.Sequential, torch.Tensor]:
    """Return a model where one of 64 numbers per hidden unit is zero but for rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), activation, nn.Linear(hidden, 1))
    x = 4 * torch.randn(64, 8)
    _shift(model, -model[0](x)[0, 0].item())
    return model, x


def _shift(model: nn.Sequential, by: float) -> nn.Sequential:
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias[0] += by
    return model


def _seen(model: nn.Module, x: torch.Tensor) -> Observed:
    return observe(functools.partial(model, x), model, inputs=[], gradients=True)


def _exact(model: nn.Module, x: torch.Tensor) -> Observed:
    call = in_double(model, (x,), {})
    assert call is not None
    return _seen(call[0], *call[1])


def _at_a_kink(model: nn.Module, x: torch.Tensor, other: Observed) -> bool:
    moved = (_seen(one, *args) for one, args, _ in nudged(model, (x,), {}))
    return is_at_a_kink(_exact(model, x), other, moved)


@pytest.mark.parametrize("side", [-1.0, 1.0], ids=["below", "above"])
def test_either_side_of_a_relu_near_zero_is_right(side: float) -> None:
    """Either side of a ReLU near zero passes; double precision says that eager torch is right."""
    model, x = _wide(nn.ReLU())
    eager = _seen(_shift(model, -1e-7 * side), x)
    other = _seen(_shift(copy.deepcopy(model), 1e-6 * side), x)
    with pytest.raises(SelfCheckFailed):
        compare(eager, other, low_precision=False)
    assert not is_rounding([eager], other, _exact(model, x))
    assert _at_a_kink(model, x, other)


def test_a_kink_that_moves_much_is_an_error() -> None:
    model, x = _wide(nn.ReLU(), hidden=8)
    _shift(model, -1e-7)
    assert not _at_a_kink(model, x, _seen(_shift(copy.deepcopy(model), 1e-6), x))


@pytest.mark.parametrize(
    ("activation", "kind", "off"),
    [
        (nn.GELU(), "gradients", 2e-3),  # has no kink
        (nn.ReLU(), "gradients", 6e-2),
        (nn.ReLU(), "gradients", float("nan")),
        (nn.ReLU(), "outputs", 2e-4),  # a kink does not change outputs
    ],
    ids=str,
)
def test_what_no_kink_makes_is_an_error(activation: nn.Module, kind: str, off: float) -> None:
    model, x = _wide(activation)
    seen = _seen(model, x)
    *rest, (name, value) = getattr(seen, kind).items()
    changed: dict[str, Any] = {kind: {**dict(rest), name: value * (1 + off)}}
    assert not _at_a_kink(model, x, dataclasses.replace(seen, **changed))


@pytest.mark.parametrize(("moves", "explained"), [(2e-4, True), (5e-5, False)])
def test_buffers_move_by_rounding_as_gradients_do(moves: float, explained: bool) -> None:
    """Buffers may differ as much as they do in eager torch with nudged parameters."""

    def seen(buffer: float, gradient: float) -> Observed:
        return _observed(
            buffers={"mean": torch.tensor([1 + buffer])},
            gradients={"weight": torch.tensor([1 + gradient])},
        )

    assert is_at_a_kink(seen(0.0, 0.0), seen(3e-4, 1e-2), [seen(moves, 1e-2)]) is explained
    assert not is_at_a_kink(seen(0.0, 0.0), seen(3e-4, 1e-2), [seen(float("nan"), 1e-2)])


def test_parameters_are_nudged_by_the_opposite_in_turn() -> None:
    model = nn.Linear(8, 8)
    off = [one.weight - model.weight for one, _, _ in nudged(model, (), {})]
    assert len({tuple(each.flatten().tolist()) for each in off}) == len(off) == 8
    for one, other in zip(off[::2], off[1::2], strict=True):
        torch.testing.assert_close(one, -other, rtol=0, atol=1e-7)
        assert 1e-8 < one.abs().max() <= 2**-20 * model.weight.abs().max()


def test_another_number_of_outputs_is_no_rounding() -> None:
    exact = self_check._in_double(_observed())
    assert not is_rounding([_observed()], _observed(outputs={}), exact)
    assert not is_at_a_kink(exact, _observed(outputs={}), [_observed()])


def test_double_precision_is_that_of_a_copy() -> None:
    model, x = nn.Linear(3, 2), torch.ones(2, 3, requires_grad=True)
    call = in_double(model, (x, 1), {"ids": [torch.ones(2, dtype=torch.long)]})
    assert call is not None
    module, (given, one), kwargs = call
    assert given.dtype == torch.float64
    assert given.requires_grad
    assert one == 1
    assert kwargs["ids"][0].dtype == torch.long
    assert module(given).dtype == torch.float64
    assert model.weight.dtype == torch.float32
    assert in_double(model, (object(),), {}) is None
