"""What the compat tests share: ORTModule, ready."""

from __future__ import annotations

import pytest

from ortlab.engines.ortmodule import compat


@pytest.fixture(scope="session")
def ort() -> compat.Ort:
    """ORT's training package; skips, saying why, where it cannot run."""
    reason = compat.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return compat.ortmodule()
