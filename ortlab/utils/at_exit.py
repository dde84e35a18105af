"""Functions to call when Python ends: first those that end runs, then what the runs use.

`atexit` calls the last registered function first, so that worker processes, which a run starts,
would end before it. Also, it does not call what is registered while Python ends.
"""

from __future__ import annotations

import atexit
import traceback
from collections.abc import Callable

_runs: dict[Callable[[], object], None] = {}
_others: dict[Callable[[], object], None] = {}


def register(function: Callable[[], object], *, last: bool = False) -> None:
    """Call a function when Python ends.

    Args:
        function: The function.
        last: True to call it after all that are not.
    """
    (_others if last else _runs)[function] = None
    # Before the functions of libraries that were imported meanwhile, such as ZeroMQ's.
    atexit.unregister(_end)
    atexit.register(_end)


def unregister(function: Callable[[], object]) -> None:
    """Do not call a function when Python ends.

    Args:
        function: The function; one that is not registered is ignored.
    """
    _runs.pop(function, None)
    _others.pop(function, None)


def _end() -> None:
    while left := _runs or _others:
        function, _ = left.popitem()
        try:
            function()
        except Exception:  # noqa: BLE001 - the others are called all the same, as by `atexit`
            traceback.print_exc()
