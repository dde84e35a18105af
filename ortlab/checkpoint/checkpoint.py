"""A run between two steps: its exact state as a value, in memory and as one file.

The file is a safetensors file, so that any reader of those finds the weights under their own names;
all other tensors have names that begin with ``training.``. Its metadata, which are strings, hold

    ortlab   the number of this form
    state    JSON: everything that is no tensor, with a reference in the place of each that is one
    sha256   of the form, of the JSON, and of every tensor's name, type, shape and bytes

One file is replaced at once, so that a reader never meets half of one checkpoint and half of
another. Nothing in it is code, nothing is unpickled.

A run on workers writes a folder, which is complete or not there: ``state.safetensors`` is such a
file, without model and optimizer, and names the files beside it in which every rank has written its
shard of those, with their SHA-256 (see `ortlab.checkpoint.sharded`).
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
from ortlab.checkpoint.serialization import Packed, memory_of, rebuilt, unpacked
from ortlab.utils.environment import environment
from ortlab.utils.files import folder_beside, write_beside
from ortlab.utils.rng import RandomStates

FORM = 2
Unit = Literal["samples", "micro-batches"]
"""What the place in an epoch is counted in."""
_TRAINING = "training."
_STATE = "state.safetensors"
_FEW = 3
_LEAST = {"step": 0, "epoch": 0, "read": 0, "length": 0, "evaluated": -1, "engine_seed": 0}
"""The whole numbers of a `Position`, and what each begins with."""
_MOST = 2**53
"""What they stay below: the charts' numbers are whole up to there."""
_FORGED = AttributeError, KeyError, OverflowError, RecursionError, TypeError
"""What reading the state raises where its digest fits and it was not made by `save`."""


