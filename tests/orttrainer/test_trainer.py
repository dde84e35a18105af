"""Tests of ORTTrainer: it trains as torch does, resumes exactly, and reports bad arguments."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from sklearn.datasets import load_digits
from torch import nn

import ortlab
from ortlab import ORTTrainer, ORTTrainerOptions, optim
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import NotFinite
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.fused_step import FusedStep
from ortlab.orttrainer.description import Description
from ortlab.orttrainer.trainer import TrainStepInfo
from ortlab.utils.rng import RandomStates
from tests.support import tiny
from tests.support.orttrainers import trainer

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
pytestmark = [needs_ort, pytest.mark.usefixtures("one_thread")]

DESCRIPTION: dict[str, Any] = {
    "inputs": [("x", ["batch", 8])],
    "outputs": [("y", ["batch", 3])],
}
STEPS = 300


class NeuralNet(nn.Module):
    """The network of ORT's slides."""

    def __init__(self, input_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden_size, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def batches(number: int, rows: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    for _ in range(number):
        yield torch.randn(rows, 8, generator=made), torch.randint(3, (rows,), generator=made)


# ---- training ------------------------------------------------------------------------------------


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return handwritten digits, padded to 784 pixels."""
    found = load_digits()
    pixels = torch.tensor(found.data, dtype=torch.float32) / 16
    return nn.functional.pad(pixels, (0, 784 - pixels.shape[1])), torch.tensor(found.target)


def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = digits()
    made = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (64,), generator=made)
        yield x[chosen], y[chosen]


@functools.cache
def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model, criterion, losses = NeuralNet(784, 500, 10), nn.CrossEntropyLoss(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for data, target in loader():
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_that_of_torch(losses: list[float]) -> None:
    assert len(losses) == STEPS
    assert max(abs(a - b) for a, b in zip(losses, plain_losses(), strict=True)) < 1e-4
    assert losses[-1] < losses[0] / 2


def test_the_slides_trainer() -> None:
    """The code is that of the slides, except for the import and the learning rate."""
    torch.manual_seed(0)
    model = NeuralNet(784, 500, 10)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = optim.SGDConfig(lr=0.1)
    model_desc = {"inputs": [("x", ["batch", 784])], "outputs": [("y", ["batch", 10])]}
    with pytest.warns(UserWarning, match="names no label.*'label'|names no loss.*'loss'"):
        trainer = ORTTrainer(model, optimizer, model_desc, criterion)
    losses = []
    for data, target in loader():
        loss, y_pred = trainer.train_step(data, target)
        losses.append(float(loss))
    is_that_of_torch(losses)
    assert y_pred.shape == (64, 10)
    assert "label" in trainer.notes[0]
    assert "loss" in trainer.notes[1]


def test_the_slides_module() -> None:
    from ortlab.torch_ort import ORTModule

    torch.manual_seed(0)
    model = ORTModule(NeuralNet(784, 500, 10))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for data, target in loader():
        y_pred = model(data)
        loss = criterion(y_pred, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    is_that_of_torch(losses)


def test_adamw_is_torchs_for_a_hundred_steps() -> None:
    """The gradients are ORT's, so the last digits differ."""
    model = net()
    reference = copy.deepcopy(model)
    config = optim.AdamConfig(lr=1e-3, lambda_coef=0.1, epsilon=1e-8)
    found = trainer(model, config, utils={"grad_norm_clip": False})
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1)
    for x, y in batches(100):
        loss, _ = found.train_step(x, y)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(reference(x), y)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def plain_step(
    weight: torch.Tensor, gradient: torch.Tensor, mode: str, moments: list[torch.Tensor]
) -> torch.Tensor:
    """Make one step of AdamW from zero moments by its formula, in double precision."""
    lr, decay, eps = 0.1, 0.5, 1e-6
    first, second = moments
    first.mul_(0.9).add_(gradient, alpha=0.1)
    second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    correct = (0.1, 0.001) if mode != "uncorrected" else (1.0, 1.0)
    change = lr * (first / correct[0]) / ((second / correct[1]).sqrt() + eps)
    if mode == "after":
        moved = weight - change
        return moved - lr * decay * moved
    return weight - lr * decay * weight - change


@pytest.mark.parametrize("mode", ["before", "after", "uncorrected"])
def test_the_ways_of_adam(mode: str) -> None:
    model = net()
    before = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    (x, y) = next(batches(1))
    nn.functional.cross_entropy(model(x), y).backward()
    gradients = {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    config = optim.AdamConfig(
        lr=0.1,
        lambda_coef=0.5,
        epsilon=1e-6,
        do_bias_correction=mode != "uncorrected",
        weight_decay_mode=optim.AdamConfig.DecayMode(int(mode == "after")),
    )
    trainer(model, config, utils={"grad_norm_clip": False}).train_step(x, y)
    for name, parameter in model.named_parameters():
        moments = [torch.zeros_like(before[name]) for _ in range(2)]
        expected = plain_step(before[name], gradients[name], mode, moments)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-4, atol=1e-5)


def test_groups_clipping_and_frozen_weights() -> None:
    model = net()
    reference = copy.deepcopy(model)
    group = {"params": ["0.weight"], "lambda_coef": 0.9, "alpha": 0.5}
    config = optim.LambConfig([group], lr=0.1, max_norm_clip=0.01)
    found = trainer(model, config, utils={"frozen_weights": ["3.bias"]})
    (x, y) = next(batches(1))
    for _ in range(3):
        found.train_step(x, y)
    assert torch.equal(model[3].bias, reference[3].bias)
    from ortlab.engines.torch.lamb import Lamb

    reference[3].bias.requires_grad_(False)
    groups = [
        {"params": [reference[0].weight], "weight_decay": 0.9, "betas": (0.5, 0.999)},
        {"params": [reference[3].weight], "weight_decay": 0.0},
        {"params": [reference[0].bias], "weight_decay": 0.0},
    ]
    optimizer = Lamb(groups, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_accumulate_as_a_mean() -> None:
    whole, parts = net(), net()
    once = trainer(whole)
    often = trainer(parts, batch={"gradient_accumulation_steps": 3})
    for x, y in batches(4):
        once.train_step(x, y)
        for i in range(3):
            before = parts[0].weight.detach().clone()
            often.train_step(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
            assert torch.equal(parts[0].weight, before) == (i < 2)
    assert often.state_dict()["train_step_info"] == {"optimization_step": 4, "step": 12}
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_model_with_a_loss_of_its_own() -> None:
    torch.manual_seed(2)
    model = tiny.bert()
    described = {
        "inputs": [
            ("input_ids", ["batch", "length"]),
            ("attention_mask", ["batch", "length"]),
            ("labels", ["batch"]),
        ],
        "outputs": [("logits", ["batch", 2]), ("loss", [], True)],
    }
    found = ORTTrainer(model, described, optim.AdamConfig(lr=1e-3))
    assert found.notes == []
    batch = {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
        "labels": torch.tensor([0, 1]),
    }
    losses = []
    for _ in range(5):
        logits, loss = found.train_step(**batch)
        losses.append(float(loss))
    assert logits.shape == (2, 2)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        expected = model.eval()(**batch)
    logits, loss = found.eval_step(*batch.values())
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-5)


def test_evaluation_has_no_dropout_and_trains_nothing() -> None:
    model = net(dropout=0.9)
    found = trainer(model)
    (x, y) = next(batches(1))
    found.train_step(x, y)
    weights = copy.deepcopy(model.state_dict())
    first, second = found.eval_step(x, y), found.eval_step(x=x.numpy(), label=y)
    assert torch.equal(first[1], second[1])
    model.eval()
    torch.testing.assert_close(first[1], model(x).detach(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_bfloat16_in_place_of_mixed_precision() -> None:
    with pytest.warns(UserWarning, match="mixed precision is bfloat16"):
        found = ORTTrainer(
            net(),
            DESCRIPTION,
            optim.SGDConfig(lr=0.1),
            nn.CrossEntropyLoss(),
            {"mixed_precision": {"enabled": True}},
        )
    low = [float(found.train_step(x, y)[0]) for x, y in batches(5)]
    full = trainer(net())
    assert low == pytest.approx([float(full.train_step(x, y)[0]) for x, y in batches(5)], rel=0.02)


def test_a_step_that_is_not_finite_changes_nothing_and_is_told() -> None:
    model = net()
    found = trainer(model, optim.AdamConfig(lr=0.1))
    (x, y), (after, target) = batches(2)
    found.train_step(x, y)
    before = copy.deepcopy(found.state_dict())
    with pytest.raises(NotFinite, match=r"loss is nan.*step 2.*weights are unchanged"):
        found.train_step(x * math.nan, y)
    for name, value in before["model"]["full_precision"].items():
        assert torch.equal(model.state_dict()[name], value)
    found.train_step(after, target)
    assert not torch.equal(model[0].weight, before["model"]["full_precision"]["0.weight"])


def test_after_a_bad_micro_batch_a_step_begins_anew() -> None:
    found = trainer(net(), batch={"gradient_accumulation_steps": 2})
    alone = trainer(net(), batch={"gradient_accumulation_steps": 2})
    first, (x, y), *more = batches(4)
    for either in (found, alone):
        either.train_step(*first)
        either.train_step(*first)
    with pytest.raises(NotFinite):
        found.train_step(x * math.nan, y)
    for each in more:
        found.train_step(*each)
        alone.train_step(*each)
    assert torch.equal(found.model[0].weight, alone.model[0].weight)


def test_training_is_in_training_mode() -> None:
    found = trainer(net(dropout=0.5))
    (x, y), *_ = batches(1)
    found.model.eval()
    losses = {float(found.train_step(x, y)[0]) for _ in range(4)}
    assert found.model.training
    assert all(part.training for part in found.model)
    assert len(losses) == 4


class Rooted(nn.Module):
    """Its gradient is not finite where the last column of x is zero, while its loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) + (x[:, -1:] ** 2 * self.scale).sqrt()
        return y


def test_a_gradient_that_is_not_finite_counts_as_such() -> None:
    model = Rooted()
    found = trainer(model)
    (x, y), *_ = batches(1)
    found.train_step(x, y)
    before = copy.deepcopy(model.state_dict())
    hollow = x.clone()
    hollow[0, -1] = 0
    with pytest.raises(NotFinite, match=r"loss is \d.* gradient's norm nan in step 2"):
        found.train_step(hollow, y)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


# ---- schedules -----------------------------------------------------------------------------------

SCHEDULES = {
    "constant": (
        optim.lr_scheduler.ConstantWarmupLRScheduler(50, warmup=0.2),
        lambda o: transformers.get_constant_schedule_with_warmup(o, 10),
    ),
    "cosine": (
        optim.lr_scheduler.CosineWarmupLRScheduler(50, warmup=0.2),
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 10, 50),
    ),
    "linear": (
        optim.lr_scheduler.LinearWarmupLRScheduler(50, warmup=0.2),
        lambda o: transformers.get_linear_schedule_with_warmup(o, 10, 50),
    ),
    "polynomial": (
        optim.lr_scheduler.PolyWarmupLRScheduler(50, lr_end=1e-3, power=2.0, warmup=0.2),
        lambda o: transformers.get_polynomial_decay_schedule_with_warmup(
            o, 10, 50, lr_end=1e-3, power=2.0
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_transformers(name: str) -> None:
    ours, make = SCHEDULES[name]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = make(optimizer)
    info = TrainStepInfo(optim.SGDConfig(lr=0.5))
    for step in range(55):
        info.optimization_step = step
        assert ours.get_lr(info) == pytest.approx(theirs.get_last_lr(), rel=1e-12)
        assert ours.get_last_lr() == ours.get_lr(info)
        optimizer.step()
        theirs.step()


def test_a_step_has_the_rate_of_its_schedule() -> None:
    """With constant gradients, the change of the weights shows the learning rate."""
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    described = {"inputs": [("x", ["batch", 8])], "outputs": [("y", ["batch", 1])]}
    schedule = optim.lr_scheduler.LinearWarmupLRScheduler(10, warmup=0.4)
    with pytest.warns(UserWarning, match="names no"):
        found = ORTTrainer(
            model,
            described,
            optim.SGDConfig(lr=0.1),
            lambda y, label: (y * label).mean(),
            {"lr_scheduler": schedule},
        )
    moved = []
    for _ in range(11):
        before = model.weight.detach().clone()
        found.train_step(torch.ones(2, 8), torch.ones(2, 1))
        moved.append(float((before - model.weight)[0, 0].detach()))
    steps = [*np.arange(4) / 4, *(1 - np.arange(7) / 6)]
    assert moved == pytest.approx([0.1 * each for each in steps], abs=1e-6)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.SGDConfig, optim.AdamConfig, optim.LambConfig])
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, optimizer: Any) -> None:
    """Weights, moments, schedule, dropout masks and the user's own data are restored."""

    def made() -> ORTTrainer:
        schedule = optim.lr_scheduler.CosineWarmupLRScheduler(40, warmup=0.1)
        return trainer(
            net(dropout=0.5),
            optimizer(lr=0.05),
            lr_scheduler=schedule,
            batch={"gradient_accumulation_steps": 2},
        )

    torch.manual_seed(11)
    first, data = made(), list(batches(24))
    for batch in data[:12]:
        first.train_step(*batch)
    extra = {"epoch": 3, "seen": torch.arange(4), "note": "half-way"}
    path = first.save_checkpoint(tmp_path / "half.safetensors", extra)
    drawn = torch.rand(3), random.random()
    expected = [float(first.train_step(*batch)[0]) for batch in data[12:]]
    torch.manual_seed(99)
    second = made()
    found = second.load_checkpoint(path)
    assert torch.equal(torch.rand(3), drawn[0]), "what the user draws goes on, too"
    assert random.random() == drawn[1]
    assert (found["epoch"], found["note"]) == (3, "half-way")
    assert torch.equal(found["seen"], torch.arange(4))
    assert [float(second.train_step(*batch)[0]) for batch in data[12:]] == expected
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_without_the_optimizer(tmp_path: Path) -> None:
    found = trainer(net(), optim.AdamConfig(lr=0.1))
    for x, y in batches(3):
        found.train_step(x, y)
    small = found.save_checkpoint(tmp_path / "w.safetensors", include_optimizer_states=False)
    whole = found.save_checkpoint(tmp_path / "all.safetensors")
    moments = 2 * sum(p.nbytes for p in found.model.parameters())
    assert whole.stat().st_size - small.stat().st_size > moments
    other = trainer(net(), optim.AdamConfig(lr=0.7))
    other.load_checkpoint(small)
    assert other.optim_config.lr == 0.1
    assert torch.equal(other.model[0].weight, found.model[0].weight)
    assert other.state_dict()["optimizer"] == {}
    assert other.state_dict()["train_step_info"] == {"optimization_step": 3, "step": 3}


def test_beside_a_gpu_it_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with a GPU present, training uses the requested CPU, the only device of the engine."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        found = trainer(net())
    (x, y), *_ = batches(1)
    expected = nn.functional.cross_entropy(found.model(x), y)
    torch.testing.assert_close(found.train_step(x, y)[0], expected)


def test_state_dict_and_back() -> None:
    found = trainer(net(), optim.AdamConfig(lr=0.1))
    data = list(batches(6))
    for x, y in data[:3]:
        found.train_step(x, y)
    state = found.state_dict()
    assert set(state["optimizer"]["0.weight"]) == {"Moment_1", "Moment_2", "Update_Count"}
    expected = [float(found.train_step(x, y)[0]) for x, y in data[3:]]
    other = trainer(net(), optim.AdamConfig(lr=0.1))
    other.load_state_dict(state)
    assert [float(other.train_step(x, y)[0]) for x, y in data[3:]] == expected
    wrong = {"0.weight": {"Moment_1": torch.zeros(3)}}
    with pytest.raises(
        ValueError, match=r"Moment_1 of shape \[3\] for 0\.weight, whose shape is \[16, 8\]"
    ):
        other.load_state_dict({**state, "optimizer": wrong})
    part = {**state, "model": {"full_precision": {"0.bias": torch.zeros(16)}}, "optimizer": {}}
    with pytest.raises(ValueError, match=r"0\.weight is not in the checkpoint"):
        other.load_state_dict(part)
    other.load_state_dict(part, strict=False)
    assert not other.model[0].bias.any()
    assert other.model[0].weight.any()


def with_lr(kept: Checkpoint, lr: Any) -> Checkpoint:
    return dataclasses.replace(kept, settings={**kept.settings, "learning_rate": lr})


def with_group(kept: Checkpoint, **options: Any) -> Checkpoint:
    (group,) = kept.optimizer["param_groups"]
    return dataclasses.replace(
        kept, optimizer={**kept.optimizer, "param_groups": [{**group, **options}]}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: with_lr(kept, math.nan), "is not a checkpoint of an ORTTrainer"),
        (lambda kept: with_lr(kept, "x"), "is not a checkpoint of an ORTTrainer"),
        (lambda kept: with_group(kept, betas="xx"), "has 'xx' as option 'betas'; use another"),
        (lambda kept: with_group(kept, lr=-1.0), "has -1.0 as option 'lr'; use another"),
        (lambda kept: kept.optimizer["state"][0].pop("step") and kept, r"has \['exp_avg', "),
        (
            lambda kept: kept.position.random.host.zero_().sum() == 0 and kept,
            "the random state of torch is not valid; use another",
        ),
    ],
)
def test_a_forged_checkpoint_changes_nothing(tmp_path: Path, change: Any, message: str) -> None:
    first, second = (trainer(net(), optim.AdamConfig(lr=0.1)) for _ in range(2))
    for batch in batches(3):
        first.train_step(*batch)
    path = first.save_checkpoint(tmp_path / "forged.safetensors")
    change(Checkpoint.load(path).copy()).save(path)
    drawn = RandomStates.now()
    with pytest.raises(ValueError, match=message):
        second.load_checkpoint(path)
    assert RandomStates.now().same_as(drawn)
    assert second.optim_config.lr == 0.1
    assert second.state_dict()["optimizer"] == {}
    assert torch.equal(second.model[0].weight, net()[0].weight)


def test_a_checkpoint_of_another_version_of_torch(tmp_path: Path) -> None:
    """An option that its optimizer did not have is this one's."""
    first, second = (trainer(net(), optim.AdamConfig(lr=0.1)) for _ in range(2))
    data = list(batches(4))
    for batch in data[:3]:
        first.train_step(*batch)
    kept = Checkpoint.load(first.save_checkpoint(tmp_path / "old.safetensors"))
    del kept.optimizer["param_groups"][0]["betas"]
    second.load_checkpoint(kept.save(tmp_path / "older.safetensors"))
    assert torch.equal(second.train_step(*data[3])[0], first.train_step(*data[3])[0])


def test_nothing_is_saved_in_the_middle_of_a_step(tmp_path: Path) -> None:
    found = trainer(net(), batch={"gradient_accumulation_steps": 3})
    found.train_step(*next(batches(1)))
    with pytest.raises(ValueError, match="only 1 of 3 batches of a step were seen; save after"):
        found.save_checkpoint(tmp_path / "x")


def test_graphs_are_saved_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    found = trainer(net(), debug={"graph_save_paths": {"model_with_training_graph_path": path}})
    for batch in batches(2):
        found.train_step(*batch)
    operators = [
        attribute.s.decode()
        for node in onnx.load(path).graph.node
        for attribute in node.attribute
        if attribute.name == "operator"
    ]
    assert operators.count("ortlab_optimizers::sgd") == 4


def test_the_trained_model_is_saved_for_inference(tmp_path: Path) -> None:
    import onnxruntime

    file, model = tmp_path / "net.onnx", net(dropout=0.5)
    found = trainer(model)
    with pytest.raises(ValueError, match="no batch was seen yet"):
        found.save_as_onnx(file)
    for x, y in batches(3):
        found.train_step(x, y)
    found.save_as_onnx(file)
    written = onnx.load(file)
    assert {each.name for each in written.graph.initializer} >= set(model.state_dict())
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("x", ["batch", 8])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("y", ["batch", 3])]
    x = torch.randn(11, 8)
    (given,) = session.run(None, {"x": x.numpy()})
    expected = found.eval_step(x, torch.zeros(11, dtype=torch.long))[1]
    torch.testing.assert_close(torch.from_numpy(given), expected, rtol=1e-4, atol=1e-5)
    assert model.training
    with pytest.raises(ValueError, match="cannot be a file"):
        found.save_as_onnx(tmp_path)


def test_a_model_with_its_own_loss_is_saved_without_it(tmp_path: Path) -> None:
    import onnxruntime

    described = {
        "inputs": [("input_ids", ["batch", "length"]), ("labels", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 2])],
    }
    found = ORTTrainer(tiny.bert(), described, optim.SGDConfig(lr=0.1))
    ids = torch.arange(12).reshape(2, 6)
    _, logits = found.eval_step(ids, torch.tensor([0, 1]))
    found.save_as_onnx(tmp_path / "bert.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "bert.onnx")
    (given,) = session.run(["logits"], {"input_ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(given), logits, rtol=1e-4, atol=1e-5)
    assert [each.name for each in session.get_inputs()] == ["input_ids"]


def test_deterministic_compute_is_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = FusedStep.run

    def run(self: FusedStep, *args: Any, **kwargs: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(FusedStep, "run", run)
    found = trainer(net(), debug={"deterministic_compute": True})
    found.train_step(*next(batches(1)))
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (None, "model_desc must be a dictionary like"),
        ({"inputs": []}, r"model_desc\['inputs'\] must be a list of \(name, sizes\), not \[\]"),
        ({**DESCRIPTION, "output": []}, "has 'output'.*did you mean 'outputs'"),
        ({**DESCRIPTION, "inputs": ["x"]}, r"\['inputs'\]\[0\] must be \(name, sizes\), not 'x'"),
        ({**DESCRIPTION, "inputs": [("x", "batch")]}, "sizes of 'x' must be a list, not 'batch'"),
        ({**DESCRIPTION, "inputs": [("x", ["batch", 0])]}, "'x' has the size 0"),
        ({**DESCRIPTION, "inputs": [(3, [])]}, "must begin with a name, not 3"),
        ({**DESCRIPTION, "outputs": [("x", [])]}, "has 'x' twice"),
        ({**DESCRIPTION, "outputs": [("y", ["batch"], True)]}, "a loss is a scalar"),
        ({**DESCRIPTION, "outputs": [("y", [], 1)]}, "is_loss must be True or False, not 1"),
        ({**DESCRIPTION, "outputs": [("y", [], True), ("z", [], True)]}, "y, z as the loss"),
    ],
)
def test_descriptions(described: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Description.of(described)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": {}}, "'batches'.*did you mean 'batch'"),
        ({"batch": {"gradient_accumulation_steps": 0}}, "must be at least 1"),
        ({"batch": 4}, r"options\['batch'\] must be a dictionary, not 4"),
        ({"device": {"id": "cuda:0"}}, r"trains on a CPU; on a GPU use ortlab\.finetune"),
        ({"lr_scheduler": 3}, r"no get_lr\(info\)"),
        ({"debug": {"graph_save_paths": {"x": "y"}}}, "'x': choose from model_after"),
        ({"utils": {"grad_norm_clip": "yes"}}, "grad_norm_clip='yes' has type str"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTTrainerOptions(options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGDConfig(lr=-1.0), "lr=-1.0 must be at least 0"),
        (lambda: optim.SGDConfig([{"params": ["a"]}]), "SGDConfig has no parameter groups"),
        (lambda: optim.AdamConfig(beta=1.0), "beta=1.0 must be below 1"),
        (lambda: optim.AdamConfig(["a"]), "params has 'a'; use a dictionary"),
        (
            lambda: optim.AdamConfig([{"params": [], "lr": 1}]),
            "a group cannot set its own learning rate",
        ),
        (lambda: optim.AdamConfig([{"params": [], "alfa": 1}]), "did you mean 'alpha'"),
        (lambda: optim.LambConfig(max_norm_clip=0.0), "max_norm_clip=0"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(0), "total_steps=0"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(9, 3), "warmup=3 must be a fraction"),
    ],
)
def test_configurations(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optim_config": None}, r"no optimizer configuration; use one of ortlab\.optim"),
        ({"loss_fn": None}, r"there is no loss: .*y \['batch', 3\].*pass a loss_fn \(criterion\)"),
        ({"model": nn.ReLU()}, "has no parameter that requires a gradient"),
        ({"model": 3}, "the model must be a torch.nn.Module, not 3"),
        (
            {"optim_config": optim.AdamConfig([{"params": ["0.wait"]}])},
            "did you mean '0.weight'",
        ),
        ({"options": {"utils": {"frozen_weights": ["9.bias"]}}}, "frozen_weights has '9.bias'"),
        ({"optim_config": optim.LambConfig(ratio_max=2.0)}, "bounds of the trust ratio"),
    ],
)
@pytest.mark.filterwarnings("ignore:model_desc names no")
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {
        "model": net(),
        "model_desc": DESCRIPTION,
        "optim_config": optim.SGDConfig(),
        "loss_fn": nn.CrossEntropyLoss(),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        ORTTrainer(**given)


def test_batches_that_do_not_fit() -> None:
    found = trainer(net())
    (x, y) = next(batches(1))
    for args, kwargs, message in (
        ((x,), {}, "label is missing; pass x, label"),
        ((x, y, y), {}, "3 inputs were given"),
        ((x,), {"labels": y}, "'labels' is no input.*did you mean 'label'"),
        ((x, y), {"x": x}, "'x' is given twice"),
        ((x[:, :7], y), {}, r"x has shape \[6, 7\], but model_desc requires x \['batch', 8\]"),
        ((x[0], y), {}, r"x has shape \[8\], but model_desc requires x \['batch', 8\]"),
        (([1.0], y), {}, "x is a list, not a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            found.train_step(*args, **kwargs)
    wrong = {**DESCRIPTION, "outputs": [("y", ["batch", 4])]}
    with pytest.warns(UserWarning, match="names no"):
        other = ORTTrainer(net(), wrong, optim.SGDConfig(), nn.CrossEntropyLoss())
    with pytest.raises(
        ValueError, match=r"y has shape \[6, 3\], but model_desc requires y \['batch', 4\]"
    ):
        other.train_step(x, y)


def test_ort_own_classes_serve() -> None:
    """Old programs import ORT's own classes."""
    compat.ortmodule()
    from onnxruntime.training.optim import config, lr_scheduler

    model, other = net(), net()
    theirs = trainer(
        model,
        config.AdamConfig(lr=0.1, lambda_coef=0.5),
        lr_scheduler=lr_scheduler.LinearWarmupLRScheduler(10, warmup=0.2),
    )
    ours = trainer(
        other,
        optim.AdamConfig(lr=0.1, lambda_coef=0.5),
        lr_scheduler=optim.lr_scheduler.LinearWarmupLRScheduler(10, warmup=0.2),
    )
    for x, y in batches(5):
        assert float(theirs.train_step(x, y)[0]) == float(ours.train_step(x, y)[0])
    assert torch.equal(model[0].weight, other[0].weight)


def test_public_names() -> None:
    assert ortlab.ORTTrainer is ORTTrainer
    assert "AFTER_WEIGHT_UPDATE" in optim.AdamConfig.DecayMode.__members__
    assert repr(trainer(net())) == "<ORTTrainer of Sequential after 0 steps>"
