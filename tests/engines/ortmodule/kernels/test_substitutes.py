"""Graphs with substituted kernels: the same numbers and names, and correct views of the graph."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

import ortlab
from ortlab.engines.ortmodule.engine import execution_of
from tests.support import tiny
from tests.support.kernel_nodes import PREFIX, nodes, operator, operators

FP32, BF16 = 1e-4, 5e-2
"""Tolerances of the loss and of a whole gradient, relative to the largest element."""


class Mlp(nn.Module):
    """A layer of each kind that has a kernel, except attention."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24, padding_idx=0)
        self.first = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(p)
        self.second = nn.Linear(40, 24, bias=False)
        self.score = nn.Linear(24, 24)
        self.last = nn.Linear(24, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids).relu()  # rounding moves none of these across zero
        x = x + self.second(self.dropout(self.gelu(self.norm(self.first(x)))))
        seen = self.score(x).softmax(1)
        return nn.functional.cross_entropy(self.last((seen * x).sum(1)), labels)


class Turned(nn.Module):
    """Attention with the batch as second axis: ORT's products read it without a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.query, self.key = nn.Linear(24, 16), nn.Linear(24, 16)
        self.last = nn.Linear(24, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids.T)
        query, key = self.query(x).transpose(0, 1), self.key(x).transpose(0, 1)
        seen = (query @ key.transpose(1, 2)).softmax(-1) @ x.transpose(0, 1)
        return nn.functional.cross_entropy(self.last(seen.mean(1)), labels)


MAKERS: dict[str, Callable[..., nn.Module]] = {"mlp": Mlp, "bert": tiny.bert, "gpt2": tiny.gpt2}
MODELS = pytest.mark.parametrize("name", MAKERS)
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def _model(name: str, p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name](p)


def _batch(name: str, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    ids = torch.randint(50, (rows, length))
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids}
    batch = {"input_ids": ids, "labels": torch.randint(2, (rows,))}
    if name == "bert":
        batch["attention_mask"] = (torch.rand(rows, length) < 0.8).long()
        batch["attention_mask"][:, 0] = 1
    return batch


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def _step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and all gradients of one step."""
    model.zero_grad()
    loss = _loss(model(**batch))
    loss.backward()
    module = getattr(model, "_original_module", model)
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), found


def _wrap(model: nn.Module, **settings: Any) -> nn.Module:
    given = {"kernels": "torch", "cache": False, "self_check": False} | settings
    return ortlab.wrap(copy.deepcopy(model), **given)


def _assert_near(found: Any, expected: Any, tolerance: float) -> None:
    """Assert the loss within `tolerance`, and gradients within ten times that in fp32."""
    (loss, gradients), (exact, all_exact) = found, expected
    assert abs(loss - exact) <= tolerance * max(1.0, abs(exact)), (float(loss), float(exact))
    assert gradients.keys() == all_exact.keys()
    largest = max(float(each.abs().max()) for each in all_exact.values())
    share = 10 * tolerance if tolerance < 1e-3 else tolerance
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        off = float((gradient - all_exact[name]).norm())
        # Some gradients are only rounding error, such as that of a key's bias.
        beside = max(float(all_exact[name].norm()), 0.02 * largest)
        assert off <= share * beside, f"{name}: {off} beside {beside}"


@functools.cache
def _traced(name: str, precision: str, kernels: str, p: float = 0.0) -> nn.Module:
    """Return a wrapped model after one step, for tests that only read its graph."""
    model = _wrap(_model(name, p), precision=precision, kernels=kernels)
    _step(model, _batch(name))
    return model


@pytest.fixture(scope="module", autouse=True)
def nothing_kept() -> Iterator[None]:
    """Release the shared models, so that other test files do not list them."""
    yield
    _traced.cache_clear()
    gc.collect()


# ---- the same numbers ----------------------------------------------------------------------------


@MODELS
@PRECISIONS
def test_loss_and_gradients_are_eager_torchs(ops: Any, name: str, precision: str) -> None:
    """Two batch shapes match with one graph; no kernel is timed in the second."""
    model = _model(name)
    wrapped = _wrap(model, precision=precision)
    for rows, length in ((3, 9), (5, 13)):
        batch = _batch(name, rows, length)
        found, expected = _step(wrapped, batch), _step(model, batch)
        _assert_near(found, expected, FP32 if precision == "fp32" else BF16)
        if precision == "bf16":
            with torch.autocast("cpu", torch.bfloat16):
                _assert_near(found, _step(model, batch), BF16)
    assert any(each.startswith(PREFIX) for each in operators(wrapped))


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_measured_kernels_give_the_same_numbers(ops: Any, name: str) -> None:
    model, batch = _model(name), _batch(name)
    _assert_near(_step(_wrap(model, kernels="measured"), batch), _step(model, batch), FP32)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
