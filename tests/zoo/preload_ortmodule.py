"""Modules of `preload`, and ORT's training package, which patches torch."""

from ortlab.engines.ortmodule import compat

if compat.unavailable() is None:
    compat.ortmodule()

from tests.zoo import preload  # noqa: F401 - last, as it freezes the objects that exist
