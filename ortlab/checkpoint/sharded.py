"""Sharded training state: a folder of safetensors files, one or more per rank.

torch.distributed.checkpoint partitions the replicated state across the ranks. Its safetensors
writer is used, because its own format is a pickle. Any number of processes can read the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ortlab.checkpoint.nested_values import Packed, unpacked
from ortlab.utils import scratch

_SUFFIX = ".safetensors"


def write(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the state of several ranks; all ranks must call this.

    Args:
        state: Training state, which is the same on every rank.
        folder: Folder for the files.

    Returns:
        The outline that `read` takes; it is plain JSON.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # heavy: torch
    from torch.distributed.checkpoint.state_dict_saver import save  # heavy: torch

    packed = Packed()
    outline = {name: packed.pack(value, name) for name, value in state.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(packed.tensors, storage_writer=writer)
    return outline


def lay(state: Mapping[str, Any], within: Path) -> Shards:
    """Write the state of one process to a new private folder, for ranks to read.

    Args:
        state: Training state.
        within: Parent of the new folder.

    Returns:
        The written state.
    """
    found = Packed()
    outline = {name: found.pack(value, name) for name, value in state.items()}
    laid = Shards(Shards.place(within), outline)
    safetensors.torch.save_file(found.tensors, laid.folder / f"state{_SUFFIX}")
    return laid


def read(folder: Path, outline: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state in a folder.

    Args:
        folder: Folder of the files, which may be removed afterwards.
        outline: Outline from `write` or `lay`.

    Returns:
        The state. Its tensors are views of the memory-mapped files.

    Raises:
        ValueError: A file is not a safetensors file, or a tensor is missing.
    """
    found = tensors(folder)
    try:
        return {name: unpacked(value, found) for name, value in outline.items()}
    except KeyError as error:
        raise ValueError(f"{folder} is incomplete: {error} is missing") from None


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in all files of a folder, by name; see `read`.

    Args:
        folder: Folder of the files.

    Raises:
        ValueError: A file is not a safetensors file.
    """
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with safetensors.safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); use another checkpoint") from None
    return found


@dataclass(frozen=True, eq=False)
class Shards:
    """Sharded state on disk; its folder is removed when the object is garbage collected.

    Attributes:
        folder: Folder of the files.
        outline: Outline that `read` takes.
    """

    folder: Path
    outline: Mapping[str, Any]

    @classmethod
    def place(cls, within: Path) -> Path:
        """Create a new private folder for a sharded state.

        Args:
            within: Parent of the new folder.
        """
        return scratch.folder("state", within)

    def __post_init__(self) -> None:
        weakref.finalize(self, scratch.remove, self.folder)

    def keep(self, folder: Path) -> dict[str, str]:
        """Link or copy the files to another folder, with mode 0600, and sync them to disk.

        Args:
            folder: The other folder.

        Returns:
            SHA-256 of each file, by name.
        """
        found = {}
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            kept = folder / path.name
            try:
                os.link(path, kept)
            except OSError:  # another file system
                shutil.copyfile(path, kept)
            kept.chmod(0o600)
            with kept.open("rb") as file:
                os.fsync(file.fileno())
            found[path.name] = digest(kept)
        return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a regular file.

    Links and devices are not read: a link may lead anywhere, and a device may have no end.

    Args:
        path: The file.

    Returns:
        The SHA-256 in hexadecimal; an empty string if `path` is not a regular file.
    """
    if path.is_symlink() or not path.is_file():
        return ""
    return digest(path)


def check(folder: Path, digests: Mapping[str, str], *, beside: str) -> None:
    """Check the files of a sharded checkpoint.

    Args:
        folder: Folder of the checkpoint.
        digests: SHA-256 of each file, by name.
        beside: Name of another file that belongs to the checkpoint.

    Raises:
        ValueError: A file is missing, damaged, or does not belong to the checkpoint.
    """
    for name, wanted in digests.items():
        found = ""
        with contextlib.suppress(OSError):
            if isinstance(name, str) and Path(name).name == name:
                found = fingerprint(folder / name)
        if not found or found != wanted:
            what = "damaged (its SHA-256 does not match)" if found else "missing, or not a file"
            raise ValueError(f"{folder / Path(str(name)).name} is {what}; use another checkpoint")
    if more := {path.name for path in folder.glob(f"*{_SUFFIX}")} - {*digests, beside}:
        raise ValueError(
            f"{folder / min(more)} does not belong to the checkpoint in {folder}; use another "
            "checkpoint"
        )
