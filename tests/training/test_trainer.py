"""Tests of the loop as a generator, on the eager engine; the recorder's is our only thread."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import BatchEncoding

from ortlab.engines.base import NotFinite, Stepper, StepResult
from ortlab.engines.torch.stepper import Eager
from ortlab.metrics.recorder import INDEX, Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, evaluator, schedule
from ortlab.training.control import Control
from ortlab.training.trainer import Trainer
from tests.support.waiting import HANGS_S


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(**values: Any) -> FinetuneSettings:
    return FinetuneSettings.of(**{"engine": "eager", "lr": 0.05, "device": "cpu", **values})


def examples(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


class Trained:
    """The results of a run of the loop, with its recorder closed."""

    def __init__(
        self,
        chosen: FinetuneSettings,
        *,
        data: Any = None,
        held_out: Any = None,
        model: nn.Module | None = None,
        control: Control | None = None,
        stop_after: int | None = None,
    ) -> None:
        self.model = model or network()
        self.control = control or Control()
        self.recorder = Recorder()
        stepper: Stepper = Eager().prepare(self.model, functional.cross_entropy, chosen)
        train = data_loading.batches(examples() if data is None else data, chosen)
        evaluation = None
        if held_out is not None:
            evaluation = data_loading.batches(held_out, chosen, evaluation=True)
        try:
            course = Trainer(
                stepper,
                train,
                chosen,
                control=self.control,
                recorder=self.recorder,
                evaluation=evaluation,
            )
            for _ in course.steps():
                if self.recorder.count == stop_after:
                    self.control.stop()
        finally:
            self.recorder.close()

    def column(self, name: str) -> list[float]:
        values: list[float] = self.recorder.rows()[:, INDEX[name]].tolist()
        return values

    def evaluated(self) -> list[int]:
        return [event.step for event in self.recorder.events("eval")]


def test_it_learns_and_tells_every_step() -> None:
    trained = Trained(settings(num_train_epochs=20), held_out=examples())
    assert trained.column("step") == list(range(1, 81))  # 50 samples by 16: 4 steps per epoch
    assert trained.column("loss")[-1] < 0.5 * trained.column("loss")[0]
    before, *_, after = trained.recorder.events("eval")
    assert after.values["accuracy"] > 0.9 > before.values["accuracy"]
    assert trained.column("samples")[:4] == [16, 16, 16, 2]
    assert trained.column("epoch")[3] == 1.0
    assert trained.recorder.total("samples") == 1000
    parts = sum(np.array(trained.column(f"{part}_ms")) for part in ("data", "forward", "backward"))
    assert (parts + trained.column("optimizer_ms") <= np.array(trained.column("step_ms"))).all()
    assert np.isfinite(trained.column("grad_norm")).all()


def test_the_losses_are_those_of_a_plain_loop() -> None:
    """Losses are bitwise those of AdamW at a constant rate, without decay and clipping."""
    batches = list(DataLoader(examples(), batch_size=8))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0, fused=True)
    losses = []
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    chosen = settings(weight_decay=0.0, max_grad_norm=None, lr_scheduler_type="constant")
    trained = Trained(chosen, data=batches)
    assert trained.column("loss") == losses
    for ours, theirs in zip(trained.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_same_seed_gives_the_same_losses(evaluates: bool) -> None:
    """Data order and dropout depend only on the seed, not on earlier draws or on evaluations."""
    chosen = settings(num_train_epochs=3, seed=7, eval_steps=2)
    torch.manual_seed(1)
    first = Trained(chosen, model=network(dropout=0.5))
    torch.rand(5)
    held_out = DataLoader(examples(20), batch_size=4, shuffle=True)  # draws its order
    second = Trained(chosen, model=network(dropout=0.5), held_out=held_out if evaluates else None)
    other = Trained(chosen.replace(seed=8), model=network(dropout=0.5))
    assert first.column("loss") == second.column("loss")
    assert first.column("loss") != other.column("loss")


def test_a_loader_that_shuffles_follows_the_seed() -> None:
    def losses(seed: int) -> list[float]:
        loader = DataLoader(examples(), batch_size=16, shuffle=True)
        return Trained(settings(num_train_epochs=2, seed=seed), data=loader).column("loss")

    assert losses(1) == losses(1) != losses(2)


def test_epochs_have_orders_of_their_own() -> None:
    batches = data_loading.batches(examples(), settings(num_train_epochs=2))
    first, again, second = (
        torch.cat([batch[0] for batch in batches.epoch(number)]) for number in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(0).values, second.sort(0).values)


def test_an_order_is_of_the_seed_and_the_epoch_and_stays_what_it_was() -> None:
    """The order also stays the same across versions, as older checkpoints resume in it."""
    data, order = TensorDataset(torch.arange(10)), [2, 0, 5, 4, 3, 7, 9, 8, 1, 6]
    for size, skip in ((4, 0), (3, 0), (3, 5)):
        batches = data_loading.batches(data, settings(seed=7, batch_size=size))
        found = [batch[0].tolist() for batch in batches.epoch(3, skip)]
        assert [number for numbers in found for number in numbers] == order[skip:]
        assert {len(batch) for batch in found[:-1]} == {size}


class AtOnce(Dataset[tuple[int]]):
    """Returns several samples at a time, as Datasets of the hub do."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int]:
        raise AssertionError("one by one takes longer")

    def __getitems__(self, indices: list[int]) -> list[tuple[int]]:
        self.asked.append(indices)
        return [(index,) for index in indices]


