"""A race or a search in the notebook: a table that fills in, with buttons; as text elsewhere.

The table is plain HTML that is replaced while the work goes on, so whatever was shown last is what
a saved notebook, an HTML page and a printed one have.
"""

from __future__ import annotations

import contextvars
import time
import uuid
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.core.display_functions import publish_display_data
from IPython.core.getipython import get_ipython

from ortlab.notebook.views.charts import Live
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.pump import Pump
from ortlab.search.background import Background

PRINT_EVERY_S = 5.0
"""Between two lines of progress in a terminal."""
_CLASS = "ortlab-search"
# A widget that is gone leaves a line of JupyterLab's, in the output before that of the table.
_NO_DEAD_LINE = (
    '<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child [data-ortlab-search="{mark}"])'
    f":not(:has(.{_CLASS})) {{{{display: none}}}}</style>"
)


class Buttons:
    """Stops the work, and when it is over has its best settings applied."""

    def __init__(self, search: Background[Any]) -> None:
        self._search = search
        self._stop = ipywidgets.Button(description="Stop", tooltip="keep what was measured so far")
        self._apply = ipywidgets.Button(
            description="Apply the best",
            tooltip="in the run that trains the model, or else in the next ones",
            layout=ipywidgets.Layout(display="none", width="auto"),
            button_style="primary",
        )
        self._said = ipywidgets.Label()
        self._stop.on_click(self._stopped)
        self._apply.on_click(self._applied)
        self.box = ipywidgets.HBox([self._stop, self._apply, self._said])
        self.box.add_class(_CLASS)

    def over(self) -> None:
        """Offers what can be done with what was found."""
        self._stop.layout.display = "none"
        if self._search.standing.best() is not None:
            self._apply.layout.display = None

    def close(self) -> None:
        """Takes the buttons off the page."""
        close_all(self.box)

    def _stopped(self, _: object) -> None:
        self._search.stop()
        self._stop.disabled = True
        self._said.value = "stops after the turn in flight"

    def _applied(self, _: object) -> None:
        try:
            self._said.value = self._search.apply()
        except ValueError as error:
            self._said.value = str(error)


def follow(search: Background[Any]) -> Live | None:
    """Shows `search` in the cell that is running; None when it is over, and all is shown."""
    shell = get_ipython()
    in_notebook = getattr(shell, "kernel", None) is not None
    if search.over():
        if in_notebook:
            show(search.standing)
        else:
            print(search.standing, flush=True)
        return None
    pump, stop = _follow(search) if in_notebook else _print(search)
    return Live(shell, search, pump, stop)


def show(standing: Any) -> None:
    """Shows what was found, in the cell that is running."""
    _publish(_shown(standing))


def _follow(search: Background[Any]) -> tuple[Pump, Callable[[], None]]:
    """Displays buttons and table; returns their pump and what to do when that is closed early."""
    mark = uuid.uuid4().hex
    buttons = Buttons(search)
    data = buttons.box._repr_mimebundle_()
    _publish({**data, "text/plain": f"{search.name}: {search.doing}"})
    _publish(_page(search.standing, mark), mark)
    ends_with_cell(buttons.close)
    shown = search.version

    def draw() -> None:
        nonlocal shown
        if search.version != shown:
            shown = search.version
            update()

    def update() -> None:
        # In the name of the cell that is running now, not of the one that was when this thread
        # began: nbclient takes no other output. Where it goes, only the display's id says.
        contextvars.Context().run(_publish, _page(search.standing, mark), mark, update=True)

    def finish() -> None:
        update()
        buttons.over()

    return Pump(search, draw, finish), buttons.close


def _page(standing: Any, mark: str) -> dict[str, str]:
    """What was found, below buttons that are gone from the page when it is opened again."""
    data = _shown(standing)
    inside = f'<div data-ortlab-search="{mark}">{data["text/html"]}</div>'
    return {**data, "text/html": _NO_DEAD_LINE.format(mark=mark) + inside}


def _shown(standing: Any) -> dict[str, str]:
    return {"text/html": standing._repr_html_(), "text/plain": repr(standing)}


def _publish(data: dict[str, Any], display_id: str = "", *, update: bool = False) -> None:
    transient = {"display_id": display_id} if display_id else {}
    publish_display_data(data, {}, transient=transient, update=update)  # type: ignore[no-untyped-call]


def _print(search: Background[Any]) -> tuple[Pump, Callable[[], None]]:
    said, said_at = "", float("-inf")

    def draw() -> None:
        nonlocal said, said_at
        now = time.monotonic()
        if search.doing != said and now - said_at >= PRINT_EVERY_S:
            said, said_at = search.doing, now
            print(f"{search.name}: {search.doing}", flush=True)

    return Pump(search, draw, lambda: print(search.standing, flush=True)), lambda: None
