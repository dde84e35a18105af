"""Tests of runs: threads, buttons, waiting and interrupts, and the state after each kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jupyter_client.manager import start_new_kernel
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import NotFinite, Report, Stepper, tell
from ortlab.engines.registry import engine
from ortlab.engines.torch.stepper import Eager, TorchStepper
from ortlab.history.run_folder import RunFolder
from ortlab.metrics.recorder import INDEX, Watched
from ortlab.settings import FinetuneSettings
from ortlab.training.run import Run
from ortlab.utils.process_memory import SAMPLER
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S, until


@pytest.fixture(autouse=True)
def _tidy(threads_end: None) -> Iterator[None]:
    """Compute with one thread and check that nothing of a run remains when a test ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert not SAMPLER.running


def examples(count: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Gated(nn.Module):
    """A model whose steps can be made to wait for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        self.gate: threading.Event | None = None
        self.reached = threading.Event()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.gate is not None and self.training:
            self.reached.set()
            assert self.gate.wait(HANGS_S)
        scores: torch.Tensor = self.inner(inputs)
        return scores


def made(
    tmp_path: Path,
    model: nn.Module | None = None,
    *,
    train: Any = None,
    prepare: Callable[[FinetuneSettings], Stepper] | None = None,
    evaluation: Any = None,
    show: Callable[[Watched], None] | None = None,
    name: str | None = None,
    **values: Any,
) -> Run:
    settings = FinetuneSettings.of(**{"engine": "eager", "device": "cpu", "lr": 0.05, **values})
    model = model if model is not None else Gated()

    def eager(settings: FinetuneSettings) -> Stepper:
        return Eager().prepare(model, functional.cross_entropy, settings)

    return Run(
        model,
        prepare or eager,
        examples() if train is None else train,
        settings=settings,
        evaluation=evaluation,
        show=show,
        name=name,
        root=tmp_path,
    )


def folder_is_complete(run: Run, state: str, model: nn.Module) -> None:
    folder = RunFolder(run.folder)
    assert folder.read_json("run")["state"] == state
    assert FinetuneSettings.of(folder.read_json("settings")) == run.settings
    assert "torch" in folder.read_json("environment")["packages"]
    read = folder.read_metrics()
    assert read.torn == 0
    assert read.rows[:, INDEX["step"]].tolist() == list(range(1, run.step + 1))
    assert [event.text for event in read.events if event.kind == "state"][-1] == state
    kept = folder.read_checkpoint("final").model
    for weight, value in model.state_dict().items():
        assert torch.equal(kept[weight], value)


def test_a_run_that_finishes(tmp_path: Path) -> None:
    shown: list[Watched] = []
    model = Gated()
    run = made(tmp_path, model, num_train_epochs=20, evaluation=examples(), show=shown.append)
    assert run.start() is run
    assert shown == [run]
    result = run.result()
    assert (run.state, result.state, result.steps) == ("finished", "finished", 80)
    assert result.before is not None
    assert result.after is not None
    assert result.after.accuracy > 0.9 > result.before.accuracy
    assert result.after.loss < result.before.loss
    assert result.final_loss == run.recorder.rows()[-1, INDEX["loss"]]
    assert 0 < 80 * 16 / result.samples_per_s <= result.wall_s
    assert math.isnan(result.tokens_per_s)
    assert result.peak_bytes > 50 * 1024**2
    folder_is_complete(run, "finished", model)
    about = json.loads((run.folder / "run.json").read_text())
    assert about["result"]["after"]["accuracy"] == result.after.accuracy
    assert "accuracy" in str(result)
    assert repr(result) == f"<RunResult: {result}>"  # shown by a cell for an awaited run
    assert repr(run) == f"<Run {run.name}: finished, step 80/80, eager>"


def test_starting_returns_at_once(tmp_path: Path) -> None:
    """An export of any length runs in the run's thread, and its messages are shown."""
    release = threading.Event()
    model = Gated()
    settings = FinetuneSettings.of(engine="eager", device="cpu")

    def slowly(_: FinetuneSettings) -> Stepper:
        tell("exporting to ORT")
        assert release.wait(HANGS_S)
        return Eager().prepare(model, functional.cross_entropy, settings)

    run = made(tmp_path, model, prepare=slowly)
    run.start()
    until(lambda: run.status().lines == ("exporting to ORT",))
    assert run.state == "starting"
    assert run.status().step == 0
    names = {thread.name for thread in threading.enumerate()}
    assert f"ortlab-{run.name}" in names
    release.set()
    run.result()
    assert [event.text for event in run.recorder.events("note")] == ["exporting to ORT"]


def test_a_viewer_that_fails_costs_the_charts_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Watched) -> None:
        raise OSError("no display")

    run = made(tmp_path, show=fails)
    assert run.start() is run
    assert run.result().state == "finished"
    told = "the charts cannot be shown: OSError: no display"
    assert capsys.readouterr().out == f"{run.name} continues, but {told}\n"
    assert told in [event.text for event in run.recorder.events("warning")]


