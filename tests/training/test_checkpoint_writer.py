"""Tests of the checkpoint writer: retention, a full disk, damage, and killed processes."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history.run_folder import RunFolder
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.evaluation import Evaluation, Goal, goal
from ortlab.metrics.recorder import INDEX, Event
from ortlab.session import session
from ortlab.training import checkpoint_writer, resume
from ortlab.training.checkpoint_writer import CheckpointSchedule, CheckpointWriter
from ortlab.training.run import Run
from ortlab.utils.weak_list import Recent
from tests.support import killing
from tests.support.needed_engines import needs
from tests.support.resuming import Gated, examples, network
from tests.support.training_parts import Parts
from tests.support.waiting import Turns, until


def newest(run: Run) -> str | None:
    """Return the name of the last checkpoint that is on the disk."""
    path = run._record.checkpoints.newest
    return None if path is None else path.stem


CHOSEN: dict[str, Any] = {
    "loss": "cross_entropy",
    "engine": "eager",
    "device": "cpu",
    "batch_size": 4,
    "lr": 0.05,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 2,
}


def losses(run: Run | SavedRun) -> list[float]:
    values: list[float] = run.recorder.rows()[:, INDEX["loss"]].tolist()
    return values


def steps(run: Run | SavedRun) -> list[float]:
    values: list[float] = run.recorder.rows()[:, INDEX["step"]].tolist()
    return values


def names(folder: Path) -> set[str]:
    found = (folder / "checkpoints").iterdir()
    return {path.name.removesuffix(".safetensors") for path in found}


def step_of(folder: Path, name: str) -> int:
    return RunFolder(folder).read_checkpoint(name).position.step


def warnings_of(run: Run) -> list[str]:
    return [event.text for event in run.recorder.events("warning")]


def undisturbed(**changes: Any) -> Run:
    run = ortlab.finetune(Gated(), examples(22), **{**CHOSEN, **changes})
    run.result()
    return run


# --- retention


@pytest.fixture(scope="module")
def taken() -> Callable[[int], Checkpoint]:
    from dataclasses import replace

    from tests.support.resuming import CASES, Course

    course = Course(CASES["eager in fp16"])
    next(iter(course.loop.steps()))
    first = course.loop.checkpoint()
    return lambda step: replace(first, position=replace(first.position, step=step))


@pytest.fixture
def keeping(home: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(RunFolder.create(), first=lambda: None, tell=lambda *told: None)
    yield made
    made.close()


def test_the_last_ones_stay(home: Path, keeping: CheckpointWriter, taken: Any) -> None:
    folder = home / "runs" / "run-1"
    for step in (1, 2, 3, 4):
        keeping.keep(taken(step), 3)
        until(lambda step=step: f"last-{step}" in names(folder))  # type: ignore[misc]
    keeping.keep_best(taken(4))
    keeping.close()
    assert names(folder) == {"last-2", "last-3", "last-4", "best"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (folder / "checkpoints").iterdir())
    assert (folder / "checkpoints").stat().st_mode & 0o777 == 0o700


def test_a_slow_disk_gets_the_newest_and_nobody_waits(home: Path, taken: Any) -> None:
    turns = Turns()
    folder = RunFolder.create()
    keeping = CheckpointWriter(folder, first=turns.take, tell=lambda *told: None)
    keeping.keep(taken(1), 9)
    turns.until_asked(1)  # it is being written
    for step in (2, 3, 4):
        keeping.keep(taken(step), 9)
    turns.give()
    keeping.close()
    assert names(folder.path) == {"last-1", "last-4"}


@pytest.mark.parametrize("recovers", [False, True])
def test_a_thread_for_which_there_is_no_memory_fails_no_run(
    home: Path, taken: Any, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    def no_memory(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    told: list[tuple[Any, ...]] = []
    folder = RunFolder.create()
    keeping = CheckpointWriter(folder, first=lambda: None, tell=lambda *event: told.append(event))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.Thread, "start", no_memory)
        keeping.keep(taken(1), 9)
    said = "no checkpoint of step 1 yet: can't start new thread; the run continues and tries again"
    assert told == [("warning", said)]
    if recovers:
        keeping.keep(taken(2), 9)
    keeping.close()
    assert names(folder.path) == {"last-2" if recovers else "last-1"}


def test_a_run_keeps_by_steps_and_its_end_counts(home: Path) -> None:
    run = undisturbed(save_steps=5, keep_checkpoints=2)
    assert names(run.folder) == {"final", "last-10"}
    assert step_of(run.folder, "last-10") == 10
    alone = undisturbed(save_steps=5, keep_checkpoints=1)
    assert names(alone.folder) == {"final"}


def test_a_run_keeps_by_minutes_and_draws_the_same_numbers(home: Path) -> None:
    often = undisturbed(checkpoint_minutes=1e-9, keep_checkpoints=2)
    assert names(often.folder) == {"final", "last-11"}
    never = undisturbed(checkpoint_minutes=None)
    assert names(never.folder) == {"final"}
    assert losses(often) == losses(never)


def test_a_pause_keeps_one_once(home: Path) -> None:
    model = Gated(turns=2)
    run = ortlab.finetune(model, examples(22), **CHOSEN)
    model.turns.pause(run, 3)
    until(lambda: "last-3" in names(run.folder))
    assert step_of(run.folder, "last-3") == 3
    written = (run.folder / "checkpoints" / "last-3.safetensors").stat().st_mtime_ns
    run.resume()
    model.turns.pause(run, 4)
    until(lambda: "last-4" in names(run.folder))
    run.resume()
    model.turns.give()
    run.result()
    assert written  # the previous one existed until the next one was complete
    assert losses(run) == losses(undisturbed())


@pytest.mark.parametrize("metric", ["eval_loss", "eval_accuracy"])
def test_the_best_stays(home: Path, metric: str) -> None:
    run = undisturbed(eval_dataset=examples(9), eval_steps=1, keep_best=metric, num_train_epochs=3)
    wanted = goal(run.settings.checkpoint)
    found: Evaluation | None = None
    for event in run.recorder.events("eval"):
        each = Evaluation.of(event.step, event.values)
        if event.step and wanted.better(each, found):
            found = each
    assert found is not None
    assert step_of(run.folder, "best") == found.step
    best = run.result().best
    assert best is not None
    assert best.step == found.step


def test_better() -> None:
    nan = float("nan")
    at = lambda loss, accuracy: Evaluation(1, loss, accuracy)  # noqa: E731
    least, most = Goal("loss", "min"), Goal("accuracy", "max")
    assert least.better(at(1.0, nan), None)
    assert least.better(at(1.0, nan), at(nan, nan))
    assert not least.better(at(nan, 0.5), None)
    assert not least.better(at(1.0, nan), at(1.0, nan))
    assert most.better(at(2.0, 0.6), at(1.0, 0.5))
    assert not most.better(at(2.0, 0.4), at(1.0, 0.5))


def test_the_best_of_no_evaluation_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="keep_best='eval_loss' needs evaluations, but the run"):
        ortlab.finetune(network(), examples(22), **CHOSEN, keep_best="eval_loss")
    assert not (home / "runs").exists()
    model = Gated(turns=1)
    run = ortlab.finetune(model, examples(22), **CHOSEN)
    with pytest.raises(ValueError, match="pass eval_dataset, or leave keep_best out"):
        run.apply(keep_best="eval_accuracy")
    model.turns.give()
    run.result()


# --- a full disk

MIB = 2**20


def test_a_full_disk_leaves_the_run_going_and_what_was_kept_whole(home: Path) -> None:
    with killing.small_disk(home / "disk", MIB) as disk, pytest.MonkeyPatch.context() as patched:
        patched.setenv("ORTLAB_HOME", str(disk))
        on_a_full_disk(disk)


def on_a_full_disk(disk: Path) -> None:
    model = Gated(turns=5)
    run = ortlab.finetune(model, examples(22), **CHOSEN, save_steps=2, keep_checkpoints=2)
    until(lambda: {"last-2", "last-4"} & names(run.folder) != set())
    model.turns.until_asked(6)
    until(
        lambda: (
            run._record.checkpoints.newest is not None
            and run._record.checkpoints.newest.stem == "last-4"
        )
    )
    before = names(run.folder)
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(2**21))
    run.recorder.event(Event("note", 5, 0.0, "x" * 8192))  # the last block still has space
    for step in (6, 8):  # one after the other, so that none replaces the one before
        model.turns.give(2)
        until(lambda step=step: f"step {step}" in (run._record.checkpoints.trouble or ""))  # type: ignore[misc]
    model.turns.until_asked(10)
    until(lambda: run.recorder.trouble is not None)
    assert names(run.folder) == before, "neither half a file, nor one less"
    assert all(step_of(run.folder, name) for name in before)
    checkpoints, metrics = sorted(warnings_of(run), key=lambda text: text.startswith("metrics"))
    assert checkpoints.startswith("no checkpoint of step 6")
    assert metrics.startswith("metrics cannot be written")
    assert all("No space" in text for text in (checkpoints, metrics))
    assert any("No space" in badge for badge in run.status().badges)
    filler.unlink()
    model.turns.give()
    run.result()
    assert run.status().badges == ()
    assert names(run.folder) == {"final", "last-10"}
    read = SavedRun(run.folder)
    assert steps(read) == list(range(1, 13)), "what waited is written, and once"
    assert read.metrics.torn == 0
    assert losses(read) == pytest.approx(losses(run), rel=1e-8)


# --- damage


@pytest.fixture
def stopped(home: Path) -> Run:
    """Return a run that was stopped at step 7, with checkpoints of steps 3 and 6."""
    model = Gated(turns=6)
    run = ortlab.finetune(model, examples(22), **CHOSEN, save_steps=3, keep_checkpoints=3)
    until(lambda: {"last-3"} <= names(run.folder) or {"last-6"} <= names(run.folder))
    model.turns.until_asked(7)
    run.stop()
    model.turns.give()
    run.result()
    return run


@pytest.mark.parametrize("how", ["run", "name", "number", "folder"])
def test_the_one_before_is_used_where_the_newest_is_damaged(stopped: Run, how: str) -> None:
    final = stopped.folder / "checkpoints" / "final.safetensors"
    flip(final)
    given: Any = {"run": stopped, "name": "run-1", "number": 1, "folder": stopped.folder}[how]
    run = ortlab.finetune(Gated(), examples(22), resume_from=given)
    run.result()
    assert steps(run) == list(range(7, 13))
    assert losses(run) == losses(undisturbed())[6:]
    (warning,) = warnings_of(run)
    assert warning.startswith("final.safetensors cannot be used (damaged")
    assert warning.endswith("last-6.safetensors of step 6, the one before, is used")
    assert run.status().badges == (warning,)


def test_a_damaged_file_that_is_named_itself_is_refused(stopped: Run) -> None:
    final = stopped.folder / "checkpoints" / "final.safetensors"
    flip(final)
    with pytest.raises(ValueError, match="is damaged"):
        ortlab.finetune(Gated(), examples(22), resume_from=final)


def test_one_that_another_kernel_trims_meanwhile_is_passed_over(
    stopped: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, final = safetensors.safe_open, stopped.folder / "checkpoints" / "final.safetensors"

    def trimmed(path: Path, framework: str) -> Any:
        final.unlink(missing_ok=True)
        return opened(path, framework)

    monkeypatch.setattr(safetensors, "safe_open", trimmed)
    begin = resume.newest(stopped.folder)
    assert begin.path.name == "last-6.safetensors"
    assert begin.damaged.startswith("final.safetensors cannot be used (there is no checkpoint at")


def test_one_that_another_kernel_trims_meanwhile_is_not_listed(
    stopped: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.is_symlink

    def trimmed(path: Path) -> bool:
        if path.name == "final.safetensors":
            path.unlink()
        return plain(path)

    monkeypatch.setattr(Path, "is_symlink", trimmed)
    listed = [each.name for each in stopped.checkpoints]
    assert "last-6" in listed
    assert "final" not in listed


def test_none_that_is_whole(stopped: Run) -> None:
    for path in (stopped.folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        ValueError, match=r"no checkpoint of run-1 is complete: final\.safetensors cannot be used"
    ):
        ortlab.resume(1, Gated(), examples(22))
    shutil.rmtree(stopped.folder / "checkpoints")
    (stopped.folder / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="run-1 has no checkpoint"):
        ortlab.resume(1, Gated(), examples(22))


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def test_of_the_names_the_newest_comes_first() -> None:
    found = [f"{n}.safetensors" for n in ("best", "last-9", "final", "step-12", "last-100")]
    ordered = sorted(map(Path, found), key=resume._age, reverse=True)
    assert [path.name.partition(".")[0] for path in ordered] == [
        *("final", "last-100", "step-12", "last-9", "best")
    ]


# --- resuming a run whose process died


@pytest.fixture
def died(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedRun:
    """Return the run of a process killed in step 9: the folders as they are at that moment."""
    model = Gated(turns=8)
    data = examples(22)
    told = {"model": model, "data": data, "held_out": (held_out := examples(9))}
    monkeypatch.setattr(session.wrapped, "namespace", told)
    run = ortlab.finetune(
        *(model, data),
        **{**CHOSEN, "eval_dataset": held_out, "eval_steps": 2, "keep_best": "eval_loss"},
        save_steps=3,
    )
    model.turns.until_asked(9)
    until(
        lambda: (
            run._record.checkpoints.newest is not None
            and run._record.checkpoints.newest.stem == "last-6"
        )
    )
    until(lambda: "best" in names(run.folder))
    run.recorder.flush()
    after = tmp_path / "after"
    # A file that is being written, next to its final name, could vanish before it is copied.
    shutil.copytree(home / "runs", after / "runs", ignore=shutil.ignore_patterns(".*"))
    checkpoints = after / "runs" / "run-1" / "checkpoints"
    (checkpoints / ".last-9.safetensors.1.2").write_bytes(b"half")
    (checkpoints / ".last-9.1.2").mkdir()  # as a run on workers writes it
    (checkpoints / ".last-9.1.2" / "shard-00001.safetensors").write_bytes(b"half")
    model.turns.give()
    run.result()
    monkeypatch.setenv("ORTLAB_HOME", str(after))
    monkeypatch.setattr(session.registry, "runs", Recent(last=True))  # as in another process
    return SavedRun(after / "runs" / "run-1")


WHOLE = {"eval_steps": 2, "keep_best": "eval_loss", "save_steps": 3}


def test_a_run_goes_on_by_its_names_with_its_charts_whole(
    died: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert died.state == "interrupted"
    assert "%ort resume 1 continues from its checkpoint" in died.status().badges[0]
    told = "run-1 was interrupted: %ort resume 1 continues from its checkpoint"
    assert ortlab.list_runs().hint == told
    assert repr(ortlab.list_runs()).endswith(told)
    fresh = {"model": Gated(), "data": examples(22), "held_out": examples(9)}
    monkeypatch.setattr(session.wrapped, "namespace", fresh)
    run = ortlab.resume(1)
    run.result()
    assert run.model is fresh["model"]
    assert run.name == "run-2"
    whole = undisturbed(eval_dataset=examples(9), **WHOLE)
    for each in (run, SavedRun(run.folder)):
        assert steps(each) == list(range(1, 13))
        assert losses(each) == pytest.approx(losses(whole), rel=1e-8)
    assert losses(run)[6:] == losses(whole)[6:]
    evaluated = [event.step for event in run.recorder.events("eval")]
    assert evaluated == [0, 2, 4, 6, 8, 10, 12], "each once"
    assert run.result().best == whole.result().best
    assert step_of(run.folder, "best") == step_of(whole.folder, "best")
    told = [event.text for event in run.recorder.events("note")]
    assert told[-1:] == [
        "continues run-1, which had reached step 8, from last-6.safetensors of step 6"
    ]
    times = run.recorder.rows()[:, INDEX["time_s"]]
    assert (times[1:] >= times[:-1]).all(), "the clock goes on too"
    listed = repr(ortlab.list_runs())
    assert "continues run-1 from step 6" in listed
    assert "goes on as run-2" in listed
    assert "%ort resume" not in listed
    assert not list((died.folder / "checkpoints").glob(".*")), "what is half is cleared away"


@pytest.fixture
def elsewhere(died: SavedRun, tmp_path: Path) -> Path:
    """Make the run's checkpoint folder a link to a folder with other files; return the latter."""
    checkpoints, elsewhere = died.folder / "checkpoints", tmp_path / "elsewhere"
    checkpoints.rename(elsewhere)
    checkpoints.symlink_to(elsewhere)
    (elsewhere / ".ssh").mkdir()
    (elsewhere / ".ssh" / "key").touch()
    return elsewhere


