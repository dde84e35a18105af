"""Every kernel against torch's own functions in float64, for many shapes, layouts and types."""

from __future__ import annotations

import gc
import itertools
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

import ortlab
from ortlab.engines.ortmodule import kernels
from tests.support.waiting import HANGS_S

LOW = torch.bfloat16
ULP = 2.0**-8
"""Largest relative error of one rounding to bfloat16: half a unit in the last place."""
EXACT = 3e-6
"""Tolerance relative to the largest element: 2**-24 for float32, summed over long rows."""
SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129, 257)
TYPES = pytest.mark.parametrize("kind", [torch.float32, LOW], ids=["fp32", "bf16"])
WIDTHS = pytest.mark.parametrize("low", [False, True], ids=["wide", "low"])


def _draws(count: int, seed: int) -> Iterator[random.Random]:
    """Yield `count` sources of random sizes, and seed torch's generator with each."""
    for i in range(count):
        torch.manual_seed(1000 * seed + i)
        yield random.Random(1000 * seed + i)


def _sizes(draw: random.Random, ranks: tuple[int, ...], most: int = 40_000) -> list[int]:
    """Return sizes from one of these ranges, with at most `most` elements."""
    while True:
        sizes = [draw.choice(SIZES) for _ in range(draw.choice(ranks))]
        if math.prod(sizes) <= most:
            return sizes


def _laid_out(draw: random.Random, x: Tensor, *, fill: float = torch.nan) -> Tensor:
    """Return the same numbers in a random memory layout, with `fill` in the gaps."""
    way = draw.randrange(4)
    if way == 1 and x.dim() > 1:  # transposed
        a, b = draw.sample(range(x.dim()), 2)
        return x.transpose(a, b).contiguous().transpose(a, b)
    if way == 2 and x.dim():  # every other one
        wider = torch.full((*x.shape[:-1], 2 * x.shape[-1]), fill, dtype=x.dtype)
        wider[..., ::2] = x
        return wider[..., ::2]
    if way == 3:  # with an offset into its storage
        storage = torch.full((x.numel() + 3,), fill, dtype=x.dtype)
        storage[3:] = x.flatten()
        return storage[3:].view(x.shape)
    return x


def _random(draw: random.Random, sizes: Any, kind: torch.dtype = torch.float32) -> Tensor:
    return _laid_out(draw, torch.randn(tuple(sizes)).to(kind))


def _kind(low: bool) -> torch.dtype:
    return LOW if low else torch.float32


def _check(found: Tensor, expected: Tensor, tolerance: float, kind: torch.dtype) -> None:
    """Assert the type, the sizes, and the largest error relative to the largest element."""
    assert found.dtype == kind
    assert found.shape == expected.shape
    if expected.numel():
        off = (found.double() - expected.double()).abs().max()
        largest = expected.double().abs().max()
        assert off <= tolerance * largest + 1e-7, f"{float(off)} beside {float(largest)}"


def _each(found: Tensor, expected: Tensor, tolerance: float, kind: torch.dtype) -> None:
    """Assert the type, the sizes, and each element's error relative to it, or to a millionth."""
    assert found.dtype == kind
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=1e-6)


# ---- products ------------------------------------------------------------------------------------


def test_to_bf16_rounds_as_torch_does(ops: Any) -> None:
    for draw in _draws(20, 1):
        x = _random(draw, _sizes(draw, (0, 1, 2, 3, 4)))
        found = ops.to_bf16(x)
        assert found.is_contiguous()
        assert torch.equal(found, x.to(LOW))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-45, 3.4e38, 1.00390625])
    assert torch.equal(ops.to_bf16(special).view(torch.int16), special.to(LOW).view(torch.int16))
    already = torch.randn(5).to(LOW)
    assert torch.equal(ops.to_bf16(already), already)


def _tolerance(kind: torch.dtype, low: bool = False) -> float:
    """Return a product's tolerance: operands are exact, results round once, or twice if scaled."""
    return 2.5 * ULP if low or kind == LOW else EXACT


@TYPES
@WIDTHS
def test_matmul(ops: Any, kind: torch.dtype, low: bool) -> None:
    for draw in _draws(30, 2):
        m, k, n = (draw.choice(SIZES) for _ in range(3))
        batch = [draw.choice((1, 2, 3, 5)) for _ in range(draw.choice((0, 1, 2)))]
        transpose_a, transpose_b = draw.random() < 0.5, draw.random() < 0.5
        other = draw.choice((batch, []))  # one matrix for all, or one for each
        a = _random(draw, [*batch, *((k, m) if transpose_a else (m, k))], kind)
        b = _random(draw, [*other, *((n, k) if transpose_b else (k, n))], kind)
        alpha = draw.choice((1.0, 0.125, -2.5))
        x = a.double().mT if transpose_a else a.double()
        y = b.double().mT if transpose_b else b.double()
        found = ops.matmul(a, b, transpose_a, transpose_b, alpha, low)
        _check(found, x @ y * alpha, _tolerance(kind, low), _kind(low))
        assert found.is_contiguous()


