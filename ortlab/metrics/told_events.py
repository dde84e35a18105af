"""Lines of a run's view about events that no chart has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ortlab.metrics.recorder import Event

_FAILED_SHOWN: Final = 3


def told_failed(events: Sequence[Event]) -> list[str]:
    """Return the lines about metrics that have no value.

    Args:
        events: Events of the kind "metric_failed".

    Returns:
        The first lines: a message that has numbers of its own may differ in every evaluation.
    """
    return [event.text for event in events[:_FAILED_SHOWN]]


def told_warnings(events: Sequence[Event], shown: Collection[str] = ()) -> list[str]:
    """Return a line about the last warning, which names the number of those before it.

    Args:
        events: Events of the kind "warning".
        shown: Texts that the view shows elsewhere; warnings that begin with one are left out.
    """
    others = [event for event in events if not event.text.startswith(tuple(shown))]
    if not others:
        return []
    last, before = others[-1], len(others) - 1
    more = f" ({before} more before it: run.metrics.events)" if before else ""
    return [f"warning at step {last.step:,}: {last.text}{more}"]