def test_a_dataset_is_asked_for_a_batch_at_once() -> None:
    data = AtOnce()
    epoch = data_loading.batches(data, settings(batch_size=4), evaluation=True).epoch(0)
    assert [batch[0].tolist() for batch in epoch.take(1) + epoch.take(1, 5) + epoch.take(2)] == [
        *([0, 1, 2, 3], [4, 5, 6, 7, 8], [9]),
    ]
    assert data.asked == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9]]
    assert epoch.done == 10


def test_evaluation_data_keeps_its_order() -> None:
    batches = data_loading.batches(examples(), settings(), evaluation=True)
    assert torch.equal(torch.cat([b[0] for b in batches.epoch(0)]), examples().tensors[0])


def test_random_states_come_back() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    Trained(settings(seed=11), model=network(dropout=0.5))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_random_states_come_back_from_a_loop_that_is_left() -> None:
    state = torch.get_rng_state()
    chosen = settings(seed=11)
    recorder = Recorder()
    stepper = Eager().prepare(network(0.5), functional.cross_entropy, chosen)
    train = data_loading.batches(examples(), chosen)
    running = Trainer(stepper, train, chosen, control=Control(), recorder=recorder).steps()
    next(running)
    assert not torch.equal(torch.get_rng_state(), state)
    running.close()
    recorder.close()
    assert torch.equal(torch.get_rng_state(), state)


def _unfinished(seed: int) -> tuple[Iterator[StepResult], Recorder]:
    """Start a loop and make one step; return the loop and the recorder to close afterwards."""
    chosen, recorder = settings(seed=seed), Recorder()
    stepper = Eager().prepare(network(0.5), functional.cross_entropy, chosen)
    train = data_loading.batches(examples(), chosen)
    running = Trainer(stepper, train, chosen, control=Control(), recorder=recorder).steps()
    next(running)
    return running, recorder


@pytest.mark.parametrize("first_out", [0, 1])
def test_the_last_of_overlapping_runs_gives_the_random_states_back(first_out: int) -> None:
    state = torch.get_rng_state()
    runs = [_unfinished(11), _unfinished(12)]
    between = torch.get_rng_state()
    for place in (first_out, 1 - first_out):
        assert torch.equal(torch.get_rng_state(), between)
        running, recorder = runs[place]
        running.close()  # type: ignore[attr-defined]
        recorder.close()
    assert torch.equal(torch.get_rng_state(), state)