@TYPES
def test_matmul_broadcasts_as_torch_does(ops: Any, kind: torch.dtype) -> None:
    for a, b in [
        ((1, 3, 4), (5, 4, 2)),
        ((5, 3, 4), (1, 4, 2)),
        ((2, 1, 3, 4), (1, 5, 4, 2)),
        ((3, 4), (5, 4, 2)),
        ((5, 3, 4), (2, 5, 4, 2)),
        ((4,), (4, 3)),
    ]:
        x, y = torch.randn(a).to(kind), torch.randn(b).to(kind)
        found = ops.matmul(x, y, False, False, 2.0, False)
        _check(found, x.double() @ y.double() * 2, _tolerance(kind), torch.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [((0, 4), (4, 3)), ((3, 4), (4, 0)), ((2, 0, 4), (4, 3)), ((0, 3, 4), (0, 4, 2))],
)
def test_products_of_nothing(ops: Any, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """A batch without rows works, such as the last one of a filtered loader."""
    x, y = torch.randn(a), torch.randn(b)
    assert ops.matmul(x, y, False, False, 1.0, False).shape == (x @ y).shape
    if len(b) == 2:
        bias = torch.randn(b[-1])
        assert ops.linear(x, y, bias, False, False).shape == (x @ y).shape


@pytest.mark.parametrize(
    ("kind", "low"),
    [(torch.float32, False), (LOW, False), (LOW, True)],
    ids=["fp32", "wide", "low"],
)
def test_linear(ops: Any, kind: torch.dtype, low: bool) -> None:
    for draw in _draws(30, 3):
        *rows, k = _sizes(draw, (1, 2, 3, 4))
        n, transpose = draw.choice(SIZES), draw.random() < 0.5
        x = _random(draw, [*rows, k], kind)
        b = _random(draw, (n, k) if transpose else (k, n), kind)
        bias = torch.randn(n)
        matrix = b.double().T if transpose else b.double()
        found = ops.linear(x, b, bias, transpose, low)
        _check(found, x.double() @ matrix + bias.double(), _tolerance(kind, low), _kind(low))


@TYPES
def test_add_product(ops: Any, kind: torch.dtype) -> None:
    for draw in _draws(20, 4):
        m, k, n = (draw.choice(SIZES) for _ in range(3))
        transpose_a, transpose_b = draw.random() < 0.5, draw.random() < 0.5
        a = _random(draw, (k, m) if transpose_a else (m, k), kind)
        b = _random(draw, (n, k) if transpose_b else (k, n), kind)
        c = _random(draw, (m, n))
        x = a.double().T if transpose_a else a.double()
        y = b.double().T if transpose_b else b.double()
        found = ops.add_product(a, b, c, transpose_a, transpose_b)
        _check(found, x @ y + c.double(), _tolerance(kind), torch.float32)


# ---- dropout -------------------------------------------------------------------------------------


@TYPES
@WIDTHS
def test_dropout_scales_what_it_keeps(ops: Any, kind: torch.dtype, low: bool) -> None:
    for draw in _draws(40, 5):
        x = _random(draw, _sizes(draw, (0, 1, 2, 3)), kind)
        ratio = draw.choice((0.1, 0.5, 0.9))
        found, mask = ops.dropout(x, ratio, low)
        assert mask.shape == x.shape
        assert mask.dtype == torch.uint8
        assert set(mask.unique().tolist()) <= {0, 1}
        _each(found, x.double() * mask / (1 - ratio), ULP if low else 1e-6, _kind(low))
        gradient = _random(draw, x.shape, kind)
        back = ops.dropout_backward(gradient, _laid_out(draw, mask, fill=1), ratio, low)
        expected = gradient.double() * mask / (1 - ratio)
        _each(back, expected, ULP if low else 1e-6, _kind(low))


@pytest.mark.parametrize("sizes", [(), (0,), (3, 0), (1,), (63,), (64,), (65,), (1000, 1000)])
def test_dropout_of_none_and_of_all(ops: Any, sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes)
    found, mask = ops.dropout(x, 0.0, False)
    assert torch.equal(found, x)
    assert mask.all()
    assert torch.equal(ops.dropout_backward(x, mask, 0.0, False), x)
    found, mask = ops.dropout(x, 1.0, False)
    assert not found.any()
    assert not ops.dropout_backward(x, mask, 1.0, False).any()
    assert mask.sum() <= 1  # ORT's rule for a ratio of one: the mask is 0, and there is no scale


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
def test_dropout_is_as_frequent_as_it_says(ops: Any, ratio: float) -> None:
    """The rate is within five deviations: overall, by position in a block, and of neighbors."""
    torch.manual_seed(0)
    count = 2**20
    kept = ops.dropout(torch.ones(count), ratio, False)[1].double()

    def near(found: Tensor, probability: float, draws: int) -> bool:
        deviation = math.sqrt(probability * (1 - probability) / draws)
        return bool(((found - probability).abs() <= 5 * deviation).all())

    assert near(kept.mean(), 1 - ratio, count)
    assert near(kept.view(-1, 64).mean(0), 1 - ratio, count // 64)
    assert near(kept.view(-1, 1024).mean(1), 1 - ratio, 1024)
    for apart in (1, 2, 16, 32, 64, 1024):
        both = kept[:-apart] * kept[apart:]
        assert near(both.mean(), (1 - ratio) ** 2, count - apart)


def _philox(counters: np.ndarray, key: int) -> np.ndarray:
    """Compute Philox 4x32-10 (Salmon et al., SC 2011): the four words of each counter."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c = [counters & low, counters >> shift, np.zeros_like(counters), np.zeros_like(counters)]
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(q >> shift) ^ c[1] ^ np.uint64(k0), q & low, (p >> shift) ^ c[3] ^ np.uint64(k1)]
        c.append(p & low)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c)


def test_random_numbers_are_philox(ops: Any) -> None:
    """The numbers match the paper's generator, verified by its known answers (Random123)."""
    zeros = _philox(np.zeros(1, np.uint64), 0)[:, 0].tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed in range(5):
        torch.manual_seed(seed)
        (drawn,) = torch.empty(1, dtype=torch.int64).random_(-(2**63), None).tolist()
        torch.manual_seed(seed)
        mask = ops.dropout(torch.ones(64 * 50), 0.3, False)[1].view(50, 64)
        words = _philox(np.arange(16 * 50, dtype=np.uint64), drawn % 2**64)
        kept = (words >= int(0.3 * 2**32)).reshape(4, 50, 16).transpose(1, 0, 2).reshape(50, 64)
        assert np.array_equal(mask.numpy(), kept)


def _draw_all(ops: Any) -> list[Tensor]:
    """Run the kernels that draw random numbers, at sizes that several threads share."""
    x = torch.ones(301, 999)
    heads = torch.ones(2, 4, 70, 65)
    drawn = ops.attention(heads, heads, heads, None, 0.3, False, 0.1, False, False)
    return [*ops.dropout(x, 0.3, False), *drawn]


def test_the_seed_decides_and_the_threads_do_not(ops: Any, threads: None) -> None:
    def drawn(seed: int, count: int) -> list[Tensor]:
        torch.set_num_threads(count)
        torch.manual_seed(seed)
        return _draw_all(ops)

    first = drawn(0, 1)
    for count in (1, 2, 3, 4):
        again = drawn(0, count)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, drawn(1, 1), strict=True))


