"""What engines keep in the user's cache folder: exported graphs and timings of kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ortlab.engines.ortmodule import graph_cache
from ortlab.engines.ortmodule.graph_cache import Usage
from ortlab.utils.tables import Table

if TYPE_CHECKING:
    from ortlab.engines.ortmodule.kernels.kernel_choice import Timing


def graphs() -> Usage:
    """Return how many graphs are cached, where, and their size."""
    return graph_cache.usage()


def clear_graphs() -> Usage:
    """Remove all cached graphs and return what there was. A graph in use stays in memory."""
    return graph_cache.clear()


def kernel_timings() -> Table[tuple[str, Timing]]:
    """Return the kernels measured on this machine with these versions, the slowest first."""
    from ortlab.engines.ortmodule.kernels import kernel_choice  # heavy: torch

    return kernel_choice.table()


def without_timings() -> AbstractContextManager[None]:
    """Return a context in which no earlier timing is known and no new one is stored."""
    from ortlab.engines.ortmodule.kernels import kernel_choice  # heavy: torch

    return kernel_choice.forgotten()