@PRECISIONS
def test_eval_without_gradients(ops: Any, name: str, precision: str) -> None:
    """Dropout is off, and no training-only code runs."""
    model = _model(name, 0.5)
    wrapped = _wrap(model, precision=precision)
    for each in (model, wrapped):
        each.eval()
    batch = _batch(name)
    with torch.no_grad():
        found, expected = _loss(wrapped(**batch)), _loss(model(**batch))
    assert not found.requires_grad
    assert abs(found - expected) <= (FP32 if precision == "fp32" else BF16) * abs(expected)
    wrapped.train()
    _step(wrapped, batch)
    wrapped.eval()
    with torch.no_grad():
        assert torch.equal(_loss(wrapped(**batch)), found)


@MODELS
def test_dropout_is_seeded_and_new_each_step(ops: Any, name: str) -> None:
    wrapped, batch = _traced(name, "fp32", "torch", 0.1), _batch(name)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(_step(wrapped, batch)[0]) for _ in range(3)]

    first = losses(0)
    assert losses(0) == first
    assert losses(1) != first
    assert len(set(first)) == 3


def test_dropouts_gradient_is_that_of_its_own_mask(ops: Any) -> None:
    """With a linear function before dropout, each element's gradient equals its output."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(40, 70))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.weight * x, 0.25)

    for precision in ("fp32", "bf16"):
        wrapped, x = _wrap(Line(), precision=precision), torch.ones(40, 70)
        found = wrapped(x)
        found.backward(torch.ones_like(found))
        assert "ortlab_kernels::dropout" in operators(wrapped)
        (weight,) = execution_of(wrapped).module.parameters()
        assert torch.equal(weight.grad, found.detach())
        assert 0 < (found == 0).sum() < found.numel()


def test_self_check_passes(ops: Any) -> None:
    """The check passes with dropout: it removes ortlab's own dropout from a twin graph, too."""
    for precision in ("fp32", "bf16"):
        for name in ("mlp", "gpt2"):
            wrapped = _wrap(_model(name, 0.2), precision=precision, self_check=True)
            loss, _ = _step(wrapped, _batch(name))
            assert loss.isfinite()
            report = execution_of(wrapped).report()
            assert (report.engine_used, report.fallback_reason) == ("ortmodule", None)
            assert report.check_s > 0


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_indices_of_an_embedding_may_be_short(ops: Any, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
    wrapped, ids = _wrap(model), torch.randint(20, (4, 7)).to(kind)
    for each in (model, wrapped):
        each(ids).square().mean().backward()
    module = execution_of(wrapped).module
    for ours, exact in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, exact.grad, rtol=1e-4, atol=1e-6)


def test_a_default_type_of_torch_does_not_matter(ops: Any) -> None:
    """A notebook that computes in float64 elsewhere gets the same numbers."""
    model, batch = _model("mlp"), _batch("mlp")
    expected = _step(model, batch)
    torch.set_default_dtype(torch.float64)
    try:
        found = _step(_wrap(model), batch)
    finally:
        torch.set_default_dtype(torch.float32)
    _assert_near(found, expected, FP32)


