"""Tests of the history: its index, opened runs, comparisons, pruning, exports to other tools."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ortlab
from ortlab.history import sqlite_index
from ortlab.history.comparison import RunComparison
from ortlab.history.entry import RunEntry, read_entry, size_of, stamp
from ortlab.history.listing import living_entries
from ortlab.history.prune import prune
from ortlab.history.run_folder import RunFolder, read_last, read_metrics
from ortlab.history.run_result import RunResult
from ortlab.history.saved_run import SavedRun, find
from ortlab.metrics.recorder import COLUMNS, INDEX
from ortlab.notebook.static_views import curves
from ortlab.notebook.static_views.drawing import COLORS
from ortlab.notebook.views import charts, comparison_view
from ortlab.notebook.views.history_view import HistoryView
from ortlab.session import session
from ortlab.settings import HistorySettings, PruneSettings
from ortlab.utils.weak_list import Recent
from tests.support.past_runs import end, kept, spoil, steps, wait_for
from tests.support.waiting import HANGS_S, until


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the runs of this test are stored."""
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    monkeypatch.setattr(session.registry, "runs", Recent(last=True))
    return tmp_path / "runs"


def names(found: Any) -> list[str]:
    return [entry.name for entry in found]


def rows_of_index(root: Path) -> dict[str, tuple[Any, ...]]:
    with sqlite3.connect(root / "index.sqlite") as database:
        found = database.execute("SELECT name, state, engine_used, loss, size_bytes FROM runs")
        return {row[0]: row[1:] for row in found}


# Reading runs, and where they are read from.


def test_an_entry_tells_a_run_without_its_metrics(root: Path) -> None:
    path = kept(root, loss=0.5, engine="ortmodule", used="eager", model="Bert")
    (path / "metrics.jsonl").unlink()
    entry = read_entry(path)
    assert entry is not None
    assert (entry.name, entry.number, entry.state, entry.model) == ("run-1", 1, "finished", "Bert")
    assert (entry.engine_asked, entry.engine_used, entry.fallback) == (
        "ortmodule",
        "eager",
        "told so",
    )
    assert (entry.steps, entry.loss, entry.held_out_loss) == (20, 0.5, 0.25)
    assert (entry.held_out_accuracy, entry.samples_per_s, entry.peak_bytes) == (0.75, 2000, 2**30)
    assert math.isnan(entry.tokens_per_s)
    assert entry.size_bytes == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def test_a_listing_reads_no_metrics_and_the_next_no_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        kept(root)
    opened: list[str] = []
    plain = os.open

    def noted(path: Any, *args: Any, **options: Any) -> int:
        opened.append(Path(path).name)
        return plain(path, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    first = sqlite_index.entries()
    assert "run.json" in opened
    assert "metrics.jsonl" not in opened
    opened.clear()
    assert [repr(entry) for entry in sqlite_index.entries()] == [repr(entry) for entry in first]
    assert opened == []


@pytest.mark.parametrize(
    "changes",
    [
        {"result": {"steps": "many", "best": 3, "final_loss": [1], "peak_bytes": 1e400}},
        {"result": "none", "parameters": "all", "workers": {}, "created": 5, "model": None},
        {"state": ["finished"], "engine_used": 7, "error": {"a": 1}, "fallback_reason": 0},
        {"result": {"steps": 10**400, "final_loss": -(10**400)}},
        {"parameters": 1e30, "workers": -1e30},
        {"model": "\ud800", "error": "\udcff", "precision": "\ud800"},
        {"created": "0001-01-01T00:00:00+14:00"},
        {"created": "9999-12-31T23:59:59-14:00"},
    ],
)
def test_what_others_wrote_into_a_folder_is_listed_nonetheless(
    root: Path, changes: dict[str, Any]
) -> None:
    folder = RunFolder(kept(root))
    about = folder.read_json("run") | changes
    (folder.path / "run.json").write_text(json.dumps(about))
    (folder.path / "notes.jsonl").write_text('[1]\n{"tag": 3}\n{"note": null}\n')
    told = repr(ortlab.list_runs(sort="loss"))
    assert told.splitlines()[2].startswith("run-1 ")
    assert "#3 None" in told
    assert sqlite_index.entries()[0].name == "run-1"
    assert set(rows_of_index(root)) == {"run-1"}
    assert ortlab.prune_runs(older_than="1h", keep=0)[0].name == "run-1"


def test_half_a_character_in_a_note_stands_as_a_question_mark(root: Path) -> None:
    run = SavedRun(kept(root))
    run.note("good \ud800")
    assert ortlab.list_runs()[0].note == "good ?"
    assert [note.text for note in run.notes] == ["good ?"]


def test_what_a_terminal_obeys_is_shown_and_not_obeyed(root: Path) -> None:
    obeyed = "\x1b]0;mine\x07\x1b[2J\x9b1m\r\n\u202e"
    path = kept(root, model=f"Net{obeyed}", error=f"no{obeyed}", used=f"ort{obeyed}")
    settings = RunFolder(path).read_json("settings") | {"seed": 1, f"new{obeyed}": obeyed}
    RunFolder(path).write_json("settings", settings)
    folder = RunFolder(kept(root))
    about = folder.read_json("run") | {"name": f"run-3{obeyed}"}
    folder.write_json("run", about)
    folder.path.rename(root / f"run-3{obeyed}")
    SavedRun(path).note(f"good{obeyed}")
    other = kept(root)
    compared = RunComparison([SavedRun(path), SavedRun(other)])
    listed = ortlab.list_runs()
    assert "run-1" in names(listed)
    assert len(listed) == 2, "and a name with a line of its own is no run's"
    for told in (repr(listed), repr(compared), repr(ortlab.list_runs(model=obeyed))):
        assert set(told) & set(obeyed) <= set("]0;mine[2J1m\n"), told
    assert r"Net\x1b]0;mine\x07\x1b[2J\x9b1m\r\n" in repr(listed)
    assert len(repr(listed).splitlines()) == 5, "a line for each run, head, rule and note"


def test_names_that_no_run_has_stand_in_no_run_s_way(root: Path) -> None:
    kept(root)
    for name in ("run-" + "9" * 30, "run-\udcff"):
        path = kept(root)
        about = RunFolder(path).read_json("run") | {"name": name}
        RunFolder(path).write_json("run", about)
        path.rename(root / name)
    assert set(names(sqlite_index.entries())) == {"run-1", "run-" + "9" * 30}, "a name is text"
    assert set(rows_of_index(root)) == {"run-1", "run-" + "9" * 30}
    assert ortlab.open_run("run-" + "9" * 30).entry.number is None


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**36)  # a sparse file, which takes no space on the disk


