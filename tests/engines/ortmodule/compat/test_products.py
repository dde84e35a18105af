"""Products with vectors train in ORT as in eager torch: the loss and gradients at two sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ortlab
from ortlab.engines.ortmodule.compat import TrainingRuntime
from ortlab.engines.ortmodule.engine import execution_of

Sizes = tuple[int, ...]


class Net(nn.Module):
    """`form` applied to the input and parameters, all of which get a gradient."""

    def __init__(self, form: Callable[..., Tensor], *sizes: Sizes) -> None:
        super().__init__()
        self.form = form
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.weights = nn.ParameterList(nn.Parameter(0.5 * torch.randn(each)) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.form(x * self.scale, *self.weights)
        return found.square().sum()


def attend(x: Tensor, weight: Tensor, vector: Tensor) -> Tensor:
    """Compute additive attention."""
    share = (torch.tanh(x @ weight) @ vector).softmax(-1)
    return (share[..., None] * x).sum(-2)


FORMS: dict[str, tuple[Callable[..., Tensor], list[Sizes], Sizes, Sizes]] = {
    "1 @ 1": (lambda x, w: x @ w, [(6,)], (6,), (6,)),
    "1 @ 2": (lambda x, w: x @ w, [(6, 5)], (6,), (6,)),
    "1 @ 2, learned left": (lambda x, w: w @ x.T, [(6,)], (4, 6), (3, 6)),
    "1 @ 3": (lambda x, w: w @ x, [(4,)], (2, 4, 6), (3, 4, 6)),
    "2 @ 1": (lambda x, w: x @ w, [(6,)], (4, 6), (3, 6)),
    "2 @ 1, of one size": (lambda x, w: x @ w, [(6,)], (6, 6), (1, 6)),
    "2 @ 1, learned left": (lambda x, w: w @ x, [(4, 6)], (6,), (6,)),
    "3 @ 1": (lambda x, w: x @ w, [(6,)], (2, 4, 6), (3, 5, 6)),
    "mv": (torch.mv, [(6,)], (4, 6), (3, 6)),
    "dot": (torch.dot, [(6,)], (6,), (6,)),
    "vdot": (torch.vdot, [(6,)], (6,), (6,)),
    "inner of 1": (torch.inner, [(6,)], (6,), (6,)),
    "inner of 2 and 1": (torch.inner, [(6,)], (4, 6), (3, 6)),
    "inner of 1 and 3": (lambda x, w: torch.inner(w, x), [(6,)], (2, 4, 6), (3, 5, 6)),
    "inner of 2": (torch.inner, [(5, 6)], (4, 6), (3, 6)),
    "outer": (lambda x, w: torch.outer(x[:, 0], w), [(5,)], (4, 6), (3, 6)),
    "addmv": (lambda x, b, w: torch.addmv(b, x, w), [(1,), (6,)], (4, 6), (3, 6)),
    "addmv, weighed": (
        lambda x, b, w: torch.addmv(b, x, w, beta=0.3, alpha=0.7), [(1,), (6,)], (4, 6), (3, 6),
    ),
    "linear to 1": (F.linear, [(6,)], (2, 4, 6), (3, 5, 6)),
    "linear to 1 of 1": (F.linear, [(6,)], (6,), (6,)),
    "linear to 1, biased": (F.linear, [(6,), ()], (2, 4, 6), (3, 5, 6)),
    "linear of 1": (F.linear, [(5, 6)], (6,), (6,)),
    "linear of 1, biased": (F.linear, [(5, 6), (5,)], (6,), (6,)),
    "einsum i,i": (lambda x, w: torch.einsum("i,i->", x, w), [(6,)], (6,), (6,)),
    "einsum ij,ij": (lambda x, w: torch.einsum("ij,ij->", x, w), [(4, 6)], (4, 6), (1, 6)),
    "einsum ij,j": (lambda x, w: torch.einsum("ij,j->i", x, w), [(6,)], (4, 6), (3, 6)),
    "einsum bij,j": (lambda x, w: torch.einsum("bij,j->bi", x, w), [(6,)], (2, 4, 6), (3, 5, 6)),
    "one after the other": (lambda x, w, v: (x @ w) @ v, [(6, 6), (6,)], (4, 6), (3, 6)),
    "additive attention": (attend, [(6, 5), (5,)], (2, 4, 6), (3, 7, 6)),
}  # fmt: skip


def worst(name: str, **settings: Any) -> float:
    """Return the largest error, by norm, of the loss or a gradient against eager torch in fp32."""
    torch.manual_seed(0)
    form, weights, *batches = FORMS[name]
    ours = Net(form, *weights)
    theirs = copy.deepcopy(ours)
    wrapped = ortlab.wrap(ours, cache=False, **settings)
    errors = []
    for sizes in batches:
        x = torch.randn(sizes)
        losses = []
        for net in (wrapped, theirs):
            net.zero_grad()
            losses.append(net(x))
            losses[-1].backward()
        pairs = [
            (each.grad, other.grad)
            for each, other in zip(ours.parameters(), theirs.parameters(), strict=True)
        ]
        for mine, other in [tuple(each.detach() for each in losses), *pairs]:
            assert mine.shape == other.shape
            errors.append(float((mine - other).norm() / other.norm().clamp(min=0.1)))
    notes = execution_of(wrapped).report().notes
    checked = any(note.startswith("checked on") for note in notes)
    assert checked == settings.get("self_check", True), notes
    return max(errors)


@pytest.mark.parametrize("name", FORMS)
def test_products_with_vectors(ort: TrainingRuntime, name: str) -> None:
    assert worst(name) < 1e-5


@pytest.mark.parametrize("kernels", ["ort", "torch"])
@pytest.mark.parametrize("name", FORMS)
def test_they_are_right_unchecked(ort: TrainingRuntime, name: str, kernels: str) -> None:
    assert worst(name, self_check=False, kernels=kernels) < 1e-5


@pytest.mark.parametrize("name", FORMS)
def test_they_are_right_in_bf16(ort: TrainingRuntime, name: str) -> None:
    assert worst(name, precision="bf16") < 5e-2


def test_inner_of_more_dimensions_says_what_to_do(ort: TrainingRuntime) -> None:
    net = ortlab.wrap(Net(torch.inner, (2, 3, 6)), engine="ortmodule", cache=False)
    with pytest.raises(RuntimeError, match="more than 2 dimensions; use einsum"):
        net(torch.randn(4, 6))
