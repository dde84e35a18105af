"""Tests of failing data, numbers and memory: the messages, the pause, and how a run resumes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import NotFinite
from ortlab.engines.nonfinite import first_bad
from ortlab.engines.ortmodule import compat, dispatch
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.history import sqlite_index
from ortlab.history.run_folder import RunFolder
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text
from ortlab.session import session
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, memory_advice, run_worker
from ortlab.training.control import Control, PauseReason
from ortlab.training.failures import FailureHandler, FailurePolicy, typed
from ortlab.training.run import Run
from ortlab.training.run_progress import SLOW_READ_S
from ortlab.utils.errors import concise, out_of_memory
from ortlab.utils.process_memory import SAMPLER, memory
from tests.support.needed_engines import needs
from tests.support.training_parts import Parts
from tests.support.waiting import HANGS_S, until

CHOSEN: dict[str, Any] = {
    "engine": "eager", "device": "cpu", "loss": "cross_entropy", "batch_size": 4,
    "num_train_epochs": 2,
    "lr": 0.01,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tidy(
    threads_end: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> Iterator[None]:
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    yield
    for run in session.runs:
        run.stop()
        run.wait_over(60)
    assert not SAMPLER.running


class Table(Dataset[Any]):
    """Samples that can be damaged, repaired, and made to hang."""

    def __init__(self, count: int = 48) -> None:
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
        self.bad: set[int] = set()
        self.hangs: threading.Event | None = None
        self.read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if index in self.bad:
            raise KeyError("the column is gone")
        if self.hangs is not None and self.read > 20:
            assert self.hangs.wait(HANGS_S)
        return self.inputs[index], self.inputs[index, :3].argmax()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def losses(run: Run) -> list[float]:
    found: list[float] = run.recorder.rows()[:, INDEX["loss"]].tolist()
    return found


def steps(run: Run) -> list[float]:
    found: list[float] = run.recorder.rows()[:, INDEX["step"]].tolist()
    return found


def undisturbed(data: Any, **chosen: Any) -> list[float]:
    run = ortlab.finetune(network(), data, **{**CHOSEN, **chosen})
    run.result(60)
    return losses(run)


# --- evaluations


def evaluations(run: Run) -> list[Any]:
    return [(event.step, event.values["loss"]) for event in run.recorder.events("eval")]


class Failing(Table):
    """Samples of which one cannot be read from the second evaluation on."""

    def __getitem__(self, index: int) -> Any:
        if self.read >= len(self):
            self.bad = {7} if not self.mended else set()
        return super().__getitem__(index)

    mended = False


def test_an_evaluation_that_fails_holds_the_run_and_is_made_again() -> None:
    plain = ortlab.finetune(network(), Table(), eval_dataset=Table(), **CHOSEN)
    plain.result(60)
    held_out = Failing()
    run = ortlab.finetune(network(), Table(), eval_dataset=held_out, hold=True, **CHOSEN)
    with pytest.raises(KeyError, match="column is gone") as raised:
        run.result(60)
    assert (run.state, run.step) == ("paused", 12)
    notes = "\n".join(raised.value.__notes__)
    assert "the Failing raised this at index 7" in notes
    assert "the evaluation after step 12 failed" in notes
    assert (
        f"{run.name} is paused after step 12: run.resume() or the Resume button evaluates again"
        in notes
    )
    assert run.status().badges == ("held: the evaluation failed",)
    held_out.mended = True
    run.resume()
    assert run.result(60).state == "finished"
    assert losses(run) == losses(plain)
    assert evaluations(run) == evaluations(plain)


def test_an_evaluation_that_fails_can_be_left_out() -> None:
    run = ortlab.finetune(network(), Table(), eval_dataset=Failing(), hold=True, **CHOSEN)
    for step in (12, 24):
        with pytest.raises(KeyError):
            run.result(60)
        assert run.step == step
        run.resume(skip=True)
    assert run.result(60).state == "finished"
    assert [step for step, _ in evaluations(run)] == [0]
    assert losses(run) == undisturbed(Table())


def test_a_script_gets_what_an_evaluation_raised() -> None:
    run = ortlab.finetune(network(), Table(), eval_dataset=Failing(), **CHOSEN)
    with pytest.raises(KeyError) as raised:
        run.result(60)
    assert "the evaluation after step 12 failed" in raised.value.__notes__
    assert RunFolder(run.folder).read_checkpoint().position.step == 12


def test_a_run_whose_first_evaluation_fails_says_what_and_where() -> None:
    """The run fails even with hold=True, as no progress is lost at that point."""
    held_out = Table()
    held_out.bad = {7}
    run = ortlab.finetune(network(), Table(), eval_dataset=held_out, hold=True, **CHOSEN)
    with pytest.raises(KeyError):
        run.result(60)
    first, *notes = (run.status().error or "").splitlines()
    assert first == "KeyError: 'the column is gone'"
    assert "the Table raised this at index 7" in notes
    assert "the evaluation before the first step failed" in notes
    kept = RunFolder(run.folder).read_json("run")["error"].splitlines()
    assert kept[:3] == [first, *notes[:2]]
    assert kept[3].endswith('raise KeyError("the column is gone"), in __getitem__')


class Hungry(nn.Module):
    """Once trained, it requests more memory than exists to evaluate more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.trained = False
        self.sizes: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.trained |= self.training
        if self.trained and not self.training:
            self.sizes.append(len(inputs))
            if len(inputs) > 2:
                torch.empty(2**60)
        found: torch.Tensor = self.inner(inputs)
        return found


def test_an_evaluation_that_does_not_fit_takes_fewer_samples_at_a_time() -> None:
    plain = ortlab.finetune(network(), Table(), eval_dataset=Table(), **CHOSEN)
    plain.result(60)
    model = Hungry()
    run = ortlab.finetune(model, Table(), eval_dataset=Table(), hold=True, **CHOSEN)
    assert run.result(60).state == "finished"
    assert model.sizes == [4] + [2] * 48, "it is known from the first time on"
    assert losses(run) == losses(plain)
    for (step, found), (expected_step, expected) in zip(
        evaluations(run), evaluations(plain), strict=True
    ):
        assert step == expected_step
        assert found == pytest.approx(expected, rel=1e-6)
    (told,) = [event.text for event in run.recorder.events("warning")]
    assert told == ("not enough memory to evaluate 4 samples at a time: using 2 from now on")


