"""Old runs, removed by age, number or size; never one that a process still works on."""

from __future__ import annotations

import datetime
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ortlab.history import sqlite_index
from ortlab.history.entry import RunEntry
from ortlab.history.listing import FIELDS, chosen
from ortlab.history.run_folder import RunFolder, runs_root
from ortlab.settings import HistorySettings, PruneSettings
from ortlab.utils.process_memory import memory, parse_bytes
from ortlab.utils.tables import Column, Table

_HOURS: Final = {"h": 1, "d": 24, "w": 7 * 24}
_SHOWN: Final = ("run", "state", "model", "started", "on disk", "note")


class Pruning(Table[RunEntry]):
    """The runs that go, or that went (``done``); ``left`` says why one stayed that should go."""

    def __init__(
        self, going: Sequence[RunEntry], *, of: int, done: bool, left: Sequence[str] = ()
    ) -> None:
        self.done = done
        self.left = tuple(left)
        size = memory(sum(entry.size_bytes for entry in going))
        told = f"{len(going):,} of {of:,} runs, {size}"
        ask = f"{told} would go for good; --yes, or yes=True, removes them"
        columns = [Column[RunEntry](f.head, f.text, f.number) for f in FIELDS if f.head in _SHOWN]
        super().__init__(
            going,
            columns,
            notes=[*([f"removed {told}" if done else ask] if going else []), *left],
            empty="no run is removed" if done else f"none of {of:,} runs would go",
        )


def prune(settings: PruneSettings, filters: HistorySettings, root: Path | None = None) -> Pruning:
    """Removes what `settings` say, of the runs that `filters` choose, or shows what would go.

    A run goes that is too old, or beyond the number, or beyond the size, whichever says so. Runs in
    training, of any process, stay and count. Folders that are no runs and links stay, and what a
    link in a run's folder points to does too. ValueError where nothing says what is to go.
    """
    root = runs_root() if root is None else root
    limits = (settings.older_than, settings.keep, settings.max_size)
    if all(limit is None for limit in limits):
        raise ValueError(
            "nothing says which runs are to go: older_than='30d', keep=100 or max_size='2GB'"
        )
    found = list(chosen(sqlite_index.entries(root), filters))
    going = _going(found, settings, datetime.datetime.now(datetime.UTC))
    if not settings.yes:
        return Pruning(going, of=len(found), done=False)
    gone, left = [], []
    for entry in going:
        try:
            _remove(entry.folder)
        except OSError as error:
            left.append(f"{entry.name} stays: {error}")
        else:
            gone.append(entry)
    sqlite_index.entries(root)  # which forgets them
    return Pruning(gone, of=len(found), done=True, left=left)


def _going(
    found: Sequence[RunEntry], settings: PruneSettings, now: datetime.datetime
) -> list[RunEntry]:
    oldest = None if settings.older_than is None else now - _age(settings.older_than)
    room = None if settings.max_size is None else parse_bytes(settings.max_size)
    going, size = [], 0
    for place, entry in enumerate(reversed(found)):
        size += entry.size_bytes
        goes = (
            (oldest is not None and _began(entry) < oldest)
            or (settings.keep is not None and place >= settings.keep)
            or (room is not None and size > room)
        )
        if goes and not entry.at_work:
            going.append(entry)
    return going


def _age(text: str) -> datetime.timedelta:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([hdw])\s*", text)
    if match is None:
        raise ValueError(f"older_than={text!r}: a number of hours, days or weeks: 12h, 30d, 8w")
    return datetime.timedelta(hours=float(match[1]) * _HOURS[match[2]])


def _began(entry: RunEntry) -> datetime.datetime:
    """When it was created; where that is not told, when its folder was last changed."""
    try:
        return datetime.datetime.fromisoformat(entry.created).astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # no time, or one before or after all years
        return datetime.datetime.fromtimestamp(entry.folder.stat().st_mtime, datetime.UTC)


def _remove(path: Path) -> None:
    """Takes a run's folder out of sight at once, then from the disk; OSError where it may not."""
    if path.is_symlink() or RunFolder(path).held():
        raise OSError("somebody works on it")
    beside = path.with_name(f".{path.name}.{os.getpid()}.pruned")
    path.rename(beside)
    shutil.rmtree(beside)
