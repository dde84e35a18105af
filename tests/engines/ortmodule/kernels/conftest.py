"""Fixtures of the kernel tests: the loaded kernels, and torch's thread count restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.needed_engines import needs_kernels


@pytest.fixture(scope="session")
def ops() -> Any:
    """Return the kernels by name; skip with the reason where they cannot be built."""
    needs_kernels()
    return torch.ops.ortlab_kernels


@pytest.fixture
def threads() -> Iterator[None]:
    """Let the test change torch's number of threads, and restore it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
