"""The index of the history: what the folders of runs say, kept in SQLite so that listing is quick.

``index.sqlite`` lies beside the folders and is never the source of truth. Each row has the stamp
(`entry.stamp`) of the folder that it was read from; a listing compares all stamps, reads what is
new or changed and forgets what is gone. So an index that is missing, damaged, of another form or
behind costs the reading of folders, and nothing else. Runs write their row when they begin and when
they end; several processes may, SQLite has one wait for the other.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ortlab.history import runs_root
from ortlab.past.entry import Entry, read_entry, stamp

FORM: Final = 1
FILE: Final = "index.sqlite"
_WAIT_S: Final = 10.0
"""For another process that writes; then the folders are read without an index."""
_COLUMNS: Final = [field.name for field in fields(Entry) if field.name != "folder"]
_NUMBERS: Final = {field.name for field in fields(Entry) if field.type == "float"}


def entries(root: Path | None = None) -> list[Entry]:
    """Every run that is kept below `root`, or where runs are kept, the newest last."""
    root = runs_root() if root is None else root
    stamps = {path.name: (path, stamp(path)) for path in _folders(root)}
    known = _known(root)
    found, fresh = [], []
    for name, (path, now) in stamps.items():
        before = known.get(name)
        if before is not None and before[0] == now:
            found.append(Entry(**before[1], folder=path))
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
            rows = database.execute(f"SELECT stamp, {', '.join(_COLUMNS)} FROM runs").fetchall()
    except sqlite3.OperationalError:  # locked for too long, or not to be read
        return {}
    except sqlite3.DatabaseError:
        _discard(path)
        return {}
    return {row[1]: (row[0], _values(row[1:])) for row in rows}


def _values(row: tuple[Any, ...]) -> dict[str, Any]:
    values = dict(zip(_COLUMNS, row, strict=True))
    return {n: float("nan") if v is None and n in _NUMBERS else v for n, v in values.items()}


def _write(root: Path, fresh: list[tuple[Entry, str]], gone: Any) -> None:
    """Puts rows in and takes rows out, in one transaction; without an index where that fails."""
    path = root / FILE
    try:
        try:
            _put(path, fresh, gone)
        except sqlite3.OperationalError:  # locked for too long, or no room: it stays as it was
            return
        except sqlite3.DatabaseError:
            _discard(path)
            _put(path, fresh, gone)
    except (sqlite3.Error, OSError):  # a folder that cannot be written to, a full disk
        return


def _discard(path: Path) -> None:
    """Takes a damaged index away; the folders have all that was in it."""
    for each in (path, path.with_name(f"{FILE}-journal")):
        with contextlib.suppress(OSError):
            each.unlink()


def _put(path: Path, fresh: list[tuple[Entry, str]], gone: Any) -> None:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let others read it
    marks = ", ".join("?" * (1 + len(_COLUMNS)))
    with _opened(path) as database, database:
        database.execute("BEGIN IMMEDIATE")
        if not _is_of_this_form(database):
            database.execute("DROP TABLE IF EXISTS runs")
            database.execute(
                f"CREATE TABLE runs (stamp, {', '.join(_COLUMNS)}, PRIMARY KEY (name))"
            )
            database.execute(f"PRAGMA user_version = {FORM}")
        database.executemany(
            f"INSERT OR REPLACE INTO runs (stamp, {', '.join(_COLUMNS)}) VALUES ({marks})",
            [(now, *(getattr(entry, name) for name in _COLUMNS)) for entry, now in fresh],
        )
        database.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in gone])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Transactions are begun by hand: DDL and rows in one.
    database = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    try:
        yield database
    finally:
        database.close()


def _is_of_this_form(database: sqlite3.Connection) -> bool:
    columns = [row[1] for row in database.execute("PRAGMA table_info(runs)")]
    (form,) = database.execute("PRAGMA user_version").fetchone()
    return bool(form == FORM and columns == ["stamp", *_COLUMNS])