def test_calls_differ_and_each_takes_one_draw(ops: Any) -> None:
    torch.manual_seed(0)
    first, second = _draw_all(ops), _draw_all(ops)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    state = torch.get_rng_state()
    x = torch.ones(2, 2, 3, 4)
    ops.dropout(x, 0.0, False)
    ops.attention(x, x, x, None, 0.0, False, 1.0, False, False)
    assert torch.equal(torch.get_rng_state(), state)  # no draw


# ---- elementwise ---------------------------------------------------------------------------------

GELUS = pytest.mark.parametrize("approximate", ["none", "tanh"])


def _gelu(x: Tensor, gradient: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Compute GELU in float64 with torch."""
    at = x.double().requires_grad_()
    found = F.gelu(at, approximate=approximate)
    found.backward(gradient.double())
    return found.detach(), at.grad


def _ours(ops: Any, approximate: str) -> tuple[Any, Any]:
    name = "bias_gelu" if approximate == "none" else "fast_gelu"
    return getattr(ops, name), getattr(ops, f"{name}_backward")


@GELUS
@TYPES
@WIDTHS
def test_gelu(ops: Any, approximate: str, kind: torch.dtype, low: bool) -> None:
    forward, backward = _ours(ops, approximate)
    for draw in _draws(20, 6):
        x = _laid_out(draw, (torch.randn(*_sizes(draw, (1, 2, 3))) * 3).to(kind))
        bias = _random(draw, x.shape[-1:])
        gradient = _random(draw, x.shape, draw.choice((torch.float32, kind)))
        by_hand = _gelu(x.float() + bias, gradient, approximate)
        found = (forward(x, bias, low), backward(gradient, x, bias, low))
        for ours, expected in zip(found, by_hand, strict=True):
            _check(ours, expected, ULP if low else 1e-6, _kind(low))


@WIDTHS
def test_fast_gelu_without_a_bias(ops: Any, low: bool) -> None:
    for draw in _draws(10, 7):
        x = _random(draw, _sizes(draw, (1, 2, 3)))
        gradient = _random(draw, x.shape)
        found = (ops.fast_gelu(x, None, low), ops.fast_gelu_backward(gradient, x, None, low))
        for ours, expected in zip(found, _gelu(x, gradient, "tanh"), strict=True):
            _check(ours, expected, ULP if low else 1e-6, _kind(low))


@GELUS
def test_gelu_far_out(ops: Any, approximate: str) -> None:
    """Each element is exact: zero far below, the identity far above, and a NaN stays NaN."""
    forward, backward = _ours(ops, approximate)
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, 1e4, -1e18, 1e18, 0.0])])
    ones, zeros = torch.ones_like(x), torch.zeros_like(x)
    for ours, expected in zip(
        (forward(x, zeros, False), backward(ones, x, zeros, False)),
        _gelu(x, ones, approximate),
        strict=True,
    ):
        _each(ours, expected, 1e-6, torch.float32)
    unknown = torch.full((70,), torch.nan)
    assert forward(unknown, torch.zeros(70), False).isnan().all()
    assert backward(torch.ones(70), unknown, torch.zeros(70), False).isnan().all()


@WIDTHS
@TYPES
def test_relu_backward(ops: Any, kind: torch.dtype, low: bool) -> None:
    for draw in _draws(20, 8):
        result = torch.randn(*_sizes(draw, (1, 2, 3))).relu()
        result[torch.rand(result.shape) < 0.1] = torch.nan  # passes the gradient through
        result = _laid_out(draw, result.to(kind))
        gradient = _random(draw, result.shape, draw.choice((torch.float32, kind)))
        found = ops.relu_backward(gradient, result, low)
        exact = torch.ops.aten.threshold_backward(gradient.float(), result.float(), 0)
        assert torch.equal(found, exact.to(_kind(low)))


@TYPES
def test_add(ops: Any, kind: torch.dtype) -> None:
    for draw in _draws(40, 9):
        sizes = _sizes(draw, (1, 2, 3, 4))
        other = [1 if draw.random() < 0.3 else size for size in sizes][draw.randrange(len(sizes)) :]
        pair = [_random(draw, sizes, kind), _random(draw, other)]
        draw.shuffle(pair)
        found = ops.add(*pair)
        assert found.dtype == torch.float32
        assert torch.equal(found, pair[0].float() + pair[1].float())
    assert ops.add(torch.ones(()), torch.ones(0, 3)).shape == (0, 3)


@TYPES
def test_sum(ops: Any, kind: torch.dtype) -> None:
    for draw in _draws(40, 10):
        sizes = _sizes(draw, (0, 1, 2, 3))
        terms = [_random(draw, sizes, kind) for _ in range(draw.choice((3, 4)))]
        found = ops.sum(*terms, *([None] * (4 - len(terms))))
        _each(found, sum(term.double() for term in terms), 1e-6, torch.float32)


@TYPES
def test_permute(ops: Any, kind: torch.dtype) -> None:
    for draw in _draws(40, 11):
        x = _random(draw, _sizes(draw, (1, 2, 3, 4)), kind)
        axes = draw.sample(range(x.dim()), x.dim())
        found = ops.permute(x, axes)
        assert found.is_contiguous()
        assert found.dtype == kind
        assert torch.equal(found, x.permute(axes))


@TYPES
def test_reduce_sum(ops: Any, kind: torch.dtype) -> None:
    for draw in _draws(40, 12):
        x = _random(draw, _sizes(draw, (1, 2, 3, 4)), kind)
        axes = draw.sample(range(x.dim()), draw.randint(1, x.dim()))
        axes = [axis - x.dim() if draw.random() < 0.3 else axis for axis in axes]
        keep = draw.random() < 0.5
        found = ops.reduce_sum(x, axes, keep)
        expected = x.double().sum(axes, keepdim=keep)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


# ---- rows ----------------------------------------------------------------------------------------


def test_softmax_and_its_gradient(ops: Any) -> None:
    for draw in _draws(40, 13):
        x = _random(draw, _sizes(draw, (1, 2, 3, 4))) * draw.choice((1.0, 30.0))
        axis = draw.randrange(-x.dim(), x.dim())
        gradient = _random(draw, x.shape)
        at = x.double().requires_grad_()
        expected = at.softmax(axis)
        expected.backward(gradient.double())
        found = ops.softmax(x, axis)
        _each(found, expected.detach(), 1e-5, torch.float32)
        by_x = ops.softmax_backward(gradient, found, axis)
        _check(by_x, at.grad, 1e-5, torch.float32)


@TYPES
def test_layer_norm_and_its_gradients(ops: Any, kind: torch.dtype) -> None:
    """The rows include ones of length one and ones far from zero, and gradients in bfloat16."""
    for draw in _draws(60, 14):
        sizes = _sizes(draw, (1, 2, 3))
        x = _laid_out(draw, torch.randn(*sizes) * draw.choice((0.1, 1, 50)))
        x = x + draw.choice((0.0, 100.0))
        weight, bias = _random(draw, sizes[-1:]), _random(draw, sizes[-1:])
        gradient = _random(draw, sizes, kind)
        eps = draw.choice((1e-12, 1e-5, 1e-2))
        leaves = [each.double().requires_grad_() for each in (x, weight, bias)]
        expected = F.layer_norm(leaves[0], sizes[-1:], *leaves[1:], eps)
        expected.backward(gradient.double())
        found, mean, rstd = ops.layer_norm(x, weight, bias, eps)
        center = leaves[0].detach().mean(-1, keepdim=True)
        spread = leaves[0].detach().var(-1, correction=0, keepdim=True)
        # x itself is known to 2**-24 of its size, which limits the precision of the deviation.
        doubt = 3e-7 * float(x.abs().max() / spread.add(eps).sqrt().min())
        _check(mean, center, 1e-6, torch.float32)
        if sizes[-1] > 1:
            _check(rstd, (spread + eps).rsqrt(), 1e-5 + doubt, torch.float32)
            _check(found, expected.detach(), 1e-5 + 4 * doubt, torch.float32)
            exact = [_laid_out(draw, each.float()) for each in (center, (spread + eps).rsqrt())]
            by = ops.layer_norm_backward(gradient, x, weight, *exact)
            for ours, leaf in zip(by, leaves, strict=True):
                scale = max(1.0, float(rstd.max())) if leaf is leaves[0] else 1.0
                assert ours.dtype == torch.float32
                off = (ours.double() - leaf.grad).abs().max()
                largest = max(float(leaf.grad.abs().max()), scale)
                assert off <= (2e-5 + 8 * doubt) * largest
        else:
            assert torch.equal(found, bias.expand(sizes))
            by = ops.layer_norm_backward(gradient, x, weight, mean, rstd)
            steps = (gradient.double() * weight).abs() * rstd
            assert (by[0].abs() <= 2e-7 * steps).all()
            assert not by[1].any()
            _check(by[2], gradient.double().flatten().sum(0, keepdim=True), 1e-5, torch.float32)


def test_layer_norm_of_no_rows(ops: Any) -> None:
    x, weight, bias = torch.zeros(0, 5), torch.ones(5), torch.ones(5)
    found, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
    assert (found.shape, mean.shape, rstd.shape) == ((0, 5), (0, 1), (0, 1))
    by_x, by_weight, by_bias = ops.layer_norm_backward(x, x, weight, mean, rstd)
    assert by_x.shape == (0, 5)
    assert torch.equal(by_weight, torch.zeros(5))
    assert torch.equal(by_bias, torch.zeros(5))


def test_layer_norm_adds_up_the_same_with_any_threads(ops: Any, threads: None) -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(5000, 33), torch.randn(5000, 33)
    weight, bias = torch.randn(33), torch.randn(33)
    leaves = [each.double().requires_grad_() for each in (x, weight, bias)]
    F.layer_norm(leaves[0], (33,), *leaves[1:]).backward(gradient.double())
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        _, mean, rstd = ops.layer_norm(x, weight, bias, 1e-5)
        by = ops.layer_norm_backward(gradient, x, weight, mean, rstd)
        for ours, leaf in zip(by, leaves, strict=True):
            _check(ours, leaf.grad, 1e-5, torch.float32)


@TYPES
@WIDTHS
@pytest.mark.parametrize("mean", [True, False])
def test_cross_entropy_and_its_gradient(ops: Any, kind: torch.dtype, low: bool, mean: bool) -> None:
    for draw in _draws(12, 15):
        rows, classes = _sizes(draw, (2,))
        logits = _laid_out(draw, (torch.randn(rows, classes) * draw.choice((1, 20))).to(kind))
        ignored = draw.choice((-100, 0))
        labels = torch.randint(classes, (rows,))
        labels[torch.rand(rows) < 0.3] = ignored
        if (labels == ignored).all():
            labels[0] = classes - 1
        if (labels == ignored).all():
            continue  # below, the mean is over nothing
        labels = torch.stack([labels, labels], 1)[:, 0] if draw.random() < 0.5 else labels
        way = "mean" if mean else "sum"
        at = logits.double().requires_grad_()
        expected = F.cross_entropy(at, labels, ignore_index=ignored, reduction=way)
        gradient, more = torch.tensor(draw.choice((1.0, -0.3))), torch.randn(rows, classes)
        expected.backward(gradient.double())
        loss, sums = ops.cross_entropy(logits, labels, ignored, mean)
        assert loss.shape == ()
        _check(loss, expected.detach(), 1e-5, torch.float32)
        _check(sums, logits.double().logsumexp(-1), 1e-6, torch.float32)
        for extra, whole in ((None, at.grad), (torch.zeros(1), at.grad), (more, at.grad + more)):
            call = (gradient, logits, _laid_out(draw, sums), labels, ignored, mean, extra, low)
            found = ops.cross_entropy_backward(*call)
            _check(found, whole, ULP if low else 2e-5, _kind(low))


def test_cross_entropy_where_nothing_counts(ops: Any) -> None:
    """The mean of nothing is NaN, and the sum and all gradients are zero, as in torch."""
    logits, labels = torch.randn(4, 7), torch.full((4,), -100)
    for mean in (True, False):
        loss, sums = ops.cross_entropy(logits, labels, -100, mean)
        assert bool(loss.isnan()) is mean
        call = (torch.ones(()), logits, sums, labels, -100, mean, None, False)
        assert not ops.cross_entropy_backward(*call).any()


def test_cross_entropy_refuses_a_label_that_is_no_class(ops: Any) -> None:
    for wrong in (7, -1, 2**40):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            ops.cross_entropy(torch.randn(2, 7), torch.tensor([0, wrong]), -100, True)


# ---- attention -----------------------------------------------------------------------------------


def _attend(leaves: list[Tensor], mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Compute torch's attention in float64, with causality as a mask: torch takes only one."""
    query, key, value = leaves
    if causal:
        seen = torch.ones(query.size(-2), key.size(-2)).tril().bool()
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def _attention_case(draw: random.Random) -> tuple[list[Tensor], Tensor, list[int]]:
    batch, heads = draw.choice((1, 2, 3)), draw.choice((1, 2, 4))
    queries, keys = (draw.choice((1, 2, 7, 16, 33, 64, 65)) for _ in range(2))
    size, out = draw.choice((1, 8, 17, 32)), draw.choice((1, 8, 17, 32))
    query = _random(draw, (batch, heads, queries, size))
    key = _random(draw, (batch, heads, keys, size))
    value = _random(draw, (batch, heads, keys, out))
    return [query, key, value], _random(draw, (batch, heads, queries, out)), [
        batch, heads, queries, keys,
    ]  # fmt: skip


def _mask(draw: random.Random, way: str, sizes: list[int]) -> Tensor | None:
    """Return a mask that broadcasts to the scores' sizes; some of its rows hide every key."""
    if way == "none":
        return None
    kept = [1 if draw.random() < 0.4 else size for size in sizes][draw.choice((0, 0, 2)) :]
    if way == "bool":
        return _laid_out(draw, (torch.rand(kept) < 0.7).float()).bool()
    mask = torch.randn(kept)
    if way == "infinite":
        mask[torch.rand(kept) < 0.4] = -torch.inf
    if way == "lowest":
        mask = torch.where(torch.rand(kept) < 0.4, torch.finfo(torch.float32).min, 0.0)
    return _laid_out(draw, mask)


def _whole(mask: Tensor, sizes: list[int]) -> Tensor:
    """Return the mask at the scores' full size, to take its gradient."""
    return mask.double().expand(sizes).clone().requires_grad_()


def _check_gradients(
    found: Any, expected: list[Tensor], tolerance: float, kind: torch.dtype
) -> None:
    """Assert gradients relative to the largest of all: a query's may cancel out."""
    share = 0.1 if tolerance < 0.01 else 1.0  # in bfloat16, cancellation loses all digits at once
    largest = share * max(float(each.abs().max()) for each in expected)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == kind
        assert ours.shape == exact.shape
        off = float((ours.double() - exact).abs().max())
        assert off <= tolerance * max(float(exact.abs().max()), largest, 1e-4), off


def _check_mask(found: Tensor, expected: Tensor, terms: Tensor, tolerance: float) -> None:
    """Assert a broadcast mask's gradient relative to the sum of its `terms`, as they cancel out."""
    expected = expected.nan_to_num(0.0).sum_to_size(found.shape)
    assert found.dtype == torch.float32
    off = (found.double() - expected).abs().max()
    assert off <= tolerance * max(float(terms.sum_to_size(found.shape).max()), 1e-4), float(off)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("way", ["none", "bool", "float", "infinite", "lowest"])
@WIDTHS
def test_attention(ops: Any, way: str, causal: bool, low: bool) -> None:
    """The result, the saved softmax and all gradients match torch's autograd in float64."""
    for draw in _draws(8, 16):
        given, gradient, sizes = _attention_case(draw)
        mask, scale = _mask(draw, way, sizes), draw.choice((0.125, 1.0, 0.4))
        exact = [each.to(LOW) if low else each for each in given]
        leaves = [each.double().requires_grad_() for each in exact]
        adds = mask is not None and mask.dtype != torch.bool
        trained = _whole(mask, sizes) if adds else mask
        expected = _attend(leaves, trained, causal, scale)
        # The difference is in bfloat16's digits of the scores, so their size matters.
        tolerance = 0.05 if low else 2e-5
        narrow = low and draw.random() < 0.5
        found, kept = ops.attention(*given, mask, 0.0, causal, scale, low, narrow)
        _check(found, expected.detach(), tolerance, _kind(narrow))
        assert kept.dtype == _kind(low)
        assert list(kept.shape) == [sizes[0] * sizes[1], *sizes[2:]]
        coming = gradient.to(LOW) if low else gradient
        expected.backward(coming.double())
        wanted = [True, True, True, adds and way != "lowest"]
        call = (gradient, *given, mask, kept, 0.0, scale, wanted, narrow)
        by = ops.attention_backward(*call)
        _check_gradients(by[:3], [leaf.grad for leaf in leaves], tolerance, _kind(narrow))
        if wanted[3]:
            assert by[3].shape == mask.shape
            terms = kept.double().abs().view(sizes) * (gradient @ given[2].mT).double().abs()
            _check_mask(by[3], trained.grad, terms, tolerance)
        else:
            assert by[3] is None


def test_attention_gives_the_gradients_that_are_wanted(ops: Any) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 3, 5, 8), torch.randn(1, 3, 5, 5)
    _, kept = ops.attention(x, x, x, mask, 0.2, False, 0.3, False, False)
    whole = ops.attention_backward(x, x, x, x, mask, kept, 0.2, 0.3, [True] * 4, False)
    for bits in range(16):
        wanted = [bool(bits >> i & 1) for i in range(4)]
        found = ops.attention_backward(x, x, x, x, mask, kept, 0.2, 0.3, wanted, False)
        for ours, expected, taken in zip(found, whole, wanted, strict=True):
            assert (ours is not None) == taken
            assert ours is None or torch.equal(ours, expected)


