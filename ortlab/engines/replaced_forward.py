"""Assignments to the ``forward`` of a wrapped model: a library's layer around it, or another model.

accelerate, for example, puts its conversions around the forward that runs in ORT. A function that
does not call that one is the user's new forward of the model.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

_DEPTH = 8


def is_around(function: Any, inner: Any) -> bool:
    """Return True if a function refers to another one, so that it may call it.

    Args:
        function: Function that was assigned.
        inner: The forward that runs in ORT.
    """
    waiting, seen = [(function, 0)], set[int]()
    while waiting:
        each, depth = waiting.pop()
        if each is inner:
            return True
        if id(each) not in seen and depth < _DEPTH:
            seen.add(id(each))
            waiting += [(one, depth + 1) for one in _callables_of(each)]
    return False


def _callables_of(value: Any) -> Iterator[Any]:
    """Iterate over what a function refers to: by closure, global name, default or attribute."""
    if isinstance(value, types.MethodType):
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            yield getattr(cell, "cell_contents", None)
        for name in value.__code__.co_names:
            if callable(found := value.__globals__.get(name)):
                yield found
    attributes = getattr(value, "__dict__", None)
    if callable(value) and isinstance(attributes, dict) and not isinstance(value, type):
        yield from filter(callable, attributes.values())
