"""Optimizers and schedulers of the user's own in runs, compared with plain loops of torch."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import NotFinite
from ortlab.metrics.recorder import INDEX
from ortlab.session import session
from ortlab.training import settings_preview
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S, until

STEPS = 24
Make = Callable[..., Any]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    inputs = torch.randn(10 * count, 6, generator=drawn)
    targets = torch.randint(0, 4, (10 * count,), generator=drawn)
    return list(zip(inputs.split(10), targets.split(10), strict=True))


BATCHES = pairs(STEPS)
HELD_OUT = pairs(3)
CHOSEN: dict[str, Any] = {"loss": "cross_entropy", "engine": "eager", "device": "cpu"}


def train(model: nn.Module, optimizer: Any = None, scheduler: Any = None, **more: Any) -> Run:
    run = ortlab.finetune(
        model, BATCHES, optimizer=optimizer, lr_scheduler=scheduler, **{**CHOSEN, **more}
    )
    run.result(HANGS_S)
    return run


def plain(model: nn.Module, optimizer: Any, scheduler: Any, steps: int = STEPS) -> None:
    """Train as users do in a loop of their own."""
    for inputs, targets in BATCHES[:steps]:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def rates(run: Run) -> list[float]:
    return run.recorder.rows()[:, INDEX["lr"]].tolist()


def groups(model: nn.Module, **first: Any) -> list[dict[str, Any]]:
    head, *_, tail = model.children()
    return [
        {"params": tail.parameters(), "lr": 0.02, "weight_decay": 0.1, **first},
        {"params": head.parameters(), "lr": 0.005},
    ]


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
OPTIMIZERS: dict[str, Make] = {
    "sgd": sgd,
    "radam": torch.optim.RAdam,
    "adafactor": torch.optim.Adafactor,
    "adagrad": lambda parameters: torch.optim.Adagrad(iter(parameters), lr=0.05),
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.5),
    "fused adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}
SCHEDULERS: dict[str, Make] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=4),
            lr_scheduler.MultiStepLR(optimizer, [6, 8]),
        ],
        [4],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_a_plain_loop(name: str, schedule: str) -> None:
    model, other = net(), net()
    optimizer = OPTIMIZERS[name](list(other.parameters()))
    plain(other, optimizer, SCHEDULERS[schedule](optimizer))
    run = train(model, OPTIMIZERS[name], SCHEDULERS[schedule])
    assert torch.equal(weights(model), weights(other))
    kind = type(optimizer).__name__
    assert run.settings.optim.optimizer == f"own {kind}"
    assert run.settings.optim.learning_rate == pytest.approx(
        optimizer.param_groups[0]["initial_lr"]
    )


@pytest.mark.parametrize("engine", ["eager", "compile", "ort", "ortmodule"])
def test_every_engine_steps_them(engine: str) -> None:
    needs(engine)
    model, other = net(), net()
    one_cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS)
    optimizer = torch.optim.AdamW(groups(other))
    plain(other, optimizer, one_cycle(optimizer))
    own = torch.optim.AdamW(groups(model))
    run = train(model, own, one_cycle(own), engine=engine)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-3, atol=1e-5)
    assert rates(run)[0] == pytest.approx(0.05 / 25)
    assert max(rates(run)) == pytest.approx(0.05, rel=0.01)


def test_an_engine_that_is_changed_in_mid_run_keeps_the_state() -> None:
    needs("ort")
    model, other = net(), net()
    optimizer = sgd(other.parameters())
    plain(other, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.9))
    own = sgd(model.parameters())
    slow = Slow(BATCHES)
    run = ortlab.finetune(
        model, slow, optimizer=own, lr_scheduler=lr_scheduler.ExponentialLR(own, 0.9), **CHOSEN
    )
    outcome = slow.at(10, lambda: run.apply(engine="ort"))
    run.result(HANGS_S)
    assert outcome().result(HANGS_S).state == "applied"
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-6)


class Slow:
    """Batches, before one of which something is called."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._waiting: dict[int, Callable[[], Any]] = {}
        self._ready = threading.Event()
        self._found: list[Any] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterable[Any]:
        for number, batch in enumerate(self._batches):
            if number == 10:
                assert self._ready.wait(HANGS_S)
                self._found.append(self._waiting[number]())
            yield batch

    def at(self, number: int, call: Callable[[], Any]) -> Callable[[], Any]:
        self._waiting[number] = call
        self._ready.set()
        return lambda: self._found[0]


