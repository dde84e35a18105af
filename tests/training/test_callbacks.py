"""Callbacks of the user's own: when they are called, what they may do, and how they fail."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history import saved_run
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import Network, begin, data, losses, train

HELD_OUT: dict[str, Any] = {"eval_dataset": data(41), "eval_steps": 4, "max_steps": 8}


class Heard:
    """Notes each event with its step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return functools.partial(self._hear, name)

    def _hear(self, name: str, run: Run) -> None:
        self.events.append((name, run.step))

    def steps(self, name: str) -> list[int]:
        return [step for event, step in self.events if event == name]


class Failing(ortlab.Callback):
    """Raises at one step."""

    def __init__(self, at: int = 3) -> None:
        self.at = at
        self.called = 0

    def on_step_end(self, run: Run) -> None:
        self.called += 1
        if run.step == self.at:
            raise KeyError("positives")


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_they_are_called_in_order(engine: str) -> None:
    needs(engine)
    heard = Heard()
    run = train(Network(), callbacks=heard, engine=engine, save_steps=4, **HELD_OUT)
    assert heard.events[0] == ("on_run_start", 0)
    assert heard.events[-1] == ("on_run_end", 8)
    assert heard.steps("on_step_end") == list(range(1, 9))
    assert heard.steps("on_evaluate") == [0, 4, 8]
    assert heard.steps("on_checkpoint")[-1] == 8
    assert heard.steps("on_pause") == []
    assert run.evaluations[-1] == run.result().after
    assert run.loss == losses(run)[-1]


def test_they_know_the_checkpoint_and_the_result() -> None:
    class Told(ortlab.Callback):
        def on_checkpoint(self, run: Run) -> None:
            paths.append(run.checkpoints[-1].path)

        def on_run_end(self, run: Run) -> None:
            results.append(run.so_far())

    paths: list[Path] = []
    results: list[Any] = []
    run = train(Network(), callbacks=[Told()], **HELD_OUT)
    assert paths[-1].name == "final.safetensors"
    (result,) = results
    assert (result.state, result.steps, result.after) == ("finished", 8, run.result().after)


