"""Stored settings: former names of settings and engines, mapped when a file is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ortlab.settings.choices import FORMER_ENGINE
from ortlab.settings.declaration import aliases
from ortlab.settings.training import FinetuneSettings

_FORMER: Final = "lr"
"""A setting that every file with the former names has, and no other."""


def current(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings under their current names.

    Args:
        values: Name -> value, as a file has them.

    Returns:
        The settings with current names, and the engine by its current name. Names that no setting
        has are kept.
    """
    names = aliases(FinetuneSettings.declarations().values())
    found = {names.get(name, name): value for name, value in values.items()}
    if "engine" in found:
        found["engine"] = current_engine(found["engine"], values)
    return found


def current_engine(name: Any, values: Mapping[str, Any]) -> Any:
    """Return the current name of a stored engine.

    Files with the former names of settings call ORTModule ``ort``, which is a name of its own in
    others.

    Args:
        name: Engine as the file has it.
        values: Stored settings of the same run.
    """
    return FORMER_ENGINE.get(name, name) if _FORMER in values and isinstance(name, str) else name


def check(values: Mapping[str, Any]) -> None:
    """Check the stored settings that this version has.

    Args:
        values: Current name -> value.

    Raises:
        ValueError: A value has another type than its setting, is out of bounds or is not a choice.
    """
    known = FinetuneSettings.declarations()
    for name, value in values.items():
        if name in known:
            known[name].check(value)
