"""Warnings of an engine through the logger ``ortlab``, where no view shows its report.

In a program that does not configure logging they go to stderr, through Python's last-resort
handler; otherwise logging decides. Notebooks, commands and workers suppress them, because their
views show every report.
"""

from __future__ import annotations

import logging
from typing import Final

_LOGGER: Final = logging.getLogger("ortlab")
_SHOWN: Final = logging.NullHandler()


def say(what: str, text: str) -> None:
    """Log a warning.

    Args:
        what: Subject of the warning, such as the name of a model.
        text: The warning.
    """
    _LOGGER.warning("ortlab: %s: %s", what, text)


def are_seen(*, by_themselves: bool = False) -> None:
    """Stop or resume printing the warnings to stderr by the last-resort handler.

    Args:
        by_themselves: True prints them again; False suppresses them, since a view shows them.
    """
    (_LOGGER.removeHandler if by_themselves else _LOGGER.addHandler)(_SHOWN)
