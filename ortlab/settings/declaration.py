"""Declaration of settings with help, unit, bounds and choices, and their validation."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

_VARIABLES = "ORTMODULE_"


_STANDING = object()
"""Placeholder for a setting that was not given."""


@dataclass(frozen=True)
class Declaration:
    """Declaration of one setting: its type, default, help text, bounds and unit.

    Attributes:
        name: Name of the setting.
        type: Plain type of the value: ``str``, ``int``, ``float`` or ``bool``.
        default: Value if nothing is chosen.
        help: Help text, without the choices and the default.
        optional: True if ``None`` is also a valid value.
        choices: Valid values of a ``str``; empty for any text.
        minimum: Smallest valid number; None for no limit.
        above: Number that the value must exceed; None for no limit.
        maximum: Largest valid number; None for no limit.
        unit: Unit of the value; "" for none.
        many: True if the value is one or several of the choices, separated by commas.
        source: Source that ORTModule itself reads the setting from: an environment variable, whose
            value is the default of the setting, or a key of its JSON file or of its DebugOptions.
        prefix: Prefix of the names in the value of the environment variable.
        panel: True if the panel always shows the control; others are in a collapsed section.
        here: True if the setting is never taken from a checkpoint, which may come from anyone,
            because it names files of this machine or skips a check.
        alias: Another name that is accepted but not shown; "" for none.
        renamed: Former choice -> current choice.
    """

    name: str
    type: type
    default: Any
    help: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    unit: str = ""
    many: bool = False
    source: str = ""
    prefix: str = ""
    panel: bool = False
    here: bool = False
    alias: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def variable(self) -> str:
        """Environment variable that overrides the default; "" for none."""
        return self.source if self.source.startswith(_VARIABLES) else ""

    @property
    def flag(self) -> str:
        """Name of the option on a command line: ``--batch-size`` for ``batch_size``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """Return the value that a user typed.

        Args:
            text: The typed text; "none" and "off" are None for an optional setting.

        Raises:
            ValueError: If the text is not a value of the setting's type. Bounds and choices are
                not checked; see `check`.
        """
        lowered = text.strip().lower()
        if self.optional and lowered in ("none", "off"):
            return None
        if self.type is bool:
            if lowered in ("on", "true", "yes", "1"):
                return True
            if lowered in ("off", "false", "no", "0"):
                return False
            raise ValueError(f"{self.flag} takes on or off, not {text!r}")
        if self.type is str:
            return text
        try:
            return self.type(text)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise ValueError(f"{self.flag} takes {kind}, not {text!r}") from None

    def show(self, value: Any) -> str:
        """Return a value as a user types it, so that `parse` returns the same value.

        Args:
            value: A valid value of the setting.
        """
        if value is None:
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return (
            f"{value:g}"
            if isinstance(value, float) and float(f"{value:g}") == value
            else f"{value}"
        )

    def standing(self) -> Any:
        """Return the value if nothing is chosen: from the environment variable, else the default.

        Raises:
            ValueError: If the value of the environment variable is not valid.
        """
        given = os.environ.get(self.variable, "") if self.variable else ""
        if not given:
            return self.default
        try:
            # ORTModule reads the variable, too, and accepts only these spellings.
            if self.type is bool and given not in ("0", "1"):
                raise ValueError("choose from 0, 1")
            if self.choices:
                names = {(self.prefix + name).upper(): name for name in self.choices}
                chosen = given.split("|") if self.many else [given]
                for name in chosen:
                    if name not in names:
                        raise ValueError(unknown_name(name, names))
                return self.check(",".join(names[name] for name in chosen))
            return self.check(self.parse(given))
        except ValueError as error:
            raise ValueError(f"{self.variable}={given!r}: {error}") from None

    def check(self, value: Any) -> Any:
        """Return the value after validation.

        Args:
            value: A value of the declared type. An ``int`` is converted to ``float`` if needed.

        Returns:
            The value with former choices renamed and several choices in the order of declaration.

        Raises:
            ValueError: If the value has another type, is out of bounds or is not a choice.
        """
        if value is None:
            if self.optional:
                return None
            raise ValueError(f"{self.name} needs a value; the default is {self.default!r}")
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        wrong_bool = isinstance(value, bool) and self.type is not bool
        if wrong_bool or not isinstance(value, self.type):
            raise ValueError(
                f"{self.name}={value!r} is {type(value).__name__}, expected {self.type.__name__}"
            )
        if isinstance(value, str) and self.choices:
            names = [name.strip() for name in value.split(",")] if self.many else [value]
            names = [self.renamed.get(name, name) for name in names]
            for name in names:
                if name not in self.choices:
                    raise ValueError(f"{self.name}={name!r}: {unknown_name(name, self.choices)}")
            value = ",".join(name for name in self.choices if name in names)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _check_bounds(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"{self.name}={value!r} must be finite")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name}={value!r} must be at least {self.minimum:g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"{self.name}={value!r} must be above {self.above:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name}={value!r} must be at most {self.maximum:g}")


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return a phrase that lists the known names and suggests the closest one.

    Args:
        name: The unknown name.
        known: All valid names.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    offer = f"; did you mean {near[0]!r}?" if near else ""
    return f"choose from {', '.join(known) or 'nothing (none exist)'}{offer}"


