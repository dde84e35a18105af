"""Removal of old runs by age, number or size, except runs that a process is training."""

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
    """Table of the runs that were removed or would be.

    Args:
        going: The runs.
        of: Number of runs that were considered.
        done: True if they were removed.
        left: Reasons why runs could not be removed.
    """

    def __init__(
        self, going: Sequence[RunEntry], *, of: int, done: bool, left: Sequence[str] = ()
    ) -> None:
        self.done = done
        self.left = tuple(left)
        size = memory(sum(entry.size_bytes for entry in going))
        told = f"{len(going):,} of {of:,} runs, {size}"
        ask = f"{told} would be removed permanently; confirm with --yes or yes=True"
        columns = [Column[RunEntry](f.head, f.text, f.number) for f in FIELDS if f.head in _SHOWN]
        super().__init__(
            going,
            columns,
            notes=[*([f"removed {told}" if done else ask] if going else []), *left],
            empty="no run was removed" if done else f"none of {of:,} runs would be removed",
        )


def prune(settings: PruneSettings, filters: HistorySettings, root: Path | None = None) -> Pruning:
    """Remove old runs, or list those that would be removed.

    A run is removed if it is too old, or exceeds the number or the total size of runs. Runs that
    any process is training are not removed, but count. Links, folders that are not runs, and the
    targets of links in a run's folder are never removed.

    Args:
        settings: Limits, and whether to remove the runs or only list them.
        filters: Filters of the runs to consider.
        root: Folder of the runs; None is `ortlab.history.run_folder.runs_root`.

    Returns:
        The runs.

    Raises:
        ValueError: `settings` contain no limit.
    """
    root = runs_root() if root is None else root
    limits = (settings.older_than, settings.keep, settings.max_size)
    if all(limit is None for limit in limits):
        raise ValueError(
            "no limit for removing runs is set; use older_than='30d', keep=100 or max_size='2GB'"
        )
    found = list(chosen(sqlite_index.entries(root), filters))
    going = _going(found, settings, datetime.datetime.now(datetime.UTC))
    if not settings.yes:
        return Pruning(going, of=len(found), done=False)
    gone, left = [], []
    for entry in going:
        try:
            remove(entry.folder)
        except OSError as error:
            left.append(f"{entry.name} was not removed: {error}")
        else:
            gone.append(entry)
    sqlite_index.entries(root)  # removes their rows from the index
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
        raise ValueError(
            f"older_than={text!r} is not an age; use a number of hours, days or weeks, such as "
            "12h, 30d or 8w"
        )
    return datetime.timedelta(hours=float(match[1]) * _HOURS[match[2]])


def _began(entry: RunEntry) -> datetime.datetime:
    """Return the time of creation; if it is unknown, that of the folder's last change."""
    try:
        return datetime.datetime.fromisoformat(entry.created).astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # not a time, or out of range
        return datetime.datetime.fromtimestamp(entry.folder.stat().st_mtime, datetime.UTC)


def remove(path: Path) -> None:
    """Hide a run's folder by renaming it, then delete it.

    Args:
        path: Folder of a run.

    Raises:
        OSError: A process is training the run, or the folder cannot be removed.
    """
    if path.is_symlink() or RunFolder(path).held():
        raise OSError("a process is using it")
    beside = path.with_name(f".{path.name}.{os.getpid()}.pruned")
    path.rename(beside)
    shutil.rmtree(beside)
