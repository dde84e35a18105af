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

import dataclasses
import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors
import safetensors.torch
import torch

from ortlab.checkpoint import sharded
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
_FEW = 3
_LEAST = {"step": 0, "epoch": 0, "read": 0, "length": 0, "evaluated": -1, "engine_seed": 0}
"""Integer fields of a `Position` and the smallest value of each."""
_MOST = 2**53
"""Upper bound of these integers: float64, which the charts use, is exact up to here."""
_FORGED = AttributeError, KeyError, OverflowError, RecursionError, TypeError
"""Exceptions from reading a state whose digest is right, but which `save` did not write."""


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

        changed = {
            name: rebuilt(getattr(self, name), own) for name in ("model", "optimizer", "loss_scale")
        }
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
                rest = dataclasses.replace(self, model={}, optimizer={}, loss_scale=None)
                rest._save_file(beside / _STATE, parts)
        except OSError as error:
            raise _not_kept(path, error) from error
        return path

    def _save_file(self, path: Path, parts: Mapping[str, Any] | None = None) -> Path:
        packed = Packed()
        state = {
            field.name: packed.pack(getattr(self, field.name), _prefix(field.name))
            for field in dataclasses.fields(self)
            if field.name != "shards"
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
    try:
        sharded.check(folder, parts["digests"], beside=_STATE)
        state = sharded.read(folder, parts["outline"])
        return _checked(dataclasses.replace(found, **state))
    except _FORGED as error:
        raise ValueError(f"{folder} is not a checkpoint of ortlab: {error!r}") from error
    except (OSError, RuntimeError) as error:  # torch raises it for a file that it cannot map
        raise ValueError(f"{folder} cannot be read: {error}") from error


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
            f"{path} is not a checkpoint, or is incomplete ({error}); use another one, such as "
            "those in the run's folder"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if _digest(form, text, tensors) != digest:
        raise ValueError(
            f"{path} is damaged: its SHA-256 does not match its content; use another checkpoint, "
            "such as those in the run's folder"
        )
    try:
        values = {name: unpacked(value, tensors) for name, value in _pairs(text)}
        parts = values.pop("shards", {})
        return _checkpoint(values), parts
    except (*_FORGED, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint of ortlab: {error!r}") from error


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
    """Return `found` with current names of settings, once every part is valid.

    Parts of another type or value raise TypeError or ValueError. A matching digest does not prove
    that ortlab wrote the file.
    """
    for name in ("model", "optimizer", "settings", "versions", "loss_scale"):
        part = getattr(found, name)
        if not isinstance(part, Mapping) and not (part is None and name == "loss_scale"):
            raise TypeError(f"{name} is {type(part).__name__}")
    for name, least in _LEAST.items():
        number = getattr(found.position, name)
        if number is None and name == "length":
            continue
        if type(number) is not int:
            raise TypeError(f"{name} is {type(number).__name__}")
        if not least <= number < _MOST:
            raise ValueError(f"{name} is {number}")
    if found.position.unit not in get_args(Unit):
        raise ValueError(f"unit is {reprlib.repr(found.position.unit)}")
    return dataclasses.replace(found, settings=stored.current(found.settings))


def _prefix(field: str) -> str:
    return "" if field == "model" else f"{_TRAINING}{field}."


def _digest(form: int, text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256(f"{form}\n{text}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}\n{tensor.dtype}{list(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_model(kept: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that a checkpoint's state dictionary matches the model's.

    Args:
        kept: State dictionary in the checkpoint.
        own: State dictionary of the model.

    Raises:
        ValueError: Names, types or shapes differ; the message names the first ones.
    """
    found = [f"{name} is not in the model" for name in kept if name not in own]
    found += [f"{name} is not in the checkpoint" for name in own if name not in kept]
    for name in kept:
        there, here = _form(kept[name]), _form(own.get(name))
        if name in own and there != here:
            found.append(f"{name} is {there} in the checkpoint and {here} in the model")
    if found:
        more = f", and {len(found) - _FEW} more" if len(found) > _FEW else ""
        raise ValueError(
            f"the checkpoint does not match the model: {', '.join(found[:_FEW])}{more}; create the "
            "model as it was when the checkpoint was saved"
        )


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def check_optimizer(
    kept: Mapping[str, Any], own: Mapping[str, Any], parameters: list[tuple[str, torch.Tensor]]
) -> None:
    """Check that a checkpoint's optimizer state matches the optimizer's.

    Args:
        kept: State dictionary of the optimizer in the checkpoint.
        own: State dictionary of the optimizer.
        parameters: Names and parameters of the optimizer, in its order.

    Raises:
        ValueError: Parameter groups or shapes differ; the message names the difference.
    """
    states, groups = kept.get("state"), kept.get("param_groups")
    if not (
        isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
        and isinstance(groups, list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    ):
        raise ValueError(
            "the checkpoint's optimizer state is not in torch's format; use another checkpoint"
        )
    there, here = (
        [len(group["params"]) for group in state["param_groups"]] for state in (kept, own)
    )
    if there != here:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {there} parameters, and this one of {here}; "
            "train and freeze the same parameters as the run of the checkpoint"
        )
    for number, state in states.items():
        if number not in range(len(parameters)):
            raise ValueError(
                f"the checkpoint's optimizer has state for parameter {number!r}, but there are "
                f"only {len(parameters)} parameters; use another checkpoint"
            )
        check_kept(state, *parameters[number])


def check_kept(state: Mapping[str, Any], name: str, parameter: torch.Tensor) -> None:
    """Check that the optimizer state of one parameter matches it.

    Args:
        state: State of the parameter, by entry.
        name: Name of the parameter.
        parameter: The parameter.

    Raises:
        ValueError: The shape of an entry differs from the parameter's.
    """
    for entry, value in state.items():
        shaped = isinstance(value, torch.Tensor) and value.dim() > 0
        if shaped and value.shape != parameter.shape:
            raise ValueError(
                f"the checkpoint's optimizer has {entry} of shape {list(value.shape)} for {name}, "
                f"whose shape is {list(parameter.shape)}; use a checkpoint of this model"
            )
