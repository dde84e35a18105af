"""The messages that a user reads when ORTModule cannot run a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortlab.engines.ortmodule import compat
from ortlab.engines.torchscript.failures import Failure


class Fft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), Spectrum())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class Determinant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.det(self.layer(x))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(4, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.bags((x > 0).long()))
        return found


class AndConstant(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), torch.ones(3)


class Straight(torch.autograd.Function):
    """A function that rounds, passes the gradient, and returns a type ORT does not support."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, str]:
        return x.round(), "rounded"

    @staticmethod
    def backward(ctx: object, gradient: Tensor, _what: None) -> Tensor:
        return gradient


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rounded: Tensor = Straight.apply(super().forward(x))[0]
        return rounded


class Raising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no batches of {len(x)}")


def failure(ort: compat.TrainingRuntime, model: nn.Module) -> Failure:
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - ORT raises many exception types
        wrapped(torch.randn(6, 6))
    return compat.explain(caught.value)


def line_of(function: Callable[..., object], code: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (at,) = (number for number, line in enumerate(lines, first) if code in line)
    return f"{Path(__file__)}:{at}: {lines[at - first].strip()}"


def test_an_operator_without_a_rule(ort: compat.TrainingRuntime) -> None:
    assert failure(ort, Fft()) == Failure(
        operator="aten::fft_rfft",
        source=line_of(Spectrum.forward, "rfft"),
        module="inner.1",
        reason="torch's ONNX exporter has no rule for aten::fft_rfft",
    )


def test_an_operator_without_a_gradient(ort: compat.TrainingRuntime) -> None:
    found = failure(ort, Determinant())
    assert found.operator == "Det"
    assert found.source == line_of(Determinant.forward, "det(")
    assert found.reason == "ORT has no gradient for Det"


def test_an_operator_that_is_a_loop_in_onnx(ort: compat.TrainingRuntime) -> None:
    found = failure(ort, Bags())
    assert found.operator == "aten::embedding_bag"
    assert found.module == "bags"
    assert found.source == line_of(Bags.forward, "self.bags(")
    assert "use nn.Embedding" in found.reason


def test_an_output_that_is_a_constant(ort: compat.TrainingRuntime) -> None:
    found = failure(ort, AndConstant(6, 6))
    assert "output 1 of forward, counted from 0, is a constant" in found.reason
    assert "return it outside of the model" in found.reason


def test_an_autograd_function_is_refused_by_name(ort: compat.TrainingRuntime) -> None:
    found = failure(ort, Rounding(6, 6))
    assert found.operator == f"{__name__}.Straight"
    assert found.source == line_of(Rounding.forward, "apply")
    assert "Straight returns str, but ORT passes only tensors" in found.reason


def test_functions_are_refused_in_an_export_only(ort: compat.TrainingRuntime) -> None:
    failure(ort, Rounding(6, 6))
    x = torch.randn(3, requires_grad=True)
    Straight.apply(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.fixture
def grouped(ort: compat.TrainingRuntime) -> nn.Module:
    """Return a grouped convolution after another package's rule has replaced ortlab's."""
    from torch.onnx import register_custom_op_symbolic

    from ortlab.engines.ortmodule.compat.symbolics import builder

    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1, groups=2))
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    register_custom_op_symbolic("::_convolution", builder.stock("_convolution"), 17)
    return wrapped


@pytest.mark.parametrize("training", [True, False])
def test_a_grouped_convolution_never_gets_orts_gradient(grouped: Any, training: bool) -> None:
    """A grouped convolution is refused in eval mode too, where ortlab also has gradients."""
    grouped.train(training)
    grouped._torch_module.is_training = lambda: True
    with pytest.raises(RuntimeError) as caught:
        grouped(torch.randn(2, 4, 3))
    found = compat.explain(caught.value)
    assert found.operator == "Conv"
    assert found.module == "1"
    assert "grouped convolution" in found.reason


def test_a_grouped_convolution_without_a_gradient_runs(grouped: nn.Module) -> None:
    x = torch.randn(2, 4, 3)
    with torch.no_grad():
        assert grouped(x).shape == x.shape


def test_what_the_model_itself_raises(ort: compat.TrainingRuntime) -> None:
    found = failure(ort, Raising(6, 6))
    assert found.reason == "no batches of 6"
    assert found.source == line_of(Raising.forward, "raise")


def test_a_model_of_a_library_is_located_in_the_library(ort: compat.TrainingRuntime) -> None:
    from transformers import BertConfig, BertModel

    class Strange(BertModel):
        """A BERT with an operator without a rule, at the one place in the library's code."""

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=10, attn_implementation="eager",
    )  # fmt: skip
    model = Strange(config)
    model.pooler.activation = nn.RReLU()
    wrapped = ort.ORTModule(model, ort.DebugOptions(log_level=ort.LogLevel.ERROR))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        wrapped(torch.ones(1, 4, dtype=torch.long))
    found = compat.explain(caught.value)
    assert found.operator == "PRelu"
    assert found.module == "pooler.activation"
    assert "modeling_bert.py" in (found.source or "")


@pytest.mark.parametrize("model", [Fft(), Determinant(), Rounding(6, 6), Raising(6, 6)], ids=type)
def test_one_plain_line(
    ort: compat.TrainingRuntime, model: nn.Module, capfd: pytest.CaptureFixture
) -> None:
    text = str(failure(ort, model))
    assert "\n" not in text
    assert len(text) < 400
    for noise in ("\x1b", "****", "onnxruntime_src", "Traceback", "%"):
        assert noise not in text
    said = capfd.readouterr()
    assert said.out + said.err == ""


def test_an_unknown_exception_is_told_by_its_first_line() -> None:
    banner = "\x1b[91m****\n\x1b[0mit broke\n" + "x" * 2000
    assert str(compat.explain(RuntimeError(banner))) == "it broke"
    assert str(compat.explain(KeyError())) == "KeyError"
