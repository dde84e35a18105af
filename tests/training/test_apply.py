"""Tests of settings changed during a run: what continues, the cost, and the effect of a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from tests.support.changed_runs import Course, refusals
from tests.support.needed_engines import needs
from tests.support.resuming import Tokens, bert, examples, loud, network
from tests.support.waiting import Turns

pytestmark = pytest.mark.usefixtures("one_thread")


def apply(**changes: Any) -> Callable[[Course], None]:
    return lambda course: course.control.apply(changes)


ORT = {"engine": "ortmodule", "kernels": "ort"}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "precision": ({}, {"precision": "bf16"}),
    "to fp16": ({}, {"precision": "fp16"}),
    "eager to ort": ({}, ORT),
    "ort to eager": (ORT, {"engine": "eager"}),
    "eager to engine ort": ({}, {"engine": "ort"}),
    "engine ort to eager": ({"engine": "ort"}, {"engine": "eager"}),
    "precision of engine ort": ({"engine": "ort"}, {"precision": "bf16"}),
    "budget of engine ort": ({"engine": "ort"}, {"activation_budget": 0.5}),
    "precision of ort": ({"engine": "ortmodule", "kernels": "torch"}, {"precision": "bf16"}),
    "kernels": (ORT, {"kernels": "torch"}),
    "all at once": (
        {},
        {
            **ORT,
            "batch_size": 3,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.02,
            "max_grad_norm": 0.1,
        },
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_a_run_that_switches_through_a_saved_checkpoint(name: str, tmp_path: Path) -> None:
    """A change equals resuming from a checkpoint, with dropout and in the middle of an epoch."""
    before, change = CHANGES[name]
    before = {"seed": 3, **before}  # ORT's generator treats seed 0 as 1
    needs(before.get("engine", "eager"), change.get("engine", "eager"))
    path = tmp_path / "a.ckpt"
    Course(bert(0.1), Tokens(), act=lambda c: c.loop.checkpoint().save(path) and None, **before)
    kept = Checkpoint.load(path)
    fresh = Course(bert(0.1), Tokens(), kept, **{**before, **change})
    switched = Course(bert(0.1), Tokens(), act=apply(**change), **before)
    assert switched.column()[4:] == fresh.column()
    assert switched.column("lr")[4:] == fresh.column("lr")
    assert switched.column("step") == list(range(1, 5 + len(fresh.column())))
    assert switched.loop.settings == fresh.loop.settings
    for entry, value in fresh.model.state_dict().items():
        assert torch.equal(value, switched.model.state_dict()[entry]), entry
    assert switched.made == 2
    assert not switched.told("warning")
    (event,) = switched.recorder.events("change")
    assert event.step == 4
    assert event.values["cost_s"] > 0
    for setting in change:
        assert f"{setting}=" in event.text


@pytest.mark.parametrize("change", [{"self_check": False}, {"precision": "bf16"}])
def test_the_loss_scale_goes_on_with_the_run(change: dict[str, Any], tmp_path: Path) -> None:
    """The loss scale, already reduced, goes on in another fp16 stepper; bf16 has none."""
    before = {
        "loss": loud,
        "precision": "fp16",
        "num_train_epochs": 4,
        "optimizer": "sgd",
        "lr": 1e-5,
    }
    path = tmp_path / "a.ckpt"
    kept_by = Course(
        network(), examples(), act=lambda c: c.loop.checkpoint().save(path) and None, **before
    )
    kept = Checkpoint.load(path)
    assert kept.loss_scale is not None
    assert kept.loss_scale["scale"] == kept_by.column("loss_scale")[3] < 2.0**13
    fresh = Course(network(), examples(), kept, **{**before, **change})
    switched = Course(network(), examples(), act=apply(**change), **before)
    for name in ("loss", "loss_scale", "skipped"):
        # Compared as text, where NaN equals NaN.
        assert str(switched.column(name)[4:]) == str(fresh.column(name)), name
    if "precision" in change:
        assert np.isnan(switched.column("loss_scale")[4:]).all()
    else:
        assert switched.column("loss_scale") == kept_by.column("loss_scale")
    assert switched.made == 2
    for entry, value in fresh.model.state_dict().items():
        assert torch.equal(value, switched.model.state_dict()[entry]), entry


def test_engines_that_take_turns_are_one_run() -> None:
    needs("ortmodule")
    model, turns = bert(0.0), iter(["ortmodule", "eager", "ortmodule", "eager", "ortmodule"])
    values = {"num_train_epochs": 4, "lr_scheduler_type": "constant"}
    plain = Course(bert(0.0), Tokens(), **values)

    def take_turns(course: Course, done: int) -> None:
        if done % 3 == 0 and (name := next(turns, None)):
            course.control.apply({"engine": name, "kernels": "ort"})

    course = Course(model, Tokens(), each=take_turns, **values)
    assert course.made == 6
    assert course.column("step") == list(range(1, 21))
    assert course.column() == pytest.approx(plain.column(), rel=1e-4)


def test_what_costs_nothing_makes_no_stepper() -> None:
    plain = Course(
        network(), examples(22), loss=functional.cross_entropy, lr_scheduler_type="constant"
    )
    changes = {
        "lr": 0.5,
        "max_grad_norm": None,
        "weight_decay": 0.9,
        "gradient_accumulation_steps": 2,
    }
    changed = Course(
        network(),
        examples(22),
        loss=functional.cross_entropy,
        act=apply(**changes),
        lr_scheduler_type="constant",
    )
    assert changed.made == 1
    (event,) = changed.recorder.events("change")
    assert event.values == {"cost_s": 0.0}
    assert "learning_rate=0.5 (was 0.01)" in event.text
    assert "max_grad_norm=None (was 1.0)" in event.text
    assert changed.column()[:4] == plain.column()[:4]
    # The rest: two micro-batches of the first epoch and six of the second, two per step.
    assert changed.column("step") == list(range(1, 9))
    assert changed.column("lr") == [0.01] * 4 + [0.5] * 4
    assert changed.column("samples")[4:] == [6, 8, 8, 6]
    assert changed.loop.total == 8
    groups = changed.loop.stepper.state_dict()["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.9, 0.0]


# --- another batch size

COUNT = 22


class Numbered(Dataset[Any]):
    """Samples whose target is their index; `fetched` lists those that were read."""

    def __init__(self) -> None:
        self.inputs, self.fetched = examples(COUNT).tensors[0], list[int]()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.fetched.append(index)
        return self.inputs[index] + 0.1 * torch.randn(4), index


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = Numbered()
        yield from (samples[index] for index in range(COUNT))


class Seen:
    """A loss that records the indices of each micro-batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        self.batches.append(numbers.tolist())
        return functional.cross_entropy(scores, numbers % 3)

    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    def epochs(self) -> list[list[int]]:
        numbers = [number for batch in self.batches for number in batch]
        return [numbers[at : at + COUNT] for at in range(0, len(numbers), COUNT)]


