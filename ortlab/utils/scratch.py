"""Private temporary folders that the user's next process removes if this one is killed.

Each has a lock that its process holds until it ends in any way. A folder gets its name only with
the lock, so that whoever can lock it knows that its process has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

import filelock

from ortlab.utils import files

_PREFIX: Final = "ortlab-scratch-"
_UNNAMED: Final = ".ortlab-scratch-"
_LOCK: Final = "owner.lock"
_LONG_S: Final = 3600.0
"""Age at which a folder without a name is left over: it gets one within milliseconds."""
_locks: dict[Path, filelock.BaseFileLock] = {}


def folder(kind: str, within: Path | None = None) -> Path:
    """Create a folder that only this user can read.

    Args:
        kind: Word for its name.
        within: Its parent; None for the system's folder for temporary files.

    Returns:
        The folder; `remove` removes it.
    """
    parent = Path(tempfile.gettempdir()) if within is None else within
    _clear_once(parent)
    unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED, dir=parent))
    lock = files.owners_lock(unnamed / _LOCK)
    lock.acquire()
    named = parent / f"{_PREFIX}{kind}-{unnamed.name.removeprefix(_UNNAMED)}"
    unnamed.rename(named)
    _locks[named] = lock
    return named


def remove(made: Path) -> None:
    """Remove a folder of this process; errors are ignored.

    Args:
        made: Result of `folder`.
    """
    shutil.rmtree(made, ignore_errors=True)
    if (lock := _locks.pop(made, None)) is not None:
        lock.release()


def clear(parent: Path) -> None:
    """Remove the folders of processes that have ended. Those of other users stay.

    Args:
        parent: Folder to search.
    """
    for found in [*parent.glob(f"{_PREFIX}*"), *parent.glob(f"{_UNNAMED}*")]:
        with contextlib.suppress(OSError):  # another process removes it, too
            about = found.lstat()
            if hasattr(os, "getuid") and about.st_uid != os.getuid():  # not on Windows
                continue
            if found.name.startswith(_UNNAMED):
                if time.time() - about.st_mtime > _LONG_S:
                    shutil.rmtree(found, ignore_errors=True)
            elif (found / _LOCK).exists() and found not in _locks:
                with files.owners_lock(found / _LOCK):  # raises while its process lives
                    shutil.rmtree(found, ignore_errors=True)  # refuses a link


@functools.cache
def _clear_once(parent: Path) -> None:
    clear(parent)