@WIDTHS
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_attention_drops_what_it_marks(ops: Any, ratio: float, low: bool) -> None:
    """The sign of the saved weights marks dropped ones; result and gradients follow it."""
    for draw in _draws(8, 17):
        given, gradient, sizes = _attention_case(draw)
        mask, causal = (
            _mask(draw, draw.choice(("none", "bool", "float")), sizes),
            bool(draw.getrandbits(1)),
        )
        found, kept = ops.attention(*given, mask, ratio, causal, 0.25, low, False)
        dropped = kept.signbit().view(sizes)
        exact = [each.to(LOW) if low else each for each in given]
        query, key, value = leaves = [each.double().requires_grad_() for each in exact]
        scores = query @ key.mT * 0.25
        seen = torch.ones(sizes[2:]).tril().bool() if causal else torch.ones(sizes[2:]).bool()
        adds = mask is not None and mask.dtype != torch.bool
        trained = _whole(mask, sizes) if adds else mask
        if adds:
            scores = scores + trained
        elif mask is not None:
            seen = seen & mask
        softmax = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        tolerance = 0.05 if low else 2e-5
        _check(kept.abs().view(sizes), softmax.detach(), tolerance, _kind(low))
        expected = softmax.masked_fill(dropped, 0.0) / (1 - ratio) @ value
        _check(found, expected.detach(), tolerance, torch.float32)
        expected.backward((gradient.to(LOW) if low else gradient).double())
        wanted = [True, True, True, adds]
        call = (gradient, *given, mask, kept, ratio, 0.25, wanted, False)
        by = ops.attention_backward(*call)
        grads = [leaf.grad.nan_to_num(0.0) for leaf in leaves]
        _check_gradients(by[:3], grads, tolerance, torch.float32)
        if adds:
            assert by[3].shape == mask.shape
            terms = kept.double().abs().view(sizes) * (gradient @ given[2].mT).double().abs()
            _check_mask(by[3], trained.grad, terms, tolerance)


