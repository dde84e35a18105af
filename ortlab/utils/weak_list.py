"""What a kernel began one after the other: all that somebody still has."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """In the order in which they began; keeps none of them alive but, with `last`, the last one."""

    def __init__(self, *, last: bool) -> None:
        self._keeps_last = last
        self._last: T | None = None
        self._known: list[weakref.ref[T]] = []

    def __repr__(self) -> str:
        return repr([*self])

    def append(self, begun: T) -> None:
        """Adds the newest; the one before stays as long as somebody has it: a name, a thread."""
        self._known = [*map(weakref.ref, self), weakref.ref(begun)]
        self._last = begun if self._keeps_last else None

    def clear(self) -> None:
        """Forgets all of them."""
        self._known, self._last = [], None

    @property
    def last(self) -> T | None:
        """The newest that is left; None without any."""
        return next(reversed([*self]), None)

    def __iter__(self) -> Iterator[T]:
        return iter([begun for each in self._known if (begun := each()) is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)