# ---- parameter groups ----------------------------------------------------------------------------


def test_the_schedule_of_the_settings_scales_every_group() -> None:
    model, other = net(), net()
    optimizer = torch.optim.AdamW(groups(other))
    down = lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    plain(other, optimizer, down)
    own = torch.optim.AdamW(groups(model))
    run = train(model, own)
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-6, atol=1e-7)
    assert run.settings.optim.learning_rate == 0.02
    assert run.settings.optim.weight_decay == 0.1
    assert rates(run) == pytest.approx([0.02 * (1 - step / STEPS) for step in range(STEPS)])
    assert [group["lr"] for group in own.param_groups] == [0.02, 0.005], "its own, for a next run"
    assert [group["weight_decay"] for group in own.param_groups] == [0.1, 0.01]


def test_a_change_of_the_rate_scales_every_group() -> None:
    model = net()
    own = torch.optim.SGD(groups(model))
    slow = Slow(BATCHES)
    seen: list[list[float]] = []
    own.register_step_pre_hook(lambda *_: seen.append([g["lr"] for g in own.param_groups]))
    run = ortlab.finetune(model, slow, optimizer=own, schedule="constant", **CHOSEN)
    slow.at(10, lambda: run.apply(lr=0.04))
    with pytest.raises(ValueError, match="the groups of your optimizer have their own"):
        run.apply(weight_decay=0.3)
    run.result(HANGS_S)
    assert seen[:10] == [[0.02, 0.005]] * 10
    assert seen[11:] == [[0.04, pytest.approx(0.01)]] * (STEPS - 11)


def test_a_scheduler_of_your_own_determines_the_rate() -> None:
    model = net()
    own = sgd(model.parameters())
    slow = Slow(BATCHES)
    run = ortlab.finetune(
        model, slow, optimizer=own, lr_scheduler=lr_scheduler.StepLR(own, 10), **CHOSEN
    )
    for name, value in {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 3}.items():
        with pytest.raises(ValueError, match="your lr_scheduler sets the learning rate"):
            run.apply(**{name: value})
    slow.at(10, lambda: None)
    run.result(HANGS_S)
    assert rates(run) == pytest.approx([0.1] * 10 + [0.01] * 10 + [0.001] * 4)
    assert run.settings.optim.lr_scheduler_type == "own StepLR"


def test_options_of_a_class_may_be_settings() -> None:
    run = train(net(), torch.optim.RAdam, learning_rate=0.03, weight_decay=0.2)
    assert run.settings.optim.learning_rate == 0.03
    assert run.settings.optim.weight_decay == 0.2
    assert rates(run)[0] == 0.03


def test_a_scheduler_may_drive_the_optimizer_of_the_settings() -> None:
    model, other = net(), net()
    run = train(model, "sgd", lambda optimizer: lr_scheduler.StepLR(optimizer, 8), lr=0.1)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in other.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in other.parameters() if p.dim() == 1]},
        ],
        lr=0.1,
        momentum=0.9,
        fused=True,
    )
    plain(other, optimizer, lr_scheduler.StepLR(optimizer, 8))
    assert torch.equal(weights(model), weights(other))
    assert run.settings.optim.optimizer == "sgd"


# ---- state ---------------------------------------------------------------------------------------


