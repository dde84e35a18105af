"""Dropout masks of wrapped models: every element is equally likely, and no mask is fixed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ortlab
from ortlab.bench import models
from ortlab.engines.ortmodule import kernels
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.kernels import substitutes
from tests.support.kernel_nodes import PREFIX, operators
from tests.zoo.dropout import drawing

RATIO, SIZE, CALLS = 0.1, 640, 2000
WAYS: dict[str, dict[str, Any]] = {
    "measured": {},
    "ort": {"kernels": "ort"},
    "bf16": {"precision": "bf16"},
    "ort's recompute plans": {"memory_level": 1},
}


class Dropped(nn.Module):
    """A model that applies dropout to its weight, which is all ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.weight * x, RATIO, self.training)


def _are_as_chance_has_them(call: Callable[[], Tensor]) -> None:
    """Assert, within five standard errors, each share, their spread, and neighbors' independence.

    Neighbors are compared both in place and in time.
    """
    dropped = torch.stack([call().detach() == 0 for _ in range(CALLS)])
    shares, error = dropped.double().mean(0), (RATIO * (1 - RATIO) / CALLS) ** 0.5
    assert (shares - RATIO).abs().max() < 5 * error
    assert abs(float(shares.std()) / error - 1) < 5 / (2 * SIZE) ** 0.5
    for both in (dropped[:, 1:] & dropped[:, :-1], dropped[1:] & dropped[:-1]):
        assert abs(float(both.double().mean()) - RATIO**2) < 5 * RATIO / both.numel() ** 0.5


@pytest.mark.parametrize("way", WAYS)
def test_each_element_is_dropped_as_often_as_any(ops: Any, way: str) -> None:
    wrapped, x = ortlab.wrap(Dropped(), **WAYS[way]), torch.ones(SIZE)
    torch.manual_seed(3)
    _are_as_chance_has_them(lambda: wrapped(x))
    assert f"{PREFIX}dropout" in operators(wrapped)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_of_other_types(ops: Any, kind: torch.dtype) -> None:
    wrapped, x = ortlab.wrap(Dropped().to(kind)), torch.ones(SIZE, dtype=kind)
    torch.manual_seed(3)
    _are_as_chance_has_them(lambda: wrapped(x))
    found = wrapped(x)
    found.sum().backward()
    (weight,) = execution_of(wrapped).module.parameters()
    assert torch.equal(weight.grad, found.detach())
    assert found.dtype == kind


def test_without_gradients(ops: Any) -> None:
    wrapped, x = ortlab.wrap(Dropped()), torch.ones(SIZE)
    torch.manual_seed(3)
    with torch.no_grad():
        _are_as_chance_has_them(lambda: wrapped(x))


def test_where_graphs_are_saved(ops: Any, tmp_path: Path) -> None:
    wrapped, x = ortlab.wrap(Dropped(), save_onnx=str(tmp_path / "net")), torch.ones(SIZE)
    torch.manual_seed(3)
    _are_as_chance_has_them(lambda: wrapped(x))
    (written,) = tmp_path.glob("net_execution_model_training.onnx")
    assert "Dropout" not in {node.op_type for node in onnx.load(written).graph.node}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_the_mask(ops: Any, way: str) -> None:
    wrapped, x = ortlab.wrap(Dropped(), **WAYS[way]), torch.ones(SIZE)
    found = wrapped(x)
    found.sum().backward()
    (weight,) = execution_of(wrapped).module.parameters()
    assert torch.equal(weight.grad, found.detach())
    assert set(found.detach().unique().tolist()) == {0.0, found.max().item()}


def test_double_precision_is_as_exact_as_torchs(ops: Any) -> None:
    """With the same seed, the mask is that of float32."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(33, 70, dtype=torch.float64) for _ in range(2))
    torch.manual_seed(1)
    found, mask = ops.dropout(x, RATIO, False)
    torch.manual_seed(1)
    assert torch.equal(ops.dropout(x.float(), RATIO, False)[1], mask)
    torch.testing.assert_close(found, x * mask * (1 / (1 - RATIO)))
    back = ops.dropout_backward(gradient, mask, RATIO, False)
    torch.testing.assert_close(back, gradient * mask * (1 / (1 - RATIO)))


def _masks(ops: Any, shape: Sequence[int], ratio: float, *, attention: bool) -> Tensor:
    """Return the kernels' mask for torch's next draw; attention stores its own as signs."""
    if not (attention and len(shape) == 4):
        return ops.dropout(torch.ones(tuple(shape)), ratio, False)[1].bool()
    *heads, queries, keys = shape
    query, key = torch.zeros(*heads, queries, 1), torch.zeros(*heads, keys, 1)
    weights = ops.attention(query, key, key, None, ratio, False, 1.0, False, False)[1]
    return ~weights.signbit().view(tuple(shape))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *itertools.product(("bert-768", "gpt2-768", "vit-small"), ("measured", "ort")),
        ("t5-small", "measured"),  # ORT's kernels interleave encoder and decoder
    ],
)
def test_a_step_is_eager_torchs_with_the_same_masks(ops: Any, name: str, chosen: str) -> None:
    """Both draw from the same seed, in the order of the dropouts."""
    model, batch = models.build(name, quick=True)
    parameters = list(model.parameters())

    def trained(module: nn.Module, seed: int = 6) -> tuple[float, list[Tensor]]:
        torch.manual_seed(seed)
        loss = module(**batch).loss
        return float(loss.detach()), list(torch.autograd.grad(loss, parameters))

    with drawing(functools.partial(_masks, ops, attention=chosen == "measured")):
        expected, gradients = trained(model)
    wrapped = ortlab.wrap(model, kernels=chosen)
    trained(wrapped)
    loss, found = trained(wrapped)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert trained(wrapped, seed=7)[0] != pytest.approx(expected, rel=1e-6)
    most = max(float(each.norm()) for each in gradients)
    for a, b in zip(gradients, found, strict=True):
        assert float((a - b).norm()) <= 1e-3 * max(float(a.norm()), 1e-3 * most)


def test_where_there_are_no_kernels_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note says that ORT's own Dropout draws; only in training, with a dropout in the graph."""
    monkeypatch.setattr(kernels, "unavailable", lambda: "no compiler")
    x = torch.ones(SIZE)
    for settings, model in itertools.product(
        ({}, {"kernels": "ort"}), (Dropped(), nn.Sequential(nn.Linear(SIZE, 2)))
    ):
        wrapped = ortlab.wrap(model, cache=False, **settings)
        wrapped(x).sum().backward()
        notes = [note for note in execution_of(wrapped).report().notes if "random numbers" in note]
        assert len(notes) == isinstance(model, Dropped)
        assert all("no compiler" in note for note in notes)


def test_where_one_of_orts_stays_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note says that a dropout of ORT remains, because no rule fits it.

    None of the sweep's models has such a dropout.
    """
    x = torch.ones(SIZE)
    for rules, told in ((substitutes.DROPOUT, 0), ({}, 1)):
        monkeypatch.setattr(substitutes, "DROPOUT", rules)
        wrapped = ortlab.wrap(Dropped(), cache=False, kernels="ort")
        wrapped(x).sum().backward()
        notes = execution_of(wrapped).report().notes
        assert sum("not only its gradient reads" in note for note in notes) == told