def test_checkpoints_that_are_a_link_are_not_the_run_s(died: SavedRun, elsewhere: Path) -> None:
    before = sorted(elsewhere.rglob("*"))
    resume.clear(died)
    assert sorted(elsewhere.rglob("*")) == before
    assert len(died.checkpoints) == SavedRun(died.folder).entry.checkpoints == 0
    with pytest.raises(
        ValueError, match=r"checkpoints is a symbolic link, .* resume_from the path of a check"
    ):
        ortlab.resume(1, Gated(), examples(22), eval_dataset=examples(9))
    taken = resume.beginning(elsewhere / "last-6.safetensors")
    assert taken.checkpoint.position.step == 6


def test_only_half_of_a_checkpoint_is_cleared_away(died: SavedRun, elsewhere: Path) -> None:
    checkpoints = died.folder / "checkpoints"
    checkpoints.unlink()
    elsewhere.rename(checkpoints)
    (checkpoints / ".last-9.1.2.before").mkdir()
    (checkpoints / ".last-3.safetensors.1.2").symlink_to("best.safetensors")
    resume.clear(died)
    hidden = {path.name for path in checkpoints.glob(".*")}
    assert hidden == {".ssh", ".last-3.safetensors.1.2"}
    assert "best" in names(died.folder)


@pytest.fixture
def died_again(died: SavedRun) -> SavedRun:
    """Return a run continued with other settings by a process that died in its first step."""
    again = RunFolder.create(root=died.folder.parent)
    again.write_json("settings", died.began_with | {"lr": 0.01})
    again.write_json("run", died.about | {"name": again.name, "continues": died.name})
    before = resume.earlier(died, resume.newest(died.folder))
    metrics = again.metrics()
    metrics.write(before.rows, before.events)
    metrics.close()
    shutil.copy(RunFolder(died.folder).checkpoint_path("best"), again.checkpoint_path("best"))
    died.note("goes on as run-2")
    return SavedRun(again.path)


