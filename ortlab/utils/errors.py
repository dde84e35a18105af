"""Concise display of errors in a notebook: the message and the user's own lines of code.

IPython calls the ``_render_traceback_`` method of an exception that has one. Scripts and debuggers
see the ordinary exception with its full traceback.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_OURS = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
    _OURS,
)
_CELL = re.compile(r"^(<ipython-input-|.*/ipykernel_\d+/|.*/ipython-input-)")  # the last: Colab
_NO_FUNCTION = ("<module>", "<cell line: ")
"""Names of the code of a file or a cell; the second one is of IPython 7 and 8."""


class Concise:
    """Mixin for exceptions whose message is enough, so that notebooks hide the traceback."""

    def _render_traceback_(self) -> list[str]:
        assert isinstance(self, BaseException)
        return concise(self)


def shorten(error: BaseException) -> None:
    """Make notebooks show `error` in its concise form, whatever its class is.

    Args:
        error: The exception to change; see `concise` for the form.
    """
    error._render_traceback_ = functools.partial(concise, error)  # type: ignore[attr-defined]


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables in the traceback frames of `error` and of its causes.

    The frames would keep the model, the data and intermediate results alive. The traceback itself
    stays readable.

    Args:
        error: The exception whose traceback, causes and contexts are cleared; None does nothing.
    """
    seen: set[int] = set()
    rest = [error]
    while rest:
        error = rest.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            rest += (error.__cause__, error.__context__)


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function` so that notebooks show ortlab's own ValueErrors in their concise form.

    An exception raised by the user's code, such as a model's forward, keeps its full traceback.

    Args:
        function: The function to decorate.

    Returns:
        The decorated function.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except ValueError as error:
            if is_refusal(error):
                shorten(error)
            raise

    return call


def is_refusal(error: BaseException) -> bool:
    """Return True if ortlab itself raised `error` because of a setting, the model or the data.

    Args:
        error: The exception, with its traceback.

    Returns:
        True for a ValueError of ortlab's own code; False for one of the user's code or a library.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and _OURS in Path(frames[-1].filename).parents
    return ours and isinstance(error, ValueError)


def message(error: BaseException) -> str:
    """Return the message of `error` without C++ frames.

    torch adds these frames when the error is raised in an operator that ORT calls.

    Args:
        error: The exception.
    """
    return str(error).split("\nException raised from ", 1)[0]


def concise(error: BaseException) -> list[str]:
    """Return the lines that a notebook shows for `error`.

    Lines of the standard library, of installed packages and of ortlab are left out.

    Args:
        error: The exception.

    Returns:
        The message, its notes, and the lines of the user's code that the exception and its causes
        passed through; the last of them is where the error happened.
    """
    lines = [f"{type(error).__name__}: {message(error)}", *getattr(error, "__notes__", ())]
    return lines + [f"  {where}" for where in _users_lines(error)]


def _users_lines(error: BaseException) -> list[str]:
    link: BaseException | None = error
    found: list[str] = []
    while link is not None:
        for frame in traceback.extract_tb(link.__traceback__):
            if _is_users(frame.filename) and not frame.name.startswith(_NO_FUNCTION):
                found.append(f"{place(frame.filename, frame.lineno or 0)}, in {frame.name}")
        link = link.__cause__
    return list(dict.fromkeys(found))


def users_line(frames: Iterable[FrameType]) -> str | None:
    """Return the innermost line of the user's code.

    Args:
        frames: Stack frames, the innermost first.

    Returns:
        The line as text, such as "cell 2, line 9: return torch.log(x), in forward", or None if no
        frame is the user's.
    """
    for frame in frames:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if _is_users(file):
            where = short_place(file, line) if _CELL.match(file) else f"{file}:{line}"
            return f"{_with_code(where, file, line)}, in {frame.f_code.co_name}"
    return None


def place(file: str, line: int) -> str:
    """Return a line of code as text: its location and its source.

    Args:
        file: File of the code. A notebook cell is shown without a file name.
        line: Line number, starting at 1.
    """
    return _with_code(f"cell line {line}" if _CELL.match(file) else f"{file}:{line}", file, line)


def _with_code(where: str, file: str, line: int) -> str:
    code = linecache.getline(file, line).strip()
    return f"{where}: {code}" if code else where


def short_place(file: str, line: int) -> str:
    """Return the location of a line of code: "model.py:12", or "cell 2, line 9" in a notebook.

    Args:
        file: File of the code.
        line: Line number, starting at 1.
    """
    if not _CELL.match(file):
        return f"{Path(file).name}:{line}"
    cell = _execution_count(file)
    return f"cell line {line}" if cell is None else f"cell {cell}, line {line}"


def _execution_count(file: str) -> str | None:
    """Return the number of a notebook's cell, as in its prompt; None if this kernel has not run it.

    Args:
        file: File that IPython has named the cell's code with.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return None
    if not hasattr(shell.compile, "format_code_name"):  # IPython 7, whose own names have the number
        found = re.search(r"(?<=^<ipython-input-)\d+", file)
        return found and found.group()
    name = shell.compile.format_code_name(file)  # ("Cell", "In[2]")
    found = re.search(r"\d+", name[1]) if name else None
    return found and found.group()


def _is_users(file: str) -> bool:
    path = Path(file)
    inside = any(root in path.parents for root in _NOT_THE_USERS)
    # "<string>" is code that a library has made, such as the __init__ of a dataclass.
    return not inside and not file.startswith(("<frozen", "<string>"))


_SHORT_OF_MEMORY: Final = (
    "can't allocate memory",  # torch's allocator on a CPU: c10/core/impl/alloc_cpu.cpp
    "bad_alloc",  # C++, in ORT's messages and torch's
    "bad allocation",
    "failed to allocate memory",  # ORT's arena: onnxruntime/core/framework/bfc_arena.cc
    "not enough memory",  # ortlab's kernels: ortlab/engines/ortmodule/kernels/kernels.cc
    "out of memory",  # CUDA
    "cannot allocate memory",  # the system's ENOMEM, for example when a worker cannot be forked
    "memoryerror",  # Python's MemoryError, as text from another process
)


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes is an out-of-memory error.

    Args:
        error: The exception, raised by Python, torch, ORT, CUDA or the system; None gives False.

    Returns:
        True for an out-of-memory error of the host or of a device.
    """
    import torch  # heavy: torch

    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and short_of_memory(str(error)):
            return True
        error = error.__cause__
    return False


def short_of_memory(message: str) -> bool:
    """Return True if a message of torch, ORT, CUDA or the system says that memory has run out.

    Args:
        message: The message.
    """
    said = message.lower()
    return any(each in said for each in _SHORT_OF_MEMORY)
