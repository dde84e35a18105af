"""The fused step in a single graph matches torch's step: weights, moments and statistics."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.export_pool import CachedExport, ExportFailed
from ortlab.engines.ortmodule.fused_engine import FusedStepper
from ortlab.engines.ortmodule.kernels import optimizers
from ortlab.engines.registry import engine, engine_for
from ortlab.session import session
from ortlab.settings import FinetuneSettings
from ortlab.training.settings_preview import foreseen
from tests.support import tiny
from tests.support.waiting import until

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
pytestmark = [needs_ort, pytest.mark.usefixtures("one_thread")]

OPTIMIZERS = ("adamw", "sgd", "lamb")


def sentences(number: int, length: int = 9) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(4)
    return [
        {
            "input_ids": torch.randint(0, 50, (4, length), generator=made),
            "attention_mask": torch.ones(4, length, dtype=torch.long),
            "labels": torch.randint(0, 2, (4,), generator=made),
        }
        for _ in range(number)
    ]


def settings(name: str = "ort_fused", **changes: Any) -> FinetuneSettings:
    chosen = {"device": "cpu", "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, **changes}
    return FinetuneSettings.of(engine=name, **chosen)


def stepper(model: nn.Module, loss: Any = None, **changes: Any) -> FusedStepper:
    made = engine_for(settings(**changes)).prepare(model, loss, settings(**changes))
    assert isinstance(made, FusedStepper)
    return made


# ---- the operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [math.inf, 0.5])
@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum", "lamb"])
def test_an_operator_steps_as_the_optimizer_does(name: str, clip_norm: float) -> None:
    """Ten steps over a matrix and a vector match bit for bit; LAMB up to the last digits."""
    from ortlab.engines.torch.lamb import Lamb

    torch.manual_seed(1)
    values = [torch.randn(7, 5), torch.randn(5)]
    ours = [value.clone() for value in values]
    theirs = [nn.Parameter(value.clone()) for value in values]
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in theirs]
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    elif name == "lamb":
        optimizer = Lamb(groups, lr=1e-2)
    else:
        momentum = 0.9 * (name == "momentum")
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=momentum, fused=True)
    kept = [[torch.zeros_like(v) for _ in range(2)] for v in values]
    steps, bad = [torch.zeros(()) for _ in values], torch.zeros(())
    for _ in range(10):
        gradients = [torch.randn_like(value) for value in values]
        norms = torch.cat([optimizers.norm(each) for each in gradients])
        wishes = torch.tensor([clip_norm, 1.0])
        verdict = optimizers.judge(norms, torch.tensor(1.0), bad, wishes)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        assert verdict[0] == nn.utils.clip_grad_norm_(theirs, clip_norm, foreach=False)
        optimizer.step()
        for i, (weight, gradient) in enumerate(zip(ours, gradients, strict=True)):
            decay = 0.1 * (weight.dim() > 1)
            rates = {
                "adamw": [1e-2, decay, 0.9, 0.999, 1e-8, 1.0, 0.0],
                "lamb": [1e-2, decay, 0.9, 0.999, 1e-6, float(weight.dim() < 2)],
                "sgd": [1e-2, decay],
                "momentum": [1e-2, decay, 0.9],
            }[name]
            state = {
                "adamw": [*kept[i], steps[i]],
                "lamb": kept[i],
                "sgd": [],
                "momentum": kept[i][:1],
            }[name]
            operator = getattr(optimizers, name)
            operator(weight, gradient, *state, verdict, torch.tensor(rates, dtype=torch.float64))
    for weight, parameter, value in zip(ours, theirs, values, strict=True):
        exact = {"rtol": 1e-6, "atol": 1e-7} if name == "lamb" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(weight, parameter.detach(), **exact)
        assert not torch.equal(weight, value)


def test_a_bad_step_stays_bad_and_moves_nothing() -> None:
    weight, bad = torch.ones(3), torch.zeros(())
    wishes, rates = torch.tensor([math.inf, 1.0]), torch.tensor([0.1, 0.0], dtype=torch.float64)
    for loss, norm in ((math.nan, 1.0), (1.0, 1.0)):
        verdict = optimizers.judge(torch.tensor([norm]), torch.tensor(loss), bad, wishes)
        assert not optimizers.sgd(weight, torch.ones(3), verdict, rates).any()
    assert bad
    assert torch.equal(weight, torch.ones(3))
    bad.zero_()
    part = torch.tensor([math.inf, 0.0])  # of a step whose last micro-batch has not run yet
    verdict = optimizers.judge(torch.tensor([math.inf]), torch.tensor(1.0), bad, part)
    assert not optimizers.sgd(weight, torch.ones(3), verdict, rates).any()
    assert not bad


# ---- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro", "clip_norm"), [(1, None), (2, 0.5)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_engine_ort(optimizer: str, micro: int, clip_norm: float | None) -> None:
    """Gradients come from the same graph; only the optimizer step differs."""
    data, chosen = sentences(8), {"optimizer": optimizer, "max_grad_norm": clip_norm}
    found = {}
    for name in ("ortmodule", "ort_fused"):
        torch.manual_seed(2)
        model = tiny.bert()
        made = engine(name).prepare(model, None, settings(name, **chosen))
        results = [made.step(data[i : i + micro], lr=1e-2) for i in range(0, 8, micro)]
        found[name] = (
            [float(each.loss) for each in results],
            [float(each.grad_norm) for each in results if each.grad_norm is not None],
            made.state_dict(),
        )
        assert made.report().engine_used == name
        made.close()
    assert found["ort_fused"][0] == pytest.approx(found["ortmodule"][0], rel=1e-6)
    assert found["ort_fused"][1] == pytest.approx(found["ortmodule"][1], rel=1e-5)
    ours, theirs = found["ort_fused"][2], found["ortmodule"][2]
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-4, atol=2e-5)
    assert ours["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for number, state in theirs["optimizer"]["state"].items():
        assert ours["optimizer"]["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(
                ours["optimizer"]["state"][number][key], value, rtol=1e-3, atol=1e-5
            )


def test_a_step_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step calls neither torch's optimizer nor autograd."""
    model, data = tiny.bert(), sentences(2)
    made = stepper(model)
    made.step(data[:1], lr=1e-2)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    monkeypatch.setattr(torch.Tensor, "backward", fail)
    before = model.classifier.weight.detach().clone()
    version = model.classifier.weight._version
    made.step(data[1:], lr=1e-2)
    assert not torch.equal(model.classifier.weight, before)
    assert model.classifier.weight._version > version, "autograd has to know"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "its time is shown under forward" in made.report().remarks[0]


