"""Tests that a forged or damaged checkpoint is refused before anything in the process changes.

A forged file has the form and the digest of a checkpoint, since anybody can compute a digest, but a
content that no run has.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint, _digest
from ortlab.checkpoint.nested_values import Packed
from ortlab.checkpoint.sharded import digest
from ortlab.engines.torch.stepper import Eager
from ortlab.metrics.recorder import Recorder
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, trainer
from ortlab.training.control import Control
from ortlab.utils.rng import RandomStates
from tests.support import past_runs
from tests.support.resuming import examples, network
from tests.support.waiting import HANGS_S

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = 8
"""Step of the checkpoints: the second of the second epoch, of six steps."""


def loader(data: Any = None, *, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(11)
    return DataLoader(data or examples(22), batch_size=4, shuffle=shuffle, generator=generator)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from examples(22)


class Longer(Stream):
    """More samples than its length says, as where each of several workers yields all of them."""

    def __len__(self) -> int:
        return 12


DATA: dict[str, Callable[[], Any]] = {
    "loader": lambda: loader(shuffle=True),
    "samples": lambda: examples(22),
    "list": lambda: list(loader()),
    "stream": lambda: loader(Stream()),
    "longer": lambda: loader(Longer()),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "loader": {"precision": "fp16"},
    "samples": {"optimizer": "sgd", "batch_size": 4},
    "list": {"optimizer": "lamb"},
    "stream": {"lr_scheduler_type": "constant"},
    "longer": {},
}


@pytest.fixture(scope="module")
def real() -> dict[str, Checkpoint]:
    """Return checkpoints of runs in memory of their own, by the data of the run."""
    return {name: taken(name) for name in DATA}


def taken(name: str) -> Checkpoint:
    chosen = {"engine": "eager", "device": "cpu", "num_train_epochs": 3, "loss": "cross_entropy"}
    settings = FinetuneSettings.of({**chosen, **SETTINGS[name]})
    stepper = Eager().prepare(network(), functional.cross_entropy, settings)
    data, recorder = data_loading.batches(DATA[name](), settings), Recorder()
    course = trainer.Trainer(stepper, data, settings, control=Control(), recorder=recorder)
    for number, _ in enumerate(course.steps(), 1):
        if number == STEP:
            break
    found = course.checkpoint()
    recorder.close()
    return found


# --- forging


def put(value: Any, path: list[str], new: Any) -> Any:
    """Return `value` with `new`, or with what it returns for the former value, at `path`."""
    if not path:
        return new(value) if callable(new) else new
    name, rest = path[0], path[1:]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: put(getattr(value, name), rest, new)})
    place = int(name) if name.isdecimal() else name
    if not isinstance(value, Mapping):
        items = [put(item, rest, new) if at == place else item for at, item in enumerate(value)]
        return type(value)(items)
    changed: Any = copy.copy(value)
    changed[place] = put(value.get(place), rest, new)
    return changed


def without(name: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        changed = copy.copy(value)
        del changed[name]
        return changed

    return change


def of_torch(*, left: int = 1, place: int = 0, word: int | None = None) -> torch.Tensor:
    """Return a state of torch's generator with other counters, or with all words the same."""
    state = bytearray(torch.Generator().get_state().numpy().tobytes())
    struct.pack_into("=iiQ", state, 8, left, 1, place)
    if word is not None:
        struct.pack_into("=624Q", state, 24, *[word] * 624)
    return torch.frombuffer(state, dtype=torch.uint8)


