"""Exported graphs on disk: what is stored, found again and trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from ortlab.engines.ortmodule import graph_cache
from tests.support.waiting import HANGS_S

ENTRY = graph_cache.CachedGraph(
    {"a.onnx": bytes(range(256)) * 40}, {"seconds": 1.5, "names": ["x"]}
)
NAME = "0" * 64


def _file(name: str = NAME) -> Path:
    return graph_cache.folder() / f"{name}.zip"


def test_an_entry_comes_back() -> None:
    assert graph_cache.load(NAME) is None
    graph_cache.store(NAME, ENTRY)
    assert graph_cache.load(NAME) == ENTRY
    assert graph_cache.load("1" * 64) is None


def test_only_its_owner_can_read_it() -> None:
    graph_cache.store(NAME, ENTRY)
    assert graph_cache.folder().stat().st_mode & 0o777 == 0o700
    assert _file().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(mode: int) -> None:
    graph_cache.store(NAME, ENTRY)
    graph_cache.folder().chmod(mode)
    try:
        for use in (lambda: graph_cache.load(NAME), lambda: graph_cache.store(NAME, ENTRY)):
            with pytest.raises(graph_cache.Unusable, match="chmod 700"):
                use()
    finally:
        graph_cache.folder().chmod(0o700)


def test_any_damage_is_a_miss_or_changes_nothing() -> None:
    """Changing any byte of a file, or truncating it anywhere, is a miss or has no effect."""
    entry = graph_cache.CachedGraph({"a.onnx": b"some graph", "b.onnx": b""}, {"seconds": 1})
    graph_cache.store(NAME, entry)
    whole = _file().read_bytes()
    for i in range(len(whole)):
        flipped = whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :]
        for damaged in (flipped, whole[:i]):
            _file().write_bytes(damaged)
            found = graph_cache.load(NAME)
            if found is None:
                assert not _file().exists()
            else:
                # A name in the archive's list may differ; a graph under its name may not.
                assert all(found.graphs[part] == entry.graphs[part] for part in found.graphs)
                assert found.facts == entry.facts


def test_what_would_fill_memory_is_not_unpacked() -> None:
    """Compressed zeros (0.5 MB) that would unpack beyond the limit for all graphs are a miss."""
    graph_cache.store(NAME, ENTRY)
    with zipfile.ZipFile(_file(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("facts.json", "{}")
        with archive.open("graph", "w") as part:
            for _ in range(graph_cache._UNPACKED // 2**20 + 1):
                part.write(bytes(2**20))
    tracemalloc.start()
    assert graph_cache.load(NAME) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
    assert not _file().exists()


def test_what_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_cache.store(NAME, ENTRY)
    size = _file().stat().st_size
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 3 * size)
    names = [str(i) * 64 for i in range(3)]
    for age, name in zip((30, 20, 10), names, strict=True):
        graph_cache.store(name, ENTRY)
        os.utime(_file(name), (time.time() - age, time.time() - age))
    graph_cache.load(names[0])  # makes it the most recently used
    graph_cache.store("3" * 64, ENTRY)
    assert {path.stem[0] for path in graph_cache.folder().glob("*.zip")} == {"0", "2", "3"}


def test_one_that_is_larger_than_all_may_be_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 10)
    graph_cache.store(NAME, ENTRY)
    graph_cache.store("1" * 64, ENTRY)
    assert [path.stem[0] for path in graph_cache.folder().glob("*.zip")] == ["1"]


def test_usage_and_clear() -> None:
    assert str(graph_cache.usage()) == f"0 exported graphs, 0.0 MiB, in {graph_cache.folder()}"
    graph_cache.store(NAME, ENTRY)
    (graph_cache.folder() / ".abandoned.part").write_bytes(b"x")
    assert graph_cache.usage().graphs == 1
    assert graph_cache.usage().size_bytes == _file().stat().st_size
    assert graph_cache.clear().graphs == 1
    assert list(graph_cache.folder().iterdir()) == []
    assert graph_cache.usage().graphs == 0


def test_a_writer_that_died_leaves_nothing_for_long() -> None:
    graph_cache.store(NAME, ENTRY)
    old, young = (graph_cache.folder() / f".{name}.part" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    graph_cache.store(NAME, ENTRY)
    assert not old.exists()
    assert young.exists()


WRITER = """
import json, sys, time
from ortlab.engines.ortmodule import graph_cache as cache
me, until = int(sys.argv[1]), time.time() + float(sys.argv[2])
stored = found = 0
while time.time() < until:
    graphs = {"a.onnx": bytes([me]) * 200_000, "b.onnx": bytes([me]) * 100_000}
    cache.store("0" * 64, cache.CachedGraph(graphs, {"me": me}))
    stored += 1
    entry = cache.load("0" * 64)
    if entry is not None:
        found += 1
        assert {byte for graph in entry.graphs.values() for byte in graph} == {entry.facts["me"]}
        assert [len(graph) for graph in entry.graphs.values()] == [200_000, 100_000]
    if me == 0 and stored % 10 == 0:
        cache.clear()
print(json.dumps([stored, found]))
"""


def test_processes_that_write_one_entry_at_once() -> None:
    """Readers see one writer's complete file or none, while a process also clears the folder."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(i), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    counts = []
    for writer in writers:
        out, err = writer.communicate(timeout=HANGS_S)
        assert writer.returncode == 0, err
        counts.append(json.loads(out))
    assert all(stored > 5 and found > 0 for stored, found in counts), counts
    assert not list(graph_cache.folder().glob(".*.part"))
