"""Private folders, safe access to regular files, and atomic writes."""

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
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import filelock

MOST_BYTES: Final = 2**24
"""Size limit of a file that is read whole; the files that ortlab writes are far smaller."""
_ITSELF: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows


def private(path: Path) -> Path:
    """Create a folder and its missing parents, all with mode 0700.

    `Path.mkdir` applies its mode to the last folder only.

    Args:
        path: The folder; an existing one is not changed.

    Returns:
        `path`.

    Raises:
        OSError: A folder cannot be created.
    """
    if not path.is_dir():
        private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def others_write(folder: Path) -> bool:
    """Return True if other users can write to a folder; on Windows its mode does not say that.

    Args:
        folder: The folder.

    Raises:
        OSError: There is no such folder.
    """
    status = folder.stat()
    return hasattr(os, "getuid") and (status.st_uid != os.getuid() or bool(status.st_mode & 0o022))


def file_prefix(path: str, setting: str) -> tuple[str, str]:
    """Return the folder and the common beginning of the names of files that are to be written.

    Args:
        path: Path whose last part is that beginning.
        setting: Name of the setting that has this value, for the error.

    Raises:
        ValueError: If `path` names a folder only, or the folder is not writable.
    """
    folder, prefix = os.path.split(os.path.abspath(os.path.expanduser(path)))
    if path.endswith(os.sep) or not prefix:
        raise ValueError(f"{setting}={path!r} is a folder; add a prefix for the file names")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"{setting}={path!r}: {folder} is not a writable folder")
    return folder, prefix


def plain(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; `open` accepts this as its opener.

    Anything else is refused: a link may lead anywhere, a pipe may block forever, and a device may
    have no end.

    Args:
        path: The file; if `flags` create it, it gets mode 0600.
        flags: Flags of `os.open`.

    Returns:
        The file descriptor.

    Raises:
        OSError: The file cannot be opened, or is a link or not a regular file.
    """
    try:
        descriptor = os.open(path, flags | _ITSELF, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "symbolic links are not followed", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read(path: Path) -> bytes:
    """Read a whole regular file.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `MOST_BYTES`.
    """
    with open(path, "rb", opener=plain) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise OSError(errno.EFBIG, "larger than any file that ortlab writes", str(path))
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a regular file.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        OSError: The file cannot be read; see `read`.
        ValueError: The file does not contain a JSON object.
    """
    try:
        found = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it does not contain a JSON object")
    return found


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 atomically: after a crash it has the old or the new content.

    Args:
        path: The file; an existing one is replaced.
        data: Its new content.
    """

    def write(beside: Path) -> None:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)

    write_beside(path, write)


def owners_lock(path: Path) -> filelock.BaseFileLock:
    """Return a lock that the system releases when the process that has it ends in any way.

    Args:
        path: File of the lock, which is created with mode 0600 when the lock is acquired.

    Returns:
        The lock; to acquire it raises `filelock.Timeout` at once while another one has it.
    """
    import filelock  # optional: `doctor.checks` must run without any package

    return filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False)


_BESIDE = re.compile(r"\..+\.\d+\.\d+(\.before)?")


def _beside(path: Path) -> Path:
    """Return a temporary name beside `path` that only this thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


def half_written(path: Path) -> bool:
    """Return True if `path` is a temporary name of `write_beside` or `folder_beside`.

    Args:
        path: A file or folder, which is incomplete if this is true.
    """
    return _BESIDE.fullmatch(path.name) is not None


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside `path`, sync it to disk, and atomically move it to `path`.

    Args:
        path: The file to replace.
        write: Called with the path of the temporary file, which it writes.
    """
    beside = _beside(path)
    try:
        write(beside)
        beside.chmod(0o600)
        _sync(beside, os.O_RDWR)  # Windows can only sync a writable descriptor
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if os.name == "posix":  # Windows cannot open a folder
        _sync(path.parent, os.O_RDONLY)


@contextlib.contextmanager
def folder_beside(path: Path, *, mode: int = 0o700) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` at the end of the block.

    If the block raises, the temporary folder is removed and `path` stays.

    Args:
        path: The folder to replace.
        mode: Mode of the new folder; the default makes it private.

    Yields:
        The temporary folder beside `path`.
    """
    beside = _beside(path)
    before = beside.with_name(f"{beside.name}.before")
    beside.mkdir(mode=mode)
    try:
        yield beside
        if path.is_dir():
            path.rename(before)
        beside.rename(path)  # raises NotADirectoryError where `path` is a file
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if before.exists():
            before.rename(path)
    if os.name == "posix":  # Windows cannot open a folder
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