def test_a_run_is_started_once(tmp_path: Path) -> None:
    run = made(tmp_path)
    with pytest.raises(RuntimeError, match=r"was not started: call run.start\(\) first"):
        run.result()
    run.start().result()
    with pytest.raises(RuntimeError, match="was already started"):
        run.start()


def test_pause_resume_and_stop(tmp_path: Path) -> None:
    model = Gated()
    run = made(tmp_path, model, num_train_epochs=10_000).start()
    until(lambda: run.step > 3)
    run.pause()
    until(lambda: run.state == "paused")
    step = run.step
    assert run.status().left_s is not None
    run.pause()
    assert not run.wait_over(0.2)
    assert run.step == step
    run.resume()
    until(lambda: run.step > step)
    run.pause()
    until(lambda: run.state == "paused")
    last = run.step
    run.stop()
    run.stop()
    assert run.result().state == "stopped"
    run.stop()
    run.resume()
    folder_is_complete(run, "stopped", model)
    paused = [(event.step, event.text.split()[0]) for event in run.recorder.events("pause")]
    expected = [(step, "paused"), (step, "resumed"), (last, "paused"), (last, "stopped")]
    assert paused == expected
    marked = run.recorder.events("checkpoint")
    assert {(event.step, event.text) for event in marked} <= {
        (at, f"checkpoint last-{at}") for at in (step, last)
    }
    assert marked


def test_stop_waits_for_the_step_in_flight_only(tmp_path: Path) -> None:
    model = Gated()
    model.gate = threading.Event()
    run = made(tmp_path, model, evaluation=examples()).start()
    assert model.reached.wait(HANGS_S)
    run.stop()
    assert run.state == "stopping"
    assert run.status().lines[0] == "evaluating before the first step"
    assert not run.over()
    model.gate.set()
    result = run.result()
    assert (result.steps, result.state) == (1, "stopped")
    assert result.after == result.before
    folder_is_complete(run, "stopped", model)


