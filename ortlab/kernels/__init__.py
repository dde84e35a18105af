"""Kernels that take the place of ORT's own in its CPU graphs, on torch's threads.

ORT calls them through its ATen operator. `substitutes` puts them into a graph, `choice` tells by
measurement which are faster on this machine, `kernels.cc` holds them.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ortlab.compat import OrtUnavailable, extensions
from ortlab.engines.base import tell

if TYPE_CHECKING:
    import onnx

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


def called(node: onnx.NodeProto) -> str:
    """The name of the kernel of ours that a node of a graph calls, "" where it calls none."""
    domain, _, name = operator(node).rpartition("::")
    return name if domain == DOMAIN else ""


def operator(node: onnx.NodeProto) -> str:
    """The operator of torch's that a node of a graph calls: "ortlab::attention"; "" for none."""
    if node.op_type != "ATen":
        return ""
    return next((each.s.decode() for each in node.attribute if each.name == "operator"), "")


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
