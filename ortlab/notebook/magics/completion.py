"""Completion after ``%ort``, and of settings in calls: commands, options, choices, own names."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from IPython.core import completer
from IPython.core.interactiveshell import InteractiveShell

from ortlab.engines.wrapped_models import is_model
from ortlab.history import sqlite_index
from ortlab.notebook.magics.commands import COMMANDS, WRAP
from ortlab.notebook.magics.parsing import HELP, HELP_ALL, Command, Option
from ortlab.session import session
from ortlab.settings import (
    Declaration,
    EngineSettings,
    FinetuneSettings,
    RaceSettings,
    TuneSettings,
)
from ortlab.training.callbacks import EVENTS

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult

_LINE = re.compile(r"^\s*(?:[^#\"']*=\s*)?%ort\s+(.*)$")
_CELL = re.compile(r"^%%ort\s+(.*)$")
_CALLS: Final[Mapping[str, Mapping[str, Declaration]]] = {
    "wrap": EngineSettings.declarations(),
    "race": RaceSettings.accepted(),
    "tune": TuneSettings.accepted(),
    **dict.fromkeys(("finetune", "resume", "apply"), FinetuneSettings.declarations()),
}
"""Settings that a function or a method of a run takes, by its name."""
_VALUE = re.compile(
    rf"\b({'|'.join(_CALLS)})\("
    r"(?:[^()]|\([^()]*\))*?"  # other arguments, among them calls
    r"\b(\w+)\s*=\s*(?:\"|')(?:[^\"'()]*,)?([^\"'(),]*)$"
)
"""Call in which the value of a keyword argument is typed: function, argument, word so far."""
_NO_LOADER = (str, bytes, Mapping, type, types.ModuleType, types.FunctionType)


class Names:
    """Names of the user's variables and runs, by kind.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def typed(self) -> str:
        """Return the line before the cursor of the running completion."""
        text: str = self._shell.Completer.text_until_cursor
        return text

    def sizes(self, model: str) -> list[str]:
        """Return the sizes of a batch of a wrapped model as typed beginnings, such as "batch=".

        Args:
            model: Name of the model.
        """
        try:
            found = session.memory_plan(self._shell.user_ns[model]).dims
        except (KeyError, ValueError):  # no such model, or it has no graph yet
            return []
        return [f"{dim}=" for dim in found]

    def plans(self, model: str) -> list[str]:
        """Return the recompute plans of a wrapped model: "off", "layers" and others.

        Args:
            model: Name of the model.
        """
        try:
            found = session.recompute_plans(self._shell.user_ns[model]).names
        except (KeyError, ValueError):
            return ["off"]
        return ["off", "layers", *found] if found else ["off"]

    def of(self, kind: str) -> list[str]:
        """Return the names of every variable or run of a kind.

        Args:
            kind: One of model, wrapped, loader, batch, loss, metrics, callbacks, optimizer,
                scheduler, function, run (active runs), kept (saved runs), target (of the panel),
                resumable (of ``%ort resume``), command, config (files of settings), or workers,
                whose only name is the word that may replace their number.
        """
        if kind == "command":
            return list(COMMANDS)
        if kind == "config":
            return sorted(path.name for path in Path().glob("*.toml"))
        if kind == "workers":
            return ["stop"]
        if kind == "run":
            runs = [run.name for run in session.runs if not run.over()]
            runs += [run.name for run in session.trainers if not run.over()]
            return runs + [search.name for search in session.searches if not search.over()]
        if kind == "resumable":
            return self.of("run") + [
                entry.name
                for entry in reversed(sqlite_index.entries())
                if entry.state in ("interrupted", "stopped", "failed") and entry.can_go_on
            ]
        if kind == "kept":
            return [entry.name for entry in reversed(sqlite_index.entries())]
        if kind == "target":
            return [*self.of("model"), *(run.name for run in session.runs if not run.over())]
        holds: dict[str, Callable[[Any], bool]] = {
            "model": is_model,
            "wrapped": lambda value: session.wrapped.entry(value) is not None,
            "loader": _is_loader,
            "batch": _is_batch,
            "loss": _is_loss,
            "metrics": _are_metrics,
            "callbacks": _are_callbacks,
            "optimizer": _is_optimizer,
            "scheduler": lambda value: _is_scheduler(value) or _is_function(value),
            "function": _is_function,
        }
        hidden = self._shell.user_ns_hidden
        return [
            name
            for name, value in list(self._shell.user_ns.items())
            if not name.startswith("_") and name not in hidden and holds[kind](value)
        ]


def _is_loader(value: object) -> bool:
    if isinstance(value, _NO_LOADER) or is_model(value) or _is_tensor(value):
        return False
    kind = type(value)
    return hasattr(kind, "__iter__") or (hasattr(kind, "__getitem__") and hasattr(kind, "__len__"))


