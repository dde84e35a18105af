"""View of the history: a table to sort and search, with live rows for active runs.

The browser's side is js/src/history.js. The same table is also displayed as plain HTML in a
separate output for saved notebooks, HTML pages and printed ones; the live table hides it.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

from ortlab.history.listing import FIELDS, History, left_out, living_entries
from ortlab.notebook.views.charts import Live
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import bundled, publish, republish, still
from ortlab.notebook.views.pump import Pump
from ortlab.settings import RUN_SORTS

if TYPE_CHECKING:
    from ortlab.history.entry import RunEntry


class HistoryView(anywidget.AnyWidget):
    """Live table of runs.

    Args:
        history: Runs to show.
        still: Mark of the static table that this one hides.

    Raises:
        RuntimeError: If the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    heads: traitlets.List[Any] = traitlets.List().tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    live: traitlets.List[Any] = traitlets.List().tag(sync=True)
    order: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)
    wide = traitlets.Bool().tag(sync=True)

    def __init__(self, history: History, *, still: str = "") -> None:
        self._history = history
        settings = history.settings
        at = [field.key for field in FIELDS].index(RUN_SORTS[settings.sort])
        names = {run.name for run in history.own}
        hidden = left_out(settings.replace(wide=False))
        super().__init__(
            _esm=bundled("history.js"),
            _css=bundled("history.css"),
            heads=[
                {
                    "head": field.head,
                    "number": field.number,
                    "high": field.high_first,
                    "wide": field in hidden,
                }
                for field in FIELDS
            ],
            rows=[_row(entry, live=entry.name in names) for entry in history],
            order={"at": at, "high": FIELDS[at].high_first != settings.reverse},
            still=still,
            hint=history.hint,
            wide=settings.wide,
        )

    def refresh(self) -> None:
        """Send the current state of this process's runs to the page."""
        self.live = [_row(entry, live=entry.at_work) for entry in living_entries(self._history.own)]


class _Runs:
    """All runs of this process, which end when the last one does."""

    def __init__(self, history: History) -> None:
        self._own = history.own

    def over(self) -> bool:
        """Return whether all runs have ended."""
        return all(run.over() for run in self._own)


def show(history: History) -> Live | None:
    """Show the history in the running cell, as a static table if the JavaScript is missing.

    Args:
        history: Runs to show.

    Returns:
        The live view that updates the table, or None if this process has no runs in it.
    """
    mark = uuid.uuid4().hex
    try:
        view = HistoryView(history, still=mark)
    except RuntimeError as error:
        publish_display_data(_plain(history))  # type: ignore[no-untyped-call]
        print(error)
        return None
    ends_with_cell(lambda: close_all(view))
    data, metadata = view._repr_mimebundle_() or ({}, {})
    told = "1 run" if len(history) == 1 else f"{len(history)} runs"
    publish_display_data({**data, "text/plain": told}, metadata)  # type: ignore[no-untyped-call]
    publish(_page(history, mark), {}, mark)
    if not history.own:
        return None

    def finish() -> None:
        view.refresh()
        republish(_page(history.now(), mark), {}, mark)

    pump = Pump(_Runs(history), view.refresh, finish)
    ends_with_cell(pump.close)
    return Live(get_ipython(), _Runs(history), pump)


def _plain(history: History) -> dict[str, str]:
    return {"text/html": history._repr_html_(), "text/plain": repr(history)}


def _page(history: History, mark: str) -> dict[str, str]:
    """Return the static table, which the live one hides.

    If the kernel ends before its runs do, nobody corrects the state shown for them.
    """
    plain = _plain(history)
    page = plain["text/html"]
    if not _Runs(history).over():
        page += (
            f"<p>Active runs are shown as of {time.strftime('%Y-%m-%d %H:%M:%S')}: run this cell "
            "again for their state now.</p>"
        )
    return {**plain, "text/html": still(mark, "ortlab-history", page)}


def _row(entry: RunEntry, *, live: bool) -> dict[str, Any]:
    return {
        "name": entry.name,
        "live": live,
        "cells": [field.text(entry) for field in FIELDS],
        "keys": [field.value(entry) for field in FIELDS],
    }
