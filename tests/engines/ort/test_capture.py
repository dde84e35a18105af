"""The backend ``ortlab`` of torch.compile, compared with eager torch: whole models and steps."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortlab.engines.ort import draws, segments
from ortlab.engines.ort import session as sessions
from ortlab.engines.ort.capture import Backend
from ortlab.engines.ort.lowering import graph as lowering
from ortlab.engines.ort.segments import TOO_FEW
from ortlab.engines.ort.session import Session, SessionFailed
from tests.support import tiny
from tests.support.captured import in_torch

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
Batch = dict[str, Tensor]


class Pair:
    """A compiled model and the same model in eager torch."""

    def __init__(self, model: nn.Module, *, self_check: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.reference = copy.deepcopy(model)
        self.model = model
        self.backend = Backend(self_check=self_check)
        self.compiled: Any = torch.compile(model, backend=self.backend, **options)

    def compare(self, *inputs: Any, seed: int = 0, **named: Any) -> float:
        """Compare loss, gradients, buffers of one step with the same seed; return the loss."""
        losses = []
        for model, module in ((self.reference, self.reference), (self.compiled, self.model)):
            module.zero_grad()
            torch.manual_seed(seed)
            made = model(*copy.deepcopy(inputs), **named)
            loss = scalar(made)
            loss.backward()
            losses.append(float(loss.detach()))
        assert abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * max(abs(losses[0]), 0.1)
        self.compare_gradients()
        for one, other in zip(self.reference.buffers(), self.model.buffers(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        return losses[1]

    def compare_gradients(self) -> None:
        known = [p.grad.norm() for p in self.reference.parameters() if p.grad is not None]
        whole = torch.stack(known).norm()
        pairs = zip(self.reference.named_parameters(), self.model.parameters(), strict=True)
        for (name, one), other in pairs:
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None and other.grad is not None:
                error = (one.grad - other.grad).norm()
                norm = one.grad.norm().clamp(min=1e-3 * whole)
                assert error <= GRADIENT_TOLERANCE * norm, f"{name}: {error:.1e} of {norm:.1e}"


def scalar(made: Any) -> Tensor:
    """Return a loss that depends on every output."""
    if isinstance(made, Tensor):
        weights = torch.linspace(0.5, 1.5, made.numel()).reshape(made.shape)
        return (made * weights).sum()
    values = made.values() if hasattr(made, "values") else made
    return torch.stack([scalar(value) for value in values]).sum()


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def tokens(rows: int, length: int) -> Batch:
    ids = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(rows) % 2}


# Recurrent layers


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "projected LSTM", "RNN with ReLU"])
def test_recurrent_layers_with_the_dropout_between_them(kind: str, batch_first: bool) -> None:
    """The input has no gradient, for which torch would take another LSTM."""
    options: dict[str, Any] = {
        "projected LSTM": {"proj_size": 2},
        "RNN with ReLU": {"nonlinearity": "relu"},
    }.get(kind, {})
    torch.manual_seed(3)
    layer = {"RNN with ReLU": nn.RNN, "projected LSTM": nn.LSTM}.get(kind) or getattr(nn, kind)
    pair = Pair(layer(3, 4, 3, dropout=0.3, bidirectional=True, batch_first=batch_first, **options))
    with torch._dynamo.config.patch(allow_rnn=True):
        losses = [pair.compare(torch.ones(5, 2, 3), seed=seed) for seed in (0, 1)]
    assert losses[0] != pytest.approx(losses[1])
    assert bool(in_torch(pair.backend)) == (kind == "LSTM")


class Recurrent(nn.Module):
    """An LSTM whose input and first states have gradients."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.layers = nn.LSTM(5, 4, 2, bias=bias, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        hidden = x[:, :1, :4].transpose(0, 1).expand(4, -1, -1)
        y, (hidden, cell) = self.layers(x, (hidden, hidden.sin()))
        return torch.cat([y[:, 0], hidden[0], cell[3]], 1)


