"""Settings as declared once: help, unit, bounds, choices; validated when made."""

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
"""Stands for a setting that was not given."""


@dataclass(frozen=True)
class Declaration:
    """How one setting may be chosen: its help text, its bounds and its unit.

    ``type`` is the plain type of the value (``str``, ``int``, ``float`` or ``bool``); ``optional``
    says that ``None`` is a value too; ``many`` that it is several of the choices, with commas.

    ``source`` is where ORTModule itself takes the setting from: a variable of the environment,
    which stands where nothing else is chosen, or a key of its JSON file or of its DebugOptions.
    ``prefix`` is what the names among the variable's values begin with.

    ``panel`` puts the setting's control in front on the panel; the others stand behind a fold.

    ``here`` says that a checkpoint does not choose it, which may be anybody's: it names files of
    this machine, or leaves out a check.

    ``alias`` is another name that is accepted and not shown, ``renamed`` maps former choices to
    those of today.
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
        """The variable of the environment that stands where nothing is chosen; "" for none."""
        return self.source if self.source.startswith(_VARIABLES) else ""

    @property
    def flag(self) -> str:
        """The option's name on a command line: ``batch_size`` is ``--batch-size``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that a user typed as `text`; ValueError says what would have been right."""
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
        """`value` as a user types it: what `parse` takes back."""
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
        """What holds where nothing is chosen: the variable's value, else the default."""
        given = os.environ.get(self.variable, "") if self.variable else ""
        if not given:
            return self.default
        try:
            # ORTModule reads it too and takes no other spelling than these.
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
        """`value`, converted to the declared type where that loses nothing; else ValueError."""
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
    """A phrase that lists the known names and offers the one nearest to `name`."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    offer = f"; did you mean {near[0]!r}?" if near else ""
    return f"choose from {', '.join(known) or 'nothing (there is none)'}{offer}"


def setting(default: Any, *, help: str, **bounds: Any) -> Any:  # noqa: A002 - argparse's word
    """A dataclass field with its `Declaration`: help, choices, minimum, above, maximum, unit."""
    metadata = {"default": default, "help": help, **bounds}
    # The environment is read when settings are made, not when this module is imported.
    return dataclasses.field(default_factory=lambda: _STANDING, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen set of settings: validated when made, changed by replacement.

    Raises ValueError, naming the setting and what would be right.
    """

    def __post_init__(self) -> None:
        for declaration in self.declarations().values():
            value = getattr(self, declaration.name)
            value = declaration.standing() if value is _STANDING else declaration.check(value)
            object.__setattr__(self, declaration.name, value)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Every setting of this class by its name, in the order of declaration."""
        return _declarations(cls)  # type: ignore[arg-type]  # mypy asks an instance for the hash

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` with each alias replaced by the setting's name.

        Raises:
            ValueError: If a setting is given under both of its names.
        """
        names = {each.alias: name for name, each in cls.declarations().items() if each.alias}
        found: dict[str, Any] = {}
        for given, value in values.items():
            name = names.get(given, given)
            if name in found:
                raise ValueError(f"{name} is given twice, once by its other name; give it once")
            found[name] = value
        return found

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return settings from a mapping of names, which may be aliases.

        Raises:
            ValueError: If a name is unknown, with the nearest known one, or a value is not allowed.
        """
        known, values = cls.declarations(), cls.canonical(values)
        for name in values:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}: {unknown_name(name, known)}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """These settings with `changes` made; validated like new ones."""
        return type(self).of({**self.as_dict(), **self.canonical(changes)})

    def as_dict(self) -> dict[str, Any]:
        """Name to value, as settings.json holds it."""
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