def test_state_goes_to_eager_and_back_without_a_trace() -> None:
    """Six steps in one engine match two each in offload, eager and offload."""
    data, runs = sentences(6), []
    for names in (("ort_fused",) * 3, ("ort_fused", "eager", "ort_fused")):
        torch.manual_seed(2)
        model, state, losses = tiny.bert(), None, []
        for turn, name in enumerate(names):
            made = engine(name).prepare(model, None, settings(name))
            if state is not None:
                made.load_state_dict(state)
            pair = data[2 * turn : 2 * turn + 2]
            losses += [float(made.step([each], lr=1e-3).loss) for each in pair]
            state = copy.deepcopy(made.state_dict())
            made.close()
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert len(set(runs[0])) == 6


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    """The engine finds moments whose memory address has changed."""
    data = sentences(6)
    torch.manual_seed(2)
    model = tiny.bert()
    made = stepper(model)
    for batch in data[:3]:
        made.step([batch], lr=1e-3)
    kept = copy.deepcopy(made.state_dict())
    after = [float(made.step([batch], lr=1e-3).loss) for batch in data[3:]]
    made.load_state_dict(kept)
    assert [float(made.step([batch], lr=1e-3).loss) for batch in data[3:]] == after


def test_weights_that_moved_are_found() -> None:
    """The engine finds weights that model.to() or an assigning load has moved."""
    model, data = nn.Sequential(nn.Linear(4, 3)), torch.ones(2, 4)
    made = stepper(model, lambda scores, _: scores.square().mean(), optimizer="sgd")
    made.step([(data, data)], lr=0.1)
    layer = model[0]
    layer.weight.data = torch.full_like(layer.weight, 0.5)
    before = layer.weight.detach().clone()
    made.step([(data, data)], lr=0.1)
    assert not torch.equal(layer.weight, before)
    layer.bias.data.zero_()
    made.step([(data, data)], lr=0.0)
    assert not layer.bias.any()


class Two(nn.Module):
    """A gradient that two biases share, and a weight that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.more = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.more


def test_shared_gradients_and_unused_weights() -> None:
    models = {}
    for name in ("eager", "ort_fused"):
        torch.manual_seed(5)
        models[name] = model = Two()
        chosen = settings(name, max_grad_norm=0.01, optimizer="sgd")
        made = engine(name).prepare(model, nn.functional.cross_entropy, chosen)
        for _ in range(3):
            made.step([(torch.ones(2, 4), torch.tensor([0, 2]))], lr=0.5)
        held = {tuple(p.shape) for p in made._optimizer.state}
        assert (3, 3) not in held
    for name, value in models["eager"].state_dict().items():
        torch.testing.assert_close(models["ort_fused"].state_dict()[name], value)
    assert torch.equal(models["ort_fused"].unused, torch.ones(3, 3))
    assert models["ort_fused"].more.any()


class Normed(nn.Module):
    """A model that keeps statistics of its input and counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.layer(x)))
        return y


def test_statistics_and_counters_are_torchs_and_stay_finite() -> None:
    models = {}
    data = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
    for name in ("eager", "ort_fused"):
        torch.manual_seed(5)
        models[name] = model = Normed()
        chosen = settings(name, optimizer="sgd")  # AdamW amplifies a gradient's rounding
        made = engine(name).prepare(model, nn.functional.cross_entropy, chosen)
        for x in data:
            made.step([(x, torch.arange(6) % 3)], lr=0.01)
    for name, value in models["eager"].state_dict().items():
        torch.testing.assert_close(models["ort_fused"].state_dict()[name], value)
    assert model.norm.num_batches_tracked == 3
    before = copy.deepcopy(model.state_dict())
    result = made.step([(data[0] * math.nan, torch.arange(6) % 3)], lr=0.01)
    assert math.isnan(result.loss)
    for name, value in before.items():
        if value.is_floating_point():
            assert torch.equal(model.state_dict()[name], value), name


