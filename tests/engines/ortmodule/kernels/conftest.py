"""What the kernel tests share: the kernels, loaded, and torch's threads as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ortlab.engines.ortmodule import kernels


@pytest.fixture(scope="session")
def ops() -> Any:
    """The kernels by their names; skips, saying why, where they cannot be built."""
    reason = kernels.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return torch.ops.ortlab_kernels


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may change how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
