"""What people said of a run: notes and tags, in an append-only file of its folder."""

from __future__ import annotations

import datetime
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortlab.utils import files
from ortlab.utils.tables import escaped


@dataclass(frozen=True)
class Note:
    """One note; ``time`` is in UTC, as ISO 8601 has it."""

    time: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Said:
    """All notes of a run, the last one last, and the tags that it has now."""

    notes: tuple[Note, ...] = ()
    tags: tuple[str, ...] = ()


def read_notes(folder: Path) -> Said:
    """What notes.jsonl of a run's folder says; lines that are not whole are left out."""
    try:
        lines = files.read(folder / "notes.jsonl").splitlines()
    except OSError:
        return Said()
    notes: list[Note] = []
    tags: dict[str, None] = {}
    for line in lines:
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict):
            continue
        if "note" in value:
            notes.append(Note(legible(value.get("time", "")), legible(value["note"])))
        elif "tag" in value:
            tags[legible(value["tag"])] = None
        elif "untag" in value:
            tags.pop(legible(value["untag"]), None)
    return Said(tuple(notes), tuple(tags))


def legible(value: object) -> str:
    """`value` as text that files and screens take.

    JSON and names of files may hold half of a surrogate pair, which UTF-8 has no bytes for, and
    characters that a terminal obeys; lines stay lines.
    """
    return escaped(str(value).encode("utf-8", "replace").decode(), but="\n\t")


def add_note(folder: Path, text: str) -> None:
    """Adds a note; ValueError for an empty one."""
    if not text.strip():
        raise ValueError(f"note({text!r}): there is nothing in it to keep")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    _append(folder, {"note": text, "time": now})


def add_tag(folder: Path, tag: str) -> None:
    """Gives the run a tag; ValueError where it is no single word."""
    _append(folder, {"tag": _checked(tag)})


def remove_tag(folder: Path, tag: str) -> None:
    """Takes a tag away, whether the run had it or not."""
    _append(folder, {"untag": _checked(tag)})


def _checked(tag: str) -> str:
    if not re.fullmatch(r"[\w.:/-]{1,40}", tag):
        raise ValueError(f"tag={tag!r}: letters, digits and . : / - _ make a tag, 40 at most")
    return tag


def _append(folder: Path, value: dict[str, str]) -> None:
    # One write of one line: those of two processes do not mix.
    path = folder / "notes.jsonl"
    descriptor = files.plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        torn = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + json.dumps(value).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