def layers() -> nn.Module:
    """Return layers without BatchNorm, which cannot train on a batch of one sample."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))


Plan = dict[int, dict[str, Any]]
PLANS: dict[str, tuple[dict[str, Any], Plan, list[list[int]]]] = {
    "larger, then smaller": (
        {},
        {2: {"batch_size": 7}, 5: {"batch_size": 3}},
        [[4], [4], [7], [7], [7], [3], [3], [3], [3], [3]],
    ),
    "with accumulation": (
        {"gradient_accumulation_steps": 2},
        {
            1: {"batch_size": 3},
            2: {"gradient_accumulation_steps": 3, "batch_size": 2},
            5: {"batch_size": 6},
        },
        [[4, 4], [3, 3], [2, 2, 2], [2], [2, 2, 2], [6, 6, 4]],
    ),
    "before the epoch's last batch": ({}, {5: {"batch_size": 8}}, [[4]] * 5 + [[2], [8], [8], [6]]),
    "at the epoch's end": ({}, {6: {"batch_size": 8}}, [[4]] * 5 + [[2], [8], [8], [6]]),
    "more than there is": ({}, {1: {"batch_size": 100}}, [[4], [18], [22]]),
    "to one and back": (
        {"batch_size": 10},
        {1: {"batch_size": 1}, 3: {"batch_size": 10}},
        [[10], [1], [1], [10], [10], [10], [2]],
    ),
}


@pytest.mark.parametrize("data", [Numbered, Streamed])
@pytest.mark.parametrize("name", PLANS)
def test_every_sample_of_an_epoch_comes_once_whatever_the_sizes(name: str, data: Any) -> None:
    values, plan, groups = PLANS[name]
    plain, seen = Seen(), Seen()
    chosen = {"lr_scheduler_type": "constant", **values}
    Course(layers(), data(), loss=plain, **chosen)
    course = Course(
        layers(),
        data(),
        loss=seen,
        each=lambda course, done: course.control.apply(plan.get(done, {})),
        **chosen,
    )
    assert seen.sizes() == [size for group in groups for size in group]
    assert course.column("samples") == [sum(group) for group in groups]
    assert seen.epochs() == plain.epochs(), "the order is that of a run without changes"
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in seen.epochs())
    assert course.made == 1
    changes = course.recorder.events("change")
    assert [event.step for event in changes] == list(plan)
    assert all(event.values == {"cost_s": 0.0} for event in changes)
    if data is Numbered:
        read = np.cumsum([sum(group) for group in groups])
        assert course.column("epoch") == pytest.approx((read / COUNT).tolist())


def test_the_schedule_goes_on_to_a_total_of_what_is_left() -> None:
    totals: list[int | None] = []

    def each(course: Any, done: int) -> None:
        totals.append(course.loop.total)
        course.control.apply({2: {"batch_size": 7}, 5: {"batch_size": 3}}.get(done, {}))

    course = Course(layers(), Numbered(), loss=Seen(), each=each, lr_scheduler_type="linear")
    assert totals == [12, 12, 8, 8, 8, 10, 10, 10, 10, 10]
    left = [1 - step / total for step, total in enumerate(totals) if total]
    assert course.column("lr") == pytest.approx([0.01 * share for share in left])


SIZED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], dict[str, Any]]] = {
    "a dataset": (layers, Numbered, {}, {"batch_size": 3}),
    "a dataset, accumulated": (
        layers,
        Numbered,
        {"gradient_accumulation_steps": 2},
        {"batch_size": 5, "gradient_accumulation_steps": 3},
    ),
    "a stream": (layers, Streamed, {"lr_scheduler_type": "constant"}, {"batch_size": 3}),
    "with another precision": (layers, Numbered, {}, {"batch_size": 3, "precision": "bf16"}),
    "ortmodule": (lambda: bert(0.0), Tokens, {**ORT, "seed": 3}, {"batch_size": 3}),
}


@pytest.mark.parametrize("name", SIZED)
def test_another_size_is_a_run_that_was_resumed_with_it(name: str, tmp_path: Path) -> None:
    """A changed batch size equals resuming with it, also from a checkpoint after the change."""
    model, data, before, change = SIZED[name]
    needs(before.get("engine", "eager"))
    loss = None if data is Tokens else Seen()
    again = {"batch_size": 6}

    def course(begin: Checkpoint | None = None, **values: Any) -> Course:
        return Course(
            model(), data(), begin, loss=loss, **{"num_train_epochs": 3, **before, **values}
        )

    def keep_first(course: Any, done: int) -> None:
        if done == 3:
            course.loop.checkpoint().save(tmp_path / "first.ckpt")
        if done == 5:
            course.loop.checkpoint().save(tmp_path / "later.ckpt")
        course.control.apply({3: change, 5: again}.get(done, {}))

    switched = course(each=keep_first)
    first = course(Checkpoint.load(tmp_path / "first.ckpt"), **change, each=_at(2, again))
    later = course(Checkpoint.load(tmp_path / "later.ckpt"), **{**change, **again})
    assert len(later.column()) > 1
    for begun, resumed in ((3, first), (5, later)):
        for column in ("step", "epoch", "loss", "lr", "samples"):
            assert switched.column(column)[begun:] == resumed.column(column), column
        assert resumed.loop.total == switched.loop.total
        for entry, value in switched.model.state_dict().items():
            assert torch.equal(value, resumed.model.state_dict()[entry]), entry


def _at(step: int, changes: dict[str, Any]) -> Callable[[Any, int], None]:
    return lambda course, done: course.control.apply(changes if done == step else {})


@pytest.mark.parametrize("data", [Numbered, Streamed])
def test_what_fails_with_another_size_gives_its_samples_back(data: Any) -> None:
    """After a failed change, the samples are trained in the old batch size and not read again."""
    samples, tried_of, plain_of = data(), Seen(), Seen()
    chosen = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    plain = Course(NoAutocast(), data(), loss=plain_of, **chosen)
    act = apply(precision="bf16", batch_size=5, gradient_accumulation_steps=1)
    tried = Course(NoAutocast(), samples, loss=tried_of, act=act, stop=1, **chosen)
    assert "this failed, and the run continues without it" in tried.told("warning")[0]
    assert tried.loop.settings.data.batch_size == 4
    assert tried_of.batches == plain_of.batches
    assert tried.column("samples") == plain.column("samples")
    assert tried.column("epoch") == plain.column("epoch")
    if data is Numbered:
        assert samples.fetched == [number for epoch in plain_of.epochs() for number in epoch]


class Cramped(nn.Module):
    """Runs out of memory at the second micro-batch of five, with statistics and masks changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fives = network(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x)
        self.fives += len(x) == 5
        if len(x) == 5 and self.fives == 2:
            raise RuntimeError("out of memory")
        return scores


