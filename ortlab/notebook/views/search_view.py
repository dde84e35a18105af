"""View of a race or a search: a live table with buttons in a notebook, text elsewhere.

The table is plain HTML that is replaced during the search, so that a saved notebook, an HTML page
and a printed one have its last state.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

from ortlab.notebook.views.charts import Live
from ortlab.notebook.views.closing import close_all, ends_with_cell
from ortlab.notebook.views.display import controls_guard, print_waiting, publish, republish, still
from ortlab.notebook.views.pump import Pump
from ortlab.search.background import Background

PRINT_EVERY_S = 5.0
"""Time between two lines of progress in a terminal."""
_CLASS = "ortlab-search"


class Buttons:
    """Buttons that stop a search and, when it has ended, apply its best settings."""

    def __init__(self, search: Background[Any]) -> None:
        self._search = search
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="End the search and keep its measurements so far"
        )
        self._apply = ipywidgets.Button(
            description="Apply the best",
            tooltip="Apply the settings to the active run, or else to later runs",
            layout=ipywidgets.Layout(display="none", width="auto"),
            button_style="primary",
        )
        self._said = ipywidgets.Label()
        self._stop.on_click(self._stopped)
        self._apply.on_click(self._applied)
        self.box = ipywidgets.HBox([self._stop, self._apply, self._said, controls_guard()])
        self.box.add_class(_CLASS)

    def over(self) -> None:
        """Offer to apply the result of the finished search."""
        self._stop.layout.display = "none"
        if self._search.standing.best() is not None:
            self._apply.layout.display = None

    def close(self) -> None:
        """Remove the buttons from the page."""
        close_all(self.box)

    def _stopped(self, _: object) -> None:
        self._search.stop()
        self._stop.disabled = True
        self._said.value = "stopping after the current turn"

    def _applied(self, _: object) -> None:
        try:
            self._said.value = self._search.apply()
        except ValueError as error:
            self._said.value = str(error)


def follow(search: Background[Any]) -> Live | None:
    """Show a search in the running cell.

    Args:
        search: The search.

    Returns:
        The live view, or None if the search has already ended.
    """
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
    """Show the result of a search in the running cell.

    Args:
        standing: The result.
    """
    _publish(_shown(standing))


def _follow(search: Background[Any]) -> tuple[Pump, Callable[[], None]]:
    """Display buttons and table; return their pump and a function to call if it closes early."""
    mark = uuid.uuid4().hex
    buttons = Buttons(search)
    data = buttons.box._repr_mimebundle_()
    _publish({**data, "text/plain": f"{search.name}: {search.doing}"})
    print_waiting()
    publish(_page(search.standing, mark), {}, mark)
    ends_with_cell(buttons.close)
    shown = search.version

    def draw() -> None:
        nonlocal shown
        if search.version != shown:
            shown = search.version
            update()

    def update() -> None:
        republish(_page(search.standing, mark), {}, mark)

    def finish() -> None:
        update()
        buttons.over()

    return Pump(search, draw, finish), buttons.close


def _page(standing: Any, mark: str) -> dict[str, str]:
    """Return the result as HTML that looks right without its buttons in a reopened notebook."""
    data = _shown(standing)
    return {**data, "text/html": still(mark, _CLASS, data["text/html"])}


def _shown(standing: Any) -> dict[str, str]:
    return {"text/html": standing._repr_html_(), "text/plain": repr(standing)}


def _publish(data: dict[str, Any]) -> None:
    publish_display_data(data, {})  # type: ignore[no-untyped-call]


def _print(search: Background[Any]) -> tuple[Pump, Callable[[], None]]:
    said, said_at = "", float("-inf")

    def draw() -> None:
        nonlocal said, said_at
        now = time.monotonic()
        if search.doing != said and now - said_at >= PRINT_EVERY_S:
            said, said_at = search.doing, now
            print(f"{search.name}: {search.doing}", flush=True)

    return Pump(search, draw, lambda: print(search.standing, flush=True)), lambda: None
