"""Fuzz targets: readers of untrusted bytes, each wrapped in one call that must end well.

A target receives bytes and its own folder. A reader may raise its documented error, which the
target catches; any other exception is a bug and passes through. `seed` makes valid input for the
reader, from which fuzzing begins.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import safetensors.torch
import torch
from google.protobuf.message import DecodeError, Message
from IPython.core.error import UsageError
from onnx import TensorProto, helper

from ortlab.checkpoint import sharded
from ortlab.checkpoint.checkpoint import Checkpoint, Position
from ortlab.checkpoint.nested_values import Packed
from ortlab.deploy import weights
from ortlab.deploy.exported import Exported
from ortlab.engines.ortmodule import graph_cache
from ortlab.graph.capture import Stage
from ortlab.graph.module_tree import Outline
from ortlab.history import sqlite_index
from ortlab.history.entry import read_entry
from ortlab.history.listing import history
from ortlab.history.run_folder import read_metrics
from ortlab.metrics.recorder import COLUMNS
from ortlab.notebook.magics.commands import COMMANDS, command_called
from ortlab.notebook.magics.parsing import split
from ortlab.settings import HistorySettings
from ortlab.utils.rng import RandomStates


@dataclass(frozen=True)
class Target:
    """A reader: ``run`` reads bytes in a folder; ``seed`` is valid input."""

    run: Callable[[bytes, Path], None]
    seed: Callable[[Path], bytes]


def _checkpoint(data: bytes, folder: Path) -> None:
    path = folder / "given.safetensors"
    path.write_bytes(data)
    try:
        found = Checkpoint.load(path)
    except ValueError:
        return
    assert isinstance(found.position.step, int)  # an undamaged file holds what was written


def _a_checkpoint(folder: Path) -> bytes:
    return _made().save(folder / "seed.safetensors").read_bytes()


def _made() -> Checkpoint:
    position = Position(
        step=3,
        epoch=0,
        read=12,
        length=64,
        unit="samples",
        evaluated=-1,
        random=RandomStates.now(),
        order=None,
        engine_seed=5,
    )
    model = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    return Checkpoint(model=model, optimizer={"state": {}}, position=position, settings={"lr": 0.1})


def _shards(data: bytes, folder: Path) -> None:
    """Read an untrusted sharded folder: the first line describes the shards, the rest is a shard.

    The digests match; otherwise nothing of the shards would be read.
    """
    place = folder / "given"
    place.mkdir(exist_ok=True)
    line, _, shard = data.partition(b"\n")
    (place / _SHARD).write_bytes(shard)
    try:
        parts = json.loads(line)
        parts["digests"][_SHARD] = sharded.fingerprint(place / _SHARD)
        _made()._save_file(place / "state.safetensors", parts)
    except (IndexError, KeyError, RecursionError, TypeError, ValueError):
        return  # nobody can write such content
    try:
        found = Checkpoint.load(place)
    except ValueError:
        return
    assert isinstance(found, Checkpoint)


_SHARD = "shard-00001.safetensors"


def _some_shards(folder: Path) -> bytes:
    packed = Packed()
    state = {"model": {"weight": torch.ones(2, 3)}, "optimizer": {"state": {0: {"step": 3.0}}}}
    outline = {name: packed.pack(value, name) for name, value in state.items()}
    parts = {"outline": outline, "digests": {_SHARD: ""}}
    return json.dumps(parts).encode() + b"\n" + safetensors.torch.save(packed.tensors)


def _metrics(data: bytes, folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    found = read_metrics(path)
    assert found.rows.shape[1] == len(COLUMNS)
    assert found.rows.dtype == np.float64


def _some_metrics(folder: Path) -> bytes:
    names = [column.name for column in COLUMNS]
    lines = [
        {"form": 1, "columns": names},
        [float(number) for number in range(len(names))],
        [None] * len(names),
        {"event": "pause", "step": 1, "time_s": 0.5, "text": "paused", "values": {"loss": None}},
        {"form": 1, "columns": names[:3]},
        [1, 2, 3],
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def _run(data: bytes, folder: Path) -> None:
    """Read a history folder that may be no run: run.json, settings.json and notes, line by line."""
    root = folder / "runs"
    path = root / "run-1"
    path.mkdir(parents=True, exist_ok=True)
    (root / sqlite_index.FILE).unlink(missing_ok=True)
    about, settings, notes = (*data.split(b"\n", 2), b"", b"")[:3]
    for name, part in (("run.json", about), ("settings.json", settings), ("notes.jsonl", notes)):
        (path / name).write_bytes(part)
    entry = read_entry(path)
    expected = [] if entry is None else [repr(entry)]
    for _ in ("from the folder", "from the index"):
        assert [repr(each) for each in sqlite_index.entries(root)] == expected
    assert len(sqlite_index._known(root)) == len(expected)
    table = history(HistorySettings(), own=(), root=root)
    assert f"{table!r}{table._repr_html_()}".encode()


def _a_run(folder: Path) -> bytes:
    """Return a run with numbers near their limits and surrogate pairs in its JSON."""
    best = {"step": 20, "loss": 0.5, "accuracy": 0.75}
    result = {
        "state": "finished",
        "steps": 20,
        "wall_s": 10**300,
        "final_loss": 1e300,
        "best": best,
    }
    about = {
        "form": 1,
        "name": "run-1",
        "model": "Net \N{GRINNING FACE}",
        "parameters": 1e18,
        "created": "2026-01-02T03:04:05+00:00",
        "state": "finished",
        "continues": None,
        "workers": 2,
        "error": "ValueError: no",
        "result": result,
    }
    said = [
        {"note": "\N{GRINNING FACE}", "time": "2026-01-02"},
        {"tag": "a"},
        {"tag": "b"},
        {"untag": "a"},
    ]
    return "\n".join(map(json.dumps, [about, {"engine": "eager"}, *said])).encode()


def _manifest(data: bytes, folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"model")
    (folder / "export.json").write_bytes(data)
    try:
        found = Exported.load(folder)
    except ValueError:
        return
    assert [str(port) for port in (*found.inputs, *found.outputs)]
    assert repr(found)


def _a_manifest(folder: Path) -> bytes:
    port = {"name": "x", "type": "float32", "shape": ["batch", 4]}
    form = {
        "name": "fp32",
        "file": "model.onnx",
        "bytes": 5,
        "difference": 1e-7,
        "relative": 1e-7,
        "worst": "y, the example",
    }
    digest = "9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4"
    facts = {
        "model": "Net",
        "opset": 17,
        "inputs": [port],
        "outputs": [port],
        "forms": [form],
        "tried": ["the example"],
        "notes": [],
        "files": {"model.onnx": {"bytes": 5, "sha256": digest}},
    }
    return json.dumps(facts).encode()


def _cached(data: bytes, folder: Path) -> None:
    place = graph_cache.folder()
    assert folder in place.parents, "the user's own cache is left alone"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    (place / "given.zip").write_bytes(data)
    found = graph_cache.load("given")
    assert found is not None or not (place / "given.zip").exists()


def _a_cached_graph(folder: Path) -> bytes:
    path = folder / "seed.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("facts.json", json.dumps({"outputs": [1, 2]}))
        archive.writestr("built.onnx", _a_graph(folder))
    return path.read_bytes()


def _graph(data: bytes, folder: Path) -> None:
    """Build the views of a graph and locate its data; bytes that protobuf refuses are no graph."""
    file = folder / "model.onnx"
    file.write_bytes(data)
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError:
        return
    with contextlib.suppress(ValueError):
        weights.check_places(file)
    # Views show graphs that ortlab exported, whose names are text.
    if not _is_text(model):
        return
    stage = Stage("forward", model)
    assert len(stage.nodes) == len(model.graph.node)
    assert stage.table() is not None
    assert repr(Outline(stage))


def _is_text(message: Message) -> bool:
    """Return whether all names in the graph are text: protobuf returns bytes for invalid UTF-8."""
    for field, value in message.ListFields():
        single = isinstance(value, str | bytes) or not isinstance(value, Sequence)
        for each in [value] if single else value:
            if isinstance(each, Message):
                if not _is_text(each):
                    return False
            elif field.type == field.TYPE_STRING and isinstance(each, bytes):
                return False
    return True


def _a_graph(folder: Path) -> bytes:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="/layer/MatMul"),
        helper.make_node("Relu", ["y"], ["z"], name="/act/Relu"),
    ]
    beside = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 3])
    beside.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.onnx.data"), ("offset", "0"), ("length", "48")):
        beside.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 3])],
        [beside],
    )
    return bytes(helper.make_model(graph).SerializeToString())


def _line(data: bytes, folder: Path) -> None:
    """Parse a magic's line without running it."""
    text = data.decode("utf-8", "replace")
    name, _, rest = text.partition(" ")
    try:
        command_called(name).read(split(rest), {"model": 1})
    except (UsageError, ValueError):
        return


def _a_line(folder: Path) -> bytes:
    return b'finetune model train --lr 1e-3 --batch-size 16 --precision "bf16" # comment'


TARGETS = {
    "checkpoint": Target(_checkpoint, _a_checkpoint),
    "shards": Target(_shards, _some_shards),
    "metrics": Target(_metrics, _some_metrics),
    "run": Target(_run, _a_run),
    "manifest": Target(_manifest, _a_manifest),
    "cached": Target(_cached, _a_cached_graph),
    "graph": Target(_graph, _a_graph),
    "line": Target(_line, _a_line),
}
WORDS = [name.encode() for name in COMMANDS]
"""The first words of a magic's line."""
