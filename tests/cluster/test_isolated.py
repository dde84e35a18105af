"""Tests of runs in a separate process: the same results as in the kernel, surviving a crash."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.cluster.call import RankError
from ortlab.engines.base import NotFinite, StepperLost
from ortlab.session import session
from ortlab.training import data_loading
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import (
    CHOSEN,
    TOLERANCE,
    Network,
    begin,
    data,
    difference,
    losses,
    train,
)

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="signals, and gloo over loopback"),
    pytest.mark.usefixtures("one_thread", "own_workers"),
]
CGROUPS = Path("/sys/fs/cgroup")


class Slow(Network):
    """Gives a test the time to act in the middle of its run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(x)


class Crashing(Network):
    """Crashes as native code does: in training step `at`, and only once if `mark` is given."""

    def __init__(self, mark: Path | None, at: int = 7) -> None:
        super().__init__(0.3)
        self.mark, self.at, self.calls = mark, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls == self.at and (self.mark is None or not self.mark.exists()):
                if self.mark is not None:
                    self.mark.touch()
                self.fail()
        return super().forward(x)

    def fail(self) -> None:
        ctypes.string_at(0)


class Greedy(Crashing):
    """Takes more memory than its control group allows."""

    def fail(self) -> None:
        torch.ones(1 << 30)  # 4 GiB


class Overflowing(Network):
    """From its ninth step on, the input of its first layer is infinite, though no weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        if self.calls > 16:
            x = x * 3e38
        return super().forward(x)


class Wide(Network):
    """Requests more memory than exists, for several training rows or for many evaluation rows."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.says, self.trained = says, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        evaluates = self.says == "evaluation"
        self.trained |= self.training
        if self.trained and self.training != evaluates and len(x) > (4 if evaluates else 1):
            if self.says == "Python":
                raise MemoryError
            torch.empty(2**60)
        return super().forward(x)


def rank() -> int:
    """Return the process id of the process in which the run trains."""
    assert session.workers is not None
    (pid,) = session.workers.pids
    return pid