@pytest.mark.parametrize("carried", [True, False])
def test_a_run_that_died_before_its_first_checkpoint_goes_on_from_the_one_before(
    died: SavedRun, died_again: SavedRun, carried: bool
) -> None:
    if not carried:
        RunFolder(died_again.folder).checkpoint_path("best").unlink()
        assert not SavedRun(died_again.folder).entry.checkpoints
    told = "run-2 was interrupted: %ort resume 2 continues from its checkpoint"
    assert ortlab.list_runs().hint == told
    assert "%ort resume 2 continues" in SavedRun(died_again.folder).status().badges[0]
    run = ortlab.resume(2, Gated(), examples(22), eval_dataset=examples(9))
    run.result()
    assert steps(run) == list(range(1, 13))
    assert losses(run)[:6] == pytest.approx(losses(died)[:6], rel=1e-8)
    assert run.settings.optim.learning_rate == 0.01, "as run-2 had it"
    assert warnings_of(run) == [
        "run-2 has no checkpoint of its own: run-1's last-6.safetensors of step 6 is used"
    ]
    notes = [event.text for event in run.recorder.events("note")]
    assert "continues run-2 from run-1's last-6.safetensors of step 6" in notes
    evaluated = [event.step for event in run.recorder.events("eval")]
    assert evaluated == [0, 2, 4, 6, 8, 10, 12], "each once"
    assert ortlab.list_runs().hint == ""