@pytest.mark.parametrize("bias", [True, False])
def test_onednn_computes_the_layers_of_an_lstm(bias: bool) -> None:
    pair = Pair(Recurrent(bias=bias), dynamic=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        for rows, length in [(4, 3), (2, 3), (1, 1), (3, 6)]:
            pair.compare(torch.randn(rows, length, 3))
    assert set(in_torch(pair.backend)) >= {"ortlab.onednn_lstm", "ortlab.onednn_lstm_backward"}


class Residual(nn.Module):
    """An LSTM that reads a result of ORT through a transpose, whose strides torch's would lack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.LSTM(4, 4, batch_first=True) for _ in range(2))
        self.between = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.first(x)
        y, _ = self.last(y + self.between(y))
        return y


def test_an_lstm_reads_what_ort_has_laid_out_otherwise() -> None:
    pair = Pair(Residual())
    with torch._dynamo.config.patch(allow_rnn=True):
        pair.compare(torch.randn(3, 5, 4))


@pytest.mark.parametrize("train", [True, False])
def test_only_training_keeps_what_the_backward_pass_of_an_lstm_reads(train: bool) -> None:
    model = nn.LSTM(64, 64)
    backend = Backend()
    compiled: Any = torch.compile(model, backend=backend)
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(train):
        x = torch.randn(10, 8, 64)
        torch.testing.assert_close(compiled(x)[0], model(x)[0])
    (layer,) = [
        node
        for node in backend.graphs[0].division.module.graph.nodes
        if "onednn_lstm" in str(node.target)
    ]
    saved = layer.meta["val"][3]
    assert saved.numel() == (4 * 15 * 64 * 10 * 8 if train else 0)


@pytest.mark.parametrize("case", ["no rows", "autocast", "float64", "no oneDNN"])
def test_an_lstm_that_onednn_cannot_compute_runs_step_by_step(case: str) -> None:
    dtype = torch.float64 if case == "float64" else torch.float32
    pair = Pair(Recurrent(bias=True).to(dtype))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
    onednn = torch.backends.mkldnn.flags(enabled=case != "no oneDNN")
    with torch._dynamo.config.patch(allow_rnn=True), autocast, onednn:
        x = torch.randn(0 if case == "no rows" else 2, 3, 3, dtype=dtype)
        if case == "autocast":  # eager torch computes the layers in 16 bits
            torch.testing.assert_close(pair.compiled(x), pair.reference(x), rtol=0.02, atol=0.02)
        else:
            pair.compare(x)
    assert "ortlab.onednn_lstm" not in in_torch(pair.backend)


# Memory


class Wide(nn.Module):
    """A model that saves 8 MB per layer for a batch of 4,096."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, rest = layer(x).tanh().split([128, 128], dim=1)
            x = torch.cat([rest, x], dim=1)
        return x


@pytest.mark.parametrize(("rows", "parts"), [(4096, 7), (8, 1)])
def test_a_backward_pass_that_reads_much_does_so_in_parts(rows: int, parts: int) -> None:
    pair = Pair(Wide())
    pair.compare(torch.randn(rows, 256))
    forward, backward = pair.backend.graphs
    assert len(forward.division.segments) == 1
    assert len(backward.division.segments) == parts
    assert not in_torch(pair.backend)


# Sizes


def test_one_graph_serves_every_batch_size() -> None:
    """The second size makes a dynamic graph; 1 and 0 are graphs of their own, as in Dynamo."""
    pair = Pair(mlp())
    for rows in (4, 7, 9, 12, 7, 4, 30):
        pair.compare(torch.randn(rows, 6))
    assert [graph.phase for graph in pair.backend.graphs] == ["forward", "backward"] * 2
    for rows in (1, 1, 0, 0, 5):
        pair.compare(torch.randn(rows, 6))
    assert len(pair.backend.graphs) == 8


def test_a_marked_size_is_dynamic_from_the_first_call() -> None:
    pair = Pair(mlp())
    for rows in (4, 7, 9):
        inputs = torch.randn(rows, 6)
        torch._dynamo.mark_dynamic(inputs, 0)
        for model, module in ((pair.reference, pair.reference), (pair.compiled, pair.model)):
            module.zero_grad()
            scalar(model(inputs)).backward()
        pair.compare_gradients()
    assert len(pair.backend.graphs) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("make", [tiny.bert, tiny.gpt2])
def test_transformers_at_several_sizes(make: Callable[..., nn.Module], dropout: float) -> None:
    pair = Pair(make(dropout).train())
    for i, (rows, length) in enumerate(((4, 8), (6, 13), (2, 9))):
        batch = tokens(rows, length)
        pair.compare(
            **{**batch, "labels": batch["input_ids" if make is tiny.gpt2 else "labels"]}, seed=i
        )
    reasons = {
        "aten.embedding_dense_backward": "torch adds the rows faster than ORT"
    }
    if make is tiny.gpt2:  # its tied weight has the sum of two gradients, one of them torch's
        reasons["aten.add.Tensor"] = TOO_FEW
    assert in_torch(pair.backend) == reasons
    assert all(len(graph.division.segments) <= 1 for graph in pair.backend.graphs)


def test_an_image_model_at_odd_sizes() -> None:
    """Stride, groups, pooling and batch statistics, in training and in evaluation."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    pair = Pair(model)
    for shape in ((4, 3, 16, 16), (6, 3, 17, 20), (2, 3, 33, 19)):
        pair.compare(torch.randn(shape))
    pair.reference.eval()
    pair.model.eval()
    pair.compare(torch.randn(2, 3, 18, 18))
    with torch.no_grad():
        inputs = torch.randn(3, 3, 21, 18)
        torch.testing.assert_close(pair.compiled(inputs), pair.reference(inputs))
    assert in_torch(pair.backend) == {}
    assert {graph.phase for graph in pair.backend.graphs} == {"forward", "backward", "inference"}


# Random draws


def test_twenty_steps_with_dropout_are_those_of_eager_torch() -> None:
    """Masks are eager's bit for bit, so losses differ by rounding alone."""
    pair = Pair(tiny.bert(0.1).train())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pair.reference, pair.model)]
    for step in range(20):
        pair.compare(**tokens(4, 8), seed=step)
        for optimizer in optimizers:
            optimizer.step()