def test_an_evaluation_in_batches_of_a_loader_that_does_not_fit_holds_the_run() -> None:
    loader = DataLoader(Table(), batch_size=4)
    run = ortlab.finetune(Hungry(), Table(), eval_dataset=loader, hold=True, **CHOSEN)
    with pytest.raises(RuntimeError, match="allocate memory"):
        run.result(60)
    assert run.status().badges == ("held: out of memory",)
    run.stop()
    assert run.result(60).state == "stopped"


# --- data


@pytest.mark.parametrize("loader", [False, True])
def test_data_that_raises_holds_the_run_and_mended_goes_on_bit_by_bit(loader: bool) -> None:
    """Dropout and the order of the data continue as if nothing had happened."""

    def given(table: Table) -> Any:
        return DataLoader(table, batch_size=4, shuffle=True) if loader else table

    expected = undisturbed(given(Table()))
    table = Table()
    table.bad = {7}
    run = ortlab.finetune(network(), given(table), hold=True, **CHOSEN)
    with pytest.raises(KeyError, match="column is gone") as raised:
        run.result(60)
    notes = "\n".join(raised.value.__notes__)
    assert run.step > 0
    assert run.state == "paused"
    assert f"the data failed in step {run.step + 1}, after" in notes
    assert "of epoch 1" in notes
    assert f"{run.name} is paused at step {run.step}: fix the data" in notes
    # From Python 3.12 on, the frame of an inlined list comprehension no longer shows the position.
    reading = r"the DataLoader was reading (index 7|indices [\d, ]*\b7\b[\d, ]*) of the Table"
    assert re.search(reading if loader else "the Table raised this at index 7", notes)
    assert run.status().badges == ("held: the data failed",)
    assert "fix the data" in (run.status().error or "")
    table.bad = set()
    run.resume()
    assert run.result(60).state == "finished"
    assert losses(run) == expected
    assert (run.status().badges, run.status().error) == ((), None)


def test_data_that_was_not_mended_holds_again_and_can_be_left_out() -> None:
    table = Table()
    table.bad = {7}
    run = ortlab.finetune(network(), table, hold=True, **CHOSEN)
    for epoch in (1, 2):
        for _ in range(2):
            with pytest.raises(KeyError):
                run.result(60)
            at = run.step
            if _ == 0:
                run.resume()
        run.resume(skip=True)
        assert at >= 12 * (epoch - 1)
    assert run.result(60).steps == 2 * 12 - 2
    left_out = [event.text for event in run.recorder.events("note")]
    assert [text.partition(",")[0] for text in left_out] == ["4 samples are skipped"] * 2
    with pytest.raises(ValueError, match=r"skip=True skips samples .* use run.resume\(\)"):
        run.resume(skip=True)


def test_a_script_gets_what_the_data_raised_and_where() -> None:
    table = Table()
    table.bad = {7}
    run = ortlab.finetune(network(), table, **CHOSEN)
    with pytest.raises(KeyError, match="column is gone") as raised:
        run.result(60)
    assert run.state == "failed"
    assert raised.value.__notes__[0] == "the Table raised this at index 7"
    assert f"in step {run.step + 1}, after {4 * run.step} samples" in raised.value.__notes__[1]
    assert RunFolder(run.folder).read_checkpoint().position.step == run.step > 0


def test_nothing_is_held_before_the_first_step() -> None:
    table = Table()
    table.bad = set(range(48))
    run = ortlab.finetune(network(), table, hold=True, **CHOSEN)
    with pytest.raises(KeyError):
        run.result(60)
    until(run.over)
    assert run.state == "failed"