def test_an_optimizer_that_was_trained_before_goes_on_and_is_the_users_afterwards() -> None:
    model, other = net(), net()
    own, optimizer = sgd(model.parameters()), sgd(other.parameters())
    schedule = lr_scheduler.StepLR(own, 30)
    plain(model, own, schedule, steps=5)
    scheduled = lr_scheduler.StepLR(optimizer, 30)
    plain(other, optimizer, scheduled, steps=5)
    plain(other, optimizer, scheduled)
    train(model, own, schedule)
    assert torch.equal(weights(model), weights(other))
    assert schedule.state_dict() == scheduled.state_dict()
    plain(model, own, schedule, steps=5)
    plain(other, optimizer, scheduled, steps=5)
    assert torch.equal(weights(model), weights(other)), "it can be used in a loop again"


def test_a_move_that_replaces_the_parameters_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    model = net()
    with pytest.raises(RuntimeError, match="moving the model to its device replaced its param"):
        train(model, sgd(model.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_is_over_lets_go_of_them(precision: str) -> None:
    model = net()
    own = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = lr_scheduler.StepLR(own, 3)
    run = train(model, own, schedule, precision=precision)
    assert not {"found_inf", "grad_scale"} & vars(own).keys(), "else later steps were skipped"
    known = [weakref.ref(own), weakref.ref(schedule)]
    del own, schedule
    gc.collect()
    assert [each() for each in known] == [None, None]
    assert run.state == "finished"


@pytest.mark.parametrize("name", ["sgd", "fused adamw", "adafactor"])
def test_steps_that_loss_scaling_skips_are_steps_of_neither(name: str) -> None:
    def large(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 50 * functional.cross_entropy(output, target)

    model = net()
    own = OPTIMIZERS[name](model.parameters())
    schedule = lr_scheduler.ExponentialLR(own, 0.5)
    run = train(model, own, schedule, precision="fp16", loss=large)
    made = schedule.last_epoch
    assert 0 < made < STEPS
    assert len(set(rates(run))) in (made, made + 1), "the last step may change the rate, too"
    assert float(own.state_dict()["state"][0].get("step", made)) == made


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    def breaks(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        loss = functional.cross_entropy(output, target)
        return loss * torch.nan if len(calls) > 6 else loss

    calls: list[None] = []
    model, other = net(), net()
    own = sgd(model.parameters())
    with pytest.raises(NotFinite, match=r"the loss became NaN at step 7 .*, in breaks"):
        train(model, own, loss=breaks, schedule="constant")
    plain(other, sgd(other.parameters()), None, steps=6)
    assert torch.equal(weights(model), weights(other))


def test_a_scheduler_that_raises_ends_the_run_after_its_step() -> None:
    model, other = net(), net()
    own, optimizer = sgd(model.parameters()), sgd(other.parameters())
    short = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)
    with pytest.raises(ValueError, match="Tried to step 11 times"):
        train(model, own, short(own))
    scheduled = short(optimizer)
    plain(other, optimizer, scheduled, steps=10)
    plain_step = BATCHES[10]
    optimizer.zero_grad()
    functional.cross_entropy(other(plain_step[0]), plain_step[1]).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    optimizer.step()
    assert torch.equal(weights(model), weights(other))
    assert session.last_run is not None
    assert (session.last_run.state, session.last_run.step) == ("failed", 11)


# ---- ReduceLROnPlateau ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep_best", [None, "accuracy"])
def test_reduce_on_plateau_follows_the_evaluations(keep_best: str | None) -> None:
    model, other = net(), net()
    mode = "min" if keep_best is None else "max"
    plateau = functools.partial(
        lr_scheduler.ReduceLROnPlateau, mode=mode, patience=0, factor=0.5, threshold=0.05
    )
    optimizer = sgd(other.parameters())
    scheduled = plateau(optimizer)
    inputs, targets = (torch.cat(each) for each in zip(*HELD_OUT, strict=True))
    expected = []
    for place in range(0, STEPS, 4):
        expected += [optimizer.param_groups[0]["lr"]] * 4
        for x, y in BATCHES[place : place + 4]:
            optimizer.zero_grad()
            functional.cross_entropy(other(x), y).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
        output = other(inputs).detach()
        loss = float(functional.cross_entropy(output, targets))
        accuracy = float((output.argmax(1) == targets).float().mean())
        scheduled.step(loss if keep_best is None else accuracy)
    chosen: dict[str, Any] = {"eval_dataset": HELD_OUT, "eval_steps": 4, "keep_best": keep_best}
    run = train(model, sgd, plateau, **chosen)
    assert "keep_best" in run.fixed
    assert rates(run) == pytest.approx(expected)
    assert len(set(expected)) > 1
    assert torch.equal(weights(model), weights(other))


# ---- resume --------------------------------------------------------------------------------------

RESUMED: dict[str, tuple[Make, Make]] = {
    "sgd one cycle": (
        lambda model: sgd(model.parameters()),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS),
    ),
    "radam plateau": (
        lambda model: torch.optim.RAdam(model.parameters()),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1),
    ),
    "groups one cycle": (
        lambda model: torch.optim.AdamW(groups(model)),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=STEPS),
    ),
    "groups multi step": (
        lambda model: torch.optim.AdamW(groups(model, betas=(0.8, 0.9))),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, total_iters=3),
                lr_scheduler.MultiStepLR(optimizer, [4, 9, 14]),
            ],
            [7],
        ),
    ),
    "sgd linear": (lambda model: sgd(model.parameters()), lambda _: None),
    "groups linear": (lambda model: torch.optim.AdamW(groups(model)), lambda _: None),
}