def test_micro_batches_may_begin_later_and_are_told() -> None:
    """Gradients that wait for later micro-batches take memory; a step of one batch needs none."""
    data, found = sentences(6), {}
    for name in ("ortmodule", "ort_fused"):
        torch.manual_seed(2)
        made = engine(name).prepare(tiny.bert(), None, settings(name))
        parts = (data[:1], data[1:3], data[3:4], data[4:])
        found[name] = [float(made.step(part, lr=1e-2).loss) for part in parts]
        if name == "ort_fused":
            held = made.bytes()
            assert held.gradients == held.parameters
    assert found["ort_fused"] == pytest.approx(found["ortmodule"], rel=1e-5)
    torch.manual_seed(2)
    alone = stepper(tiny.bert())
    alone.step(data[:1], lr=1e-2)
    assert alone.bytes().gradients == 0


def test_one_session_keeps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The separate session that checked the graph is released while the whole step runs."""
    rested: list[CachedExport] = []
    monkeypatch.setattr(CachedExport, "rest", lambda served: rested.append(served))
    made = stepper(tiny.bert())
    for batch in sentences(2):
        made.step([batch], lr=1e-2)
    assert len(rested) == 1


def test_bf16_and_recompute_hold_in_it() -> None:
    data, losses = sentences(3), {}
    for name, changes in {
        "plain": {},
        "bf16": {"precision": "bf16"},
        "recompute": {"recompute": "bert.encoder.layer.*"},
    }.items():
        torch.manual_seed(2)
        made = stepper(tiny.bert(), **changes)
        losses[name] = [float(made.step([each], lr=1e-3).loss) for each in data]
        made.close()
    assert losses["recompute"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=2e-2)
    assert losses["bf16"] != losses["plain"]


def test_a_run_foresees_its_memory_and_changes_its_engine() -> None:
    run = ortlab.finetune(tiny.bert(), sentences(6) * 20, engine="ort_fused", device="cpu")
    until(lambda: run.step > 2)
    run.apply(engine="eager")
    until(lambda: run.report.engine_used == "eager")
    run.apply(engine="ort_fused")
    until(lambda: run.report.engine_used == "ort_fused" and run.step > 20)
    run.stop()
    run.result(60)
    plan, made_with = session.plan_for(run, run.current_settings)
    small, why = foreseen(plan, made_with, run.current_settings)
    large, _ = foreseen(plan, made_with, run.current_settings, batch=64)
    assert not why
    assert small is not None
    assert large is not None
    assert 16 * sum(p.numel() for p in tiny.bert().parameters()) < small < large
    changes = run.recorder.events("change")
    assert len(changes) == 2
    notes = [event.text for event in run.recorder.events("note")]
    assert sum("exporting" in note for note in notes) == 1, "the graph was kept"


class Doubled(torch.autograd.Function):
    """A function with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 3 * gradients[0]


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Doubled.apply(super().forward(x))
        return found


class Decides(nn.Linear):
    """A layer that branches on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_refused() -> None:
    made = stepper(Decides(4, 3), nn.functional.cross_entropy)
    batch = (torch.ones(2, 4), torch.tensor([0, 2]))
    with pytest.raises(ExportFailed, match=r"decides by a tensor's value.*use engine='ortmodule'"):
        made.step([batch], lr=0.1)
    made = stepper(Own(4, 3), nn.functional.cross_entropy)
    with pytest.raises(ExportFailed, match=r"Doubled.* runs in Python.*use engine='ortmodule'"):
        made.step([batch], lr=0.1)
    hooked = nn.Linear(4, 3)
    hooked.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match="weight has a hook on its gradient"):
        stepper(hooked, nn.functional.cross_entropy)
    for changes, message in (
        ({"precision": "fp16"}, "needs loss scaling"),
        ({"workers": 2}, "trains in one process"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_for(settings(**changes))


def test_a_model_that_changes_with_every_call_is_refused() -> None:
    calls = []

    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(calls))
            if x.shape[0] > 1000:  # a branch on sizes gets one more check against forward
                return super().forward(-x)
            return super().forward(x)

    made = stepper(Counts(4, 3), nn.functional.cross_entropy)
    with pytest.raises(ExportFailed, match=r"changes the model \(.*calls.*\) with every call"):
        made.step([(torch.randn(6, 4), torch.arange(6) % 3)], lr=0.1)


def test_a_fallback_is_torch_with_the_same_state() -> None:
    """A forward that ORT cannot run continues in torch and reports that."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.fft.fft(x).abs())

    made = stepper(Sparse(), nn.functional.cross_entropy, fallback=True)
    losses = [
        float(made.step([(torch.eye(4)[:2], torch.tensor([0, 2]))], lr=0.1).loss) for _ in range(3)
    ]
    assert losses[2] < losses[0]
    report = made.report()
    assert report.engine_used == "eager"
    assert report.fallback_reason
