"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number of things in words, such as "1 output" or "4 gradients".

    Args:
        number: Number of things.
        noun: Name of one of them.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
