"""Fixtures of the tests of searches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ortlab.session import session


@pytest.fixture(autouse=True)
def no_searches(threads_end: None) -> Iterator[None]:
    """Stop all searches after the test, so that none runs on in another test."""
    yield
    for search in session.searches:
        search.stop()
        assert search.wait_over(60)
    session.searches.clear()
