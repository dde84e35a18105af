"""Index of the history: summaries of the runs, cached in SQLite for fast listing.

``index.sqlite`` lies beside the folders of the runs and is never the source of truth. Each row has
the stamp (`entry.stamp`) of the folder that it was read from, and a checksum of its content. A
listing compares all stamps, reads new and changed folders, and deletes the rows of removed ones. An
index that is missing, damaged, outdated or in another format therefore only costs reading the
folders. Runs write their row at their start and end; SQLite serializes several processes.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ortlab.history.entry import RunEntry, read_entry, stamp
from ortlab.history.run_folder import runs_root

FORM: Final = 3
FILE: Final = "index.sqlite"
_WAIT_S: Final = 10.0
"""Maximum wait for another process that writes; after it, the index is not used."""
_DAMAGED: Final = sqlite3.DatabaseError, UnicodeDecodeError
"""Exceptions from reading a damaged index."""
_COLUMNS: Final = [field.name for field in fields(RunEntry) if field.name != "folder"]
_ROW: Final = f"checksum, stamp, {', '.join(_COLUMNS)}"
_NUMBERS: Final = {field.name for field in fields(RunEntry) if field.type == "float"}


def entries(root: Path | None = None) -> list[RunEntry]:
    """Return all stored runs, from oldest to newest.

    Args:
        root: Folder of the runs; None is `ortlab.history.run_folder.runs_root`.
    """
    root = runs_root() if root is None else root
    stamps = {path.name: (path, stamp(path)) for path in _folders(root)}
    known = _known(root)
    found, fresh = [], []
    for name, (path, now) in stamps.items():
        before = known.get(name)
        if before is not None and before[0] == now:
            found.append(RunEntry(**before[1], folder=path))
            continue
        entry = read_entry(path)
        if entry is None:
            continue
        found.append(entry)
        if not entry.at_work:
            fresh.append((entry, now))
    gone = known.keys() - stamps.keys()
    if fresh or gone:
        _write(root, fresh, gone)
    return sorted(found, key=lambda entry: (entry.created, entry.number or 0, entry.name))


def note(path: Path) -> None:
    """Update the row of a run; without enough memory, it is skipped.

    Args:
        path: Folder of the run.
    """
    now = stamp(path)  # before reading: a change in the meantime makes the row outdated
    with contextlib.suppress(MemoryError):  # the next listing of runs updates the row
        entry = read_entry(path)
        if entry is not None:
            _write(path.parent, [(entry, "" if entry.at_work else now)], ())


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders that may be runs; links are skipped."""
    with contextlib.suppress(OSError), os.scandir(root) as found:
        for each in found:
            if not each.name.startswith(".") and each.is_dir(follow_symlinks=False):
                yield root / each.name


def _known(root: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return stamp and values of each run in the index; nothing if it cannot be read."""
    path = root / FILE
    if not path.is_file():
        return {}
    try:
        with _opened(path) as database:
            if not _is_of_this_form(database):
                return {}
            rows = database.execute(f"SELECT {_ROW} FROM runs").fetchall()
    except _DAMAGED as error:
        if not _passes(error):
            _discard(path)
        return {}
    # SQLite does not verify the type or value of a cell, so a flipped bit changes a number.
    if any(checksum != _checksum(row) for checksum, *row in rows):
        _discard(path)
        return {}
    return {name: (stamp, _values((name, *values))) for _, stamp, name, *values in rows}


def _checksum(row: Iterable[Any]) -> int:
    """Return the checksum of a row's stamp and values, including their types."""
    return zlib.crc32(repr(list(row)).encode())


def _values(row: tuple[Any, ...]) -> dict[str, Any]:
    values = dict(zip(_COLUMNS, row, strict=True))
    return {n: float("nan") if v is None and n in _NUMBERS else v for n, v in values.items()}


def _write(root: Path, fresh: list[tuple[RunEntry, str]], gone: Any) -> None:
    """Insert and delete rows in one transaction; errors are ignored.

    A damaged index is replaced; one that is temporarily unavailable stays unchanged.
    """
    path = root / FILE
    try:
        try:
            _put(path, fresh, gone)
        except _DAMAGED as error:
            if _passes(error):
                return
            _discard(path)
            _put(path, fresh, gone)
    except (sqlite3.Error, OSError):  # a read-only folder, a full disk
        return


def _passes(error: Exception) -> bool:
    """Return True if the index is intact but unavailable: locked for too long, or disk full."""
    damaged = sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY  # unknown format, on read or write
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode not in damaged


def _discard(path: Path) -> None:
    """Delete a damaged index; the folders contain all of its data."""
    for each in (path, path.with_name(f"{FILE}-journal")):
        with contextlib.suppress(OSError):
            each.unlink()


def _put(path: Path, fresh: list[tuple[RunEntry, str]], gone: Any) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's default is readable by others
    marks = ", ".join("?" * (2 + len(_COLUMNS)))
    rows = [_row(entry, now) for entry, now in fresh]
    with _opened(path) as database, database:
        database.execute("BEGIN IMMEDIATE")
        if not _is_of_this_form(database):
            database.execute("DROP TABLE IF EXISTS runs")
            database.execute(f"CREATE TABLE runs ({_ROW}, PRIMARY KEY (name))")
            database.execute(f"PRAGMA user_version = {FORM}")
        database.executemany(f"INSERT OR REPLACE INTO runs ({_ROW}) VALUES ({marks})", rows)
        database.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in gone])


def _row(entry: RunEntry, now: str) -> tuple[Any, ...]:
    """Return the row of a run; NaN becomes NULL, since SQLite has no NaN."""
    values = [getattr(entry, name) for name in _COLUMNS]
    row = [now, *(None if value != value else value for value in values)]
    return _checksum(row), *row


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Transactions are explicit, so that DDL and rows are in the same one.
    database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    # The default reports text that is not UTF-8 as an OperationalError, as if it were temporary.
    database.text_factory = bytes.decode
    try:
        yield database
    finally:
        database.close()


def _is_of_this_form(database: sqlite3.Connection) -> bool:
    columns = [row[1] for row in database.execute("PRAGMA table_info(runs)")]
    (form,) = database.execute("PRAGMA user_version").fetchone()
    return bool(form == FORM and ", ".join(columns) == _ROW)
