"""Tests of ORTTrainer in float16 with a loss scaler, against torch's autocast and GradScaler."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab import ORTTrainer, ORTTrainerOptions, optim
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import NotFinite
from ortlab.optim import DynamicLossScaler
from tests.support import orttrainers
from tests.support.needed_engines import needs

pytestmark = pytest.mark.usefixtures("one_thread")

DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["batch", 8])],
    "outputs": [("y", ["batch", 3])],
}
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _engine() -> None:
    needs("ort")


def net() -> nn.Sequential:
    torch.manual_seed(3)
    # A bias in front of BatchNorm has no gradient but noise, of which Adam makes whole steps.
    first = nn.Linear(8, 16, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(number: int, *, bad: tuple[int, ...] = ()) -> Iterator[Batch]:
    """Yield batches; those numbered in `bad` exceed float16's range."""
    made = torch.Generator().manual_seed(5)
    for i in range(number):
        x = torch.randn(6, 8, generator=made)
        yield x * (1e6 if i in bad else 1.0), torch.randint(3, (6,), generator=made)


def trainer(
    model: nn.Module, config: Any = None, scaler: Any = None, *, parts: int = 1, **utils: Any
) -> ORTTrainer:
    return orttrainers.trainer(
        model,
        config,
        batch={"gradient_accumulation_steps": parts},
        mixed_precision={"enabled": True, "loss_scaler": scaler or DynamicLossScaler()},
        utils=utils,
    )


def scale_of(found: ORTTrainer) -> float:
    scale: float = found.state_dict()["loss_scale"]["scale"]
    return scale


class Plain:
    """A loop of eager torch, with autocast and GradScaler."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **scaler: Any) -> None:
        self.model = model.train()
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", **scaler)

    def step(self, parts: list[Batch], *, most: float | None = None) -> list[float]:
        """Take a step and return the losses."""
        self.optimizer.zero_grad()
        losses = []
        for x, y in parts:
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(self.model(x), y)
            self.scaler.scale(loss / len(parts)).backward()
            losses.append(float(loss.detach()))
        self.scaler.unscale_(self.optimizer)
        if most is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return losses


CONFIGS = {
    "sgd": (optim.SGDConfig(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (
        optim.AdamConfig(lr=0.01, lambda_coef=0.1, max_norm_clip=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_scales_and_weights_are_those_of_eager_torch(name: str, parts: int) -> None:
    """A step overflows; the scale halves, and doubles again after five steps without overflow."""
    config, make = CONFIGS[name]
    model = net()
    plain = copy.deepcopy(model)
    reference = Plain(plain, make(plain.parameters()), init_scale=2.0**12, growth_interval=5)
    scaler = DynamicLossScaler(loss_scale=2.0**12, up_scale_window=5)
    found = trainer(model, config, scaler, parts=parts)
    data = list(batches(12 * parts, bad=(4 * parts,)))
    scales = []
    for i in range(12):
        group = data[i * parts : (i + 1) * parts]
        before, statistics = copy.deepcopy(model.state_dict()), copy.deepcopy(plain[1].state_dict())
        expected = reference.step(group, most=config.defaults.get("max_norm_clip"))
        losses = [float(found.train_step(*batch)[0]) for batch in group]
        if i == 4:
            assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
            plain[1].load_state_dict(statistics)  # a plain loop keeps those of the bad batch
        else:
            assert losses == pytest.approx(expected, rel=1e-3)
        assert scale_of(found) == scaler.loss_scale == reference.scaler.get_scale()
        scales.append(scaler.loss_scale)
    assert scales == [2.0**12] * 4 + [2.0**11] * 5 + [2.0**12] * 3
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-3)
    counted = found.state_dict()["train_step_info"]
    assert counted == {"optimization_step": 11, "step": 12 * parts}


def test_it_is_float16() -> None:
    """Values overflow that float32 and bfloat16 can represent."""
    found = trainer(net())
    ((x, y),) = batches(1, bad=(0,))
    _, scores = found.train_step(x, y)
    assert scores.dtype == torch.float16
    assert not scores.isfinite().all()
    assert scale_of(found) == 2.0**15


def test_evaluation_is_in_float16_and_leaves_the_scale() -> None:
    model = net()
    found = trainer(model)
    (first, second) = batches(2)
    found.train_step(*first)
    weights = copy.deepcopy(model.state_dict())
    loss, scores = found.eval_step(*second)
    assert scores.dtype == torch.float16
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = model(second[0])
    torch.testing.assert_close(scores, expected, rtol=1e-2, atol=1e-2)
    expected = functional.cross_entropy(expected.float(), second[1])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-2)
    assert scale_of(found) == 2.0**16
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


class Broken(nn.Module):
    """A model that Dynamo captures in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x)
        torch._dynamo.graph_break()
        return self.layers[2:](x)


