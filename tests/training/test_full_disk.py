"""A full disk: a run trains to its end, says what is not saved, and saves it once it can."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history import pending_writes
from ortlab.history.run_folder import RunFolder, in_checkpoints
from ortlab.history.saved_run import SavedRun
from ortlab.metrics.recorder import INDEX
from ortlab.training.checkpoint_writer import CheckpointWriter
from ortlab.training.run import Run
from tests.support.killing import small_disk
from tests.support.waiting import HANGS_S, until

STEPS = 24
CHOSEN: Any = {"engine": "eager", "batch_size": 2, "loss": "cross_entropy", "hold": False}


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples, during the reading of one of which the disk becomes full."""

    def __init__(self, disk: Path, reads: int) -> None:
        self._disk = disk
        self._left = reads

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._left == 0:
            fill(self._disk)
        self._left -= 1
        return torch.full((64,), index / (2 * STEPS)), index % 3


def samples(disk: Path, reads: int) -> Any:
    return Samples(disk, reads)


def fill(disk: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), open(disk / "filler", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 3))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return ORTLAB_HOME on a file system of 3 MiB."""
    monkeypatch.setattr(pending_writes, "_FIRST_S", 0.05)
    monkeypatch.setattr(pending_writes, "_MOST_S", 0.05)
    with small_disk(tmp_path / "disk", 3 * 2**20) as disk:
        monkeypatch.setenv("ORTLAB_HOME", str(disk))
        yield disk


def weights(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def saved(run: Run) -> bool:
    return run._record.pending.trouble is None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return the weights of a run whose disk has room."""
    model = network()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ORTLAB_HOME", str(tmp_path_factory.mktemp("home")))
        ortlab.finetune(model, samples(Path(), -1), **CHOSEN).result(HANGS_S)
    return weights(model)


def test_a_run_ends_whenever_the_disk_becomes_full(
    disk: Path, tmp_path: Path, undisturbed: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, waited = random.Random(1), 0
    for point in (0, 2 * STEPS - 1, *(drawn.randrange(2 * STEPS) for _ in range(18))):
        model = network()
        run = ortlab.finetune(model, samples(disk, point), **CHOSEN, save_steps=5)
        result = run.result(HANGS_S)
        assert (result.state, result.steps) == ("finished", STEPS), point
        assert torch.equal(weights(model), undisturbed), point
        # An older checkpoint that is deleted after the disk is full may make room for the last.
        if not saved(run):
            waited += 1
            told = rf"{run.name} is finished, but not saved yet: the last checkpoint.*No space.*"
            assert re.search(told, capsys.readouterr().out), point
            assert any("not saved yet" in badge for badge in run.status().badges)
            elsewhere = run.checkpoint(tmp_path / f"elsewhere-{point}")
            assert Checkpoint.load(elsewhere).position.step == STEPS
        (disk / "filler").unlink()
        until(lambda run=run: saved(run))  # type: ignore[misc]
        complete(run)
        assert run.status().badges == ()
        shutil.rmtree(run.folder)  # there is no room for twenty runs
    assert waited > 10


def complete(run: Run) -> None:
    """Check that the folder of a finished run has all of it."""
    read = SavedRun(run.folder)
    assert read.state == "finished"
    assert read.began_with["batch_size"] == 2
    assert read.environment
    assert read.metrics.torn == 0
    assert read.metrics.rows[:, INDEX["step"]].tolist() == list(range(1, STEPS + 1))
    states = [event.text for event in read.metrics.events if event.kind == "state"]
    assert states == ["starting", "running", "finished"]
    assert Checkpoint.load(run.folder / "checkpoints" / "final.safetensors").position.step == STEPS


def test_a_disk_that_is_full_from_the_start(disk: Path, undisturbed: torch.Tensor) -> None:
    fill(disk)
    model = network()
    run = ortlab.finetune(model, samples(disk, -1), **CHOSEN)
    until(lambda: any("not saved yet: the settings" in b for b in run.status().badges))
    run.result(HANGS_S)
    assert torch.equal(weights(model), undisturbed)
    (disk / "filler").unlink()
    until(lambda: saved(run))
    complete(run)


def test_a_run_resumes_from_a_checkpoint_elsewhere(
    disk: Path, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    model = network()
    run = ortlab.finetune(model, samples(disk, STEPS), **CHOSEN)
    until(lambda: run.step > STEPS // 2)
    run.pause()
    elsewhere = run.checkpoint(tmp_path / "elsewhere")
    run.stop()
    run.result(HANGS_S)
    model = network()
    again = ortlab.finetune(model, samples(disk, -1), **CHOSEN, resume_from=elsewhere)
    assert again.result(HANGS_S).steps == STEPS
    assert torch.equal(weights(model), undisturbed)


def test_a_paused_run_is_saved_once_there_is_room(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlab.training.checkpoint_writer._RETRY_S", 0.05)
    run = ortlab.finetune(network(), samples(disk, 10), **CHOSEN)
    until(lambda: (disk / "filler").exists())
    run.pause()
    until(lambda: any("no checkpoint of step" in badge for badge in run.status().badges))
    (disk / "filler").unlink()
    until(lambda: run._record.checkpoints.newest is not None)
    assert run.status().badges == ()
    run.stop()
    run.result(HANGS_S)


def test_the_last_and_the_best_checkpoint_both_wait_for_room(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortlab.training.checkpoint_writer._RETRY_S", 0.05)
    run = ortlab.finetune(network(), samples(disk, -1), **CHOSEN)
    run.result(HANGS_S)
    taken = Checkpoint.load(run.checkpoint(tmp_path / "taken"))
    told: list[str] = []
    folder = RunFolder.create()
    writer = CheckpointWriter(folder, first=list, tell=lambda _, text, step=None: told.append(text))
    fill(disk)
    writer.keep(taken, 2)
    writer.keep_best(taken)
    until(lambda: writer.trouble is not None)
    (disk / "filler").unlink()
    kept = {f"last-{STEPS}.safetensors", "best.safetensors"}
    until(lambda: {path.name for path in in_checkpoints(folder.path)} == kept)
    writer.close()
    assert writer.trouble is None
    assert len(told) >= 2
