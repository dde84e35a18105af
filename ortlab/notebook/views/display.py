"""How views get onto a page: their bundled JavaScript and the displays of a cell."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.display_functions import publish_display_data

if TYPE_CHECKING:
    pass


STATIC = Path(__file__).parents[1] / "static"


PLACE: contextvars.ContextVar[str | None] = contextvars.ContextVar("place", default=None)


@contextlib.contextmanager
def shown_in(display_id: str) -> Iterator[None]:
    """What is shown meanwhile takes the place of the display of this id."""
    token = PLACE.set(display_id)
    try:
        yield
    finally:
        PLACE.reset(token)


def publish(
    data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
) -> None:
    """Displays `data`, in the place of the display of this id with `update`."""
    publish_display_data(  # type: ignore[no-untyped-call]
        data, metadata, transient={"display_id": display_id}, update=update
    )


def bundled(name: str) -> str:
    """What the build hook made; RuntimeError says how to make it."""
    try:
        return (STATIC / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuntimeError(
            f"the charts' {name} was not built; run `pip install -e .` in ortlab's repository"
        ) from None
