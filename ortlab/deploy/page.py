"""The view that shows an exported model in a notebook; ``%load_ext ortlab`` registers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_view: Callable[..., Any] | None = None


def register(view: Callable[..., Any] | None) -> None:
    """Set the view that shows exported models.

    Args:
        view: Called as `view(exported, form)`; None unregisters the current one.
    """
    global _view
    _view = view


def registered() -> Callable[..., Any]:
    """Return the view.

    Raises:
        RuntimeError: If ortlab's notebook extension is not loaded.
    """
    if _view is None:
        raise RuntimeError(
            "in_page() needs ortlab's notebook extension; run %load_ext ortlab, then call it again"
        )
    return _view