def test_attention_drops_as_often_as_it_says(ops: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 130, 4)
    kept = ops.attention(x, x, x, None, 0.1, False, 1.0, False, False)[1].signbit().double()
    for along in ((0, 1, 2), (0, 1), (2,), (0,)):
        found = kept.mean(along)
        draws = kept.numel() // found.numel()
        assert ((found - 0.1).abs() <= 5.5 * math.sqrt(0.09 / draws) + 0.5 / draws).all()


def test_attention_that_drops_all(ops: Any) -> None:
    x = torch.randn(2, 3, 5, 8)
    found, kept = ops.attention(x, x, x, None, 1.0, False, 1.0, False, False)
    by = ops.attention_backward(x, x, x, x, None, kept, 1.0, 1.0, [True] * 3 + [False], False)
    assert not found.any()
    assert not any(each.any() for each in by[:3])


def test_a_nan_stays_one(ops: Any) -> None:
    """A NaN in the input stays a NaN in the output."""
    x = torch.randn(1, 1, 70, 8)
    broken = x.clone()
    broken[..., 3, :] = torch.nan
    for low in (False, True):
        found, _ = ops.attention(broken, x, x, None, 0.0, False, 1.0, low, False)
        assert found[0, 0, 3].isnan().all()
        # torch 2.13's bfloat16 products on AMX also have the NaN in the row before.
        assert found[0, 0, : 2 if low else 3].isfinite().all()
    found, _, _ = ops.layer_norm(broken, torch.ones(8), torch.ones(8), 1e-5)
    assert found[0, 0, 3].isnan().all()
    assert ops.cross_entropy(broken[0, 0], torch.zeros(70).long(), -100, True)[0].isnan()