def test_a_size_that_does_not_fit_leaves_no_trace() -> None:
    """The run continues with its old batch size, and no stepper is made for the failed change."""
    data = TensorDataset(examples(COUNT).tensors[0], torch.arange(COUNT))
    tried_of, plain_of = Seen(), Seen()
    chosen = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"}
    plain = Course(Cramped(), data, loss=plain_of, **chosen)
    act = apply(batch_size=5, weight_decay=0.5)
    tried = Course(Cramped(), data, loss=tried_of, act=act, stop=1, **chosen)
    (text,) = tried.told("warning")
    assert text == (
        "batch_size=5 (was 4), weight_decay=0.5 (was 0.01): this failed, and the run "
        "continues without it: out of memory"
    )
    assert not tried.told("change")
    assert tried.made == 1
    assert tried.loop.settings == plain.loop.settings
    five = tried_of.batches.pop(2)
    assert len(five) == 5, "the first one fitted"
    assert tried_of.batches == plain_of.batches
    for column in ("loss", "lr", "samples", "epoch"):
        assert tried.column(column) == plain.column(column), column
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, tried.model.state_dict()[name]), name
    groups = tried.loop.stepper.state_dict()["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]


def test_clipping_holds_from_the_next_step_on() -> None:
    def trained(**change: Any) -> list[float]:
        model, act = network(0.0), apply(**change)
        chosen = {"optimizer": "sgd", "lr_scheduler_type": "constant"}
        return Course(model, examples(), loss=functional.cross_entropy, act=act, **chosen).column()

    tight, loose = trained(max_grad_norm=1e-9), trained()
    assert tight[:5] == loose[:5]  # the fifth loss is of weights from before the change
    assert tight[6:] != loose[6:]


class Noisy(nn.Module):
    """Draws from numpy, which ORT's graph cannot do, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(0.5)
        self.register_buffer("calls", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        scores: torch.Tensor = self.inner(x + float(np.random.rand()))
        return scores


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_engine_that_cannot_run_the_model_leaves_no_trace(accumulation: int) -> None:
    needs("ortmodule")
    change = {**ORT, "gradient_accumulation_steps": accumulation}
    chosen = {"loss": functional.cross_entropy, "lr_scheduler_type": "cosine"}
    plain = Course(Noisy(), examples(22), **chosen)
    tried = Course(Noisy(), examples(22), act=apply(**change), **chosen)
    (warning,) = tried.recorder.events("warning")
    assert warning.step == 4
    assert warning.text.startswith("engine=ortmodule (was eager), kernels=ort (was measured)")
    assert "this failed, and the run continues without it" in warning.text
    assert "from Python or numpy" in warning.text
    assert not tried.told("change")
    assert tried.loop.settings == plain.loop.settings
    assert tried.column() == plain.column()
    assert tried.column("lr") == plain.column("lr")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, tried.model.state_dict()[name]), name


class NoAutocast(nn.Module):
    """Fails under autocast, after it has drawn random numbers and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x)
        if self.training and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("this model has no bf16")
        return scores