def test_notes_name_graph_breaks() -> None:
    found = trainer(Broken())
    (batch,) = batches(1)
    assert not any("graph break" in note for note in found.notes)
    found.train_step(*batch)
    assert sum("graph break" in note for note in found.notes) == 1


def test_frozen_weights_and_groups() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    group = {"params": ["0.weight"], "lambda_coef": 0.9}
    found = trainer(model, optim.LambConfig([group], lr=0.1), frozen_weights=["3.bias"])
    for batch in batches(2):
        found.train_step(*batch)
    assert torch.equal(model[3].bias, before["3.bias"])
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert [g["weight_decay"] for g in found._optimizer.param_groups] == [0.9, 0.0, 0.0]


@pytest.mark.parametrize("through", ["file", "state_dict"])
def test_training_resumes_with_the_scale(tmp_path: Path, through: str) -> None:
    def made() -> ORTTrainer:
        return trainer(net(), optim.AdamConfig(lr=0.1), DynamicLossScaler(up_scale_window=3))

    first, second = made(), made()
    data = list(batches(8, bad=(1,)))
    for batch in data[:4]:
        first.train_step(*batch)
    assert scale_of(first) == 2.0**15
    if through == "file":
        second.load_checkpoint(first.save_checkpoint(tmp_path / "half.safetensors"))
    else:
        second.load_state_dict(first.state_dict())
    assert second.options.mixed_precision.loss_scaler.loss_scale == 2.0**15
    for batch in data[4:]:
        one, other = first.train_step(*batch)[0], second.train_step(*batch)[0]
        assert torch.equal(one, other)
        assert first.state_dict()["loss_scale"] == second.state_dict()["loss_scale"]
    assert scale_of(second) == 2.0**17, "the first window began before the checkpoint"


def test_a_forged_scale_changes_nothing(tmp_path: Path) -> None:
    first, second = trainer(net()), trainer(net())
    first.train_step(*next(batches(1)))
    path = first.save_checkpoint(tmp_path / "forged.safetensors")
    kept = Checkpoint.load(path).copy()
    assert kept.loss_scale is not None
    kept.loss_scale["scale"] = -1.0  # type: ignore[index]
    kept.save(path)
    with pytest.raises(ValueError, match=r"loss scale has scale=-1\.0"):
        second.load_checkpoint(path)
    with pytest.raises(ValueError, match=r"loss scale has scale=-1\.0"):
        second.load_state_dict({**first.state_dict(), "loss_scale": kept.loss_scale})
    assert torch.equal(second.model[0].weight, net()[0].weight)
    assert scale_of(second) == 2.0**16


def test_a_checkpoint_of_float32_continues_in_float16(tmp_path: Path) -> None:
    needs("ort_fused")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = ORTTrainer(net(), DESCRIPTION, optim.AdamConfig(lr=0.1), nn.CrossEntropyLoss())
    good, bad = batches(2, bad=(1,))
    whole.train_step(*good)
    found = trainer(net(), optim.AdamConfig(lr=0.1))
    found.load_checkpoint(whole.save_checkpoint(tmp_path / "whole.safetensors"))
    before = copy.deepcopy(found.model.state_dict())
    found.train_step(*bad)
    assert all(torch.equal(before[k], v) for k, v in found.model.state_dict().items())
    assert scale_of(found) == 2.0**15
    found.train_step(*good)
    assert not torch.equal(before["0.weight"], found.model[0].weight)


