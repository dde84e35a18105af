"""What an engine has to say where nothing shows its report: by the logger ``ortlab``, once each.

A program that sets no logging up has it on stderr, by Python's last resort; one that does has it
where it likes. Notebooks, commands and workers, whose views show every report, leave it unsaid.
"""

from __future__ import annotations

import logging
from typing import Final

_LOGGER: Final = logging.getLogger("ortlab")
_SHOWN: Final = logging.NullHandler()


def say(what: str, text: str) -> None:
    """Says `text` of `what`, as a warning."""
    _LOGGER.warning("ortlab: %s: %s", what, text)


def are_seen(*, by_themselves: bool = False) -> None:
    """Has the last resort print no more of them, since a view shows them; or all again."""
    (_LOGGER.removeHandler if by_themselves else _LOGGER.addHandler)(_SHOWN)