def test_a_step_that_fails_half_way_leaves_no_trace() -> None:
    """Random state, statistics and the gradients of the first micro-batch are restored."""
    chosen = {"loss": functional.cross_entropy, "gradient_accumulation_steps": 2}
    plain = Course(NoAutocast(), examples(22), **chosen)
    tried = Course(NoAutocast(), examples(22), act=apply(precision="bf16"), **chosen)
    (text,) = tried.told("warning")
    assert text == (
        "precision=bf16 (was fp32): this failed, and the run continues without it: "
        "this model has no bf16"
    )
    (refusal,) = refusals(tried.recorder)
    assert refusal.values["cost_s"] > 0, "the time that it lost"
    assert tried.column() == plain.column()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, tried.model.state_dict()[name]), name


def test_a_stepper_that_cannot_be_made_leaves_no_trace() -> None:
    """On ORT's own kernels, bf16 is rejected while the stepper is made."""
    needs("ortmodule")
    chosen = {"loss": functional.cross_entropy}
    plain = Course(network(), examples(22), **chosen)
    tried = Course(network(), examples(22), act=apply(**ORT, precision="bf16"), **chosen)
    assert "precision='bf16' needs torch's kernels" in tried.told("warning")[0]
    assert tried.column() == plain.column()


def test_a_batch_that_is_bad_is_the_runs_error_under_any_settings() -> None:
    data = [(torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)) for _ in range(8)]
    data[4] = (torch.zeros(4, 7), data[4][1])
    act = apply(precision="bf16")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Course(network(), data, loss=functional.cross_entropy, act=act, batch_size=16)