@dataclass(frozen=True)
class Order:
    """What the order of an epoch's data is drawn from, as it was when the epoch began.

    ``generators`` are the states of those that the user's own loader draws from.
    """

    random: RandomStates
    generators: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Position:
    """Where a run is: `step` optimizer steps done, `read` of the `length` that epoch `epoch` has.

    Both count in ``unit``: samples, in micro-batches of whatever size, or micro-batches where the
    data makes its own. ``length`` is None where only reading tells. ``evaluated`` is the step of
    the last evaluation, -1 before the first. ``random`` is what will be drawn next; ``order`` is
    None between epochs. ``engine_seed`` is what the engine's own generators, whose states cannot be
    read, were restarted with here.
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
    """All that a run needs to go on as if nothing had been.

    ``model`` and ``optimizer`` are state dictionaries in torch's form; ``loss_scale`` is what a
    dynamic loss scale has learnt, None without one. ``settings`` are the run's by name,
    ``versions`` is what it ran on (see `ortlab.utils.environment.environment`). ``shards`` is
    where the ranks of several processes have written all of the state, None of one process.
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
        """The same state in memory of its own, on the CPU; tied tensors stay tied."""
        if self.shards is not None:
            return self  # nobody else writes to it
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
        """Writes the file, of mode 0600, beside `path`, and lets it take its place when it is safe.

        That of several ranks is a folder with their shards, unless the path ends with .safetensors.
        Tensors that share their memory (tied weights) are written once. ValueError for what is no
        plain value and no dense tensor; RuntimeError when the disk does not take it: what was at
        `path` is whole then.
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
            "format": "pt",  # transformers reads no file without it
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
        """What `save` wrote; ValueError says what is wrong with the file and what to do."""
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
                # safetensors opens a file twice, and another one may have taken its place between,
                # or nothing.
                if _is_still(path, before):
                    raise


def _not_kept(path: Path, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"the checkpoint cannot be kept in {path}: {error}; the model still has its weights, and "
        "an older checkpoint of that name is whole"
    )


def _is_still(path: Path, before: os.stat_result) -> bool:
    try:
        now = path.stat()
    except OSError:  # a run in another kernel has trimmed it
        return False
    return (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def _read_folder(folder: Path) -> Checkpoint:
    found, parts = _read_file(folder / _STATE)
    try:
        sharded.check(folder, parts["digests"], beside=_STATE)
        state = sharded.read(folder, parts["outline"])
        return _checked(dataclasses.replace(found, **state))
    except _FORGED as error:
        raise ValueError(f"{folder} is no checkpoint of ortlab's: {error!r}") from error
    except (OSError, RuntimeError) as error:  # torch's own words for a file that it cannot map
        raise ValueError(f"{folder} cannot be read: {error}") from error


def _read(path: Path) -> Checkpoint:
    found, parts = _read_file(path)
    if parts:
        raise ValueError(f"{path} is a part of a checkpoint; give its folder, {path.parent}")
    return found


def _read_file(path: Path) -> tuple[Checkpoint, Mapping[str, Any]]:
    """What is in a file, and of what other files it is a part."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the checkpoint's file{_file_in(path)}")
    if not path.is_file():  # a pipe would be waited for
        raise ValueError(f"{path} is no file; take another checkpoint")
    try:
        with safetensors.safe_open(path, "pt") as file:
            form, text, digest = _parts(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # torch maps the file by the size that safetensors found, and another may have come between.
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no checkpoint, or only a part of one ({error}); take another, as those in "
            "the run's folder"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if _digest(form, text, tensors) != digest:
        raise ValueError(
            f"{path} is damaged: it is not what was written (its SHA-256 is another); take another "
            "checkpoint, as those in the run's folder"
        )
    try:
        values = {name: unpacked(value, tensors) for name, value in _pairs(text)}
        parts = values.pop("shards", {})
        return _checkpoint(values), parts
    except (*_FORGED, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of ortlab's: {error!r}") from error


def _parts(path: Path, metadata: Mapping[str, str]) -> tuple[int, str, str]:
    """The form, the JSON and the digest of a file; ValueError where it is of an unknown form."""
    form = metadata.get("ortlab", "")
    if not form.isdecimal() or "state" not in metadata:
        raise ValueError(
            f"{path} holds tensors, but is no checkpoint of a run; load weights alone with "
            "safetensors.torch.load_file, and train without resume_from"
        )
    if int(form) > FORM:
        raise ValueError(
            f"{path} is of form {form}, and this ortlab knows {FORM}: it was written by a newer "
            "one; update with pip install -U ortlab"
        )
    return int(form), metadata["state"], metadata.get("sha256", "")


def _file_in(folder: Path) -> str:
    final = folder / "checkpoints" / "final.safetensors"
    return f", as {final}" if final.exists() else ""


def _pairs(text: str) -> list[tuple[str, Any]]:
    state: dict[str, Any] = json.loads(text)
    return list(state.items())


def _checkpoint(values: dict[str, Any]) -> Checkpoint:
    position = values["position"]
    if "batch" in position:  # form 1 counts micro-batches, of a Dataset's samples too
        position["read"], position["unit"] = position.pop("batch"), "micro-batches"
    order = position["order"]
    if order is not None:
        order = Order(RandomStates(**order["random"]), order["generators"])
    random = RandomStates(**position["random"])
    values["position"] = Position(**{**position, "random": random, "order": order})
    return _checked(Checkpoint(**values))


def _checked(found: Checkpoint) -> Checkpoint:
    """`found`, where every part is of the type and in the range that a run gives it.

    TypeError and ValueError where not: a digest that fits is no word of who made the file.
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
    return found


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
    """ValueError names where the state dictionary `kept` does not fit the model's `own`."""
    found = [f"{name} is not in the model" for name in kept if name not in own]
    found += [f"{name} is not in the checkpoint" for name in own if name not in kept]
    for name in kept:
        there, here = _form(kept[name]), _form(own.get(name))
        if name in own and there != here:
            found.append(f"{name} is {there} in the checkpoint and {here} in the model")
    if found:
        more = f", and {len(found) - _FEW} more" if len(found) > _FEW else ""
        raise ValueError(
            f"the checkpoint is of another model: {', '.join(found[:_FEW])}{more}; make the model "
            "as it was made for the checkpoint"
        )


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def check_optimizer(
    kept: Mapping[str, Any], own: Mapping[str, Any], parameters: list[tuple[str, torch.Tensor]]
) -> None:
    """ValueError names where the optimizer's state `kept` does not fit `own`.

    `parameters` are the optimizer's, with their names, in its order.
    """
    states, groups = kept.get("state"), kept.get("param_groups")
    if not (
        isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
        and isinstance(groups, list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups)
    ):
        raise ValueError(
            "the checkpoint's optimizer has another form than torch's; take another checkpoint"
        )
    there, here = (
        [len(group["params"]) for group in state["param_groups"]] for state in (kept, own)
    )
    if there != here:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {there} parameters and this one of {here}; "
            "train and freeze the parameters that were trained and frozen then"
        )
    for number, state in states.items():
        if number not in range(len(parameters)):
            raise ValueError(
                f"the checkpoint's optimizer has a state of parameter {number!r}, and there are "
                f"{len(parameters)}; take another checkpoint"
            )
        check_kept(state, *parameters[number])


def check_kept(state: Mapping[str, Any], name: str, parameter: torch.Tensor) -> None:
    """ValueError where an optimizer kept `state` of another tensor than `parameter`."""
    for entry, value in state.items():
        shaped = isinstance(value, torch.Tensor) and value.dim() > 0
        if shaped and value.shape != parameter.shape:
            raise ValueError(
                f"the checkpoint's optimizer has {entry} of {list(value.shape)} for {name}, "
                f"which is {list(parameter.shape)}; it is of another model"
            )
