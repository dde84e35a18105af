"""A skip for tests of engines that cannot run here."""

from __future__ import annotations

import pytest

from ortlab.engines.base import EngineUnavailable
from ortlab.engines.registry import engine


def needs(*names: str) -> None:
    """Skip the test with the reason if one of these engines cannot run here."""
    for name in names:
        try:
            engine(name)
        except EngineUnavailable as error:
            pytest.skip(str(error))