# ---- embedding -----------------------------------------------------------------------------------


def test_embedding_backward(ops: Any) -> None:
    for draw in _draws(60, 18):
        rows, columns = draw.choice(SIZES), draw.choice(SIZES)
        places = draw.choice(((), (1,), (17,), (3, 65), (2, 3, 4), (0,)))
        indices = torch.randint(rows, places)
        padding = draw.choice((-1, 0, rows - 1))
        gradient = _random(draw, (*places, columns))
        found = ops.embedding_backward(gradient, indices, rows, padding)
        expected = torch.zeros(rows, columns, dtype=torch.float64)
        expected.index_add_(0, indices.flatten(), gradient.double().reshape(-1, columns))
        if padding >= 0:
            expected[padding] = 0
        _check(found, expected, EXACT, torch.float32)
        assert torch.equal(
            found,
            torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, False),
        )


def test_embedding_of_one_row_and_of_a_transposed_batch(ops: Any, threads: None) -> None:
    """A single row for all indices, and a table that several threads share, work."""
    torch.manual_seed(0)
    gradient = torch.randn(500, 8)
    found = ops.embedding_backward(gradient, torch.full((500,), 2), 5, -1)
    _check(found[2], gradient.double().sum(0), EXACT, torch.float32)
    assert not found[[0, 1, 3, 4]].any()
    indices, wide = torch.randint(3000, (70, 9)).T, torch.randn(9, 70, 65)
    expected = torch.zeros(3000, 65).index_add_(0, indices.flatten(), wide.view(-1, 65))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        _check(ops.embedding_backward(wide, indices, 3000, -1), expected, EXACT, torch.float32)


