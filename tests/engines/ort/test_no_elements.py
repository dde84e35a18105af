"""Tensors without elements: a selection that leaves none, and a batch without rows.

ORT's kernels and its optimizer differ from torch there: a mean is 0, not NaN, an Expand is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ortlab

MASKS = (
    torch.arange(6) % 2 == 0,
    torch.zeros(6, dtype=torch.bool),
    torch.ones(6, dtype=torch.bool),
)

Function = Callable[[Tensor], Tensor]


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long)


FUNCTIONS: dict[str, Function] = {
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(0).sum() + x.mean((0, 1), keepdim=True).sum(),
    "mean of each column": lambda x: x.mean(0).sum(),
    "mean of rows": lambda x: x.mean(1).sum(),
    "variance": lambda x: x.var(0).sum() + x.var(),
    "population": lambda x: x.std(0, unbiased=False).sum(),
    "variance and mean": lambda x: sum(torch.var_mean(x, 0), torch.zeros(8)).sum(),
    "norm": lambda x: x.norm() + x.norm(dim=0).sum(),
    "product": lambda x: x.prod() + x.prod(0).sum(),
    "log of a sum": lambda x: x.logsumexp(0).sum(),
    "softmax": lambda x: x.softmax(0).sum() + x.softmax(1).pow(2).sum(),
    "sum so far": lambda x: x.cumsum(0).sum(),
    "any": lambda x: (x > 0).any().float() + (x > 0).any(0).sum() + x.sum(),
    "all": lambda x: (x > 0).all().float() + (x > 0).all(0).sum() + x.sum(),
    "sorted": lambda x: x.sort(0).values.sum(),
    "products": lambda x: (x.t() @ x).sum() + (x @ x.t()).sum(),
    "wide sum": lambda x: x.repeat(1, 200).sum(0).pow(2).sum(),
    "cross entropy": lambda x: F.cross_entropy(x, _classes(x)),
    "cross entropy, sum": lambda x: F.cross_entropy(x, _classes(x), reduction="sum"),
    "squared error": lambda x: F.mse_loss(x, x.detach() * 2),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "smooth error": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
    "cosine": lambda x: F.cosine_similarity(x, x.sin(), dim=1).mean(),
    "layer norm": lambda x: F.layer_norm(x, (8,)).pow(2).mean(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3).sum(),
    "weighted": lambda x: (x * torch.arange(x.shape[0])[:, None]).mean(),
}


class Selecting(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if mask is None:
            return self.function(hidden)
        return hidden.pow(2).mean() + self.function(hidden[mask])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("selected", [True, False], ids=["selection", "batch"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_and_gradients_are_those_of_eager_torch(name: str, selected: bool) -> None:
    torch._dynamo.reset()
    model = Selecting(FUNCTIONS[name])
    twin = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ort", cache=False)
    for mask, rows in zip(MASKS, (4, 0, 5), strict=True):
        batch = (torch.randn(6, 8), mask) if selected else (torch.randn(rows, 8),)
        model.zero_grad()
        twin.zero_grad()
        losses = wrapped(*batch), twin(*batch)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5, equal_nan=True)
        for loss in losses:
            loss.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            pair = ours.grad, theirs.grad
            torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5, equal_nan=True)
