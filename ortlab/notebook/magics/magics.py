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
from ortlab.notebook.magics.reporting import (
    one_line_errors,
    print_not_wrapped,
    print_wrapped,
    progress,
)
from ortlab.notebook.magics.run_commands import RunCommands
from ortlab.notebook.magics.search_commands import SearchCommands
from ortlab.notebook.magics.variables import Variables
from ortlab.session import session
from ortlab.settings import EngineSettings

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
    from torch import nn


@dataclass(frozen=True)
class _OpenCell:
    """A ``%%ort`` cell whose body is running.

    Attributes:
        number: Number of the cell, as in `OrtMagics.begin`.
        depth: Number of IPython's cells that were running, itself included; cells can run cells.
        names: Names on the line of the cell.
        bound: Names that the code of the cell binds.
        settings: Options of the cell.
        models: Models before the cell, by name.
    """

    number: int
    depth: int
    names: list[str]
    bound: tuple[str, ...]
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
        # The end of a silent execution is not told; eight cells are more than ever nest.
        self._open: deque[_OpenCell] = deque(maxlen=8)
        self._running: list[str | None] = []

    @line_cell_magic
    def ort(self, line: str, cell: str | None = None) -> object:
        """Run a command, or a cell; `overview` replaces this text."""
        if cell is not None:
            return self._run_cell(line, cell)
        name, *rest = split(line) or ["status"]
        if name in HELP:
            name = "help"
        self._check_command(name)
        given = command_called(name).read(rest, self._ip.user_ns)
        if given is None:
            return None
        with one_line_errors():
            return self._commands[name](given)

    ort.__doc__ = overview()

    def begin(self, number: int, line: str, bound: tuple[str, ...] | None) -> None:
        """Prepare a ``%%ort`` cell; called before its body, see `cells`.

        Args:
            number: Number of the cell, unique in this shell.
            line: The words after ``%%ort``.
            bound: Names that the code of the cell binds; None if it has no other line.

        Raises:
            UsageError: If an option is wrong, the engine cannot run, or there is no body.
        """
        line = self._ip.var_expand(line, depth=1)  # type: ignore[no-untyped-call]
        given = WRAP.read(split(line), self._ip.user_ns)
        if given is None:
            return
        if bound is None:
            raise UsageError(
                "%%ort must be the first line of a cell that makes a model, and this cell has no "
                "other lines; %ort lists the models, %ort wrap NAME wraps one"
            )
        with one_line_errors():
            settings = EngineSettings.of(given.settings)
            session.check_engine(settings.engine)
        self._open.append(
            _OpenCell(
                number=number,
                depth=len(self._running),
                names=given.words["name"],
                bound=bound,
                settings=settings,
                models={n: weakref.ref(v) for n, v in self._ip.user_ns.items() if is_model(v)},
            )
        )

    def finish(self, number: int, value: object = None) -> object:
        """Wrap the models of a ``%%ort`` cell; called at the end of its body.

        Args:
            number: Number of the cell, as in `begin`.
            value: Value of its last expression.

        Returns:
            `value`, which the cell displays.
        """
        (cell,) = (cell for cell in self._open if cell.number == number)
        with one_line_errors(), progress():
            report = session.bind_cell(
                self._ip.user_ns, self._bound(cell), cell.names, cell.settings
            )
        self._open.remove(cell)
        print_wrapped(report)
        return value

    def cell_started(self, info: ExecutionInfo) -> None:
        """Note that IPython runs a cell; called for its event ``pre_run_cell``.

        Args:
            info: Source of a cell of any kind.
        """
        self._running.append(info.raw_cell)

    def cell_ended(self, result: ExecutionResult | None) -> None:
        """Name the models that a ``%%ort`` cell left unwrapped, if it did not reach `finish`.

        Called for IPython's event ``post_run_cell``, below the traceback.

        Args:
            result: Result of a cell of any kind; None if ipykernel canceled it.
        """
        source = None if result is None or result.info is None else result.info.raw_cell
        if source not in self._running:  # a blank cell, or the one that loads the extension
            return
        while self._running.pop() != source:
            pass  # a cell that was canceled
        for cell in [cell for cell in self._open if cell.depth > len(self._running)]:
            self._open.remove(cell)
            left = session.leave_cell(self._ip.user_ns, self._bound(cell), cell.names)
            print_not_wrapped(left, cell.settings)

    def _bound(self, cell: _OpenCell) -> list[str]:
        """Return the user's names that a cell binds, by its code or by now."""
        # Names bound by other magics, star imports and functions are not in the cell's code.
        changed = (
            name
            for name, now in list(self._ip.user_ns.items())
            if is_model(now) and (name not in cell.models or cell.models[name]() is not now)
        )
        return [name for name in (*cell.bound, *changed) if is_own_name(name)]

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