class Saves(ortlab.Callback):
    """Saves two checkpoints at once; those of ``save_steps`` may be skipped on a slow disk."""

    def on_step_end(self, run: Run) -> None:
        if run.step in (5, 10):
            run.checkpoint()


def course(name: str, **more: Any) -> tuple[Run, nn.Sequential]:
    """Return the run, begun, of fresh objects."""
    make_optimizer, make_scheduler = RESUMED[name]
    model = net()
    optimizer = make_optimizer(model)
    chosen = {**CHOSEN, "eval_dataset": HELD_OUT, "eval_steps": 3, **more}
    run = ortlab.finetune(
        model, BATCHES, optimizer=optimizer, lr_scheduler=make_scheduler(optimizer), **chosen
    )
    return run, model


def finished(name: str, **more: Any) -> list[float]:
    run, model = course(name, **more)
    run.result(HANGS_S)
    return weights(model).tolist()


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_exact(name: str) -> None:
    whole = finished(name)
    run, _ = course(name, callbacks=Saves())
    run.result(HANGS_S)
    kept = {each.name: each.path for each in run.checkpoints}
    assert finished(name, resume_from=kept["step-10"]) == whole
    assert finished(name, resume_from=Checkpoint.load(kept["step-5"])) == whole


def test_a_run_is_resumed_exactly_in_a_new_process() -> None:
    names = list(RESUMED)[:3]
    whole, kept = {}, {}
    for name in names:
        run, model = course(name, callbacks=Saves())
        run.result(HANGS_S)
        whole[name] = weights(model).tolist()
        (path,) = [each.path for each in run.checkpoints if each.name == "step-10"]
        kept[name] = str(path)
    code = (
        "import json, sys; from tests.training import test_own_optimizers as t;"
        "print(json.dumps({n: t.finished(n, resume_from=p) for n, p in "
        "json.loads(sys.argv[1]).items()}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(kept)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=HANGS_S,
    )
    assert json.loads(found.stdout.splitlines()[-1]) == whole


