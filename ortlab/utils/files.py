"""Folders that are the user's alone, and plain files in those that may be anybody's."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 2**24
"""Of a file that is read whole: what ortlab writes is far smaller."""
_ITSELF: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows


def private(path: Path) -> Path:
    """Makes the folder, and those above it that are not there, with mode 0700; OSError.

    `Path.mkdir` has a mode for the last one alone.
    """
    if not path.is_dir():
        private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def plain(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a plain file, made with mode 0600; `open` takes this as its opener.

    OSError for anything else: links lead anywhere, pipes wait for ever, devices have no end.
    """
    try:
        descriptor = os.open(path, flags | _ITSELF, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return descriptor


def read(path: Path) -> bytes:
    """All of a plain file; OSError where it is none, or has more than `MOST_BYTES`."""
    with open(path, "rb", opener=plain) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise OSError(errno.EFBIG, "larger than what ortlab writes", str(path))
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a plain file; OSError as `read`, ValueError where it holds none."""
    try:
        found = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def write_private(path: Path, data: bytes) -> None:
    """Makes `data` the whole of a file of mode 0600, at once: a crash leaves the old or the new."""

    def write(beside: Path) -> None:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)

    write_beside(path, write)


_BESIDE = re.compile(r"\..+\.\d+\.\d+(\.before)?")


def _beside(path: Path) -> Path:
    """Where what is to be at `path` is made: a name of this thread alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


def half_written(path: Path) -> bool:
    """Whether `write_beside` or `folder_beside` gave `path` its name, for what is not whole yet."""
    return _BESIDE.fullmatch(path.name) is not None


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file beside `path`, which then takes its place at once and for good."""
    beside = _beside(path)
    try:
        write(beside)
        beside.chmod(0o600)
        _sync(beside, os.O_RDWR)  # Windows syncs no descriptor that cannot write
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if os.name == "posix":  # Windows opens no folder
        _sync(path.parent, os.O_RDONLY)


@contextlib.contextmanager
def folder_beside(path: Path, *, mode: int = 0o700) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `path`, for good; or is gone.

    It is private unless its `mode` lets others in.
    """
    beside = _beside(path)
    before = beside.with_name(f"{beside.name}.before")
    beside.mkdir(mode=mode)
    try:
        yield beside
        if path.is_dir():
            path.rename(before)
        beside.rename(path)  # of a file it says that it is no folder
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if before.exists():
            before.rename(path)
    if os.name == "posix":  # Windows opens no folder
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
