"""Every rule of the engine ``ort``, compared with eager torch: results and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as in torch's documentation

from ortlab.engines.ort import attention, onnx_model, segments
from ortlab.engines.ort.capture import Backend
from ortlab.engines.torch.thread_count import threads
from tests.support.captured import in_torch

TOLERANCE = 2e-5

_drawn = torch.Generator().manual_seed(7)


def floats(*shape: int) -> Tensor:
    """Return numbers whose gradient is compared."""
    return torch.randn(shape, generator=_drawn).requires_grad_()


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=_drawn) + 0.1).requires_grad_()


def ints(*shape: int, high: int = 4) -> Tensor:
    return torch.randint(0, high, shape, generator=_drawn)


def signed(*shape: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=_drawn)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_drawn) > 0.5


Case = tuple[Callable[..., Any], tuple[Tensor, ...]]

ELEMENTWISE: dict[str, Case] = {
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), (floats(3, 4), floats(4))),
    "add of types": (lambda x, y: x + y, (floats(3, 4), signed(3, 1))),
    "add of bools": (lambda x, y: x + y, (bools(5), bools(5))),
    "mul of bools": (lambda x, y: x * y, (bools(5), bools(5))),
    "sub and rsub": (lambda x, y: 2 - (x - y), (floats(3, 4), floats(3, 1))),
    "rsub alpha": (lambda x, y: torch.rsub(x, y, alpha=2), (floats(3), floats(3))),
    "div": (lambda x, y: x / y, (floats(3, 4), positive(4))),
    "div of integers": (lambda x, y: x / (y + 1), (signed(6), ints(6))),
    "floor division": (lambda x: x // 3, (signed(20),)),
    "floor division by a negative": (lambda x: x // -4, (signed(20),)),
    "floor division of fractions": (lambda x: torch.floor_divide(x, 0.1), (floats(50).detach(),)),
    "trunc division": (lambda x: torch.div(x, 3, rounding_mode="trunc"), (signed(20),)),
    "trunc division of fractions": (
        lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
        (floats(20).detach(),),
    ),
    "remainder": (lambda x: x % 3, (signed(20),)),
    "remainder by a negative": (lambda x: x % -3, (signed(20),)),
    "remainder of fractions": (lambda x, y: torch.remainder(x, y), (floats(30), floats(30))),
    "fmod": (lambda x, y: torch.fmod(x, y), (floats(30), floats(30))),
    "power": (lambda x: x**2 + x**3 + x**1 + x**-1 + x**1.7 + x**0.5 + x**-0.5, (positive(9),)),
    "power of integers": (lambda x: x**2 + x**3, (signed(9),)),
    "power of a scalar": (lambda x: 2.5**x, (floats(9),)),
    "power of a tensor": (lambda x, y: x**y, (positive(9), floats(9))),
    "maximum": (lambda x, y: torch.maximum(x, y) + torch.minimum(x, 2 * y), (floats(9), floats(9))),
    "clamp": (lambda x: x.clamp(-0.5, 0.7) + x.clamp(min=0.1) + x.clamp(max=0.2), (floats(30),)),
    "clamp by tensors": (
        lambda x, y: torch.clamp(x, y.detach() - 1, y.detach()),
        (floats(30), floats(30)),
    ),
    "clamp of integers": (lambda x: x.clamp(-2, 3), (signed(30),)),
    "where": (lambda c, x, y: torch.where(c, x, y), (bools(3, 4), floats(3, 4), floats(4))),
    "where of a number": (lambda c, x: torch.where(c, x, 0.5), (bools(3, 4), floats(3, 4))),
    "masked fill": (lambda x, c: x.masked_fill(c, -1.5), (floats(3, 4), bools(3, 4))),
    "comparisons": (
        lambda x, y: (x < y).float() + (x <= y) + (x > y) + (x >= y) + (x == y) + (x != y),
        (signed(30), signed(30)),
    ),
    "comparisons of types": (lambda x, y: (x < y) | (x == 1.5), (signed(30), floats(30))),
    "comparisons of bools": (lambda x, y: (x < y) | (x == y), (bools(9), bools(9))),
    "logic": (
        lambda x, y: (x & y) ^ (x | ~y) & torch.logical_not(x).logical_xor(y),
        (bools(9), bools(9)),
    ),
    "logic of integers": (
        lambda x, y: torch.logical_and(x, y) | torch.logical_or(x, y),
        (ints(9), ints(9)),
    ),
    "bits": (lambda x, y: (x & y) + (x | y) + (x ^ y) + ~x, (ints(9), ints(9))),
    "casts": (
        lambda x: x.double().float() + x.int() + x.long() + x.bool() + x.to(torch.uint8).abs(),
        (positive(9),),
    ),
    "sign and rounding": (
        lambda x: x.sign() + x.floor() + x.ceil() + x.round() + x.trunc(),
        (floats(40),),
    ),
    "rounding of integers": (lambda x: x.floor() + x.round() + x.trunc() + x.abs(), (signed(9),)),
    "isnan": (
        lambda x: torch.isnan(x.log()) | torch.isinf(1 / x) | torch.isfinite(x),
        (torch.tensor([0.0, -1.0, 2.0]),),
    ),
    "nan to num": (lambda x: torch.nan_to_num(x.log()), (torch.tensor([0.0, -1.0, 2.0]),)),
    "new tensors": (
        lambda x: torch.zeros_like(x) + torch.ones(3, 4) + torch.full((4,), 2.5) + x.new_ones(4),
        (floats(3, 4),),
    ),
    "arange": (
        lambda x: x + torch.arange(x.shape[0]) + torch.arange(3, 3 + 2 * x.shape[0], 2),
        (floats(5),),
    ),
    "arange of fractions": (lambda x: x + torch.arange(0, 1, 0.2), (floats(5),)),
    "linspace": (lambda x: x * torch.linspace(-1, 1, x.shape[0]), (floats(6),)),
    "lerp and addcmul": (
        lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y) + torch.addcdiv(x, x, y),
        (floats(9), positive(9)),
    ),
    "size in arithmetic": (
        lambda x: x * x.shape[0] / x.shape[1] + x.shape[0] ** 2 - x.shape[0] // 2,
        (floats(5, 4),),
    ),
}

_SMOOTH = [
    "exp",
    "log",
    "sqrt",
    "abs",
    "tanh",
    "sigmoid",
    "cos",
    "sin",
    "tan",
    "acos",
    "asin",
    "atan",
    "cosh",
    "sinh",
    "asinh",
    "atanh",
    "erf",
    "reciprocal",
    "rsqrt",
    "log1p",
    "expm1",
    "log2",
    "log10",
    "exp2",
    "neg",
    "square",
    "relu",
]
ELEMENTWISE |= {
    name: (getattr(torch, name), ((positive(4, 5).detach() / 1.2).requires_grad_(),))
    for name in _SMOOTH
}
ELEMENTWISE |= {
    "acosh": (torch.acosh, ((positive(9).detach() + 1).requires_grad_(),)),
    "log1p near zero": (torch.log1p, (torch.tensor([1e-9, -1e-8, 0.0, 0.4, 3.0, -0.9]),)),
    "expm1 near zero": (torch.expm1, (torch.tensor([1e-9, -1e-8, 0.0, 0.4, 90.0, -90.0]),)),
}

ACTIVATIONS: dict[str, Case] = {
    name: (function, (floats(5, 6),))
    for name, function in {
        "gelu": F.gelu,
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        "silu": F.silu,
        "mish": F.mish,
        "elu": F.elu,
        "celu": F.celu,
        "selu": F.selu,
        "softplus": F.softplus,
        "softsign": F.softsign,
        "relu6": F.relu6,
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "hardshrink": F.hardshrink,
        "softshrink": F.softshrink,
        "tanhshrink": F.tanhshrink,
        "leaky relu": lambda x: F.leaky_relu(x, 0.2),
        "threshold": lambda x: F.threshold(x, 0.1, -0.2),
        "logsigmoid": F.logsigmoid,
        "glu": F.glu,
        "softmax": lambda x: F.softmax(x, -1),
        "softmax of a middle dimension": lambda x: F.softmax(x.reshape(5, 3, 2), 1),
        "log softmax": lambda x: F.log_softmax(x, 0),
        "softmin": lambda x: F.softmin(x, 1),
        "normalize": lambda x: F.normalize(x, dim=1),
    }.items()
} | {
    "prelu": (F.prelu, (floats(5, 6), positive(6))),
    "gelu far from zero": (
        F.gelu,
        (torch.tensor([-1e20, -300, -9, -4, 0, 5, 13, 14, 2e19, 1e38]).requires_grad_(),),
    ),
    "relu at nan": (F.relu, (torch.tensor([float("nan"), -1.0, 2.0]).requires_grad_(),)),
}

REDUCTIONS: dict[str, Case] = {
    "sum": (lambda x: x.sum() + x.sum(0) + x.sum((0, 2), keepdim=True), (floats(3, 4, 4),)),
    "sum of wide rows": (
        lambda x: x.sum(0) + x.sum((0, 1), keepdim=True),
        (floats(3, 2, 64),),
    ),
    "sum of integers": (lambda x: x.sum(-1) + x.int().sum(), (signed(3, 4),)),
    "sum of bools": (lambda x: x.sum(0), (bools(3, 4),)),
    "mean": (lambda x: x.mean() + x.mean(1) + x.mean((0, 1), keepdim=True), (floats(3, 4),)),
    "extrema": (lambda x: x.amax(1) * x.amin(1) + x.max() - x.min(), (floats(3, 4),)),
    "max along a dimension": (lambda x: x.max(1)[0] + x.min(1, keepdim=True)[0], (floats(3, 4),)),
    "places": (lambda x: x.argmax(1) + x.argmin(1) + x.argmax() + x.max(1)[1], (floats(3, 4),)),
    "product": (lambda x: x.prod(1) + x.prod(), (positive(3, 4),)),
    "any and all": (
        lambda x: x.any() | x.all(1) | x.any(0, keepdim=True).all(1) | (x.float() > 0).all(),
        (bools(3, 3),),
    ),
    "variance": (
        lambda x: x.var() + x.std(1) + x.var(0, keepdim=True, unbiased=False),
        (floats(4, 4),),
    ),
    "norms": (lambda x: x.norm() + x.norm(dim=1) + x.norm(1, dim=0).sum(), (floats(4, 4),)),
    "logsumexp": (lambda x: x.logsumexp(1), (floats(4, 4),)),
    "cumsum": (lambda x: x.cumsum(1) + x.cumsum(0), (floats(4, 4),)),
    "cumsum of bools": (lambda x: x.cumsum(1), (bools(4, 4),)),
    "topk": (lambda x: x.topk(3, 1)[0], (floats(4, 6),)),
    "smallest": (lambda x: x.topk(2, 0, largest=False)[0], (floats(4, 6),)),
    "sort": (lambda x: x.sort(1)[0] + x.sort(0, descending=True)[0], (floats(4, 6),)),
    "argsort": (lambda x: x.argsort(1), (floats(4, 6),)),
    "scalar": (lambda x: x.sum().sum(0).mean() + x.sum().max(), (floats(3),)),
}

PRODUCTS: dict[str, Case] = {
    "linear": (F.linear, (floats(3, 5, 4), floats(6, 4), floats(6))),
    "linear without bias": (F.linear, (floats(5, 4), floats(6, 4))),
    "matrix": (torch.mm, (floats(3, 4), floats(4, 5))),
    "transposed": (lambda x, y: x.T @ y.T, (floats(4, 3), floats(5, 4))),
    "batched": (torch.bmm, (floats(2, 3, 4), floats(2, 4, 5))),
    "batched transposed": (
        lambda x, y: x.transpose(1, 2) @ y.transpose(1, 2),
        (floats(2, 4, 3), floats(2, 5, 4)),
    ),
    "four dimensions": (torch.matmul, (floats(2, 3, 4, 5), floats(2, 3, 5, 4))),
    "broadcast": (torch.matmul, (floats(2, 3, 4, 5), floats(5, 4))),
    "addmm": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        (floats(5), floats(3, 4), floats(4, 5)),
    ),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2),
        (floats(2, 3, 5), floats(2, 3, 4), floats(2, 4, 5)),
    ),
    "baddbmm ignores its bias": (
        lambda b, x, y: torch.baddbmm(b * torch.nan, x, y, beta=0),
        (torch.zeros(2, 3, 5), floats(2, 3, 4), floats(2, 4, 5)),
    ),
    "vector": (torch.mv, (floats(3, 4), floats(4))),
    "transposed by a vector": (lambda x, y: x.T @ y, (floats(4, 3), floats(4))),
    "dot": (torch.dot, (floats(4), floats(4))),
    "integers": (torch.mm, (signed(3, 4), signed(4, 5))),
    "double": (
        lambda x, y: x @ y.transpose(1, 2),
        (floats(2, 3, 4).detach().double().requires_grad_(), floats(2, 5, 4).detach().double()),
    ),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (floats(2, 3, 4), floats(2, 5, 4))),
    "outer": (torch.outer, (floats(3), floats(4))),
}

VIEWS: dict[str, Case] = {
    "reshape": (
        lambda x: x.reshape(4, 3).flatten().view(2, 6).unflatten(1, (3, 2)),
        (floats(3, 4),),
    ),
    "squeeze": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(), (floats(3, 4),)),
    "transpose": (lambda x: x.transpose(0, 2).permute(1, 2, 0).mT * 2, (floats(2, 3, 4),)),
    "expand": (lambda x: x.expand(5, 3, 4) * 2, (floats(3, 1),)),
    "repeat": (lambda x: x.repeat(2, 3), (floats(3),)),
    "repeat interleave": (lambda x: x.repeat_interleave(2, 1), (floats(3, 4),)),
    "slices": (lambda x: x[1:] * x[:-1] + x[:2, 1:2] * x[-2:, ::4].sum() + x[0], (floats(3, 6),)),
    "slice with a step": (lambda x: x[:, 1::2] * x[:, :-1:2], (floats(3, 6),)),
    "slice from a negative index": (lambda x: x[:, -3:-1], (floats(3, 6),)),
    "slice beyond the end": (lambda x: x[1:99] * 2, (floats(3, 6),)),
    "select": (lambda x: x[:, 1] + x[:, -1] + x.select(1, 2), (floats(3, 6),)),
    "cat": (lambda x, y: torch.cat([x, y, x[:, :1]], 1), (floats(3, 2), floats(3, 4))),
    "cat of types": (lambda x, y: torch.cat([x, y]), (floats(3), ints(3))),
    "cat with nothing": (lambda x: torch.cat([torch.zeros(0), x]), (floats(3),)),
    "stack": (lambda x, y: torch.stack([x, y, x], 1), (floats(3, 2), floats(3, 2))),
    "split": (lambda x: x.split(2, 1)[0] * x.split([3, 2], 1)[1], (floats(3, 5),)),
    "chunk": (lambda x: torch.cat([y * i for i, y in enumerate(x.chunk(3, 1))]), (floats(3, 6),)),
    "unbind": (lambda x: x.unbind(1)[0] * x.unbind(1)[1], (floats(3, 2),)),
    "flip": (lambda x: x.flip(0) + x.flip(0, 1), (floats(3, 3),)),
    "roll": (lambda x: x.roll(1, 0) + x.roll((1, 2), (0, 1)), (floats(3, 4),)),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1), value=0.5) * 2, (floats(3, 4),)),
    "crop": (lambda x: F.pad(x, (-1, 1)) * 2, (floats(3, 4),)),
    "pad reflect": (lambda x: F.pad(x[None], (1, 2), mode="reflect"), (floats(3, 4),)),
    "pad circular": (lambda x: F.pad(x[None], (1, 2), mode="circular"), (floats(3, 4),)),
    "diagonal": (lambda x: x.diagonal() + x.diagonal(1)[:3].sum() + x.trace(), (floats(3, 4),)),
    "diagonal of a batch": (lambda x: x.diagonal(-1, 1, 2) * 2, (floats(2, 4, 3),)),
    "triangles": (lambda x: x.tril() + x.triu(1) + x.tril(-1), (floats(4, 4),)),
    "windows": (lambda x: x.unfold(1, 3, 2) * 2, (floats(2, 9),)),
    "in place": (lambda x: _in_place(x), (floats(4, 5),)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (floats(1, 8, 3, 3),)),
}


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[1] = 0
    y[:, 2:4] += 1
    y[0, -1] = x[1, 1]
    y.mul_(2)[2:].zero_()
    return y


INDEXING: dict[str, Case] = {
    "embedding": (lambda w, i: F.embedding(i, w), (floats(7, 3), ints(4, 5, high=7))),
    "embedding with padding": (
        lambda w, i: F.embedding(i, w, padding_idx=2),
        (floats(7, 3), ints(4, 5, high=7)),
    ),
    "gather": (lambda x, i: x.gather(1, i), (floats(4, 6), ints(4, 3, high=6))),
    "gather of fewer rows": (lambda x, i: x.gather(1, i), (floats(4, 6), ints(2, 3, high=6))),
    "index select": (lambda x, i: x.index_select(1, i), (floats(4, 6), ints(3, high=6))),
    "index": (lambda x, i: x[i], (floats(4, 6), ints(3))),
    "index by a matrix": (lambda x, i: x[:, i], (floats(4, 6), ints(3, 2))),
    "index by two": (lambda x, i, j: x[i, j], (floats(4, 6), ints(3), ints(3))),
    "index by two that broadcast": (
        lambda x, i, j: x[i[:, None], j],
        (floats(4, 6), ints(3), ints(2)),
    ),
    "index with a gap": (lambda x, i, j: x[i, :, j], (floats(4, 3, 6), ints(3), ints(3))),
    "index behind a slice": (lambda x, i, j: x[:, i, j], (floats(2, 4, 6), ints(3), ints(3))),
    "negative index": (lambda x, i: x[i - 4], (floats(4, 6), ints(3))),
    "index put": (
        lambda x, i, v: _put(x, v, i),
        (floats(4, 6), torch.tensor([2, 0]), floats(2, 6)),
    ),
    "index put of columns": (
        lambda x, i, v: _put(x, v, slice(None), i),
        (floats(4, 6), torch.tensor([2, 0]), floats(4, 2)),
    ),
    "index put with addition": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (floats(4, 6), ints(5), floats(5, 6)),
    ),
    "index put with addition in two dimensions": (
        lambda x, i, j, v: x.index_put((i - 4, j), v, accumulate=True),
        (floats(4, 6, 3), ints(5), ints(5), floats(5, 3)),
    ),
    "number at a mask": (lambda x, c: _put(x, 0.5, c), (floats(4, 6), bools(4, 6))),
    "number at a mask of rows": (lambda x, c: _put(x, 0.5, c), (floats(4, 6), bools(4))),
    "scatter": (
        lambda x, i, v: x.scatter(1, i, v),
        (floats(2, 6), ints(2, 1, high=6), floats(2, 3).detach()),
    ),
    "scatter of a number": (lambda x, i: x.scatter(1, i, 0.5), (floats(2, 6), ints(2, 3, high=6))),
    "scatter add": (
        lambda x, i, v: x.scatter_add(1, i, v),
        (floats(2, 6), ints(2, 3, high=6), floats(2, 4).detach()),
    ),
    "scatter reduce": (
        lambda x, i, v: x.scatter_reduce(1, i, v, "amax").detach() * x,
        (floats(2, 6), ints(2, 3, high=6), floats(2, 3)),
    ),
    "index add": (lambda x, i, v: x.index_add(0, i, v), (floats(4, 3), ints(5), floats(5, 3))),
    "one hot": (lambda i: F.one_hot(i, 5), (ints(6),)),
    "take along": (lambda x, i: torch.take_along_dim(x, i, 1), (floats(4, 6), ints(4, 2, high=6))),
}


def _put(x: Tensor, value: Any, *index: Any) -> Tensor:
    y = x * 1
    y[index] = value
    return y


LAYERS: dict[str, Case] = {
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        (floats(3, 4, 6), floats(6), floats(6)),
    ),
    "layer norm of two dimensions": (lambda x: F.layer_norm(x, (4, 6)), (floats(3, 4, 6),)),
    "layer norm without bias": (lambda x, w: F.layer_norm(x, (6,), w), (floats(3, 6), floats(6))),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w), (floats(3, 4, 6), floats(6))),
    "group norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (floats(3, 4, 5, 2), floats(4), floats(4)),
    ),
    "group norm without weights": (lambda x: F.group_norm(x, 2), (floats(3, 4, 5),)),
    "instance norm": (lambda x: F.instance_norm(x), (floats(3, 4, 5, 5),)),
    "batch norm": (
        lambda x, w, b, m, v: F.batch_norm(x, m.clone(), v.clone(), w, b, training=True),
        (floats(5, 4, 3), floats(4), floats(4), torch.zeros(4), torch.ones(4)),
    ),
    "batch norm in evaluation": (
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        (floats(5, 4, 3), floats(4), floats(4), torch.randn(4), torch.rand(4) + 0.5),
    ),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), (floats(4, 3), positive(4, 1))),
    "convolution": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (floats(2, 3, 7, 6), floats(4, 3, 3, 3), floats(4)),
    ),
    "convolution with a stride": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        (floats(2, 3, 8, 7), floats(4, 3, 3, 3)),
    ),
    "convolution of channels": (
        lambda x, w, b: F.conv2d(x, w, b),
        (floats(2, 3, 7, 6), floats(4, 3, 1, 1), floats(4)),
    ),
    "convolution of channels with a stride": (
        lambda x, w: F.conv2d(x, w, stride=(2, 3)),
        (floats(2, 3, 8, 7), floats(4, 3, 1, 1)),
    ),
    "padded convolution of channels": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        (floats(2, 3, 8, 7), floats(4, 3, 1, 1)),
    ),
    "transposed convolution of channels": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (floats(2, 3, 4, 5), floats(3, 4, 1, 1)),
    ),
    "convolution with dilation": (
        lambda x, w: F.conv2d(x, w, dilation=2, stride=(1, 2)),
        (floats(2, 3, 9, 9), floats(4, 3, 3, 2)),
    ),
    "grouped convolution": (
        lambda x, w, b: F.conv2d(x, w, b, groups=2, stride=2, padding=1),
        (floats(2, 4, 7, 6), floats(6, 2, 3, 3), floats(6)),
    ),
    "depthwise convolution": (
        lambda x, w: F.conv2d(x, w, groups=4, padding=1),
        (floats(2, 4, 7, 6), floats(4, 1, 3, 3)),
    ),
    "convolution of sequences": (
        lambda x, w: F.conv1d(x, w, stride=3, padding=2),
        (floats(2, 3, 10), floats(4, 3, 5)),
    ),
    "convolution of volumes": (
        lambda x, w: F.conv3d(x, w, padding=1),
        (floats(1, 2, 4, 4, 4), floats(3, 2, 3, 3, 3)),
    ),
    "convolution of one pixel": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (floats(2, 3, 1, 1), floats(4, 3, 3, 3)),
    ),
    "convolution of a whole image": (
        lambda x, w, b: F.conv2d(x, w, b),
        (floats(2, 3, 5, 4), floats(4, 3, 5, 4), floats(4)),
    ),
    "convolution of the first pixels": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(5, 3), padding=(1, 2)),
        (floats(2, 3, 4, 2), floats(4, 3, 3, 5), floats(4)),
    ),
    "convolution of one position of a sequence": (
        lambda x, w, b: F.conv1d(x, w, b, padding=2),
        (floats(2, 3, 1), floats(4, 3, 5), floats(4)),
    ),
    "convolution of one pixel in channels last": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (
            floats(2, 3, 1, 1).detach().to(memory_format=torch.channels_last).requires_grad_(),
            floats(4, 3, 3, 3).detach().to(memory_format=torch.channels_last).requires_grad_(),
        ),
    ),
    "convolution of one pixel with frozen weights": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (floats(2, 3, 1, 1), floats(4, 3, 3, 3).detach(), floats(4).detach()),
    ),
    "convolution of one pixel with a trained bias": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (floats(2, 3, 1, 1).detach(), floats(4, 3, 3, 3).detach(), floats(4)),
    ),
    "convolution with a size as its dilation": (
        lambda x, w: F.conv2d(x, w, padding=x.shape[0], dilation=x.shape[0]),
        (floats(2, 3, 5, 5), floats(4, 3, 3, 3)),
    ),
    "convolution over padding alone": (
        lambda x, w, b: F.conv2d(x, w, b, stride=9, padding=3),
        (floats(2, 3, 2, 2), floats(4, 3, 2, 2), floats(4)),
    ),
    "grouped convolution of one pixel": (
        lambda x, w: F.conv2d(x, w, padding=1, groups=2),
        (floats(2, 4, 1, 1), floats(6, 2, 3, 3)),
    ),
    "dilated convolution of one pixel": (
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
        (floats(2, 4, 1, 1), floats(6, 4, 3, 3)),
    ),
    "dilated convolution with a single position": (
        lambda x, w: F.conv2d(x, w, stride=9, dilation=2),
        (floats(2, 4, 5, 5), floats(6, 4, 3, 3)),
    ),
    "convolution of a volume": (
        lambda x, w, b: F.conv3d(x, w, b, padding=1),
        (floats(2, 3, 1, 2, 1), floats(4, 3, 3, 4, 3), floats(4)),
    ),
    "transposed convolution": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (floats(2, 3, 4, 5), floats(3, 4, 3, 3), floats(4)),
    ),
    "grouped transposed convolution": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, groups=2),
        (floats(2, 4, 5), floats(4, 3, 3)),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (floats(2, 3, 8, 7),)),
    "max pool with ceil": (lambda x: F.max_pool2d(x, 2, ceil_mode=True), (floats(2, 3, 7, 7),)),
    "max pool of sequences": (lambda x: F.max_pool1d(x, 2), (floats(2, 3, 8),)),
    "max pool of an image": (lambda x: F.max_pool2d(x, 2), (floats(3, 8, 6),)),
    "max pool of volumes": (lambda x: F.max_pool3d(x, 2), (floats(1, 2, 4, 4, 4),)),
    "average pool": (lambda x: F.avg_pool2d(x, 2), (floats(2, 3, 8, 7),)),
    "average pool of sequences": (lambda x: F.avg_pool1d(x, 3), (floats(2, 3, 10),)),
    "adaptive average pool": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (floats(2, 3, 8, 6),)),
    "global average pool": (lambda x: F.adaptive_avg_pool2d(x, 1), (floats(2, 3, 8, 6),)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (floats(2, 3, 4, 5),)),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), (floats(2, 3, 4, 5),)),
    "bicubic": (
        lambda x: F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=True),
        (floats(1, 2, 4, 5),),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (floats(2, 2, 5, 4), floats(2, 2, 6, 4), floats(2, 2, 6, 3)),
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (floats(2, 2, 5, 4), floats(2, 2, 5, 4), floats(2, 2, 5, 4)),
    ),
    "masked attention": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (
            floats(2, 2, 5, 4),
            floats(2, 2, 6, 4),
            floats(2, 2, 6, 4),
            torch.arange(30).reshape(5, 6) % 3 > 0,
        ),
    ),
    "masked attention whose scores are large": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=30),
        (
            floats(2, 2, 5, 4),
            floats(2, 2, 6, 4),
            floats(2, 2, 6, 4),
            torch.arange(30).reshape(5, 6) % 3 > 0,
        ),
    ),
    "attention to nothing": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (
            floats(2, 5, 4),
            floats(2, 6, 4),
            floats(2, 6, 4),
            torch.arange(5)[:, None].expand(5, 6) > 1,
        ),
    ),
    "attention with a bias": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (floats(2, 2, 5, 4), floats(2, 2, 6, 4), floats(2, 2, 6, 4), floats(2, 1, 5, 6)),
    ),
    "attention of shared heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (floats(2, 4, 5, 4), floats(2, 2, 5, 4), floats(2, 2, 5, 4)),
    ),
}

LOSSES: dict[str, Case] = {
    "cross entropy": (F.cross_entropy, (floats(6, 4), ints(6))),
    "cross entropy, ignored": (
        lambda x, y: F.cross_entropy(x, y, ignore_index=1),
        (floats(6, 4), ints(6)),
    ),
    "cross entropy, weighted": (
        lambda x, y, w: F.cross_entropy(x, y, w),
        (floats(6, 4), ints(6), positive(4).detach()),
    ),
    "cross entropy, summed": (
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        (floats(6, 4), ints(6)),
    ),
    "cross entropy of each": (
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        (floats(6, 4), ints(6)),
    ),
    "cross entropy, smoothed": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        (floats(6, 4), ints(6)),
    ),
    "cross entropy of one": (F.cross_entropy, (floats(4), torch.tensor(2))),
    "cross entropy of images": (F.cross_entropy, (floats(2, 4, 3, 3), ints(2, 3, 3))),
    "cross entropy of probabilities": (
        lambda x, y: F.cross_entropy(x, y.softmax(1)),
        (floats(6, 4), floats(6, 4)),
    ),
    "mse": (F.mse_loss, (floats(6), floats(6))),
    "l1": (F.l1_loss, (floats(6), floats(6))),
    "smooth l1": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), (floats(9), floats(9))),
    "huber": (F.huber_loss, (floats(9), floats(9))),
    "bce": (
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
        (floats(6), positive(6).detach() / 2),
    ),
    "bce with logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y + 1),
        (floats(6), positive(6).detach()),
    ),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1)), (floats(4, 3), floats(4, 3))),
    "cosine": (lambda x, y: F.cosine_similarity(x, y).sum(), (floats(4, 3), floats(4, 3))),
    "triplet": (F.triplet_margin_loss, (floats(4, 3), floats(4, 3), floats(4, 3))),
    "hinge": (lambda x, y: F.hinge_embedding_loss(x, y * 2 - 1), (floats(9), ints(9, high=2))),
}

SELECTIONS: dict[str, Case] = {
    "mask": (lambda x, c: x[c] * 2, (floats(6, 3), bools(6))),
    "mask of elements": (lambda x, c: x[c].sum(), (floats(6, 3), bools(6, 3))),
    "mask of nothing": (lambda x, c: x[c].sum() + x.sum(), (floats(6, 3), torch.zeros(6).bool())),
    "masked select": (lambda x, c: torch.masked_select(x, c).sum(), (floats(6, 3), bools(6, 3))),
    "nonzero": (lambda x: torch.nonzero(x), (ints(3, 4, high=2),)),
    "where alone": (lambda x, y: x[torch.where(y > 1)[0]].sum(), (floats(6, 3), ints(6))),
    "convolution of a selection": (
        lambda x, c, w: F.conv1d(x[..., torch.nonzero(c)[:, 0]], w, padding=2),
        (floats(2, 3, 9), bools(9), floats(4, 3, 5)),
    ),
}

EVERY = {
    f"{family}: {name}": case
    for family, cases in {
        "elementwise": ELEMENTWISE,
        "activations": ACTIVATIONS,
        "reductions": REDUCTIONS,
        "products": PRODUCTS,
        "views": VIEWS,
        "indexing": INDEXING,
        "layers": LAYERS,
        "losses": LOSSES,
        "selections": SELECTIONS,
    }.items()
    for name, case in cases.items()
}

IN_TORCH = {
    ("layers: convolution with a size as its dilation", True): {
        "aten.convolution",
        "aten.convolution_backward",
    },
    ("indexing: embedding", False): {"aten.embedding_dense_backward"},
    ("indexing: embedding", True): {"aten.embedding_dense_backward"},
    ("indexing: embedding with padding", False): {"aten.embedding_dense_backward"},
    ("indexing: embedding with padding", True): {"aten.embedding_dense_backward"},
    ("reductions: product", False): {"aten.cumprod"},
    ("reductions: product", True): {"aten.cumprod"},
    ("layers: adaptive average pool", True): {
        "aten._adaptive_avg_pool2d",
        "aten._adaptive_avg_pool2d_backward",
    },
}
"""Operators that torch runs, by case and whether its sizes vary."""

if onnxruntime.__version__ == "1.19.2":  # has no kernel of FusedMatMul for float64
    IN_TORCH |= {("products: double", dynamic): {"aten.bmm"} for dynamic in (False, True)}


def _outcome(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the results and the gradients of all inputs."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    made = function(*given)
    found = [made.detach()]
    if made.requires_grad:
        weights = torch.linspace(0.5, 1.5, made.numel()).reshape(made.shape)
        (made * weights).sum().backward()
        found += [
            torch.zeros_like(x) if x.grad is None else x.grad for x in given if x.requires_grad
        ]
    return found


def _compare(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        torch.testing.assert_close(other, one, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("convolution of one pixel", False),
        ("convolution of a whole image", False),
        ("convolution of the first pixels", False),
        ("convolution of a volume", False),
        ("convolution over padding alone", True),
        ("grouped convolution of one pixel", True),
        ("convolution with a stride", True),
    ],
)
def test_a_convolution_with_a_single_position_is_a_product(name: str, left: bool) -> None:
    function, given = LAYERS[name]
    backend = Backend()
    compiled = torch.compile(function, backend=backend.held_weakly(), fullgraph=True)
    compiled(*given).sum().backward()
    targets = {
        str(node.target)
        for graph in backend.graphs
        for segment in graph.division.ort_segments()
        for node in segment.graph.graph.nodes
    }
    assert any("convolution" in target for target in targets) == left


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EVERY)
def test_results_and_gradients_are_those_of_eager_torch(name: str, dynamic: bool) -> None:
    function, inputs = EVERY[name]
    backend = Backend()
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(action="ignore"),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
        _compare(_outcome(function, inputs), _outcome(compiled, inputs))
    assert set(in_torch(backend)) == IN_TORCH.get((name, dynamic), set())
    assert backend.graphs


def _as(dtype: torch.dtype, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return inputs with floats of another type."""
    return tuple(
        x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    )