def test_the_best_of_the_run_before_goes_along(
    died: SavedRun, died_again: SavedRun, tmp_path: Path
) -> None:
    checkpoints = died.folder / "checkpoints"
    shutil.copy(checkpoints / "last-6.safetensors", checkpoints / "best.safetensors")
    RunFolder(died_again.folder).checkpoint_path("best").unlink()
    before = resume.earlier(died_again, resume.newest(died_again.folder))
    folder = RunFolder.create()
    before.carry_best(folder)
    assert step_of(folder.path, "best") == 6
    other = RunFolder.create()
    checkpoints.rename(tmp_path / "elsewhere")
    checkpoints.symlink_to(tmp_path / "elsewhere")
    before.carry_best(other)
    assert not other.checkpoint_path("best").exists(), "what lies behind a link is not the run's"


def test_a_note_that_cannot_be_written_leaves_the_run_that_goes_on(died: SavedRun) -> None:
    (died.folder / "notes.jsonl").symlink_to("/dev/null")
    with pytest.warns(
        UserWarning, match="run-1 does not record that run-2 continues it: .*symbolic links"
    ):
        run = ortlab.resume(1, Gated(), examples(22), eval_dataset=examples(9))
    assert run.result().steps == 12


def test_of_a_run_that_is_gone_nothing_goes_on(died: SavedRun, died_again: SavedRun) -> None:
    shutil.rmtree(died.folder)
    RunFolder(died_again.folder).checkpoint_path("best").unlink()
    told = "run-2 has no checkpoint, and neither has run-1, which it continued"
    with pytest.raises(ValueError, match=told):
        ortlab.resume(2, Gated(), examples(22), eval_dataset=examples(9))