TOO_FAR = of_torch(left=624, place=624)
"""State that torch accepts, and with which it then reads past the end of its table."""
CODE = "__import__('os').system('true')"
FIRST = "optimizer.state.0"
GROUP = "optimizer.param_groups.0"
FORGED: dict[str, tuple[str, str, Any]] = {
    # Random states.
    "python, text": ("loader", "position.random.python", "x"),
    "python, few words": ("loader", "position.random.python.1", lambda words: words[:5]),
    "python, place": ("loader", "position.random.python.1.624", 700),
    "python, zeros": ("loader", "position.random.python.1", (0,) * 624 + (624,)),
    "python, long words": ("loader", "position.random.python.1.5", 2**40),
    "python, version": ("loader", "position.random.python.0", 2),
    "python, normal": ("loader", "position.random.python.2", "x"),
    "numpy, place": ("loader", "position.random.array.2", 10**6),
    "numpy, negative place": ("loader", "position.random.array.2", -5),
    "numpy, few words": ("loader", "position.random.array.1", lambda words: words[:5]),
    "numpy, other words": ("loader", "position.random.array.1", lambda w: w.astype(np.float64)),
    "numpy, zeros": ("loader", "position.random.array.1", np.zeros_like),
    "numpy, kind": ("loader", "position.random.array.0", "PCG64"),
    "numpy, normal": ("loader", "position.random.array.4", math.nan),
    "numpy, part": ("loader", "position.random.array", lambda state: state[:3]),
    "torch, numbers": ("loader", "position.random.host", lambda state: state.int()),
    "torch, few bytes": ("loader", "position.random.host", lambda state: state[:100]),
    "torch, none": ("loader", "position.random.host", None),
    "torch, empty": ("loader", "position.random.host", torch.zeros_like),
    "torch, place": ("loader", "position.random.host", TOO_FAR),
    "torch, zeros": ("loader", "position.random.host", of_torch(word=0)),
    "cuda, text": ("loader", "position.random.devices", ["x"]),
    "cuda, few bytes": ("loader", "position.random.devices", [torch.zeros(5, dtype=torch.uint8)]),
    "cuda, offset": ("loader", "position.random.devices", [torch.ones(16, dtype=torch.uint8)]),
    "cuda, none": ("loader", "position.random.devices", None),
    "order, place": ("loader", "position.order.random.array.2", 10**6),
    "order, few bytes": ("loader", "position.order.random.host", lambda state: state[:100]),
    "order, text": ("loader", "position.order", "x"),
    "order, none": ("loader", "position.order", None),
    "generators, none": ("loader", "position.order.generators", []),
    "generators, text": ("loader", "position.order.generators", ["x"]),
    "generators, few bytes": ("loader", "position.order.generators.0", lambda state: state[:100]),
    "generators, place": ("loader", "position.order.generators.0", TOO_FAR),
    "generators, zeros": ("loader", "position.order.generators.0", of_torch(word=0)),
    # The position.
    "read, past the end": ("loader", "position.read", 7),
    "read, past the samples": ("samples", "position.read", 23),
    "read, far": ("loader", "position.read", 2**52),
    "read, past a list": ("list", "position.read", 7),
    "read, bool": ("loader", "position.read", True),
    "step, far": ("loader", "position.step", 10**6),
    "step, more than read": ("samples", "position.step", 22 + STEP + 1),
    "step, bool": ("loader", "position.step", True),
    "step, number": ("loader", "position.step", float(STEP)),
    "step, negative": ("loader", "position.step", -1),
    "epoch, far": ("loader", "position.epoch", 10**6),
    "epoch, first": ("loader", "position.epoch", 0),
    "epoch, negative": ("loader", "position.epoch", -1),
    "length": ("loader", "position.length", 7),
    "length, none": ("loader", "position.length", None),
    "unit": ("loader", "position.unit", "samples"),
    "unit, unknown": ("loader", "position.unit", "steps"),
    "evaluated": ("loader", "position.evaluated", STEP + 1),
    "engine seed": ("loader", "position.engine_seed", 2**31),
    "engine seed, negative": ("loader", "position.engine_seed", -1),
    # Settings.
    "settings, list": ("loader", "settings", [1]),
    "learning rate": ("loader", "settings.learning_rate", math.nan),
    "batch size, text": ("loader", "settings.batch_size", "x"),
    "batch size, negative": ("loader", "settings.batch_size", -4),
    "engine": ("loader", "settings.engine", CODE),
    "precision": ("loader", "settings.precision", "fp1"),
    "seed": ("loader", "settings.seed", -1),
    "seed, number": ("loader", "settings.seed", 0.5),
    "optimizer": ("loader", "settings.optimizer", "sgd"),
    "loss": ("loader", "settings.loss", ["cross_entropy"]),
    "a file, tensor": ("loader", "settings.save_onnx", torch.ones(2)),
    # The loss scale.
    "scale": ("loader", "loss_scale.scale", -1.0),
    "scale, nan": ("loader", "loss_scale.scale", math.nan),
    "scale, too large": ("loader", "loss_scale.scale", 1e300),
    "scale, text": ("loader", "loss_scale.scale", "x"),
    "scale, missing": ("loader", "loss_scale", without("scale")),
    "scale, empty": ("loader", "loss_scale", {}),
    "growth factor": ("loader", "loss_scale.growth_factor", 0.5),
    "backoff": ("loader", "loss_scale.backoff_factor", 2.0),
    "growth interval": ("loader", "loss_scale.growth_interval", 0),
    "growth tracker": ("loader", "loss_scale._growth_tracker", "x"),
    # The optimizer's state.
    "moment, integers": ("loader", f"{FIRST}.exp_avg", lambda value: value.int()),
    "moment, complex": ("loader", f"{FIRST}.exp_avg", lambda value: value.to(torch.complex64)),
    "moment, double": ("loader", f"{FIRST}.exp_avg", lambda value: value.double()),
    "moment, shape": ("loader", f"{FIRST}.exp_avg", lambda value: value[:2]),
    "moment, one number": ("loader", f"{FIRST}.exp_avg", torch.tensor(0.0)),
    "moment, text": ("loader", f"{FIRST}.exp_avg", "x"),
    "moment, negative": ("loader", f"{FIRST}.exp_avg_sq", lambda value: -value - 1),
    "moment, missing": ("loader", FIRST, without("exp_avg_sq")),
    "moment, more": ("loader", f"{FIRST}.{CODE.replace('.', ' ')}", torch.ones(16, 4)),
    "momentum, missing": ("samples", FIRST, lambda state: {"exp_avg": state["momentum_buffer"]}),
    "momentum, none": ("samples", f"{FIRST}.momentum_buffer", None),
    "steps, negative": ("loader", f"{FIRST}.step", torch.tensor(-1.0)),
    "steps, nan": ("loader", f"{FIRST}.step", torch.tensor(math.nan)),
    "steps, infinite": ("loader", f"{FIRST}.step", torch.tensor(math.inf)),
    "steps, several": ("loader", f"{FIRST}.step", torch.ones(2)),
    "steps, integer": ("loader", f"{FIRST}.step", 3),
    "state, list": ("loader", "optimizer.state", [1]),
    "state, of nothing": ("loader", "optimizer.state.99", {}),
    "state, by name": ("loader", "optimizer.state", lambda states: {"0": states[0]}),
    "groups, fewer": ("loader", "optimizer.param_groups", lambda groups: groups[:1]),
    "groups, numbers": ("loader", f"{GROUP}.params", lambda numbers: numbers[::-1]),
    "groups, text": ("loader", f"{GROUP}.params", "01"),
    "rate, text": ("loader", f"{GROUP}.lr", "x"),
    "rate, nan": ("loader", f"{GROUP}.lr", math.nan),
    "rate, missing": ("loader", GROUP, without("lr")),
    "betas, text": ("loader", f"{GROUP}.betas", "xx"),
    "betas, large": ("loader", f"{GROUP}.betas", (0.9, 2.0)),
    "option, code": ("loader", f"{GROUP}.{CODE.replace('.', ' ')}", True),
    "option, nested": ("loader", f"{GROUP}.foreach", {"a": [1]}),
    "optimizer, list": ("loader", "optimizer", [1]),
    "optimizer, more": ("loader", "optimizer.defaults", {}),
    # The model, and the rest.
    "weight, missing": ("loader", "model", without("0.weight")),
    "weight, more": ("loader", "model.more", torch.ones(2)),
    "weight, number": ("loader", "model.5", torch.ones(2)),
    "weight, shape": ("loader", "model", lambda m: put(m, ["0.weight"], m["0.weight"].t())),
    "weight, double": ("loader", "model", lambda m: put(m, ["0.weight"], m["0.weight"].double())),
    "weight, list": ("loader", "model", lambda m: put(m, ["0.weight"], [1.0])),
    "model, list": ("loader", "model", [1]),
    "module versions, text": ("loader", "model", lambda model: versioned(model, "x")),
    "module versions, list": ("loader", "model", lambda model: versioned(model, {"1": [2]})),
    "module version, text": (
        "loader",
        "model",
        lambda model: versioned(model, {"": {"version": 1}, "1": {"version": "x"}}),
    ),
    "software": ("loader", "versions", 3),
}