@pytest.mark.parametrize("put", [_pipe, _endless, _huge])
@pytest.mark.parametrize("file", ["run.json", "settings.json", "notes.jsonl", "metrics.jsonl"])
def test_what_is_no_plain_file_hides_no_other_run(root: Path, file: str, put: Any) -> None:
    kept(root)
    # Of a running run, only the last steps are read, at the end of the file.
    path = kept(root, state="running" if file == "metrics.jsonl" else "finished")
    (path / file).unlink(missing_ok=True)
    put(path / file)
    listed = names(ortlab.list_runs())
    assert "run-1" in listed
    assert ("run-2" in listed) == file.endswith("jsonl")
    if file.endswith(".json"):
        with pytest.raises(ValueError, match="no run is called 'run-2'"):
            ortlab.open_run(2)
    elif file == "notes.jsonl":
        assert ortlab.open_run(2).notes == ()
    elif put is not _huge:  # the file is read line by line
        with pytest.raises(OSError, match=r"(not followed|not a regular file): .*metrics\.jsonl"):
            ortlab.open_run(2).recorder  # noqa: B018


def test_nothing_is_noted_through_a_link(root: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.write_text("theirs\n")
    path = kept(root)
    (path / "notes.jsonl").symlink_to(others)
    with pytest.raises(OSError, match="symbolic links are not followed"):
        SavedRun(path).note("mine")
    assert others.read_text() == "theirs\n"


def test_a_rank_without_those_before_it_is_nobody_s(root: Path) -> None:
    path = kept(root)
    for rank in (0, 5):
        sink = RunFolder(path).metrics(rank)
        sink.write(steps(3), [])
        sink.close()
    assert len(SavedRun(path).recorder.ranks) == 1
    (path / "rank-0.jsonl").unlink()
    assert SavedRun(path).recorder.ranks == []


@pytest.mark.parametrize("size", [1, 40, 5000])
def test_the_last_steps_are_those_of_the_whole_file(tmp_path: Path, size: int) -> None:
    """Only a block at the end of a file of 5000 steps is read."""
    path = kept(tmp_path, count=size) / "metrics.jsonl"
    whole, last = read_metrics(path).rows, read_last(path)
    assert 0 < len(last) <= size
    assert np.array_equal(last, whole[-len(last) :], equal_nan=True)
    assert (len(last) == size) == (path.stat().st_size < 65536)


def test_the_index_is_private(root: Path) -> None:
    before = os.umask(0)
    try:
        kept(root)
        sqlite_index.entries()
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "index.sqlite").stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["missing", "damaged", "another form", "another shape", "garbage"])
def test_an_index_that_is_not_right_is_made_again(root: Path, what: str) -> None:
    for loss in (0.5, 0.25):
        kept(root, loss=loss)
    expected = [repr(entry) for entry in sqlite_index.entries()]
    file = root / "index.sqlite"
    if what == "missing":
        file.unlink()
    elif what == "damaged":
        spoil(file)
    elif what == "garbage":
        file.write_text("nothing of SQLite's")
    else:
        with sqlite3.connect(file) as database:
            if what == "another form":
                database.execute("PRAGMA user_version = 99")
                database.execute("UPDATE runs SET loss = 77")
            else:
                database.execute("DROP TABLE runs")
                database.execute("CREATE TABLE runs (name, moons)")
                database.execute("INSERT INTO runs VALUES ('run-1', 3)")
    assert [repr(entry) for entry in sqlite_index.entries()] == expected
    assert set(rows_of_index(root)) == {"run-1", "run-2"}
    assert rows_of_index(root)["run-1"][2] == 0.5


def test_a_bit_that_flips_in_the_index_changes_nothing(root: Path) -> None:
    """Flips are seeded, everywhere, more often in the header; the file is read, then written."""
    for day in range(3):
        kept(root, days=day)
    SavedRun(root / "run-2").note("größer")
    expected = repr(sqlite_index.entries())
    told = repr(ortlab.list_runs(sort="loss"))
    file = root / "index.sqlite"
    whole, drawn = file.read_bytes(), random.Random(7)
    places = [*range(100), *(drawn.randrange(len(whole)) for _ in range(400))]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << drawn.randrange(8)
        file.write_bytes(data)
        assert repr(sqlite_index.entries()) == expected, place
        assert repr(ortlab.list_runs(sort="loss")) == told, place
        assert set(rows_of_index(root)) == {"run-1", "run-2", "run-3"}, place
        file.write_bytes(data)
        for _ in range(2):  # damage is noticed when the file is read
            sqlite_index.note(root / "run-1")
            sqlite_index.entries()
        assert rows_of_index(root)["run-1"] == ("finished", "eager", 1.0, size_of(root / "run-1"))


def test_the_folders_go_before_the_index(root: Path) -> None:
    """Runs written, added or removed without the index still appear correctly."""
    first, second = kept(root), kept(root)
    sqlite_index.entries()
    with sqlite3.connect(root / "index.sqlite") as database:  # a row of a run that does not exist
        database.execute("UPDATE runs SET name = 'ghost' WHERE name = 'run-2'")
    about = RunFolder(first).read_json("run")
    RunFolder(first).write_json("run", about | {"model": "Other"})
    kept(root)
    assert names(sqlite_index.entries()) == ["run-1", "run-2", "run-3"]
    assert sqlite_index.entries()[0].model == "Other"
    assert set(rows_of_index(root)) == {"run-1", "run-2", "run-3"}
    (second / "checkpoints" / "final.safetensors").write_bytes(bytes(5000))
    assert sqlite_index.entries()[1].size_bytes == size_of(second) > 5000


