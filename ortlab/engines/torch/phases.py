"""Labels of a step's phases, for torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Final

import torch

PREFIX: Final = "ortlab."

_labeling = False


def phase(name: str) -> AbstractContextManager[object]:
    """Return a context that labels what runs in it; it costs nothing outside of `labeled`.

    Args:
        name: Name of the phase: "forward", "backward" or "optimizer".
    """
    if _labeling:
        return torch.profiler.record_function(PREFIX + name)
    return contextlib.nullcontext()


@contextlib.contextmanager
def labeled() -> Iterator[None]:
    """Label the phases of the steps that are taken within."""
    global _labeling
    _labeling = True
    try:
        yield
    finally:
        _labeling = False
