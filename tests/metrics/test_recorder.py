"""Tests of the recorder's bounds and thinning, compared with numpy, and of the memory sampler."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from ortlab.history.run_folder import MetricsFile
from ortlab.metrics.recorder import COLUMNS, INDEX, NAN, Event, Recorder, Rows, Sample, merged
from ortlab.utils.process_memory import SAMPLER, DeviceSampler, Memory
from tests.support.waiting import HANGS_S


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.blocks: list[Rows] = []
        self.events: list[Event] = []
        self.threads: set[int] = set()
        self.closed = 0

    def write(self, rows: Rows, events: Sequence[Event]) -> None:
        self.blocks.append(rows)
        self.events += events
        self.threads.add(threading.get_ident())

    def close(self) -> None:
        self.closed += 1

    @property
    def rows(self) -> Rows:
        return np.concatenate(self.blocks)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(capacity=64)
    yield recorder
    recorder.close()


def fill(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.add(Sample(step=step, loss=float(step), peak_bytes=float(step % 10), samples=2.0))


def test_a_sample_has_the_columns_in_order() -> None:
    assert Sample.__slots__ == tuple(column.name for column in COLUMNS)


def test_every_step_reaches_the_sinks_once_and_in_order() -> None:
    kept = Kept()
    recorder = Recorder(capacity=64, sinks=[kept])
    fill(recorder, range(1, 5001))
    recorder.event(Event("note", 5000, 1.0, "done"))
    recorder.close()
    recorder.close()
    assert kept.rows[:, INDEX["step"]].tolist() == list(range(1, 5001))
    assert [event.text for event in kept.events] == ["done"]
    assert kept.closed == 1
    assert threading.get_ident() not in kept.threads


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 1000, 4097])
def test_the_thinned_series_means_what_it_merges(recorder: Recorder, steps: int) -> None:
    fill(recorder, range(1, steps + 1))
    rows = recorder.rows()
    last = rows[:, INDEX["step"]]
    assert len(rows) <= 65
    assert last[-1] == steps
    assert (np.diff(last) > 0).all()
    begins = np.concatenate([[0], last[:-1]])
    assert np.allclose(rows[:, INDEX["loss"]], (begins + 1 + last) / 2)
    for begin, end, peak in zip(begins, last, rows[:, INDEX["peak_bytes"]], strict=True):
        assert peak == max(step % 10 for step in range(int(begin) + 1, int(end) + 1))
    assert recorder.total("samples") == 2 * steps
    assert np.isnan(rows[:, INDEX["lr"]]).all()


def test_merging_leaves_out_what_is_unknown() -> None:
    rows = np.full((3, len(COLUMNS)), NAN)
    rows[:, INDEX["loss"]] = [1.0, NAN, 5.0]
    assert merged(rows, 2)[:, INDEX["loss"]].tolist() == [1.0, 5.0]


@pytest.mark.parametrize("steps", [63, 64, 1000])
@pytest.mark.parametrize("after", [-math.inf, 0, 31, 62])
def test_what_ends_after_a_step(recorder: Recorder, steps: int, after: float) -> None:
    fill(recorder, range(1, steps + 1))
    rows = recorder.rows()
    expected = rows[rows[:, INDEX["step"]] > after]
    assert len(expected)
    assert np.array_equal(recorder.rows(after), expected, equal_nan=True)


def test_the_mean_of_the_newest(recorder: Recorder) -> None:
    assert math.isnan(recorder.mean("loss", 4))
    fill(recorder, range(1, 4))
    assert recorder.mean("loss", 4) == 2.0
    fill(recorder, range(4, 5001))
    assert recorder.mean("loss", 4) == (4997 + 5000) / 2
    assert math.isnan(recorder.mean("lr", 4))


def test_a_view_that_follows_gets_each_step_once(recorder: Recorder) -> None:
    cursor, seen = 0, []
    for begin in range(0, 3000, 50):
        fill(recorder, range(begin + 1, begin + 51))
        rows, cursor = recorder.since(cursor)
        seen += rows[:, INDEX["step"]].tolist()
    assert seen == list(range(1, 3001))
    assert len(recorder.since(cursor)[0]) == 0


def test_a_view_gets_no_more_than_it_asked_for(recorder: Recorder) -> None:
    fill(recorder, range(1, 1001))
    _, cursor = recorder.since(0)
    fill(recorder, range(1001, 2001))
    rows, _ = recorder.since(cursor, limit=16)
    assert len(rows) <= 16
    assert rows[-1, INDEX["step"]] == 2000
    assert rows[:, INDEX["step"]].min() > 1000


def test_a_late_view_gets_the_whole(recorder: Recorder) -> None:
    fill(recorder, range(1, 5001))
    rows, cursor = recorder.since(0)
    assert rows[0, INDEX["step"]] < 200
    assert rows[-1, INDEX["step"]] == cursor == 5000
    late, _ = recorder.since(1000)
    assert late[0, INDEX["step"]] > 1000
    assert late[-1, INDEX["step"]] == 5000


def test_a_million_steps_stay_within_bounds(tmp_path: Path) -> None:
    """Without thinning they would take 160 MiB; the file has every one of them."""
    file = tmp_path / "metrics.jsonl"
    recorder = Recorder(sinks=[MetricsFile(file)])
    process = psutil.Process()
    sizes = []
    for step in range(1, 1_000_001):
        recorder.add(Sample(step, step * 1e-3, 0.0, 0.5, 1e-3))
        if step % 1000 == 0:
            recorder.event(Event("eval", step, 0.0, "", {"loss": 0.5}))
        if step % 100_000 == 0:
            sizes.append(process.memory_info().rss)
    recorder.close()
    assert max(sizes) - sizes[0] < 60 * 1024**2
    assert len(recorder.rows()) <= 4097
    assert recorder.rows()[-1, 0] == 1_000_000
    assert len(recorder.events()) == 1000
    assert not recorder.events("warning")
    with file.open("rb") as lines:
        assert sum(line.startswith(b"[") for line in lines) == 1_000_000


def test_events_beyond_the_capacity_are_thinned(recorder: Recorder) -> None:
    for step in range(1000):
        recorder.event(Event("eval", step, 0.0))
    recorder.event(Event("note", 1000, 0.0))
    steps = [event.step for event in recorder.events("eval")]
    assert len(recorder.events()) <= 64
    assert steps[0] == 0
    assert steps[-1] > 900


def test_an_add_waits_for_no_sink() -> None:
    """If the disk hangs, the training continues and lost samples are counted."""
    hangs, release = threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, rows: Rows, events: Sequence[Event]) -> None:
            hangs.set()
            assert release.wait(HANGS_S)
            super().write(rows, events)

    class Small(Recorder):
        BACKLOG = 500
        PENDING = 100

    sink = Hanging()
    recorder = Small(sinks=[sink])
    fill(recorder, range(1, 2))
    assert hangs.wait(HANGS_S)
    fill(recorder, range(2, 5002))
    assert recorder.rows()[-1, 0] == 5001
    release.set()
    recorder.close()
    (warning,) = recorder.events("warning")
    lost = int(warning.text.split()[0])
    assert lost > 4000
    assert len(sink.rows) + lost == 5001


def test_a_flush_waits_for_what_another_thread_takes_from_the_queue() -> None:
    taken, release = threading.Event(), threading.Event()

    class OnDevice:
        """A loss that the device still computes."""

        def __float__(self) -> float:
            taken.set()
            assert release.wait(HANGS_S)
            return 1.0

    sink = Kept()
    recorder = Recorder(sinks=[sink])
    recorder.add(Sample(step=1, loss=OnDevice()))  # type: ignore[arg-type]
    assert taken.wait(HANGS_S)  # by the writer thread
    flushing = threading.Thread(target=recorder.flush)
    flushing.start()
    flushing.join(0.2)
    assert flushing.is_alive()
    release.set()
    flushing.join(HANGS_S)
    assert sink.rows[:, 0].tolist() == [1]
    recorder.close()


class Failing(Kept):
    """A sink that cannot write until there is `room`."""

    def __init__(self) -> None:
        super().__init__()
        self.room = False

    def write(self, rows: Rows, events: Sequence[Event]) -> None:
        if not self.room:
            raise OSError(28, "No space left on device")
        super().write(rows, events)


def test_a_sink_that_fails_gets_it_later_and_others_at_once() -> None:
    full, kept = Failing(), Kept()
    recorder = Recorder(sinks=[full, kept])
    for first in (1, 11):
        fill(recorder, range(first, first + 10))
        recorder.flush()
    assert len(kept.rows) == 20
    (warning,) = recorder.events("warning")
    assert "No space left on device" in warning.text
    assert recorder.trouble is not None
    full.room = True
    recorder.flush()
    assert recorder.trouble is None
    recorder.close()
    assert [row[0] for row in full.rows] == list(range(1, 21))
    assert [event.text for event in recorder.events("warning")[1:]] == ["metrics are written again"]


def test_what_a_sink_did_not_take_is_told_and_written_by_another_close() -> None:
    full = Failing()
    recorder = Recorder(sinks=[full])
    fill(recorder, range(1, 11))
    with pytest.raises(OSError, match="No space left on device"):
        recorder.close()
    full.room = True
    recorder.close()
    assert [row[0] for row in full.rows] == list(range(1, 11))


def test_the_writer_thread_exists_only_while_it_is_needed() -> None:
    recorder = Recorder()
    assert recorder._thread is None
    fill(recorder, range(1, 3))
    thread = recorder._thread
    assert thread is not None
    assert thread.is_alive()
    recorder.close()
    assert not thread.is_alive()


def test_losses_may_be_tensors(recorder: Recorder) -> None:
    recorder.add(Sample(step=1, loss=torch.tensor(0.25), grad_norm=torch.tensor(2.0)))
    last = recorder.last
    assert last is not None
    assert (last.loss, last.grad_norm) == (0.25, 2.0)
    assert recorder.not_finite_step is None


class Remote:
    """A 0-d value on a device, as the recorder sees it: torch.stack(...) fetches it."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)
        self.device = torch.device("cuda")

    def detach(self) -> torch.Tensor:
        return self.value