def test_accumulation_is_one_step_over_more_samples() -> None:
    data = examples(48)
    whole = Trained(settings(batch_size=24, num_train_epochs=2))
    chosen = settings(batch_size=12, gradient_accumulation_steps=2, num_train_epochs=2)
    split = Trained(chosen, data=data)
    assert split.column("samples") == [24] * 4
    whole = Trained(settings(batch_size=24, num_train_epochs=2), data=data)
    assert split.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)


def test_what_is_left_of_an_epoch_is_a_step() -> None:
    trained = Trained(settings(batch_size=10, gradient_accumulation_steps=3))
    assert trained.column("samples") == [30, 20]


def test_max_steps_counts_not_the_epochs() -> None:
    trained = Trained(settings(num_train_epochs=1, max_steps=10), held_out=examples())
    assert trained.column("step") == list(range(1, 11))
    assert trained.evaluated() == [0, 4, 8, 10]
    assert trained.column("lr")[-1] == pytest.approx(0.1 * settings().optim.learning_rate)


def test_data_that_can_be_read_once_may_end_before_max_steps() -> None:
    batches = list(DataLoader(examples(), batch_size=10))
    trained = Trained(settings(max_steps=7, num_train_epochs=3), data=iter(batches))
    assert trained.column("step") == [1, 2, 3, 4, 5]
    (told,) = trained.recorder.events("warning")
    assert told.text == "epoch 2 of the data is empty: the run ends"


def test_how_many_epochs_max_steps_are() -> None:
    data = data_loading.batches(examples(), settings())
    assert schedule.length_note(data, settings()) is None
    chosen = settings(max_steps=10)
    assert schedule.length_note(data, chosen) == "max_steps=10 is 2.5 epochs of 4 steps"
    told = schedule.length_note(data, chosen.replace(num_train_epochs=3))
    assert told is not None
    assert told.endswith("; num_train_epochs=3 has no effect")


def test_max_steps_ends_the_run() -> None:
    trained = Trained(settings(num_train_epochs=10, max_steps=7), held_out=examples())
    assert trained.column("step") == list(range(1, 8))
    assert trained.evaluated() == [0, 4, 7]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"num_train_epochs": 3}, [0, 4, 8, 12]),
        ({"num_train_epochs": 3, "eval_steps": 5}, [0, 5, 10, 12]),
    ],
)
def test_when_it_evaluates(values: dict[str, int], steps: list[int]) -> None:
    assert Trained(settings(**values), held_out=examples()).evaluated() == steps


def test_an_evaluation_is_the_mean_over_samples() -> None:
    trained = Trained(settings(), held_out=examples())
    inputs, target = examples().tensors
    with torch.no_grad():
        scores = trained.model(inputs)
    values = trained.recorder.events("eval")[-1].values
    loss = functional.cross_entropy(scores, target).item()
    assert values["loss"] == pytest.approx(loss, rel=1e-5)
    assert values["accuracy"] == int((scores.argmax(1) == target).sum()) / 50


def test_accuracy_is_unknown_where_targets_are_no_classes() -> None:
    chosen = settings(loss="mse")
    inputs = examples().tensors[0]
    data = TensorDataset(inputs, inputs[:, :3])
    stepper = Eager().prepare(network(), functional.mse_loss, chosen)
    held_out = data_loading.batches(data, chosen, evaluation=True)
    measured = evaluator.evaluate(stepper, held_out, step=0)
    assert measured is not None
    found, told = measured
    assert told == []
    assert found.loss > 0
    assert math.isnan(found.accuracy)


def rates(total: int, **values: Any) -> list[float]:
    chosen = settings(lr=1.0, **values)
    return [schedule.learning_rate(step, total, chosen.optim) for step in range(total)]