def test_without_a_place_for_an_index_runs_are_listed(root: Path) -> None:
    kept(root)
    (root / "index.sqlite").mkdir()  # not even root can write a file there
    assert names(sqlite_index.entries()) == ["run-1"]
    assert names(ortlab.list_runs()) == ["run-1"]


def test_what_is_no_run_is_not_listed(root: Path, tmp_path: Path) -> None:
    kept(root)
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    elsewhere = kept(tmp_path / "other", "linked")
    (root / "linked").symlink_to(elsewhere, target_is_directory=True)
    renamed = kept(root)
    renamed.rename(root / "copy")  # its name differs from the stored one
    (kept(root) / "run.json").write_text("[1, 2")
    assert names(sqlite_index.entries()) == ["run-1"]


AT_ONCE = """
import sys
from pathlib import Path
from ortlab.history import sqlite_index as index
from tests.support.past_runs import kept, wait_for
root, me = Path(sys.argv[1]), sys.argv[2]
Path(root.parent, f"ready-{me}").touch()
wait_for(root.parent / "go")
for number in range(12):
    index.note(kept(root, f"p{me}-{number}", count=2))
"""


def test_runs_that_end_at_once_in_several_processes_are_all_there(root: Path) -> None:
    root.mkdir(parents=True)
    started = [
        subprocess.Popen([sys.executable, "-c", AT_ONCE, str(root), str(me)]) for me in range(2)
    ]
    for me in range(2):
        wait_for(root.parent / f"ready-{me}", 60)
    (root.parent / "go").touch()
    assert [process.wait(HANGS_S) for process in started] == [0, 0]
    expected = {f"p{me}-{number}" for me in range(2) for number in range(12)}
    assert set(rows_of_index(root)) == expected  # before a listing could repair anything
    assert set(names(sqlite_index.entries())) == expected


KILLED = """
import sys, time
from pathlib import Path
from ortlab.history.run_folder import RunFolder
from tests.support.past_runs import kept
path = kept(Path(sys.argv[1]), state="running", count=5)
folder = RunFolder(path)
folder.hold()
Path(sys.argv[1], "..", "held").touch()
time.sleep(600)
"""


def test_a_run_is_interrupted_when_its_process_dies(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(root)])
    try:
        wait_for(root.parent / "held", 60)
        (entry,) = sqlite_index.entries()
        assert (entry.state, entry.steps, entry.loss) == ("running", 5, 1.0)
        assert entry.at_work
        assert SavedRun(entry.folder).status().state == "running"
    finally:
        process.kill()
        process.wait()
    (entry,) = sqlite_index.entries()
    assert (entry.state, entry.at_work) == ("interrupted", False)
    assert (entry.steps, entry.samples_per_s, entry.peak_bytes) == (5, 2000, 2**30)
    assert rows_of_index(root)["run-1"][0] == "interrupted"
    assert names(ortlab.list_runs(state="interrupted")) == ["run-1"]
    assert "interrupted" in charts.text(SavedRun(entry.folder))


def test_an_interrupted_run_on_workers_has_the_peak_memory_of_the_one_that_used_most(
    root: Path,
) -> None:
    path = kept(root, state="running", count=5)
    for rank, peak_bytes in enumerate((2**28, 2**29)):
        rows = steps(5)
        rows[:, INDEX["peak_bytes"]] = peak_bytes
        sink = RunFolder(path).metrics(rank)
        sink.write(rows, [])
        sink.close()
    (entry,) = sqlite_index.entries()
    assert entry.peak_bytes == 2**29


def test_asking_whether_a_run_is_held_changes_nothing(root: Path) -> None:
    folder = RunFolder(kept(root, state="running"))
    before = stamp(folder.path)
    assert not folder.held()
    assert stamp(folder.path) == before
    folder.hold()
    assert folder.held()  # by this process itself
    assert RunFolder(folder.path).held()
    assert (sqlite_index.entries()[0].state, folder.held()) == ("running", True)
    end(folder.path)
    folder.release()
    assert (sqlite_index.entries()[0].state, sqlite_index.entries()[0].steps) == ("finished", 7)


# A run of this process.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train two runs of the same model that differ in their learning rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAB_HOME", str(tmp_path_factory.mktemp("trained")))
        patch.setattr(session.registry, "runs", Recent(last=True))
        torch.manual_seed(0)
        data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(12)]
        found = []
        for lr in (0.1, 0.01):
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            run = ortlab.finetune(
                net,
                data,
                loss="cross_entropy",
                engine="eager",
                learning_rate=lr,
                eval_dataset=data[:2],
                eval_steps=4,
            )
            run.result(60)
            found.append(run)
        yield found


def test_a_run_writes_its_row_when_it_begins_and_when_it_ends(root: Path) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    seen: list[Any] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((rows_of_index(root), RunFolder(root / "run-1").held()))
        return nn.functional.cross_entropy(output, target)

    net = nn.Linear(4, 2)
    run = ortlab.finetune(net, data, loss=loss, engine="eager")
    run.result(60)
    assert run.wait_over(60)
    during, held = seen[0]
    assert during["run-1"][0] == "running"
    assert held
    after = rows_of_index(root)["run-1"]
    assert after == (
        "finished",
        "eager",
        pytest.approx(run.result().final_loss),
        size_of(run.folder),
    )
    assert not RunFolder(run.folder).held()


