"""Fixtures shared by all tests: a private run folder, no network, no window."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ortlab.engines import runtimes
from ortlab.engines.ortmodule import compat, graph_cache
from ortlab.engines.ortmodule.compat import extensions
from ortlab.notebook.static_views import drawing
from tests.support.chosen_tests import FROZEN, LENGTHY, LONG, OF_ORT, PLAIN, RULES, SLOW

# The libraries read these variables when they are imported, so a fixture would set them too late.
# The kernels and scripts that tests start inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    KERAS_BACKEND="torch",
    MPLBACKEND="agg",
    OMP_WAIT_POLICY="passive",  # files run side by side: no thread may spin on another's core
    TOKENIZERS_PARALLELISM="false",
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and processes started by the tests would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Tests that need several threads request them from torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

WITH_TRAINING = runtimes.TRAINING in runtimes.installed()

pytest_plugins = ["tests.support.typed_magics"]  # its fixture is used in several folders


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `make check` and `make test` leave out, and what `make plain` runs."""
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    name = f"{place}::{item.name}"
    if place in LONG or name.startswith(SLOW):
        item.add_marker("slow")
    if name.startswith(PLAIN):
        item.add_marker("plain")
    again = name.startswith(RULES) or (place in OF_ORT and re.search(r"\[(ort|compile)[-\]]", name))
    if name.startswith((*FROZEN, *LENGTHY)) or (again and WITH_TRAINING):
        item.add_marker("nightly")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow files first, so that no worker is left with one when the others are done.

    By default, xdist starts with the files that have the most tests, and the notebooks ran last.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tutorials' seconds, hosts' refusals, and how many tests need the old runtime."""
    skipped = [str(each.longrepr) for each in terminalreporter.getreports("skipped")]
    if number := sum("onnxruntime-training" in each for each in skipped):
        terminalreporter.write_line(f"{number} tests skipped that need onnxruntime-training")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, told in report.user_properties:
                if name in ("tutorial", "host"):
                    terminalreporter.write_line(told)


@pytest.fixture(scope="session", autouse=True)
def ortlab_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store runs in a folder of this test session instead of the user's.

    The torch extension is cached elsewhere, so no test builds it again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAB_HOME", str(tmp_path_factory.mktemp("ortlab-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache exported graphs in a folder of this test session; the built extension is reused."""
    built = extensions.cache_folder()
    built.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        extensions.cache_folder().parent.mkdir(mode=0o700)
        extensions.cache_folder().symlink_to(built)
        yield


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Exclude the objects that exist before a module's tests from garbage collection.

    ORT collects garbage at each export. Traversing all objects of the libraries takes 0.2 s of CPU
    time: nine tenths of the time that exporting a model of two layers takes.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_graph_cached(own_cache: None) -> None:
    """Clear the graph cache, so that no test finds a graph that another test exported."""
    graph_cache.clear()


@pytest.fixture
def threads_end() -> Iterator[None]:
    """Check that no ortlab thread started by the test outlives it, except the drawing thread."""
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    ours = [thread for thread in started if thread.name.startswith("ortlab-")]
    ours = [thread for thread in ours if thread.name != drawing.THREAD]
    deadline = time.monotonic() + 10
    for thread in ours:  # a thread that has just signaled its end still has a line or two to run
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread.name for thread in ours if thread.is_alive()]


@pytest.fixture
def ort_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ortlab look for ORT as in a new process; an ORT that was loaded is known to run."""
    monkeypatch.setattr(compat, "_ort", None)


@pytest.fixture(scope="session")
def ort() -> compat.TrainingRuntime:
    """Return ORT's training package; skip the test with the reason where ORT cannot run."""
    reason = compat.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return compat.ortmodule()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_end: None) -> Path:
    """Return the test's own folder, in which its runs are stored."""
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: two threads block each other while a third one computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
