"""Each export rule matches eager torch: outputs and every gradient, for two batch shapes."""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ortlab.engines.ortmodule.compat import TrainingRuntime

Batch = tuple[Tensor, ...]


class Calling(nn.Module):
    """A function of the inputs with a parameter before and after it, so that gradients flow."""

    def __init__(self, function: Callable[..., Tensor], *, before: bool = True) -> None:
        super().__init__()
        self.function = function
        self.inner = function if isinstance(function, nn.Module) else None
        self.before = nn.Parameter(torch.tensor(1.1)) if before else None
        self.after = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        if self.before is not None:
            x = x * self.before
        return self.function(x, *rest) * self.after


def compare(
    ort: TrainingRuntime, model: nn.Module, *batches: Tensor | Batch, rtol: float = 1e-4
) -> None:
    """Raise where ORTModule's output, a gradient or a buffer differs from eager torch's."""
    twin = copy.deepcopy(model)
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    for batch in batches:
        inputs = batch if isinstance(batch, tuple) else (batch,)
        ours, theirs = wrapped(*inputs), twin(*inputs)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-5)
        cotangent = torch.randn_like(theirs)
        ours.backward(cotangent)
        theirs.backward(cotangent)
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.requires_grad and other.grad is not None:
            scale = max(1.0, float(other.grad.abs().max()))
            assert parameter.grad is not None, name
            error = float((parameter.grad - other.grad).abs().max())
            assert error <= 1e-3 * scale, f"{name}: {error}"
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        if name.endswith("num_batches_tracked"):
            continue  # the engine counts in Python
        torch.testing.assert_close(buffer, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def freed_memory_overwritten(
    ort: TrainingRuntime, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let ORT free tensors at once and glibc overwrite what is freed, so that no read is luck."""
    from onnxruntime.training.ortmodule import _graph_execution_manager as manager

    configured = manager.GraphExecutionManager._get_session_config

    def without_arena(self: Any) -> Any:
        options, *rest = configured(self)
        options.enable_cpu_mem_arena = False
        return options, *rest

    monkeypatch.setattr(manager.GraphExecutionManager, "_get_session_config", without_arena)
    mallopt, perturb = ctypes.CDLL(None).mallopt, -6  # malloc.h: M_PERTURB
    mallopt(perturb, 0x5A)
    yield
    mallopt(perturb, 0)


def heads(*counts: int, batch: int = 2, length: int = 5) -> Batch:
    return tuple(torch.randn(batch, count, length, 8) for count in counts)


def attend(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def attend_masked(kind: str) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(k.shape[-2])[None, :] <= torch.arange(q.shape[-2])[:, None]
        if kind == "float":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=q[..., :1] * mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    return attention


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (attend(), (2, 2, 2)),
        (attend(is_causal=True), (2, 2, 2)),
        (attend(enable_gqa=True), (4, 2, 2)),
        (attend_masked("bool"), (2, 2, 2)),
        (attend_masked("float"), (2, 2, 2)),
        (attend(dropout_p=1e-9), (2, 2, 2)),
    ],
    ids=["plain", "causal", "grouped-queries", "bool-mask", "float-mask", "dropout"],
)
def test_attention(
    ort: TrainingRuntime, function: Callable[..., Tensor], counts: tuple[int, ...]
) -> None:
    for before in (True, False):  # otherwise the heads' size is not known at export
        batches = heads(*counts), heads(*counts, batch=3, length=7)
        compare(ort, Calling(function, before=before), *batches)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_no_key_gets_nothing(ort: TrainingRuntime, kind: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = q[..., :1] > k[:, :, :1, :1]
        if kind == "float":
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    some, none = heads(2, 2, 2), heads(2, 2, 2)
    none[0][:, :, :2, 0] = -9.0
    compare(ort, Calling(attention), some, none)


def test_attention_drops_at_its_rate(ort: TrainingRuntime) -> None:
    model = Calling(attend(dropout_p=0.25))
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    query = torch.zeros(1, 1, 64, 256)
    value = torch.eye(256).expand(1, 1, 256, 256)  # the output is the weights themselves
    weights = wrapped(query, query.new_zeros(1, 1, 256, 256), value)
    dropped = float((weights == 0).float().mean())
    assert abs(dropped - 0.25) < 0.02
    assert float(weights.detach().sum(-1).mean()) == pytest.approx(0.9, rel=0.02)


GROUPED = {
    "bias": nn.Conv2d(4, 8, 3, groups=2),
    "no bias": nn.Conv2d(4, 8, 3, groups=4, bias=False),
    "padded, strided": nn.Conv2d(4, 8, 3, groups=2, stride=2, padding=1),
    "same": nn.Conv2d(4, 8, (3, 4), groups=2, padding="same", dilation=2),
    "valid": nn.Conv2d(4, 8, 3, groups=2, padding="valid", bias=False),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
    "transposed, grouped, no bias": nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
}


@pytest.mark.parametrize("name", GROUPED)
def test_convolution(ort: TrainingRuntime, name: str) -> None:
    for before in (True, False):
        model = Calling(copy.deepcopy(GROUPED[name]), before=before)
        compare(ort, model, torch.randn(2, 4, 9, 8), torch.randn(3, 4, 8, 11))


@pytest.mark.parametrize("one_dimensional", [nn.Conv1d, nn.ConvTranspose1d])
def test_convolution_in_one_dimension(
    ort: TrainingRuntime, one_dimensional: type[nn.Conv1d]
) -> None:
    model = Calling(one_dimensional(4, 4, 3, groups=2))
    compare(ort, model, torch.randn(2, 4, 9), torch.randn(3, 4, 6))


def test_no_grouped_convolution_reaches_orts_own_gradient(ort: TrainingRuntime) -> None:
    for name, layer in GROUPED.items():
        wrapped = ort.ORTModule(
            Calling(copy.deepcopy(layer)), ort.DebugOptions(log_level=ort.LogLevel.ERROR)
        )
        wrapped(torch.randn(2, 4, 9, 8))
        manager = wrapped._torch_module._execution_manager(True)
        operators = {node.op_type for node in manager._onnx_models.optimized_model.graph.node}
        assert not operators & {"Conv", "ConvGrad", "ConvTranspose"}, name


SEVERAL_GRADIENTS = [
    nn.Conv2d(4, 4, 3, groups=2),
    nn.Conv2d(4, 4, 3, groups=2, padding="same"),
    nn.BatchNorm2d(4),
    nn.GroupNorm(2, 4),
]


@pytest.mark.parametrize("layer", SEVERAL_GRADIENTS, ids=str)
def test_frozen_parameters(ort: TrainingRuntime, layer: nn.Module) -> None:
    for before, weight, bias in itertools.product(
        (None, False, True), (True, False), (True, False)
    ):
        model = Calling(copy.deepcopy(layer), before=before is not None)
        if model.before is not None:
            model.before.requires_grad = bool(before)
        model.inner.weight.requires_grad = weight  # type: ignore[union-attr]
        model.inner.bias.requires_grad = bias  # type: ignore[union-attr]
        compare(ort, model, torch.randn(2, 4, 5, 5))
        for name, each in model.named_parameters():
            assert (each.grad is not None) == each.requires_grad, (name, before, weight, bias)


@pytest.mark.parametrize(("affine", "bias"), list(itertools.product((True, False), repeat=2)))
def test_layer_norm(ort: TrainingRuntime, affine: bool, bias: bool) -> None:
    layer = nn.LayerNorm(6, elementwise_affine=affine, bias=bias)
    compare(ort, Calling(layer), torch.randn(4, 6), torch.randn(3, 6))


@pytest.mark.parametrize(("affine", "tracking"), list(itertools.product((True, False), repeat=2)))
def test_batch_norm(ort: TrainingRuntime, affine: bool, tracking: bool) -> None:
    for before in (True, False):
        layer = nn.BatchNorm1d(6, affine=affine, track_running_stats=tracking)
        compare(ort, Calling(layer, before=before), torch.randn(8, 6), torch.randn(5, 6))


def test_batch_norm_left_in_evaluation_mode(ort: TrainingRuntime) -> None:
    model = Calling(nn.BatchNorm1d(6).eval())
    compare(ort, model, torch.randn(8, 6), torch.randn(5, 6))
    assert not model.inner.training  # type: ignore[union-attr]


def test_batch_norm_in_evaluation(ort: TrainingRuntime) -> None:
    model = Calling(nn.BatchNorm2d(6, affine=False)).eval()
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    x = torch.randn(2, 6, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), model(x))


def test_a_small_convolutional_net(ort: TrainingRuntime) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    more = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.Flatten()
    compare(ort, nn.Sequential(*layers, *more), torch.randn(4, 3, 9, 9), torch.randn(5, 3, 9, 9))


class Where(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x * self.scale, self.weight)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1), ()], ids=str)
def test_where_broadcasts(ort: TrainingRuntime, shape: tuple[int, ...]) -> None:
    compare(ort, Where(shape), torch.randn(1, 6), torch.randn(4, 6))


REST: dict[str, Callable[[Tensor], Tensor]] = {
    "where, a number": lambda x: torch.where(x > 0, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "cumsum of bools": lambda x: (x > 0).cumsum(-1) * x,
    "cumsum of ints": lambda x: (x > 0).int().cumsum(0) * x,
    "cumsum to float": lambda x: (x > 0).cumsum(1, dtype=torch.float32) * x,
    "cumsum": lambda x: x.cumsum(-1),
    "diff": lambda x: x.diff(dim=1),
    "second diff": lambda x: x.diff(n=2, dim=-1, prepend=x[:, :1]),
    "sum of quotients": lambda x: x / 1.5 + x.exp() / 2.5 + x.sin(),
    "sum of two quotients": lambda x: x / 1.5 + x.exp() / 2.5,
    "a half": lambda x: x.split(3, -1)[1],
    "parts of it": lambda x: torch.cat(x.split([1, 2, 3], 1)[::2], 1),
    "all parts": lambda x: torch.cat([part.exp() for part in x.split([1, 2, 3], 1)], 1),
    "a chunk": lambda x: x.chunk(3, -1)[1],
    "a row": lambda x: x.unbind(1)[2],
    "all rows": lambda x: torch.stack([row.sin() for row in x.unbind(-1)]),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "norm of all": lambda x: torch.linalg.vector_norm(x) + x.norm(),
    "vector norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "flip": lambda x: x.flip(-1, 0) * x,
    "l1 loss": lambda x: F.l1_loss(x, x.exp()),
    "smooth l1 loss": lambda x: F.smooth_l1_loss(x, x.exp(), beta=0.7, reduction="sum"),
    "huber loss": lambda x: F.huber_loss(x, x.exp(), delta=0.7, reduction="none"),
    "windows": lambda x: x.sin().as_strided((2, 3), (2, 1)),
    "windows of a transposed": lambda x: x.sin().t().as_strided((3, 2), (1, 6)),
    "unflatten": lambda x: x.unflatten(-1, (2, 3)).sum(1),
    "unflatten the first": lambda x: x.unflatten(0, (2, -1)).sum(0),
}


BENT = torch.tensor([0.0, 6.0, 1.0, -1.0, 2.0, 7.0]).repeat(2, 1)
BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "equal rows": lambda x: F.pairwise_distance(x, x.flip(0)),
    "equal rows, cubed": lambda x: F.pairwise_distance(x, x.flip(0), p=3.0, keepdim=True),
    "no direction": lambda x: F.cosine_similarity(x, x.floor(), dim=-1),
    "spread of equal numbers": lambda x: x.std(0) + x.std(-1).sum(),
    "spread and mean": lambda x: torch.add(*torch.std_mean(x, 0, correction=0)),
    "to the 0th": lambda x: x**0 + x,
    "to several powers": lambda x: x ** torch.arange(6) + x[:1] ** x.detach().sign().abs(),
}


@pytest.mark.parametrize("name", BENDS)
def test_where_it_bends(ort: TrainingRuntime, name: str) -> None:
    """The first batch is away from every kink, as the self-check's may be; the next are at them."""
    layer = Calling(BENDS[name])
    torch.nn.init.ones_(layer.before)
    compare(ort, layer, torch.randn(4, 6), BENT, 0 * BENT)


def of_each(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([function(x) for function in functions])


def targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % 3


def some_targets(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[0]) == 1, -100, targets(x))


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0, 1.0])
REST |= {
    "detach": lambda x: x.detach() * x,
    "label smoothing": lambda x: F.cross_entropy(x, some_targets(x), label_smoothing=0.2),
    "label smoothing, summed": lambda x: F.cross_entropy(
        x, targets(x), label_smoothing=0.2, reduction="sum"
    ),
    "label smoothing, weighted": lambda x: F.cross_entropy(
        x, some_targets(x), weight=WEIGHT, label_smoothing=0.2
    ),
    "label smoothing, of each": lambda x: F.cross_entropy(
        x, some_targets(x), weight=WEIGHT, label_smoothing=0.2, reduction="none"
    ),
    "probabilities as targets": lambda x: F.cross_entropy(x, x.sin().softmax(-1)),
    "probabilities, smoothed": lambda x: F.cross_entropy(
        x[:, :, None], x.sin().softmax(-1)[:, :, None], weight=WEIGHT, label_smoothing=0.2
    ),
    "negative log likelihood": of_each(
        *(lambda x: F.nll_loss(x, some_targets(x)),),
        *(lambda x: F.nll_loss(x, some_targets(x), weight=WEIGHT),),
        *(lambda x: F.nll_loss(x, targets(x), ignore_index=1, reduction="sum"),),
        *(lambda x: F.nll_loss(x, some_targets(x), reduction="none").sum(),),
        *(lambda x: F.nll_loss(x[:, :, None], some_targets(x)[:, None], weight=WEIGHT),),
    ),
    "dropout of everything": lambda x: F.dropout(x.exp(), 1.0) + x,
    "smooth functions": of_each(
        *(torch.asinh, torch.atan, torch.cosh, torch.erfc, torch.exp2, torch.expm1, torch.sinh),
        *(torch.tan, lambda x: (x.abs() + 1.1).acosh(), lambda x: (x.abs() + 1).digamma()),
        *(lambda x: x.abs().add(1).lgamma(), lambda x: torch.hypot(x, x.exp())),
        *(lambda x: torch.atan2(x, x.exp()), lambda x: torch.logaddexp(x, x.sin())),
        *(lambda x: torch.xlogy(x, x.exp()), lambda x: torch.addcdiv(x, x, x.exp(), value=0.5)),
    ),
    "functions of an interval": of_each(
        *(lambda x: x.sin().mul(0.9).acos(), lambda x: x.sin().mul(0.9).asin()),
        *(lambda x: x.sin().mul(0.9).atanh(), lambda x: x.sin().mul(0.9).erfinv()),
    ),
    "steps": of_each(
        *(lambda x: x.ceil() * x, lambda x: x.floor() * x, lambda x: x.round() * x),
        *(lambda x: x.sign() * x, lambda x: x.trunc() * x, torch.frac),
    ),
    "amax": lambda x: x.round().amax(-1) + x.amin((0, 1)),
    "amax, all dimensions kept": lambda x: x.amax((0, 1), keepdim=True),
    "prod": lambda x: x.prod() + x.floor().prod(-1) + x.prod(0, keepdim=True).sum(),
    "cumprod": lambda x: x.cumprod(-1),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).float()),
    "bce, weighted": lambda x: F.binary_cross_entropy(
        x.sigmoid(), (x > 0).float(), weight=WEIGHT, reduction="sum"
    ),
    "margin losses": of_each(
        *(lambda x: F.soft_margin_loss(x, (x > 0).float()),),
        *(lambda x: F.hinge_embedding_loss(x, (x > 0).float() * 2 - 1),),
        *(lambda x: F.margin_ranking_loss(x, x.exp(), (x > 0).float() * 2 - 1),),
        *(lambda x: F.cosine_embedding_loss(x, x.exp(), torch.ones(x.shape[0])),),
        *(lambda x: F.triplet_margin_loss(x, x.exp(), x.sin()),),
        *(lambda x: F.poisson_nll_loss(x, x.exp()),),
    ),
}


