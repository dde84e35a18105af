"""Folders that are the user's alone."""

from __future__ import annotations

from pathlib import Path


def private(path: Path) -> Path:
    """Makes the folder, and those above it that are not there, with mode 0700; OSError.

    `Path.mkdir` has a mode for the last one alone.
    """
    if not path.is_dir():
        private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    return path
