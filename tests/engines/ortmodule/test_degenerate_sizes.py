"""Sizes of 1 and 0 within forward, as the fuzz test found them: right, or refused before a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ortmodule import dispatch
from ortlab.engines.ortmodule.export_pool import ExportFailed
from tests.support.needed_engines import needs

pytestmark = pytest.mark.usefixtures("ortmodule")
Function = Callable[[Tensor], Tensor]


@pytest.fixture
def ortmodule() -> None:
    needs("ortmodule")


class Between(nn.Module):
    """A function of a linear layer's results, and a loss in which the weight is by itself, too."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight.t() * self.weight[0, 0]
        return self.function(hidden).tanh().sum() + hidden.sin().sum() + self.weight.square().sum()


def trains_as_eager(function: Function, shapes: list[tuple[int, ...]], engine: str) -> str:
    """Compare a batch of each shape, twice, and return the engine that ran them."""
    reference = Between(function)
    wrapped = ortlab.wrap(copy.deepcopy(reference), engine=engine, cache=False)
    for shape in shapes * 2:
        x = torch.randn(shape)
        for each in (wrapped, reference):
            each.zero_grad()
            each(x).backward()
        found, expected = wrapped.weight.grad, reference.weight.grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return wrapped_model(wrapped).report().engine_used


@pytest.mark.parametrize(
    "squeeze",
    [
        lambda x: x.squeeze(0),
        lambda x: x.squeeze(1),
        lambda x: x.squeeze(dim=-2),
        lambda x: x.squeeze((0, 1)),
        lambda x: torch.squeeze(x, 2),
        lambda x: x.squeeze(1).narrow(-1, 1, 3),
        lambda x: x.sum().squeeze(0),
    ],
)
def test_a_squeeze_of_a_size_that_is_not_1(squeeze: Function) -> None:
    shapes = [(2, 5, 3), (1, 5, 3), (2, 1, 3), (1, 1, 3)]
    assert trains_as_eager(squeeze, shapes, "ortmodule") == "ortmodule"


def test_a_squeeze_of_other_sizes_is_checked_when_no_checks_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_MOST_CHECKS", 0)
    shapes = [(2, 5, 3), (2, 6, 3), (2, 7, 3), (2, 1, 3)]
    function = lambda x: x.squeeze(1)[:, :2]  # noqa: E731
    assert trains_as_eager(function, shapes, "ortmodule") == "ortmodule"


@pytest.mark.parametrize(
    "empties",
    [
        lambda x: x.narrow(1, 1, x.shape[1] - 1).mean(-1),
        lambda x: x[:, 1:].exp(),
        lambda x: x.split([0, x.shape[0]])[0],
        lambda x: nn.functional.layer_norm(x[:, 1:], (4,)),
    ],
)
def test_a_part_without_elements_is_refused_before_it_runs(empties: Function) -> None:
    with pytest.raises(ExportFailed, match=r"leaves no element \(.*test_degenerate_sizes.py:\d+"):
        trains_as_eager(empties, [(2, 1, 3)], "ortmodule")
    assert trains_as_eager(empties, [(2, 1, 3), (3, 4, 3)], "auto") == "ort"


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: nn.functional.layer_norm(x[:, :, :1], (1,)),
        lambda x: nn.functional.layer_norm(x[:, :, ::4], x[:, :, ::4].shape[-1:]),
        nn.LayerNorm((1, 1)),
    ],
)
def test_a_layer_norm_of_one_element_is_refused_before_it_runs(norm: Function) -> None:
    """Its gradient fails in backward, or has arbitrary numbers."""
    function = lambda x: norm(x[:, :, :1])  # noqa: E731
    with pytest.raises(ExportFailed, match=r"normalizes one element at a time \(.*:\d+"):
        trains_as_eager(function, [(2, 1, 3)], "ortmodule")
    assert trains_as_eager(function, [(2, 1, 3)], "auto") == "ort"


def test_an_empty_tensor_that_others_are_added_to_is_none() -> None:
    function = lambda x: torch.cat([x.new_zeros(0, *x.shape[1:]), x])  # noqa: E731
    assert trains_as_eager(function, [(2, 1, 3)], "ortmodule") == "ortmodule"


def test_a_gradient_that_ort_would_leave_out_is_refused() -> None:
    """Torch exports the only part of a chunk as an item of a sequence."""
    function = lambda x: x.chunk(2, 1)[0]  # noqa: E731
    with pytest.raises(ExportFailed, match="ORT leaves out the gradient of SequenceAt"):
        trains_as_eager(function, [(2, 1, 3)], "ortmodule")
    assert trains_as_eager(function, [(2, 1, 3), (2, 4, 3)], "auto") == "ort"