WITH_FLOATS = [name for name, (_, xs) in EVERY.items() if any(map(torch.is_floating_point, xs))]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.bfloat16, id="bf16"),
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", WITH_FLOATS)
def test_16_bit_floats_are_as_near_to_double_precision_as_in_eager_torch(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (segments, attention):
        monkeypatch.setattr(module, "has_instructions", lambda _: False)
    function, inputs = EVERY[name]
    inputs = _as(dtype, inputs)
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(action="ignore"),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        exact = _outcome(function, _as(torch.float64, inputs))
        expected = _outcome(function, inputs)
        compiled = torch.compile(function, backend=(backend := Backend()), fullgraph=True)
        found = _outcome(compiled, inputs)
    near = 4 * torch.finfo(dtype).eps
    for right, one, other in zip(exact, expected, found, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        right = torch.where(one.isfinite(), right, one).double()
        apart = (one.double() - right).abs().nan_to_num(0).max() if one.numel() else 0
        torch.testing.assert_close(
            other.double(), right, rtol=near, atol=near + 2 * float(apart), equal_nan=True
        )
    assert set(in_torch(backend)) <= IN_TORCH.get((name, False), set())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_each_result_is_rounded_to_16_bits_as_in_eager_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: sums and products that are not rounded in between have other last bits."""
    monkeypatch.setattr(segments, "has_instructions", lambda _: False)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = (x * y + x) * 1.1 - y
        return made, made.double(), torch.cat([x, y])[:, 1:] < 0.1

    numbers = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3))
    x, y = numbers.to(dtype)
    x[:, 5] = 0.1  # torch compares with 0.1 of the same precision
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=(backend := Backend()), fullgraph=True)
    for one, other in zip(function(x, y), compiled(x, y), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
    assert not in_torch(backend)


NORMS = {
    "layer": lambda x, w: F.layer_norm(x, [8], w[:8], w[:8]),
    "layer without weights": lambda x, w: F.layer_norm(x, [8]),
    "group": lambda x, w: F.group_norm(x, 2, w[:4], w[:4]),
    "batch": lambda x, w: F.batch_norm(x, *_running(), w[:4], w[:4], training=True),
    "batch without weights": lambda x, w: F.batch_norm(x, *_running(), training=True),
}


def _running() -> tuple[Tensor, Tensor]:
    return torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize("gradient_in_torch", [False, True], ids=["", "gradient in torch"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_16_bit_floats_have_statistics_as_torch_has_them(
    name: str, gradient_in_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parameters of type float32, as under autocast: torch's gradient reads what ORT made."""
    monkeypatch.setattr(segments, "has_instructions", lambda _: False)
    if gradient_in_torch:
        for norm in ("layer_norm", "group_norm", "batch_norm"):
            gradient = getattr(torch.ops.aten, f"native_{norm}_backward").default
            monkeypatch.setitem(segments._FASTER_WHEN_LARGE, gradient, (0, "and this is a test"))
    torch._dynamo.reset()
    compiled = torch.compile(NORMS[name], backend=(backend := Backend()), fullgraph=True)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.linspace(0.5, 1.5, 8)
    given = x.requires_grad_(), weights.requires_grad_()
    for one, other in zip(_outcome(NORMS[name], given), _outcome(compiled, given), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
    assert any("norm" in each for each in in_torch(backend)) == gradient_in_torch


def test_a_type_that_torch_did_not_tell_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's gradient of a group norm has 16 bits where its fake tensor has 32."""
    monkeypatch.setattr(segments, "has_instructions", lambda _: False)
    like = onnx_model._like
    monkeypatch.setattr(onnx_model, "_like", lambda norm, i: like(norm, i) if i else None)
    gradient = torch.ops.aten.native_group_norm_backward.default
    monkeypatch.setitem(segments._FASTER_WHEN_LARGE, gradient, (0, "and this is a test"))
    torch._dynamo.reset()
    compiled = torch.compile(NORMS["group"], backend=(backend := Backend()), fullgraph=True)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = x.requires_grad_(), torch.linspace(0.5, 1.5, 8).requires_grad_()
    for one, other in zip(_outcome(NORMS["group"], given), _outcome(compiled, given), strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
    assert "an input has the type torch.bfloat16" in in_torch(backend).values()


ADDED = {
    "embedding": (lambda w, i: F.embedding(i, w), (50, 64), (400, 250), 50),
    "rows": (lambda x, i: x[i], (50, 64), (100_000,), 50),
    "elements": (lambda x, i: x.gather(0, i), (50, 64), (5_000, 64), 50),
}


@pytest.mark.parametrize("name", ADDED)
def test_equal_indices_are_all_added_with_several_threads(name: str) -> None:
    """ORT's ScatterND adds in several threads at once, and loses some: 1 of 5 runs is wrong."""
    function, shape, rows, high = ADDED[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, requires_grad=True)
    at = torch.randint(0, high, rows, generator=generator)
    with threads(4):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=Backend(), fullgraph=True)
        (expected,) = torch.autograd.grad(function(x, at).sin().sum(), x)
        for _ in range(20):
            (found,) = torch.autograd.grad(compiled(x, at).sin().sum(), x)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-1)