def test_bounds_of_the_scale() -> None:
    least = DynamicLossScaler(loss_scale=2.0**4, min_loss_scale=2.0**3)
    found = trainer(net(), scaler=least)
    scales = []
    for batch in batches(3, bad=(0, 1)):
        found.train_step(*batch)
        scales.append(least.loss_scale)
    assert scales == [2.0**3] * 3
    most = DynamicLossScaler(loss_scale=2.0**4, up_scale_window=1, max_loss_scale=2.0**5)
    found = trainer(net(), scaler=most)
    for batch in batches(3):
        found.train_step(*batch)
    assert most.loss_scale == 2.0**5


@pytest.mark.parametrize("scale", [2.0**8, 0.5])
def test_a_static_scale(scale: float) -> None:
    scaler = DynamicLossScaler(
        automatic_update=False, loss_scale=scale, up_scale_window=1, min_loss_scale=scale
    )
    model = net()
    found = trainer(model, scaler=scaler)
    good, bad = batches(2, bad=(1,))
    found.train_step(*good)
    before = copy.deepcopy(model.state_dict())
    found.train_step(*bad)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.loss_scale == scale
    found.train_step(*good)
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_a_static_scale_that_is_an_integer_is_saved_before_the_first_step() -> None:
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=256)
    state = trainer(net(), scaler=scaler).state_dict()
    found = trainer(net(), scaler=scaler)
    found.load_state_dict(state)
    assert scale_of(found) == 256


def test_an_overflow_at_the_lowest_scale_raises_and_training_may_go_on() -> None:
    model = net()
    found = trainer(model, scaler=DynamicLossScaler(loss_scale=2.0))
    good, bad = batches(2, bad=(1,))
    found.train_step(*bad)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotFinite, match=r"step 1: the weights are unchanged"):
        found.train_step(*bad)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found.train_step(*good)
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert found.state_dict()["train_step_info"] == {"optimization_step": 1, "step": 3}


def test_after_an_error_a_step_begins_anew() -> None:
    found, alone = trainer(net(), parts=2), trainer(net(), parts=2)
    (x, y), *more = batches(3)
    found.train_step(x, y)
    statistics = copy.deepcopy(alone.model.state_dict())
    with pytest.raises(RuntimeError, match="expected"):
        found.train_step(x, y.float())
    torch.testing.assert_close(found.model.state_dict(), statistics, rtol=0, atol=0)
    for batch in more:
        found.train_step(*batch)
        alone.train_step(*batch)
    torch.testing.assert_close(found.model.state_dict(), alone.model.state_dict(), rtol=0, atol=0)


def test_ort_own_scaler_serves() -> None:
    amp = pytest.importorskip("onnxruntime.training.amp")
    scaler = amp.DynamicLossScaler(loss_scale=2.0**10)
    found = trainer(net(), scaler=scaler)
    found.train_step(*next(batches(1, bad=(0,))))
    assert scaler.loss_scale == 2.0**9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": {"loss_scaler": DynamicLossScaler()}}, "add 'enabled': True"),
        (
            {"mixed_precision": {"enabled": True, "loss_scaler": 3}},
            r"loss_scaler=3 is not supported; use ortlab\.optim\.DynamicLossScaler",
        ),
        (
            {
                "mixed_precision": {"enabled": True, "loss_scaler": DynamicLossScaler()},
                "debug": {"graph_save_paths": {"model_with_training_graph_path": "x"}},
            },
            "graph_save_paths with a loss_scaler",
        ),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTTrainerOptions(options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss_scale": 0.0}, "scales must be above 0"),
        ({"loss_scale": float("inf")}, "scales must be above 0"),
        ({"loss_scale": 0.5}, r"loss_scale=0\.5 must be between min_loss_scale=1\.0"),
        ({"up_scale_window": 0}, "up_scale_window=0 must be a number of steps"),
        ({"up_scale_window": 2.5}, "up_scale_window=2.5 must be a number of steps"),
    ],
)
def test_scalers(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScaler(**values)


def test_ways_of_adam_that_torch_lacks_are_refused() -> None:
    for config in (
        optim.AdamConfig(do_bias_correction=False),
        optim.AdamConfig(weight_decay_mode=optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE),
    ):
        with pytest.raises(ValueError, match="not supported with a loss_scaler"):
            trainer(net(), config)