def test_samples_that_come_at_once_are_named_one_by_one() -> None:
    class AtOnce(Table):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    table = AtOnce()
    table.bad = {9}
    run = ortlab.finetune(network(), table, **CHOSEN)
    with pytest.raises(KeyError) as raised:
        run.result(60)
    assert "the AtOnce raised this at index 9" in raised.value.__notes__


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat data as hanging after one second."""
    monkeypatch.setattr(run_worker, "_LATE_READ_S", 0.5)
    monkeypatch.setattr(run_worker, "_HANGING_READ_S", 1.0)


@pytest.mark.parametrize("loader", [False, True])
def test_data_that_hangs_holds_the_run_until_it_comes(impatient: None, loader: bool) -> None:
    """Meanwhile the last step is kept; the losses are those of data that arrived at once."""

    def given(table: Table) -> Any:
        return DataLoader(table, batch_size=4, shuffle=True) if loader else table

    expected = undisturbed(given(Table()))
    table = Table()
    table.hangs = threading.Event()
    run = ortlab.finetune(network(), given(table), hold=True, **CHOSEN)
    with pytest.raises(RuntimeError, match="the data of step 6 has not arrived for 1 s") as raised:
        run.result(60)
    assert run.state == "running"
    place, line, waits = raised.value.__notes__
    assert re.fullmatch(r"reading (index|indices) [\d, ]+ of the Table", place)
    assert line.endswith("assert self.hangs.wait(HANGS_S), in __getitem__")
    assert "after step 5: it resumes when the data arrives, and run.resume() keeps waiting" in waits
    assert run.status().badges == ("held: the data hangs",)
    kept = RunFolder(run.folder).checkpoint_path("last-5")
    until(kept.exists)
    assert Checkpoint.load(kept).position.step == 5
    table.hangs.set()
    until(lambda: run.status().badges == ())
    assert run.result(60).state == "finished"
    assert losses(run) == expected


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_held_by_data_can_be_paused(impatient: None, resumed: bool) -> None:
    """A pause or a resume ends the hold; a paused run stays paused when the data arrives."""
    table = Table()
    table.hangs = threading.Event()
    run = ortlab.finetune(network(), table, hold=True, **CHOSEN)
    until(lambda: run.status().badges == ("held: the data hangs",))
    if resumed:
        run.resume()
        time.sleep(2 * SLOW_READ_S)
        assert run.status().badges == ()
    run.pause()
    assert run.status().badges == ()
    table.hangs.set()
    until(lambda: run.state == "paused")
    assert run.step == 6
    run.resume()
    assert run.result(60).state == "finished"
    run.resume()
    run.stop()
    assert run.result(5).state == "finished"  # it had already ended


class Once(Table):
    """Samples of which the first of the second epoch fails on its first read."""

    failed = False

    def __getitem__(self, index: int) -> Any:
        if self.read == len(self) and not self.failed:
            self.failed = True
            raise KeyError("the column is gone")
        return super().__getitem__(index)


def test_data_that_fails_in_the_first_read_of_an_epoch_has_the_order_it_had() -> None:
    """A shuffling DataLoader draws its order in that read, and a retry has the same order."""

    def given(table: Table) -> Any:
        return DataLoader(table, batch_size=4, shuffle=True)

    expected = undisturbed(given(Table()))
    run = ortlab.finetune(network(), given(Once()), hold=True, **CHOSEN)
    with pytest.raises(KeyError):
        run.result(60)
    assert run.step == 12
    run.resume()
    assert run.result(60).state == "finished"
    assert losses(run) == expected


def test_data_that_hangs_is_told_and_stop_ends_the_run() -> None:
    table = Table()
    table.hangs = threading.Event()
    model = network()
    run = ortlab.finetune(model, table, **CHOSEN)
    until(lambda: any("waiting for the data of step 6" in each for each in run.status().lines))
    began = time.monotonic()
    run.stop()
    assert run.result(60).state == "stopped"
    assert time.monotonic() - began < 60  # it does not wait for the data, which still hangs
    assert run.step == 5
    kept = RunFolder(run.folder).read_checkpoint()
    assert all(torch.equal(kept.model[name], value) for name, value in model.state_dict().items())
    assert any("the data hangs" in event.text for event in run.recorder.events("warning"))
    table.hangs.set()
    assert run._worker.thread is not None
    run._worker.thread.join(HANGS_S)
    assert not run._worker.thread.is_alive()
    assert run.state == "stopped"
    assert run.error is None


class Short:
    """Reports ten batches and yields `count`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        drawn = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            yield torch.randn(4, 4, generator=drawn), torch.arange(4) % 3


def test_data_that_ends_early_holds_the_run_and_goes_on_where_there_is_more() -> None:
    data = Short(6)
    run = ortlab.finetune(network(), data, hold=True, **{**CHOSEN, "batch_size": 16})
    with pytest.raises(RuntimeError, match="epoch 1 of the data ended after 6 of 10 micro-batches"):
        run.result(60)
    assert run.step == 6
    data.count = 10
    run.resume()
    assert run.result(60).steps == 20
    assert losses(run) == undisturbed(Short(10), batch_size=16)


@pytest.mark.parametrize("hold", [False, True])
def test_data_that_just_ends_early_is_the_end_of_the_epoch(hold: bool) -> None:
    run = ortlab.finetune(network(), Short(6), hold=hold, **{**CHOSEN, "batch_size": 16})
    if hold:
        with pytest.raises(RuntimeError, match="ended after 6 of 10"):
            run.result(60)
        run.resume()
    assert run.result(60).steps == 12
    told = [event.text for event in run.recorder.events("warning")]
    assert sum("ended after 6 of 10 micro-batches" in text for text in told) == 2


@pytest.mark.nightly
def test_a_loaders_worker_that_is_killed_holds_the_run() -> None:
    expected = undisturbed(DataLoader(Table(400), batch_size=4, shuffle=True, num_workers=1))
    loader = DataLoader(Table(400), batch_size=4, shuffle=True, num_workers=1)
    before = {*psutil.Process().children()}
    run = ortlab.finetune(network(), loader, hold=True, **CHOSEN)
    until(lambda: run.step > 2)
    run.pause()
    until(lambda: run.state == "paused")
    (worker,) = {*psutil.Process().children()} - before
    os.kill(worker.pid, signal.SIGKILL)
    run.resume()
    # Either the loader reports the dead worker, or the message it was sending is cut off.
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as raised:
        run.result(60)
    assert "the data failed in step" in "\n".join(raised.value.__notes__)
    run.resume()
    assert run.result(60).state == "finished"
    assert losses(run) == expected


# --- numbers


