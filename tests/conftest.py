"""What every test has: a home of its own for runs, no network, no window."""

from __future__ import annotations

import os
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