class Draws(nn.Module):
    """Every kind of draw, and one whose distribution is data, which stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.layer(x), 0.3)
        h = h + torch.rand_like(h) + torch.randn(h.shape) + torch.rand(x.shape[0], 1)
        drawn = torch.multinomial(h.softmax(1), 2)
        h = h + functional.dropout(h, 0.2) + torch.bernoulli(torch.full_like(h, 0.5))
        return h.gather(1, drawn) * torch.randint(1, 4, (x.shape[0], 2)) + torch.rand_like(h[:, :2])


def test_draws_keep_the_order_of_eager_torch() -> None:
    pair = Pair(Draws())
    for rows in (4, 7, 9):
        pair.compare(torch.randn(rows, 6), seed=rows)
        state = torch.get_rng_state()
        torch.manual_seed(rows)
        pair.reference(torch.randn(rows, 6, generator=torch.Generator()))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("size", "stride"),
    [((0, 3), (3, 1)), ((), ()), ((1 << 15, 3), (1, 1 << 15)), ((2, 40_000), (40_008, 1))],
    ids=["empty", "one", "turned", "with gaps"],
)
def test_a_draw_is_torchs_own(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, probability: float
) -> None:
    assert draws._by_fractions()  # else each draw is torch's by definition
    wanted = torch.empty_strided(size, stride, dtype=dtype)
    torch.manual_seed(5)
    found = draws.Draw("bernoulli_", draws.Layout(wanted), probability)()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(found, wanted.bernoulli_(probability))
    assert found.stride() == stride
    assert torch.equal(after, torch.get_rng_state())


def test_parameters_that_move_are_read_where_they_are() -> None:
    pair = Pair(mlp(0.4))
    for _ in range(3):
        pair.compare(torch.randn(4, 6))
        for module in (pair.model, pair.reference):
            for parameter in module.parameters():
                parameter.data = parameter.data + 0.1
    assert [graph.calls for graph in pair.backend.graphs] == [3, 3]  # not compiled again


def test_masks_are_read_as_numbers_by_dropout_alone() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(0.4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y, kept = torch.native_dropout(self.layer(x), 0.5, True)
            return y, kept, torch.where(~kept, 1.0, y)

    pair = Pair(mlp(0.4))
    pair.compare(torch.randn(4, 6), seed=1)
    made = onnx_operators(pair.backend)
    assert (made["DequantizeLinear"], made["Cast"]) == (2, 0)  # in both passes
    model, backend = Masked(), Backend()
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    x = torch.randn(4, 6)
    torch.manual_seed(2)
    wanted = model(x)
    torch.manual_seed(2)
    torch.testing.assert_close(compiled(x), wanted)
    assert in_torch(backend) == {}  # what reads a mask as such finds booleans


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(0.4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(checkpoint(self.first, x, use_reentrant=False))
        return made


def test_masks_of_a_checkpointed_part_are_drawn_once() -> None:
    pair = Pair(Checkpointed())
    for rows in (4, 7):
        pair.compare(torch.randn(rows, 6), seed=rows)


# What models do


class Tied(nn.Module):
    """One weight used twice, a frozen one, an unused one, a buffer that counts, views."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor) -> dict[str, Any]:
        self.calls += 1
        hidden = self.frozen(self.norm(self.embedding(ids)))
        hidden[:, 0] = 0
        scores = self.output(hidden)
        return {"scores": scores.transpose(1, 2), "more": [hidden.sum(-1), hidden[:, 1:]]}