def test_values_on_a_device_are_fetched_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fetchers: list[str] = []
    stack = torch.stack

    def noting(tensors: list[torch.Tensor]) -> torch.Tensor:
        fetchers.append(threading.current_thread().name)
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", noting)
    recorder = Recorder()
    for step in range(1, 101):
        recorder.add(Sample(step, loss=Remote(1.0 if step < 40 else math.nan)))  # type: ignore[arg-type]
    recorder.close()
    assert recorder.not_finite_step == 40
    assert set(fetchers) == {"ortlab-recorder"}
    assert len(fetchers) <= 5  # one wait for all collected steps instead of one per step


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_the_first_value_that_is_not_finite_is_noted(recorder: Recorder, name: str) -> None:
    recorder.add(Sample(step=1, loss=1.0))
    recorder.add(Sample(step=2, **{"loss": 1.0, name: torch.tensor(math.inf)}))  # type: ignore[arg-type]
    recorder.add(Sample(step=3, loss=math.nan))
    recorder.rows()
    assert recorder.not_finite_step == 2


def test_under_a_loss_scale_the_first_that_cannot_be_halved_is_noted(recorder: Recorder) -> None:
    def add(step: int, scale: float, skipped: bool) -> None:
        loss = torch.tensor(math.nan if skipped else 1.0)
        tensors = {"loss_scale": torch.tensor(scale), "skipped": torch.tensor(skipped)}
        recorder.add(Sample(step=step, loss=loss, grad_norm=loss, **tensors))  # type: ignore[arg-type]

    add(1, 1.0, True)
    add(2, 0.5, False)  # a run that resumes from a checkpoint may begin like this
    assert recorder.count == 2
    assert recorder.not_finite_step is None
    add(3, 0.25, True)
    add(4, 0.125, True)
    assert recorder.count == 4
    assert recorder.not_finite_step == 3
    assert recorder.total("skipped") == 3


