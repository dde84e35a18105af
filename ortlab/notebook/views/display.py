"""Display of views: their bundled JavaScript and a cell's displays."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
from IPython.display import publish_display_data

from ortlab.utils import buttons

if TYPE_CHECKING:
    from ortlab.metrics.recorder import Watched


PANEL_OR_RUN = "ortlab-panel-view,ortlab-run"
"""CSS classes of the live views that take each other's place."""
STATIC = Path(__file__).parents[1] / "static"


@dataclass(frozen=True)
class Place:
    """Display that the view of a run replaces.

    Attributes:
        display_id: Id of the display.
        take_back: Called with the run when it is over. Shows the earlier content again and returns
            True, or returns False to leave the place to the run.
    """

    display_id: str
    take_back: Callable[[Watched], bool]


PLACE: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


@contextlib.contextmanager
def shown_in(place: Place) -> Iterator[None]:
    """Replace a display with the view of the run that is started inside the `with` block.

    Args:
        place: The display.
    """
    token = PLACE.set(place)
    try:
        yield
    finally:
        PLACE.reset(token)


def publish(
    data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
) -> None:
    """Display data in the running cell.

    Args:
        data: MIME bundle.
        metadata: Metadata of the bundle.
        display_id: Id of the display.
        update: Whether to replace an earlier display of that id.
    """
    publish_display_data(  # type: ignore[no-untyped-call]
        data, metadata, transient={"display_id": display_id}, update=update
    )


def republish(data: dict[str, Any], metadata: dict[str, Any], display_id: str) -> None:
    """Replace an earlier display, from any thread.

    It is published for the cell that runs now, not for the one that started the thread, because
    nbclient accepts no other output. The display id alone determines where it is shown.

    Args:
        data: MIME bundle.
        metadata: Metadata of the bundle.
        display_id: Id of the display.
    """
    contextvars.Context().run(publish, data, metadata, display_id, update=True)


def still_of(display_id: str) -> str:
    """Return the mark and display id of the output after a live view.

    Args:
        display_id: Display id of the live view.
    """
    return f"{display_id}-still"


def still(mark: str, kind: str, page: str, *, by_style: bool = False) -> str:
    """Return HTML for pages without a kernel: a reopened notebook, an HTML page, a printed one.

    It belongs into the output after that of a live view, whose script hides it (`hidesStill` in
    js/src/elements.js). Of a view without a kernel JupyterLab shows no other form but an error
    line, which this hides.

    Args:
        mark: Mark by which the live view finds it.
        kind: CSS class of the live view, or several with commas.
        page: The HTML to show.
        by_style: Whether a style hides it, because the live view has no script of its own.
    """
    classes = ", ".join(f".{each}" for each in kind.split(","))
    here, child = f'[data-ortlab-still="{mark}"]', ".jp-OutputArea-child"
    hides = f"{child}:has({classes}) + {child}:has({here}) {{display: none}}" if by_style else ""
    return (
        f"<style>{child}:has(+ {child} {here}):not(:has({classes})) {{display: none}} {hides}"
        f'</style><div data-ortlab-still="{mark}">{page}</div>'
    )


def controls_guard() -> anywidget.AnyWidget:
    """Return an invisible child for a view that consists of Jupyter's own controls.

    It disables the view when the kernel ends, and lets arrow keys reach sliders in Notebook 7.
    """
    hidden = ipywidgets.Layout(display="none")
    return anywidget.AnyWidget(_esm=bundled("controls_guard.js"), layout=hidden)


def print_waiting() -> None:
    """Print a line below buttons that respond only while no cell runs."""
    if (line := buttons.waiting()) is not None:
        print(line, flush=True)


def bundled(name: str) -> str:
    """Return the text of a bundled file.

    Args:
        name: Name of the file.

    Raises:
        RuntimeError: If the build hook has not made it.
    """
    try:
        return (STATIC / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"the charts' {name} was not built; run `pip install -e .` in ortlab's repository"
        ) from None