class Spoiled(nn.Module):
    """The second layer returns non-finite values for samples above 5."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 16), Reciprocal(), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        spoiled = self.training & (inputs > 5).any()
        scores: torch.Tensor = self.last(self.second(self.first(inputs), spoiled))
        return scores


class Reciprocal(nn.Module):
    def forward(self, inputs: torch.Tensor, spoiled: torch.Tensor) -> torch.Tensor:
        return inputs / torch.where(spoiled, 0.0, 1.0)


def test_numbers_that_fail_are_held_with_the_layer_and_the_last_good_weights() -> None:
    table, model = Table(), Spoiled()
    table.inputs.clamp_(-3, 3)
    table.inputs[7] = 9
    run = ortlab.finetune(model, table, hold=True, **{**CHOSEN, "num_train_epochs": 1})
    with pytest.raises(NotFinite) as raised:
        run.result(60)
    notes = "\n".join(raised.value.__notes__)
    good = run.step
    assert re.match(
        rf"the loss became NaN at step {good + 1} \(learning_rate=0\.01\): the output of second "
        r"\(Reciprocal\) is the first infinite value, from torch\.Tensor\.div at .*; "
        rf"the run has the weights of step {good}$",
        str(raised.value),
    )
    assert (
        f"{run.name} is paused with the weights of step {good}: if the line is wrong (a square "
        "root or logarithm of a negative number, a division by 0), correct it and train a new "
        "model; otherwise run.resume(learning_rate=0.001) or its button continues" in notes
    )
    assert run.status().advice == "learning_rate=0.001"
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.isfinite(value).all() for value in weights.values())
    kept = RunFolder(run.folder)
    assert torch.equal(Checkpoint.load(run.checkpoint()).model["last.bias"],
                       weights["last.bias"])  # fmt: skip
    run.resume(**run.advice)
    assert run.result(60).steps == 12
    assert run.current_settings.optim.learning_rate == 0.001
    found = losses(run)
    assert [step for step, loss in zip(steps(run), found, strict=True) if math.isnan(loss)
            or math.isinf(loss)] == [good + 1]  # fmt: skip
    assert steps(run) == list(range(1, 13))
    assert not torch.equal(model.state_dict()["last.bias"], weights["last.bias"])
    assert kept.read_json("run")["state"] == "finished"


def test_a_batch_that_is_nan_is_named_and_left_out() -> None:
    table = Table()
    table.inputs[7, 2] = math.nan
    chosen = {**CHOSEN, "num_train_epochs": 1, "batch_size": 2, "gradient_accumulation_steps": 2}
    run = ortlab.finetune(network(), table, hold=True, **chosen)
    with pytest.raises(NotFinite) as raised:
        run.result(60)
    told = r"the data has NaN in the batch's first element, an input, sample [01]: index 7 of the "
    assert re.search(told, str(raised.value))
    assert run.advice == {}
    run.resume()
    assert run.result(60).steps == 12


class Logarithm(nn.Module):
    """Takes the logarithm of a negative number from the second training step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        scores: torch.Tensor = self.inner(inputs)
        return torch.log(scores - 1e3) if self.calls > 1 else scores


def test_the_cause_of_a_nan_stays_with_a_run_that_is_stopped() -> None:
    run = ortlab.finetune(Logarithm(), Table(), hold=True, **CHOSEN)
    with pytest.raises(NotFinite):
        run.result(HANGS_S)
    told = (
        r"after the loss became NaN at step 2 \(learning_rate=0\.01\): the output of Logarithm is "
        r"the first NaN value, from torch\.log at .*test_failures\.py:\d+: "
        r"return torch\.log\(scores - 1e3\) .*, in forward"
    )
    held = SavedRun(run.folder)
    assert re.fullmatch(f"paused {told}", held.error or "")
    run.stop()
    assert run.result(HANGS_S).state == "stopped"
    kept = SavedRun(run.folder)
    for each in (run.status().error, kept.error, kept.status().error):
        assert re.fullmatch(f"stopped {told}", each or "")
    assert "stopped after the loss became NaN at step 2" in repr(ortlab.list_runs())
    for each in (run, kept):
        last = plain_text.text(each).splitlines()[-1]
        assert re.fullmatch(f"stopped {told}", last)


def test_the_cause_of_a_nan_in_a_first_step_is_kept() -> None:
    table = Table(8)
    table.inputs[:, 1] = math.nan
    run = ortlab.finetune(network(), table, hold=True, **CHOSEN)
    with pytest.raises(NotFinite):
        run.result(HANGS_S)
    error = SavedRun(run.folder).error or ""
    assert error.startswith(
        "NotFinite: the loss became NaN at step 1: the data has NaN in the batch's first element, "
        "an input, samples 0, 1, 2"
    )
    assert "the run ends with the weights of step 0" in error


