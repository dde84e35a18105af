"""How long a cell's views live: until it runs again or is deleted, when no page shows them.

By itself a widget lives as long as its kernel, and with it the graph or the run that it shows.
A front end says in which cell code runs, and which cells are gone (``cellId`` and ``deletedCells``
in the metadata of Jupyter's execute_request: JupyterLab, Notebook 7, VS Code); where it does not,
views stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from ipywidgets import Widget

_of_cells: dict[str, list[Callable[[], object]]] = {}


def ends_with_cell(close: Callable[[], object]) -> None:
    """Has `close` called once what the running cell shows is no longer on a page."""
    if cell := _metadata().get("cellId"):
        _of_cells.setdefault(cell, []).append(close)


def cell_begins(_: object = None) -> None:
    """Closes what the running cell showed the last time, and what deleted ones did."""
    metadata = _metadata()
    for cell in (metadata.get("cellId"), *metadata.get("deletedCells", ())):
        for close in _of_cells.pop(cell, ()):
            close()


def close_all(widget: Widget) -> None:
    """Closes a widget with its layout, its style and all that is in it. Twice is fine."""
    for part in _parts(widget):
        part.close()


def _parts(widget: Widget) -> Iterator[Widget]:
    from ipywidgets import Widget  # not for every ``%load_ext``

    for name in ("children", "layout", "style"):
        value = getattr(widget, name, ())
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Widget):
                yield from _parts(each)
    yield widget


def _metadata() -> dict[str, Any]:
    kernel = getattr(get_ipython(), "kernel", None)
    return {} if kernel is None else kernel.get_parent().get("metadata", {})
