"""Parser of the words after ``%ort``, made from the declarations of the settings."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ortlab.settings import LOSSES, Declaration, Settings, unknown_name

HELP: Final = ("--help", "-h")
HELP_ALL: Final = "--help-all"


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

    @property
    def metavar(self) -> str:
        """The word in help texts."""
        return "|".join(self.choices) if self.choices else self.name.upper()

    @property
    def usage(self) -> str:
        """The word in a usage line, as argparse writes it."""
        return {
            "?": f"[{self.metavar}]",
            "*": f"[{self.metavar} ...]",
            "+": f"{self.metavar} [{self.metavar} ...]",
        }.get(self.nargs or "", self.metavar)


@dataclass(frozen=True)
class Option:
    """A flag that a command takes.

    ``kind`` says what its value names; completion offers ``choices``. One that is no setting is in
    ``--help`` if it is ``common``.
    """

    flag: str
    help: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    alias: str = ""
    declaration: Declaration | None = None
    common: bool = True

    @property
    def name(self) -> str:
        """Name of the option in the parser: ``--resume-from`` is ``resume_from``."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def short(self) -> str:
        """Short form of the flag, such as ``--lr``; "" for none."""
        declaration = self.declaration
        return f"--{declaration.alias}" if declaration and declaration.short else ""

    @property
    def hidden(self) -> tuple[str, ...]:
        """Former flags, which are accepted and not shown."""
        declared = self.declaration.alias if self.declaration else ""
        names = filter(None, (self.alias, "" if self.short else declared))
        return tuple(f"--{name.replace('_', '-')}" for name in names)

    @property
    def others(self) -> tuple[str, ...]:
        """Other flags of the option: the short one and the former ones."""
        return (self.short, *self.hidden) if self.short else self.hidden

    @property
    def is_common(self) -> bool:
        """True if ``--help`` lists the option; ``--help-all`` lists all."""
        declaration = self.declaration
        if declaration is None:
            return self.common
        return declaration.common or not declaration.topic

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
    _parser: MagicArgumentParser = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parser", self._made(self.options.values()))

    def _made(self, options: Iterable[Option], **more: str) -> MagicArgumentParser:
        """Return a parser of the command's words and of `options`, grouped by topic."""
        parser = _Parser(  # type: ignore[no-untyped-call]
            f"ort {self.name}", description=f"{self.summary} {self.more}".strip(), **more
        )
        parser.allow_abbrev = False
        for word in self.positionals:
            parser.add_argument(
                word.name,
                nargs=word.nargs,
                choices=word.choices or None,
                metavar=word.metavar,
                help=word.help,
            )
        groups: dict[str, argparse._ArgumentGroup] = {}
        for option in options:
            topic = option.declaration.topic if option.declaration else ""
            if topic and topic not in groups:
                groups[topic] = parser.add_argument_group(topic)
            _add(groups.get(topic, parser), option)
        return parser

    @property
    def options(self) -> dict[str, Option]:
        """Every option by its flag."""
        declared = () if self.settings is None else self.settings.declarations().values()
        options = (*self.extra, *map(_option, (*declared, *self.besides)))
        return {option.flag: option for option in options}

    def option(self, word: str) -> Option | None:
        """Return the option that a word is a flag of, in any of its forms.

        Args:
            word: A word of the line.
        """
        options = self.options.values()
        return next((each for each in options if word in (each.flag, *each.others)), None)

    @property
    def help(self) -> str:
        """Text of ``--help``: the common options."""
        return _plain(self._brief.format_help())

    @property
    def help_all(self) -> str:
        """Text of ``--help-all``: all options by topic."""
        return _plain(self._parser.format_help())

    @property
    def usage(self) -> str:
        """Usage line of the command, with the common options."""
        return _plain(self._brief.format_usage())

    @property
    def _brief(self) -> MagicArgumentParser:
        options = self.options.values()
        common = [option for option in options if option.is_common]
        if len(common) == len(options):
            return self._parser
        # Without topics: there are too few of them for groups.
        plain = [replace(each, declaration=_without_topic(each.declaration)) for each in common]
        words = " ".join(word.usage for word in self.positionals)
        return self._made(
            plain,
            usage=f"%(prog)s {words} [OPTION ...]",
            epilog=f"%ort {self.name} {HELP_ALL} lists all {len(options)} options.",
        )

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
        if any(word in (*HELP, HELP_ALL) for word in words):
            print(self.help_all if HELP_ALL in words else self.help)
            return None
        known, unknown = self._parser.parse_known_args(words)
        values = vars(known)
        if unknown:
            self._refuse(unknown, values)
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

    def _refuse(self, unknown: list[str], values: Mapping[str, Any]) -> NoReturn:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            for option in self.options.values():
                first, declared = values.get(option.name), option.declaration
                if first and declared and declared.several and all(map(_is_number, unknown)):
                    told = f"{option.flag} takes a number, not {' '.join([first, *unknown])!r}"
                    raise UsageError(f"{told}; {declared.several}")
            raise UsageError(
                f"%ort {self.name} does not know what to do with {' '.join(unknown)!r}; "
                f"%ort {self.name} --help shows what it takes"
            )
        flags = (*self.options, HELP[0], HELP_ALL)
        hidden = {other: each.flag for each in self.options.values() for other in each.others}
        lists = f"%ort {self.name} {HELP_ALL}"
        found = unknown_name(flag.partition("=")[0], flags, accepted=hidden, lists=lists)
        raise UsageError(f"%ort {self.name} has no option {flag}: {found}")


class _Parser(MagicArgumentParser):
    """IPython's parser, with argparse's message for a missing argument on one line."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        # A notebook has no terminal; its page is wider than the 80 columns that argparse assumes.
        width = shutil.get_terminal_size((100, 24)).columns - 2
        return self.formatter_class(prog=self.prog, width=width)  # type: ignore[call-arg]

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
        kind=declaration.name if declaration.name in ("loss", "optimizer") else "",
        choices=LOSSES if declaration.name == "loss" else choices,
        declaration=declaration,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _with_default(declaration: Declaration) -> str:
    default = declaration.default
    if isinstance(default, bool):
        default = "on" if default else None  # a switch is off without its flag
    parts = [declaration.help.replace("%", "%%")]
    if default is not None:
        parts.append(f"default {default} {declaration.unit}".rstrip())
    return "; ".join(parts)


def _without_topic(declaration: Declaration | None) -> Declaration | None:
    return None if declaration is None else replace(declaration, topic="")


def _add(parser: argparse._ActionsContainer, option: Option) -> None:
    declaration = option.declaration
    kind: dict[str, Any]
    if option.is_switch:
        kind = {"nargs": "?", "const": "on", "metavar": "on|off"}
    elif declaration is not None and declaration.choices:
        kind = {"metavar": "|".join(declaration.choices)}
    else:
        number = declaration is not None and declaration.type in (int, float)
        kind = {"metavar": "N" if number else "NAME"}
    parser.add_argument(*filter(None, (option.flag, option.short)), help=option.help, **kind)
    for flag in option.hidden:
        parser.add_argument(flag, dest=option.name, help=argparse.SUPPRESS, **kind)


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
    """Return whether a word of `line` asks for help; False for a line that cannot be split."""
    try:
        return any(word in (*HELP, HELP_ALL) for word in split(line))
    except UsageError:
        return False