# ---- around them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float64, LOW])
def test_torchs_default_type_does_not_matter(ops: Any, kind: torch.dtype) -> None:
    x, weight, labels = torch.randn(4, 6), torch.randn(6), torch.arange(4)
    before = torch.get_default_dtype()

    def all_of_them() -> list[Tensor]:
        norm = ops.layer_norm(x, weight, weight, 1e-5)
        loss = ops.cross_entropy(x, labels, -100, True)
        heads = x.view(1, 1, 4, 6)
        return [
            *norm,
            *ops.layer_norm_backward(x, x, weight, *norm[1:]),
            *loss,
            ops.linear(x, weight.view(6, 1), weight[:1], False, False),
            ops.matmul(x, x, False, True, 0.5, False),
            ops.reduce_sum(x, [0], True),
            *ops.dropout(x, 0.0, False),
            *ops.attention(heads, heads, heads, None, 0.0, False, 1.0, False, False),
            ops.embedding_backward(x, labels, 9, -1),
        ]

    expected = all_of_them()
    torch.set_default_dtype(kind)
    try:
        found = all_of_them()
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_autocast_around_the_call_does_not_matter(ops: Any) -> None:
    """The graph decides the precision, although the user's autocast surrounds ORT's calls too."""
    torch.manual_seed(0)
    x, y, bias = torch.randn(6, 33, 64), torch.randn(64, 48), torch.randn(48)
    heads = x.view(2, 3, 33, 64)

    def all_of_them() -> list[Tensor]:
        return [
            ops.matmul(x, y, False, False, 1.0, False),
            ops.matmul(x, x, False, True, 1.0, False),
            ops.matmul(x[0], x, False, True, 1.0, False),
            ops.matmul(x[:1], x, False, True, 1.0, False),
            ops.linear(x, y, bias, False, False),
            ops.add_product(x[0], y, bias.expand(33, 48), False, False),
            ops.reduce_sum(x, [0], False),
            ops.softmax(x, 1),
            ops.add(x, x[0]),
            *ops.attention(heads, heads, heads, None, 0.0, False, 0.1, False, False),
        ]

    expected = all_of_them()
    with torch.autocast("cpu", LOW):
        found = all_of_them()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_stay_as_they_are(ops: Any) -> None:
    """No kernel writes to its input or returns it as its own result, which might be changed."""
    torch.manual_seed(0)
    x, y, bias = torch.randn(70, 64), torch.randn(64, 70), torch.randn(64)
    heads = torch.randn(2, 2, 70, 64)
    given = [x, y, bias, heads]
    before = [each.clone() for each in given]
    _, kept = ops.attention(heads, heads, heads, None, 0.1, True, 0.5, False, False)
    kept_before = kept.clone()
    for _ in range(2):
        ops.attention_backward(
            heads, heads, heads, heads, None, kept, 0.1, 0.5, [True] * 3 + [False], False
        )
    assert torch.equal(kept, kept_before)
    ops.matmul(x, y, False, False, 2.0, False)
    ops.matmul(x.to(LOW), y.to(LOW), False, False, 2.0, True)
    ops.linear(x, y[:, :64].contiguous(), bias, False, False)
    ops.bias_gelu(x, bias, False)
    ops.dropout(x, 0.5, False)
    norm = ops.layer_norm(x, bias, bias, 1e-5)
    ops.layer_norm_backward(x, x, bias, *norm[1:])
    ops.softmax(x, 1)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture
def pool(ops: Any) -> Iterator[Any]:
    """Return the kernels with no unused memory cached; enable the cache again afterwards."""
    gc.collect()
    ops.trim(True)
    yield ops
    ops.trim(True)


@pytest.mark.parametrize("chosen", ["ort", "torch"])
@pytest.mark.parametrize("arena", [False, True])
def test_a_model_caches_memory_only_with_an_arena_and_while_it_is_there(
    pool: Any, arena: bool, chosen: str
) -> None:
    """Graphs with ORT's own kernels have dropouts of ours, too."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 4))
    wrapped = ortlab.wrap(model, kernels=chosen, arena=arena, cache=False)
    for _ in range(3):
        wrapped(torch.randn(1000, 64)).sum().backward()
    assert (pool.held()[1] > 0) == arena
    del wrapped
    gc.collect()
    assert pool.held()[1] == 0


LARGE = (600, 64)  # floats of 150 KiB, so that the pool is used


def test_blocks_come_back_and_are_used_again(pool: Any) -> None:
    used, idle, taken = pool.held()
    assert idle == 0
    x = pool.permute(torch.randn(LARGE), [0, 1])
    at = x.data_ptr()
    assert pool.held()[0] - used >= 600 * 64 * 4
    assert pool.held()[2] == taken + 1
    view = x[3:]
    del x
    assert pool.held()[0] > used  # the view keeps it alive
    del view
    assert pool.held()[0] == used
    assert pool.held()[1] > 0
    again = pool.permute(torch.randn(LARGE), [0, 1])
    assert again.data_ptr() == at
    assert pool.held() == (pool.held()[0], 0, taken + 1)


def test_small_results_are_not_the_pools(pool: Any) -> None:
    before = pool.held()
    kept = [pool.permute(torch.randn(16, 16), [1, 0]) for _ in range(20)]
    assert pool.held() == before
    assert len(kept) == 20


def test_trim_frees_what_waits(pool: Any) -> None:
    used, _, _ = pool.held()
    x = pool.permute(torch.randn(LARGE), [0, 1])
    y = pool.permute(torch.randn(LARGE), [0, 1])
    expected = y.clone()
    del x
    waiting = pool.held()[1]
    assert waiting > 0
    assert pool.trim(False) == waiting
    assert pool.held()[1] == 0
    assert torch.equal(y, expected)
    del y  # nothing is cached now
    assert pool.held()[:2] == (used, 0)
    pool.trim(True)
    pool.permute(torch.randn(LARGE), [0, 1])
    assert pool.held()[1] > 0


def test_nothing_leaks_and_little_is_kept(pool: Any) -> None:
    """After fifty rounds of new sizes, memory is at most twice the peak in use."""
    start, most = pool.held()[0], 0
    draw = random.Random(0)
    for _ in range(50):
        results = []
        for _ in range(6):
            rows, columns = draw.randint(1, 700), draw.randint(1, 700)
            results.append(pool.permute(torch.empty(rows, columns), [1, 0]))
            most = max(most, pool.held()[0])
        least = sum(each.nbytes for each in results if each.nbytes >= 2**16)
        assert pool.held()[0] - start >= least
        del results
        used, idle, _ = pool.held()
        assert used == start
        assert used + idle <= 2 * most


def test_what_waits_is_at_most_twice_what_was_in_use(pool: Any) -> None:
    """The bound holds where no size fits a later request; the last returned blocks stay cached."""
    used, most = pool.held()[0], 0
    for parts in (1, 2, 4, 8, 16, 32):
        results = [pool.permute(torch.empty(2**22 // parts), [0]) for _ in range(parts)]
        most = max(most, pool.held()[0] - used)
        del results
        assert pool.held()[0] == used
        assert 0 < pool.held()[1] <= 2 * most
    taken = pool.held()[2]
    kept = [pool.permute(torch.empty(2**17), [0]) for _ in range(32)]
    assert pool.held()[2] == taken
    assert len(kept) == 32


def test_what_is_held_is_at_most_twice_what_was_in_use(pool: Any) -> None:
    """The bound holds also while new blocks are taken that no cached one fits."""
    used, most = pool.held()[0], 0
    for parts in (1, 4, 16):
        results = [pool.permute(torch.empty(2**22 // parts), [0]) for _ in range(parts)]
        now, idle, _ = pool.held()
        most = max(most, now - used)
        assert now - used + idle <= 2 * most
        del results


def test_what_waits_is_given_back_where_memory_ends() -> None:
    """Cached blocks of other sizes are released when the process reaches its memory limit."""
    code = """
