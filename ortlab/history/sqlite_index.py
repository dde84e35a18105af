"""The index of the history: what the folders of runs say, kept in SQLite so that listing is quick.

``index.sqlite`` lies beside the folders and is never the source of truth. Each row has the stamp
(`entry.stamp`) of the folder that it was read from, and a checksum of all that; a listing compares
all stamps, reads what is new or changed and forgets what is gone. So an index that is missing,
damaged, of another form or behind costs the reading of folders, and nothing else. Runs write their
row when they begin and when they end; several processes may, SQLite has one wait for the other.
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

FORM: Final = 2
FILE: Final = "index.sqlite"
_WAIT_S: Final = 10.0
"""For another process that writes; then the folders are read without an index."""
_DAMAGED: Final = sqlite3.DatabaseError, UnicodeDecodeError
"""What a file raises that SQLite did not write so."""
_COLUMNS: Final = [field.name for field in fields(RunEntry) if field.name != "folder"]
_ROW: Final = f"checksum, stamp, {', '.join(_COLUMNS)}"
_NUMBERS: Final = {field.name for field in fields(RunEntry) if field.type == "float"}


def entries(root: Path | None = None) -> list[RunEntry]:
    """Every run that is kept below `root`, or where runs are kept, the newest last."""
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
    """Brings the row of the run in this folder up to date, where memory suffices for that."""
    now = stamp(path)  # before reading: what changes meanwhile makes it old
    with contextlib.suppress(MemoryError):  # the row is made again when runs are listed
        entry = read_entry(path)
        if entry is not None:
            _write(path.parent, [(entry, "" if entry.at_work else now)], ())


def _folders(root: Path) -> Iterator[Path]:
    """Folders that may be runs; links are none."""
    with contextlib.suppress(OSError), os.scandir(root) as found:
        for each in found:
            if not each.name.startswith(".") and each.is_dir(follow_symlinks=False):
                yield root / each.name


def _known(root: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """What the index holds: stamp and values by name; nothing where it cannot be read."""
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
    # SQLite gives whatever a cell says that it is, and a bit makes another number of one.
    if any(checksum != _checksum(row) for checksum, *row in rows):
        _discard(path)
        return {}
    return {name: (stamp, _values((name, *values))) for _, stamp, name, *values in rows}


def _checksum(row: Iterable[Any]) -> int:
    """Of a row's stamp and values as SQLite gives them back, types included."""
    return zlib.crc32(repr(list(row)).encode())


def _values(row: tuple[Any, ...]) -> dict[str, Any]:
    values = dict(zip(_COLUMNS, row, strict=True))
    return {n: float("nan") if v is None and n in _NUMBERS else v for n, v in values.items()}


def _write(root: Path, fresh: list[tuple[RunEntry, str]], gone: Any) -> None:
    """Puts rows in and takes rows out, in one transaction; without an index where that fails.

    One that could not be used just now stays as it was.
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
    except (sqlite3.Error, OSError):  # a folder that cannot be written to, a full disk
        return


def _passes(error: Exception) -> bool:
    """Whether an index is whole and cannot be used just now: locked for too long, no room."""
    damaged = sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY  # of a format unknown, to read or write
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode not in damaged


def _discard(path: Path) -> None:
    """Takes a damaged index away; the folders have all that was in it."""
    for each in (path, path.with_name(f"{FILE}-journal")):
        with contextlib.suppress(OSError):
            each.unlink()


def _put(path: Path, fresh: list[tuple[RunEntry, str]], gone: Any) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
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
    """What stands for a run in the index; SQLite has no NaN."""
    values = [getattr(entry, name) for name in _COLUMNS]
    row = [now, *(None if value != value else value for value in values)]
    return _checksum(row), *row


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Transactions are begun by hand: DDL and rows in one.
    database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    # SQLite's own says that it is not to be read now, where it never will be.
    database.text_factory = bytes.decode
    try:
        yield database
    finally:
        database.close()


def _is_of_this_form(database: sqlite3.Connection) -> bool:
    columns = [row[1] for row in database.execute("PRAGMA table_info(runs)")]
    (form,) = database.execute("PRAGMA user_version").fetchone()
    return bool(form == FORM and ", ".join(columns) == _ROW)
