"""`ortlab bench papers --claim gradient`: steps that train some parameters only."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ortlab import bench
from ortlab.bench import models
from ortlab.bench.claims.claim import GradientSettings
from ortlab.bench.claims.gradient import (
    ALL,
    CHOICES,
    LAST,
    LORA,
    RANK,
    Adapted,
    MinimalGradient,
    Timed,
    backward_nodes,
    shown,
)
from ortlab.engines.ortmodule import compat

NEEDS_ORT = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))


def test_an_adapter_adds_its_product_and_leaves_the_layer() -> None:
    base = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    adapted = Adapted(base)
    assert torch.equal(adapted(x), base(x)), "until it is trained"
    nn.init.normal_(adapted.up)
    expected = base(x) + x @ adapted.down.T @ adapted.up.T
    torch.testing.assert_close(adapted(x), expected)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained == ["down", "up"]
    assert adapted.down.shape == (RANK, 6)


@pytest.mark.parametrize(
    ("choice", "kept"),
    [(LORA, [".down", ".up"]), (LAST, ["classifier.weight", "classifier.bias"])],
)
def test_nothing_else_is_trained(choice: str, kept: list[str]) -> None:
    model, batch = models.build("bert-128", quick=True)
    CHOICES[choice](model)
    model(**batch).loss.backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert names
    assert all(name.endswith(tuple(kept)) for name in names)


def test_eager_torch_records_what_is_trained() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> object:
            return type("Outputs", (), {"loss": self.second(self.first(x)).sum()})

    net, batch = Net(), {"x": torch.ones(1, 2)}
    assert backward_nodes(net, batch, "eager") == 5  # the sum, two products, two transposed weights
    net.first.requires_grad_(False)
    assert backward_nodes(net, batch, "eager") == 3


def test_the_table_compares_within_rounds() -> None:
    key = ("m", ALL, "ort")
    found = {
        ("m", ALL, "eager"): Timed("m", ALL, "eager", 9000, 10, (10.0, 20.0)),
        key: Timed(*key, 9000, 40, (5.0, 10.0)),
        ("m", LAST, "eager"): Timed("m", LAST, "eager", reason="no memory"),
        ("m", LAST, "ort"): Timed("m", LAST, "ort", 6, 10, (2.0, 4.0)),
    }
    lines = shown(found)
    assert (
        "| m | ort | all | 9,000 | 40 | 100% | 7.5 ms | 1.00 (1.00 to 1.00) "
        "| 0.50 (0.50 to 0.50) |" in lines
    )
    assert "| m | ort | last layer | 6 | 10 | 25% | 3 ms | 0.40 (0.40 to 0.40) |  |" in lines
    assert any("not timed: no memory" in line for line in lines)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "ort", pytest.param("ortmodule", marks=NEEDS_ORT)])
def test_the_backward_pass_is_of_what_is_trained(engine: str) -> None:
    given = {"models": "bert-128", "engines": engine, "rounds": 1, "threads": 1, "quick": True}
    result = bench.papers(claim="gradient", **given, device="cpu")
    found = {
        each["trained"]: each for each in json.loads(json.dumps(result.as_dict()))["here"]["timed"]
    }
    assert [each["reason"] for each in found.values()] == ["", "", ""]
    assert found[LAST]["nodes"] < 0.2 * found[ALL]["nodes"]
    assert found[LAST]["parameters"] < found[LORA]["parameters"] < found[ALL]["parameters"]
    assert all(len(each["step_ms"]) == 1 for each in found.values())
    assert f"| bert-128 | {engine} | last layer |" in result.markdown()


@NEEDS_ORT
def test_an_engine_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_USE_FLASH_ATTENTION", "1")
    settings = GradientSettings.of(
        models="bert-128", engines="ortmodule", rounds=1, device="cpu", quick=True
    )
    measured = MinimalGradient(settings)
    measured.run()
    assert all("cannot be on" in each.reason for each in measured.timed)
    assert "not timed: ORTMODULE_USE_FLASH_ATTENTION" in "\n".join(measured.tables())