def test_a_run_may_end_while_it_is_being_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the thread that handles the stop may start after the run has ended."""
    begin = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if thread.name.startswith("ortlab-stop"):
            until(lambda: run.state == "stopped")
        begin(thread)

    model = Gated()
    run = made(tmp_path, model, num_train_epochs=10_000).start()
    until(lambda: run.step > 3)
    monkeypatch.setattr(threading.Thread, "start", late)
    run.stop()
    assert run.wait_over(60)
    folder_is_complete(run, "stopped", model)


def test_stop_before_the_first_step(tmp_path: Path) -> None:
    model = Gated()
    run = made(tmp_path, model, evaluation=examples())
    run.stop()
    result = run.start().result()
    assert (result.steps, result.state, result.before) == (0, "stopped", None)
    folder_is_complete(run, "stopped", model)


# --- waiting


def test_await_gives_the_result_and_keeps_the_loop_alive(tmp_path: Path) -> None:
    run = made(tmp_path, num_train_epochs=10_000)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while ticks < 5:
            await asyncio.sleep(0.01)
            ticks += 1
        run.stop()  # as a button's handler would

    async def main() -> Any:
        run.start()
        other = asyncio.create_task(tick())
        result = await run
        await other
        return result

    assert asyncio.run(main()).state == "stopped"
    assert ticks == 5


def test_a_paused_run_is_no_deadlock(tmp_path: Path) -> None:
    async def main() -> str:
        run = made(tmp_path, num_train_epochs=10_000)
        run.pause()
        run.start()
        waiting = asyncio.ensure_future(run)
        while run.state != "paused":
            await asyncio.sleep(0.01)
        run.resume()
        while run.step < 3:
            await asyncio.sleep(0.01)
        run.stop()
        return (await waiting).state

    assert asyncio.run(main()) == "stopped"


async def interrupted(wait: Awaitable[Any]) -> None:
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
    await wait


@pytest.mark.parametrize("limit_s", [None, 60])
def test_interrupting_await(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit_s: float | None
) -> None:
    """asyncio.run handles an interrupt as ipykernel does: it cancels the outermost task."""
    run = made(tmp_path, num_train_epochs=10_000).start()
    until(lambda: run.step > 0)

    async def cell() -> None:
        await interrupted(run if limit_s is None else asyncio.wait_for(run, limit_s))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith(f"{run.name} is still running, at step ")
    assert "run.stop()" in said
    step = run.step
    until(lambda: run.step > step)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert "stops after the step in flight" in capsys.readouterr().out
    assert run.result().state == "stopped"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_wait_that_times_out_is_no_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, num_train_epochs=10_000).start()

    async def cell() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run, 0.05)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):  # cancels this task itself
                    await run
            waiting = asyncio.ensure_future(run)
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(cell())
    assert run.state in ("starting", "running")
    assert capsys.readouterr().out == ""
    run.stop()
    run.result()


@pytest.mark.parametrize("first_over", [0, 1])
def test_waits_that_end_in_any_order_give_the_signal_back(tmp_path: Path, first_over: int) -> None:
    runs = [made(tmp_path, num_train_epochs=10_000).start() for _ in range(2)]

    async def cell() -> None:
        waits = [asyncio.ensure_future(run) for run in runs]
        await asyncio.sleep(0.01)
        for place in (first_over, 1 - first_over):
            runs[place].stop()
            await waits[place]

    asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


_CELL = """
import asyncio, ortlab, torch
from torch import nn
torch.set_num_threads(1)
data = [(torch.randn(4, 4), torch.randint(2, (4,)))]
run = ortlab.finetune(
    nn.Linear(4, 2), data, loss="cross_entropy", engine="eager", device="cpu",
    num_train_epochs=10**6
)
while run.step == 0:
    await asyncio.sleep(0.01)
"""


def test_interrupting_a_cell_that_awaits() -> None:
    """In a real kernel, neither a timeout nor one interrupt stops the run; the second one does."""
    manager, client = start_new_kernel(kernel_name="python3")

    def execute(code: str) -> str:
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            text = message["content"].get("text", "")
            said.append(text)
            if "waiting" in text:
                manager.interrupt_kernel()

        client.execute_interactive(code, timeout=HANGS_S, output_hook=hear)
        return "".join(said)

    try:
        execute(_CELL)
        limited = "try: await asyncio.wait_for(run, 0.1)\nexcept TimeoutError: print('late')"
        assert [execute(limited) for _ in range(2)] == ["late\n"] * 2
        begins = "asyncio.get_running_loop().call_later(0.2, print, 'waiting')\n"
        said = execute(begins + "await run")
        assert "is still running, at step" in said
        name = execute("print(run.name)").strip()
        assert f"interrupt that wait, or use run.stop() or %ort stop {name}, to stop it" in said
        assert execute("print(run.state)") == "running\n"
        said = execute(begins + "await asyncio.wait_for(run, 50)")
        assert "stops after the step in flight" in said
        assert execute("print((await run).state)") == "stopped\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_interrupting_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, num_train_epochs=10_000).start()
    steps: list[int] = []

    def interrupt() -> None:
        until(lambda: run.step > 2)
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: run._interrupts == 1)
        steps.append(run.step)
        until(lambda: run.step > steps[0] + 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.result()
    thread.join()
    assert run.state == "stopped"
    first, second = capsys.readouterr().out.splitlines()
    assert "is still running, at step" in first
    assert "interrupt again to stop it" in first
    assert "stops after the step in flight" in second


def test_result_with_a_timeout(tmp_path: Path) -> None:
    run = made(tmp_path, num_train_epochs=10_000).start()
    with pytest.raises(TimeoutError, match=r"is \w+ after 0.05 s"):
        run.result(timeout=0.05)
    assert not run.wait_over(timeout=0.01)
    run.stop()
    assert run.wait_over(timeout=HANGS_S)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.randn(2)


def test_a_run_shows_where_ort_does_otherwise_than_eager_torch(tmp_path: Path) -> None:
    model = Noisy(4, 2)

    def in_ort(_: FinetuneSettings) -> Stepper:
        settings = FinetuneSettings.of(engine="ortmodule", device="cpu")
        return engine("ortmodule").prepare(model, functional.cross_entropy, settings)

    run = made(tmp_path, model, engine="ortmodule", prepare=in_ort, max_steps=2).start()
    assert run.wait_over(timeout=HANGS_S)
    assert "not checked: forward draws random numbers besides dropout" in run.status().lines


# --- errors


class Spoiled(Gated):
    """A model whose loss is NaN from a given step on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(inputs) * (math.nan if self.calls == self.at else 1.0)


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    model = Spoiled(at=3)
    run = made(tmp_path, model).start()
    with pytest.raises(NotFinite, match=r"at step 3; the run ends with the weights of step 2"):
        run.result()
    with pytest.raises(NotFinite):
        asyncio.run(run._awaited())
    assert run.state == "failed"
    assert "step 3" in (run.status().error or "")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    kept = RunFolder(run.folder)
    assert "not finite at step 3" in kept.read_json("run")["error"]
    assert torch.equal(kept.read_checkpoint().model["inner.0.weight"], model.inner[0].weight)
    assert [event.kind for event in kept.read_metrics().events][-2:] == ["error", "state"]


