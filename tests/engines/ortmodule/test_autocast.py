"""A user's own autocast and GradScaler work with the ORT engine as with eager torch."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from ortlab.engines.ortmodule.engine import OrtModuleEngine
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.settings import EngineSettings
from tests.support import tiny

HALF = 5e-3  # relative error of a whole gradient: float16 has ten bits


@pytest.fixture
def ort() -> OrtModuleEngine:
    return OrtModuleEngine()


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU())
    return nn.Sequential(*norm, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Logits(nn.Module):
    """A BERT that takes token ids and returns logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = tiny.bert(vocab_size=100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=x).logits


def _data(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(100, (4, 9)) if isinstance(model, Logits) else torch.randn(8, 6)


def _step(model: nn.Module, x: torch.Tensor, scaler: Any, optimizer: Any, scale: float) -> Any:
    """Run a manual step in float16; return the output and the gradient before unscaling."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        loss = output.float().square().mean() * scale
    scaler.scale(loss).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    scaler.step(optimizer)
    scaler.update()
    return output.detach(), gradient


@pytest.mark.parametrize("make", [_mlp, Logits])
def test_autocast_and_scaler_by_hand(ort: OrtModuleEngine, make: Any) -> None:
    """Types, gradients, scale and the steps skipped by overflow match eager torch."""
    model = make()
    twin = copy.deepcopy(model)
    wrapped, x = ort.wrap(model, EngineSettings()), _data(model)
    wrapped(x).sum().backward()  # in float32: autocast starts after the first call
    sides = []
    for each in (twin, wrapped):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
        seen = [_step(each, x, scaler, optimizer, scale) for scale in (1.0, 1e8, 1.0, 1.0)]
        sides.append((seen, scaler.get_scale()))
    (expected, scale), (found, other_scale) = sides
    assert scale == other_scale
    overflows = [not bool(gradient.isfinite().all()) for _, gradient in expected]
    assert overflows == [False, True, False, False]
    for (output, gradient), (other_output, other_gradient) in zip(expected, found, strict=True):
        assert other_output.dtype == output.dtype == torch.float16
        torch.testing.assert_close(other_output, output, rtol=HALF, atol=HALF)
        if gradient.isfinite().all():
            assert (gradient - other_gradient).norm() <= HALF * gradient.norm()
        else:
            assert not other_gradient.isfinite().all()
    weights = zip(twin.state_dict().items(), model.state_dict().values(), strict=True)
    for (name, ours), theirs in weights:
        torch.testing.assert_close(theirs, ours, rtol=1e-2, atol=1e-4, msg=name)


def test_autocast_inside_autocast_and_switched_off(ort: OrtModuleEngine) -> None:
    model = _mlp()
    wrapped, x = ort.wrap(model, EngineSettings()), _data(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            assert wrapped(x).dtype == model(x).dtype == torch.float16
            with torch.autocast("cpu", enabled=False):
                assert wrapped(x).dtype == model(x).dtype == torch.float32
        assert wrapped(x).dtype == torch.float32


class Partly(nn.Module):
    """A model that computes its second layer in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.first(x)
        with torch.autocast("cpu", enabled=False):
            scores: torch.Tensor = self.second(found.float())
        return scores


def test_a_part_that_forward_keeps_in_float32_is_never_lowered(ort: OrtModuleEngine) -> None:
    wrapped, x = ort.wrap(Partly(), EngineSettings()), torch.randn(4, 6)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            ExportFailed, match=r"use engine='ort', or remove the autocast inside forward"
        ),
    ):
        wrapped(x)


class InBfloat16(Partly):
    """A model with its own autocast, which needs no outer one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(self.first(x))


def test_an_autocast_of_forwards_own_alone_is_refused(ort: OrtModuleEngine) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ExportFailed, match=r"no kernel for \w+ in first \(.*use engine='ort'"):
        ort.wrap(InBfloat16(), EngineSettings())(x)
    model = InBfloat16()
    falls_back = ort.wrap(model, EngineSettings.of(fallback=True))
    torch.testing.assert_close(falls_back(x), model(x), rtol=0, atol=0)
    assert ort.report(falls_back).engine_used == "eager"


@pytest.mark.parametrize("make", [_mlp, Logits])
def test_autocast_in_bfloat16_on_a_cpu(ort: OrtModuleEngine, make: Any) -> None:
    """The graph has torch's products; types match, and values match within bfloat16's rounding."""
    model = make()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model)
    wrapped, x = ort.wrap(model, EngineSettings()), _data(model)
    assert wrapped(x).dtype == torch.float32, "autocast comes after the first call"
    exact(x).square().mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
    for each in (twin, wrapped):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(x)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        found = torch.cat([p.grad.flatten() for p in each.parameters()])
        assert 0 < (found - wanted).norm() <= 2e-2 * wanted.norm()
    torch.testing.assert_close(wrapped(x), exact(x), msg="without autocast it is float32 again")


def test_autocast_in_bfloat16_keeps_results_that_are_no_tensors_and_their_structure(
    ort: OrtModuleEngine,
) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"sums": [self.inner(x), x.sum()], "none": None, "pair": (x, self.inner(x) > 0)}

    model = Several()
    x = torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), ort.wrap(model, EngineSettings())(x)
    assert list(found) == list(expected)
    assert found["none"] is None
    for name in ("sums", "pair"):
        assert type(found[name]) is type(expected[name])
        assert [each.dtype for each in found[name]] == [each.dtype for each in expected[name]]


def test_autocast_in_bfloat16_needs_torchs_kernels(ort: OrtModuleEngine) -> None:
    wrapped, x = ort.wrap(_mlp(), EngineSettings.of(kernels="ort")), _data(_mlp())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ExportFailed, match=r"autocast in bfloat16.*needs torch's kernels.*leave"),
    ):
        wrapped(x)
    assert wrapped(x).dtype == torch.float32, "without autocast it goes on"


def test_autocast_in_bfloat16_without_torchs_kernels_falls_back(ort: OrtModuleEngine) -> None:
    model = _mlp()
    wrapped, x = ort.wrap(model, EngineSettings.of(kernels="ort", fallback=True)), _data(model)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = wrapped(x), model(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    report = ort.report(wrapped)
    assert report.engine_used == "eager"
    assert "needs torch's kernels" in (report.fallback_reason or "")


class FusedLayerNorm(nn.LayerNorm):
    """A layer with the name of apex's own."""


def test_apex_is_refused_with_what_took_its_place(
    ort: OrtModuleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedLayerNorm, "__module__", "apex.normalization.fused_layer_norm")
    model = nn.Sequential(nn.Linear(3, 3), FusedLayerNorm(3))
    with pytest.raises(ValueError, match=r"apex's FusedLayerNorm.*layers of torch\.nn"):
        ort.wrap(model, EngineSettings())
    # The state after apex.amp.initialize; apex itself does not build on today's torch.
    options = types.SimpleNamespace(enabled=True)
    state = types.SimpleNamespace(_amp_state=types.SimpleNamespace(opt_properties=options))
    monkeypatch.setitem(sys.modules, "apex.amp._amp_state", state)
    with pytest.raises(ValueError, match=r"uses apex\.amp.*torch\.autocast"):
        ort.wrap(_mlp(), EngineSettings())