def test_the_cause_of_a_nan_outlives_the_process(tmp_path: Path) -> None:
    """The kernel is killed while the run is paused."""
    source = """
import os, signal, torch, ortlab
inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
inputs[40, 1] = torch.nan
data = [(inputs[at : at + 4], torch.zeros(4).long()) for at in range(0, 48, 4)]
model = torch.nn.Linear(4, 3)
run = ortlab.finetune(model, data, loss="cross_entropy", engine="eager", device="cpu", hold=True)
try:
    run.result(60)
except RuntimeError:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", source]).returncode == -signal.SIGKILL
    kept = SavedRun(tmp_path / "runs" / "run-1")
    assert kept.state == "interrupted"
    assert kept.status().error == (
        "paused after the loss became NaN at step 11: the data has NaN in the batch's first "
        "element, an input, sample 0"
    )


@pytest.mark.parametrize("own_batches", [False, True])
def test_data_that_is_nan_is_skipped_in_each_epoch_after_one_pause(own_batches: bool) -> None:
    table = Table()
    table.inputs[17, 2] = math.nan
    shuffled = torch.Generator().manual_seed(3)
    loader = DataLoader(table, batch_size=4, shuffle=True, generator=shuffled)
    run = ortlab.finetune(
        network(), loader if own_batches else table, hold=True, **{**CHOSEN, "num_train_epochs": 4}
    )
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    assert "skips the data of the step, now and in later epochs" in raised.value.__notes__[-1]
    run.resume()
    assert run.result(HANGS_S).steps == 48
    bad = [step for step, loss in zip(steps(run), losses(run), strict=True) if math.isnan(loss)]
    assert len(bad) == 4
    where = f"steps {', '.join(str(int(step)) for step in bad[:3])} and 1 more"
    where = where if own_batches else "row 17"
    line = f"skipped 4 batches with values that are not finite ({where})"
    assert line in run.status().lines
    assert line in SavedRun(run.folder).status().lines
    assert SavedRun(run.folder).error is None


def test_a_run_has_no_error_before_its_pause_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []
    started, hold = threading.Event(), Control.hold

    def looked(control: Control, reason: PauseReason) -> None:
        assert started.wait(HANGS_S)
        seen.append((run.status().state, run.status().error))
        hold(control, reason)

    monkeypatch.setattr(Control, "hold", looked)
    table = Table()
    table.inputs[17, 2] = math.nan
    run = ortlab.finetune(network(), table, hold=True, **CHOSEN)
    started.set()
    with pytest.raises(NotFinite):
        run.result(HANGS_S)
    assert seen == [("running", None)]


def test_an_evaluation_that_is_due_at_a_skipped_step_is_made() -> None:
    table = Table()
    table.inputs[:, 2] = math.nan
    batches = [*DataLoader(Table(), batch_size=4)][:3]
    batches.insert(2, next(iter(DataLoader(table, batch_size=4))))
    chosen = {name: value for name, value in CHOSEN.items() if name != "batch_size"}
    chosen |= {"eval_dataset": Table(), "eval_steps": 3}
    run = ortlab.finetune(network(), batches, hold=True, **chosen)
    with pytest.raises(NotFinite):
        run.result(HANGS_S)
    run.resume()
    assert run.result(HANGS_S).steps == 8
    assert [each.step for each in run.evaluations][:2] == [0, 3]


def test_data_that_is_nan_elsewhere_pauses_again_unless_all_is_skipped() -> None:
    table = Table()
    table.inputs[[3, 17, 29, 41], 2] = math.nan
    chosen = {**CHOSEN, "batch_size": 1}
    run = ortlab.finetune(network(), table, hold=True, **chosen)
    for skip in (False, True):
        with pytest.raises(NotFinite):
            run.result(HANGS_S)
        run.resume(skip=skip)
    assert run.result(HANGS_S).steps == 96
    (line,) = (line for line in run.status().lines if line.startswith("skipped"))
    assert line == "skipped 8 batches with values that are not finite (rows 3, 17, 29 and 1 more)"
    assert len([e for e in run.recorder.events("warning") if e.text.startswith("paused")]) == 2


def test_overflows_of_fp16_that_do_not_end_are_held_and_bf16_goes_on() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = network(), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            scores: torch.Tensor = self.inner(inputs * (1.0 if self.calls < 4 else 1e6))
            return scores

    run = ortlab.finetune(Large(), Table(96), hold=True, precision="fp16", **CHOSEN)
    with pytest.raises(NotFinite, match="overflows float16") as raised:
        run.result(60)
    assert any("eager torch" in note for note in raised.value.__notes__)
    assert run.advice == {"precision": "bf16"}
    run.resume(**run.advice)
    assert run.result(60).state == "finished"
    assert np.isfinite(losses(run)[-8:]).all()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.two(torch.sqrt(0.0 * self.norm(self.one(inputs))))
        return scores


def test_numbers_that_fail_and_a_stop_end_a_run_as_any_stop_does() -> None:
    table, model = Table(), Spoiled()
    table.inputs.clamp_(-3, 3)
    table.inputs[7] = 9
    run = ortlab.finetune(model, table, hold=True, **CHOSEN)
    with pytest.raises(NotFinite, match="the loss became NaN at step"):
        run.result(HANGS_S)
    good = run.step
    run.stop()
    result = run.result(HANGS_S)
    assert (result.state, result.steps, run.error) == ("stopped", good, None)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    kept = RunFolder(run.folder)
    assert kept.read_json("run")["state"] == "stopped"
    assert kept.read_checkpoint().position.step == good


def test_where_a_step_is_first_not_finite() -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    inputs, target = torch.randn(6, 4), torch.arange(6) % 3

    def said(model: nn.Module, batch: Any) -> str:
        cause = first_bad(model, functional.cross_entropy, [batch], settings)
        return "" if cause is None else cause.told

    model = Layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    # The square root of 0 has an infinite slope, and 0 times infinity is NaN.
    assert said(model, (inputs, target)) == (
        "the gradient at the output of norm (BatchNorm1d) is the first NaN value"
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    spoiled = inputs.clone()
    spoiled[4, 1] = math.nan
    assert said(model, (spoiled, target)) == (
        "the data has NaN in the batch's first element, an input, sample 4"
    )
    named = {"x": inputs, "labels": target}
    spoilt = functional.one_hot(target, 3).double()
    spoilt[2, 0] = math.inf
    told = "the data has infinity in the batch's second element, the targets, sample 2"
    assert said(network(), (inputs, spoilt)) == told
    told = "the data has infinity in the batch's 'labels', sample 2"
    assert said(network(), named | {"labels": spoilt}) == told
    nested = {"x": {"deep": spoiled}, "labels": target}
    assert said(network(), nested) == "the data has NaN in the batch's 'x', sample 4"
    assert said(network(), (inputs, target)) == ""
    with torch.no_grad():
        model.two.weight[0, 0] = math.inf
    assert said(model, (inputs, target)) == "the weights are infinite, first in two.weight"


class Logs(nn.Module):
    """Attends with a mask of -inf, which is no fault, and takes the logarithm of 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = x.masked_fill(torch.ones_like(x).tril() == 0, -math.inf)
        return x + torch.log(masked.softmax(1)[:, :1] * 0.0)


class Attends(nn.Module):
    """Masks values with -inf, and has another input that is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Logs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spoilt: torch.Tensor = self.inner(x)
        masked = x.masked_fill(torch.ones_like(x).tril() == 0, -math.inf)
        return spoilt + masked.softmax(1)


@pytest.mark.parametrize("name", ["1", "inner.1"])
def test_the_operator_that_is_first_not_finite_is_named(name: str) -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    model = Attends() if name == "inner.1" else Attends().inner
    batch = (torch.randn(6, 4), torch.arange(6) % 3)
    cause = first_bad(model, functional.cross_entropy, [batch], settings)
    assert cause is not None
    assert re.fullmatch(
        rf"the output of {re.escape(name)} \(Logs\) is the first infinite value, from torch\.log "
        r"at .*test_failures\.py:\d+: return x \+ torch\.log\(.*, in forward",
        cause.told,
    )
    assert cause.in_code


class OfLogarithms(nn.Module):
    """Takes the logarithm of its inputs, before or after a layer."""

    def __init__(self, *, of_data: bool) -> None:
        super().__init__()
        self.inner, self.of_data = nn.Linear(4, 3), of_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(x.log() if self.of_data else x)
        return scores if self.of_data else (scores * x[:, :1]).square().log()


def test_the_sample_of_which_a_bad_value_is_computed_is_named() -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    inputs, target = torch.rand(6, 4) + 1, torch.arange(6) % 3
    inputs[4, 0] = 0
    for of_data in (True, False):
        model = OfLogarithms(of_data=of_data)
        parts = [(torch.ones(2, 4), target[:2]), (inputs, target)]
        cause = first_bad(model, functional.cross_entropy, parts, settings)
        assert cause is not None
        assert re.search(r"torch\.Tensor\.log at .*, in forward, sample 4$", cause.told)
        assert (list(cause.rows), cause.in_data) == ([2 + 4], of_data)
        spoilt = (torch.zeros(6, 4), target)
        cause = first_bad(model, functional.cross_entropy, [spoilt], settings)
        assert cause is not None
        assert not cause.rows  # all samples are bad, which is not a fault of one


class DividesByWeight(nn.Module):
    """Gives its weight, which is 0, to an operator by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.div(x, other=self.scale)