def test_a_checkpoint_is_told_after_the_step_in_which_it_was_written() -> None:
    class Waits(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            if run.step == 5:
                until(lambda: bool(run.checkpoints))

    heard = Heard()
    train(Network(), callbacks=[Waits(), heard], save_steps=5, max_steps=200)
    assert 5 <= heard.steps("on_checkpoint")[0] < 200  # the file is there before it is counted


def test_random_numbers_that_they_draw_do_not_change_training() -> None:
    class Drawing(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            torch.rand(3), np.random.rand(), random.random()

        on_evaluate = on_step_end

    plain = train(Network(0.3), **HELD_OUT)
    drawn = train(Network(0.3), callbacks=Drawing(), **HELD_OUT)
    assert losses(drawn).tolist() == losses(plain).tolist()


def test_a_checkpoint_that_one_takes_is_that_of_the_step(tmp_path: Path) -> None:
    class Saves(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            torch.rand(5)
            if run.step == 3:
                run.checkpoint(tmp_path / "third.safetensors")

    whole = train(Network(0.3), callbacks=Saves(), **HELD_OUT)
    assert Checkpoint.load(tmp_path / "third.safetensors").position.step == 3
    rest = train(Network(0.3), resume_from=tmp_path / "third.safetensors", **HELD_OUT)
    assert losses(rest).tolist() == losses(whole)[3:].tolist()


def test_they_may_change_settings_stop_and_pause() -> None:
    class Acts(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            if run.step == 2:
                run.apply(learning_rate=1e-4)
            if run.step == 4:
                run.pause()
            if run.step == 6:
                run.stop()

        def on_pause(self, run: Run) -> None:
            paused.append(run.step)

    paused: list[int] = []
    run = begin(Network(), callbacks=Acts())
    until(lambda: run.state == "paused")
    assert run.current_settings.optim.learning_rate == 1e-4
    run.resume()
    assert run.result(HANGS_S).state == "stopped"
    assert (run.step, paused) == (6, [4])


def test_one_that_raises_is_named_and_pauses_the_run() -> None:
    failing, heard = Failing(), Heard()
    run = begin(Network(), callbacks=[failing, heard], hold=True, max_steps=8)
    with pytest.raises(KeyError, match="positives") as caught:
        run.result(HANGS_S)
    notes = "\n".join(caught.value.__notes__)
    assert "the callback Failing.on_step_end raised this after step 3" in notes
    assert "run.resume(skip=True) goes on without this callback" in notes
    assert "held: the callback Failing.on_step_end failed" in run.status().badges
    run.resume()
    run.result(HANGS_S)
    assert failing.called == 8
    assert heard.steps("on_step_end") == list(range(1, 9))
    plain = train(Network(), max_steps=8)
    assert losses(run).tolist() == losses(plain).tolist()


def test_the_run_goes_on_without_one_that_raises() -> None:
    failing = Failing()
    run = begin(Network(), callbacks=failing, hold=True, max_steps=8)
    until(lambda: run.state == "paused")
    run.resume(skip=True)
    assert run.result(HANGS_S).steps == 8
    assert failing.called == 3


def test_one_that_raises_ends_the_run_of_a_script() -> None:
    run = begin(Network(), callbacks=Failing(), hold=False)
    with pytest.raises(KeyError, match="positives"):
        run.result(HANGS_S)
    assert (run.state, run.step) == ("failed", 3)


def test_one_that_raises_in_a_pause_does_not_pause_again() -> None:
    class Pausing(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            if run.step == 2:
                run.pause()

        def on_pause(self, run: Run) -> None:
            raise ValueError("no pause")

    run = begin(Network(), callbacks=Pausing(), hold=True, max_steps=4)
    with pytest.raises(ValueError, match="no pause"):
        run.result(HANGS_S)
    run.resume()
    assert run.result(HANGS_S).steps == 4


def test_one_that_raises_at_the_end_does_not_fail_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class AtTheEnd(ortlab.Callback):
        def on_run_end(self, run: Run) -> None:
            raise SystemExit(3)

    heard = Heard()
    run = train(Network(), callbacks=[AtTheEnd(), heard], max_steps=2)
    told = "the callback AtTheEnd.on_run_end raised SystemExit: 3"
    assert [event.text for event in run.recorder.events("warning")] == [told]
    assert f"{run.name} is finished, but {told}" in capfd.readouterr().out
    assert heard.steps("on_run_end") == [2]


@pytest.mark.parametrize("event", ["on_step_end", "on_run_end"])
def test_one_that_never_returns_is_shown_and_can_be_stopped(event: str) -> None:
    class Slow:
        pass

    returns = threading.Event()
    setattr(Slow, event, lambda self, run: returns.wait(HANGS_S))
    heard = Heard()
    run = begin(Network(), callbacks=[heard, Slow()], max_steps=2)
    told = f"waiting for the callback Slow.{event} for "
    until(lambda: any(line.startswith(told) for line in run.status().lines))
    run.stop()
    assert run.wait_over(HANGS_S)
    assert run.step == (1 if event == "on_step_end" else 2)
    warnings = [each.text for each in run.recorder.events("warning")]
    assert warnings == [f"the callback Slow.{event} hangs: the run ends without waiting for it"]
    assert Checkpoint.load(run.folder / "checkpoints/final.safetensors").position.step == run.step
    returns.set()


def test_a_run_cannot_wait_for_itself() -> None:
    class Waits(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            run.result()

    run = begin(Network(), callbacks=Waits(), hold=False)
    with pytest.raises(RuntimeError, match=r"cannot wait for itself; a callback uses run.so_far"):
        run.result(HANGS_S)


def takes_more(args: Any, state: Any, control: Any) -> None:
    """Take the arguments of a Hugging Face callback."""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Failing, r"callbacks has the class Failing; give an object of it: Failing\(\)"),
        (print, "needs one of the methods on_run_start, .* this print has none"),
        ([Failing(), 3], "needs one of the methods .* this int has none"),
        (
            type("Foreign", (), {"on_step_end": staticmethod(takes_more)})(),
            "Foreign.on_step_end must take the run as its only argument: missing a required",
        ),
    ],
)
def test_what_is_no_callback(given: Any, told: str) -> None:
    before = len(ortlab.list_runs())
    with pytest.raises(ValueError, match=told):
        begin(Network(), callbacks=given)
    assert len(ortlab.list_runs()) == before


def test_a_resumed_run_finds_them_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    heard = Heard()
    for name, value in {"model": Network(), "samples": data(), "heard": [heard]}.items():
        monkeypatch.setattr(__main__, name, value, raising=False)
    chosen: dict[str, Any] = {"engine": "eager", "loss": "cross_entropy", "max_steps": 50}
    run = ortlab.finetune(__main__.model, __main__.samples, callbacks=__main__.heard, **chosen)
    run.stop()
    run.result(HANGS_S)
    heard.events.clear()
    ortlab.resume(run.name).result(HANGS_S)
    assert heard.events[-1] == ("on_run_end", 50)


def scores(values: list[float]) -> Any:
    """Return a metric with these values, from the evaluation before the first step on."""
    left = iter(values)
    return {"f1": lambda predictions, targets: next(left)}


@pytest.mark.parametrize(
    ("threshold", "values", "steps"),
    [
        (0.0, [0.9, 0.1, 0.3, 0.2, 0.25, 0.9], 16),  # 0.3 at step 8, then two that are not better
        (0.0, [0.9, 0.1, 0.3, 0.2, 0.4, 0.5, 0.6, 0.7], 28),
        (0.25, [0.9, 0.1, 0.3, 0.2, 0.9], 12),
        (0.0, [0.9, float("nan"), float("nan"), 0.5], 8),
    ],
)
def test_it_stops_early(threshold: float, values: list[float], steps: int) -> None:
    run = train(
        Network(),
        metrics=scores(values),
        keep_best="f1",
        early_stopping_patience=2,
        early_stopping_threshold=threshold,
        **HELD_OUT | {"max_steps": 28},
    )
    assert run.result().steps == steps
    assert run.state == "finished"
    notes = [each.text for each in run.recorder.events("early_stop")]
    if steps == 16:
        told = "stopped early at step 16: f1 has not improved for 2 evaluations"
        assert notes == [f"{told}; best 0.3 at step 8"]
        assert notes[0] in run.status().lines
        assert notes[0] in ortlab.open_run(run.name).status().lines
    if steps == 8:
        assert notes == ["stopped early at step 8: f1 has no value after 2 evaluations"]
    assert len(notes) == (steps < 28)


def test_it_stops_early_by_the_loss() -> None:
    run = train(Network(), early_stopping_patience=1, lr=5.0, **HELD_OUT | {"max_steps": 400})
    found = [each.loss for each in run.evaluations][1:]
    assert len(found) < 100
    assert all(later < earlier for earlier, later in itertools.pairwise(found[:-1]))
    assert found[-1] >= found[-2]
    assert saved_run.find(run.name).steps == run.step


def test_early_stopping_needs_evaluations() -> None:
    with pytest.raises(ValueError, match="early_stopping_patience=2 needs evaluations"):
        train(Network(), early_stopping_patience=2)


def test_patience_can_change_in_a_run() -> None:
    class Changes(ortlab.Callback):
        def on_step_end(self, run: Run) -> None:
            if run.step == 2:
                run.apply(early_stopping_patience=1, keep_best="f1")

    falling = scores([0.9, 0.8, 0.7])
    run = train(Network(), metrics=falling, callbacks=Changes(), **HELD_OUT | {"max_steps": 50})
    assert run.step == 8
