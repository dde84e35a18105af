"""Errors as a notebook shows them: what happened and the user's own lines, nothing of ours.

IPython calls ``_render_traceback_`` of an exception that has one. Scripts and debuggers see the
ordinary exception with its whole traceback.
"""

from __future__ import annotations

import functools
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

if TYPE_CHECKING:
    pass


P = ParamSpec("P")
T = TypeVar("T")
_OURS = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
    _OURS,
)
_CELL = re.compile(r"^(<ipython-input-|.*/ipykernel_\d+/)")


class Concise:
    """A mixin for exceptions whose message says it all."""

    def _render_traceback_(self) -> list[str]:
        assert isinstance(self, BaseException)
        return concise(self)


def shorten(error: BaseException) -> None:
    """Makes notebooks show `error` as `concise` does, whatever its class is."""
    error._render_traceback_ = functools.partial(concise, error)  # type: ignore[attr-defined]


def forget_locals(error: BaseException | None) -> None:
    """Clears the frames of `error` and of what it came from; the lines of its traceback stay.

    They would keep model, data and what was being computed.
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
    """Has notebooks show what `function` refuses as `concise` does: a ValueError of ortlab's own.

    What the user's code raises on the way, as a model's forward, keeps its whole traceback.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except ValueError as error:
            raised_at = traceback.extract_tb(error.__traceback__)[-1].filename
            if _OURS in Path(raised_at).parents:
                shorten(error)
            raise

    return call


def message(error: BaseException) -> str:
    """What `error` says, without the frames that torch's C++ adds in an operator that ORT calls."""
    return str(error).split("\nException raised from ", 1)[0]


def concise(error: BaseException) -> list[str]:
    """The lines that a notebook shows: the message, its notes, and the user's lines on the way.

    The last of the user's lines that the exception, or what caused it, came through is where it
    happened. Lines of Python's library, of installed packages and of ortlab are left out.
    """
    lines = [f"{type(error).__name__}: {message(error)}", *getattr(error, "__notes__", ())]
    return lines + [f"  {where}" for where in _users_lines(error)]


def _users_lines(error: BaseException) -> list[str]:
    link: BaseException | None = error
    found: list[str] = []
    while link is not None:
        for frame in traceback.extract_tb(link.__traceback__):
            if _is_users(frame.filename) and frame.name not in ("<module>", "<cell line: 1>"):
                found.append(f"{place(frame.filename, frame.lineno or 0)}, in {frame.name}")
        link = link.__cause__
    return list(dict.fromkeys(found))


def users_line(frames: Iterable[FrameType]) -> str | None:
    """Where the user's code stands in `frames`, the innermost first; None where there is none."""
    for frame in frames:
        if _is_users(frame.f_code.co_filename):
            return f"{place(frame.f_code.co_filename, frame.f_lineno)}, in {frame.f_code.co_name}"
    return None


def place(file: str, line: int) -> str:
    """A line of code, where it stands and what it says; a notebook's cell has no file name."""
    code = linecache.getline(file, line).strip()
    where = f"cell line {line}" if _CELL.match(file) else f"{file}:{line}"
    return f"{where}: {code}" if code else where


def _is_users(file: str) -> bool:
    path = Path(file)
    inside = any(root in path.parents for root in _NOT_THE_USERS)
    return not inside and not file.startswith("<frozen")


_SHORT_OF_MEMORY: Final = (
    "can't allocate memory",  # torch's allocator on a CPU: c10/core/impl/alloc_cpu.cpp
    "bad_alloc",  # C++, in ORT's messages and torch's
    "bad allocation",
    "failed to allocate memory",  # ORT's arena: onnxruntime/core/framework/bfc_arena.cc
    "not enough memory",  # our own kernels: ortlab/engines/ortmodule/kernels/kernels.cc
    "out of memory",  # CUDA's own
    "cannot allocate memory",  # the system's ENOMEM, as in a worker that cannot be forked
    "memoryerror",  # Python's own, told by another process
)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory of the host or of a device did not suffice, whoever says so."""
    import torch

    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        said = str(error).lower()
        if isinstance(error, RuntimeError | OSError) and any(s in said for s in _SHORT_OF_MEMORY):
            return True
        error = error.__cause__
    return False