def test_tied_frozen_and_unused_weights_and_nested_outputs() -> None:
    pair = Pair(Tied())
    for rows in (3, 5, 5):
        pair.compare(torch.randint(0, 11, (rows, 4)))
    assert int(pair.model.calls) == 3  # type: ignore[arg-type]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 7 * x  # not the derivative, so that another one is noticed


def test_an_autograd_function_keeps_its_backward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Cube.apply(self.layer(x))
            return made

    Pair(Model()).compare(torch.randn(5, 6))


def test_several_forwards_before_a_backward_and_a_retained_graph() -> None:
    pair = Pair(mlp(0.2))
    inputs = torch.randn(4, 6)
    for model, module in ((pair.reference, pair.reference), (pair.compiled, pair.model)):
        module.zero_grad()
        torch.manual_seed(3)
        first, second = scalar(model(inputs)), scalar(model(inputs * 2))
        (first + 2 * second).backward()
    pair.compare_gradients()
    for model, module in ((pair.reference, pair.reference), (pair.compiled, pair.model)):
        module.zero_grad()
        torch.manual_seed(4)
        loss = scalar(model(inputs))
        loss.backward(retain_graph=True)
        loss.backward()
    pair.compare_gradients()


def test_gradients_of_inputs_and_a_double_backward_that_is_refused() -> None:
    pair = Pair(mlp())
    leaves = [torch.ones(3, 6, requires_grad=True) for _ in range(2)]
    found = [
        torch.autograd.grad(scalar(model(x)), x)[0]
        for model, x in zip((pair.reference, pair.compiled), leaves, strict=True)
    ]
    torch.testing.assert_close(*found)
    (slope,) = torch.autograd.grad(scalar(pair.compiled(leaves[1])), leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        slope.sum().backward()


def test_saved_tensors_that_change_before_backward_are_noticed() -> None:
    pair = Pair(mlp())
    loss = scalar(pair.compiled(torch.randn(3, 6)))
    with torch.no_grad():
        pair.model[3].weight.add_(1)  # type: ignore[index, union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_equal_results_do_not_share_memory() -> None:
    """Only what shares memory in eager torch does: a view and its base."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        return h, h.clone(), x * 2, h[:], x.clone()

    with torch.no_grad():
        compiled = torch.compile(function, backend=Backend(), fullgraph=True)
        for made in (function(torch.ones(3)), compiled(torch.ones(3))):
            made[0].zero_()
            assert [float(each.sum()) for each in made] == [0.0, 6.0, 6.0, 0.0, 3.0]


# Segments


class InTorch(nn.Module):
    """Operators without a rule between others: two cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x).relu()
        h = h + torch.special.erfcx(h)
        h = self.layers[1](h)
        h = h + torch.special.erfcx(h).T.contiguous().T
        made: Tensor = self.layers[2](h)
        return made


def test_operators_without_a_rule_run_in_torch_and_are_named_with_their_lines() -> None:
    pair = Pair(InTorch())
    for rows in (4, 7):
        pair.compare(torch.randn(rows, 6))
    forward = pair.backend.graphs[0].division
    (operators,) = forward.torch_operators()
    assert operators.operator == "aten.special_erfcx"
    assert operators.reason == "no rule for this operator"
    start = InTorch.forward.__code__.co_firstlineno
    assert operators.lines == [f"test_capture.py:{start + i}" for i in (2, 4)]
    assert len(forward.segments) == 3


