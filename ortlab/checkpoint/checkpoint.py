"""Exact state of a run between two steps, as a value in memory and as a checkpoint file.

A checkpoint is a safetensors file, so any reader of this format finds the weights under their own
names; the names of all other tensors begin with ``training.``. Its metadata, which are strings,
contain

    ortlab   version number of this format
    state    JSON: everything but the tensors, with a reference in place of each tensor
    sha256   of the version, of the JSON, and of every tensor's name, type, shape and bytes

The file is replaced atomically, so a reader never gets parts of two checkpoints. It contains no
code, and nothing is unpickled.

A run on several workers writes a folder, which appears atomically: ``state.safetensors`` is such a
file without model and optimizer. It lists the files beside it, in which each rank has written its
shard of model and optimizer, with their SHA-256 (see `ortlab.checkpoint.sharded`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch

from ortlab.checkpoint import sharded
from ortlab.checkpoint.checks import check_values
from ortlab.checkpoint.nested_values import Packed, memory_of, rebuilt, unpacked
from ortlab.settings import stored
from ortlab.utils.environment import environment
from ortlab.utils.files import folder_beside, write_beside
from ortlab.utils.rng import RandomStates

FORM = 2
Unit = Literal["samples", "micro-batches"]
"""Unit in which the position in an epoch is counted."""
_TRAINING = "training."
_STATE = "state.safetensors"
_SHARDED = ("model", "optimizer", "loss_scale", "scheduler")
"""Parts of a checkpoint that several ranks write to files of their own."""
_FORGED = AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError
"""Exceptions from reading a state whose digest is right, but which `save` did not write."""
_MOST_TOLD = 200
"""Characters of such an exception that a message has: a forged value may be of any length."""
_ANOTHER = "use another checkpoint, such as those in the run's folder"


@dataclass(frozen=True)
class Order:
    """Random states at the start of an epoch, which determine the order of its data.

    Attributes:
        random: States of the global generators.
        generators: States of the generators that the user's own data loader draws from.
    """

    random: RandomStates
    generators: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Position:
    """Position of a run in its data.

    Attributes:
        step: Completed optimizer steps.
        epoch: Current epoch, starting at 0.
        read: Samples or micro-batches of the epoch that have been read, counted in `unit`.
        length: Length of the epoch in `unit`; None if it is only known at the end.
        unit: "samples", which may come in micro-batches of any size, or "micro-batches" if the data
            yields its own.
        evaluated: Step of the last evaluation; -1 before the first.
        random: States of the global generators.
        order: Random states that determine the order of the current epoch; None between epochs.
        engine_seed: Seed with which the engine's own generators, whose states cannot be read, were
            reseeded at this position.
    """

    step: int
    epoch: int
    read: int
    length: int | None
    unit: Unit
    evaluated: int
    random: RandomStates
    order: Order | None
    engine_seed: int


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Complete state of a run, from which it resumes exactly.

    Attributes:
        model: State dictionary of the model, in torch's format.
        optimizer: State dictionary of the optimizer, in torch's format.
        position: Position of the run in its data.
        settings: Settings of the run, by name.
        loss_scale: State of the dynamic loss scale; None without one.
        scheduler: State of the user's learning rate scheduler; None without one.
        versions: Software and hardware that the run used (see
            `ortlab.utils.environment.environment`).
        shards: Files in which the ranks of several processes have written the whole state; None
            for a single process.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    position: Position
    settings: Mapping[str, Any]
    loss_scale: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] = dataclasses.field(default_factory=environment)
    shards: sharded.Shards | None = None
    scheduler: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        engine = self.settings.get("engine")
        return f"<Checkpoint: step {self.position.step}, engine {engine!r}>"

    def copy(self) -> Checkpoint:
        """Return a copy of the state on the CPU; tied tensors stay tied."""
        if self.shards is not None:
            return self  # its files never change
        copies: dict[object, torch.Tensor] = {}

        def own(tensor: torch.Tensor) -> torch.Tensor:
            memory = memory_of(tensor)
            if memory not in copies:
                copies[memory] = tensor.detach().to("cpu", copy=True)
            return copies[memory]

        changed = {name: rebuilt(getattr(self, name), own) for name in _SHARDED}
        return dataclasses.replace(self, **changed)

    def save(self, path: str | Path) -> Path:
        """Write the checkpoint atomically, as a file of mode 0600.

        The checkpoint of several ranks is a folder with their shards, unless `path` ends with
        .safetensors. Tensors that share memory (tied weights) are written once.

        Args:
            path: Path of the checkpoint; an existing one is replaced.

        Returns:
            `path`.

        Raises:
            ValueError: The state contains an object that is neither a plain value nor a dense
                tensor.
            NotSaved: The disk is full or cannot be written to. An existing checkpoint at `path`
                is unchanged.
        """
        path = Path(path)
        if self.shards is None or path.suffix == ".safetensors":
            return self._save_file(path)
        try:
            with folder_beside(path) as beside:
                parts = {
                    "outline": dict(self.shards.outline),
                    "digests": self.shards.keep(beside),
                }
                rest = dataclasses.replace(
                    self, model={}, optimizer={}, loss_scale=None, scheduler=None
                )
                rest._save_file(beside / _STATE, parts)
        except OSError as error:
            raise _not_kept(path, error) from error
        return path

    def _save_file(self, path: Path, parts: Mapping[str, Any] | None = None) -> Path:
        packed = Packed()
        state = {
            field.name: packed.pack(getattr(self, field.name), _prefix(field.name))
            for field in dataclasses.fields(self)
            if field.name != "shards" and not (field.name == "scheduler" and self.scheduler is None)
        }
        if parts is not None:
            state["shards"] = packed.pack(parts, "shards")
        text = json.dumps(state, allow_nan=False)
        metadata = {
            "format": "pt",  # required by transformers
            "ortlab": str(FORM),
            "state": text,
            "sha256": _digest(FORM, text, packed.tensors),
        }
        try:
            write_beside(
                path,
                lambda beside: safetensors.torch.save_file(packed.tensors, beside, metadata),
            )
        except (OSError, safetensors.SafetensorError) as error:
            raise _not_kept(path, error) from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Checkpoint:
        """Load a checkpoint that `save` wrote.

        Args:
            path: The file or folder.

        Returns:
            The checkpoint, fully verified.

        Raises:
            ValueError: There is no checkpoint at `path`, or it is damaged; the message says what
                to do.
        """
        path = Path(path)
        while True:
            try:
                before = path.stat()
            except OSError as error:
                raise ValueError(
                    f"there is no checkpoint at {path} ({error.strerror}); run.checkpoint(path) "
                    "writes one"
                ) from None
            try:
                return _read_folder(path) if (path / _STATE).exists() else _read(path)
            except ValueError:
                # safetensors opens a file twice. In between, the file may have been replaced or
                # removed.
                if _is_still(path, before):
                    raise


class NotSaved(RuntimeError):
    """Raised when a checkpoint cannot be written: the disk is full, for example."""


def _not_kept(path: Path, error: Exception) -> NotSaved:
    return NotSaved(
        f"the checkpoint cannot be saved to {path}: {error}; the model still has its weights, and "
        "an existing checkpoint at this path is unchanged"
    )


def _is_still(path: Path, before: os.stat_result) -> bool:
    try:
        now = path.stat()
    except OSError:  # a run in another kernel has removed it
        return False
    return (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def _read_folder(folder: Path) -> Checkpoint:
    found, parts = _read_file(folder / _STATE)
    with _told_of(folder):
        outline, digests = dict(parts["outline"]), dict(parts["digests"])
    try:
        sharded.check(folder, digests, beside=_STATE)
        tensors = sharded.tensors(folder)
    except (OSError, RuntimeError) as error:  # torch raises it for a file that it cannot map
        raise ValueError(f"{folder} cannot be read: {error}") from error
    with _told_of(folder):
        state = {name: unpacked(value, tensors) for name, value in outline.items()}
        if not state.keys() <= set(_SHARDED):
            raise ValueError(f"its shards contain {', '.join(map(repr, state.keys() - _SHARDED))}")
        return _checked(dataclasses.replace(found, **state))


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Name a checkpoint in the error about content that no run has written."""
    try:
        yield
    except _FORGED as error:
        told = str(error) if isinstance(error, ValueError) else repr(error)
        told = " ".join(told.split())[:_MOST_TOLD]
        raise ValueError(f"{path} is not a checkpoint of ortlab: {told}; {_ANOTHER}") from error