def test_runs_that_say_that_they_went_on_with_one_another(died: SavedRun) -> None:
    RunFolder(died.folder).write_json("run", died.about | {"continues": "../runs/run-1"})
    assert resume.newest(died.folder).path.name == "last-6.safetensors"


def test_what_is_missing_is_named(died: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.wrapped, "namespace", {"data": examples(22)})
    before = names(died.folder)
    with pytest.raises(ValueError, match="cannot continue without") as raised:
        ortlab.resume("run-1")
    assert str(raised.value) == (
        "run-1 cannot continue without model (the model) and held_out (its evaluation data): "
        "run the cells that create them, or pass others, as in %ort resume run-1 MODEL DATA, or "
        "ortlab.resume('run-1', model, data)"
    )
    assert names(died.folder) == before


def test_another_model_and_other_data_are_refused(died: SavedRun) -> None:
    data, held_out = examples(22), examples(9)
    with pytest.raises(ValueError, match="the checkpoint does not match the model"):
        ortlab.resume(1, network()[:3], data, eval_dataset=held_out)
    with pytest.raises(ValueError, match="30 samples per epoch, but the checkpoint's had 22"):
        ortlab.resume(1, Gated(), examples(30), eval_dataset=held_out)
    assert len(ortlab.list_runs()) == 1


