"""What every test has: a home of its own for runs, no network, no window."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ortlab.engines.ortmodule import compat, graph_cache
from ortlab.engines.ortmodule.compat import extensions
from ortlab.notebook.static_views import drawing

# Read when the libraries are imported, so these cannot wait for a fixture. The kernels and scripts
# that tests start inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    MPLBACKEND="agg",
    TOKENIZERS_PARALLELISM="false",
)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in the background; what the tests start would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and idle OpenMP threads of one would spin on those of the other.
    # Tests of what several threads compute ask torch for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = (
    "test_notebooks.py",
    "engines/test_contract.py",
    "zoo/test_sweep.py",
    "cluster/test_training.py",
    "engines/distributed/test_deepspeed.py",
    "engines/distributed/test_tensor_parallel.py",
    "bench/test_bench.py",
    "search/test_race.py",
    "browser/test_ranks_in_lab.py",
    "browser/test_charts_in_lab.py",
    "training/test_resume.py",
    "browser/test_graphs_in_lab.py",
    "browser/test_panel_in_lab.py",
    "deploy/test_torchrun_script.py",
)
"""Files that take about a minute or more each, the longest first."""
SLOW = (
    "browser/",
    "bench/test_step.py",
    "cluster/",
    "deploy/test_torchrun_script.py",
    "engines/distributed/",
    "engines/ortmodule/compat/test_patches.py",
    "engines/ortmodule/kernels/",
    "engines/ortmodule/test_graph_in_next_kernel.py",
    "hf/",
    "notebook/test_bad_inputs.py",
    "notebook/test_kernel.py",
    "notebook/test_privacy.py",
    "search/",
    "test_torch_ort.py",
    "training/test_failures.py",
    "training/test_run.py",
)
"""Files and folders that `make check` leaves to `make test`, with those of `LONG`."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of `LONG` and `SLOW`, so that `make check` leaves them out."""
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    if place in LONG or place.startswith(SLOW):
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers begin with the files that take long, so that none has one left when others are done.

    By itself xdist begins with the files of most tests, and ended with that of the notebooks.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds that each tutorial took."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, told in report.user_properties:
                if name == "tutorial":
                    terminalreporter.write_line(told)


@pytest.fixture(scope="session", autouse=True)
def ortlab_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are kept in a folder of this test session, not in the user's.

    The torch extension is cached elsewhere, so no test builds it again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAB_HOME", str(tmp_path_factory.mktemp("ortlab-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Exported graphs are cached in a folder of this test session; the extension stays built."""
    built = extensions.cache_folder()
    built.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        extensions.cache_folder().parent.mkdir(mode=0o700)
        extensions.cache_folder().symlink_to(built)
        yield


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Collecting garbage does not go through what was there before a module's tests.

    ORT collects it at each export, and through all that the libraries hold takes 0.2 s of a CPU:
    nine tenths of the export of a model of two layers.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_graph_cached(own_cache: None) -> None:
    """No test finds what another one exported."""
    graph_cache.clear()


@pytest.fixture
def threads_end() -> Iterator[None]:
    """No thread of ortlab's that the test started is left when it ends, but the one that draws."""
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    ours = [thread for thread in started if thread.name.startswith("ortlab-")]
    ours = [thread for thread in ours if thread.name != drawing.THREAD]
    deadline = time.monotonic() + 10
    for thread in ours:  # who says last of all that it is over has a line or two still to go
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread.name for thread in ours if thread.is_alive()]


@pytest.fixture
def ort_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """ORT is looked for as in a new process: one that was loaded is known to run."""
    monkeypatch.setattr(compat, "_ort", None)


@pytest.fixture(scope="session")
def ort() -> compat.TrainingRuntime:
    """ORT's training package; skips, saying why, where it cannot run."""
    reason = compat.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return compat.ortmodule()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_end: None) -> Path:
    """The test's own folder, where its runs are kept."""
    monkeypatch.setenv("ORTLAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch has one thread: two of them wait for each other wherever a third computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