def test_a_run_that_goes_on_is_first_and_as_it_is_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(root, days=-1)  # newer by its own clock
    data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    net = nn.Linear(4, 2)
    chosen = {
        "loss": "cross_entropy",
        "engine": "eager",
        "num_train_epochs": 10**6,
        "eval_steps": 2,
    }
    run = ortlab.finetune(net, data, eval_dataset=data, **chosen)
    try:
        until(lambda: run.step > 4)
        run.pause()
        while run.state != "paused":
            assert not run.wait_over(0.01)
        history = ortlab.list_runs(sort="loss")
        assert names(history) == [run.name, "run-1"]
        assert history[0].state == "paused"
        best = run.so_far().best
        assert best is not None
        assert (history[0].held_out_loss, history[0].steps) == (best.loss, run.step)
        with monkeypatch.context() as patch:
            # Live tables query it several times a second: no metrics are read, no lock is tried.
            patch.delattr("ortlab.history.entry._last_steps")
            patch.delattr("ortlab.history.entry.RunFolder")
            (now,) = living_entries([run])
        assert (now.held_out_loss, now.steps, now.state) == (best.loss, run.step, "paused")
        assert now.peak_bytes == run.so_far().peak_bytes > 2**20
        assert names(ortlab.list_runs(state="running")) == [run.name]
        assert [own.name for own in history.own] == [run.name]
        pruning = ortlab.prune_runs(keep=0, yes=True)
        assert names(pruning) == ["run-1"]
        assert run.folder.is_dir()
        assert ortlab.open_run(run.name) is run
    finally:
        run.stop()
        assert run.wait_over(60)
    assert ortlab.list_runs()[0].state == "stopped"
    assert history[0].state == "paused"
    assert history.now()[0].state == "stopped"
    ortlab.prune_runs(keep=0, yes=True)
    assert names(ortlab.list_runs()) == []
    with pytest.raises(ValueError, match="was removed"):
        ortlab.compare_runs(run.name, kept(root).name)


def test_checkpoints_of_the_same_tick_are_from_oldest_to_newest(root: Path) -> None:
    folder = RunFolder(kept(root))
    names = ["best", "last-9", "last-10", "final"]
    for name in reversed(names):
        path = folder.checkpoint_path(name)
        path.write_bytes(b"")
        os.utime(path, (1e9, 1e9))
    os.utime(folder.checkpoint_path("best"), (1e9 + 1, 1e9 + 1))
    assert [each.name for each in SavedRun(folder.path).checkpoints] == [*names[1:], "best"]


def test_a_run_opened_again_is_the_run(trained: Any) -> None:
    live, past = trained[0], SavedRun(trained[0].folder)
    assert (past.name, past.state, past.error) == (live.name, "finished", None)
    assert past.settings == live.settings
    assert past.began_with == live.began_with == live.settings.as_dict()
    assert past.environment["packages"]["torch"] == torch.__version__
    assert str(past.result()) == str(live.result())
    assert past.result().as_dict().keys() == live.result().as_dict().keys()
    assert past.title == live.title
    # Metrics are stored with nine digits.
    assert past.recorder.rows() == pytest.approx(live.recorder.rows(), rel=1e-8, nan_ok=True)
    assert [e.kind for e in past.recorder.events()] == [e.kind for e in live.recorder.events()]
    assert past.recorder.total("samples") == live.recorder.total("samples") == 48
    assert [c.name for c in past.checkpoints] == ["final"]
    assert repr(past.checkpoints) == repr(live.checkpoints)
    assert past.checkpoints[0].size_bytes == live.checkpoint().stat().st_size
    again = charts.text(past).splitlines()
    assert again[1:] == [
        line.partition(" (before")[0] for line in charts.text(live).splitlines()[1:]
    ]
    assert charts.picture(past).startswith(b"\x89PNG")
    best = min(e.values["loss"] for e in live.recorder.events("eval")[1:])
    assert past.entry.held_out_loss == best == live.result().best.loss