def test_schedules() -> None:
    assert rates(4, lr_scheduler_type="constant") == [1, 1, 1, 1]
    assert rates(4, lr_scheduler_type="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(6, lr_scheduler_type="linear", warmup_steps=2) == pytest.approx(
        [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]
    )
    assert rates(4, lr_scheduler_type="cosine") == pytest.approx(
        [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    )
    assert rates(4, lr_scheduler_type="constant", warmup_steps=3) == [0.25, 0.5, 0.75, 1]


def test_the_schedule_reaches_the_optimizer() -> None:
    trained = Trained(settings(num_train_epochs=2, warmup_steps=2, lr=0.3))
    expected = rates(8, lr_scheduler_type="linear", warmup_steps=2)
    assert trained.column("lr") == pytest.approx([0.3 * rate for rate in expected])


def test_a_warm_up_longer_than_the_run() -> None:
    with pytest.raises(ValueError, match="warmup_steps=9 must be less than the run's 8 steps"):
        schedule.check_schedule(8, settings(warmup_steps=9).optim)


def test_a_schedule_of_unknown_length_warns() -> None:
    with pytest.warns(UserWarning, match="lr_scheduler_type='linear' has no effect"):
        schedule.check_schedule(None, settings().optim)


def test_a_warm_up_below_one_is_a_fraction_of_the_run() -> None:
    assert schedule.warmup(10, settings(warmup_steps=0.25).optim) == 3  # rounded up
    assert rates(8, warmup_steps=0.25) == rates(8, warmup_steps=2)
    with pytest.raises(ValueError, match=r"warmup_steps=0\.5 is a fraction of a run of unknown"):
        schedule.check_schedule(None, settings(warmup_steps=0.5).optim)
    with pytest.raises(ValueError, match=r"warmup_steps=2\.5 must be a whole number of steps"):
        settings(warmup_steps=2.5)


class Bad(nn.Module):
    """A model whose output is non-finite from its n-th training step on."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__()
        self.inner = network()
        self.calls, self.at, self.value = 0, at, value
        self.good: dict[str, torch.Tensor] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(inputs)
        self.calls += self.training
        if self.training and self.calls == self.at:
            self.good = {name: p.clone() for name, p in self.inner.state_dict().items()}
            scores = scores * self.value
        return scores


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_loss_that_is_not_finite_ends_it_with_the_last_good_weights(
    value: float, clip_norm: float | None
) -> None:
    model = Bad(at=3, value=value)
    with pytest.raises(NotFinite, match=r"at step 3; the run ends with the weights of step 2"):
        Trained(settings(num_train_epochs=5, max_grad_norm=clip_norm), model=model)
    assert model.calls == 3
    for name, kept in model.inner.state_dict().items():
        assert torch.equal(kept, model.good[name])


class Remote:
    """A loss on a device, as loop and recorder use it; `item` would wait for the device."""

    device = torch.device("cuda")

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def detach(self) -> torch.Tensor:
        return self.value


class OnDevice:
    """A stepper as on CUDA: its losses are known later, and reading `finite` waits."""

    def __init__(self, bad_step: int | None = None, *, scaled: bool = False) -> None:
        self.bad_step = bad_step
        self.scaled = scaled
        self.steps = self.waits = 0

    def step(self, batches: Sequence[Any], *, lr: float) -> StepResult:
        self.steps += 1
        bad = self.bad_step is not None and self.steps >= self.bad_step
        loss: Any = Remote(math.nan if bad else 0.5)
        if not self.scaled:
            return StepResult(loss=loss, samples=1, lr=lr)
        # Steps 2 and 4 are skipped as well, which is not an error yet.
        skipped: Any = Remote(bad or self.steps in (2, 4))
        scale: Any = Remote(0.5 if bad else 1.0)
        return StepResult(loss=loss, samples=1, lr=lr, loss_scale=scale, skipped=skipped)

    def finite(self) -> bool:
        self.waits += 1
        return self.bad_step is None or self.steps < self.bad_step


def drive(stepper: Any, batches: Iterable[Any], recorder: Recorder, **values: Any) -> None:
    chosen = settings(lr_scheduler_type="constant", **values)
    train = data_loading.batches(batches, chosen)
    try:
        for _ in Trainer(stepper, train, chosen, control=Control(), recorder=recorder).steps():
            pass
    finally:
        recorder.close()


def test_no_step_waits_for_the_device() -> None:
    stepper, recorder = OnDevice(), Recorder()
    drive(stepper, [torch.zeros(1)] * 200, recorder)
    assert stepper.steps == 200
    assert stepper.waits == 1
    assert recorder.rows()[:, INDEX["loss"]].tolist() == [0.5] * 200


@pytest.mark.parametrize("length", [10, None])
def test_a_bad_loss_on_a_device_is_found_by_the_recorder(length: int | None) -> None:
    """An endless run ends by itself; a short one ends before and checks its losses at the end."""
    stepper, recorder = OnDevice(bad_step=6), Recorder()
    batches = itertools.repeat(torch.zeros(1), *([] if length is None else [length]))
    with pytest.raises(NotFinite, match="at step 6; the run ends with the weights of step 5"):
        drive(stepper, batches, recorder)


@pytest.mark.parametrize("length", [10, None])
def test_a_loss_scale_that_collapses_on_a_device_is_found_by_the_recorder(
    length: int | None,
) -> None:
    stepper, recorder = OnDevice(bad_step=6, scaled=True), Recorder()
    batches = itertools.repeat(torch.zeros(1), *([] if length is None else [length]))
    with pytest.raises(NotFinite, match="overflows float16 at step 6 although the loss scale"):
        drive(stepper, batches, recorder, precision="fp16")
    assert stepper.waits == (0 if length is None else 1)


def test_a_skipped_step_is_a_step_of_the_schedule() -> None:
    """A skipped step counts in the schedule, and its data is not trained again."""
    data = [(torch.full((4, 4), 1.0 if i != 1 else 1e6), torch.arange(4) % 3) for i in range(6)]
    trained = Trained(settings(precision="fp16"), data=data)
    plain = Trained(settings(), data=data)
    assert trained.column("skipped") == [0, 1, 0, 0, 0, 0]
    assert trained.column("step") == plain.column("step")
    assert trained.column("lr") == plain.column("lr")
    assert math.isnan(trained.column("loss")[1])
    assert np.isnan(plain.column("skipped")).all()
    assert np.isnan(plain.column("loss_scale")).all()


def test_stop_ends_after_the_step_in_flight_and_does_not_evaluate() -> None:
    trained = Trained(settings(num_train_epochs=50), held_out=examples(), stop_after=6)
    assert trained.column("step") == list(range(1, 7))
    assert trained.evaluated() == [0, 4]


def test_pause_holds_the_loop_between_two_steps() -> None:
    control = Control()
    control.pause()
    thread = threading.Thread(target=lambda: Trained(settings(), control=control))
    thread.start()
    while not control.waiting:
        assert thread.is_alive()
    control.resume()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    assert not control.waiting


def test_rates_leave_out_the_first_step() -> None:
    trained = Trained(settings())
    first, *rates = trained.column("samples_per_s")
    assert np.isnan(first), "it may export, compile and warm up"
    assert np.isfinite(rates).all()
    assert np.isfinite(trained.column("step_ms")).all()


def test_stop_ends_a_pause() -> None:
    control = Control()
    control.pause()
    control.stop()
    control.stop()
    assert Trained(settings(), control=control).column("step") == []


def test_a_pause_after_a_stop_is_nothing() -> None:
    control = Control()
    control.stop()
    control.pause()
    assert not control.pausing
    going: list[bool] = []
    thread = threading.Thread(target=lambda: going.append(control.proceed()), daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert going == [False]


def test_an_evaluation_that_is_nan_is_told_of() -> None:
    inputs, targets = examples(4).tensors
    trained = Trained(settings(max_steps=1), held_out=[(inputs * math.nan, targets)])
    warnings = trained.recorder.events("warning")
    assert [event.step for event in warnings] == [0, 1]
    assert "the evaluation loss is nan at step 1" in warnings[1].text


# --- kinds of data


class Rows(Dataset[dict[str, Any]]):
    """Samples as `transformers` users have them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * 4, "label": index % 2, "weight": 0.5, "text": "left out"}


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for row in range(5):
            yield torch.full((4,), float(row)), row % 3