def test_autocast_around_a_step_leaves_fp32_alone(ops: Any) -> None:
    """Broadcast matrix products also stay in float32 if forward turns autocast off."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 64, 32))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return (x @ self.weight).square().mean()

    torch.manual_seed(0)
    model, batch = Whole(), {"x": torch.randn(33, 64)}
    wrapped = _wrap(model)
    with torch.autocast("cpu", torch.bfloat16):  # eager's own backward would run under it
        _step(wrapped, batch)
        found, expected = _loss(wrapped(**batch)), _loss(model(**batch))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        found = _step(wrapped, batch)
    expected = _step(model, batch)
    assert f"{PREFIX}matmul" in operators(wrapped)
    _assert_near(found, expected, 1e-6)


def test_a_trained_mask_gets_its_gradient(ops: Any) -> None:
    """A learned attention bias, as T5's, that is broadcast over the batch gets its gradient."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.bias = nn.Parameter(torch.randn(1, 2, 7, 7))

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (
                each.view(*x.shape[:2], 2, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
            )
            return nn.functional.scaled_dot_product_attention(query, key, value, self.bias).sum()

    torch.manual_seed(0)
    model = Biased()
    batch = {"x": torch.randn(3, 7, 16)}
    wrapped = _wrap(model)
    _assert_near(_step(wrapped, batch), _step(model, batch), FP32)
    assert "ortlab_kernels::attention_backward" in operators(wrapped)
    _assert_near(_step(_wrap(model, precision="bf16"), batch), _step(model, batch), BF16)


@pytest.mark.parametrize(
    ("heads", "shared"),
    [((2, 4), (2, 1)), ((2, 4), (1, 4)), ((1, 4), (2, 4)), ((2, 4), (1, 1))],
    ids=["one head of keys", "one batch of keys", "one batch of queries", "one of keys"],
)
def test_attention_broadcasts_as_torchs_does(
    ops: Any, heads: tuple[int, int], shared: tuple[int, int]
) -> None:
    """Heads that share keys and values, and learned queries shared by the batch, broadcast."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.Parameter(torch.randn(*shared, 6, 8))
            self.values = nn.Parameter(torch.randn(*shared, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            found = nn.functional.scaled_dot_product_attention(x, self.keys, self.values)
            return found.square().mean()

    torch.manual_seed(0)
    model, batch = Shared(), {"x": torch.randn(*heads, 5, 8)}
    _assert_near(_step(_wrap(model), batch), _step(model, batch), FP32)


@PRECISIONS
def test_frozen_parameters_get_no_gradient(ops: Any, precision: str) -> None:
    model = _model("bert")
    for parameter in model.bert.parameters():
        parameter.requires_grad_(False)
    model.bert.encoder.layer[1].attention.self.query.weight.requires_grad_(True)
    batch = _batch("bert")
    found, expected = _step(_wrap(model, precision=precision), batch), _step(model, batch)
    _assert_near(found, expected, FP32 if precision == "fp32" else BF16)


# ---- the graph -----------------------------------------------------------------------------------

EXPECTED = {
    "mlp": {
        "linear",
        "matmul",
        "layer_norm",
        "layer_norm_backward",
        "dropout",
        "embedding_backward",
    },
    "bert": {"linear", "attention", "attention_backward", "bias_gelu", "bias_gelu_backward"},
    "gpt2": {"attention", "attention_backward", "layer_norm", "dropout", "dropout_backward"},
}


@MODELS
@PRECISIONS
def test_the_session_runs_kernels_and_only_where_wanted(
    ops: Any, name: str, precision: str
) -> None:
    ours = {
        each.removeprefix(PREFIX)
        for each in operators(_traced(name, precision, "torch", 0.1))
        if each.startswith(PREFIX)
    }
    assert ours >= EXPECTED[name]
    assert ("to_bf16" in ours) is (precision == "bf16")
    alone = operators(_traced(name, "fp32", "ort", 0.1))
    assert {each.removeprefix(PREFIX) for each in alone if each.startswith(PREFIX)} == {
        "dropout",
        "dropout_backward",
    }


@pytest.mark.parametrize("name", ["mlp"])
def test_nodes_that_are_replaced_keep_their_names(ops: Any, name: str) -> None:
    """Attention is exported as another node, and does not occur here."""
    before = {each.name for each in nodes(_traced(name, "fp32", "ort", 0.1))}
    for precision in ("fp32", "bf16"):
        after = nodes(_traced(name, precision, "torch", 0.1))
        names = [each.name for each in after]
        assert len(set(names)) == len(names)
        new = {each.name for each in after if each.name not in before}
        copies = {each.name for each in after if operator(each) == f"{PREFIX}to_bf16"}
        assert new <= copies
        given = {output for each in after for output in each.output}
        graph = ortlab.graphs(_traced(name, precision, "torch", 0.1)).execution.model.graph
        given |= {each.name for each in (*graph.input, *graph.initializer)}
        assert {source for each in after for source in each.input if source} <= given


@MODELS
@PRECISIONS
def test_backward_nodes_stay_backward(ops: Any, name: str, precision: str) -> None:
    stage = ortlab.graphs(_traced(name, precision, "torch", 0.1)).execution
    graph = list(stage.model.graph.node)
    assert len(graph) == len(stage.nodes)
    for node, seen in zip(graph, stage.nodes, strict=True):
        if operator(node).startswith(PREFIX) and operator(node).endswith("_backward"):
            assert seen.phase == "backward"
    assert {each.phase for each in stage.nodes} == {"forward", "backward"}


@MODELS
@PRECISIONS
def test_sizes_of_what_kernels_give_are_known(ops: Any, name: str, precision: str) -> None:
    before = ortlab.memory_plan(_traced(name, "fp32", "ort", 0.1))
    after = ortlab.memory_plan(_traced(name, precision, "torch", 0.1))
    assert len(after.unsized) <= len(before.unsized), set(after.unsized) - set(before.unsized)
    stage = ortlab.graphs(_traced(name, precision, "torch", 0.1)).execution
    forward = {
        output
        for node, seen in zip(stage.model.graph.node, stage.nodes, strict=True)
        if operator(node).startswith(PREFIX) and seen.phase == "forward"
        for output in node.output
        if output
    }
    unknown = [each for each in forward if each in stage.unsized]
    assert not unknown


_TAKES_ANY = {"Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten", "Shape"}
"""ORT's operators with bfloat16 kernels on a CPU: those that only move data."""


@MODELS
def test_types_are_told_and_no_operator_of_orts_computes_in_bf16(ops: Any, name: str) -> None:
    graph = ortlab.graphs(_traced(name, "bf16", "torch", 0.1)).execution.model.graph
    kinds = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    for node in graph.node:
        called, last = operator(node).removeprefix(PREFIX), (node.input or [""])[-1]
        low = [each for each in node.input if kinds.get(each) == TensorProto.BFLOAT16]
        assert not low or operator(node).startswith(PREFIX) or node.op_type in _TAKES_ANY, called
        if called in ("to_bf16", "matmul", "linear", "dropout", "bias_gelu", "bias_gelu_backward"):
            wide = not (called == "to_bf16" or last.endswith("_True"))
            expected = TensorProto.FLOAT if wide else TensorProto.BFLOAT16
            assert kinds.get(node.output[0], TensorProto.FLOAT) == expected, node.name
        if called == "dropout":
            assert kinds[node.output[1]] == TensorProto.UINT8


def _reads_low(graph: onnx.GraphProto, node: onnx.NodeProto, count: int) -> bool:
    kinds = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    return all(kinds.get(name) == TensorProto.BFLOAT16 for name in node.input[:count])


@MODELS
def test_in_bf16_no_product_is_of_float32(ops: Any, name: str) -> None:
    graph = ortlab.graphs(_traced(name, "bf16", "torch", 0.1)).execution.model.graph
    called = [operator(node) for node in graph.node]
    assert not {"MatMul", "FusedMatMul", "Gemm", "FusedGemm"} & set(called)
    products = [f"{PREFIX}{each}" for each in ("matmul", "linear", "add_product")]
    assert any(each in products for each in called)
    for node, each in zip(graph.node, called, strict=True):
        if each in products:
            assert _reads_low(graph, node, 2), node.name
    assert any(each in (f"{PREFIX}attention",) for each in called) is (name != "mlp")


def test_in_bf16_products_of_turned_batches_are_none_of_float32(ops: Any) -> None:
    torch.manual_seed(0)
    model = Turned()
    given = [_wrap(model, precision=precision) for precision in ("fp32", "bf16")]
    for rows, length in ((3, 9), (5, 13)):
        batch = _batch("mlp", rows, length)
        for wrapped, tolerance in zip(given, (FP32, BF16), strict=True):
            _assert_near(_step(wrapped, batch), _step(model, batch), tolerance)
    plain, low = map(nodes, given)
    turned = [each for each in plain if any("transBatch" in a.name and a.i for a in each.attribute)]
    assert len(turned) >= 2
    assert not {"MatMul", "FusedMatMul", "Gemm"} & set(map(operator, low))
    assert len({each.name for each in low}) == len(low)


@MODELS
def test_in_bf16_the_same_tensor_is_rounded_once(ops: Any, name: str) -> None:
    copies = [
        n for n in nodes(_traced(name, "bf16", "torch", 0.1)) if operator(n).endswith("to_bf16")
    ]
    assert len({node.input[0] for node in copies}) == len(copies)


# ---- settings ------------------------------------------------------------------------------------


def test_recompute_plans_leave_ors_kernels(ops: Any) -> None:
    model, batch = _model("gpt2"), _batch("gpt2")
    wrapped = _wrap(model, memory_level=1)
    _assert_near(_step(wrapped, batch), _step(model, batch), FP32)
    assert not any(each.startswith(PREFIX) for each in operators(wrapped))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kernels": "ort"}, ("precision='bf16'", "kernels='ort'")),
        ({"memory_level": 1}, ("precision='bf16'", "memory_level")),
    ],
)
def test_bf16_says_what_it_does_not_go_with(
    ops: Any, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="bf16") as caught:
        _wrap(_model("mlp"), precision="bf16", **settings)
    assert all(word in str(caught.value) for word in words)