class Turned(nn.Module):
    """Operators in torch around a view that is one of the strides of the capture only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.special.erfcx(self.layer(x).transpose(1, 2))
        made: Tensor = torch.special.erfcx(turned.transpose(1, 2).view(x.shape[0], -1))
        return made


def test_a_view_in_torch_of_a_result_with_other_strides() -> None:
    pair = Pair(Turned())
    for rows in (4, 7):
        pair.compare(torch.randn(rows, 5, 6))


@pytest.mark.parametrize("fast", [True, False], ids=["with instructions", "without"])
def test_autocast_runs_in_torch_where_the_cpu_has_instructions_for_it_else_in_ort(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "has_instructions", lambda _: fast)
    pair = Pair(mlp())
    inputs = torch.randn(5, 6)
    made = []
    for model, module in ((pair.reference, pair.reference), (pair.compiled, pair.model)):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        made.append(output)
        output.float().sum().backward()
    torch.testing.assert_close(*made)
    reason = "this CPU has instructions for bfloat16, which torch uses"
    assert {*in_torch(pair.backend).values()} == ({reason} if fast else set())


def test_an_operator_that_ort_refuses_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ORT names the node, and all calls of the operator with such types are moved."""
    pair = Pair(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()))
    create = Session.__init__

    def refuse(self: Session, model: Any, *args: Any, **kwargs: Any) -> None:
        for node in model.graph.node:
            if node.op_type == "Tanh":
                raise SessionFailed(f"NOT_IMPLEMENTED: no implementation for node '{node.name}'")
        create(self, model, *args, **kwargs)

    monkeypatch.setattr(Session, "__init__", refuse)
    pair.compare(torch.randn(4, 6))
    assert set(in_torch(pair.backend)) == {"aten.tanh"}
    assert "no implementation for node" in in_torch(pair.backend)["aten.tanh"]


def test_only_what_ort_refuses_runs_in_torch_where_its_message_names_no_node() -> None:
    class Largest(nn.Module):
        """An operator with two results."""

        def forward(self, x: Tensor) -> Tensor:
            return x.topk(3, 1)[0]

    layers = [nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), Largest(), nn.Dropout(0.2)]
    pair = Pair(nn.Sequential(*layers).double())
    pair.compare(torch.randn(4, 6, dtype=torch.float64))
    reason = "ORT has no kernel of Erf for its types"
    assert in_torch(pair.backend) == {"aten.gelu": reason, "aten.gelu_backward": reason}


def test_an_operator_that_fails_in_a_call_runs_in_torch_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    pair.compare(torch.randn(4, 6))
    forward = pair.backend.graphs[0].division
    name = next(n.name for n in forward.segments[0].lowered.model.graph.node if n.op_type == "Tanh")
    run = Session.__call__

    def fail_once(self: Session, tensors: Any) -> Any:
        monkeypatch.setattr(Session, "__call__", run)
        raise SessionFailed(f"Non-zero status code returned while running Tanh node. Name:'{name}'")

    monkeypatch.setattr(Session, "__call__", fail_once)
    pair.compare(torch.randn(4, 6))
    pair.compare(torch.randn(4, 6))
    assert set(in_torch(pair.backend)) == {"aten.tanh"}


def test_what_ort_refuses_without_a_name_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Session, *args: Any, **kwargs: Any) -> None:
        raise SessionFailed("no more memory")

    pair = Pair(mlp())
    monkeypatch.setattr(Session, "__init__", refuse)
    pair.compare(torch.randn(4, 6))
    assert set(in_torch(pair.backend).values()) == {"no more memory"}
    assert not any(graph.division.segments for graph in pair.backend.graphs)


def test_a_graph_of_views_makes_no_session() -> None:
    backend = Backend()
    compiled = torch.compile(lambda x: x.detach().view(2, 3), backend=backend)
    x = torch.randn(6)
    torch.testing.assert_close(compiled(x), x.view(2, 3))
    assert [graph.division.segments for graph in backend.graphs] in ([], [[]])


def onnx_operators(backend: Backend) -> Counter[str]:
    """Return the ONNX operators of all segments, with their numbers."""
    return Counter(
        node.op_type
        for graph in backend.graphs
        for segment in graph.division.segments
        for node in segment.lowered.model.graph.node
    )


def test_views_between_forward_and_backward_are_not_copied() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.inner(x))
            return torch.bmm(y, y.transpose(1, 2))

    pair = Pair(Square())
    for rows in (3, 4):
        pair.compare(torch.randn(rows, 4, 5, requires_grad=True))
        made = onnx_operators(pair.backend)["Transpose"]
        assert made == len(pair.backend.graphs) // 2  # of a gradient: that of the second operand


