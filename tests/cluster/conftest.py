"""Fixtures of the tests of workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ortlab.session import session
from tests.cluster import hosts as namespaces
from tests.cluster.hosts import Network
from tests.support.waiting import until


@pytest.fixture(scope="module")
def own_workers() -> Iterator[None]:
    """Stop the workers of earlier tests; those of a file serve all its tests, then stop."""
    stop_workers()
    yield
    stop_workers()


def stop_workers() -> None:
    """Stop the workers of the session, if there are any."""
    if session.workers is not None:
        session.workers.stop()
        session.workers = None


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Start the hosts, to which the command ssh leads; they do not see this session's folders."""
    if reason := namespaces.missing():
        pytest.skip(reason)
    made = Network(tmp_path_factory.mktemp("network"), tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{made.bin}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield made
    made.close()


@pytest.fixture
def nothing_is_left(network: Network, threads_end: None) -> Iterator[None]:
    """Check that nothing is left on the hosts and here once workers are stopped."""
    before = here()
    yield
    stop_workers()
    for host in network.hosts.values():
        until(lambda host=host: host.processes() == {})  # type: ignore[misc]
        until(lambda host=host: host.files() == [])  # type: ignore[misc]
    until(lambda: here() <= before)


def here() -> set[str]:
    """Return processes and scratch folders of this session, but not the state that a run keeps."""
    children = psutil.Process().children(recursive=True)
    running = {f"{each.pid}" for each in children if each.status() != psutil.STATUS_ZOMBIE}
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("ortlab-*")}
    return running | {name for name in folders if not name.startswith("ortlab-scratch-state-")}
