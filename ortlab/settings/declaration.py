"""Declaration of settings with help, unit, bounds and choices, and their validation."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import os
import shlex
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ortlab.settings.choices import is_own

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
        own: True if an object of the user's may take the place of a choice; its name follows
            `ortlab.settings.OWN`.
        many: True if the value is one or several of the choices, separated by commas.
        source: Source that ORTModule itself reads the setting from: an environment variable, whose
            value is the default of the setting, or a key of its JSON file or of its DebugOptions.
        prefix: Prefix of the names in the value of the environment variable.
        panel: True if the panel always shows the control; others are in a collapsed section.
        common: True if ``--help`` lists the option; ``--help-all`` lists all.
        here: True if the setting is never taken from a checkpoint, which may come from anyone,
            because it names files of this machine or skips a check.
        alias: Another name that is accepted but not shown; "" for none.
        short: True if command lines show the alias as a short option.
        several: Advice for a user who gives several values to compare; "" for none.
        renamed: Accepted choice that is not shown -> the choice that it means.
        topic: Title of the group of settings that it belongs to.
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
    own: bool = False
    many: bool = False
    source: str = ""
    prefix: str = ""
    panel: bool = False
    common: bool = False
    here: bool = False
    alias: str = ""
    short: bool = False
    several: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    topic: str = ""

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
            told = f"{self.flag} takes {kind}, not {text!r}"
            raise ValueError(self._advised(told, text)) from None

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

    def typed(self, value: Any) -> str:
        """Return the option and a value as words of a command line.

        Args:
            value: A valid value of the setting.
        """
        return f"{self.flag} {shlex.quote(self.show(value))}"

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
            told = f"{self.name}={value!r} is {type(value).__name__}, expected {self.type.__name__}"
            raise ValueError(self._advised(told, value))
        if isinstance(value, str) and self.choices and not (self.own and is_own(value)):
            names = [name.strip() for name in value.split(",")] if self.many else [value]
            names = [self.renamed.get(name, name) for name in names]
            for name in names:
                if name not in self.choices:
                    raise ValueError(f"{self.name}={name!r}: {self._unknown(name)}")
            value = ",".join(name for name in self.choices if name in names)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _advised(self, told: str, value: Any) -> str:
        """Return a message with the advice for several values, if that is what was given."""
        many = isinstance(value, list | tuple) or (isinstance(value, str) and "," in value)
        return f"{told}; {self.several}" if many and self.several else told

    def _unknown(self, name: str) -> str:
        return unknown_name(name, self.choices, accepted=self.renamed, lists="--help")

    def _check_bounds(self, value: float) -> None:
        none = ", or None" if self.optional else ""
        if not math.isfinite(value):
            raise ValueError(f"{self.name}={value!r} must be finite{none}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.name}={value!r} must be at least {self.minimum:g}{none}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"{self.name}={value!r} must be above {self.above:g}{none}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.name}={value!r} must be at most {self.maximum:g}{none}")


_MOST_LISTED = 8
"""Names that a message lists whole; of more it names the nearest ones."""
_NEAREST = 3


def unknown_name(
    name: str,
    known: Iterable[str],
    *,
    accepted: Mapping[str, str] | None = None,
    lists: str = "",
) -> str:
    """Return a phrase that suggests the closest of the known names, and lists a few of them.

    Args:
        name: The unknown name.
        known: All valid names.
        accepted: Name that is valid and not listed -> the one that it means.
        lists: What lists all names, such as "%ort --help", said where the phrase does not.
    """
    known, others = list(known), dict(accepted or {})
    near = [each for each in (*known, *others) if each.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, [*known, *others], n=1)
    offer = f"did you mean {others.get(near[0], near[0])!r}?" if near else ""
    if len(known) <= _MOST_LISTED:
        listed = f"choose from {', '.join(known) or 'nothing (none exist)'}"
        return f"{listed}; {offer}" if offer else listed
    ranked = difflib.get_close_matches(name, [*known, *others], n=len(known), cutoff=0.0)
    first, *more = list(dict.fromkeys(others.get(each, each) for each in ranked))[:_NEAREST]
    if offer:
        found = f"{offer} also near: {', '.join(more)}"
    else:
        nearest = ", ".join((first, *more))
        found = f"none of the {len(known)} names is similar; the nearest are {nearest}"
    return f"{found}; {lists} lists all {len(known)}" if lists else found


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


def aliases(declared: Iterable[Declaration]) -> dict[str, str]:
    """Return the other names of settings: alias -> name.

    Args:
        declared: The settings.
    """
    return {each.alias: each.name for each in declared if each.alias}


def unknown_setting(name: str, known: Mapping[str, Declaration], command: str = "") -> str:
    """Return the message about a setting that does not exist.

    Args:
        name: The unknown name.
        known: All settings by name.
        command: Command of ``%ort`` whose options they are; "" for none.
    """
    accepted = aliases(known.values())
    lists = f"%ort {command} --help-all" if command else ""
    return f"unknown setting {name!r}: {unknown_name(name, known, accepted=accepted, lists=lists)}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Frozen set of settings, validated on creation and changed by replacement.

    A field is one setting, or the settings of a topic, which are a `Settings` too. `of`, `replace`,
    `as_dict`, `declarations` and ``settings["name"]`` are flat: they name a setting without its
    topic.

    Raises:
        ValueError: If a value is not valid; the message has the setting's name and valid values.
    """

    title: ClassVar[str] = ""
    """Name of the topic in lists of settings."""
    command: ClassVar[str] = ""
    """Command of ``%ort`` whose help lists the settings; "" for none."""

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Settings.__repr__  # type: ignore[method-assign]  # dataclass would write one

    def __repr__(self) -> str:
        """Return the call that creates these settings; those with their defaults are left out."""
        given = (f"{name}={value!r}" for name, value in self.changed().items())
        return f"{type(self).__name__}.of({', '.join(given)})"

    def __post_init__(self) -> None:
        for name, declaration in _layout(type(self)).settings.items():
            value = getattr(self, name)
            value = declaration.standing() if value is _STANDING else declaration.check(value)
            object.__setattr__(self, name, value)

    @classmethod
    def declarations(cls) -> dict[str, Declaration]:
        """Return all settings by name, those of topics too, in the order of declaration."""
        return _layout(cls).declarations

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from the declared defaults, by name."""
        declared = self.declarations()
        return {n: v for n, v in self.as_dict().items() if v != declared[n].default}

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `values` with each alias replaced by the setting's name.

        Args:
            values: Name or alias -> value.

        Raises:
            ValueError: If a setting is given under both of its names.
        """
        names = aliases(cls.declarations().values())
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
    def of(cls, values: Mapping[str, Any] | None = None, /, **named: Any) -> Self:
        """Return settings from flat names, which may be aliases.

        Args:
            values: Name or alias -> value; settings without a value have their defaults.
            **named: More of them.

        Raises:
            ValueError: If a name is unknown, with the nearest known one, or a value is not allowed.
        """
        values = cls.canonical({**(values or {}), **named})
        known = cls.declarations()
        for name in values:
            if name not in known:
                raise ValueError(unknown_setting(name, known, cls.command))
        return cls._nested(values)

    @classmethod
    def _nested(cls, values: Mapping[str, Any]) -> Self:
        layout = _layout(cls)
        own = {name: values[name] for name in layout.settings if name in values}
        topics = {name: kind._nested(values) for name, kind in layout.topics.items()}
        return cls(**own, **topics)

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
        return {name: self[name] for name in self.declarations()}

    def __getitem__(self, name: str) -> Any:
        """Return the value of a setting by its name, whatever its topic.

        Args:
            name: Name of the setting.

        Raises:
            KeyError: If there is no such setting.
        """
        return operator.attrgetter(_layout(type(self)).paths[name])(self)