def test_a_transposed_input_is_read_in_the_order_of_its_memory() -> None:
    backend = Backend()
    compiled = torch.compile(lambda x, y: torch.mm(x.tanh(), y), backend=backend)
    x, y = torch.randn(5, 4).t(), torch.randn(5, 3)
    torch.testing.assert_close(compiled(x, y), torch.mm(x.tanh(), y))
    assert not in_torch(backend)
    (segment,) = backend.graphs[0].division.segments
    shapes = [each.type.tensor_type.shape.dim for each in segment.lowered.model.graph.input]
    assert [[size.dim_value for size in shape] for shape in shapes] == [[5, 4], [5, 3]]


def test_a_query_that_attends_to_nothing_has_no_effect_in_float64() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
            x = self.layer(x)
            return functional.scaled_dot_product_attention(x, x, x, allowed)

    allowed = torch.arange(5)[:, None].expand(5, 5) > 1
    Pair(Attention()).compare(torch.randn(2, 5, 4, dtype=torch.float64), allowed)


@pytest.mark.parametrize("sizes", [(768, 1024), (1024, 768)])
def test_large_matrices_are_transposed_before_they_are_multiplied(sizes: tuple[int, int]) -> None:
    pair = Pair(nn.Linear(*sizes))
    pair.compare(torch.randn(700, sizes[0]))
    (segment,) = pair.backend.graphs[-1].division.segments
    nodes = segment.lowered.model.graph.node
    (product,) = [node for node in nodes if node.op_type == "Gemm" and len(node.input) == 2][-1:]
    assert not any(attribute.name == "transA" and attribute.i for attribute in product.attribute)
    assert any(node.op_type == "Transpose" for node in nodes)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(
    ("activation", "names"),
    [
        (nn.ReLU(), {"aten.relu", "aten.threshold_backward"}),
        (nn.ReLU6(), {"aten.hardtanh", "aten.hardtanh_backward"}),
    ],
    ids=["relu", "relu6"],
)
def test_torch_runs_large_convolutions_and_normalizations_and_ort_small_ones(
    window: int, activation: nn.Module, names: set[str]
) -> None:
    def network(inside: int, outside: int) -> nn.Module:
        convolution = nn.Conv2d(inside, outside, window, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outside), activation)

    small = Pair(network(3, 4))
    small.compare(torch.randn(2, 3, 8, 8, requires_grad=True))
    assert not in_torch(small.backend)
    large = Pair(network(16, 64))
    large.compare(torch.randn(8, 16, 32, 32, requires_grad=True))
    assert set(in_torch(large.backend)) == {
        *("aten.convolution", "aten.convolution_backward", "aten.add.Tensor", *names),
        *("aten._native_batch_norm_legit_functional", "aten.native_batch_norm_backward"),
    }


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 5), {"slice", "constant_pad_nd"}),
        ((100_000, 5), set()),
        ((5, 100_000), {"slice"}),
        ((100_000, 20), {"slice"}),
    ],
)
def test_ort_copies_few_or_long_runs_and_torch_many_short_ones(
    sizes: tuple[int, int], expected: set[str]
) -> None:
    def function(x: Tensor) -> Tensor:
        cut = x.sin()[..., 1:-1].sin().cos().tanh().exp()
        return functional.pad(cut, (1, 2)).cos().sin().tanh().exp()

    backend, x = Backend(), torch.randn(sizes)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    names = {
        node.target.overloadpacket.__name__
        for segment in backend.graphs[0].division.ort_segments()
        for node in segment.graph.graph.nodes
        if node.op == "call_function"
    }
    assert names & {"slice", "constant_pad_nd"} == expected


def test_memory_that_runs_out_in_ort_is_the_reason_for_torch() -> None:
    graph = fx.symbolic_trace(lambda x: x * 2)
    message = "running Mul node. Name:'mul/Mul.0' Status Message: std::bad_alloc"
    assert segments._blamed(graph, message).reason == "memory ran out while ORT computed it"