def test_samples_that_are_mappings_become_batches_of_tensors() -> None:
    first, second = data_loading.batches(Rows(), settings(batch_size=4), evaluation=True).epoch(0)
    assert {name: tensor.dtype for name, tensor in first.items()} == {
        "input_ids": torch.int64,
        "label": torch.int64,
        "weight": torch.float32,
    }
    assert first["input_ids"].shape == (4, 4)
    assert second["label"].tolist() == [0, 1]


def test_a_stream_of_samples_is_batched() -> None:
    batches = data_loading.batches(Stream(), settings(batch_size=2, num_train_epochs=2))
    assert batches.length is None
    for epoch in (0, 1):
        assert [len(target) for _, target in batches.epoch(epoch)] == [2, 2, 1]


def test_batches_of_transformers_and_lists_are_used_as_they_are() -> None:
    batch = BatchEncoding({"input_ids": torch.zeros(2, 3, dtype=torch.int64)})
    batches = data_loading.batches([batch, batch], settings())
    assert batches.length == 2
    assert next(batches.epoch(0)) is batch


def test_an_iterator_can_be_read_once() -> None:
    once = data_loading.batches(iter([1, 2]), settings())
    assert list(once.epoch(0)) == [1, 2]
    with pytest.raises(ValueError, match="can be read only once"):
        data_loading.batches(iter([1, 2]), settings(num_train_epochs=2))
    with pytest.raises(ValueError, match="can be read only once"):
        data_loading.batches(iter([1, 2]), settings(), evaluation=True)