def test_frozen_parts_stay_frozen_and_modes_come_back() -> None:
    model = network()
    model.train()
    model[1].eval()
    before = model[1].running_mean.clone()
    Course(model, examples(), loss=functional.cross_entropy, act=apply(precision="bf16"))
    assert torch.equal(model[1].running_mean, before)
    evaluated = network().eval()
    course = Course(
        evaluated, examples(), loss=functional.cross_entropy, act=apply(precision="bf16")
    )
    assert not torch.equal(evaluated[1].running_mean, before)
    course.loop.stepper.close()
    assert not any(module.training for module in evaluated.modules())


# --- runs


def test_a_run_changes_its_engine_and_comes_back(threads_end: None) -> None:
    """The run returns to ORT without another export."""
    needs("ortmodule")
    model, turns = network(0.0), Turns()

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        turns.take()
        return functional.cross_entropy(scores, target)

    run = ortlab.finetune(
        model, examples(48), loss=loss, batch_size=4, device="cpu", learning_rate=0.01, **ORT
    )

    def advance(to: int) -> None:
        """Advance into the step after that one."""
        turns.give(to - run.step)
        turns.until_asked(to + 1)
        assert run.step == to

    advance(3)
    assert (run.engine_used, run.engine_asked) == ("ortmodule", "ortmodule")
    turns.pause(run, 4)
    run.apply(engine="eager")
    run.apply(lr=0.02)
    run.resume()
    advance(6)
    assert (run.engine_used, run.engine_asked) == ("eager", "eager")
    exported_s = run.report.export_s if run.report else 0
    assert exported_s > 0
    turns.pause(run, 7)
    run.apply(engine="ortmodule")
    run.resume()
    turns.give()
    result = run.result()
    assert run.engine_used == "ortmodule"
    assert result.export_s == exported_s
    assert result.steps == 12
    assert run.settings.model.engine == "ortmodule"
    assert run.settings.optim.learning_rate == 0.01
    assert run.current_settings == run.settings.replace(lr=0.02)
    changes = [(event.step, event.text) for event in run.recorder.events("change")]
    assert changes == [
        (4, "engine=eager (was ortmodule), learning_rate=0.02 (was 0.01)"),
        (7, "engine=ortmodule (was eager)"),
    ]
    kept = Checkpoint.load(run.checkpoint())
    assert kept.settings["learning_rate"] == 0.02
    with pytest.raises(ValueError, match=r"is over \(finished\): its settings cannot be changed"):
        run.apply(lr=1.0)