@pytest.mark.parametrize(
    ("sizes", "select", "count"),
    [
        ((400_000,), lambda x: x[:3], 1),  # one run
        ((400_000, 2), lambda x: x[:3], 1),
        ((500, 600), lambda x: x[:, ::2], 2),
        ((500, 600, 4), lambda x: x[..., 1:3], 2),
    ],
)
def test_a_step_makes_short_runs(
    sizes: tuple[int, ...], select: Callable[[Tensor], Tensor], count: int
) -> None:
    def function(x: Tensor) -> Tensor:
        made: Tensor = select(x.sin() + 1).sin().cos().tanh().exp()
        return made

    backend, x = Backend(), torch.randn(sizes)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert len(list(backend.graphs[0].division.ort_segments())) == count


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (lambda x: (x + 1).relu(), {"aten.add.Tensor": TOO_FEW, "aten.relu": TOO_FEW}),
        (lambda x: (x.tanh() + 1).sigmoid().relu(), {}),
        (lambda x: x @ x.t(), {}),
    ],
)
def test_torch_runs_segments_of_few_operators_between_its_own(
    between: Callable[[Tensor], Tensor], found: dict[str, str]
) -> None:
    def function(x: Tensor) -> Tensor:
        made: Tensor = torch.special.erfcx(between(torch.special.erfcx(x + 2)))
        return made

    backend, x = Backend(), torch.randn(4, 6)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    assert in_torch(backend) == {"aten.special_erfcx": "no rule for this operator", **found}


@pytest.mark.parametrize(("operators", "in_ort"), [(8, False), (9, True)])
def test_torch_runs_segments_of_some_operators_between_its_own_products_in_16_bits(
    operators: int, in_ort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "has_instructions", lambda _: True)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = (x @ x.t()).float()
            for _ in range(operators):
                y = y.sin()
            return y @ x

    backend, x = Backend(), torch.randn(4, 6)
    found = torch.compile(function, backend=backend)(x)
    torch.testing.assert_close(found, function(x), rtol=1e-2, atol=1e-2)
    assert ("aten.sin" not in in_torch(backend)) == in_ort


def test_few_operators_after_nothing_but_draws_run_in_ort() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight)

    pair = Pair(Weighted())
    pair.compare(torch.randn(4, 6))
    assert in_torch(pair.backend) == {}


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x.masked_fill(x > 0, 2), "aten.masked_fill.Scalar"),
        (lambda x: torch.where(x > 0, x, 2), "aten.where.self"),
        (
            lambda x: functional.cross_entropy(x, torch.arange(len(x)), reduction="none"),
            "aten.nll_loss_backward",
        ),
        (
            lambda x: functional.max_pool2d(x.view(-1, 4, 32, 32), 3),
            "aten.max_pool2d_with_indices_backward",
        ),
    ],
)
def test_torch_runs_what_ort_does_in_many_passes_where_it_is_large(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(-1, 1, 4096))

        def forward(self, x: Tensor) -> Tensor:
            return function(x * self.scale)

    for rows, found in ((3, False), (1030, True)):
        pair = Pair(Scaled())
        pair.compare(torch.randn(rows, 4096))
        assert (operator in in_torch(pair.backend)) == found


# Check of each segment


