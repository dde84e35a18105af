"""Engine data in the user's cache folder: exported graphs and kernel timings."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ortlab.engines.ortmodule import graph_cache
from ortlab.engines.ortmodule.graph_cache import Usage
from ortlab.utils.tables import Table

if TYPE_CHECKING:
    from ortlab.engines.ortmodule.kernels.kernel_choice import Timing


def graphs() -> Usage:
    """Return the number, location and size of the cached graphs."""
    return graph_cache.usage()


def clear_graphs() -> Usage:
    """Remove all cached graphs. Graphs in use stay in memory.

    Returns:
        The number, location and size of the removed graphs.
    """
    return graph_cache.clear()


def kernel_timings() -> Table[tuple[str, Timing]]:
    """Return the timings of kernels on this machine with these versions, slowest first."""
    from ortlab.engines.ortmodule.kernels import kernel_choice  # heavy: torch

    return kernel_choice.table()


def without_timings() -> AbstractContextManager[None]:
    """Return a context in which cached timings are ignored and new ones are not stored."""
    from ortlab.engines.ortmodule.kernels import kernel_choice  # heavy: torch

    return kernel_choice.forgotten()