@dataclass(frozen=True)
class _Layout:
    """Fields of a class of settings, flat and by topic.

    Attributes:
        settings: Own settings by name.
        topics: Class of the settings of each topic, by the name of the field.
        declarations: All settings by name.
        paths: Attributes that lead to each setting, such as ``ortmodule.opset``.
    """

    settings: dict[str, Declaration]
    topics: dict[str, type[Settings]]
    declarations: dict[str, Declaration]
    paths: dict[str, str]


def _layout(cls: type[Settings]) -> _Layout:
    return _layouts(cls)  # type: ignore[arg-type]  # mypy checks the hash of an instance


@functools.cache
def _layouts(cls: type[Settings]) -> _Layout:
    hints = typing.get_type_hints(cls)
    settings: dict[str, Declaration] = {}
    topics: dict[str, type[Settings]] = {}
    declared: dict[str, Declaration] = {}
    paths: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Settings):
            topics[name] = hint
            declared |= hint.declarations()
            paths |= {each: f"{name}.{path}" for each, path in _layout(hint).paths.items()}
        else:
            settings[name] = declared[name] = _declaration(field, hint, cls.title)
            paths[name] = name
    # Those of inner topics, which few people need, come last.
    order = sorted(declared, key=lambda name: paths[name].count("."))
    return _Layout(settings, topics, {name: declared[name] for name in order}, paths)


def _declaration(field: dataclasses.Field[Any], hint: Any, title: str) -> Declaration:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (member for member in members if member is not type(None))
    return Declaration(
        name=field.name,
        type=plain,
        optional=type(None) in members,
        topic=title,
        **field.metadata,
    )