def _read(path: Path) -> Checkpoint:
    found, parts = _read_file(path)
    if parts:
        raise ValueError(f"{path} is part of a checkpoint; use its folder, {path.parent}")
    return found


def _read_file(path: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """Return the checkpoint in a file, and the outline and digests of its shards, if any."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; use the checkpoint's file{_file_in(path)}")
    if not path.is_file():  # reading from a pipe would block
        raise ValueError(f"{path} is not a file; use another checkpoint")
    try:
        with safetensors.safe_open(path, "pt") as file:
            form, text, digest = _parts(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # torch maps the file by the size that safetensors read; the file may have been replaced since.
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint, or is incomplete ({error}); {_ANOTHER}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if _digest(form, text, tensors) != digest:
        raise ValueError(f"{path} is damaged: its SHA-256 does not match its content; {_ANOTHER}")
    with _told_of(path):
        values = {name: unpacked(value, tensors) for name, value in _pairs(text)}
        parts = values.pop("shards", {})
        return _checkpoint(values), parts


def _parts(path: Path, metadata: Mapping[str, str]) -> tuple[int, str, str]:
    """Return the format version, the JSON and the digest; raise ValueError if it is unknown."""
    form = metadata.get("ortlab", "")
    if not form.isdecimal() or "state" not in metadata:
        raise ValueError(
            f"{path} contains tensors, but is not a checkpoint of a run; load the weights with "
            "safetensors.torch.load_file, and train without resume_from"
        )
    if int(form) > FORM:
        raise ValueError(
            f"{path} has format version {form}, written by a newer ortlab; this one reads versions "
            f"up to {FORM}; update it with pip install -U ortlab"
        )
    return int(form), metadata["state"], metadata.get("sha256", "")


def _file_in(folder: Path) -> str:
    final = folder / "checkpoints" / "final.safetensors"
    return f", such as {final}" if final.exists() else ""


def _pairs(text: str) -> list[tuple[str, Any]]:
    state: dict[str, Any] = json.loads(text)
    return list(state.items())


def _checkpoint(values: dict[str, Any]) -> Checkpoint:
    position = values["position"]
    if "batch" in position:  # version 1 counts micro-batches, even of a Dataset's samples
        position["read"], position["unit"] = position.pop("batch"), "micro-batches"
    order = position["order"]
    if order is not None:
        order = Order(RandomStates(**order["random"]), order["generators"])
    random = RandomStates(**position["random"])
    values["position"] = Position(**{**position, "random": random, "order": order})
    return _checked(Checkpoint(**values))


def _checked(found: Checkpoint) -> Checkpoint:
    """Return `found` with current names of settings, once every value is valid.

    A matching digest does not prove that ortlab wrote the file.
    """
    check_values({**vars(found), **vars(found.position)})
    settings = stored.current(found.settings)
    if "orttrainer" not in settings:  # its settings are no run's; see `ORTTrainer.load_checkpoint`
        stored.check(settings)
    return dataclasses.replace(found, settings=settings)


def _prefix(field: str) -> str:
    return "" if field == "model" else f"{_TRAINING}{field}."


def _digest(form: int, text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256(f"{form}\n{text}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}\n{tensor.dtype}{list(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