def test_resume_finds_them_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    def stopped(*, begin: bool) -> tuple[nn.Module, Any]:
        model = net()
        opt = sgd(model.parameters())
        sched = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=STEPS)
        names = {"model": model, "batches": BATCHES, "opt": opt, "sched": sched}
        for name, value in names.items():
            monkeypatch.setattr(__main__, name, value, raising=False)
        if not begin:
            return model, None
        slow = Slow(BATCHES)
        monkeypatch.setattr(__main__, "batches", slow)
        run = ortlab.finetune(model, slow, optimizer=opt, lr_scheduler=sched, **CHOSEN)
        slow.at(10, run.stop)
        run.result(HANGS_S)
        return model, run

    whole, other = net(), None
    other = sgd(whole.parameters())
    plain(whole, other, lr_scheduler.OneCycleLR(other, max_lr=0.1, total_steps=STEPS))
    model, run = stopped(begin=True)
    assert run.state == "stopped"
    monkeypatch.setattr(__main__, "batches", BATCHES)
    again = ortlab.resume(run.name)
    again.result(HANGS_S)
    assert torch.equal(weights(model), weights(whole)), "with the same objects"

    _, run = stopped(begin=True)
    model, _ = stopped(begin=False)
    monkeypatch.delattr(__main__, "sched")
    with pytest.raises(ValueError, match=r"cannot continue without sched \(its lr_scheduler\)"):
        ortlab.resume(run.name)
    bound = lr_scheduler.OneCycleLR(__main__.opt, max_lr=0.1, total_steps=STEPS)
    ortlab.resume(run.name, lr_scheduler=bound).result(HANGS_S)
    assert torch.equal(weights(model), weights(whole)), "with objects that were created anew"


def test_a_checkpoint_asks_for_them() -> None:
    model = net()
    run = train(model, sgd, lambda optimizer: lr_scheduler.StepLR(optimizer, 3), max_steps=5)
    own = sgd(model.parameters())
    with pytest.raises(ValueError, match="optimizer is an object of yours, SGD, which a file"):
        train(model, resume_from=run)
    with pytest.raises(ValueError, match="lr_scheduler is an object of yours, StepLR, "):
        train(model, own, resume_from=run)
    with pytest.raises(ValueError, match="optimizer='own RAdam' does not match the checkpoint"):
        train(
            model,
            torch.optim.RAdam,
            lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
            resume_from=run,
        )
    with pytest.raises(ValueError, match="lr_scheduler_type='own ExponentialLR' does not match"):
        train(model, own, lr_scheduler.ExponentialLR(own, 0.9), resume_from=run)
    two = torch.optim.SGD(groups(model), momentum=0.9)
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, and this one of \[2, 2\]"):
        train(model, two, lr_scheduler.StepLR(two, 3), resume_from=run)
    with pytest.raises(ValueError, match=r"learning_rate=0\.1 is given besides lr_scheduler"):
        train(model, own, lr_scheduler.StepLR(own, 3), resume_from=run, lr=0.1)


# ---- bad inputs ----------------------------------------------------------------------------------


class NoStep:
    """A scheduler that forgot its method, but can be called."""

    def __call__(self, optimizer: Any) -> Any:
        return self


class NeedsEpoch(lr_scheduler.StepLR):
    """A scheduler in the form of timm's."""

    def step(self, epoch: int) -> None:  # type: ignore[override]
        super().step()


class Unstorable(lr_scheduler.StepLR):
    """A scheduler whose state has a function."""

    def __init__(self, optimizer: Any) -> None:
        self.rule = lambda: 1
        super().__init__(optimizer, 3)