class Overflowing(Gated):
    """A model whose activations exceed float16 in some steps."""

    def __init__(self, at: range) -> None:
        super().__init__()
        self.at, self.calls = at, 0
        self.good: dict[str, torch.Tensor] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == self.at.start:
            self.good = {name: value.clone() for name, value in self.state_dict().items()}
        return super().forward(inputs * (1e6 if self.calls in self.at else 1.0))


def test_steps_that_overflow_are_skipped_counted_and_told(tmp_path: Path) -> None:
    run = made(tmp_path, Overflowing(range(3, 6)), precision="fp16", batch_size=4)
    result = run.start().result()
    assert (result.steps, result.skipped_steps, result.loss_scale) == (16, 3, 2.0**13)
    said = "3 steps skipped: gradients overflowed, scale 8,192"
    assert said in str(result)
    assert said in run.status().lines
    slow = "fp16 on a CPU is for checking numerics: it is slower than fp32"
    assert slow in run.status().lines
    kept = RunFolder(run.folder)
    assert kept.read_json("run")["result"]["skipped_steps"] == 3
    metrics = kept.read_metrics()
    assert metrics.rows[:, INDEX["skipped"]].tolist() == [0] * 2 + [1] * 3 + [0] * 11
    assert metrics.rows[1:6, INDEX["loss_scale"]].tolist() == [2.0**n for n in (16, 15, 14, 13, 13)]
    notes = [(event.step, event.text) for event in metrics.events if event.kind == "note"]
    skipped = "step 3 was skipped: its gradients overflowed; the loss scale is 32,768"
    assert (3, skipped) in notes
    assert slow in [text for _, text in notes]
    assert len(notes) == 2
    assert kept.read_checkpoint().loss_scale == {
        "scale": 2.0**13, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        "_growth_tracker": 11,
    }  # fmt: skip


def test_without_a_loss_scale_nothing_is_told_of_it(tmp_path: Path) -> None:
    result = made(tmp_path).start().result()
    assert result.skipped_steps == 0
    assert "skipped" not in str(result)
    assert math.isnan(result.loss_scale)


def test_a_storm_of_overflows_ends_the_run(tmp_path: Path) -> None:
    model = Overflowing(range(3, 100))
    run = made(tmp_path, model, precision="fp16", num_train_epochs=9).start()
    said = r"overflows float16 at step 19 although the loss scale has fallen to 1; .*'bf16'"
    with pytest.raises(NotFinite, match=said):
        run.result()
    assert model.calls == 19  # 17 in a row: from 2**16 to 1, and one more
    kept = RunFolder(run.folder).read_checkpoint()
    for name, value in model.state_dict().items():
        assert torch.equal(value, model.good[name])
        assert torch.equal(kept.model[name], value)


