"""Folders that are the user's alone, and plain files in those that may be anybody's."""

from __future__ import annotations

import errno
import json
import os
import stat
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
