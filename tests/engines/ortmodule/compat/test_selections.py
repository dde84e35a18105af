"""Selections of which a batch may leave no element: run as in eager torch, or refused before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ortlab
from ortlab.engines.ortmodule.compat.selections import _FIT
from ortlab.engines.ortmodule.export_pool import ExportFailed
from tests.support.needed_engines import needs

MASKS = (
    torch.arange(6) % 2 == 0,
    torch.zeros(6, dtype=torch.bool),
    torch.ones(6, dtype=torch.bool),
)


@pytest.fixture(autouse=True)
def with_ort() -> None:
    needs("ortmodule")


class Selecting(nn.Module):
    def __init__(self, of_rows: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.of_rows = nn.Linear(8, 8), of_rows

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        rows = hidden[mask]
        return hidden.pow(2).mean() + self.of_rows(rows)


FIT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(),
    "sum of squares": lambda rows: rows.pow(2).sum(),
    "sum of each row": lambda rows: rows.sum(1).exp().sum(),
    "functions": lambda rows: (rows.tanh() + rows.sigmoid() * rows.abs() - rows.relu()).sum(),
    "logarithm": lambda rows: (rows.abs() + 1).log().sum(),
    "smaller": lambda rows: torch.where(rows > 0, rows, -2 * rows).sum(),
    "columns": lambda rows: rows[:, 2:5].sum(),
    "transposed": lambda rows: rows.t().unsqueeze(0).sum(),
    "clamped": lambda rows: rows.clamp(-0.5, 0.5).sum(),
}


@pytest.mark.parametrize("name", FIT)
def test_what_runs_in_ort_runs_without_elements(name: str) -> None:
    model = Selecting(FIT[name])
    twin = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, engine="ortmodule", cache=False)
    for mask in MASKS:
        x = torch.randn(6, 8)
        losses = wrapped(x, mask), twin(x, mask)
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(),
    "mean by count": lambda rows: rows.sum() / (rows.numel() + 1.0),
    "divided": lambda rows: (rows / (rows.abs() + 1)).sum(),
    "mean of each row": lambda rows: rows.mean(1).sum(),
    "linear": lambda rows: F.linear(rows, torch.ones(3, 8)).sum(),
    "norm": lambda rows: F.layer_norm(rows, (8,)).sum(),
    "softmax": lambda rows: rows.softmax(-1).sum(),
    "joined": lambda rows: torch.cat([rows, 2 * rows], 1).sum(),
    "convolution": lambda rows: F.conv1d(rows[:, None], torch.ones(2, 1, 3)).sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_end_the_process_is_refused_with_the_line_of_the_selection(name: str) -> None:
    """Also with a first batch that leaves some, which ORT could run."""
    wrapped = ortlab.wrap(Selecting(REFUSED[name]), engine="ortmodule", cache=False)
    with pytest.raises(ExportFailed) as refused:
        wrapped(torch.randn(6, 8), MASKS[0])
    said = str(refused.value)
    assert "the size of a selection depends on the data" in said
    assert "does not support tensors without elements" in said
    assert "rows = hidden[mask]" in said
    assert said.endswith("use engine='ort'")


@pytest.mark.parametrize("name", REFUSED)
def test_auto_trains_it_in_todays_engine(name: str) -> None:
    model = Selecting(REFUSED[name])
    twin = copy.deepcopy(model)
    wrapped = ortlab.wrap(model, cache=False)
    for mask in MASKS:
        x = torch.randn(6, 8)
        torch.testing.assert_close(wrapped(x, mask), twin(x, mask), equal_nan=True)


def test_every_operator_that_fits_runs_without_elements() -> None:
    """Run each elementwise operator of the list on tensors without elements, in its own session."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    values = {"f": (TensorProto.FLOAT, "float32"), "b": (TensorProto.BOOL, "bool")}
    inputs = {"Not": "b", "And": "bb", "Or": "bb", "Where": "bff"}
    of_one = "Abs Ceil Cos Elu Erf Exp Floor Identity IsNaN LeakyRelu Log Neg Reciprocal Relu Selu"
    of_one += " Shape Sigmoid Sign Sin Size Softplus Sqrt Tanh Transpose ReduceSum"
    of_two = "Add Sub Mul Div Pow Equal Less LessOrEqual Greater GreaterOrEqual Max Min Sum"
    inputs |= dict.fromkeys(of_one.split(), "f") | dict.fromkeys(of_two.split(), "ff")
    assert set(inputs) <= _FIT
    for operator, kinds in inputs.items():
        given = [
            helper.make_tensor_value_info(f"x{i}", values[kind][0], [None, 8])
            for i, kind in enumerate(kinds)
        ]
        node = helper.make_node(operator, [each.name for each in given], ["y"])
        graph = helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name="y")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        run = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run
        empty = {
            f"x{i}": torch.zeros(0, 8).numpy().astype(values[k][1]) for i, k in enumerate(kinds)
        }
        (found,) = run(None, empty)
        assert found.size == 0 or operator in ("Shape", "Size", "ReduceSum"), operator
