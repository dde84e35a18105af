"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as "1 output" or "4 gradients".

    Args:
        number: Number of things.
        noun: Name of one of them.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


_ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def ordinal(place: int) -> str:
    """Return the place of an element in words, such as "second" or "9th".

    Args:
        place: Place, counted from 0.
    """
    return _ORDINALS[place] if place < len(_ORDINALS) else f"{place + 1}th"


def shortened(text: str, length: int) -> str:
    """Return a text, with an ellipsis in place of what exceeds a length.

    Args:
        text: The text.
        length: Maximum number of characters, the ellipsis included.
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"


FEW: Final = 3
"""Number of names that a sentence lists."""


def few(names: Sequence[str]) -> str:
    """Return the first `FEW` of some names, and how many there are besides.

    Args:
        names: The names.
    """
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW])}{more}"
