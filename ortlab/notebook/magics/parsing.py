"""Parser of the words after ``%ort``, made from the declarations of the settings."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ortlab.settings import LOSSES, Declaration, Settings, unknown_name

HELP: Final = ("--help", "-h")


@dataclass(frozen=True)
class Positional:
    """A word that a command takes.

    ``kind`` says what it names; without a kind it is one of ``choices``.
    """

    name: str
    kind: str
    help: str
    nargs: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """A flag that a command takes.

    ``kind`` says what its value names; completion offers ``choices``.
    """

    flag: str
    help: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    declaration: Declaration | None = None

    @property
    def name(self) -> str:
        """Name of the option in the parser: ``--eval-data`` is ``eval_data``."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """True if the flag without a value means ``on``."""
        return self.declaration is not None and self.declaration.type is bool


@dataclass(frozen=True)
class ParsedCommand:
    """Parsed line after a command.

    Attributes:
        words: Positional words and extra options, by name.
        settings: Chosen settings, by name.
    """

    words: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command of ``%ort``.

    Attributes:
        name: Name of the command.
        summary: First sentence of the help text.
        more: Rest of the help text.
        positionals: Words that it takes.
        settings: Settings that it takes as options.
        besides: Settings of another set that it takes, too.
        extra: Options that are not settings.
    """

    name: str
    summary: str
    more: str = ""
    positionals: tuple[Positional, ...] = ()
    settings: type[Settings] | None = None
    besides: tuple[Declaration, ...] = ()
    extra: tuple[Option, ...] = ()
    parser: MagicArgumentParser = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parser = _Parser(  # type: ignore[no-untyped-call]
            f"ort {self.name}", description=f"{self.summary} {self.more}".strip()
        )
        parser.allow_abbrev = False
        for word in self.positionals:
            parser.add_argument(
                word.name,
                nargs=word.nargs,
                choices=word.choices or None,
                metavar="|".join(word.choices) if word.choices else word.name.upper(),
                help=word.help,
            )
        for option in self.options.values():
            _add(parser, option)
        object.__setattr__(self, "parser", parser)

    @property
    def options(self) -> dict[str, Option]:
        """Every option by its flag."""
        declared = () if self.settings is None else self.settings.declarations().values()
        options = (*self.extra, *map(_option, (*declared, *self.besides)))
        return {option.flag: option for option in options}

    @property
    def help(self) -> str:
        """Text of ``--help``."""
        return _plain(self.parser.format_help())

    @property
    def usage(self) -> str:
        """Usage line of the command."""
        return _plain(self.parser.format_usage())

    def read(self, words: list[str], variables: Mapping[str, Any]) -> ParsedCommand | None:
        """Parse the words after the command.

        Args:
            words: What was typed.
            variables: The user's variables. The loss may be a function among them, even one that is
                called none or off.

        Returns:
            The parsed words and settings; None if they ask for help, which is printed.

        Raises:
            UsageError: If a word or a value is unknown; the message offers the nearest.
        """
        if any(word in HELP for word in words):
            print(self.help)
            return None
        known, unknown = self.parser.parse_known_args(words)
        if unknown:
            self._refuse(unknown)
        values = vars(known)
        settings = {}
        for option in self.options.values():
            text = values.pop(option.name) if option.declaration else None
            if option.kind == "loss" and text is not None and callable(variables.get(text)):
                settings[option.name] = text
            elif option.declaration is not None and text is not None:
                try:
                    settings[option.name] = option.declaration.parse(text)
                except ValueError as error:
                    raise UsageError(str(error)) from None
        return ParsedCommand(values, settings)

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            raise UsageError(
                f"%ort {self.name} does not know what to do with {' '.join(unknown)!r}; "
                f"%ort {self.name} --help shows what it takes"
            )
        flags = [*self.options, HELP[0]]
        raise UsageError(
            f"%ort {self.name} has no option {flag}: {unknown_name(flag.partition('=')[0], flags)}"
        )


class _Parser(MagicArgumentParser):
    """IPython's parser, with argparse's message for a missing argument on one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%{self.prog}: {message}; %{self.prog} --help shows what it takes")


def _plain(text: str) -> str:
    """Return `text` without the markup that IPython's formatter adds."""
    return text.removeprefix("::\n\n").rstrip()


def _option(declaration: Declaration) -> Option:
    choices = declaration.choices
    if declaration.type is bool:
        choices = ("on", "off")
    return Option(
        declaration.flag,
        _with_default(declaration),
        kind="loss" if declaration.name == "loss" else "",
        choices=LOSSES if declaration.name == "loss" else choices,
        declaration=declaration,
    )


def _with_default(declaration: Declaration) -> str:
    default = declaration.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    parts = [declaration.help.replace("%", "%%")]
    if default is not None:
        parts.append(f"default {default} {declaration.unit}".rstrip())
    return "; ".join(parts)


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    declaration = option.declaration
    if option.is_switch:
        parser.add_argument(option.flag, nargs="?", const="on", metavar="on|off", help=option.help)
    elif declaration is not None and declaration.choices:
        metavar = "|".join(declaration.choices)
        parser.add_argument(option.flag, metavar=metavar, help=option.help)
    else:
        number = declaration is not None and declaration.type in (int, float)
        parser.add_argument(option.flag, metavar="N" if number else "NAME", help=option.help)


def split(line: str) -> list[str]:
    """Return the words of a magic's line, with quotes removed and a comment left out.

    Args:
        line: The line.

    Raises:
        UsageError: If a quote is not closed.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"%ort: {error} in {line!r}") from None


def asks_for_help(line: str) -> bool:
    """Return whether a word of `line` is ``--help``; False for a line that cannot be split."""
    try:
        return any(word in HELP for word in split(line))
    except UsageError:
        return False
