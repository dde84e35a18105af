"""List of weak references to the objects that a kernel created, such as its runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Objects in order of creation that are still referenced elsewhere.

    Args:
        last: Keep the newest object alive; all others are referenced weakly.
    """

    def __init__(self, *, last: bool) -> None:
        self._keeps_last = last
        self._last: T | None = None
        self._known: list[weakref.ref[T]] = []
        self._changing = threading.Lock()

    def __repr__(self) -> str:
        return repr([*self])

    def append(self, begun: T) -> None:
        """Append the newest object; the one before it is no longer kept alive.

        Args:
            begun: The object.
        """
        with self._changing:
            self._known = [*map(weakref.ref, self), weakref.ref(begun)]
            self._last = begun if self._keeps_last else None

    def remove(self, ended: T) -> None:
        """Remove an object.

        Args:
            ended: The object.
        """
        with self._changing:  # a run that was refused removes itself, in its own thread
            self._known = [weakref.ref(each) for each in self if each is not ended]
            self._last = self.last if self._keeps_last else None

    def clear(self) -> None:
        """Remove all objects."""
        self._known, self._last = [], None

    @property
    def last(self) -> T | None:
        """Newest object that is still alive; None if there is none."""
        return next(reversed([*self]), None)

    def __iter__(self) -> Iterator[T]:
        return iter([begun for each in self._known if (begun := each()) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)
