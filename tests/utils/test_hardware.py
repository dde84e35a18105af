"""Tests of the hardware that this process computes with, and of `%ort device`'s table of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

import ortlab
from ortlab.engines import doctor
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import requirements
from ortlab.settings import ENGINES
from ortlab.utils import findings, hardware
from ortlab.utils.hardware import Gpu, HostMemory


def test_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx512_bf16 amx_bf16\n"
    told = tmp_path / "cpuinfo"
    told.write_text(first + "\nprocessor\t: 1\nmodel name\t: Other\n")
    monkeypatch.setattr(hardware, "CPUINFO", told)
    found = hardware.processor()
    assert found.name == "Some CPU @ 2 GHz"
    assert found.flags == {"fpu", "avx512_bf16", "amx_bf16"}
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    assert hardware.processor().name
    assert hardware.processor().flags == frozenset()


def test_threads_are_those_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.best_threads() <= hardware.processor().cpus
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert hardware.best_threads() == 1


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "max\n"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "500\n"}, 500),
        ("0::/\n", {"memory.max": "700\n"}, 700),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        # Version 1 reports no limit as a number larger than any memory.
        ("9:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        # A container sees its own group as the root, but its name as on the host.
        (
            "9:cpu,cpuacct:/docker/x\n8:memory:/docker/x\n",
            {"memory/memory.limit_in_bytes": "800\n", "memory.max": "1\n"},
            800,
        ),
    ],
)
def test_the_limit_of_control_groups(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    membership: str,
    files: dict[str, str],
    limit: int | None,
) -> None:
    write(tmp_path / "proc" / "cgroup", membership)
    for name, text in files.items():
        write(tmp_path / "sys" / name, text)
    monkeypatch.setattr(hardware, "MEMBERSHIP", tmp_path / "proc" / "cgroup")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "sys")
    found = hardware.host_memory()
    assert found.limit_bytes == limit
    assert found.total_bytes == psutil.virtual_memory().total


@pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
def test_the_table() -> None:
    table = ortlab.device()
    found = {fact.what: fact.found for fact in table}
    assert hardware.processor().name in found["processor"]
    threads = torch.get_num_threads()
    assert found["threads"] == f"{threads} of torch, as many in a session of ORT, 1 for small work"
    assert "GiB free of" in found["memory"]
    assert {found[f"engine {name}"] for name in ENGINES} == {"runs"}
    if doctor.no_gpu():
        assert found["GPU"] == f"none: {doctor.no_gpu()}"


def test_what_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    monkeypatch.setattr(hardware, "host_memory", lambda: HostMemory(2**33, 2**32, 2**31))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        table = ortlab.device()
    finally:
        torch.set_num_threads(before)
    found = {fact.what: fact.found for fact in table}
    assert "2.00 GiB at most" in found["memory"]
    if hardware.processor().cores > 1:
        assert "1 by affinity or quota" in found["cores"]
    (note,) = table.notes
    assert "3 threads share 1 core:" in note
    assert "torch.set_num_threads(1)" in note


def test_an_engine_that_cannot_run_says_why(
    ort_not_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        requirements, "_python", lambda: findings.Finding("Python", False, "too new", "x")
    )
    monkeypatch.setattr(requirements, "ESSENTIALS", (requirements._python,))
    found = {fact.what: fact.found for fact in ortlab.device()}
    assert "too new" in found["engine ortmodule"]
    assert found["engine eager"] == "runs"


def test_gpus_and_names_that_are_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [Gpu(0, "<b>GPU</b>", 2**34, 2**30), Gpu(1, "other", 2**34, float("nan"))]
    monkeypatch.setattr(hardware, "gpus", lambda: ours)
    table = ortlab.device()
    assert "<b>GPU</b>, 1.00 GiB used of 16.00 GiB" in repr(table)
    assert "other, 16.00 GiB" in repr(table)
    html = table._repr_html_()
    assert "&lt;b&gt;GPU&lt;/b&gt;" in html
    assert "<b>" not in html