def test_what_is_shown_of_a_past_run_leaves_its_folder_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(root)
    before = stamp(path)
    monkeypatch.setattr(charts, "get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    shown: list[Any] = []
    monkeypatch.setattr(charts, "publish", lambda *given, **_: shown.append(given))
    assert charts.follow(SavedRun(path)) is None
    ((data, _, _),) = shown
    assert data["image/png"].startswith(b"\x89PNG")
    assert "run-1" in data["text/plain"]
    assert stamp(path) == before


def test_notes_and_tags_stay_with_a_run(root: Path) -> None:
    path = kept(root)
    one, two = SavedRun(path), SavedRun(path)
    one.note("first\nof two lines")
    two.note("last <b>word</b>")
    one.tag("paper", "x/y")
    two.untag("x/y", "never")
    assert [note.text for note in one.notes] == ["first\nof two lines", "last <b>word</b>"]
    assert one.tags == ("paper",)
    with (path / "notes.jsonl").open("ab") as file:
        file.write(b'{"note": "torn')
    one.note("after a crash")
    assert [note.text for note in two.notes][-1] == "after a crash"
    assert len(two.notes) == 3
    assert stat.S_IMODE((path / "notes.jsonl").stat().st_mode) == 0o600
    kept(root)
    assert names(ortlab.list_runs(tag="paper")) == ["run-1"]
    assert "#paper after a crash" in repr(ortlab.list_runs())
    for wrong in ("two words", "", "a" * 41):
        with pytest.raises(ValueError, match="is not a tag"):
            one.tag(wrong)
    with pytest.raises(ValueError, match="is empty; write some text"):
        one.note(" ")


def test_a_run_is_found_by_name_or_number(root: Path) -> None:
    with pytest.raises(ValueError, match="there is no run in"):
        ortlab.open_run(1)
    kept(root)
    kept(root, "bert")
    assert [find(name).name for name in ("run-1", 1, "1", "bert")] == ["run-1"] * 3 + ["bert"]
    assert ortlab.open_run(1).name == "run-1"
    with pytest.raises(ValueError, match=r"'run-2': choose from .*did you mean 'run-1'\?"):
        ortlab.open_run(2)
    for _ in range(10):
        kept(root)
    with pytest.raises(ValueError, match=r"'bret': the newest are run-4, .*did you mean 'bert'\?"):
        ortlab.open_run("bret")
    with pytest.raises(ValueError, match="is not the folder of a run"):
        SavedRun(root)


# The table.


def test_runs_are_chosen_and_sorted(root: Path) -> None:
    kept(root, loss=0.5, days=3, model="Bert", engine="ortmodule", used="eager")
    kept(root, loss=0.25, days=1, engine="eager")
    kept(root, loss=math.nan, days=2, state="failed", error="it <broke>\nat once", engine="compile")
    assert names(ortlab.list_runs()) == ["run-2", "run-3", "run-1"]
    assert names(ortlab.list_runs(reverse=True)) == ["run-1", "run-3", "run-2"]
    assert names(ortlab.list_runs(sort="loss")) == ["run-2", "run-1", "run-3"]
    assert names(ortlab.list_runs(sort="loss", reverse=True)) == ["run-1", "run-2", "run-3"]
    assert names(ortlab.list_runs(sort="name", limit=2)) == ["run-1", "run-2"]
    assert names(ortlab.list_runs(engine="ortmodule")) == ["run-1"]
    assert names(ortlab.list_runs(engine="eager")) == ["run-2", "run-1"]
    assert names(ortlab.list_runs(state="failed")) == ["run-3"]
    assert names(ortlab.list_runs(model="bert")) == ["run-1"]
    told = repr(ortlab.list_runs())
    assert "ortmodule → eager" in told
    assert "it <broke>" in told
    assert "at once" not in told
    page = ortlab.list_runs()._repr_html_()
    assert "it &lt;broke&gt;" in page
    assert "<broke>" not in page
    assert repr(ortlab.list_runs(engine="ort_fused")) == "no run has engine 'ort_fused'"
    assert "1 of 3 runs" in repr(ortlab.list_runs(limit=1))
    with pytest.raises(ValueError, match="did you mean 'loss'"):
        ortlab.list_runs(sort="los")


def test_a_loss_that_is_nan_is_told_from_an_unknown_one(root: Path) -> None:
    data = [(torch.ones(2, 4), torch.zeros(2).long()) for _ in range(3)]
    for broken in (None, 2, 0):
        given = [(x * math.nan, y) if at == broken else (x, y) for at, (x, y) in enumerate(data)]
        run = ortlab.finetune(nn.Linear(4, 2), given, loss="cross_entropy", engine="eager")
        run.wait_over(HANGS_S)
    assert str(run.so_far()).startswith("failed after 0 steps in ")
    assert "; loss nan" in str(run.so_far())
    kept(root, loss=math.nan)
    for found in (ortlab.list_runs(sort="loss"), ortlab.list_runs(sort="loss", reverse=True)):
        assert names(found) == ["run-1", "run-4", "run-3", "run-2"], "unknown and nan come last"
        rows = [line.split()[6] for line in repr(found).splitlines()[2:6]]
        assert rows[1:] == ["-", "nan", "nan"]
        view = HistoryView(found)
        assert [row["keys"][7] for row in view.rows][1:] == [None, None, None]
        assert [row["cells"][7] for row in view.rows] == rows
        view.close()


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_stored_result_has_a_loss_that_was_not_finite(trained: Any, loss: float) -> None:
    result = dataclasses.replace(trained[0].result(), final_loss=loss, not_finite=str(loss))
    stored = RunResult.of(result.as_dict() | {"final_loss": None})
    assert str(stored) == str(result)


def test_learning_rates_are_those_of_the_end_and_of_a_loop_s_optimizer(root: Path) -> None:
    kept(root, learning_rate=3e-5)
    kept(root, learning_rate=0.002, state="running")
    net = nn.Linear(4, 2)
    data = [(torch.ones(2, 4), torch.zeros(2).long()) for _ in range(3)]
    run = ortlab.finetune(net, data, loss="cross_entropy", engine="eager", num_train_epochs=10**6)
    run.apply(learning_rate=0.5).result(HANGS_S)
    assert ortlab.list_runs()[0].learning_rate == 0.5
    run.stop()
    run.result(HANGS_S)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with ortlab.track(net):
        for lr in (0.01, 0.1, 0.0):
            optimizer.param_groups[0]["lr"] = lr
            net(data[0][0]).sum().backward()
            optimizer.step()
    with ortlab.track(net):
        pass
    found = ortlab.list_runs(sort="lr")
    assert names(found) == ["run-1", "run-2", "run-4", "run-3", "run-5"]
    rows = repr(found).splitlines()
    assert [line.split()[4] for line in rows[2:7]] == ["3e-05", "0.002", "0.1", "0.5", "-"]
    assert len(rows[0]) < 100


def test_a_name_that_is_taken_gets_a_number_and_the_run_says_so(root: Path) -> None:
    net, told = nn.Linear(4, 2), "the run is called {}, because there is a run lr-0.01 already"
    data = [(torch.ones(2, 4), torch.zeros(2).long())]
    for name in ("lr-0.01", "lr-0.01-2"):
        run = ortlab.finetune(net, data, loss="cross_entropy", engine="eager", name="lr-0.01")
        run.result(HANGS_S)
        assert run.name == name
        assert (told.format(name) in run.status().lines) == (name != "lr-0.01")
    with ortlab.track(net, name="lr-0.01") as loop:
        pass
    assert told.format("lr-0.01-3") in loop.status().lines


def test_a_page_has_so_many_runs_as_fit(root: Path) -> None:
    for _ in range(52):
        kept(root, count=1)
    history = ortlab.list_runs()
    assert len(history) == 52
    assert history[51].name == "run-1"
    assert len(repr(history).splitlines()) == 50 + 3
    assert "50 of 52 runs; limit=N (--limit N) shows more" in repr(history)
    assert "run-1 " not in repr(history)
    assert len(repr(ortlab.list_runs(limit=52)).splitlines()) == 52 + 3


def test_a_listing_has_the_columns_that_fit_and_all_on_request(root: Path) -> None:
    for _ in range(2):
        kept(root)
    plain, wide = (repr(ortlab.list_runs(**more)) for more in ({}, {"wide": True}))
    extra = ("precision", "samples/s", "peak memory", "took", "on disk")
    assert not [head for head in extra if head in plain.splitlines()[0]]
    assert [head for head in extra if head in wide.splitlines()[0]] == list(extra)
    assert "wide=True (--wide) adds precision, samples/s, peak memory, took, on disk" in plain
    assert "--wide" not in wide
    by_memory = repr(ortlab.list_runs(sort="memory"))
    assert "peak memory" in by_memory.splitlines()[0]
    assert "wide=True (--wide) adds precision, samples/s, took, on disk" in by_memory
    assert "0.5 (75.0%)" in plain
    assert "evaluation (best)" in plain.splitlines()[0]


def test_evaluations_have_one_name_everywhere(trained: Any) -> None:
    live, past = trained[0], SavedRun(trained[0].folder)
    last = live.evaluations[-1]
    for run in (live, past):
        (line,) = [line for line in run.status().lines if line.startswith("evaluation")]
        assert line.startswith(f"evaluation (last, step {last.step}): {last}")
    assert f"evaluation (last): {last}" in str(live.result())
    best = dataclasses.replace(last, step=1_000, loss=0.1)
    told = str(dataclasses.replace(live.result(), best=best))
    assert f"; evaluation (best, step 1,000): {best}" in told
    told = str(dataclasses.replace(live.result(), best=last))
    assert "evaluation (best" not in told, "that is the last one"
    listed = ortlab.list_runs(sort="evaluation")
    assert listed.settings == ortlab.list_runs(sort="held-out").settings, "its former name"
    told = [repr(listed), repr(ortlab.compare_runs(*trained)), str(live.result())]
    told += [*live.status().lines, *past.status().lines]
    assert not [each for each in told if "held out" in each or "held-out" in each]


# Comparisons.


def test_a_comparison_tells_what_differs_and_nothing_else(trained: Any) -> None:
    comparison = RunComparison([trained[0], SavedRun(trained[1].folder)])
    found = {(each.part, each.name): each.values for each in comparison.differences}
    assert found["settings", "learning_rate"] == ("0.1", "0.01")
    assert [name for part, name in found if part == "settings"] == ["learning_rate"]
    assert [name for part, name in found if part == "versions"] == []
    assert found["result", "steps"] == ("12", "12")
    assert found["result", "loss"][0] == f"{trained[0].result().final_loss:.4g}"
    assert "versions: the same" in repr(comparison)
    assert comparison.labels == tuple(
        f"{run.name} · lr {lr}" for run, lr in zip(trained, (0.1, 0.01), strict=True)
    )
    text = curves.text(comparison)
    assert text.count(comparison.labels[0]) >= 4
    best = trained[0].result().best
    other = trained[1].result().best
    losses, hits = (found["result", f"evaluation {each} (best)"] for each in ("loss", "accuracy"))
    assert [each.removesuffix(" *") for each in losses] == [
        f"{each.loss:.4g}" for each in (best, other)
    ]
    assert [" *" in each for each in losses] == [
        best.loss <= other.loss,
        other.loss <= best.loss,
    ]
    assert hits[0].removesuffix(" *") == f"{best.accuracy:.4g}"
    assert [" *" in each for each in hits] == [
        best.accuracy >= other.accuracy,
        other.accuracy >= best.accuracy,
    ]
    assert "* best of these runs" in repr(comparison)
    assert "Throughput" in text
    data, _ = comparison_view.bundle(comparison)
    assert 'src="data:image/png;base64,' in data["text/html"]
    assert data["text/plain"] == text


def test_names_of_folders_are_text_in_a_comparison(root: Path) -> None:
    for name in ('"><b onload="x', "$\\no$"):
        path = kept(root, loss=len(name))
        settings = RunFolder(path).read_json("settings")
        RunFolder(path).write_json("settings", settings | {"loss": f"<i>{name}"})
        RunFolder(path).write_json("run", RunFolder(path).read_json("run") | {"name": name})
        path.rename(root / name)
    data, _ = comparison_view.bundle(ortlab.compare_runs('"><b onload="x', "$\\no$"))
    assert "<b " not in data["text/html"]
    assert "<i>" not in data["text/html"]
    assert 'alt="Curves of &quot;&gt;&lt;b onload=&quot;x · loss &lt;i&gt;' in data["text/html"]


def test_a_label_has_the_settings_that_differ_the_common_ones_first(root: Path) -> None:
    kept(root, "same")
    kept(root, "other", seed=3, weight_decay=0.5, learning_rate=1e-3)
    comparison = ortlab.compare_runs("same", "other")
    assert comparison.labels[1].startswith("other · lr 0.001 · ")
    assert comparison.labels[1].endswith(" · …")
    kept(root, "again")
    assert ortlab.compare_runs("same", "again").labels == ("same", "again")
    path = kept(root, "control")
    settings = RunFolder(path).read_json("settings")
    RunFolder(path).write_json("settings", settings | {"loss": "a\x1b[31m" + 99 * "b"})
    label = ortlab.compare_runs("same", "control").labels[1]
    assert label.startswith("control · loss a\\x1b[31mbbb")
    assert len(label) < 50


def evaluated(path: Path, *values: dict[str, float]) -> None:
    """Give a run these evaluations instead of its own."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    events = [
        {"event": "eval", "step": 5 * i, "time_s": 0.1, "text": "", "values": each}
        for i, each in enumerate(values)
    ]
    steps_alone = [line for line in lines if '"eval"' not in line]
    (path / "metrics.jsonl").write_text("\n".join([*steps_alone, *map(json.dumps, events)]) + "\n")


def test_a_comparison_has_a_chart_for_each_metric_that_runs_share(root: Path) -> None:
    evaluated(kept(root), {"loss": 2.0, "f1 <$\\no$>": 0.1}, {"loss": 1.0, "f1 <$\\no$>": 0.5})
    evaluated(kept(root, lr=0.5), {"loss": 2.0, "f1 <$\\no$>": 0.2, "own": 1.0})
    kept(root, lr=0.25, count=1)
    comparison = ortlab.compare_runs(1, 2, 3)
    shown = curves.charts(comparison)
    titles = [chart.title for chart in shown]
    assert titles[:3] == ["Training loss", "Evaluation loss", "Evaluation f1 <$\\no$>"]
    assert "Evaluation own" not in titles, "only one run has it"
    assert "Evaluation f1 <$\\no$>" in curves.text(comparison)
    at, values = curves.curve(comparison.runs[0].recorder, shown[2])
    assert (at.tolist(), values.tolist()) == ([0, 5], [0.1, 0.5])
    figure = comparison_view.figure(comparison, shown)
    looks = [[(e.get_color(), e.get_linestyle()) for e in a.get_lines()] for a in figure.axes]
    patterns = [[e._dash_pattern for e in a.get_lines()] for a in figure.axes]  # type: ignore[attr-defined]
    assert len(looks) == len(shown)
    assert all(each == looks[0] for each in looks)
    assert all(each == patterns[0] for each in patterns)
    assert len(set(map(str, patterns[0]))) == len({color for color, _ in looks[0]}) == 3
    assert [color for color, _ in looks[0]] == list(COLORS[:3])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(comparison.labels)
    handles = legend.legend_handles
    assert [each.get_color() for each in handles] == list(COLORS[:3])
    assert [each._dash_pattern[1] is None for each in handles] == [True, False, False]
    data, _ = comparison_view.bundle(comparison)  # its title is no formula
    assert "<img" in data["text/html"]


def test_a_comparison_has_no_empty_chart(root: Path) -> None:
    for _ in range(2):
        evaluated(kept(root, count=0))
    comparison = ortlab.compare_runs(1, 2)
    assert curves.charts(comparison) == []
    data, _ = comparison_view.bundle(comparison)
    assert "<img" not in data["text/html"]
    evaluated(kept(root, count=0), {"loss": 2.0})
    assert [c.title for c in curves.charts(ortlab.compare_runs(1, 3))] == ["Evaluation loss"]


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "{"])
def test_a_damaged_environment_is_named_in_a_comparison(root: Path, text: str) -> None:
    first, second = kept(root), kept(root)
    (second / "environment.json").write_text(text)
    with pytest.raises(ValueError, match=r"run-2/environment\.json is damaged: "):
        RunComparison([SavedRun(first), SavedRun(second)])


def test_versions_and_changes_in_the_run_differ_too(root: Path) -> None:
    first, second = kept(root), kept(root, lr=0.5)
    about = RunFolder(second).read_json("environment")
    about["packages"]["torch"] = "1.0 <b>"
    RunFolder(second).write_json("environment", about)
    with (second / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"event": "change", "step": 4, "time_s": 1, "text": "lr 0.5 -> 0.1", '
            b'"values": {"cost_s": 0.0}}\n'
        )
    comparison = ortlab.compare_runs(first.name, 2)
    found = {(each.part, each.name): each.values for each in comparison.differences}
    assert found["versions", "packages.torch"] == ("2.13.0", "1.0 <b>")
    assert found["settings", "changed during the run"] == ("-", "step 4: lr 0.5 -> 0.1")
    assert "1.0 &lt;b&gt;" in comparison._repr_html_()
    assert "1.0 <b>" not in comparison._repr_html_()


def test_a_comparison_is_of_two_to_eight_different_runs(root: Path) -> None:
    for _ in range(9):
        kept(root, count=2)
    with pytest.raises(ValueError, match="1 run cannot be compared; choose 2 to 8"):
        ortlab.compare_runs(1)
    with pytest.raises(ValueError, match="9 runs cannot be compared; choose 2 to 8"):
        ortlab.compare_runs(*range(1, 10))
    with pytest.raises(ValueError, match="a run is given twice"):
        ortlab.compare_runs(1, "run-1")
    with pytest.raises(ValueError, match="no run is called 'run-77'"):
        ortlab.compare_runs(1, 77)
    data, _ = comparison_view.bundle(ortlab.compare_runs(*range(1, 9)))
    assert "data:image/png;base64,iVBORw0KGgo" in data["text/html"]


def test_a_curve_of_a_comparison_is_the_run_s(root: Path) -> None:
    run = SavedRun(kept(root, count=40))
    in_time = curves.Chart("", "time (s)", "loss")
    at, losses = curves.curve(run.recorder, curves.LOSS)
    assert at.tolist() == list(range(1, 41))
    assert losses == pytest.approx(np.linspace(2, 1, 40))
    times, same = curves.curve(run.recorder, in_time)
    assert np.array_equal(same, losses)
    assert times[-1] == pytest.approx(0.2)
    assert set(curves.curve(run.recorder, curves.Chart("", "step", "memory"))[1]) == {1024.0}


# Other tools.


def test_a_frame_has_every_step_and_no_empty_column(root: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = SavedRun(kept(root, count=5)).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.tolist() == [1, 2, 3, 4, 5]
    assert frame.index.name == "step"
    assert frame["loss"].tolist() == pytest.approx([2, 1.75, 1.5, 1.25, 1])
    assert list(frame.columns) == [
        c.name for c in COLUMNS if c.name != "step" and not np.isnan(steps(1)[0, INDEX[c.name]])
    ]


def test_tensorboard_reads_every_step_back(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = SavedRun(kept(root, count=300))
    path = run.to_tensorboard(tmp_path / "board")
    assert path == tmp_path / "board" / "run-1"
    read = EventAccumulator(str(path), size_guidance={"scalars": 0})
    read.Reload()
    points = read.Scalars("loss/train")
    assert [point.step for point in points] == list(range(1, 301))
    losses = np.array([point.value for point in points])
    assert np.array_equal(losses, run.metrics.rows[:, INDEX["loss"]].astype(np.float32))
    assert points[99].wall_time - points[0].wall_time == pytest.approx(0.495, abs=1e-6)
    (evaluation,) = read.Scalars("loss/evaluation")
    assert (evaluation.step, evaluation.value) == (300, 0.5)
    assert {"throughput/samples_per_s", "memory/rss_bytes"} <= set(read.Tags()["scalars"])
    (text,) = read.Tensors("settings")
    assert b"| learning_rate | " in text.tensor_proto.string_val[0]
    with pytest.raises(ValueError, match="already exists"):
        run.to_tensorboard(tmp_path / "board")


def test_mlflow_reads_the_run_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store that needs no server
    run = SavedRun(kept(root, count=30, lr=0.125))
    run.note("a note")
    run.tag("paper")
    place = f"file://{tmp_path / 'mlruns'}"
    made = run.to_mlflow("mine", tracking_uri=place)
    client = mlflow.MlflowClient(tracking_uri=place)
    found = client.get_run(made)
    assert (found.info.run_name, found.info.status) == ("run-1", "FINISHED")
    assert found.data.params["settings.learning_rate"] == "0.125"
    assert found.data.params["environment.packages.torch"] == "2.13.0"
    assert found.data.tags["mlflow.note.content"] == "a note"
    assert found.data.tags["ortlab.paper"] == "yes"
    history = client.get_metric_history(made, "loss")
    assert [metric.step for metric in history] == list(range(1, 31))
    assert [metric.value for metric in history] == pytest.approx(np.linspace(2, 1, 30).tolist())
    assert found.data.metrics["evaluation_accuracy"] == 0.75
    assert client.get_experiment(found.info.experiment_id).name == "mine"
    assert run.to_mlflow("mine", tracking_uri=place) != made


def test_a_package_that_is_missing_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SavedRun(kept(root))
    for module in ("pandas", "tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match="pip install pandas"):
        run.to_frame()
    with pytest.raises(RuntimeError, match="pip install tensorboard"):
        run.to_tensorboard(root.parent / "board")
    with pytest.raises(RuntimeError, match="pip install mlflow-skinny"):
        run.to_mlflow()
    assert not (root.parent / "board").exists()


# Pruning.


def pruned(**settings: Any) -> Any:
    return prune(PruneSettings.of(settings), HistorySettings())


@pytest.mark.parametrize(
    ("limits", "going"),
    [
        ({"older_than": "30d"}, ["run-2", "run-1"]),
        ({"older_than": "6w"}, ["run-1"]),
        ({"older_than": "1h"}, ["run-3", "run-2", "run-1"]),
        ({"keep": 1}, ["run-3", "run-2", "run-1"]),
        ({"keep": 4}, []),
        ({"keep": 3, "older_than": "30d"}, ["run-2", "run-1"]),
        ({"max_size": "10GB"}, []),
        ({"max_size": "12kB"}, ["run-1"]),
    ],
)
def test_runs_go_by_age_number_or_size(root: Path, limits: Any, going: list[str]) -> None:
    for days in (90, 40, 10, 0):
        (kept(root, days=days, count=1) / "checkpoints" / "blob").write_bytes(bytes(1000))
    if limits.get("max_size") == "12kB":
        each = [entry.size_bytes for entry in sqlite_index.entries()]
        limits = {"max_size": f"{sum(each[1:])}"}
    assert names(pruned(**limits)) == going
    assert len(sqlite_index.entries()) == 4, "nothing goes unless it is said"
    removed = pruned(**limits, yes=True)
    assert names(removed) == going
    assert names(sqlite_index.entries()) == [
        f"run-{n}" for n in (1, 2, 3, 4) if f"run-{n}" not in going
    ]
    assert sorted(rows_of_index(root)) == names(sqlite_index.entries())
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_what_must_stay_stays(root: Path, tmp_path: Path) -> None:
    """Runs of living processes, folders that are no runs, links, and link targets are kept."""
    held = RunFolder(kept(root, state="running", days=99))
    held.hold()
    old = kept(root, days=99)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    (precious / "large").write_bytes(bytes(10**6))
    (old / "checkpoints" / "link").symlink_to(precious, target_is_directory=True)
    elsewhere = kept(tmp_path / "elsewhere", "linked", days=99)
    (root / "linked").symlink_to(elsewhere, target_is_directory=True)
    (root / "mine").mkdir()
    (root / "mine" / "file").write_text("mine")
    assert names(pruned(keep=0)) == ["run-2"], "what goes on would not go"
    removed = pruned(older_than="1d", keep=0, max_size="1B", yes=True)
    assert removed.left == ()
    assert names(removed) == ["run-2"]
    assert (precious / "file").read_text() == "mine"
    assert removed[0].size_bytes < 10**5, "what a link points to is counted"
    assert elsewhere.is_dir()
    assert (root / "linked").is_symlink()
    assert (root / "mine" / "file").exists()
    assert held.path.is_dir()
    held.release()
    assert names(pruned(keep=0, yes=True)) == ["run-1"]  # now, it counts as interrupted


def test_pruning_asks_and_refuses(root: Path) -> None:
    kept(root)
    kept(root, state="failed")
    assert "removed permanently; confirm with --yes or yes=True" in repr(ortlab.prune_runs(keep=0))
    with pytest.raises(ValueError, match="no limit for removing runs is set"):
        ortlab.prune_runs(yes=True)
    with pytest.raises(
        ValueError, match=r"older_than='30' is not an age; use a number of hours, days or weeks"
    ):
        ortlab.prune_runs(older_than="30", yes=True)
    with pytest.raises(ValueError, match="not a memory size"):
        ortlab.prune_runs(max_size="much", yes=True)
    with pytest.raises(ValueError, match="keep=-1"):
        ortlab.prune_runs(keep=-1, yes=True)
    assert len(ortlab.list_runs()) == 2
    assert names(ortlab.prune_runs(keep=0, state="failed", yes=True)) == ["run-2"]
    assert names(ortlab.list_runs()) == ["run-1"]


def test_a_run_that_comes_to_life_meanwhile_stays(root: Path) -> None:
    """A run that starts between the listing and the removal is kept."""
    folder = RunFolder(kept(root))
    entries: list[RunEntry] = sqlite_index.entries()
    folder.hold()
    from ortlab.history.prune import remove

    with pytest.raises(OSError, match="a process is using it"):
        remove(entries[0].folder)
    assert folder.path.is_dir()
    folder.release()