def test_a_weight_that_is_given_by_keyword_is_no_fault_of_the_data() -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    batch = (torch.ones(2, 3), torch.zeros(2).long())
    cause = first_bad(DividesByWeight(), functional.cross_entropy, [batch], settings)
    assert cause is not None
    assert "torch.div" in cause.told
    assert not cause.in_data


def test_a_value_that_no_weight_goes_into_is_a_fault_of_the_data() -> None:
    table = Table()
    table.inputs.abs_().add_(0.1)
    table.inputs[17, 2] = 0
    run = ortlab.finetune(OfLogarithms(of_data=True), table, hold=True, **CHOSEN)
    with pytest.raises(NotFinite, match=r"in forward, sample \d: index 17 of the Table") as raised:
        run.result(HANGS_S)
    assert "learning_rate" not in str(raised.value)
    notes = "\n".join(raised.value.__notes__)
    assert "no weight goes into it, so that no setting helps: correct the line, or" in notes
    assert run.advice == {}
    run.resume()  # later epochs skip the sample without another pause
    assert run.result(HANGS_S).state == "finished"
    skipped = [line for line in run.status().lines if line.startswith("skipped")]
    assert len(skipped) == 1
    assert skipped[0].endswith("(row 17)")


class Root(nn.Module):
    """A model whose forward fails for good once training has made a parameter negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.offset = nn.Linear(4, 1, bias=False), nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.first(inputs) + self.offset.sqrt()
        return shifted


def test_a_bug_in_forward_is_not_resumed_with_ever_lower_learning_rates() -> None:
    inputs = torch.randn(64, 4)
    data = [(inputs, inputs[:, :1] - 1.5)] * 100
    run = ortlab.finetune(Root(), data, loss="mse", hold=True, engine="eager", lr=0.1)
    with pytest.raises(NotFinite, match=r"from torch\.Tensor\.sqrt at .*self\.offset\.sqrt"):
        run.result(HANGS_S)
    assert run.advice == {"learning_rate": 0.01}
    run.resume(**run.advice)
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    notes = "\n".join(raised.value.__notes__)
    assert "the first step after resuming failed, too; if the line is wrong" in notes
    assert "otherwise stop the run, and start again with a lower learning_rate" in notes
    assert run.advice == {}
    run.stop()
    assert run.wait_over(HANGS_S)


def test_weights_that_are_lost_are_not_to_be_trained_on() -> None:
    model = nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    data = [(inputs, 10 * inputs.sum(1, keepdim=True))] * 8
    chosen: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 1e9,
        "max_grad_norm": None,
        "engine": "eager",
    }
    run = ortlab.finetune(
        model, data, loss="mse", hold=True, lr_scheduler_type="constant", **chosen
    )
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    notes = "\n".join(raised.value.__notes__)
    assert re.match(
        r"the loss became \w+ at step \d+, after it rose from \S+ to \S+ "
        r"\(learning_rate=1e\+09\): ",
        str(raised.value),
    )
    assert re.search(r"the weights are likely lost, as the loss rose from \S+ to \S+; stop", notes)
    assert "start again with a lower learning_rate and fresh=True (--fresh)" in notes
    assert run.advice == {}
    run.stop()
    assert run.wait_over(HANGS_S)


# --- memory


def test_what_says_that_memory_does_not_suffice() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert out_of_memory(raised.value)
    with pytest.raises(MemoryError) as raised_by_numpy:
        np.empty(2**50)
    assert out_of_memory(raised_by_numpy.value)
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(KeyError("out of memory"))


def test_what_would_fit() -> None:
    settings = FinetuneSettings.of(engine="ortmodule", batch_size=12, gradient_accumulation_steps=2)

    def advised(room: int, *, own: bool = False, **changes: Any) -> dict[str, Any]:
        return memory_advice.advice(
            settings.replace(**changes),
            own_batches=own,
            room_bytes=room,
            peak_bytes=lambda chosen: 100 * chosen.data.batch_size,
        )

    assert advised(1000) == {"batch_size": 6, "gradient_accumulation_steps": 4}
    assert advised(405) == {"batch_size": 4, "gradient_accumulation_steps": 6}
    assert advised(10) == {"batch_size": 1, "gradient_accumulation_steps": 24}
    assert advised(10, batch_size=8192) == {"batch_size": 256, "gradient_accumulation_steps": 64}
    assert advised(10, batch_size=256, gradient_accumulation_steps=64) == {
        "batch_size": 128,
        "gradient_accumulation_steps": 128,
    }
    assert advised(1000, own=True) == {"recompute": "layers"}
    assert advised(1000, batch_size=1) == {"recompute": "layers"}
    assert advised(1000, own=True, engine="ort") == {"activation_budget": 0.5}
    less: dict[str, Any] = {"own": True, "engine": "ort", "workers": 2}
    assert advised(10, **less, activation_budget=0.5) == {"activation_budget": 0.3}
    assert advised(10, **less, activation_budget=0.1) == {"zero_stage": 1}
    assert advised(1000, own=True, engine="eager") == {}
    assert advised(10, workers=4) == {"batch_size": 4, "gradient_accumulation_steps": 6}
    few: dict[str, Any] = {"workers": 4, "batch_size": 4, "engine": "eager"}
    assert advised(10, **few) == {"zero_stage": 1}
    assert advised(10, **few, zero_stage=1) == {}


NEEDS_ORT = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
SCARCE = """
import copy, json, resource, sys, psutil, torch, ortlab
from torch import nn
from torch.utils.data import TensorDataset
from ortlab.metrics.recorder import INDEX
from ortlab.notebook.static_views import plain_text
torch.set_num_threads(1)
engine, more = sys.argv[1], int(sys.argv[2])
layers = [each for _ in range(8) for each in (nn.Linear(256, 256), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(256, 3))
inputs = torch.randn(16384, 256, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs[:, :3].argmax(1))
chosen = dict(engine=engine, device="cpu", loss="cross_entropy")
few = TensorDataset(*(each[:16] for each in data.tensors))
ortlab.finetune(model, few, batch_size=4, **chosen).result()
twin = copy.deepcopy(model)
most = psutil.Process().memory_info().vms + more * 2**20
resource.setrlimit(resource.RLIMIT_AS, (most, -1))
run = ortlab.finetune(model, data, batch_size=8192, hold=True, **chosen)
held = []
while not run.over():
    try:
        run.result()
    except Exception as error:
        held.append([str(error), error.__notes__, dict(run.advice), run.state])
        assert len(held) < 9, held
        run.resume(**run.advice)
now = run.current_settings
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
plain = ortlab.finetune(twin, data, batch_size=8192, **{**chosen, "engine": "eager"})
plain.result()
losses = [each.recorder.rows()[:, INDEX["loss"]].tolist() for each in (run, plain)]
samples = now.data.batch_size * now.data.gradient_accumulation_steps
print(json.dumps([run.state, run.step, held, samples, *losses]))
"""


def scarce(engine: str, more_mib: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, engine, str(more_mib)],
        # The limit is one of address space, of which glibc reserves 64 MiB for each arena.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    state, step, held, samples, losses, plain = json.loads(done.stdout.splitlines()[-1])
    assert losses == pytest.approx(plain, rel=1e-4), "as of a step that found room at once"
    assert (state, step, samples) == ("finished", 2, 8192)
    assert held, "the limit was no limit"
    for number, (_, notes, advice, waited) in enumerate(held):
        assert waited == "paused"
        assert any("not enough memory for step" in note for note in notes)
        # There is no advice if no smaller batch is left and a session had no space for its threads.
        if engine == "eager" or number == 0 or advice:
            assert advice["batch_size"] * advice["gradient_accumulation_steps"] == 8192


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_step_that_does_not_fit_is_survived_with_smaller_micro_batches() -> None:
    scarce("eager", 80)


@NEEDS_ORT
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_so_is_one_that_does_not_fit_in_ort_whose_sessions_give_their_memory_back() -> None:
    scarce("ortmodule", 80)


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_so_is_one_in_todays_onnxruntime() -> None:
    needs("ort")
    scarce("ort", 80)


@NEEDS_ORT
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.parametrize("more_mib", range(70, 90, 2))
@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule", "ort_fused"])
def test_ten_of_ten_are_survived(engine: str, more_mib: int) -> None:
    scarce(engine, more_mib)


STACKS = """
import resource, sys, psutil, torch, ortlab
from torch import nn
from ortlab.engines.ortmodule.engine import execution_of
torch.set_num_threads(2)  # ORT's sessions have as many
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
wrapped, inputs = ortlab.wrap(model), torch.randn(4, 8)
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30, -1))
wrapped(inputs).sum().backward()
print(execution_of(wrapped).report().remarks)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
execution_of(wrapped).rest()
wrapped(inputs).sum().backward()
print(execution_of(wrapped).report().remarks)
"""


@NEEDS_ORT
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
@pytest.mark.parametrize(
    ("space", "told"),
    [
        ("limited", "('ORT could not start its thread pool: its own kernels run on one thread',)"),
        ("plenty", "()"),
    ],
    ids=["limited", "plenty"],
)
def test_a_session_whose_threads_find_no_room_does_without_them(space: str, told: str) -> None:
    """A session whose threads find no space runs on one thread, until there is space again.

    A step that was too large leaves free memory in which no stack fits; here no stack fits at all.
    """
    done = subprocess.run(
        ["bash", "-c", 'ulimit -s 8000000; exec "$@"', "-", sys.executable, "-c", STACKS, space],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == [told, "()"], "there is room again"


class Wide(nn.Module):
    """Requests, once, more memory than exists to train on more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and len(inputs) > 2:
            torch.empty(2**60)
        found: torch.Tensor = self.inner(inputs)
        return found