def test_a_loss_that_is_no_scalar(tmp_path: Path) -> None:
    model, settings = Gated(), FinetuneSettings.of(engine="eager", device="cpu")

    def unreduced(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, target, reduction="none")

    run = made(tmp_path, model, prepare=lambda _: Eager().prepare(model, unreduced, settings))
    with pytest.raises(ValueError, match=r"the loss is float32\[16\], not a scalar"):
        run.start().result()
    folder_is_complete(run, "failed", model)


def test_a_batch_that_does_not_fit_forward(tmp_path: Path) -> None:
    batch = {"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64)}
    run = made(tmp_path, train=[batch])
    with pytest.raises(ValueError, match=r"input_ids: float32\[2, 4\]") as raised:
        run.start().result()
    assert "does not fit forward" in str(raised.value)
    assert str(raised.value).count("\n") <= 1
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_stepper_that_cannot_be_made(tmp_path: Path) -> None:
    def fails(_: FinetuneSettings) -> Stepper:
        raise RuntimeError("no compiler")

    run = made(tmp_path, prepare=fails).start()
    with pytest.raises(RuntimeError, match="no compiler"):
        run.result()
    assert run.state == "failed"
    assert RunFolder(run.folder).read_json("run")["state"] == "failed"
    assert list((run.folder / "checkpoints").iterdir()) == []


def test_system_exit_in_the_users_code_is_the_runs_outcome(tmp_path: Path) -> None:
    def fails(_: FinetuneSettings) -> Stepper:
        sys.exit(3)

    with pytest.raises(SystemExit):
        made(tmp_path, prepare=fails).start().result()


def test_bad_data_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the data is empty"):
        made(tmp_path, train=[])
    with pytest.raises(ValueError, match="the data is empty"):
        made(tmp_path, evaluation=[])
    with pytest.raises(ValueError, match="must be less than the run's 4 steps"):
        made(tmp_path, warmup_steps=4)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_vanishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run trains to its end, tells what it could not save, and saves it in the end."""
    model = Gated()
    model.gate = threading.Event()
    run = made(tmp_path, model).start()
    assert model.reached.wait(HANGS_S)
    (run.folder / "checkpoints").rmdir()
    before = model.inner[0].weight.detach().clone()
    model.gate.set()
    assert run.result().state == "finished"
    assert run.step == 4
    assert not torch.equal(model.inner[0].weight, before)
    told = "run-1 is finished, but not saved yet: the last checkpoint (Error while serializing: I/O"
    assert told in capsys.readouterr().out
    (run.folder / "checkpoints").mkdir()
    until(lambda: run.status().badges == ())
    final = run.folder / "checkpoints" / "final.safetensors"
    assert Checkpoint.load(final).position.step == 4


# --- engines


class Falling(TorchStepper):
    """An engine that falls back at its second step."""

    calls = 0

    def step(self, batches_: Any, *, lr: float) -> Any:
        self.calls += 1
        return super().step(batches_, lr=lr)

    def report(self) -> Report:
        if self.calls < 2:
            return Report("ortmodule", export_s=1.5, check_s=0.25, notes=("checked 1 shape",))
        notes = ("checked 1 shape", "checked 2 shapes")
        return Report("eager", "no kernel for Foo", export_s=1.5, check_s=0.25, notes=notes)


def test_a_fallback_is_a_badge_and_an_event(tmp_path: Path) -> None:
    model = Gated()
    settings = FinetuneSettings.of(engine="ortmodule", device="cpu")

    def prepare(_: FinetuneSettings) -> Stepper:
        return Falling(
            model,
            functional.cross_entropy,
            settings,
            owner=model,
            device=torch.device("cpu"),
            report=lambda: Report("ortmodule"),
        )

    run = made(tmp_path, model, prepare=prepare, engine="ortmodule").start()
    result = run.result()
    assert (run.engine_asked, run.engine_used) == ("ortmodule", "eager")
    assert run.fallback_reason == "no kernel for Foo"
    status = run.status()
    assert status.badges == ("fallback to eager: no kernel for Foo",)
    assert "self-check against eager 0.25 s" in status.lines
    assert (result.export_s, result.check_s) == (1.5, 0.25)
    notes = [event.text for event in run.recorder.events("note")]
    assert notes == ["checked 1 shape", "checked 2 shapes"]
    (warning,) = run.recorder.events("warning")
    assert (warning.step, warning.text) == (2, "fallback to eager: no kernel for Foo")
    assert RunFolder(run.folder).read_json("run")["engine_used"] == "eager"


# --- clean ends


@pytest.mark.parametrize("fails", [False, True])
def test_model_and_data_can_be_collected_when_it_is_over(tmp_path: Path, fails: bool) -> None:
    model: Any = Spoiled(at=2) if fails else Gated()
    data: Any = DataLoader(examples(), batch_size=16)
    gone = weakref.ref(model), weakref.ref(data)
    run = made(tmp_path, model, train=data).start()
    assert run.model is model
    with contextlib.suppress(NotFinite):
        run.result()
    del model, data
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert run.model is None
    assert run.recorder.count == (2 if fails else 4)


def test_two_runs_at_once(tmp_path: Path) -> None:
    first = made(tmp_path, num_train_epochs=10_000).start()
    second = made(tmp_path, num_train_epochs=10_000).start()
    until(lambda: first.step > 3 and second.step > 3)
    assert {first.name, second.name} == {"run-1", "run-2"}
    first.stop()
    first.result()
    step = second.step
    until(lambda: second.step > step)
    second.stop()
    second.result()


def test_the_thread_prints_in_the_context_that_started_it(tmp_path: Path) -> None:
    cell: contextvars.ContextVar[str] = contextvars.ContextVar("cell", default="")
    seen: list[str] = []
    model = Gated()
    settings = FinetuneSettings.of(engine="eager", device="cpu")

    def prepare(_: FinetuneSettings) -> Stepper:
        seen.append(cell.get())
        return Eager().prepare(model, functional.cross_entropy, settings)

    cell.set("first")
    run = made(tmp_path, model, prepare=prepare).start()
    cell.set("second")
    run.result()
    assert seen == ["first"]


SCRIPT = """
import sys, time, torch
from pathlib import Path
from ortlab.engines.torch.stepper import Eager
from ortlab.training.run import Run
from ortlab.settings import FinetuneSettings
torch.set_num_threads(1)
settings = FinetuneSettings.of(engine="eager", device="cpu", num_train_epochs=10_000_000)
model = torch.nn.Linear(4, 3)
data = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))]
run = Run(model, lambda _: Eager().prepare(model, torch.nn.functional.cross_entropy, settings),
          data, settings=settings, root=Path(sys.argv[1])).start()