def told(run: Run, kind: str = "warning") -> list[str]:
    return [event.text for event in run.recorder.events(kind)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Run the same training in this process."""
    model = Network()
    run = train(model)
    return {"losses": losses(run), "weights": model.state_dict()}


@pytest.fixture(scope="module")
def whole() -> Any:
    """Return the losses of an isolated run with dropout that is not disturbed."""
    return losses(train(Network(0.3), isolated=True, save_steps=5))


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_it_trains_as_in_the_kernel(alone: dict[str, Any], engine: str) -> None:
    needs(engine)
    model = Network()
    run = train(model, isolated=True, engine=engine)
    assert run.engine_used == engine
    assert difference(alone["losses"], losses(run)) < TOLERANCE
    for name, value in model.state_dict().items():
        assert torch.allclose(value, alone["weights"][name], atol=1e-5), name
    assert rank() != os.getpid()
    assert not told(run)


def test_a_run_moves_out_and_back(alone: dict[str, Any]) -> None:
    run = begin(Network())
    for step, isolated in ((5, True), (20, False)):
        until(lambda step=step: run.step >= step)
        run.pause()
        run.apply(isolated=isolated)
        run.resume()
    run.result(HANGS_S)
    assert difference(alone["losses"], losses(run)) < TOLERANCE
    assert told(run, "change") == ["isolated=True (was False)", "isolated=False (was True)"]


def test_a_crash_of_native_code_costs_steps_alone(whole: Any, tmp_path: Path) -> None:
    """After SIGSEGV in forward, the run resumes by itself from its checkpoint: the same losses."""
    run = begin(Crashing(tmp_path / "crashed", 17), isolated=True, save_steps=5)
    assert run.result(HANGS_S).steps == 50
    (warning,) = told(run)
    assert warning.startswith("restarting in a new process: ")
    assert "SIGSEGV" in warning
    assert "resumed from the checkpoint of step 5" in told(run, "note")
    assert (losses(run) == whole).all()


def test_what_crashes_again_holds_the_run() -> None:
    """Otherwise it would restart forever; the kernel survives, and the run can be stopped."""
    run = begin(Crashing(None), isolated=True)
    with pytest.raises(StepperLost, match="SIGSEGV"):
        run.result(HANGS_S)
    assert run.state == "paused"
    first, second = told(run)
    assert first.startswith("restarting in a new process: ")
    assert second.startswith("paused: ")
    run.stop()
    assert run.result(HANGS_S).state == "stopped"


def test_a_killed_process_is_begun_again(whole: Any) -> None:
    run = begin(Slow(0.3), isolated=True, save_steps=5)
    until(lambda: run.step >= 8)
    os.kill(rank(), signal.SIGKILL)
    assert run.result(HANGS_S).steps == 50
    assert told(run)
    assert (losses(run) == whole).all()


@pytest.mark.parametrize("says", ["Python", "torch", "data"])
def test_memory_that_does_not_suffice_holds_the_run(
    alone: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run pauses as in the kernel; the process continues with the advised settings."""
    collate = data_loading.collate

    def scarce_collate(items: Any) -> Any:
        if len(items) > 1:
            raise MemoryError
        return collate(items)

    if says == "data":
        monkeypatch.setattr(data_loading, "collate", scarce_collate)
    run = begin(Wide(says), isolated=True, hold=True)
    with pytest.raises(MemoryError if says == "data" else RankError) as raised:
        run.result(HANGS_S)
    assert run.state == "paused"
    told = "not enough memory for step 1; 26 micro-batches of 1 make the same 26 samples"
    assert any(told in note for note in raised.value.__notes__)
    assert run.advice == {"batch_size": 1, "gradient_accumulation_steps": 26}
    trains = rank()
    run.resume(**run.advice)
    assert run.result(HANGS_S).state == "finished"
    assert rank() == trains
    assert difference(alone["losses"], losses(run)) < TOLERANCE


def test_memory_that_does_not_suffice_for_an_evaluation_there() -> None:
    run = train(Wide("evaluation"), isolated=True, hold=True, eval_dataset=data(26), max_steps=4)
    at_most = "not enough memory to evaluate {} samples at a time: using {}"
    assert [each.removesuffix(" from now on") for each in told(run)] == [
        at_most.format(13, 6), at_most.format(6, 3)
    ]  # fmt: skip
    assert run.state == "finished"


@pytest.mark.parametrize("where", [{"isolated": True}, {"workers": 2, "zero_stage": 2}])
def test_numbers_that_fail_there_are_named_as_in_the_kernel(where: dict[str, Any]) -> None:
    """The note names the layer, and for data the sample; the run keeps the weights from before."""
    run = begin(Overflowing(), hold=True, max_steps=20, **where)
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    told = "micro-batch 1: the input of first (Linear) is the first infinite value"
    assert told in str(raised.value)
    run.stop()
    run.result(HANGS_S)
    given = data()
    given.tensors[0][7, 2] = math.nan
    run = ortlab.finetune(Network(), given, hold=True, **{**CHOSEN, "max_steps": 20}, **where)
    with pytest.raises(NotFinite) as raised:
        run.result(HANGS_S)
    told = (
        r"micro-batch [12]: the data has NaN in the batch's first element, an input, sample \d+: "
    )
    assert re.search(told + "index 7 of the TensorDataset", str(raised.value))
    run.resume()
    assert run.result(HANGS_S).steps == 20


def test_what_cannot_be_isolated_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"isolated=True: engine 'ort_fused' trains in the calling"
    ):
        begin(Network(), isolated=True, engine="ort_fused")
    unsendable = nn.Linear(6, 4)
    unsendable.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="cannot be sent to workers"):
        ortlab.finetune(unsendable, data(), loss="cross_entropy", isolated=True)


@contextlib.contextmanager
def limited(pid: int, megabytes: int) -> Iterator[None]:
    """Limit the process's memory by a control group; skip the test if that is not permitted."""
    one = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
    group, limit = one / f"ortlab-test-{pid}", "memory.limit_in_bytes"
    try:
        group.mkdir()
        if one == CGROUPS:
            limit = "memory.max"
        (group / limit).write_text(f"{megabytes << 20}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"no control group of one's own here: {error}")
    try:
        yield
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()


@pytest.mark.nightly
@pytest.mark.parametrize("attempt", range(10))
def test_the_kernels_memory_limit_costs_steps_alone(
    whole: Any, tmp_path: Path, attempt: int
) -> None:
    """Linux kills a process that exceeds the memory of its control group."""
    at = random.Random(attempt).randrange(20, 90)
    ortlab.workers(1)
    with limited(rank(), 1024):
        run = begin(Greedy(tmp_path / "killed", at), isolated=True, save_steps=5)
        assert run.result(HANGS_S).steps == 50
    (warning,) = told(run)
    assert "SIGKILL" in warning
    assert (losses(run) == whole).all()