def test_what_was_advised_and_does_not_fit_either_asks_for_less() -> None:
    """The settings from before the advice are known not to fit and are not tried again."""
    run = ortlab.finetune(Wide(), Table(), hold=True, **{**CHOSEN, "batch_size": 16})
    advised = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="allocate memory"):
            run.result(60)
        advised.append(dict(run.advice))
        run.resume(**run.advice)
    assert run.result(60).state == "finished"
    assert [(each["batch_size"], each["gradient_accumulation_steps"]) for each in advised] == [
        (8, 2), (4, 4), (2, 8)
    ]  # fmt: skip
    assert not [e.text for e in run.recorder.events("warning") if "continues without" in e.text]


def test_data_that_does_not_fit_is_held_as_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    collate = data_loading.collate

    def scarce_collate(items: Any) -> Any:
        if len(items) > 8:
            raise MemoryError
        return collate(items)

    monkeypatch.setattr(data_loading, "collate", scarce_collate)
    run = ortlab.finetune(network(), Table(), hold=True, **{**CHOSEN, "batch_size": 16})
    with pytest.raises(MemoryError):
        run.result(60)
    assert run.advice == {"batch_size": 8, "gradient_accumulation_steps": 2}
    run.resume(**run.advice)
    assert run.result(60).state == "finished"


def test_a_run_ends_where_there_is_no_memory_to_list_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce_entry(_: Path) -> Any:
        raise MemoryError

    monkeypatch.setattr(sqlite_index, "read_entry", scarce_entry)
    run = ortlab.finetune(network(), Table(), **CHOSEN)
    assert run.result(60).state == "finished"


