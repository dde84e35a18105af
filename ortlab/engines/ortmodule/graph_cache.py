"""Cache of exported graphs on disk, for the next Jupyter kernel: one file per graph.

A file is a zip archive, named by the fingerprint of everything that its graphs depend on. It
contains the graphs as ONNX without weights, and metadata as JSON. Reading it executes no code.
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
from ortlab.utils.wording import counted

MOST_BYTES = 512 * 1024**2
"""Maximum total size of the files, in bytes; the least recently used are removed first."""
_UNPACKED = MOST_BYTES  # maximum unpacked size of one file
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
"""Errors of reading a damaged archive; they depend on the place of the damage."""


class Unusable(Exception):
    """Raised when the cache folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class CachedGraph:
    """Content of one file.

    Attributes:
        graphs: Graphs by name, as ONNX bytes.
        facts: Metadata of JSON's types.
    """

    graphs: Mapping[str, bytes]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """Size of the cache.

    Attributes:
        folder: Folder of the cache.
        graphs: Number of graphs.
        size_bytes: Size of their files, in bytes.
    """

    folder: Path
    graphs: int
    size_bytes: int

    def __str__(self) -> str:
        size = f"{self.size_bytes / 1024**2:.1f} MiB"
        return f"{counted(self.graphs, 'exported graph')}, {size}, in {self.folder}"


def folder() -> Path:
    """Return the user's folder of exported graphs, below XDG_CACHE_HOME; it may not exist yet."""
    return extensions.cache_folder().with_name("exports")


def load(name: str) -> CachedGraph | None:
    """Load an entry. A damaged file is removed.

    Args:
        name: Fingerprint of the entry.

    Returns:
        The entry, or None if there is none.

    Raises:
        Unusable: If other users can write to the folder.
    """
    path = _path(name)
    if not path.exists():
        return None
    _refuse_shared(path.parent)
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(info.file_size for info in archive.infolist()) > _UNPACKED:
                raise ValueError("its unpacked size exceeds the limit of the cache")
            parts = {part: archive.read(part) for part in archive.namelist()}
        facts = json.loads(parts.pop(_FACTS))
    except FileNotFoundError:  # another kernel has just removed it
        return None
    except _DAMAGE:
        remove(name)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return CachedGraph(parts, facts)


def store(name: str, entry: CachedGraph) -> None:
    """Store an entry, replacing one of the same name, and trim the cache to its maximum size.

    Args:
        name: Fingerprint of the entry.
        entry: Content to store.

    Raises:
        Unusable: If other users can write to the folder.
        OSError: If the file cannot be written.
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
    """Open a file that atomically replaces the one at a path on success, with mode 0600.

    The file is written beside its final name and renamed, so that a reader sees all of it or
    nothing, even with several writers.

    Args:
        path: Final path.

    Yields:
        The file, open for binary writing.
    """
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        with contextlib.suppress(FileNotFoundError):  # another kernel has just cleared the cache
            os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def remove(name: str) -> None:
    """Remove an entry if it exists.

    Args:
        name: Fingerprint of the entry.
    """
    with contextlib.suppress(OSError):
        _path(name).unlink()


def usage() -> Usage:
    """Return the current size of the cache."""
    sizes = [status.st_size for _, status in _files("*.zip")]
    return Usage(folder(), len(sizes), sum(sizes))


def clear() -> Usage:
    """Remove all graphs from the cache. Graphs in use stay in memory.

    Returns:
        The size of the cache before.
    """
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
    """Iterate over matching files with their status; other processes may remove files."""
    for path in folder().glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _trim(newest: Path) -> None:
    """Remove the least recently used files, and partial files of writers that died."""
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
    """Raise if other users can write to the folder: a graph determines which operators run."""
    if folders.others_write(path):
        raise Unusable(
            f"other users can write to {path}, so graphs are not cached there; "
            f"run chmod 700 {path}, or "
            "set XDG_CACHE_HOME to your own folder"
        )
