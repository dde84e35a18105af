"""Model outputs that no graph can return: key/value caches for text generation."""

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
    """Return the names of the model's outputs that this thread's last export left out."""
    return _last.left_out


def without_caches(extract_schema: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap _io._extract_schema so that transformers' caches in the outputs become None.

    A decoder fills a cache in training too (``use_cache`` is on by default), where nothing reads
    it.

    Args:
        extract_schema: Function to wrap.

    Returns:
        The wrapped function.
    """

    @functools.wraps(extract_schema)
    def extract(data: Any, device: Any) -> Any:
        left_out: list[str] = []
        data = _without_caches(data, left_out, "a result")
        _last.left_out = tuple(left_out)
        return extract_schema(data, device)

    return extract


def _without_caches(data: Any, left_out: list[str], name: str) -> Any:
    # A cache can only exist if its module was imported.
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
