"""Kernels that take the place of ORT's own in its CPU graphs, on torch's threads.

ORT calls them through its ATen operator. `substitutes` puts them into a graph, `kernel_choice`
tells by measurement which are faster on this machine, `kernels.cc` holds them.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable

from ortlab.engines.base import tell
from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import OrtUnavailable

DOMAIN = "ortlab_kernels"
"""The namespace of their names in torch."""


@functools.cache
def unavailable() -> str | None:
    """Builds and loads them where that was not done yet; why they cannot be used, or None."""
    try:
        _trim()
    except OrtUnavailable as error:
        return str(error)
    return None


@functools.cache
def _trim() -> Callable[[bool], int]:
    return extensions.load_kernels(tell)


_users: Counter[bool] = Counter()


def keep_memory_for(user: object, keep: bool) -> Callable[[], object]:
    """Keeps what results of kernels leave behind for the next step while one `user` wants that.

    Where none is left what is kept is freed. A call of what is returned ends the `user`'s wish.
    """
    _users[keep] += 1
    if _users[keep] == 1:
        _set_memory()
    wish = weakref.finalize(user, _leave, keep)
    wish.atexit = False
    return wish


def _leave(keep: bool) -> None:
    _users[keep] -= 1
    _set_memory()


def _set_memory() -> None:
    # Not as torch's operator: a collection of garbage may come by here in the middle of an export,
    # whose tracer would take it for a part of the model.
    _trim()(_users[True] > 0)