def setting(default: Any, *, help: str, **bounds: Any) -> Any:  # noqa: A002 - argparse's word
    """Return a dataclass field that declares a setting.

    Args:
        default: Value if nothing is chosen.
        help: Help text in lower case, without a period.
        **bounds: Other fields of `Declaration`, such as choices, minimum, above, maximum, unit.
    """
    metadata = {"default": default, "help": help, **bounds}
    # The environment is read when settings are created, not when this module is imported.
    return dataclasses.field(default_factory=lambda: _STANDING, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Frozen set of settings, validated on creation and changed by replacement.

    Raises:
        ValueError: If a value is not valid; the message has the setting's name and valid values.
    """

    def __post_init__(self) -> None:
        for declaration in self.declarations().values():
            value = getattr(self, declaration.name)
            value = declaration.standing() if value is _STANDING else declaration.check(value)
            object.__setattr__(self, declaration.name, value)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Return the settings of this class by name, in the order of declaration."""
        return _declarations(cls)  # type: ignore[arg-type]  # mypy checks the hash of an instance

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` with each alias replaced by the setting's name.

        Args:
            values: Name or alias -> value.

        Raises:
            ValueError: If a setting is given under both of its names.
        """
        names = {each.alias: name for name, each in cls.declarations().items() if each.alias}
        found: dict[str, Any] = {}
        for given, value in values.items():
            name = names.get(given, given)
            if name in found:
                raise ValueError(
                    f"{name} is given twice, by its name and by its alias; give it once"
                )
            found[name] = value
        return found

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return settings from a mapping of names, which may be aliases.

        Args:
            values: Name or alias -> value; settings without a value have their defaults.

        Raises:
            ValueError: If a name is unknown, with the nearest known one, or a value is not allowed.
        """
        known, values = cls.declarations(), cls.canonical(values)
        for name in values:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy of these settings with changes.

        Args:
            **changes: New values by name or alias.

        Raises:
            ValueError: If a name is unknown or a value is not allowed.
        """
        return type(self).of({**self.as_dict(), **self.canonical(changes)})

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as name -> value, the format of settings.json."""
        return {name: getattr(self, name) for name in self.declarations()}


@functools.cache
def _declarations(cls: type[Settings]) -> dict[str, Declaration]:
    hints = typing.get_type_hints(cls)
    return {field.name: _declaration(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _declaration(field: dataclasses.Field[Any], hint: Any) -> Declaration:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (member for member in members if member is not type(None))
    return Declaration(
        name=field.name,
        type=plain,
        optional=type(None) in members,
        **field.metadata,
    )