def _hits(model: nn.Module) -> int:
    return sum(each.from_cache for each in execution_of(model).exports())


@PRECISIONS
@pytest.mark.parametrize("kernels", ["torch", "measured"])
def test_the_cache_keeps_kernels(ops: Any, kernels: str, precision: str) -> None:
    """The second model comes from the cache, runs the same nodes and trains identically."""
    model, batch = _model("gpt2", 0.1), _batch("gpt2")

    def trained() -> tuple[nn.Module, list[Tensor]]:
        wrapped = _wrap(model, kernels=kernels, precision=precision, cache=True, self_check=True)
        optimizer = torch.optim.SGD(execution_of(wrapped).module.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(5)
        _step(wrapped, batch)
        for _ in range(3):
            torch.manual_seed(6)
            losses.append(_step(wrapped, batch)[0])
            optimizer.step()
        return wrapped, losses

    first, losses = trained()
    second, again = trained()
    assert (_hits(first), _hits(second)) == (0, 1)
    assert operators(first) == operators(second)
    assert [float(each) for each in losses] == [float(each) for each in again]
    assert losses[0] > losses[-1]


def test_the_cache_tells_kernels_and_precisions_apart(ops: Any) -> None:
    model, batch = _model("mlp"), _batch("mlp")
    found = []
    for settings in (
        {"kernels": "torch"},
        {"kernels": "ort"},
        {"kernels": "torch", "precision": "bf16"},
        {"kernels": "measured"},
        {"kernels": "torch"},
    ):
        wrapped = _wrap(model, cache=True, **settings)
        _step(wrapped, batch)
        found.append(_hits(wrapped))
    assert found == [0, 0, 0, 0, 1]


@PRECISIONS
@pytest.mark.parametrize("shape", [(16,), (1,), (1, 16), (40, 1), (40, 16)], ids=str)
def test_what_a_product_adds_may_broadcast(
    ops: Any, precision: str, shape: tuple[int, ...]
) -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.randn(s)) for s in ((8, 16), shape))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight).square().mean()

    torch.manual_seed(0)
    model, batch = Added(), {"x": torch.randn(40, 8)}
    found, expected = (_step(each, batch) for each in (_wrap(model, precision=precision), model))
    _assert_near(found, expected, 1e-5 if precision == "fp32" else 5e-2)


