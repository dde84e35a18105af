"""Tests of the format of a run's folder: after a crash, with a full disk, for other readers."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ortlab.history.run_folder import MetricsFile, RunFolder, read_metrics, runs_root
from ortlab.metrics.recorder import COLUMNS, INDEX, NAN, Event, Rows
from ortlab.utils.environment import environment
from ortlab.utils.files import write_beside, write_private
from tests.support.waiting import HANGS_S


def rows(first: int, count: int) -> Rows:
    made = np.full((count, len(COLUMNS)), NAN)
    made[:, INDEX["step"]] = np.arange(first, first + count)
    made[:, INDEX["loss"]] = np.random.default_rng(first).random(count).astype(np.float32)
    made[:, INDEX["rss_bytes"]] = 5_123_456_789_013
    return made


def test_metrics_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    event = Event("eval", 3, 0.5, 'a "text"\nof two lines', {"loss": 0.25, "accuracy": NAN})
    sink = MetricsFile(file)
    sink.write(rows(1, 3), [event])
    sink.write(rows(4, 2), [])
    sink.close()
    read = read_metrics(file)
    written = np.concatenate([rows(1, 3), rows(4, 2)])
    single = np.float32  # losses are measured in float32
    assert np.array_equal(read.rows.astype(single), written.astype(single), equal_nan=True)
    assert read.rows[0, INDEX["rss_bytes"]] == 5_123_456_789_013
    assert (read.events[0].kind, read.events[0].text) == (event.kind, event.text)
    assert read.events[0].values["loss"] == 0.25
    assert math.isnan(read.events[0].values["accuracy"])
    assert read.torn == 0


def test_every_line_is_json(tmp_path: Path) -> None:
    """Numbers that JSON lacks are null, in steps and in events."""
    made = rows(1, 3)
    made[:, INDEX["loss"]] = [math.nan, math.inf, -math.inf]
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    sink.write(made, [Event("eval", 1, 0.1, "nan and inf", {"loss": math.inf})])
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    head, *steps, event = [json.loads(line, parse_constant=refuse) for line in lines]
    assert head["columns"] == [column.name for column in COLUMNS]
    assert [step[INDEX["loss"]] for step in steps] == [None, None, None]
    assert event["values"] == {"loss": None}
    assert event["text"] == "nan and inf"


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_last_line_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = MetricsFile(file)
    sink.write(rows(1, 5), [])
    sink.close()
    file.write_bytes(file.read_bytes()[:-cut])
    whole = 5 if cut == 1 else 4  # if only the line feed is missing, the line is complete
    assert read_metrics(file).rows[:, 0].tolist() == list(range(1, whole + 1))
    assert read_metrics(file).torn == 5 - whole
    again = MetricsFile(file)
    again.write(rows(6, 2), [])
    again.close()
    assert read_metrics(file).rows[:, 0].tolist() == [*range(1, whole + 1), 6, 7]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    """Files of other versions may have other columns in another order."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"form": 1, "columns": ["loss", "moons", "step"]}\n[0.5, 3, 1]\n[0.25, 4, 2]\n'
    )
    read = read_metrics(file)
    assert read.rows[:, [INDEX["step"], INDEX["loss"]]].tolist() == [[1, 0.5], [2, 0.25]]
    assert np.isnan(read.rows[:, INDEX["lr"]]).all()


def test_what_was_flushed_survives_the_death_of_python(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from ortlab.history.run_folder import MetricsFile
from ortlab.metrics.recorder import COLUMNS, Recorder, Sample
recorder = Recorder(sinks=[MetricsFile(Path(sys.argv[1]))])
for step in range(1, 101):
    recorder.add(Sample(step, loss=0.5))
while Path(sys.argv[1]).read_bytes().count(b"\\n") < 101:
    pass
os._exit(9)
"""
    file = tmp_path / "metrics.jsonl"
    ended = subprocess.run([sys.executable, "-c", script, str(file)], timeout=HANGS_S, check=False)
    assert ended.returncode == 9
    assert len(read_metrics(file).rows) == 100


def test_folders_are_numbered_and_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs"
    made = [RunFolder.create(root=root) for _ in range(3)]
    assert [folder.name for folder in made] == ["run-1", "run-2", "run-3"]
    (root / "run-2" / "checkpoints").rmdir()
    (root / "run-2").rmdir()
    assert RunFolder.create(root=root).name == "run-4"
    made[0].write_json("settings", {"lr": 0.1})
    made[0].metrics().close()
    write_private(made[0].checkpoint_path(), b"")
    for path in [made[0].path, *made[0].path.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_file_is_private_whoever_writes_it(tmp_path: Path) -> None:
    write_beside(tmp_path / "file", lambda beside: beside.write_text("as the umask has it"))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_created_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set ORTLAB_HOME to another folder"):
        RunFolder.create()


def test_a_private_file_takes_its_place_at_once(tmp_path: Path) -> None:
    path = tmp_path / "charts.png"
    path.write_bytes(b"before")
    write_private(path, b"after")
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_synced_by_who_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to sync a descriptor that is open for reading only."""
    synced = []

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            assert access != os.O_RDONLY
            synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = RunFolder.create(root=tmp_path)
    write_private(folder.checkpoint_path(), b"")
    folder.metrics().close()
    assert len(synced) == 2


def test_names_are_kept_apart(tmp_path: Path) -> None:
    names = [RunFolder.create("bert", root=tmp_path).name for _ in range(3)]
    assert names == ["bert", "bert-2", "bert-3"]
    for bad in ("../up", "", "a b", ".hidden"):
        with pytest.raises(ValueError, match="is not a run's name"):
            RunFolder.create(bad, root=tmp_path)


def test_folders_made_at_once_are_different(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda: names.append(RunFolder.create(root=tmp_path).name))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 8


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="set ORTLAB_HOME to another folder"):
        RunFolder.create(root=tmp_path / "file" / "runs")


def test_where_runs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    assert runs_root() == tmp_path / "runs"
    monkeypatch.delenv("ORTLAB_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert runs_root() == tmp_path / "data" / "ortlab" / "runs"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert runs_root() == Path.home() / ".local" / "share" / "ortlab" / "runs"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    folder = RunFolder.create(root=tmp_path)
    folder.write_json("settings", {"lr": 0.1})
    with pytest.raises(TypeError):
        folder.write_json("settings", {"lr": object()})
    assert folder.read_json("settings") == {"lr": 0.1}
    assert {path.name for path in folder.path.rglob("*")} == {"settings.json", "checkpoints"}


def test_the_environment_names_versions_and_nobody() -> None:
    found = environment()
    assert found["packages"]["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    text = json.dumps(found)
    assert platform.node() not in text
    assert str(Path.home()) not in text
