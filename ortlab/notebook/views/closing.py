"""Lifetime of a cell's views: they are closed when the cell runs again or is deleted.

Otherwise a widget, and the graph or run that it shows, would live as long as its kernel.
JupyterLab, Notebook 7 and VS Code send the id of the running cell and the ids of deleted cells
(``cellId`` and ``deletedCells`` in the metadata of Jupyter's execute_request). With other front
ends, views are not closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from ipywidgets import Widget

_of_cells: dict[str, list[Callable[[], object]]] = {}


def ends_with_cell(close: Callable[[], object]) -> None:
    """Register a function that is called when the running cell runs again or is deleted.

    Args:
        close: Closes a view of the cell.
    """
    if cell := _metadata().get("cellId"):
        _of_cells.setdefault(cell, []).append(close)


def cell_begins(_: object = None) -> None:
    """Close the views of the running cell's last execution and of deleted cells."""
    metadata = _metadata()
    for cell in (metadata.get("cellId"), *metadata.get("deletedCells", ())):
        for close in _of_cells.pop(cell, ()):
            close()


def close_all(widget: Widget) -> None:
    """Close a widget with its layout, its style and its children. Idempotent.

    Args:
        widget: The widget.
    """
    for part in _parts(widget):
        part.close()


def _parts(widget: Widget) -> Iterator[Widget]:
    from ipywidgets import Widget  # heavy: ipywidgets, at every ``%load_ext``

    for name in ("children", "layout", "style"):
        value = getattr(widget, name, ())
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Widget):
                yield from _parts(each)
    yield widget


def _metadata() -> dict[str, Any]:
    kernel = getattr(get_ipython(), "kernel", None)
    return {} if kernel is None else kernel.get_parent().get("metadata", {})