while run.step < 3:
    time.sleep(0.001)
"""


# Under nohup, tests inherit that SIGHUP is ignored.
HEARS = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
SLEEPS = "print('ready', flush=True)\ntime.sleep(600)\n"
# An interrupt before the wait has begun would hit the program instead of the wait.
WAITS = """
import threading
def codes(frame):
    return {frame.f_code} | codes(frame.f_back) if frame else set()
def says_ready(main):
    waits = {Run.result.__code__, threading.Event.wait.__code__}
    while not waits <= codes(sys._current_frames()[main]):
        time.sleep(0.01)
    print("ready", flush=True)
threading.Thread(target=says_ready, args=[threading.get_ident()], daemon=True).start()
run.result()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("waits", [WAITS, SLEEPS], ids=["result", "sleep"])
def test_a_signal_stops_the_run_in_order(tmp_path: Path, ends: signal.Signals, waits: str) -> None:
    """SIGTERM and SIGHUP stop the run, and so does Ctrl-C, twice while `result` waits."""
    with subprocess.Popen(
        [sys.executable, "-c", HEARS + SCRIPT + waits, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(ends)
        if ends == signal.SIGINT and waits == WAITS:
            assert "is still running" in process.stdout.readline()
            process.send_signal(ends)
        process.communicate(timeout=HANGS_S)
    assert process.returncode == (-ends if ends == signal.SIGINT else 128 + ends)
    folder = RunFolder(tmp_path / "run-1")
    assert folder.read_json("run")["state"] == "stopped"
    assert len(folder.read_metrics().rows) == folder.read_checkpoint().position.step >= 3


@pytest.mark.skipif(shutil.which("nohup") is None, reason="needs nohup")
def test_a_script_under_nohup_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    tells = "for line in sys.stdin: print(run.state, run.step, flush=True)\n"
    with subprocess.Popen(
        ["nohup", sys.executable, "-c", SCRIPT + tells, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def step() -> int:
            print(file=process.stdin, flush=True)
            state, number = process.stdout.readline().split()
            assert state == "running"
            return int(number)

        before = step()
        process.send_signal(signal.SIGHUP)
        until(lambda: step() > before + 3)
        process.terminate()
        process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + signal.SIGTERM


# The leader of a session that opens a terminal gets it as its own.
IN_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(terminal, descriptor)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[2:]])
"""


@pytest.mark.skipif(os.name != "posix", reason="terminals")
def test_a_closed_terminal_stops_the_run_in_order(tmp_path: Path) -> None:
    """It sends SIGHUP, and whatever is printed from then on raises OSError."""
    ours, theirs = os.openpty()
    program = (
        HEARS + SCRIPT + SLEEPS.replace("time.sleep", "while True: print(run.step, flush=True)#")
    )
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, os.ttyname(theirs), program, str(tmp_path)],
        start_new_session=True,
    )
    said = b""
    while b"ready" not in said:
        said += os.read(ours, 100)
    os.close(theirs)
    os.close(ours)
    process.wait(HANGS_S)
    folder = RunFolder(tmp_path / "run-1")
    assert folder.read_json("run")["state"] == "stopped"
    assert len(folder.read_metrics().rows) == folder.read_checkpoint().position.step >= 3


LAST_STEP = """
import threading
begun = threading.Event()
def takes_long(*_):
    if run.step >= 3:
        begun.set()
        while run.state != "stopping":
            time.sleep(0.01)
        print("stopping", flush=True)
        time.sleep(1)
model.register_forward_hook(takes_long)
begun.wait()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_second_signal_leaves_the_last_step_its_time(tmp_path: Path) -> None:
    """Jupyter sends a second signal when it shuts down a kernel, after half of the grace period."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT + LAST_STEP, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for said in ("ready\n", "stopping\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANGS_S)
    assert process.returncode == 143
    folder = RunFolder(tmp_path / "run-1")
    assert folder.read_json("run")["state"] == "stopped"
    assert len(folder.read_metrics().rows) == folder.read_checkpoint().position.step >= 3


def test_python_that_ends_stops_the_run_in_order(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        timeout=HANGS_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    folder = RunFolder(tmp_path / "run-1")
    assert folder.read_json("run")["state"] == "stopped"
    assert len(folder.read_metrics().rows) == folder.read_checkpoint().position.step >= 3


@pytest.mark.parametrize("name", ["mse", "l1"])
@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_a_loss_of_two_shapes_is_refused_where_torch_broadcasts(engine: str, name: str) -> None:
    needs(engine)
    inputs = torch.randn(16, 4)
    chosen: dict[str, Any] = {"engine": engine, "loss": name, "batch_size": 16}
    run = ortlab.finetune(nn.Linear(4, 1), TensorDataset(inputs, inputs[:, 0]), **chosen)
    told = r"needs targets of the shape of the predictions, \[16, 1\], not \[16\]"
    with pytest.raises(ValueError, match=f"loss='{name}' {told}") as raised:
        run.result(HANGS_S)
    assert any("targets.float().unsqueeze(-1)" in note for note in raised.value.__notes__)
    fitting = TensorDataset(inputs, inputs[:, :1])
    assert ortlab.finetune(nn.Linear(4, 1), fitting, **chosen).result(HANGS_S).steps == 1


def test_a_loss_that_raises_says_what_it_was_called_with() -> None:
    labels = torch.tensor([0, 1] * 8)
    samples = TensorDataset(torch.randn(16, 4), labels)
    chosen: dict[str, Any] = {"engine": "eager", "loss": "bce_with_logits", "batch_size": 16}
    run = ortlab.finetune(nn.Linear(4, 1), samples, **chosen)
    with pytest.raises(ValueError, match="must be the same as input size") as raised:
        run.result(HANGS_S)
    told = "the loss was called with predictions float32[16, 1], targets int64[16]"
    hint = "for one output per sample, pass targets.float().unsqueeze(-1) as targets"
    assert f"{told}; {hint}" in raised.value.__notes__
    run.stop()
    fitting = TensorDataset(samples.tensors[0], labels.float().unsqueeze(-1))
    assert ortlab.finetune(nn.Linear(4, 1), fitting, **chosen).result(HANGS_S).steps == 1
