"""The history in the notebook: a table to sort and search, live for the runs that go on.

The browser's side is js/src/history.js. With the table goes the same as plain HTML, in an output of
its own, which a saved notebook, an HTML page and a printed one have; the living table hides it.
"""

from __future__ import annotations

import contextvars
import uuid
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from IPython.core.display_functions import publish_display_data
from IPython.core.getipython import get_ipython

from ortlab.history.listing import FIELDS, History, living_entries
from ortlab.notebook.views.charts import Live
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import bundled, publish
from ortlab.notebook.views.pump import Pump
from ortlab.settings import RUN_SORTS

if TYPE_CHECKING:
    from ortlab.history.entry import RunEntry

# A widget that is gone leaves a line of JupyterLab's, in the output before that of the table.
_NO_DEAD_LINE = (
    '<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child [data-ortlab-still="{mark}"])'
    ":not(:has(.ortlab-history)) {{display: none}}</style>"
)


class HistoryView(anywidget.AnyWidget):
    """The table. ``still`` is the mark of the plain one that it takes the place of.

    RuntimeError where the package was installed without its JavaScript.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)
    heads: traitlets.List[Any] = traitlets.List().tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    live: traitlets.List[Any] = traitlets.List().tag(sync=True)
    order: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)

    def __init__(self, history: History, *, still: str = "") -> None:
        self._history = history
        settings = history.settings
        at = [field.key for field in FIELDS].index(RUN_SORTS[settings.sort])
        names = {run.name for run in history.own}
        super().__init__(
            _esm=bundled("history.js"),
            _css=bundled("history.css"),
            heads=[
                {"head": field.head, "number": field.number, "high": field.high_first}
                for field in FIELDS
            ],
            rows=[_row(entry, live=entry.name in names) for entry in history],
            order={"at": at, "high": FIELDS[at].high_first != settings.reverse},
            still=still,
            hint=history.hint,
        )

    def refresh(self) -> None:
        """Tells the page how the runs of this process stand now."""
        self.live = [_row(entry, live=entry.at_work) for entry in living_entries(self._history.own)]


class _Runs:
    """What ends when the last of the runs does."""

    def __init__(self, history: History) -> None:
        self._own = history.own

    def over(self) -> bool:
        """Whether all are over."""
        return all(run.over() for run in self._own)


def show(history: History) -> Live | None:
    """Shows the table in the cell that is running; what keeps it up to date, where a run goes on.

    Where there is no JavaScript for it, it is the plain table.
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
        # In the name of the cell that is running now, as `charts` does.
        contextvars.Context().run(publish, _page(history.now(), mark), {}, mark, update=True)

    pump = Pump(_Runs(history), view.refresh, finish)
    ends_with_cell(pump.close)
    return Live(get_ipython(), _Runs(history), pump)


def _plain(history: History) -> dict[str, str]:
    return {"text/html": history._repr_html_(), "text/plain": repr(history)}


def _page(history: History, mark: str) -> dict[str, str]:
    """The table that is hidden while the living one is there."""
    plain = _plain(history)
    inside = f'<div data-ortlab-still="{mark}">{plain["text/html"]}</div>'
    return {**plain, "text/html": _NO_DEAD_LINE.format(mark=mark) + inside}


def _row(entry: RunEntry, *, live: bool) -> dict[str, Any]:
    return {
        "name": entry.name,
        "live": live,
        "cells": [field.text(entry) for field in FIELDS],
        "keys": [field.value(entry) for field in FIELDS],
    }
