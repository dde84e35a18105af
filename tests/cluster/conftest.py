"""Fixtures of the tests of workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ortlab.session import session


@pytest.fixture(scope="module")
def own_workers() -> Iterator[None]:
    """Stop the workers of earlier tests; those of a file serve all its tests, then stop."""
    if session.workers is not None:
        session.workers.stop()
        session.workers = None
    yield
    if session.workers is not None:
        session.workers.stop()
        session.workers = None
