"""Notes and tags of a run, stored in an append-only file in its folder."""

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
    """Note on a run.

    Attributes:
        time: Time of the note, in UTC and ISO 8601.
        text: The note.
    """

    time: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Said:
    """Notes and tags of a run.

    Attributes:
        notes: All notes, from oldest to newest.
        tags: Current tags.
    """

    notes: tuple[Note, ...] = ()
    tags: tuple[str, ...] = ()


def read_notes(folder: Path) -> Said:
    """Read notes and tags from notes.jsonl; incomplete lines are skipped.

    Args:
        folder: Folder of the run.
    """
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
    """Convert a value to text that can be written to files and terminals.

    JSON and file names may contain lone surrogates, which UTF-8 cannot encode, and control
    characters. Line breaks and tabs are kept.

    Args:
        value: The value.
    """
    return escaped(str(value).encode("utf-8", "replace").decode(), but="\n\t")


def add_note(folder: Path, text: str) -> None:
    """Add a note.

    Args:
        folder: Folder of the run.
        text: The note.

    Raises:
        ValueError: The note is empty.
    """
    if not text.strip():
        raise ValueError(f"note({text!r}) is empty; write some text")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    _append(folder, {"note": text, "time": now})


def add_tag(folder: Path, tag: str) -> None:
    """Add a tag.

    Args:
        folder: Folder of the run.
        tag: The tag, a single word.

    Raises:
        ValueError: The tag contains other characters or is too long.
    """
    _append(folder, {"tag": _checked(tag)})


def remove_tag(folder: Path, tag: str) -> None:
    """Remove a tag, if the run has it.

    Args:
        folder: Folder of the run.
        tag: The tag.

    Raises:
        ValueError: The tag contains other characters or is too long.
    """
    _append(folder, {"untag": _checked(tag)})


def _checked(tag: str) -> str:
    if not re.fullmatch(r"[\w.:/-]{1,40}", tag):
        raise ValueError(f"tag={tag!r} is not a tag; use up to 40 letters, digits and . : / - _")
    return tag


def _append(folder: Path, value: dict[str, str]) -> None:
    # A line is written by one call, so that lines of two processes do not mix.
    path = folder / "notes.jsonl"
    descriptor = files.plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        torn = bool(size) and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * torn + json.dumps(value).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
