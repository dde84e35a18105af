"""Kernels that replace ORT's own in its CPU graphs and run on torch's threads.

ORT calls them through its ATen operator. `substitutes` inserts them into a graph, `kernel_choice`
measures which ones are faster on this machine, and `kernels.cc` implements them.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable

from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import OrtUnavailable

DOMAIN = "ortlab_kernels"
"""Namespace of the kernels in torch."""


@functools.cache
def unavailable() -> str | None:
    """Build and load the kernels unless they are loaded already.

    Returns:
        The reason why they cannot be used, or None.
    """
    try:
        _trim()
    except OrtUnavailable as error:
        return str(error)
    return None


@functools.cache
def _trim() -> Callable[[bool], int]:
    return extensions.load_kernels()


_users: Counter[bool] = Counter()


def keep_memory_for(user: object, keep: bool) -> Callable[[], object]:
    """Cache the memory of kernel results for the next step as long as a user wants that.

    The cached memory is released when the last such user is gone.

    Args:
        user: Object whose lifetime ends the request.
        keep: True to request the cache. False registers a user that does not need it.

    Returns:
        Function that ends the request earlier.
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
    # Not called as a torch operator: garbage collection may trigger this during an export, whose
    # tracer would record the operator as a part of the model.
    _trim()(_users[True] > 0)
