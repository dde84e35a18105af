"""Tests of a checkpoint as a value and as a file: round trips, damaged files, failing disks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.checkpoint.nested_values import Packed
from ortlab.checkpoint.sharded import Shards
from tests.support.small_checkpoint import taken
from tests.support.waiting import HANGS_S

PLAIN: dict[str, Any] = {
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "fused": True}],
    "names": {1: "a number", "1": "a text", None: [math.inf, -math.inf, 1e-320, 2**80]},
    "empty": [(), [], {}],
}


class Odd(nn.Module):
    """Tied, transposed, shared, half-precision, boolean, integer and empty weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.transposed = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("both", torch.arange(6.0))
        self.register_buffer("part", self.both[:3])
        self.register_buffer("short", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("one", torch.tensor(0.25))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("hollow", torch.zeros(0, 4))
        self.norm = nn.BatchNorm1d(3)


def same(one: Any, other: Any) -> bool:
    """Return whether type and value are equal; tensors are compared bitwise."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Odd(), Odd()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.head(model.transposed.t()).square().sum().backward()
    optimizer.step()
    state = {**optimizer.state_dict(), "plain": PLAIN}
    kept = dataclasses.replace(taken(model.state_dict(), state), loss_scale={"scale": 65536.0})
    path = kept.save(tmp_path / "a.ckpt")
    drawn = torch.rand(1), np.random.rand(), random.random()
    read = Checkpoint.load(path)
    assert same(dict(model.state_dict()), dict(read.model))
    other.load_state_dict(read.model)
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(state, read.optimizer)
    assert read.loss_scale == {"scale": 65536.0}
    assert read.settings == kept.settings
    assert same(read.versions, kept.versions)
    assert read.versions["packages"]["torch"] == torch.__version__
    for name in ("step", "epoch", "read", "length", "unit", "evaluated", "engine_seed"):
        assert getattr(read.position, name) == getattr(kept.position, name)
    assert read.position.order is not None
    assert read.position.order.random.same_as(kept.position.random)
    generator = torch.Generator()
    generator.set_state(read.position.order.generators[0])
    assert generator.initial_seed() == 5
    read.position.random.give_back()
    assert (torch.rand(1), np.random.rand(), random.random()) == drawn


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    state = Odd().state_dict()
    for kept in (taken(state).copy(), Checkpoint.load(taken(state).save(tmp_path / "a.ckpt"))):
        assert kept.model["head.weight"] is kept.model["embedding.weight"]
        assert kept.model["empty"] is not kept.model["hollow"]
    written = safetensors.torch.load_file(tmp_path / "a.ckpt")
    assert "embedding.weight" in written
    assert "head.weight" not in written


def test_a_copy_has_memory_of_its_own() -> None:
    state = Odd().state_dict()
    copied = taken(state, {"state": {0: {"step": torch.tensor(1.0)}}}).copy()
    before = copied.model["both"].clone()
    state["both"] += 1
    assert torch.equal(copied.model["both"], before)


def test_any_reader_of_safetensors_finds_the_weights(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    path = taken(model.state_dict(), {"step": torch.tensor(3.0)}).save(tmp_path / "a.safetensors")
    read = safetensors.torch.load_file(path)
    other.load_state_dict({name: read[name] for name in other.state_dict()})
    assert torch.equal(model.weight, other.weight)
    assert all(name.startswith("training.") for name in set(read) - set(model.state_dict()))


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    """BatchNorm's version 2 has a counter; a module uses the version to read an older state."""
    state = Odd().state_dict()
    read = Checkpoint.load(taken(state).save(tmp_path / "a.ckpt")).model
    assert read._metadata == dict(state._metadata)  # type: ignore[attr-defined]
    assert read._metadata["norm"]["version"] == 2  # type: ignore[attr-defined]


def test_names_that_are_alike_are_kept_apart(tmp_path: Path) -> None:
    state = {1: torch.tensor(1), "1": torch.tensor(2), "a": {"b": torch.tensor(3)}, "a.b": 4}
    kept = taken({"training.optimizer.1": torch.tensor(0)}, state)
    read = Checkpoint.load(kept.save(tmp_path / "a.ckpt"))
    assert same(read.optimizer, state)
    assert same(read.model, kept.model)


def test_the_file_is_private_and_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = taken().save(str(tmp_path / "a.ckpt"))
        taken(step=9).save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert Checkpoint.load(path).position.step == 9


def test_file_and_folder_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        assert (tmp_path / "a.ckpt").exists() == synced[-1]  # renamed between the two

    monkeypatch.setattr(os, "fsync", fsync)
    taken().save(tmp_path / "a.ckpt")
    assert synced == [False, True]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, r"training\.optimizer\.a is a function, which a checkpoint cannot store"),
        (torch.zeros(2, 2).to_sparse(), r"a is not a dense tensor \(torch.sparse_coo\)"),
        (torch.zeros(2, device="meta"), r"a is not a dense tensor \(meta\)"),
        (torch.zeros(2, dtype=torch.complex128), "a is complex128"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, value: Any, message: str) -> None:
    path = taken().save(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        taken(optimizer={"a": value}).save(path)
    assert Checkpoint.load(path).position.step == 3


# --- damaged files


def refused(path: Path, *, because: str) -> None:
    with pytest.raises(ValueError, match=because) as raised:
        Checkpoint.load(path)
    assert str(path) in str(raised.value)
    assert str(raised.value).count("\n") <= 1


def test_any_byte_that_changes_is_noticed(tmp_path: Path) -> None:
    path = taken(Odd().state_dict(), {"plain": PLAIN}).save(tmp_path / "a.ckpt")
    whole = path.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    names = whole[8 : 8 + header]
    places = [0, 8, 8 + names.index(b'"lr'), 8 + names.index(b"sha256") + 12]
    places += [8 + names.index(b"dtype") + 9, 8 + header, len(whole) - 1]
    places += list(range(8, len(whole), len(whole) // 60))
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1
        path.write_bytes(data)
        refused(path, because="is damaged|is not a checkpoint|newer|not a checkpoint of a run")


@pytest.mark.parametrize("length", [0, 5, 8, 200, -1])
def test_a_part_of_a_file(tmp_path: Path, length: int) -> None:
    path = taken().save(tmp_path / "a.ckpt")
    path.write_bytes(path.read_bytes()[:length])
    refused(path, because="is not a checkpoint, or is incomplete")


def test_files_of_others(tmp_path: Path) -> None:
    refused(tmp_path / "none.ckpt", because=r"there is no checkpoint at .*; run\.checkpoint")
    refused(tmp_path, because="is a folder; use the checkpoint's file")
    final = tmp_path / "run-1" / "checkpoints" / "final.safetensors"
    final.parent.mkdir(parents=True)
    taken().save(final)
    refused(tmp_path / "run-1", because=f"such as {final}")
    weights = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, weights)
    refused(
        weights, because="contains tensors, but is not a checkpoint of a run; load the weights with"
    )
    text = tmp_path / "notes.txt"
    text.write_text("not a checkpoint" * 100)
    refused(text, because="is not a checkpoint")
    refused(Path("/dev/null"), because="/dev/null is not a file")


def test_a_newer_form_says_to_update(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    metadata = {"ortlab": "3", "state": "{}", "sha256": ""}
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path, metadata)
    refused(
        path, because=r"has format version 3, .* reads versions up to 2; .* pip install -U ortlab"
    )


class Payload:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    path = tmp_path / "a.ckpt"
    path.write_bytes(pickle.dumps(payload))
    refused(path, because="is not a checkpoint")
    torch.save({"model": payload}, path)
    refused(path, because="is not a checkpoint")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [{}, [], {"model": {"dict": [["w", {"tensor": "none"}]]}}, 5, {"model": {"float": 10**400}}],
)
def test_a_form_that_fits_its_digest_alone(tmp_path: Path, state: Any) -> None:
    from ortlab.checkpoint.checkpoint import _digest

    path, text = tmp_path / "a.ckpt", json.dumps(state)
    tensors = {"weight": torch.zeros(2)}
    metadata = {"ortlab": "1", "state": text, "sha256": _digest(1, text, tensors)}
    safetensors.torch.save_file(tensors, path, metadata)
    refused(path, because="is not a checkpoint of ortlab")


@pytest.mark.parametrize(
    "changes",
    [
        *({"step": value} for value in ("x", 2.0, True, None, 2**70, -5)),
        *({"read": value} for value in ("x", -7)),
        *({"epoch": value} for value in ("x", -1)),
        *({"length": value} for value in ("x", -1)),
        *({"evaluated": value} for value in ([], -2)),
        *({"engine_seed": value} for value in ({}, -1, 2**70)),
        *({"unit": value} for value in ("steps", 3, [])),
        *({"optimizer": value} for value in (3, None, [])),
        *({"model": value} for value in (3, [1])),
        *({"settings": value} for value in ([1], "x")),
        *({"versions": 3}, {"loss_scale": 3}),
    ],
)
def test_values_that_no_run_has_are_refused_though_the_digest_fits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    kept = taken()
    of_position = {name for name in changes if hasattr(kept.position, name)}
    position = dataclasses.replace(kept.position, **{name: changes[name] for name in of_position})
    others = {name: changes[name] for name in changes.keys() - of_position}
    path = dataclasses.replace(kept, position=position, **others).save(tmp_path / "a.ckpt")
    refused(path, because=f"is not a checkpoint of ortlab: .*{min(changes)} is ")


# --- a full disk, a concurrent reader, a killed process

BIG = "{'weight': torch.full((100_000,), float(step))}"
SAVING = f"""
import resource, sys, torch
from tests.support.small_checkpoint import taken
path, full_after = sys.argv[1], int(sys.argv[2])
step = 1
while True:
    try:
        taken({BIG}, step=step).save(path)
    except RuntimeError as error:
        sys.exit(str(error))
    print(step, flush=True)
    if step == full_after:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    step += 1
"""


def saving(path: Path, full_after: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SAVING, str(path), str(full_after)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def is_whole(read: Checkpoint) -> bool:
    return read.model["weight"].tolist() == [float(read.position.step)] * 100_000


def test_a_full_disk_leaves_the_older_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with saving(path, full_after=1) as process:
        said, error = process.communicate(timeout=HANGS_S)
    assert said == "1\n"
    assert f"cannot be saved to {path}" in error
    assert "too large" in error.lower()
    read = Checkpoint.load(path)
    assert read.position.step == 1
    assert is_whole(read)
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_is_killed_leaves_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with saving(path, full_after=0) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        for _ in range(50):
            assert is_whole(Checkpoint.load(path))
        process.send_signal(signal.SIGKILL)
    assert is_whole(Checkpoint.load(path))


def test_a_reader_always_finds_a_whole_one(tmp_path: Path) -> None:
    """Meanwhile, another thread replaces the file, and a third one writes to the same name."""
    path = tmp_path / "a.ckpt"
    taken({"weight": torch.zeros(100_000)}, step=0).save(path)
    over, failed = threading.Event(), []

    def replace() -> None:
        step = 0
        while not over.is_set():
            step += 1
            try:
                taken({"weight": torch.full((100_000,), float(step))}, step=step).save(path)
            except (OSError, RuntimeError) as error:
                failed.append(error)

    threads = [threading.Thread(target=replace) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = set()
    deadline = time.monotonic() + HANGS_S
    while len(seen) < 10 and time.monotonic() < deadline:
        read = Checkpoint.load(path)
        seen.add(read.position.step)
        assert is_whole(read)
    over.set()
    for thread in threads:
        thread.join()
    assert len(seen) == 10
    assert not failed
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is opened twice by safetensors: the header may be of one, the tensors of another."""
    path, opened = taken(step=1).save(tmp_path / "a.ckpt"), safetensors.safe_open
    newer = taken({"weight": torch.zeros(2)}, step=2)

    def replaced(name: Path, framework: str) -> Any:
        with opened(name, framework) as file:
            metadata = file.metadata()
        monkeypatch.undo()
        between = opened(newer.save(path), framework)
        both = MagicMock(
            metadata=lambda: metadata, keys=between.keys, get_tensor=between.get_tensor
        )
        both.__enter__.return_value = both
        return both

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    read = Checkpoint.load(path)
    assert read.position.step == 2
    assert read.model["weight"].tolist() == [0, 0]


def test_a_file_that_is_replaced_by_a_shorter_one_before_it_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is mapped by torch with the size that safetensors read before."""
    path = taken({"weight": torch.ones(1000)}, step=1).save(tmp_path / "a.ckpt")
    mapped, sizes = torch.UntypedStorage.from_file, []

    def replaced(*of: Any, **options: Any) -> Any:
        sizes.append(path.stat().st_size)
        if len(sizes) == 1:
            taken({"weight": torch.zeros(2)}, step=2).save(path)
        return mapped(*of, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replaced)
    read = Checkpoint.load(path)
    assert read.position.step == 2
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("opens", [1, 2])
def test_a_folder_that_goes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: int
) -> None:
    """The folder vanishes before its state is opened, or before a shard is."""
    packed = Packed()
    outline = {"model": packed.pack({"weight": torch.ones(3)}, "")}
    made = Shards(Shards.place(tmp_path), outline)
    safetensors.torch.save_file(packed.tensors, made.folder / "shard-00001.safetensors")
    path = dataclasses.replace(taken(), model={}, shards=made).save(tmp_path / "last-3")
    assert Checkpoint.load(path).model["weight"].tolist() == [1, 1, 1]
    opened, seen = safetensors.safe_open, []

    def trimmed(name: Path, framework: str) -> Any:
        seen.append(name)
        if len(seen) == opens:
            shutil.rmtree(path)
        return opened(name, framework)

    monkeypatch.setattr(safetensors, "safe_open", trimmed)
    refused(path, because="there is no checkpoint at")
