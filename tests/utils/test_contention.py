"""Waits for a core on a busy machine are measured, and told where idle threads spin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ortlab.utils import contention
from tests.support.waiting import HANGS_S

# Of one core, which the busy processes of the test share with it.
ASKED = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ortlab.utils.contention import Contention
watched = Contention()
print("ready", flush=True)
sys.stdin.readline()
print(watched.waited())
until = time.process_time() + 0.7
while time.process_time() < until:
    pass
print(watched.warning())
"""
BUSY = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep the first core busy with two processes."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def told(**variables: str) -> list[str]:
    environment = {n: v for n, v in os.environ.items() if n != "OMP_WAIT_POLICY"}
    with subprocess.Popen(
        [sys.executable, "-c", ASKED],
        env={**environment, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        return process.communicate("\n", timeout=HANGS_S)[0].splitlines()[1:]


def test_a_busy_machine_is_told_where_threads_spin(busy: None) -> None:
    nothing, line = told()
    assert nothing == "None"  # it has hardly computed yet
    assert "the machine is busy: threads of this kernel waited for a core" in line
    assert "OMP_WAIT_POLICY=passive" in line


def test_nothing_is_told_where_threads_sleep(busy: None) -> None:
    assert told(**contention.SLEEPING) == ["None", "None"]


def test_a_process_that_sleeps_does_not_wait_for_a_core() -> None:
    watched = contention.Contention()
    time.sleep(0.3)
    assert watched.waited() is None
    assert watched.warning() is None


@pytest.mark.parametrize(("value", "spins"), [(None, True), ("active", True), ("PASSIVE", False)])
def test_openmp_s_variable(value: str | None, spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", value)
    assert contention.spinning() == spins