@pytest.mark.parametrize("name", REST)
def test_rule(ort: TrainingRuntime, name: str) -> None:
    compare(ort, Calling(REST[name]), torch.randn(4, 6), torch.randn(2, 6))


ONCE, TWICE = torch.arange(4), torch.tensor([1, 1, 3, 3])
INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, i: torch.zeros(4, 6).index_add(0, i, x),
    "index_add, scaled": lambda x, i: x.sin().index_add(0, i, x, alpha=2),
    "index_add along rows": lambda x, i: x.index_add(-1, i, x.sin()[:, 2:]),
    "index_add to what is trained": lambda x, i: x.index_add(0, i, torch.ones_like(x)),
    "index_add of whole numbers": lambda x, i: (
        x * torch.zeros(4, 1, dtype=torch.long).index_add(0, i, torch.ones(4, 1, dtype=torch.long))
    ),
    "index_add_": lambda x, i: x.new_zeros(4, 6).index_add_(0, i, x),
    "index_put": lambda x, i: torch.zeros(4, 6).index_put((i,), x, accumulate=True),
    "index_put of pairs": lambda x, i: x.sin().index_put((i, i - 6), x[:, 0], accumulate=True),
    "index_put of a number": lambda x, i: x.index_put((i,), torch.tensor(2.0), accumulate=True),
    "index_put of a block": lambda x, i: (
        torch.zeros(4, 3, 2, 6)
        .index_put((i[:, None], torch.arange(2)), x[:, None, None], accumulate=True)
        .flatten(1)
    ),
    "index_copy": lambda x, i: x.sin().index_copy(1, i[::2] - ONCE[:2], x[:, :2]),
    "index_fill": lambda x, i: x.index_fill(1, i - 6, 0.5),
    "index_fill with what is trained": lambda x, i: x.sin().index_fill(0, i, x[0, 0]),
    "scatter_add": lambda x, i: x.sin().scatter_add(0, i[:, None].expand(-1, 6), x),
    **{
        f"{function}, {reduce}": lambda x, i, function=function, reduce=reduce, whole=whole: (
            getattr(torch.ones(4, 6), function)(
                0,
                i[:, None].expand(-1, 6) if function == "scatter_reduce" else i,
                x,
                reduce,
                include_self=whole,
            )
        )
        for function in ("scatter_reduce", "index_reduce")
        for reduce, whole in (("mean", False), ("amax", True), ("prod", True))
    },
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_occurs_twice(ort: TrainingRuntime, name: str) -> None:
    """The first batch has no repeated index, as the self-check's may have none."""
    first, second = (torch.randn(4, 6) for _ in range(2))
    compare(ort, Calling(INDEXED[name]), (first, ONCE), (second, TWICE))


PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pairs": lambda x, i: x[torch.arange(len(i)), i],
    "pairs, both chosen": lambda x, i: x[i, i.int()],
    "blocks": lambda x, i: x.view(-1, 2, 3)[i[:, None], torch.tensor([0, -1])],
    "with a slice between": lambda x, i: x.view(-1, 2, 3)[torch.arange(len(i)), :, i],
    "after a slice": lambda x, i: x.view(-1, 2, 3)[:, i // 2, i],
    "put": lambda x, i: x.index_put((torch.arange(len(i)), i), torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_index_below_zero(ort: TrainingRuntime, name: str) -> None:
    up = torch.tensor([0, 1, 2, 1])
    compare(ort, Calling(PAIRS[name]), *((torch.randn(4, 6), each) for each in (up, up - 3)))


MATRIX = torch.randn(5, 6)
IMAGE = (3, 4, 6, 8)
SIZED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "linspace of a size": (lambda x: x[:, 0] * torch.linspace(0, 1, x.shape[0]), (4, 6)),
    "linspace of one": (lambda x: x[:1, 0] * torch.linspace(2, 3, x[:1].shape[0]), (4, 6)),
    "linspace of floats": (lambda x: x[:, 0] * torch.linspace(-0.5, 2.0, x.shape[0]), (4, 6)),
    "einsum with ...": (lambda x: torch.einsum("...i,oi->...o", x, MATRIX), (4, 3, 6)),
    "einsum with ... of two": (lambda x: torch.einsum("...i,...i", x, x[:1].sin()), (4, 3, 6)),
    "einsum with ... of one first": (
        lambda x: torch.einsum("...i,...i", x[:1].sin(), x),
        (4, 3, 6),
    ),
    "einsum of three": (lambda x: torch.einsum("bi,oi,bi->bo", x, MATRIX, x), (4, 6)),
    "einsum of one": (lambda x: torch.einsum("bii->bi", x), (4, 3, 3)),
    "einsum to a number": (lambda x: torch.einsum("bi,oi->", x, MATRIX), (4, 6)),
    "einsum without an arrow": (lambda x: torch.einsum("ba,ca", x, MATRIX), (4, 6)),
    "tensordot": (lambda x: torch.tensordot(x, MATRIX, dims=([2], [1])), (4, 3, 6)),
    "tensordot of a number of dims": (lambda x: torch.tensordot(x, MATRIX.t(), dims=1), (4, 6)),
    "quantile of rows": (lambda x: x.quantile(0.3, dim=1), (4, 6)),
    "quantile, the lower": (lambda x: x.quantile(0.7, 0, True, interpolation="lower"), (4, 6)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (4, 6)),
    "rot90": (lambda x: torch.rot90(x, 1, (1, 2)), (4, 3, 6)),
    "take_along_dim": (lambda x: torch.take_along_dim(x, x.argsort(1), 1), (4, 6)),
    "solve": (lambda x: torch.linalg.solve(torch.eye(6) * 3, x.t()), (4, 6)),
    **{
        f"{mode}, {dims}-D": (
            lambda x, mode=mode, dims=dims: F.pad(x, (1, 2, 2, 1, 1, 0)[: 2 * dims], mode=mode),
            (3, 4, 5, 6, 7)[: dims + 2],
        )
        for mode in ("reflect", "replicate")
        for dims in (1, 2, 3)
    },
    "group norm without a weight": (lambda x: F.group_norm(x, 2), IMAGE),
    "instance norm": (F.instance_norm, IMAGE),
    "layer norm of a size": (lambda x: F.layer_norm(x, x.shape[-1:]), (4, 6)),
    "layer norm of two sizes": (lambda x: F.layer_norm(x, x.shape[1:], x[0]), (4, 3, 6)),
    "instance norm of sequences": (lambda x: F.instance_norm(x, weight=MATRIX[:4, 0]), (3, 4, 8)),
    **{
        f"{mode} to a size": (
            lambda x, mode=mode: F.interpolate(F.avg_pool2d(x, 2), x.shape[-2:], mode=mode),
            IMAGE,
        )
        for mode in ("nearest", "bicubic", "bilinear")
    },
    "nearest by a factor": (lambda x: F.interpolate(x, scale_factor=1.5), IMAGE),
    "nearest of 1 dimension": (lambda x: F.interpolate(x, size=5), (3, 4, 8)),
    **{
        f"losses of samples, {name}": (
            lambda x, use=use: use(
                F.cross_entropy(x, torch.arange(x.shape[0]) % 6, reduction="none")
            ),
            (4, 6),
        )
        for name, use in {
            "a slice": lambda losses: losses[1:3],
            "sorted": lambda losses: losses.sort().values,
            "focal": lambda losses: (1 - (-losses).exp()) ** 2 * losses,
            "expanded": lambda losses: losses.expand(2, -1),
        }.items()
    },
    "categorical": (
        lambda x: torch.distributions.Categorical(logits=x).log_prob(torch.arange(x.shape[0]) % 6),
        (4, 6),
    ),
}


@pytest.mark.parametrize("name", SIZED)
def test_another_number_of_rows(ort: TrainingRuntime, name: str) -> None:
    function, shape = SIZED[name]
    compare(ort, Calling(function), *(torch.randn(n, *shape[1:]) for n in (shape[0], 5, 2)))


def test_bilinear(ort: TrainingRuntime) -> None:
    class Both(nn.Module):
        def __init__(self, *, bias: bool) -> None:
            super().__init__()
            self.product = nn.Bilinear(6, 6, 3, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.product(x, x.sin())
            return found

    for bias in (True, False):
        compare(ort, Both(bias=bias), torch.randn(4, 6), torch.randn(3, 6))


FIXED = torch.rand(4, 6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.atan2(FIXED, x),
        lambda x: torch.atan2(x, FIXED),
        lambda x: FIXED.index_copy(0, ONCE, x),
        lambda x: x.index_copy(0, ONCE[:2], FIXED[:2]),
        lambda x: FIXED.index_reduce(0, TWICE, x.masked_fill(FIXED < 0.3, -torch.inf), "amax"),
    ],
)
def test_one_of_two_is_trained(ort: TrainingRuntime, function: Callable[[Tensor], Tensor]) -> None:
    compare(ort, Calling(function), torch.rand(4, 6), torch.rand(4, 6))


DIVISIONS: dict[str, Callable[..., Tensor]] = {
    "//": lambda x, y: x // y,
    "floor_divide": torch.floor_divide,
    "%": lambda x, y: x % y,
    "fmod": torch.fmod,
    "div, floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div, trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}
WITH_GRADIENT = ("%", "fmod", "div, floor", "div, trunc")


@pytest.mark.parametrize("by", [3, -3, 0.1, -0.7], ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_division_below_zero(ort: TrainingRuntime, name: str, by: float) -> None:
    """The first batch has no number below 0, as the self-check's may have none."""
    divide = DIVISIONS[name]
    whole, fractions = torch.arange(6).repeat(2, 1), torch.rand(2, 6)
    edges = torch.tensor([1.0, 0.3, -0.1, -0.7, 2.1, -6.0]).repeat(2, 1)
    model = Calling(
        lambda x, n, f: x * (divide(n, by) + divide(f, by)) + x * divide(0 * n - 7, n + 1)
    )
    batches = (whole, fractions), (-2 - whole, edges)
    compare(ort, model, *((torch.randn(2, 6), *batch) for batch in batches))


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_division_has_torchs_gradient(ort: TrainingRuntime, name: str) -> None:
    model = Calling(lambda x: DIVISIONS[name](x, x.cos() - 1.5) + x)
    compare(ort, model, torch.rand(4, 6), torch.randn(4, 6))


class Dividing(nn.Module):
    """A division by a parameter and of a parameter, without changes to them."""

    def __init__(self, divide: Callable[..., Tensor]) -> None:
        super().__init__()
        self.divide = divide
        self.by = nn.Parameter(torch.tensor([0.7, -0.3, 1.3, 0.4, -2.0, 0.9]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.divide(x, self.by) + self.divide(self.by, x.cos() - 1.5)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_division_by_a_parameter(ort: TrainingRuntime, name: str) -> None:
    compare(ort, Dividing(DIVISIONS[name]), torch.rand(4, 6), torch.randn(4, 6))


def test_division_of_sizes(ort: TrainingRuntime) -> None:
    model = Calling(lambda x: x[: x.shape[0] // 2].sum() + x[: -(-x.shape[0] // 3)].exp().sum())
    compare(ort, model, *(torch.randn(rows, 6) for rows in (6, 4, 7, 1)))


def test_transformer_encoder(ort: TrainingRuntime) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    compare(ort, model, torch.randn(2, 5, 16), torch.randn(3, 7, 16))


ACTIVATIONS = {
    "celu": nn.CELU(0.7), "elu": nn.ELU(0.7), "gelu": nn.GELU(), "gelu, tanh": nn.GELU("tanh"),
    "glu": nn.GLU(), "hardsigmoid": nn.Hardsigmoid(), "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(), "leaky relu": nn.LeakyReLU(), "log sigmoid": nn.LogSigmoid(),
    "mish": nn.Mish(), "prelu": nn.PReLU(), "prelu by channel": nn.PReLU(4), "relu": nn.ReLU(),
    "relu6": nn.ReLU6(), "rms norm": nn.RMSNorm(6), "rms norm of two": nn.RMSNorm((4, 6), eps=0.1),
    "selu": nn.SELU(), "silu": nn.SiLU(), "softplus": nn.Softplus(), "softplus 2": nn.Softplus(2.0),
    "softsign": nn.Softsign(), "tanhshrink": nn.Tanhshrink(), "threshold": nn.Threshold(0.1, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(ort: TrainingRuntime, name: str) -> None:
    compare(ort, Calling(ACTIVATIONS[name]), torch.randn(3, 4, 6), torch.randn(2, 4, 6))


@pytest.mark.parametrize(
    "name", ["celu", "elu", "log sigmoid", "mish", "prelu", "selu", "softplus"]
)
def test_activation_where_it_bends(ort: TrainingRuntime, name: str) -> None:
    x = torch.tensor([[-200.0, -1.0, 0.0, 0.0, 1.0, 200.0]])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    model = Calling(ACTIVATIONS[name])
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    wrapped(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


FAR = torch.tensor([-200.0, -25.0, -18.5, -15.0, 0.0, 0.0, 15.0, 18.5, 200.0])
OF_ONES = torch.linspace(0.5, 3.0, 9)


@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"reduction": "sum", "weight": OF_ONES.flip(0)},
        {"pos_weight": OF_ONES},
        {"pos_weight": OF_ONES, "weight": OF_ONES.flip(0), "reduction": "none"},
    ],
)
def test_logits_far_from_zero(ort: TrainingRuntime, target: float, options: dict[str, Any]) -> None:
    """ORT's sigmoid is 0 from -18.5 down, and the gradient of its log is NaN."""

    def loss(x: Tensor) -> Tensor:
        labels = torch.full_like(x, target)
        return F.binary_cross_entropy_with_logits(x, labels, **options)

    model = Calling(loss)
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    for rows in (torch.randn(4, 9), FAR.repeat(2, 1)):
        ours, theirs = (rows.clone().requires_grad_() for _ in range(2))
        found, wanted = wrapped(ours), model(theirs)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_smoothed_labels_that_are_all_ignored(ort: TrainingRuntime) -> None:
    """The mean over no labels is NaN, and its gradients are 0."""
    model = Calling(lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.2))
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    for labels in (torch.arange(4), torch.full((4,), -100)):
        ours, theirs = (torch.ones(4, 6).requires_grad_() for _ in range(2))
        found, wanted = wrapped(ours, labels), model(theirs, labels)
        torch.testing.assert_close(found, wanted, equal_nan=True)
        found.backward()
        wanted.backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert wanted.isnan()


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([y.flatten(), *(each.flatten() for each in states)])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_recurrence(ort: TrainingRuntime, kind: type[nn.RNNBase], dropout: float) -> None:
    for both_ways, batch_first in ((True, False), (False, True)):
        layer = kind(6, 5, 3, dropout=dropout, bidirectional=both_ways, batch_first=batch_first)
        compare(ort, Recurrent(layer), torch.randn(4, 4, 6), torch.randn(2, 3, 6))


def test_recurrence_drops_between_layers(ort: TrainingRuntime) -> None:
    layer = nn.LSTM(6, 5, 2, dropout=0.5)
    wrapped = ort.ORTModule(Recurrent(layer), ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    x = torch.randn(4, 2, 6)
    assert not torch.equal(wrapped(x), wrapped(x))


@pytest.mark.parametrize("shuffle", [F.pixel_shuffle, F.pixel_unshuffle])
def test_pixels(ort: TrainingRuntime, shuffle: Callable[..., Tensor]) -> None:
    model = Calling(lambda x: shuffle(x, 2))
    compare(ort, model, torch.randn(2, 4, 6, 8), torch.randn(3, 4, 4, 6))


MAX_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "1d": lambda x: F.max_pool1d(x.flatten(2), 3, stride=2, padding=1),
    "1d, indices": lambda x: torch.mul(*F.max_pool1d(x.flatten(2), 2, return_indices=True)),
    "2d": lambda x: F.max_pool2d(x, (3, 2), stride=2, ceil_mode=True),
    "2d, indices": lambda x: torch.mul(*F.max_pool2d(x, 2, return_indices=True)),
    "3d": lambda x: F.max_pool3d(x[:, :, None].expand(-1, -1, 4, -1, -1), 2, dilation=(2, 1, 1)),
}


@pytest.mark.parametrize("name", MAX_POOLS)
def test_max_pooling(ort: TrainingRuntime, name: str) -> None:
    """Max pooling trains; ORT's own gradient ends the process."""
    compare(ort, Calling(MAX_POOLS[name]), torch.randn(2, 3, 6, 6), torch.randn(3, 3, 7, 8))


@pytest.mark.parametrize("mode", ["linear", "bilinear", "trilinear"])
def test_resizing(ort: TrainingRuntime, mode: str) -> None:
    dims = ("linear", "bilinear", "trilinear").index(mode) + 1
    shapes = (2, 3, *[4] * dims), (1, 3, *[7] * dims)
    options: list[dict[str, Any]] = [
        {"scale_factor": 2.0},
        {"scale_factor": 1.7, "align_corners": True},
        {"size": (6, 5, 9)[:dims]},
    ]
    for option in options:
        model = Calling(lambda x, option=option: F.interpolate(x, mode=mode, **option))
        compare(ort, model, *(torch.randn(shape) for shape in shapes))


def test_resizing_to_another_tensors_size(ort: TrainingRuntime) -> None:
    model = Calling(lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bilinear"))
    batches = [(torch.randn(2, 3, 4, 4), torch.randn(2, 1, n, n + 1)) for n in (6, 9)]
    compare(ort, model, *batches)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss(ort: TrainingRuntime, reduction: str) -> None:
    model = Calling(
        lambda x, *rest: F.ctc_loss(
            x.log_softmax(-1), *rest, reduction=reduction, zero_infinity=reduction == "sum"
        )
    )
    batches = [
        (
            torch.randn(9, batch, 6),
            torch.randint(1, 6, (batch, 4)),
            torch.full((batch,), 9),
            torch.full((batch,), 4),
        )
        for batch in (3, 5)
    ]
    compare(ort, model, *batches)


def test_deberta(ort: TrainingRuntime) -> None:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        vocab_size=99, max_position_embeddings=64, relative_attention=True,
        pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    compare(ort, Logits(DebertaV2ForSequenceClassification(config)), torch.randint(99, (2, 8)))


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids).logits
        return found
