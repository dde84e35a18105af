"""Whatever ortlab writes by itself is for the user alone, whatever the umask is."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlab.cluster import launch
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import extensions
from ortlab.utils.files import private
from tests.support.waiting import HANGS_S

ENGINE = "eager" if compat.unavailable() else "ortmodule"
# Workers stay until the end, so that their files are seen.
WORK = f"""
import os, sys
os.umask(0)
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import ortlab
from tests.support.worker_runs import CHOSEN, Network, data

for chosen in ({{"engine": {ENGINE!r}}}, {{"workers": 2, "zero_stage": 1}}):
    run = ortlab.finetune(Network(), data(), **CHOSEN | chosen | dict(max_steps=8, save_steps=3))
    run.result()
    run.checkpoint()
    run.note("a note")
    run.tag("a-tag")
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Return the variables that name the folders in which ortlab may write."""
    names = ("HOME", "ORTLAB_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR")
    for name in names:
        if name != "ORTLAB_HOME":  # which ortlab makes
            (tmp_path / name).mkdir()
    # Compiling them again would take a minute.
    copies = tmp_path / "XDG_CACHE_HOME" / "ortlab" / "extensions"
    private(copies)
    for built in extensions.cache_folder().glob("*.so"):
        shutil.copy(built, copies)
    return {name: str(tmp_path / name) for name in names}


def open_to_others(folder: Path) -> Iterator[Path]:
    for place in folder.rglob("*"):
        mode = stat.S_IMODE(place.lstat().st_mode)
        if mode & ~(0o700 if place.is_dir() else 0o600):
            yield place.relative_to(folder)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_only_the_user_can_read_what_is_written(places: dict[str, str], tmp_path: Path) -> None:
    launch.installed()
    with subprocess.Popen(
        [sys.executable, "-c", WORK],
        env=os.environ | places,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "done\n":
            assert line, "the program has ended"
        stored = tmp_path / "ORTLAB_HOME"
        written = {path.name for path in stored.rglob("*")}
        assert {"metrics.jsonl", "index.sqlite", "final.safetensors", "notes.jsonl"} <= written
        assert stat.S_IMODE(stored.stat().st_mode) == 0o700
        assert list(open_to_others(stored)) == []
        assert list(open_to_others(tmp_path / "XDG_CACHE_HOME" / "ortlab")) == []
        scratch = [*(tmp_path / "TMPDIR").glob("ortlab-*")]
        assert any("workers" in folder.name for folder in scratch)
        for folder in scratch:  # those inside it ipyparallel writes
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            for place in folder.glob("*.*"):
                assert stat.S_IMODE(place.stat().st_mode) == 0o600, place
        process.communicate("\n", timeout=HANGS_S)
