"""Exported graphs on disk, for the next kernel: a folder of the user's, one file for each graph.

A file is a zip archive, named by the fingerprint of all that its graphs depend on. It holds the
graphs as ONNX without weights, and the rest as JSON: nothing in it is run when it is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ortlab.engines.ortmodule.compat import extensions
from ortlab.utils import files as folders

MOST_BYTES = 512 * 1024**2
"""The largest size of all files; what was not used for longest goes first."""
_UNPACKED = MOST_BYTES  # of one file, at the most
_ABANDONED_S = 3600.0
_FACTS = "facts.json"
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)
"""What reading a damaged archive raises, by where the damage is."""


class Unusable(Exception):
    """A cache folder that is not used; the message says why and what to do."""


@dataclass(frozen=True)
class CachedGraph:
    """What one file holds: graphs by name, as ONNX bytes, and facts of JSON's types."""

    graphs: Mapping[str, bytes]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """How much there is: a number of graphs, and the size of their files in bytes."""

    folder: Path
    graphs: int
    size_bytes: int

    def __str__(self) -> str:
        plural = "" if self.graphs == 1 else "s"
        size = f"{self.size_bytes / 1024**2:.1f} MiB"
        return f"{self.graphs} exported graph{plural}, {size}, in {self.folder}"


def folder() -> Path:
    """The user's folder of exported graphs; honours XDG_CACHE_HOME. It need not exist yet."""
    return extensions.cache_folder().with_name("exports")


def load(name: str) -> CachedGraph | None:
    """The entry called `name`; None when there is none. A damaged file is removed.

    Unusable where others can write to the folder.
    """
    path = _path(name)
    if not path.exists():
        return None
    _refuse_shared(path.parent)
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > _UNPACKED:
                raise ValueError("it says that it unpacks to more than all files may take")
            parts = {part: archive.read(part) for part in archive.namelist()}
        facts = json.loads(parts.pop(_FACTS))
    except FileNotFoundError:  # another kernel has thrown it out since
        return None
    except _DAMAGE:
        remove(name)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return CachedGraph(parts, facts)


def store(name: str, entry: CachedGraph) -> None:
    """Keeps `entry`, in the place of one of that name; throws out what is too much.

    Unusable where others can write to the folder; OSError where it cannot be written.
    """
    path = _path(name)
    folders.private(path.parent)
    _refuse_shared(path.parent)
    with replacing(path) as file, _archive(file) as archive:
        archive.writestr(_FACTS, json.dumps(entry.facts))
        for part, graph in entry.graphs.items():
            archive.writestr(part, graph)
    _trim(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of the one at `path` when it is whole, for its owner alone.

    It is written beside the final name and renamed: a reader sees all of it or nothing, however
    many write.
    """
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # its mode: 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        with contextlib.suppress(FileNotFoundError):  # another kernel has cleared the cache since
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def remove(name: str) -> None:
    """Forgets the entry called `name`, where there is one."""
    with contextlib.suppress(OSError):
        _path(name).unlink()


def usage() -> Usage:
    """What is kept now."""
    sizes = [status.st_size for _, status in _files("*.zip")]
    return Usage(folder(), len(sizes), sum(sizes))


def clear() -> Usage:
    """Removes all graphs, and says what there was. A graph in use stays in memory."""
    before = usage()
    for path, _ in [*_files("*.zip"), *_files(".*.part")]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return before


def _path(name: str) -> Path:
    return folder() / f"{name}.zip"


def _archive(file: Any) -> zipfile.ZipFile:
    return zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)


def _files(pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of that form with their status; others may remove them meanwhile."""
    for path in folder().glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _trim(newest: Path) -> None:
    """Throws out what was used longest ago, and what writers that died have left."""
    for path, status in _files(".*.part"):
        if time.time() - status.st_mtime > _ABANDONED_S:
            path.unlink(missing_ok=True)
    files = sorted(_files("*.zip"), key=lambda file: file[1].st_mtime)
    total = sum(status.st_size for _, status in files)
    for path, status in files:
        if total <= MOST_BYTES:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            total -= status.st_size


def _refuse_shared(path: Path) -> None:
    """A graph names operators to run: nobody else may have put it there."""
    status = path.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise Unusable(
            f"others can write to {path}, so no graph is kept there; chmod 700 {path}, or set "
            "XDG_CACHE_HOME to a folder of your own"
        )