def _is_batch(value: object) -> bool:
    """Return whether `value` is a tensor, or a dictionary, tuple or list that contains tensors."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return any(map(_is_tensor, value))
    return _is_tensor(value)


def _is_tensor(value: object) -> bool:
    return hasattr(type(value), "__array__")


def _is_loss(value: object) -> bool:
    if isinstance(value, types.FunctionType):
        return True
    return is_model(value) and not any(p.requires_grad for p in value.parameters())


def _is_function(value: object) -> bool:
    return isinstance(value, types.FunctionType | functools.partial)


def _is_optimizer(value: object) -> bool:
    """Return whether `value` is an optimizer; of functions, which may be factories, a partial."""
    return hasattr(value, "param_groups") or isinstance(value, functools.partial)


def _is_scheduler(value: object) -> bool:
    return hasattr(value, "optimizer") and callable(getattr(value, "step", None))


def _are_metrics(value: object) -> bool:
    """Return whether `value` is a function, an object of torchmetrics, or several of them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_are_metrics, value))
    return isinstance(value, types.FunctionType) or (
        not isinstance(value, type) and callable(getattr(value, "compute", None))
    )


def _are_callbacks(value: object) -> bool:
    """Return whether `value` is a callback, or a list of them."""
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_are_callbacks, value))
    return not isinstance(value, type) and any(hasattr(type(value), each) for each in EVENTS)


def matcher(names: Names) -> Callable[[Any], Any]:
    """Return a matcher for ``Completer.custom_matchers``.

    Args:
        names: The names to offer.

    Returns:
        The matcher; in lines without ``%ort`` it offers values of settings in calls alone. Their
        names are in the signatures, which IPython reads.
    """
    if not hasattr(completer, "context_matcher"):  # before IPython 8.6; Colab has 7.34

        def ort_matches(_: str) -> list[str]:
            typed = names.typed()
            return offers(typed, names) or values(typed)

        return ort_matches

    @completer.context_matcher()  # type: ignore[untyped-decorator]
    def ort_matcher(context: CompletionContext) -> SimpleMatcherResult:
        found, kind = offers(context.text_until_cursor, names), "magic"
        if not found:
            kind = "value"
            lines = context.full_text.split("\n")[: context.cursor_line]
            found = values("\n".join([*lines, context.text_until_cursor]))
        return {
            "completions": [completer.SimpleCompletion(text=text, type=kind) for text in found],
            "suppress": bool(found),
        }

    complete: Callable[[Any], Any] = ort_matcher
    return complete


def offers(text: str, names: Names) -> list[str]:
    """Return the completions of the last word of a line.

    Args:
        text: The line before the cursor.
        names: The names to offer.
    """
    cell, line = _CELL.match(text), _LINE.match(text)
    match = cell or line
    if match is None:
        return []
    *words, last = match[1].split(" ") if match[1] else [""]
    words = [word for word in words if word]
    command: Command | None = WRAP
    if line:
        if not words:
            return _starting(last, COMMANDS)
        command = COMMANDS.get(words.pop(0))
    if command is None:
        return []
    option = command.option(words[-1]) if words else None
    if option is not None and not (option.is_switch and last.startswith("-")):
        return _starting(last, _values(option, names, words))
    if last.startswith("-"):
        return _starting(
            last, (flag for flag in (*command.options, HELP[0], HELP_ALL) if flag not in words)
        )
    return _starting(last, _words(command, words, names))


def values(text: str) -> list[str]:
    """Return the completions of the value of a setting in a call, such as ``engine="o``.

    Args:
        text: The cell before the cursor.
    """
    match = _VALUE.search(text)
    declaration = None if match is None else _CALLS[match[1]].get(match[2])
    return [] if match is None or declaration is None else _starting(match[3], declaration.choices)


def _values(option: Option, names: Names, words: list[str]) -> list[str]:
    if option.kind == "plan":
        return names.plans(words[0])
    return [*option.choices, *(names.of(option.kind) if option.kind else ())]


def _words(command: Command, words: list[str], names: Names) -> Iterable[str]:
    """Return the names that may stand at the next place of `command`."""
    before = []
    follows_flag = False
    for word in words:
        if not word.startswith("-") and not follows_flag:
            before.append(word)
        follows_flag = command.option(word) is not None
    places = command.positionals
    many = bool(places) and places[-1].nargs in ("*", "+")
    at = min(len(before), len(places) - 1) if many else len(before)
    if at >= len(places):
        return ()
    if places[at].kind == "size":
        return names.sizes(before[0])
    kind = places[at].kind
    offered = places[at].choices or (names.of(kind) if kind else ())
    return (name for name in offered if name not in before)


def _starting(start: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]