FOREIGN = net()
BAD: dict[str, tuple[Make, str]] = {
    "a number": (lambda _: {"optimizer": 3}, "optimizer=3 is not an optimizer; give a torch.optim"),
    "another name": (lambda _: {"optimizer": "adamww"}, "did you mean 'adamw'"),
    "a name in settings": (lambda _: {"optimizer": "own SGD"}, "give it once more: optimizer=..."),
    "foreign": (
        lambda _: {"optimizer": sgd(FOREIGN.parameters())},
        r"SGD has 4 parameters that are not this Sequential's: number 0 of group 0 \(\[16, 6\]\), "
        ".* and 1 more; create it for this model: SGD",
    ),
    "closure": (
        lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())},
        "LBFGS.step needs 'closure', which evaluates the loss several times a step",
    ),
    "raises": (
        lambda _: {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=-1)},
        "optimizer=<lambda> raised ValueError: Invalid learning rate: -1; it is called with the li",
    ),
    "nothing": (lambda _: {"optimizer": lambda _: None}, "factory returned None; it has to"),
    "frozen": (
        lambda model: {"optimizer": sgd([model[0].weight.requires_grad_(requires_grad=False)])},
        "no parameter of SGD requires a gradient: nothing to train",
    ),
    "its rate": (
        lambda model: {"optimizer": sgd(model.parameters()), "lr": 0.1},
        "learning_rate=0.1 is given besides optimizer=..., which has its own and counts",
    ),
    "its decay": (
        lambda _: {"optimizer": sgd, "weight_decay": 0.1},
        "weight_decay=0.1 is given besides optimizer=",
    ),
    "no option": (
        lambda _: {"optimizer": torch.optim.Rprop, "weight_decay": 0.1},
        "optimizer=Rprop raised TypeError",
    ),
    "its schedule": (
        lambda _: {"lr_scheduler": lambda o: lr_scheduler.StepLR(o, 3), "schedule": "cosine"},
        "lr_scheduler_type='cosine' is given besides lr_scheduler=",
    ),
    "another's": (
        lambda model: {
            "optimizer": sgd(model.parameters()),
            "lr_scheduler": lr_scheduler.StepLR(sgd(model.parameters()), 3),
        },
        "StepLR is bound to another optimizer than the run's SGD",
    ),
    "alone": (
        lambda model: {"lr_scheduler": lr_scheduler.StepLR(sgd(model.parameters()), 3)},
        "this lr_scheduler is bound to an optimizer; give that, too",
    ),
    "no step": (lambda _: {"lr_scheduler": 3}, r"lr_scheduler=3 has no step\(\)"),
    "no step, called": (lambda _: {"lr_scheduler": NoStep()}, r"NoStep.* has no step\(\)"),
    "epoch": (
        lambda _: {"lr_scheduler": lambda o: NeedsEpoch(o, 3)},
        "NeedsEpoch raised|NeedsEpoch.step needs 'epoch'|<lambda> raised TypeError",
    ),
    "unstorable": (
        lambda _: {"lr_scheduler": Unstorable},
        "the state_dict of Unstorable: rule is a function, which a checkpoint cannot store",
    ),
    "plateau": (
        lambda _: {"lr_scheduler": lr_scheduler.ReduceLROnPlateau},
        "ReduceLROnPlateau is stepped with the metric of evaluations: pass eval_dataset",
    ),
    "plateau of another way": (
        lambda _: {
            "lr_scheduler": lr_scheduler.ReduceLROnPlateau,
            "eval_dataset": HELD_OUT,
            "keep_best": "accuracy",
        },
        r"ReduceLROnPlateau\(mode='min'\) is stepped with accuracy, of which 'max' is better",
    ),
    "ort_fused": (
        lambda _: {"optimizer": sgd, "engine": "ort_fused"},
        "runs in torch, and engine 'ort_fused' steps in ORT",
    ),
    "zero": (
        lambda _: {"optimizer": sgd, "workers": 2, "zero_stage": 1},
        r"zero_stage=1 with an optimizer or lr_scheduler of your own \(SGD\): ",
    ),
    "an object on workers": (
        lambda model: {"optimizer": sgd(model.parameters()), "workers": 2},
        "optimizer=SGD is an object of this process, .* cannot have; give a class or a function",
    ),
    "an object in isolation": (
        lambda model: {"optimizer": sgd(model.parameters()), "isolated": True},
        "optimizer=SGD is an object of this process",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_train_is_refused_before_anything_begins(case: str) -> None:
    arguments, message = BAD[case]
    if case == "ort_fused":
        needs("ort_fused")
    model = net()
    before, known = weights(model), [each.name for each in ortlab.list_runs()]
    with pytest.raises(ValueError, match=message) as caught:
        ortlab.finetune(model, BATCHES, **{**CHOSEN, **arguments(model)})
    assert len(str(caught.value)) < 400
    assert torch.equal(weights(model), before)
    assert [each.name for each in ortlab.list_runs()] == known, "no folder is left"
    train(model, sgd, max_steps=2)


def test_names_of_objects_are_of_no_use_elsewhere(tmp_path: Path) -> None:
    run = train(net(), sgd, lambda optimizer: lr_scheduler.StepLR(optimizer, 3), max_steps=2)
    again = {**run.settings.as_dict(), "engine": "eager"}
    with pytest.raises(ValueError, match="optimizer is an object of yours, SGD"):
        ortlab.finetune(net(), BATCHES, **again)
    loss = again.pop("loss")
    with pytest.raises(ValueError, match="optimizer='own SGD' is an object of a run, which a scr"):
        ortlab.script(net(), BATCHES, to=tmp_path / "script", loss=loss, **again)
    race = ortlab.race(net(), BATCHES, engines="eager", loss=loss, optimizer="own SGD", steps=2)
    assert "optimizer='own SGD' is the name of an object" in str(race.result(HANGS_S))
    slow = Slow(BATCHES)
    plain_run = ortlab.finetune(net(), slow, **CHOSEN)
    with pytest.raises(ValueError, match="lr_scheduler_type='own StepLR' is the name of an object"):
        plain_run.apply(schedule="own StepLR")
    slow.at(10, lambda: None)
    plain_run.result(HANGS_S)
    controls = settings_preview.controls(run.settings, run.settings, fixed=run.fixed)
    shown = {each.declaration.name: each for each in controls}
    assert shown["optimizer"].value == "own SGD"
    assert "a run keeps the optimizer" in shown["optimizer"].reason


def test_parameters_that_it_leaves_out_are_named_and_stay() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    own = torch.optim.SGD(model[2].parameters(), lr=0.1)
    run = train(model, own)
    (told,) = [event.text for event in run.recorder.events("warning")]
    assert told == (
        "SGD does not have 0.weight, 0.bias of the Sequential, so that these are not trained"
    )
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None


# ---- other processes -----------------------------------------------------------------------------


class AwaitsTheFirst(ortlab.Callback):
    """Wait until the checkpoint of step 10 is written, before a newer one takes its place."""

    def on_step_end(self, run: Run) -> None:
        if run.step >= 10:
            until(lambda: bool(run.checkpoints))


@pytest.mark.parametrize("where", [{"workers": 2}, {"isolated": True}])
def test_workers_build_them_from_factories(where: dict[str, Any]) -> None:
    data, held_out = (
        TensorDataset(*(torch.cat(each) for each in zip(*batches, strict=True)))
        for batches in (BATCHES, HELD_OUT)
    )
    chosen: dict[str, Any] = {
        "batch_size": 10,
        "eval_dataset": held_out,
        "eval_steps": 4,
        "loss": "cross_entropy",
        "engine": "eager",
        "device": "cpu",
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "lr_scheduler": functools.partial(
            lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=0.05
        ),
    }
    model, other = net(), net()
    alone = ortlab.finetune(other, data, **chosen)
    alone.result(HANGS_S)
    saved = {"save_steps": 10, "keep_checkpoints": 9, "callbacks": [AwaitsTheFirst()]}
    run = ortlab.finetune(model, data, **saved, **chosen, **where)
    run.result(HANGS_S)
    assert rates(run) == pytest.approx(rates(alone))
    assert len(set(rates(run))) > 1
    torch.testing.assert_close(weights(model), weights(other), rtol=1e-4, atol=1e-6)
    (kept,) = [each.path for each in run.checkpoints if each.name == "last-10"]
    third = net()
    ortlab.finetune(third, data, resume_from=kept, **chosen, workers=1, isolated=False).result(
        HANGS_S
    )
    torch.testing.assert_close(weights(third), weights(other), rtol=1e-4, atol=1e-6)