def test_a_scalar_has_a_gradient_through_relu(ops: Any) -> None:
    class Hinge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(2 - self.layer(x).mean())

    torch.manual_seed(0)
    model, batch = Hinge(), {"x": torch.randn(40, 8)}
    for kernels in ("torch", "measured"):
        _assert_near(_step(_wrap(model, kernels=kernels), batch), _step(model, batch), 1e-5)


@torch.jit.script
def _either(a, t):  # type: ignore[no-untyped-def]
    if bool(t.sum() > 0):  # noqa: SIM108 - the test needs a node with two branches
        r = a * 2.0
    else:
        r = a + 1.0
    return r


@PRECISIONS
def test_what_a_branch_reads_stays(ops: Any, precision: str) -> None:
    """A float32 product before its bias stays, though its only other reader uses another type."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.randn(s)) for s in ((8, 16), (16,)))
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x @ self.weight
            return self.layer(hidden + self.bias) + self.layer(_either(hidden, x))

    torch.manual_seed(0)
    model = Branching().eval()
    wrapped = _wrap(model, precision=precision)
    for sign in (1.0, -1.0):
        x = sign * torch.rand(3, 5, 8)
        with torch.no_grad():
            found, expected = wrapped(x), model(x)
        tolerance = 1e-5 if precision == "fp32" else 5e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=4 * tolerance)