def test_the_first_skipped_step_is_an_event_for_views_and_sinks() -> None:
    kept = Kept()
    recorder = Recorder(sinks=[kept])
    for step in range(1, 9):
        scale, skipped = 2.0 ** (20 - step), step in (3, 4, 7)
        recorder.add(Sample(step=step, time_s=step / 2, loss_scale=scale, skipped=skipped))
        assert recorder.count == step  # each one is absorbed alone
    recorder.close()
    (event,) = recorder.events("note")
    assert (event.step, event.time_s) == (3, 1.5)
    assert event.text == "step 3 was skipped: its gradients overflowed; the loss scale is 131,072"
    assert kept.events == [event]
    assert recorder._outlets == []  # none has a backlog


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_sampler_sees_a_peak_between_two_readings() -> None:
    sampler = DeviceSampler()
    sampler.PERIOD_S = 60.0  # only `end` reads
    meter = sampler.start()
    before = meter.take().rss_bytes
    size = 200 * 1024**2
    block = (ctypes.c_char * size)()
    ctypes.memset(block, 1, size)
    del block
    sampler.end(meter)
    assert meter.take().peak_bytes > before + 0.9 * size
    assert meter.highest_peak_bytes() > before + 0.9 * size
    assert meter.take().rss_bytes < before + 0.5 * size


