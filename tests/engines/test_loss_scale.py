"""The fp16 loss scale, compared with a manual loop that uses torch.autocast and GradScaler."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.engines.base import Report, StepResult
from ortlab.engines.registry import engine, refusal
from ortlab.engines.torch import stepper as torch_native
from ortlab.engines.torch.stepper import TorchStepper
from ortlab.engines.torch.thread_count import threads
from ortlab.settings import FinetuneSettings
from tests.support.resuming import network

LR = 0.01
Batch = tuple[torch.Tensor, torch.Tensor]


def stepper_for(model: nn.Module, loss: Any = functional.cross_entropy, **values: Any) -> Any:
    settings = FinetuneSettings.of(
        **{"engine": "eager", "precision": "fp16", "device": "cpu", **values}
    )
    return engine("eager").prepare(model, loss, settings)


def batches(count: int, *, bad: tuple[int, ...] = ()) -> Iterator[Batch]:
    """Yield batches; those numbered in `bad` exceed float16's range."""
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        inputs = torch.randn(4, 4, generator=generator)
        yield inputs * (1e6 if i in bad else 1.0), inputs[:, :3].argmax(1)


def state_of(stepper: Any) -> dict[str, torch.Tensor]:
    """Return the weights, statistics and optimizer state."""
    state = stepper.state_dict()
    kept = {
        f"{number} {name}": value
        for number, each in state["optimizer"]["state"].items()
        for name, value in each.items()
    }
    return copy.deepcopy({**state["model"], **kept})


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@threads(1)  # as in the engine: the bits of a norm depend on the number of threads
def by_hand(
    model: nn.Module, steps: list[list[Batch]], scaler: torch.amp.GradScaler, name: str, clip: float
) -> list[tuple[float, float, bool, float]]:
    """Train as torch's mixed precision docs do; return loss, norm, skip and scale of each step."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, lr=LR, momentum=0.9, fused=True)
        if name == "sgd"
        else torch.optim.AdamW(groups, lr=LR, fused=True)
    )
    told = []
    for group in steps:
        optimizer.zero_grad()
        before = copy.deepcopy(dict(model.named_buffers()))
        losses = []
        for inputs, target in group:
            with torch.autocast("cpu", torch.float16):
                loss = functional.cross_entropy(model(inputs), target) / len(group)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([*matrices, *others], clip)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < scale
        if skipped:
            for buffer_name, buffer in model.named_buffers():
                buffer.copy_(before[buffer_name])
        told.append((float(torch.stack(losses).sum()), float(norm), skipped, scaler.get_scale()))
    return told


# torch's own fused SGD uses uninitialized momentum where its first step is skipped.
@pytest.mark.parametrize(("optimizer", "first_scale"), [("adamw", 2.0**24), ("sgd", 2.0**12)])
def test_thirty_steps_are_those_of_a_loop_by_hand(optimizer: str, first_scale: float) -> None:
    """Steps of two clipped micro-batches match, with overflows of the data and of the scale."""
    model = network(0.0)
    reference = copy.deepcopy(model)
    data = list(batches(60, bad=(13, 22, 40)))
    steps = [data[i : i + 2] for i in range(0, 60, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=7)
    stepper = stepper_for(model, optimizer=optimizer, max_grad_norm=0.5)
    stepper.load_state_dict({**stepper.state_dict(), "loss_scale": scaler.state_dict()})
    results: list[StepResult] = [stepper.step(group, lr=LR) for group in steps]
    told = by_hand(reference, steps, scaler, optimizer, clip=0.5)
    for i, (result, (loss, norm, skipped, scale)) in enumerate(zip(results, told, strict=True)):
        assert result.grad_norm is not None
        assert str(float(result.loss)) == str(loss), i  # equal even where both are NaN
        assert str(float(result.grad_norm)) == str(norm), i
        assert (bool(result.skipped), float(result.loss_scale or 0)) == (skipped, scale), i
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert stepper.state_dict()["loss_scale"] == scaler.state_dict()
    assert stepper.finite()
    skips = [i for i, (_, _, skipped, _) in enumerate(told) if skipped]
    assert {6, 11, 20} <= set(skips)
    assert (0 in skips) == (optimizer == "adamw")  # the scale itself overflows
    scales = [scale for _, _, _, scale in told]
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_a_skipped_step_leaves_everything_as_it_was(optimizer: str) -> None:
    good, bad = batches(2, bad=(1,))
    stepper = stepper_for(network(0.0), optimizer=optimizer)
    stepper.step([good], lr=LR)
    before = state_of(stepper)
    assert stepper.step([good, bad], lr=LR).skipped
    assert_same(state_of(stepper), before)
    stepper.step([good], lr=LR)
    assert not torch.equal(state_of(stepper)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_a_first_step_that_is_skipped_is_as_if_it_had_not_been(optimizer: str) -> None:
    """A skipped first step has no effect; torch's fused SGD would use uninitialized momentum."""
    good, bad = batches(2, bad=(1,))
    states = []
    for groups in ([[bad], [good], [good]], [[good], [good]]):
        # Memory returned to the allocator becomes the content of uninitialized memory.
        del (spoilt := [torch.full((n,), math.nan) for n in (16, 48, 64) for _ in range(50)])[:]
        stepper = stepper_for(network(0.0), optimizer=optimizer)
        for group in groups:
            stepper.step(group, lr=LR)
        states.append(state_of(stepper))
        assert not spoilt
    assert_same(*states)