import resource, psutil, torch
from ortlab.engines.ortmodule import kernels
assert kernels.unavailable() is None
ops, size = torch.ops.ortlab_kernels, 2**24
kept = [ops.permute(torch.empty(size), [0]) for _ in range(3)]
del kept
used, idle, _ = ops.held()
assert idle >= 3 * 4 * size
x = torch.empty(5 * size // 2)
room = psutil.Process().memory_info().vms + 2 * size
resource.setrlimit(resource.RLIMIT_AS, (room, -1))
y = ops.permute(x, [0])
assert ops.held()[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS_S)


def test_equal_rounds_ask_the_system_for_nothing(pool: Any) -> None:
    def step() -> None:
        x = torch.randn(4, 4, 100, 32)
        found, kept = pool.attention(x, x, x, None, 0.1, False, 0.2, False, False)
        by = pool.attention_backward(
            found, x, x, x, None, kept, 0.1, 0.2, [True] * 3 + [False], False
        )
        pool.layer_norm(pool.bias_gelu(by[0], torch.ones(32), False), *[torch.ones(32)] * 2, 1e-5)

    step()
    taken = pool.held()[2]
    for _ in range(10):
        step()
    assert pool.held()[2] == taken


def _busy(ops: Any, seed: int, rounds: int) -> list[str]:
    """Run random calls that keep some results; return those that changed."""
    draw, wrong = random.Random(seed), []
    held: list[tuple[Tensor, Tensor]] = []
    for turn in range(rounds):
        rows, columns = draw.randint(100, 500), draw.randint(100, 500)
        value = float(1 + seed * rounds + turn)
        x = torch.full((rows, columns), value)
        results = draw.choice(
            [
                lambda x: [ops.permute(x, [1, 0])],
                lambda x: [ops.add(x, x), ops.to_bf16(x)],
                lambda x: [ops.softmax(x, 1)],
                lambda x: list(ops.layer_norm(x, x[0], x[0], 1e-5)),
                lambda x: list(ops.dropout(x, 0.0, False)),
                lambda x: [ops.matmul(x, x, False, True, 1.0, False)],
            ]
        )(x)
        held += [(each, each.clone()) for each in results]
        spans = sorted((r.data_ptr(), r.data_ptr() + r.nbytes) for r, _ in held)
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
            wrong.append(f"turn {turn}: two results in one place")
        if not all(torch.equal(result, copy) for result, copy in held):
            wrong.append(f"turn {turn}: a result changed")
        while len(held) > 8:
            held.pop(draw.randrange(len(held)))
    return wrong


def test_no_block_is_given_twice(pool: Any) -> None:
    assert _busy(pool, 0, 80) == []


def test_two_threads_at_once(pool: Any) -> None:
    before, found = pool.held()[0], {}

    def work(seed: int) -> None:
        found[seed] = _busy(pool, seed, 40)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for each in workers:
        each.start()
    for _ in range(20):
        pool.trim(True)
    for each in workers:
        each.join()
    assert found == {1: [], 2: []}
    gc.collect()
    assert pool.held()[0] == before


def test_a_result_outlives_the_thread_that_made_it(pool: Any) -> None:
    made: list[Tensor] = []
    worker = threading.Thread(
        target=lambda: made.append(pool.permute(torch.arange(40_000.0).view(200, 200), [1, 0]))
    )
    worker.start()
    worker.join()
    pool.trim(True)
    assert torch.equal(made[0], torch.arange(40_000.0).view(200, 200).T)


def test_what_ends_in_the_middle_of_a_trace_is_no_part_of_it(ops: Any) -> None:
    """A session collected during a trace leaves no nodes in it, which once broke exports."""

    class User:
        """A user of the kernels that asks for cached memory."""

    users = [User()]
    kernels.keep_memory_for(users[0], True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        users.clear()
        return x * 2

    traced = torch.jit.trace(forward, torch.ones(2), check_trace=False).graph
    graph = traced.str(print_source_ranges=False)  # a clone's folder may be called ortlab, too
    assert "aten::mul" in graph
    assert "ortlab" not in graph
