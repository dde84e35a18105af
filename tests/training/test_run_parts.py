"""Tests of the parts of a run by themselves: its progress, its record, its view and its worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlab.history.run_folder import RunFolder
from ortlab.history.saved_run import SavedRun
from ortlab.training import data_loading, run_view
from ortlab.training.control import Control, PauseReason
from ortlab.training.failures import FailurePolicy
from ortlab.training.run_progress import RunProgress
from ortlab.training.run_record import RunRecord
from ortlab.training.run_view import RunView
from ortlab.training.run_worker import RunWork, RunWorker
from tests.support.training_parts import Parts, chosen, examples
from tests.support.waiting import HANGS_S


class Made:
    """Progress, record and view of a run in its own folder."""

    def __init__(self, root: Path, **values: Any) -> None:
        self.progress = RunProgress(Control(), chosen(**values), total=4)
        self.folder = RunFolder.create("run", root=root)
        self.record = RunRecord(self.folder, self.progress, model=nn.Linear(4, 3))
        self.view = RunView(self.progress, self.record, warnings=["resumed from an old one"])


@pytest.fixture
def made(tmp_path: Path, threads_end: None) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    made.record.checkpoints.close()
    made.record.recorder.close()


def test_progress_knows_the_state_and_the_changes(made: Made) -> None:
    progress = made.progress
    assert (progress.state, progress.step) == ("starting", 0)
    progress.stage = "running"
    progress.control.hold(PauseReason(ValueError("bad"), "", ""))
    assert progress.state == "paused"
    first, second = progress.settings, progress.settings.replace(lr=0.5)
    progress.use(second)
    assert progress.earlier_settings == [first]
    progress.use(first)
    assert progress.earlier_settings == []
    progress.control.stop()
    assert (progress.state, progress.ended) == ("stopping", "stopped")
    progress.error = ValueError("bad")
    assert progress.ended == "failed"


def test_a_record_is_complete_once_it_is_concluded(made: Made) -> None:
    assert made.folder.read_json("run")["state"] == "running"
    made.record.begin()
    made.record.event("note", "a word")
    made.progress.error = ValueError("bad data")
    made.record.conclude()
    made.record.release()
    about = made.folder.read_json("run")
    assert about["state"] == "failed"
    assert about["error"] == "ValueError: bad data"
    assert made.progress.result is not None
    assert made.progress.result.steps == 0
    kinds = [event.kind for event in made.folder.read_metrics().events]
    assert kinds == ["note", "error", "state"]


def test_a_view_says_what_pauses_the_run(made: Made) -> None:
    assert repr(made.view) == "<Run run: starting, step 0/4, eager>"
    assert made.view.title == "run: Linear on eager"
    error = ValueError("bad data")
    reason = PauseReason(error, "at step {step}", "mend it", "the data failed", {"lr": 0.5})
    made.progress.control.hold(reason)
    status = made.view.status(over=False)
    assert status.badges == ("held: the data failed", "resumed from an old one")
    assert status.advice == "lr=0.5"
    assert status.lines == ("preparing",)
    assert status.error is not None
    assert "ValueError: bad data" in status.error
    assert made.view.pause_error(reason) is error
    assert len(error.__notes__) == 1, "the note is added once"


def test_a_view_reads_words_again_after_news_or_a_while(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("ortlab.training.run_view.time.perf_counter", lambda: now[0])
    read: list[int] = []

    def kept() -> dict[str, int]:
        read.append(1)
        return {}

    view = RunView(made.progress, made.record, kept=kept)
    made.progress.last_step = 1

    def reads() -> int:
        read.clear()
        assert view.status(over=False).step == made.progress.step
        return len(read)

    assert reads() == 1
    made.progress.last_step += 1
    assert reads() == 0, "a step has new numbers alone"
    made.record.event("early_stop", "no better for 3 evaluations")
    assert reads() == 1
    assert view.status(over=False).lines == ("no better for 3 evaluations",)
    made.progress.stage = "running"
    assert reads() == 1
    made.progress.control.hold(PauseReason(ValueError("bad"), "", "", "bad", passes=True))
    assert reads() == 1
    assert reads() == 0
    now[0] += run_view._WORDS_S + 0.1
    assert reads() == 1


def test_a_view_has_the_last_warning_that_it_does_not_show_elsewhere(made: Made) -> None:
    made.progress.last_step = 7
    for text in ("the epoch is empty", "resumed from an old one", "no room for a copy"):
        made.record.event("warning", text)
    made.record.event("warning", "resumed from an old one; it is tried again")
    line = "warning at step 7: no room for a copy (1 more before it: run.metrics.events)"
    assert made.view.status(over=False).lines == (line,)
    made.record.recorder.flush()
    saved = SavedRun(made.folder.path).status().lines[-1]
    assert saved.endswith("it is tried again (3 more before it: run.metrics.events)")


def test_a_view_repeats_no_warning_that_is_over_or_its_error(made: Made) -> None:
    made.progress.foretold = "a step needs 3 GiB of memory, and 2 GiB are available"
    made.record.event("warning", made.progress.foretold)
    made.progress.last_step = 1
    assert made.view.status(over=False).lines == (), "the first step has fit"
    made.progress.control.hold(PauseReason(ValueError("bad"), "", "", "bad", passes=True))
    made.record.event("warning", "paused at step 1: ValueError: bad")
    status = made.view.status(over=False)
    assert status.lines == ()
    assert "ValueError: bad" in str(status.error)


def test_a_view_has_what_was_foretold_of_a_first_step_that_failed(made: Made) -> None:
    made.progress.foretold = "a step needs 3 GiB of memory, and 2 GiB are available"
    made.record.event("warning", made.progress.foretold)
    line = f"warning at step 0: {made.progress.foretold}"
    assert made.view.status(over=True).lines == (line,)


def test_a_worker_trains_and_releases_the_model(made: Made) -> None:
    parts, settings = Parts(), made.progress.settings
    before = parts.model.weight.detach().clone()
    data = data_loading.batches(examples(), settings)
    work = RunWork(parts.model, parts.prepare, data, None, FailurePolicy())
    worker = RunWorker(work, made.progress, made.record)
    worker.start()
    assert worker.over.wait(HANGS_S)
    assert made.progress.error is None
    assert made.progress.state == "finished"
    assert made.progress.trainer is None
    assert made.progress.step == made.progress.total == 4 * settings.limits.num_train_epochs
    assert not torch.equal(parts.model.weight, before)
    assert made.folder.read_checkpoint().position.step == made.progress.step
    with pytest.raises(RuntimeError, match="already started"):
        worker.start()
