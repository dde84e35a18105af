"""The user's callbacks of one run: their methods, and checks of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

EVENTS: Final = (
    "on_run_start",
    "on_step_end",
    "on_evaluate",
    "on_checkpoint",
    "on_pause",
    "on_run_end",
)
"""Names of the methods that a callback may have; see `ortlab.training.callback.Callback`."""

Callbacks: TypeAlias = Any
"""Type of the argument ``callbacks`` of `ortlab.api.finetune`: a callback, or several."""


class RunCallbacks:
    """The callbacks of one run.

    Args:
        given: Callbacks, as in `ortlab.api.finetune`; None for none.
        run: The run that they are called with.

    Raises:
        ValueError: If one has none of the methods, or a method that does not take the run alone.
    """

    def __init__(self, given: Callbacks | None, run: Any) -> None:
        self._callbacks: list[Any] = []
        if isinstance(given, Iterable) and not _methods(given):
            self._callbacks += given
        elif given is not None:
            self._callbacks.append(given)
        self._run = run
        for each in self._callbacks:
            _check(each)

    def having(self, event: str) -> list[Any]:
        """Return the callbacks that have a method for an event.

        Args:
            event: One of `EVENTS`.
        """
        return [each for each in self._callbacks if hasattr(each, event)]

    def call(self, callback: Any, event: str) -> None:
        """Call a callback with the run.

        Args:
            callback: The callback.
            event: One of `EVENTS`.
        """
        getattr(callback, event)(self._run)

    def remove(self, callback: Any) -> None:
        """Call a callback no more.

        Args:
            callback: The callback.
        """
        self._callbacks = [each for each in self._callbacks if each is not callback]


def called(callback: Any, event: str) -> str:
    """Return the name of a callback's method in words.

    Args:
        callback: The callback.
        event: One of `EVENTS`.
    """
    return f"{type(callback).__name__}.{event}"


def _methods(callback: Any) -> list[str]:
    return [event for event in EVENTS if hasattr(callback, event)]


def _check(callback: Any) -> None:
    name = getattr(callback, "__name__", type(callback).__name__)
    if isinstance(callback, type):
        raise ValueError(f"callbacks has the class {name}; give an object of it: {name}()")
    methods = _methods(callback)
    if not methods:
        raise ValueError(
            f"a callback needs one of the methods {', '.join(EVENTS)}, and this {name} has none; "
            "derive it from ortlab.Callback"
        )
    for each in methods:
        try:
            inspect.signature(getattr(callback, each)).bind("the run")
        except TypeError as error:
            raise ValueError(
                f"{name}.{each} must take the run as its only argument: {error}"
            ) from None
        except ValueError:  # written in C: its arguments are unknown
            continue
