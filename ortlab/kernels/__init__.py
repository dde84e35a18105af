"""Kernels that take the place of ORT's own in its CPU graphs, on torch's threads.

ORT calls them through its ATen operator. `substitutes` puts them into a graph, `choice` tells by
measurement which are faster on this machine, `kernels.cc` holds them.
"""

from __future__ import annotations

import functools

from ortlab.compat import OrtUnavailable, extensions
from ortlab.engines.base import tell

DOMAIN = "ortlab_kernels"
"""The namespace of their names in torch."""


@functools.cache
def unavailable() -> str | None:
    """Builds and loads them where that was not done yet; why they cannot be used, or None."""
    try:
        extensions.load_kernels(tell)
    except OrtUnavailable as error:
        return str(error)
    return None


def keep_memory(keep: bool) -> None:
    """Frees what results of kernels left behind; whether later ones are kept for the next step.

    It is for all models of the process, as torch's allocator is.
    """
    import torch

    torch.ops.ortlab_kernels.trim(keep)