def test_a_run_changes_its_batch_size_and_comes_back(threads_end: None) -> None:
    """The size changes during a pause; evaluations use the current size."""
    turns, trained, evaluated = Turns(), list[int](), list[int]()

    class Gated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                trained.append(len(x))
                turns.take()
            else:
                evaluated.append(len(x))
            return super().forward(x)

    run = ortlab.finetune(
        Gated(4, 3), examples(24), loss="cross_entropy", batch_size=4, engine="eager",
        device="cpu", num_train_epochs=2, eval_dataset=examples(10),
    )  # fmt: skip

    def paused_at(step: int) -> None:
        turns.give(step - 1 - run.step)
        turns.pause(run, step)
        assert run.step == step

    paused_at(2)
    run.apply(batch_size=8)
    assert run.current_settings.data.batch_size == 4
    assert Checkpoint.load(run.checkpoint()).position.read == 8
    run.resume()
    paused_at(4)
    assert run.status().total_steps == 2 + 2 + 3
    run.undo()
    run.resume()
    turns.give()
    assert run.result().steps == 2 + 2 + 6
    assert trained == [4] * 2 + [8] * 2 + [4] * 6
    assert evaluated == [4, 4, 2, 8, 2, 4, 4, 2], "before, after an epoch, after the other"
    assert not run.earlier_settings
    assert Checkpoint.load(run.checkpoint()).settings["batch_size"] == 4


def test_a_loader_keeps_the_sizes_of_its_batches(threads_end: None) -> None:
    loader = DataLoader(examples(), batch_size=4)
    run = ortlab.finetune(
        network(), loader, loss="cross_entropy", engine="eager", num_train_epochs=100_000
    )
    message = (
        r"^batch_size=8 cannot be applied to a run with batch_size=16: the DataLoader makes "
        r"its own batches; pass the Dataset itself, or set the loader's batch_size$"
    )
    with pytest.raises(ValueError, match=message):
        run.apply(batch_size=8, lr=0.1)
    run.stop()
    run.result()
    assert run.current_settings == run.settings
    assert "batch_size" in run.fixed, "it is told of a run that is over, too"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed=3 cannot be applied to a run with seed=0: a run keeps the seed"),
        ({"optimizer": "sgd"}, "optimizer='sgd' cannot be applied"),
        ({"lrr": 1.0}, "unknown setting 'lrr': did you mean 'learning_rate'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"engine": "ortmodule", "precision": "bf16", "kernels": "ort"}, "needs torch's kernels"),
        ({"recompute": "layers"}, "recompute='layers' is for engines 'ort' and 'ortmodule'"),
        (
            {"engine": "ortmodule", "precision": "fp16"},
            "ORT's CPU kernels compute float16 in float32",
        ),
        ({"precision": "tf32"}, "is for CUDA devices"),
    ],
)
def test_what_cannot_be_applied_is_refused_at_once(
    changes: dict[str, Any], message: str, threads_end: None
) -> None:
    run = ortlab.finetune(
        network(), examples(), loss="cross_entropy", engine="eager", num_train_epochs=100_000
    )
    with pytest.raises(ValueError, match=message):
        run.apply(**changes)
    run.stop()
    run.result()
    assert not run.recorder.events("change", "warning")
