"""Folder of an export: filled under a temporary name, and moved into place after all checks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortlab.checkpoint.sharded import fingerprint
from ortlab.utils import files as folders
from ortlab.utils.files import folder_beside

MANIFEST = "export.json"
"""File with the export's ports and differences, and the size and hash of every other file."""


@contextlib.contextmanager
def filled(target: Path) -> Iterator[Path]:
    """Provide a new folder that replaces the target if the block ends without an error.

    After an error, the new folder is removed and the target is unchanged.

    Args:
        target: The folder to replace.

    Yields:
        The new folder.

    Raises:
        ValueError: If the target may not be replaced; see `check`.
        RuntimeError: If the folder cannot be written.
    """
    check(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target, mode=0o777) as made:
            yield made
            check(target)  # again, because it may have changed since
    except OSError as error:
        raise RuntimeError(
            f"cannot write the export to {target}: {error.strerror or error}; name another folder"
        ) from error


def check(target: Path) -> None:
    """Check that a path is free, an empty folder, or an unchanged export.

    Args:
        target: The path.

    Raises:
        ValueError: If anything else is there.
    """
    if target.suffix == ".onnx":
        raise ValueError(
            f"{target} is the name of a file, and an export is a folder; name one, such as out/"
        )
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} exists and is not a folder; name another one")
    present = {
        path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()
    }
    if not present:
        return
    known = _listed(target)
    other = sorted(
        name
        for name in present - {MANIFEST}
        if name not in known or fingerprint(target / name) != known[name]
    )
    if MANIFEST not in present or other:
        named = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
        raise ValueError(
            f"{target} has other files ({named or 'no export'}), and only an unchanged export is "
            "replaced; name another folder, or remove them"
        )


def _listed(target: Path) -> dict[str, str]:
    """Return the hash of every file of the export in `target`; empty if there is no export."""
    try:
        return {name: each["sha256"] for name, each in read(target)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest of an export.

    Args:
        folder: Folder of the export.

    Raises:
        ValueError: If the folder has no readable manifest.
    """
    try:
        return folders.read_object(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no export: {error}; name the folder of one") from None


def describe(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of an export.

    Args:
        folder: Folder of the export.
        facts: Ports, differences and notes of the export.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": fingerprint(path)}
        for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=1) + "\n")