def test_a_run_that_finished_or_trains_elsewhere_is_refused(
    died: SavedRun, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(died.folder)
    folder.hold()
    try:
        with pytest.raises(ValueError, match="run-1 is training in another kernel"):
            ortlab.resume(1, Gated(), examples(22), eval_dataset=examples(9))
    finally:
        folder.release()
    monkeypatch.setenv("ORTLAB_HOME", str(home))
    with pytest.raises(ValueError, match="run-1 finished after 12 steps: nothing is left to do"):
        ortlab.resume(1, Gated(), examples(22), eval_dataset=examples(9))


def test_a_run_of_this_kernel_that_is_paused_goes_on_itself(home: Path) -> None:
    model = Gated(turns=2)
    run = ortlab.finetune(model, examples(22), **CHOSEN)
    model.turns.pause(run, 3)
    with pytest.raises(ValueError, match="run-1 is a run of this kernel, paused: it has its model"):
        ortlab.resume(1, Gated(), examples(22))
    assert ortlab.resume(1) is run
    model.turns.give()
    run.result()


# --- kill -9, at random


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Return a function that returns the losses of an undisturbed run on an engine."""
    known: dict[str, dict[int, float]] = {}

    def found(name: str) -> dict[int, float]:
        if name not in known:
            home = tmp_path_factory.mktemp("whole")
            killing.train(home, name)
            known[name] = killing.losses(home, "run-1")
        return known[name]

    return found


def dies_and_goes_on(
    home: Path, name: str, drawn: random.Random, *, spoilt: bool = False, full: bool = False
) -> dict[int, float]:
    killing.killed(home, name, drawn, kept=2 if spoilt else 1, full=full)
    if full:
        killing.free(home)
    folder = home / "runs" / "run-1"
    kept = sorted(
        (path for path in (folder / "checkpoints").glob("last-*")), key=resume._age, reverse=True
    )
    assert [Checkpoint.load(path).position.step for path in kept], "all can be read"
    if spoilt:
        killing.spoil(kept[0], drawn)
    killing.resume(home, "run-1")
    warned = [e for e in SavedRun(home / "runs" / "run-2").metrics.events if e.kind == "warning"]
    assert len(warned) == spoilt
    if spoilt:
        assert kept[0].name in warned[0].text
        assert kept[1].name in warned[0].text
    return killing.losses(home, "run-2")


def test_a_process_that_is_killed_loses_nothing(whole: Any, tmp_path: Path) -> None:
    drawn = random.Random(3)
    assert dies_and_goes_on(tmp_path, "eager", drawn, spoilt=True) == whole("eager")


def test_a_process_that_is_killed_on_a_full_disk_loses_nothing(whole: Any, tmp_path: Path) -> None:
    drawn = random.Random(5)
    with killing.small_disk(tmp_path / "disk", MIB) as disk:
        assert dies_and_goes_on(disk, "eager", drawn, full=True) == whole("eager")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["none", "spoilt", "full"])
@pytest.mark.parametrize("name", ["eager", "compile", "ortmodule", "ort_fused"])
def test_thirty_deaths(whole: Any, tmp_path: Path, name: str, fault: str) -> None:
    """Thirty runs, killed at random points and resumed, have the losses of an undisturbed one."""
    needs(name)
    drawn = random.Random(30)
    spoilt, full = fault == "spoilt", fault == "full"
    for number in range(30):
        home = tmp_path / str(number)
        with killing.small_disk(home, MIB) if full else contextlib.nullcontext():
            found = dies_and_goes_on(home, name, drawn, spoilt=spoilt, full=full)
        assert found == whole(name), number
        shutil.rmtree(home)


@pytest.mark.nightly
def test_thirty_deaths_of_kernels_with_workers(tmp_path: Path) -> None:
    """The workers end with their kernel, and the runs resume on others with the same losses."""
    drawn = random.Random(7)
    killing.train(tmp_path / "whole", "eager", workers=2)
    expected = killing.losses(tmp_path / "whole", "run-1")
    for number in range(30):
        home = tmp_path / str(number)
        killing.killed(home, "eager", drawn, workers=2)
        until(lambda home=home: not killing.running(home))  # type: ignore[misc]
        killing.resume(home, "run-1")
        assert killing.losses(home, "run-2") == expected, number
        until(lambda home=home: not killing.running(home))  # type: ignore[misc]


def test_a_schedule_saves_each_step_once() -> None:
    parts = Parts(save_steps=2)
    saved: list[int] = []
    schedule = CheckpointSchedule(
        parts.state, parts.control, lambda taken: saved.append(taken.position.step)
    )
    schedule.save_if_due()
    saved.clear()
    for _ in range(3):
        parts.step()
        schedule.save_if_due()
    assert saved == [2]
    for _ in range(2):
        schedule.save_unsaved()
    assert saved == [2, 3]