@pytest.mark.parametrize(
    "data", [[], TensorDataset(torch.zeros(0, 4)), DataLoader(TensorDataset(torch.zeros(0, 4)))]
)
def test_data_that_is_empty(data: Any) -> None:
    with pytest.raises(ValueError, match=r"the data is empty: the \w+ has no elements"):
        data_loading.batches(data, settings())


def test_a_stream_that_is_empty() -> None:
    with pytest.raises(ValueError, match="the training data is empty"):
        Trained(settings(lr_scheduler_type="constant"), data=iter([]))


@pytest.mark.parametrize("data", [torch.zeros(8, 4), {"inputs": torch.zeros(8, 4)}, "text", 5])
def test_what_is_no_data(data: Any) -> None:
    with pytest.raises(ValueError, match=r"the data is a single \w+; pass a Dataset, a DataLoader"):
        data_loading.batches(data, settings())


def test_samples_of_different_shapes() -> None:
    with pytest.raises(ValueError, match=r"input_ids has different shapes .*\[2\], \[3\]"):
        data_loading.collate([{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}])


def test_samples_that_are_no_numbers() -> None:
    with pytest.raises(
        ValueError, match="the first element of a sample is str, which cannot be a tensor"
    ):
        data_loading.collate([("a", 1), ("b", 0)])


def test_a_batch_size_without_effect_warns() -> None:
    loader = DataLoader(examples(), batch_size=8)
    data_loading.batches(loader, settings(batch_size=8))
    data_loading.batches(loader, settings())
    with pytest.warns(UserWarning, match="batch_size=4 has no effect"):
        data_loading.batches(loader, settings(batch_size=4))
