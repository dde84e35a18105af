"""A parameter that no used output depends on has no gradient, as in eager torch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.base import wrapped_model


class Heads(nn.Module):
    """A model whose outputs have a layer each, beside a common one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.common = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8))
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.common(x))
        return self.first(hidden), self.second(hidden), hidden * self.scale


class Nested(Heads):
    """Outputs in a dictionary: numbers, a tensor without a gradient, one of parameters alone."""

    def forward(self, x: Tensor) -> Any:
        first, second, scaled = super().forward(x)
        more = (second.detach() + 1, {"norm": self.scale.square().sum()})
        return {"first": first, "count": len(x), "more": more, "scaled": scaled}


class Views(Heads):
    """Views of one tensor, and of an input, beside the heads; a parameter itself."""

    def forward(self, x: Tensor) -> Any:
        first, second, scaled = super().forward(x)
        return first, first.t(), scaled[1:], scaled.flatten(), x[0], second.unsqueeze(1), self.scale


class Bases(Heads):
    """Views alone, of tensors that are no outputs."""

    def forward(self, x: Tensor) -> Any:
        first, second, _ = super().forward(x)
        return first[1:], first[:1], second[1:], second[:1]


class Broken(Heads):
    """A model of two graphs."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.common(x)
        first = self.first(hidden)
        torch._dynamo.graph_break()
        return first, self.second(hidden), (first.square().sum() * self.scale).sin()


class InPlace(Heads):
    """A model that changes what another output was made of."""

    def forward(self, x: Tensor) -> Any:
        first, second, scaled = super().forward(x)
        scaled.mul_(2).add_(first.sum())
        return first, second, scaled


def outputs_of(results: Any) -> list[Tensor]:
    """Return the outputs that have a gradient."""
    leaves = torch.utils._pytree.tree_leaves(results)
    return [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]


def assert_same(module: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name


@pytest.mark.parametrize("kind", [Heads, Nested, Views, Bases, Broken, InPlace])
def test_any_part_of_the_outputs_can_be_used(kind: type[Heads]) -> None:
    torch._dynamo.reset()
    model = kind()
    reference = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ort")
    x = torch.randn(5, 6)
    count = len(outputs_of(reference(x)))
    missing = 0
    for used in itertools.product((False, True), repeat=count):
        if not any(used):
            continue
        for run in (wrapped, reference):
            run.zero_grad()
            loss = sum(each.square().sum() for each in itertools.compress(outputs_of(run(x)), used))
            loss.backward(retain_graph=True)
            loss.backward()
        assert_same(wrapped, reference)
        missing += sum(p.grad is None for p in reference.parameters())
    assert missing >= count
    record: Any = wrapped_model(wrapped)
    assert record.report().engine_used == "ort"


def test_a_head_without_a_loss_is_not_decayed() -> None:
    """AdamW's weight decay changes each weight whose gradient is zero, and none without one."""
    torch._dynamo.reset()
    model = Heads()
    reference = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ort", activation_budget=0.5)
    x = torch.randn(5, 6)
    for run in (wrapped, reference):
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1, weight_decay=0.1)
        for used in (0, 0, 1, 0):
            optimizer.zero_grad()
            run(x)[used].square().sum().backward()
            optimizer.step()
    for p, q in zip(wrapped.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_it_holds_for_a_bare_torch_compile() -> None:
    torch._dynamo.reset()
    model = Heads()
    compiled: Any = torch.compile(model, backend="ortlab", dynamic=True)
    for rows in (4, 5):
        compiled.zero_grad()
        compiled(torch.randn(rows, 6))[1].sum().backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert missing == ["scale", "first.weight", "first.bias"]


def test_a_hook_is_given_zeros_and_that_is_told() -> None:
    """Autograd would call it with None, which most hooks do not expect."""
    torch._dynamo.reset()
    model = Heads()
    seen: list[Tensor] = []
    model.second.weight.register_hook(lambda gradient: seen.append(gradient * 1))
    wrapped: Any = ortlab.wrap(model, engine="ort")
    x = torch.randn(5, 6)
    wrapped(x)[1].sum().backward()
    record: Any = wrapped_model(wrapped)
    assert not [each for each in record.report().remarks if "eager torch's is None" in each]
    model.zero_grad()
    seen.clear()
    wrapped(x)[0].sum().backward()
    (zeros,) = seen
    assert not zeros.any()
    assert model.second.weight.grad is not None
    assert (model.second.bias.grad, model.scale.grad) == (None, None)
    told = [each for each in record.report().remarks if "eager torch's is None" in each]
    assert len(told) == 1
    assert ": second.weight;" in told[0]
