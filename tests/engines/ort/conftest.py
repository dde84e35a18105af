from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the compiled functions of other tests, which share the code of forward."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