def test_a_loss_that_is_infinite_is_skipped_although_its_gradients_are_not() -> None:
    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, target) + math.inf

    (good,) = batches(1)
    stepper = stepper_for(network(0.0), loss)
    before = state_of(stepper)
    result = stepper.step([good], lr=LR)
    assert result.skipped
    assert float(result.loss_scale) == 2.0**15
    after = state_of(stepper)
    assert_same({name: after[name] for name in before}, before)


def test_a_scale_that_can_fall_no_more_ends_the_training() -> None:
    good, bad = batches(2, bad=(1,))
    stepper = stepper_for(network(0.0))
    for _ in range(16):
        assert stepper.step([bad], lr=LR).skipped
        assert stepper.finite()
    assert stepper.step([good], lr=LR).loss_scale == 1.0
    before = state_of(stepper)
    assert stepper.step([bad], lr=LR).loss_scale == 0.5
    assert not stepper.finite()
    assert stepper.step([good], lr=LR).skipped
    assert_same(state_of(stepper), before)


def test_a_stepper_begins_with_torchs_own_scale_and_takes_one_back() -> None:
    stepper = stepper_for(network(0.0))
    begun = torch.amp.GradScaler("cpu").state_dict()
    assert stepper.state_dict()["loss_scale"] == begun
    state = copy.deepcopy(stepper.state_dict())
    (bad,) = batches(1, bad=(0,))
    stepper.step([bad], lr=LR)
    assert stepper.state_dict()["loss_scale"] == begun | {"scale": 2.0**15}
    stepper.load_state_dict(state)
    assert stepper.state_dict()["loss_scale"] == begun
    stepper.step([bad], lr=LR)
    stepper.load_state_dict({**state, "loss_scale": None})
    assert stepper.state_dict()["loss_scale"] == begun
    assert stepper_for(network(), precision="bf16").state_dict()["loss_scale"] is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_no_step_waits_for_the_device(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step reads a tensor's value, which would wait for the device."""
    stepper: TorchStepper = stepper_for(network(0.0), precision=precision)
    good, bad = batches(2, bad=(1,))
    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu"):

            def waits(*_: Any, name: str = name) -> Any:
                raise AssertionError(f"{name} waits for the device")

            patched.setattr(torch.Tensor, name, waits)
        for group in ([good], [bad], [good, good]):
            stepper.step(group, lr=LR)
    assert stepper.finite()


def test_weights_in_float16_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the model has float16 weights; call model.float\(\)"):
        stepper_for(network().half())


def test_fp16_on_a_cpu_says_what_it_is_for() -> None:
    report = stepper_for(network()).report()
    assert report.remarks == ("fp16 on a CPU is for checking numerics: it is slower than fp32",)
    assert report.notes == report.remarks


def test_bf16_on_a_cpu_without_instructions_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        monkeypatch.setattr(torch_native, "has_instructions", lambda _, has=has: has)
        told = " ".join(stepper_for(network(), precision="bf16").report().remarks)
        assert ("this CPU has no instructions for bf16" in told) == (not has)


@pytest.mark.parametrize("name", ["eager", "compile", "ortmodule"])
def test_tf32_is_refused_on_a_cpu(name: str) -> None:
    chosen = FinetuneSettings.of(engine=name, precision="tf32", device="cpu")
    reason = refusal(chosen)
    assert reason is not None
    assert "precision='tf32' is for CUDA devices" in reason
    assert "choose precision='fp32'" in reason


def test_a_step_computes_in_tf32_backward_too() -> None:
    """Forward and backward run with the TF32 setting; its effect on CUDA is not tested here."""
    seen: list[str] = []

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        if scores.requires_grad:
            scores.register_hook(lambda _: seen.append(torch.get_float32_matmul_precision()))
        return functional.cross_entropy(scores, target)

    settings, model = FinetuneSettings.of(engine="eager", precision="tf32"), network(0.0)
    cpu, report = torch.device("cpu"), lambda: Report("eager")
    stepper = TorchStepper(model, loss, settings, owner=model, device=cpu, report=report)
    (batch,) = batches(1)
    stepper.step([batch], lr=LR)
    stepper.evaluate(batch)
    assert seen == ["high"] * 3
    assert torch.get_float32_matmul_precision() == "highest"


def test_tf32_is_given_back_after_a_failure() -> None:
    before = torch.get_float32_matmul_precision()

    def fail() -> None:
        with torch_native._tf32():
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            with torch_native._tf32():
                pass
            assert torch.get_float32_matmul_precision() == "high"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_float32_matmul_precision() == before != "high"
