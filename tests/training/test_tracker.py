"""Tests of the tracker around loops as users write them; torch is unpatched when they end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from ortlab.metrics.recorder import INDEX, Watched
from ortlab.training.tracker import INTERCEPTION, Tracker
from ortlab.utils.process_memory import SAMPLER
from tests.support.waiting import HANGS_S


@pytest.fixture(autouse=True)
def _nothing_left_behind(threads_end: None) -> Iterator[None]:
    before = torch.Tensor.backward
    yield
    assert torch.Tensor.backward is before
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    assert not SAMPLER.running


def loader(count: int = 48) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=16)


class Training:
    """A model with its optimizer, and one step as the user writes it."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.losses: list[float] = []

    def step(self, inputs: torch.Tensor, target: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def column(tracker: Tracker[Any], name: str) -> list[float]:
    values: list[float] = tracker.recorder.rows()[:, INDEX[name]].tolist()
    return values


def test_a_loop_is_recorded_and_otherwise_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    shown: list[Watched] = []
    tracker = Tracker(loader(), show=shown.append)
    assert len(tracker) == 3
    for inputs, target in tracker:
        assert shown == [tracker]
        assert tracker.status().state == "running"
        training.step(inputs, target)
    assert column(tracker, "loss") == training.losses
    assert column(tracker, "step") == [1, 2, 3]
    assert column(tracker, "lr") == [0.125] * 3
    assert column(tracker, "samples") == [16] * 3
    assert column(tracker, "epoch") == pytest.approx([1 / 3, 2 / 3, 1])
    status = tracker.status()
    assert (status.state, status.step, status.total_steps) == ("finished", 3, 3)
    assert tracker.over()
    assert tracker.wait_over(0)
    assert capsys.readouterr().out == ""


def test_where_the_time_goes() -> None:
    """Each part sleeps for a different time; a busy machine only makes them longer."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(0.04)
            return grad

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.06)
            return super().step(closure)

    def slow_data() -> Iterator[torch.Tensor]:
        for _ in range(3):
            time.sleep(0.08)
            yield torch.ones(2, 4)

    model = nn.Linear(4, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on, torch reports the base's step, too
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    tracker = Tracker(slow_data())
    for inputs in tracker:
        optimizer.zero_grad()
        Slow.apply(model(inputs)).mean().backward()
        optimizer.step()
    least = {"forward": 20, "backward": 40, "optimizer": 60, "data": 80}
    parts = {name: np.array(column(tracker, f"{name}_ms")) for name in least}
    for name, part in parts.items():
        assert (part >= least[name]).all(), name
    assert (sum(parts.values()) <= np.array(column(tracker, "step_ms"))).all()
    assert tracker.status().total_steps is None


def test_what_is_logged_wins() -> None:
    training = Training()
    tracker = Tracker(loader())
    for inputs, target in tracker:
        training.step(inputs, target)
        tracker.log(loss=torch.tensor(2.0, requires_grad=True), lr=0.5, tokens=64)
    assert column(tracker, "loss") == [2.0] * 3
    assert column(tracker, "lr") == [0.5] * 3
    assert column(tracker, "tokens") == [64] * 3
    assert all(rate > 0 for rate in column(tracker, "tokens_per_s")[1:])


def test_an_unknown_name_to_log_offers_the_nearest() -> None:
    tracker = Tracker([1])
    with pytest.raises(ValueError, match="did you mean 'loss'"):
        tracker.log(los=1.0)


def test_tokens_are_counted() -> None:
    batch = BatchEncoding({"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    tracker = Tracker([batch, batch])
    for _ in tracker:
        pass
    assert column(tracker, "tokens") == [16, 16]
    assert column(tracker, "samples") == [2, 2]


def test_break_ends_it_cleanly() -> None:
    training = Training()
    tracker = Tracker(loader())
    for inputs, target in tracker:
        training.step(inputs, target)
        if len(training.losses) == 2:
            break
    assert tracker.over()
    assert tracker.status().state == "stopped"
    assert column(tracker, "loss") == training.losses


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_the_body_raises_ends_it_cleanly(error: type[BaseException]) -> None:
    """The notebook's stop button raises KeyboardInterrupt at any point of the loop."""
    training = Training()
    tracker = Tracker(loader())

    def loop() -> None:
        for inputs, target in tracker:
            training.step(inputs, target)
            raise error

    with pytest.raises(error):
        loop()
    assert tracker.over()
    assert tracker.status().state == "stopped"
    assert column(tracker, "loss") == training.losses


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, "stopped"), (OSError, "failed")])
def test_what_the_loader_raises_ends_it_cleanly(error: type[BaseException], state: str) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise error("disk")

    tracker = Tracker(broken())
    with pytest.raises(error):
        for _ in tracker:
            pass
    status = tracker.status()
    assert (status.state, status.step) == (state, 1)
    assert status.error == ("OSError: disk" if state == "failed" else None)


def test_an_iterator_that_is_dropped_ends_it() -> None:
    tracker = Tracker(loader())
    batches = iter(tracker)
    next(batches)
    assert not tracker.over()
    del batches
    gc.collect()
    assert tracker.over()


