"""What every test has: a home of its own for runs, no network, no window."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

# Read when the libraries are imported, so these cannot wait for a fixture. The kernels and scripts
# that tests start inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    MPLBACKEND="agg",
    TOKENIZERS_PARALLELISM="false",
)


@pytest.fixture(scope="session", autouse=True)
def ortlab_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are kept in a folder of this test session, not in the user's.

    The torch extension is cached elsewhere, so no test builds it again.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAB_HOME", str(tmp_path_factory.mktemp("ortlab-home")))
        yield


@pytest.fixture
def threads_end() -> Iterator[None]:
    """No thread of ortlab's that the test started is left when it ends."""
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    assert not [thread.name for thread in started if thread.name.startswith("ortlab-")]
