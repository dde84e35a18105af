"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.training_parts import Parts


@pytest.fixture(autouse=True)
def _recorders_close(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the recorders of all `Parts` of a test, before any other fixture looks for threads."""
    if "threads_end" in request.fixturenames:
        request.getfixturevalue("threads_end")
    yield
    while Parts.made:
        Parts.made.pop().recorder.close()
