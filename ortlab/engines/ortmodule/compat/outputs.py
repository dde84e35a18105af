"""What models give back that no graph can: caches of keys and values for generating text."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any


class _Last(threading.local):
    left_out: tuple[str, ...] = ()


_last = _Last()


def last_left_out() -> tuple[str, ...]:
    """The names of what this thread's last export leaves out of the model's results."""
    return _last.left_out


def without_caches(extract_schema: Callable[..., Any]) -> Callable[..., Any]:
    """_io._extract_schema for results without transformers' caches: they are None.

    A decoder fills one in training too (``use_cache`` is on by default), and nobody reads it there.
    """

    @functools.wraps(extract_schema)
    def extract(data: Any, device: Any) -> Any:
        left_out: list[str] = []
        data = _without_caches(data, left_out, "a result")
        _last.left_out = tuple(left_out)
        return extract_schema(data, device)

    return extract


def _without_caches(data: Any, left_out: list[str], name: str) -> Any:
    # Only who imported it can have made one.
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None and isinstance(data, caches.Cache):
        left_out.append(name)
        return None
    if isinstance(data, Mapping):
        kept = {key: _without_caches(value, left_out, str(key)) for key, value in data.items()}
        return type(data)(**kept) if left_out else data
    if type(data) in (tuple, list):
        return type(data)(_without_caches(value, left_out, name) for value in data)
    return data
