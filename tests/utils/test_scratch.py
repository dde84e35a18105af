"""Temporary folders of processes that were killed are removed, and no others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ortlab.utils import scratch

HOLDS = """
import sys, time
from pathlib import Path
from ortlab.utils import scratch
print(scratch.folder("test", Path(sys.argv[1])), flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has made a folder, whose path it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def made_by(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_removed(tmp_path: Path) -> None:
    made = scratch.folder("test", tmp_path)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (made / "file").write_text("text")
    scratch.clear(tmp_path)
    assert (made / "file").exists(), "this process lives"
    scratch.remove(made)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing_for_good(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    made = made_by(holder)
    (made / "file").write_text("text")
    scratch.clear(tmp_path)
    assert made.exists(), "its process lives"
    holder.kill()
    holder.wait()
    own = scratch.folder("test", tmp_path)  # the first one of this process here clears
    assert list(tmp_path.iterdir()) == [own]
    scratch.remove(own)


def test_what_is_another_users_stays(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_by(holder)
    holder.kill()
    holder.wait()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: made.stat().st_uid + 1)
        scratch.clear(tmp_path)
    assert made.exists()
    scratch.clear(tmp_path)
    assert not made.exists()


def test_links_and_folders_of_others_stay(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "owner.lock").write_text("theirs")
    link = tmp_path / "ortlab-scratch-test-link"
    link.symlink_to(target)
    without_lock = tmp_path / "ortlab-scratch-test-copy"
    without_lock.mkdir()
    scratch.clear(tmp_path)
    assert (target / "owner.lock").read_text() == "theirs"
    assert link.is_symlink()
    assert without_lock.exists()


def test_a_process_that_was_killed_before_its_folder_had_a_name(tmp_path: Path) -> None:
    old, new = tmp_path / ".ortlab-scratch-old", tmp_path / ".ortlab-scratch-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    scratch.clear(tmp_path)
    assert not old.exists()
    assert new.exists()