def test_a_loop_that_gc_ends_inside_the_lock() -> None:
    """A finalizer runs at any allocation, also in the thread that holds the lock."""

    def dropped() -> None:
        batches = iter(Tracker(loader()))
        next(batches)
        with INTERCEPTION._lock:
            del batches
            gc.collect()

    thread = threading.Thread(target=dropped, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive()


def test_a_viewer_that_raises_ends_the_loop_cleanly() -> None:
    def fails(_: Watched) -> None:
        raise OSError("no display")

    tracker = Tracker(loader(), show=fails)
    with pytest.raises(OSError, match="no display"):
        next(iter(tracker))
    assert tracker.over()
    assert tracker.status().error == "OSError: no display"


def test_two_passes_at_once_are_refused() -> None:
    tracker = Tracker(loader())
    with pytest.raises(RuntimeError, match=r"in a loop already.*one pass at a time"):
        list(zip(tracker, tracker, strict=True))
    assert tracker.over()


def test_stop_ends_the_loop_after_the_turn() -> None:
    training = Training()
    tracker = Tracker(loader())
    for inputs, target in tracker:
        training.step(inputs, target)
        tracker.stop()
    assert len(training.losses) == 1
    assert tracker.status().state == "stopped"


def test_several_passes_are_one_series() -> None:
    training = Training()
    with Tracker(loader()) as tracker:
        for _ in range(2):
            for inputs, target in tracker:
                training.step(inputs, target)
            assert not tracker.over()
    assert tracker.status().state == "finished"
    assert column(tracker, "loss") == training.losses
    assert column(tracker, "step") == [1, 2, 3, 4, 5, 6]
    assert column(tracker, "epoch")[-1] == 2


def test_an_error_between_passes_is_the_trackers() -> None:
    tracker = Tracker(loader())

    def passes() -> None:
        with tracker:
            for _ in tracker:
                pass
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        passes()
    assert tracker.status().error == "ValueError: no"


def test_a_second_pass_without_a_context_says_how() -> None:
    tracker = Tracker(loader())
    for _ in tracker:
        pass
    with pytest.raises(RuntimeError, match=r"for several passes use: with ortlab\.track"):
        iter(tracker)


def test_the_innermost_loop_hears_backward() -> None:
    outer, inner = Training(), Training()
    outside = Tracker(loader())
    insides = []
    for inputs, target in outside:
        inside = Tracker(loader())
        insides.append(inside)
        for batch in inside:
            inner.step(*batch)
        outer.step(inputs, target)
    assert column(outside, "loss") == outer.losses
    assert [loss for inside in insides for loss in column(inside, "loss")] == inner.losses


def test_other_threads_are_not_heard() -> None:
    training, other = Training(), Training()
    tracker = Tracker(loader())
    for inputs, target in tracker:
        training.step(inputs, target)
        thread = threading.Thread(target=other.step, args=(inputs, target))
        thread.start()
        thread.join()
    assert column(tracker, "loss") == training.losses
    assert other.losses[0] != training.losses[0]


def test_who_replaced_backward_meanwhile_keeps_it() -> None:
    original = torch.Tensor.backward
    calls: list[float] = []
    training = Training()
    try:
        for turn, (inputs, target) in enumerate(Tracker(loader())):
            if turn == 0:
                torch.Tensor.backward = theirs = noting(torch.Tensor.backward, calls)  # type: ignore
            training.step(inputs, target)
        assert torch.Tensor.backward is theirs
        training.step(inputs, target)
        assert calls == training.losses
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def noting(backward: Callable[..., Any], calls: list[float]) -> Callable[..., Any]:
    def theirs(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(loss.item())
        backward(loss, *args, **kwargs)

    return theirs


def test_a_backward_that_fails_raises_as_ever() -> None:
    tracker = Tracker([1])

    def loop() -> None:
        for _ in tracker:
            torch.zeros(()).backward()

    with pytest.raises(RuntimeError, match="does not require grad"):
        loop()
    assert tracker.over()


def test_a_loop_without_backward_is_timed_too() -> None:
    tracker = Tracker(loader())
    for _ in tracker:
        pass
    assert column(tracker, "step") == [1, 2, 3]
    first, *rates = column(tracker, "samples_per_s")
    assert first != first, "the first step may compile"
    assert all(rate > 0 for rate in rates)
    assert all(loss != loss for loss in column(tracker, "loss"))


def test_the_loader_can_be_collected_when_it_is_over() -> None:
    data = loader()
    gone = weakref.ref(data)
    tracker = Tracker(data)
    for _ in tracker:
        pass
    del data
    gc.collect()
    assert gone() is None
    assert tracker.recorder.count == 3


def test_a_tracker_that_is_never_used_leaves_nothing() -> None:
    tracker = Tracker(loader())
    assert tracker.status().state == "starting"
    assert not tracker.over()


def test_what_cannot_be_looped_over() -> None:
    with pytest.raises(ValueError, match="cannot loop over a int"):
        Tracker(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no length"):
        len(Tracker(iter([])))
