"""A call as bytes for other processes: a function with its arguments, pickled by value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def packed(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Return a call as bytes, by value.

    Args:
        name: The function's name, for the error message.
        function: The function; it may be defined in a notebook cell.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        A pickle of (function, args, kwargs).

    Raises:
        ValueError: If one of them cannot be pickled; the message names which.
    """
    from ortlab.cluster.values import dumps  # optional: cloudpickle

    try:
        return dumps((function, args, kwargs))
    except Exception as error:
        culprit = _unpicklable(_parts(name, function, args, kwargs))
        raise ValueError(
            f"{culprit or 'the call'} cannot be sent to workers: {error}; workers get copies, so "
            "pass objects that can be pickled: a model, tensors, a dataset, a list of batches"
        ) from error


def _parts(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a call, with the names that the user knows."""
    try:
        yield from inspect.signature(function).bind(*args, **kwargs).arguments.items()
    except (TypeError, ValueError):  # a builtin has no signature; wrong arguments do not bind
        yield from ((f"argument {number}", value) for number, value in enumerate(args, 1))
        yield from kwargs.items()
    if inspect.isfunction(function):
        uses = inspect.getclosurevars(function)
        for used, value in {**uses.globals, **uses.nonlocals}.items():
            yield f"{used}, which {name} uses,", value
    yield name, function


def _unpicklable(parts: Iterator[tuple[str, Any]]) -> str | None:
    """Return the name of the first part that cannot be pickled, or None."""
    from ortlab.cluster.values import dumps  # optional: cloudpickle

    for name, value in parts:
        try:
            dumps(value)
        except Exception:  # noqa: BLE001 - any error means that this part cannot be pickled
            return name
    return None