def versioned(model: Mapping[str, Any], versions: Any) -> Any:
    changed: Any = copy.copy(model)
    changed._metadata = versions
    return changed


def fingerprint(model: nn.Module, data: Any) -> str:
    """Hash the weights, the modes, the global random states and those of the loader."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    found.update(str([module.training for module in model.modules()]).encode())
    now = RandomStates.now()
    found.update(str((now.python, now.array[2:])).encode() + now.array[1].tobytes())
    found.update(now.host.numpy().tobytes())
    for generator in data_loading._generators(data):
        found.update(generator.get_state().numpy().tobytes())
    return found.hexdigest()


def check_refused(path: Path, home: Path, data: Any) -> None:
    """Check that `finetune` refuses a checkpoint in a line that says what to do, without a run."""
    model = network()
    before = fingerprint(model, data)
    with pytest.raises(ValueError, match=r"; (use|pass|create|train|leave) ") as raised:
        ortlab.finetune(model, data, resume_from=path, hold=False)
    assert fingerprint(model, data) == before
    assert not (home / "runs").exists()
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


def forged(real: dict[str, Checkpoint], name: str) -> tuple[Checkpoint, Any]:
    """Return a forged checkpoint, and data of the run that it claims to be of."""
    of, place, new = FORGED[name]
    return put(real[of], place.split("."), new), DATA[of]()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_value(real: dict[str, Checkpoint], home: Path, name: str) -> None:
    kept, data = forged(real, name)
    check_refused(kept.save(home / "forged.safetensors"), home, data)


FEW = ["torch, place", "read, far", "moment, shape", "scale, nan"]


@pytest.mark.parametrize("name", FEW)
def test_a_forged_value_of_a_run(real: dict[str, Checkpoint], home: Path, name: str) -> None:
    kept, data = forged(real, name)
    folder = past_runs.kept(home / "runs", state="stopped")
    path = folder / "checkpoints" / "final.safetensors"
    kept.save(path)
    model = network()
    before = fingerprint(model, data)
    with pytest.raises(ValueError, match=r"no checkpoint of run-1 is complete|; use a"):
        ortlab.resume(folder.name, model, data)
    assert fingerprint(model, data) == before
    assert list((home / "runs").glob("run-*")) == [folder]


def test_data_that_ends_before_a_forged_position(real: dict[str, Checkpoint], home: Path) -> None:
    """Only a read tells; the run then keeps the checkpoint that it was to resume from."""
    kept = put(real["stream"], ["position", "read"], 99)
    model, data = network(), DATA["stream"]()
    before = fingerprint(model, data)
    run = ortlab.finetune(model, data, resume_from=kept.save(home / "a.safetensors"), hold=False)
    with pytest.raises(ValueError, match=r"ended after 6 micro-batches, .* taken after 99; pass"):
        run.result(HANGS_S)
    assert fingerprint(model, data) == before
    final = Checkpoint.load(run.checkpoint()).model
    assert all(torch.equal(value, final[name]) for name, value in kept.model.items())


# --- the file


def reforged(path: Path, form: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace a file by one whose JSON was changed, with the digest of its content."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = json.loads(metadata["state"])
    change(state)
    text = json.dumps(state)
    metadata |= {"ortlab": str(form), "state": text, "sha256": _digest(form, text, tensors)}
    safetensors.torch.save_file(tensors, path, metadata)


def of_form_1(read: int) -> Callable[[dict[str, Any]], None]:
    """Change a position to one of format 1, which counts micro-batches of four."""

    def change(state: dict[str, Any]) -> None:
        place = dict(state["position"]["dict"])
        del place["unit"], place["read"]
        place |= {"batch": read, "length": 6}
        state["position"]["dict"] = list(place.items())

    return change


JSON: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "form 1, past the end": (1, of_form_1(7)),
    "form 1, negative": (1, of_form_1(-1)),
    "a field more": (2, lambda state: state["position"]["dict"].append([CODE, 1])),
    "a field less": (2, lambda state: state["position"]["dict"].pop()),
    "a part more": (2, lambda state: state.update({CODE: 1})),
    "a part less": (2, lambda state: state.pop("optimizer")),
    "no such tensor": (2, lambda state: state.update(model={"tensor": "none"})),
    "no such kind": (2, lambda state: state.update(model={"code": CODE})),
    "a long number": (2, lambda state: state.update(loss_scale={"float": "9" * 5000 + "x"})),
    "deep": (2, lambda state: state.update(optimizer=deep(900))),
}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("name", JSON)
def test_forged_json(real: dict[str, Checkpoint], home: Path, name: str) -> None:
    form, change = JSON[name]
    path = real["samples"].save(home / "forged.safetensors")
    reforged(path, form, change)
    check_refused(path, home, DATA["samples"]())


def test_a_file_of_form_1_that_is_not_forged(real: dict[str, Checkpoint], home: Path) -> None:
    path = real["samples"].save(home / "old.safetensors")
    reforged(path, 1, of_form_1(2))
    run = ortlab.finetune(network(), DATA["samples"](), resume_from=path, hold=False)
    assert run.result(HANGS_S).steps == 18


@pytest.mark.parametrize("of", DATA)
def test_a_checkpoint_that_is_not_forged(real: dict[str, Checkpoint], home: Path, of: str) -> None:
    path = real[of].save(home / "real.safetensors")
    run = ortlab.finetune(network(), DATA[of](), resume_from=path, hold=False)
    assert run.result(HANGS_S).steps == (12 if of == "longer" else 18)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.6, 0.999])
def test_a_truncated_file(real: dict[str, Checkpoint], home: Path, part: float) -> None:
    path = real["loader"].save(home / "short.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole))])
    check_refused(path, home, DATA["loader"]())


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.2, 0.4, 0.6, 0.8, 0.99999])
def test_a_flipped_bit(real: dict[str, Checkpoint], home: Path, part: float) -> None:
    path = real["loader"].save(home / "flipped.safetensors")
    whole = bytearray(path.read_bytes())
    whole[int(part * len(whole))] ^= 4
    path.write_bytes(whole)
    check_refused(path, home, DATA["loader"]())


# --- the folder of several ranks

STATE, SHARD = "state.safetensors", "shard-00001.safetensors"


def folder_of(
    kept: Checkpoint,
    folder: Path,
    outline: Callable[[dict[str, Any]], Any] = lambda outline: outline,
    digests: Callable[[dict[str, Any]], Any] = lambda digests: digests,
) -> Path:
    """Save a checkpoint as the folder that several ranks write, with changed lists."""
    packed = Packed()
    state = {name: packed.pack(getattr(kept, name), name) for name in PARTS}
    folder.mkdir()
    safetensors.torch.save_file(packed.tensors, folder / SHARD)
    listed = {"outline": outline(state), "digests": digests({SHARD: digest(folder / SHARD)})}
    rest = dataclasses.replace(kept, model={}, optimizer={}, loss_scale=None)
    rest._save_file(folder / STATE, listed)
    return folder


PARTS = ("model", "optimizer", "loss_scale")
LISTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "a shard elsewhere": {"digests": lambda found: {f"../{SHARD}": found[SHARD]}},
    "a shard by its path": {"digests": lambda found: {f"/tmp/{SHARD}": found[SHARD]}},
    "a shard without a name": {"digests": lambda found: {"": found[SHARD]}},
    "a shard with a number": {"digests": lambda found: {1: found[SHARD]}},
    "a zero in a name": {"digests": lambda found: {**found, "\0.safetensors": "0"}},
    "a device": {"digests": lambda found: {**found, "/dev/zero": "0"}},
    "no shard": {"digests": lambda _: {}},
    "another digest": {"digests": lambda _: {SHARD: "0" * 64}},
    "shards in a list": {"digests": list},
    "no model": {"outline": without("model")},
    "a position": {"outline": lambda outline: {**outline, "position": 1}},
    "other settings": {"outline": lambda outline: {**outline, "settings": {"dict": []}}},
    "a name of code": {"outline": lambda outline: {**outline, CODE: 1}},
    "an outline of text": {"outline": lambda _: "x"},
    "no such tensor": {"outline": lambda outline: {**outline, "model": {"tensor": "none"}}},
    "no such kind": {"outline": lambda outline: {**outline, "model": {"code": CODE}}},
    "a number of text": {"outline": lambda outline: {**outline, "loss_scale": {"float": "x"}}},
}


@pytest.mark.parametrize("name", LISTS)
def test_a_folder_with_a_forged_list(real: dict[str, Checkpoint], home: Path, name: str) -> None:
    check_refused(folder_of(real["loader"], home / "forged", **LISTS[name]), home, DATA["loader"]())


@pytest.mark.parametrize("name", FEW)
def test_a_folder_with_a_forged_value(real: dict[str, Checkpoint], home: Path, name: str) -> None:
    kept, data = forged(real, name)
    check_refused(folder_of(kept, home / "forged"), home, data)


@pytest.mark.parametrize("harm", ["missing", "short", "link", "stranger"])
def test_a_folder_with_a_damaged_shard(real: dict[str, Checkpoint], home: Path, harm: str) -> None:
    shard = folder_of(real["loader"], home / "forged") / SHARD
    if harm == "short":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif harm == "stranger":
        shard.with_name("stranger.safetensors").write_bytes(shard.read_bytes())
    else:
        shard.rename(home / "moved")
    if harm == "link":
        shard.symlink_to(home / "moved")
    check_refused(shard.parent, home, DATA["loader"]())


def test_a_folder_that_is_not_forged(real: dict[str, Checkpoint], home: Path) -> None:
    folder = folder_of(real["loader"], home / "real")
    run = ortlab.finetune(network(), DATA["loader"](), resume_from=folder, hold=False)
    assert run.result(HANGS_S).steps == 18
