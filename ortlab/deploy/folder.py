"""The folder of an export: filled beside its place, and moved there when all in it is checked."""

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
"""What an export is: its ports, differences, and every other file with its size and hash."""


@contextlib.contextmanager
def filled(target: Path) -> Iterator[Path]:
    """A fresh folder, which takes the place of `target` when the block ends without an error.

    Nothing is left of it otherwise. ValueError where `target` may not be replaced (`check`),
    RuntimeError where it cannot be written.
    """
    check(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_beside(target, mode=0o777) as made:
            yield made
            check(target)  # it may have changed meanwhile
    except OSError as error:
        raise RuntimeError(
            f"cannot write the export to {target}: {error.strerror or error}; name another folder"
        ) from error


def check(target: Path) -> None:
    """ValueError where something else than an unchanged export, or an empty folder, is there."""
    if target.suffix == ".onnx":
        raise ValueError(
            f"{target} is to be a folder, which the model gets into; name one, as out/"
        )
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} is there and is no folder; name another one")
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
            f"{target} holds other files ({named or 'no export'}); name another folder, or remove "
            "them: only an earlier export is replaced"
        )


def _listed(target: Path) -> dict[str, str]:
    """Every file of the export in `target` with its hash; none where there is none."""
    try:
        return {name: each["sha256"] for name, each in read(target)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def read(folder: Path) -> dict[str, Any]:
    """What an export's manifest says; ValueError where `folder` holds none."""
    try:
        return folders.read_object(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no export: {error}") from None


def describe(folder: Path, facts: Mapping[str, Any]) -> None:
    """Writes the manifest of the files in `folder`, with `facts`."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": fingerprint(path)}
        for path in sorted(folder.iterdir())
    }
    (folder / MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=1) + "\n")