class Wave(nn.Module):
    """A model whose tanh ORT gets wrong in these tests, in both passes of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * x.sum()


@pytest.fixture
def wrong_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        lowering.RULES, torch.ops.aten.tanh.default, lambda graph, _, x: graph.unary("Sin", x)
    )


def test_the_option_self_check_moves_wrong_operators_to_torch(wrong_tanh: None) -> None:
    model, x = Wave(), torch.randn(3, 6)
    compiled: Any = torch.compile(model, backend="ortlab", options={"self_check": True})
    line = Wave.forward.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"aten\.tanh at .*:{line} runs in torch"):
        outputs = compiled(x)
    torch.testing.assert_close(outputs, model(x))  # of this call, too
    outputs.sum().backward()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    torch.testing.assert_close(compiled(x), model(x))


def test_without_the_option_self_check_results_are_not_compared(wrong_tanh: None) -> None:
    model, x = Wave(), 3 * torch.randn(3, 6)
    compiled: Any = torch.compile(model, backend="ortlab", options={"self_check": False})
    assert not torch.allclose(compiled(x), model(x), rtol=1e-3)


def test_the_check_of_a_segment_finds_every_wrong_operator(
    wrong_tanh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        lowering.RULES, torch.ops.aten.exp.default, lambda graph, _, x: graph.unary("Cos", x)
    )
    x = torch.randn(4, 5)
    backend = Backend(self_check=True)
    compiled = torch.compile(lambda x: (x.tanh() + 1).exp() @ x.t(), backend=backend)
    with pytest.warns(UserWarning, match="in torch"):
        found = compiled(x)
    torch.testing.assert_close(found, (x.tanh() + 1).exp() @ x.t())
    assert set(in_torch(backend)) == {"aten.tanh", "aten.exp"}


def test_the_check_of_a_segment_leaves_right_operators_in_ort() -> None:
    pair = Pair(mlp(), self_check=True)
    pair.compare(torch.randn(4, 6))
    assert in_torch(pair.backend) == {}


# Bad input


def test_a_graph_break_is_an_error_where_the_user_asks_for_one_graph() -> None:
    def function(x: Tensor) -> Tensor:
        h = x.tanh()
        torch._dynamo.graph_break()
        return h * 2

    inputs = torch.randn(3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(function, backend="ortlab", fullgraph=True)(inputs)
    torch.testing.assert_close(torch.compile(function, backend="ortlab")(inputs), function(inputs))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"speed": 11}}, "unknown option 'speed'; choose from self_check"),
        (
            {"options": {"selfcheck": True}},
            "unknown option 'selfcheck'; choose from self_check; did you mean 'self_check'?",
        ),
        ({"options": {"self_check": "on"}}, "option self_check='on' must be True or False"),
        (
            {"options": ["self_check"]},
            "options=['self_check'] is not a dict; use options={'self_check': True}",
        ),
        ({"mode": "max-autotune"}, "mode='max-autotune' is not supported; leave out mode="),
    ],
)
def test_bad_options_are_refused_in_two_lines(given: Any, message: str) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="ortlab", **given)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.ones(2))
    lines = str(caught.value).split("\n")
    assert lines[:3] == ["backend='ortlab' raised:", f"ValueError: {message}", ""]


def test_without_a_runtime_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime")

    monkeypatch.setattr(sessions, "runtime", missing)
    with pytest.raises(Exception, match=r"onnxruntime is not installed: pip install .*onnxruntime"):
        torch.compile(lambda x: x + 1, backend="ortlab")(torch.ones(2))


class Positions(nn.Module):
    """Scores at positions that are expanded to the size of the batch, as DeBERTa's are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(64).flip(0).expand(*x.shape[:-1], 64)
        return self.linear(x).gather(-1, places)


@pytest.mark.skipif(sessions._version() < (1, 27), reason="onnxruntime before 1.27 folds anything")
def test_sessions_hold_nothing_large_that_they_have_expanded() -> None:
    pair = Pair(Positions(), dynamic=False)
    pair.compare(torch.randn(64, 128, 8))  # 4 MiB of positions
    assert "GatherElements" in onnx_operators(pair.backend)
    for graph in pair.backend.graphs:
        for segment in graph.division.ort_segments():
            kept = [each.dims for each in segment.executed().graph.initializer]
            assert max(map(math.prod, kept), default=0) < 1 << 17


def test_gelus_gradient_needs_three_intermediate_results() -> None:
    """The density is done before the distribution is begun; in between, another one would live."""
    pair = Pair(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)))
    pair.compare(torch.randn(5, 6))
    (segment,) = pair.backend.graphs[-1].division.segments
    order = [node.op_type for node in segment.executed().graph.node]
    assert order.index("Div") < order.index("Erf")


def test_an_old_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "1.16.3"

    monkeypatch.setattr(sessions, "runtime", lambda: (Old, None))
    assert sessions.unavailable() == (
        "onnxruntime 1.16.3 is older than 1.19: pip install --upgrade onnxruntime"
    )


def test_the_runtime_is_imported_without_ortmodule() -> None:
    """Its import would take seconds with DeepSpeed, and replace functions of torch."""
    code = (
        "import sys, torch\n"
        "from ortlab.engines.ort import session\n"
        "assert session.unavailable() is None\n"
        "print('onnxruntime.training.ortmodule' in sys.modules, torch.manual_seed.__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "torch.random"]


def test_torch_finds_the_backend_without_an_import() -> None:
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: (x * 2).sum(), backend='ortlab', fullgraph=True)\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "f(x).backward()\n"
        "print(x.grad.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[2.0, 2.0, 2.0]"
