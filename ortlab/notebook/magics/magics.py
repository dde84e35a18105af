"""``%ort`` and ``%%ort``: parse what was typed and run the command."""

from __future__ import annotations

import ast
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from ortlab.engines.wrapped_models import is_model, is_own_name
from ortlab.notebook.magics.commands import COMMANDS, WRAP, command_called, overview
from ortlab.notebook.magics.file_commands import FileCommands
from ortlab.notebook.magics.machine_commands import MachineCommands
from ortlab.notebook.magics.model_commands import ModelCommands
from ortlab.notebook.magics.parsing import HELP, ParsedCommand, split
from ortlab.notebook.magics.reporting import one_line_errors, print_wrapped, progress
from ortlab.notebook.magics.run_commands import RunCommands
from ortlab.notebook.magics.search_commands import SearchCommands
from ortlab.notebook.magics.variables import Variables
from ortlab.session import session
from ortlab.settings import EngineSettings
from ortlab.utils.contention import Contention

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn


@dataclass(frozen=True)
class _OpenCell:
    """A ``%%ort`` cell whose body is running: its options, and the models before it."""

    number: int
    names: list[str]
    settings: EngineSettings
    models: dict[str, weakref.ref[nn.Module]]


@magics_class
class OrtMagics(Magics):
    """The magics of one shell.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._ip = shell
        self._contention = Contention()
        variables = Variables(shell)
        groups = (
            ModelCommands(variables),
            RunCommands(variables),
            SearchCommands(variables),
            FileCommands(variables),
            MachineCommands(),
        )
        self._commands: dict[str, Callable[[ParsedCommand], object]] = {
            name: next(getattr(group, name) for group in groups if hasattr(group, name))
            for name in COMMANDS
        }
        # A cell that raised never finishes; eight are more than ever nest.
        self._open: deque[_OpenCell] = deque(maxlen=8)

    @line_cell_magic
    def ort(self, line: str, cell: str | None = None) -> object:
        """Run a command, or a cell; `overview` replaces this text."""
        if cell is not None:
            return self._run_cell(line, cell)
        words = split(line)
        if not words:
            return session.wrapped.table().noted(*filter(None, [self._contention.warning()]))
        name, *rest = words
        if name in HELP:
            print(overview())
            return None
        self._check_command(name)
        given = command_called(name).read(rest, self._ip.user_ns)
        if given is None:
            return None
        with one_line_errors():
            return self._commands[name](given)

    ort.__doc__ = overview()

    def begin(self, number: int, line: str, has_body: bool) -> None:
        """Prepare a ``%%ort`` cell; called before its body, see `cells`.

        Args:
            number: Number of the cell, unique in this shell.
            line: The words after ``%%ort``.
            has_body: Whether the cell has more than its first line.

        Raises:
            UsageError: If an option is wrong, the engine cannot run, or there is no body.
        """
        line = self._ip.var_expand(line, depth=1)  # type: ignore[no-untyped-call]
        given = WRAP.read(split(line), self._ip.user_ns)
        if given is None:
            return
        if not has_body:
            raise UsageError(
                "%%ort must be the first line of a cell that makes a model, and this cell has no "
                "other lines; %ort lists the models, %ort wrap NAME wraps one"
            )
        with one_line_errors():
            settings = EngineSettings.of(given.settings)
            session.check_engine(settings.engine)
        self._open.append(
            _OpenCell(
                number,
                given.words["name"],
                settings,
                {n: weakref.ref(v) for n, v in self._ip.user_ns.items() if is_model(v)},
            )
        )

    def finish(self, number: int, bound: tuple[str, ...], value: object = None) -> object:
        """Wrap the models of a ``%%ort`` cell; called at the end of its body.

        Args:
            number: Number of the cell, as in `begin`.
            bound: Names that the code of the cell binds.
            value: Value of its last expression.

        Returns:
            `value`, which the cell displays.
        """
        (cell,) = (cell for cell in self._open if cell.number == number)
        self._open.remove(cell)
        namespace = self._ip.user_ns
        # Names bound by other magics, star imports and functions are not in the cell's code.
        changed = (
            name
            for name, now in list(namespace.items())
            if is_model(now) and (name not in cell.models or cell.models[name]() is not now)
        )
        with one_line_errors(), progress():
            names = [name for name in (*bound, *changed) if is_own_name(name)]
            report = session.bind_cell(namespace, names, cell.names, cell.settings)
        print_wrapped(report)
        return value

    def _run_cell(self, line: str, cell: str) -> object:
        """Run a cell that IPython's transformers did not see, as from ``run_cell_magic``."""
        shell = self._ip
        source = shell.transform_cell(  # type: ignore[no-untyped-call]
            f"%%ort {line}\n{cell}"
        )
        name = shell.compile.cache(source, shell.execution_count)
        tree = shell.compile.ast_parse(source, filename=name)
        tree = shell.transform_ast(tree)  # type: ignore[no-untyped-call]
        *body, last = tree.body
        for statement in body:
            exec(_compiled(ast.Module([statement], []), shell, name), shell.user_ns)
        return eval(_compiled(ast.Expression(last.value), shell, name), shell.user_ns)

    def _check_command(self, name: str) -> None:
        # A model's name in the place of a command gets better advice than a list of commands.
        if name not in COMMANDS and is_model(self._ip.user_ns.get(name)):
            raise UsageError(f"%ort has no command {name!r}; to wrap it: %ort wrap {name}")


def _compiled(tree: ast.Module | ast.Expression, shell: InteractiveShell, name: str) -> CodeType:
    mode = "exec" if isinstance(tree, ast.Module) else "eval"
    code: CodeType = compile(tree, name, mode, flags=shell.compile.flags, dont_inherit=True)
    return code
