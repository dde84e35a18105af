"""Skips for tests of engines and kernels that cannot run here."""

from __future__ import annotations

import pytest

from ortlab.engines.base import EngineUnavailable
from ortlab.engines.ortmodule import kernels
from ortlab.engines.registry import engine


def needs(*names: str) -> None:
    """Skip the test with the reason if one of these engines cannot run here."""
    for name in names:
        try:
            engine(name)
        except EngineUnavailable as error:
            pytest.skip(str(error))


def needs_kernels() -> None:
    """Skip the test with the reason if the kernels of ORTModule cannot be built here."""
    reason = kernels.unavailable()
    if reason is not None:
        pytest.skip(reason)
