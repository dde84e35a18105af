"""Run a module of cases in several processes and read the results of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
Found = list[dict[str, Any]]
"""The results of each rank, by case."""


def run(module: str, size: int, folder: Path, *words: str, seconds: int = 240) -> Found:
    """Run `module` in `size` processes, at most `seconds`; ``printed`` has each rank's output.

    It gets rank, size, folder and `words` as arguments.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRANSFORMERS_VERBOSITY": "error",  # it warns of configurations as small as ours
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), str(folder), *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, told, strict=True):
        assert process.returncode == 0, text
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [{**cases, "printed": text} for cases, text in zip(found, told, strict=True)]


def of(found: Found, case: str) -> list[Any]:
    """Return the results of each rank for a case that ended on all of them."""
    for rank, cases in enumerate(found):
        assert "failed" not in cases[case], f"rank {rank}: {cases[case]['failed']}"
    return [cases[case] for cases in found]


def check_parity(found: list[Any], name: str) -> None:
    """Check that losses, norms, states and evaluation of 50 steps equal those of one process."""
    for each in found:
        assert each["steps"] < TOLERANCE
        assert each["state"] < TOLERANCE
        assert each["evaluated"] < TOLERANCE
        assert all(alone == together for alone, together in each["hits"])
        assert each["communication_ms"] > 0
        assert each["engine"] == name
    assert len({each["digest"] for each in found}) == 1


def check_failure(found: list[Any]) -> None:
    """Check that no rank took a step in which one failed, and that all went on as one process."""
    other, failed = found
    assert len(other["told"]) == 3
    assert all("RankFailed: rank 1 of 2 has failed" in told for told in other["told"])
    assert failed["told"] == ["ValueError: a row is out of range"] * 3
    for each in (other, failed):
        assert each["error"] < TOLERANCE
        assert each["loss"][0] == pytest.approx(each["loss"][1], rel=TOLERANCE)