@NEEDS_ORT
@pytest.mark.parametrize("at", ["_reference", "_compare"])
def test_a_check_without_memory_says_nothing_of_the_graph(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    model = ortlab.wrap(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), cache=False)
    if at == "_compare":  # otherwise, it is the first check, of a quarter of the batch
        model(torch.randn(16, 4)).sum().backward()
    observe = dispatch.observe
    calls = iter(range(9))

    def scarce_observe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == ["_reference", "_compare"].index(at):
            raise RuntimeError("not enough memory: 64 bytes")
        return observe(*args, **kwargs)

    monkeypatch.setattr(dispatch, "observe", scarce_observe)
    with pytest.raises(RuntimeError, match=r"^not enough memory"):
        model(torch.randn(12, 4))
    model(torch.randn(12, 4)).sum().backward()
    assert len(execution_of(model).exports()) == 1, "one graph is right for both"
    assert not execution_of(model).report().remarks


def test_what_a_kernel_in_c_says_of_its_memory() -> None:
    error = RuntimeError("not enough memory: 64 bytes\nException raised from take at k.cc:84")
    assert out_of_memory(error)
    assert concise(error) == ["RuntimeError: not enough memory: 64 bytes"]


def test_zero_is_named_where_there_are_gpus_to_share_out_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(memory_advice, "available_bytes", lambda _: 0)
    settings = FinetuneSettings.of(engine="eager", batch_size=8)
    zero = "; workers=4, zero_stage=1 shards batch and optimizer state across 4 GPUs"

    def told(device: str, **changes: Any) -> tuple[str, str]:
        chosen = settings.replace(**changes)
        said = memory_advice.foretold(model, chosen, device, lambda _: None)
        return memory_advice.hint({}, chosen, device), said or ""

    assert all(each.endswith(zero) for each in told("cuda"))
    assert not any("zero_stage" in each for each in told("cpu")), "one memory for all ranks"
    assert not any("zero_stage" in each for each in told("cuda", batch_size=3)), "no row for one"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not any("zero_stage" in each for each in told("cuda"))


def test_a_model_that_cannot_fit_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = memory_advice.available_bytes("cpu")  # other processes change it meanwhile
    monkeypatch.setattr(memory_advice, "available_bytes", lambda _: room)
    settings = FinetuneSettings.of(engine="eager", device="cpu")
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6)
    said = memory_advice.foretold(model, settings, "cpu", lambda _: None)
    assert said is not None
    weights = sum(p.nbytes for p in model.parameters())
    assert f"weights, gradients and adamw's state alone need {memory(4 * weights)}" in said
    isolated = settings.replace(isolated=True)
    assert memory_advice.foretold(model, isolated, "cpu", lambda _: None) == said
    for stage, copies in enumerate((8, 6, 5, 4)):
        several = settings.replace(workers=2, zero_stage=stage)
        said = memory_advice.foretold(model, several, "cpu", lambda _: None)
        assert said is not None
        assert f"adamw's state alone on 2 workers need {memory(copies * weights)}" in said
    assert memory_advice.foretold(network(), settings, "cpu", lambda _: None) is None
    assert memory_advice.foretold(network(), isolated, "cpu", lambda _: None) is None
    assert "by the memory plan, need" in (
        memory_advice.foretold(network(), settings, "cpu", lambda _: 2 * room) or ""
    )


def test_a_run_that_may_not_fit_says_so_until_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_advice, "available_bytes", lambda _: 0)
    table = Table()
    table.hangs, table.read = threading.Event(), 20
    run = ortlab.finetune(network(), table, **CHOSEN)
    until(lambda: run.state == "running")
    (badge,) = run.status().badges
    assert badge.startswith("weights, gradients and adamw's state alone need ")
    table.hangs.set()
    assert run.result(60).state == "finished"
    (warning,) = run.recorder.events("warning")
    assert (warning.step, warning.text) == (0, badge)
    assert badge not in run.status().badges


# --- the handler by itself


@pytest.mark.parametrize("waits", [False, True])
def test_a_handler_pauses_where_somebody_waits_and_raises_elsewhere(waits: bool) -> None:
    parts = Parts()
    asked: list[bool] = []

    def proceed() -> bool:
        asked.append(parts.control.held is not None)
        return True

    handler = FailureHandler(
        parts.state,
        FailurePolicy(waits=waits),
        control=parts.control,
        advisor=memory_advice.MemoryAdvisor(lambda _: None, own_batches=False),
        proceed=proceed,
    )
    error = KeyError("the column is gone")
    reason = PauseReason(error, "", "")
    if not waits:
        with pytest.raises(KeyError):
            handler.pause(reason)
        assert not asked
        return
    assert handler.pause(reason)
    assert asked == [True]
    with pytest.raises(KeyError, match="column"):  # nothing can be lost in the first step
        handler.data_failed(error, 0)
    parts.step()
    assert handler.data_failed(error, 5)
    assert "after 5 samples of epoch 1" in error.__notes__[-1]
    assert handler.data_ended_early(9)
    assert not handler.data_ended_early(9), "it ends there again"
    nan = NotFinite("nan")
    assert handler.not_finite(nan, None, [])
    assert parts.control.held is not None
    assert (
        typed(parts.control.held.advice)
        == f"learning_rate={parts.settings.optim.learning_rate / 10:g}"
    )


def test_steps_that_changed_nothing_were_not_evaluated_either() -> None:
    """On a GPU a loss that is not finite is found late, maybe after an evaluation."""
    parts = Parts()
    parts.state.step = parts.state.evaluated = 5
    parts.recorder.not_finite_step = 3
    handler = FailureHandler(
        parts.state,
        FailurePolicy(),
        control=parts.control,
        advisor=memory_advice.MemoryAdvisor(lambda _: None, own_batches=False),
        proceed=lambda: True,
    )
    with pytest.raises(NotFinite, match="not finite at step 3"):
        handler.raise_not_finite()
    assert parts.state.step == parts.state.evaluated == 2
