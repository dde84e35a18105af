"""A training state in a folder of safetensors files, of which every rank writes its own.

By torch.distributed.checkpoint, which shares out among the ranks what all of them hold; with its
safetensors writer, since its own form is a pickle. Any number of processes reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ortlab.checkpoint.serialization import Packed, unpacked

_SUFFIX = ".safetensors"


def write(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes `state`, which is the same on every rank, to `folder`; all ranks call this.

    Returns the outline that `read` takes; it is plain JSON.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    packed = Packed()
    outline = {name: packed.pack(value, name) for name, value in state.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(packed.tensors, storage_writer=writer)
    return outline


def lay(state: Mapping[str, Any], within: Path) -> Shards:
    """Writes the `state` of one process to a new private folder, for ranks to read."""
    found = Packed()
    outline = {name: found.pack(value, name) for name, value in state.items()}
    laid = Shards(Shards.place(within), outline)
    safetensors.torch.save_file(found.tensors, laid.folder / f"state{_SUFFIX}")
    return laid


def read(folder: Path, outline: Mapping[str, Any]) -> dict[str, Any]:
    """The state that is in `folder`; its tensors are views of the files, which may go then.

    ValueError where a file is no safetensors file, or a tensor is missing.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            with safetensors.safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); take another checkpoint") from None
    try:
        return {name: unpacked(value, tensors) for name, value in outline.items()}
    except KeyError as error:
        raise ValueError(f"{folder} is not complete: {error} is missing") from None


@dataclass(frozen=True, eq=False)
class Shards:
    """A state that lies in `folder`, which goes with the last who holds this."""

    folder: Path
    outline: Mapping[str, Any]

    @classmethod
    def place(cls, within: Path) -> Path:
        """A new private folder for one."""
        return Path(tempfile.mkdtemp(prefix="state-", dir=within))

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def keep(self, folder: Path) -> dict[str, str]:
        """Gives `folder` the same files, of mode 0600 and on disk; their SHA-256 by name."""
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
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file; empty for what is none: links lead anywhere, devices have no end."""
    if path.is_symlink() or not path.is_file():
        return ""
    return digest(path)


def check(folder: Path, digests: Mapping[str, str], *, beside: str) -> None:
    """ValueError where the files in `folder` are not those of `digests`, with one `beside` them."""
    for name, wanted in digests.items():
        found = ""
        with contextlib.suppress(OSError):
            if Path(name).name == name:
                found = fingerprint(folder / name)
        if not found or found != wanted:
            what = "damaged (its SHA-256 is another)" if found else "missing, or no file"
            raise ValueError(f"{folder / Path(name).name} is {what}; take another checkpoint")
    if more := {path.name for path in folder.glob(f"*{_SUFFIX}")} - {*digests, beside}:
        raise ValueError(f"{folder / min(more)} is no part of the checkpoint in {folder}")
