"""Attention with torch's fused kernels in ORT's graph, compared with eager torch."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat.symbolics import attention as rules_attention
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.kernels.nodes import operator

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


class Attends(nn.Module):
    """One attention layer, [batch, length, 24] in and out, with the given arguments."""

    def __init__(self, *, learned: bool = False, **given: Any) -> None:
        super().__init__()
        self.project = nn.Linear(24, 24 * 3)
        self.bias = nn.Parameter(torch.randn(4, 1, 1)) if learned else None
        self.given = given

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.project(x).view(*x.shape[:2], 3, 4, 6).permute(2, 0, 3, 1, 4)
        mask = self.bias * mask if self.bias is not None and mask is not None else mask
        found = functional.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], mask, **self.given
        )
        return found.transpose(1, 2).flatten(2)


def _mask(kind: str, batch: int, length: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "bool":
        seen = torch.rand(batch, 1, length, length) < 0.7
        return seen | torch.eye(length, dtype=torch.bool)
    return torch.randn(batch, 1, length, length)


def _operators(wrapped: nn.Module) -> set[str]:
    (export,) = execution_of(wrapped).exports()
    return {operator(node) for node in export.stages()["execution"].graph.node}


def _step(model: nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    model.zero_grad()
    given = x.clone().requires_grad_()
    found = model(given, mask) if mask is not None else model(given)
    found.sin().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert given.grad is not None
    return [found.detach(), given.grad, *gradients]


@pytest.mark.parametrize(
    ("mask", "given"),
    [("none", {"is_causal": True})]
    + [
        (mask, given)
        for mask in ("none", "bool", "float", "learned")
        for given in ({}, {"scale": 0.3}, {"dropout_p": 0.4})
    ],
)
def test_it_is_eager_torchs(mask: str, given: dict[str, Any]) -> None:
    """Results match, with dropout too: the random numbers are torch's, in eager torch's order."""
    torch.manual_seed(0)
    model = Attends(learned=mask == "learned", **given)
    twin = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ortmodule", attention="fused", cache=False)
    for batch, length in ((2, 5), (3, 9), (2, 5)):
        x, given_mask = torch.randn(batch, length, 24), _mask(mask, batch, length)
        _step(wrapped, x, given_mask)  # the check of a new shape draws random numbers, too
        steps = []
        for each in (wrapped, twin):
            torch.manual_seed(1)
            steps.append(_step(each, x, given_mask))
        for ours, theirs in zip(*steps, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert "ortlab::attention" in _operators(wrapped)


def test_passes_go_back_in_any_order() -> None:
    torch.manual_seed(0)
    model = Attends(dropout_p=0.5)
    twin = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ortmodule", attention="fused", cache=False)
    xs = [torch.randn(2, length, 24) for length in (4, 6, 4)]
    for x in xs:
        wrapped(x)
    gradients = []
    for each in (wrapped, twin):
        torch.manual_seed(2)
        losses = [each(x).square().sum() for x in xs]
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
        gradients.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_what_is_held_goes_with_the_pass() -> None:
    model = Attends()
    wrapped = ortlab.wrap(model, engine="ortmodule", attention="fused", cache=False)
    x = torch.randn(2, 4, 24)
    wrapped(x).sum().backward()
    gc.collect()
    assert not rules_attention._held
    out = wrapped(x)
    assert len(rules_attention._held) == 1
    del out
    assert not rules_attention._held
    wrapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), model(x), rtol=1e-5, atol=1e-5)
    assert not rules_attention._held


@pytest.mark.parametrize(
    ("attention", "kernels", "expected"),
    [
        ("auto", "torch", {"ortlab_kernels::attention"}),
        ("auto", "ort", set()),
        ("onnx", "torch", set()),
        ("fused", "ort", {"ortlab::attention"}),
        ("fused", "torch", {"ortlab::attention"}),
    ],
)
def test_what_attention_becomes(attention: str, kernels: str, expected: set[str]) -> None:
    wrapped = ortlab.wrap(
        Attends(), engine="ortmodule", attention=attention, kernels=kernels, cache=False
    )
    wrapped(torch.randn(2, 4, 24))
    found = {name for name in _operators(wrapped) if name.endswith("::attention")}
    assert found == expected


def test_the_check_leaves_dropout_out() -> None:
    wrapped = ortlab.wrap(
        Attends(dropout_p=0.9), engine="ortmodule", attention="fused", cache=False
    )
    wrapped(torch.randn(2, 4, 24))
    (note,) = execution_of(wrapped).report().notes
    assert note.startswith("checked on [2, 4, 24]: 1 output within")
