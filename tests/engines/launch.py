"""Starts several processes that train together, and reads what each found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Found = list[dict[str, Any]]
"""What each rank found, by case, and what it ``printed``."""


def run(module: str, size: int, folder: Path) -> Found:
    """Runs the cases of `module` in `size` processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, told, strict=True):
        assert process.returncode == 0, text
    read = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [{**found, "printed": text} for found, text in zip(read, told, strict=True)]


def of(found: Found, case: str) -> list[Any]:
    """What each rank found in a case that ran to its end on all."""
    for rank, cases in enumerate(found):
        assert "failed" not in cases[case], f"rank {rank}: {cases[case]['failed']}"
    return [cases[case] for cases in found]