@linux
def test_a_peak_belongs_to_one_interval() -> None:
    sampler = DeviceSampler()
    sampler.PERIOD_S = 0.02
    meter = sampler.start()
    before = meter.take().rss_bytes
    size = 100 * 1024**2
    block = (ctypes.c_char * size)()
    ctypes.memset(block, 1, size)
    high = meter.highest_peak_bytes
    deadline = time.monotonic() + HANGS_S
    while high() < before + 0.9 * size:  # until the sampler has seen it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    del block
    while meter.take().peak_bytes > high() - 0.5 * size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sampler.end(meter)


def test_the_sampler_runs_while_somebody_measures() -> None:
    first, second = SAMPLER.start(), SAMPLER.start()
    assert SAMPLER.running
    SAMPLER.end(first)
    SAMPLER.end(first)
    assert SAMPLER.running
    SAMPLER.end(second)
    assert not SAMPLER.running
    assert "ortlab-memory" not in {thread.name for thread in threading.enumerate()}
    assert first.take().rss_bytes > 1024**2


def test_measuring_may_end_while_the_lock_is_held() -> None:
    """Garbage collection may end a dropped loop while another reader holds the lock."""
    sampler = DeviceSampler()
    sampler.PERIOD_S = 0.001  # its thread waits for the lock, too
    meter = sampler.start()

    def end() -> None:
        with sampler._lock:
            time.sleep(0.05)
            sampler.end(meter)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    assert not sampler.running


def test_memory_has_the_samples_names() -> None:
    memory = Memory(*range(1, 7))
    sample = Sample(step=1, **memory.as_dict())
    assert [getattr(sample, name) for name in memory.as_dict()] == [1, 2, 3, 4, 5, 6]


def test_a_number_of_numpy_is_a_number() -> None:
    """The device of a numpy number is a string, unlike a tensor's."""
    recorder = Recorder()
    recorder.add(Sample(step=1, loss=np.float64(0.5), lr=np.float32(0.25)))
    recorder.close()
    assert recorder.last is not None
    assert (recorder.last.loss, recorder.last.lr) == (0.5, 0.25)
