"""The view of an exported model in the notebook's page, which ``%load_ext ortlab`` registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_view: Callable[..., Any] | None = None


def register(view: Callable[..., Any] | None) -> None:
    """Have `view(exported, form)` show exported models from now on; None takes it back."""
    global _view
    _view = view


def registered() -> Callable[..., Any]:
    """Return the view.

    Raises:
        RuntimeError: If the notebook's part of ortlab was not loaded.
    """
    if _view is None:
        raise RuntimeError("no notebook shows the model: run %load_ext ortlab, then call it again")
    return _view
