"""Record of TorchDynamo's compilations of one model: graph breaks, recompilations, skipped code."""

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from pathlib import Path
from traceback import FrameSummary
from types import TracebackType
from typing import Any, Final

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import (
    get_compilation_metrics,
    get_hook_for_recompile_user_context,
    graph_break_reasons,
    register_hook_for_recompile_user_context,
)

from ortlab.utils.errors import short_place
from ortlab.utils.wording import FEW, counted, few

_TORCH: Final = Path(inspect.getfile(torch)).parent
_DYNAMO: Final = _TORCH / "_dynamo"
_FORWARD: Final = "forward"
_LONGEST: Final = 160
_NUMBERS: Final = itertools.count(1)

_EXPLANATION: Final = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)
_LIMIT: Final = re.compile(r".* limit exceeded\n.*\bexceeding the (\w+) ")
_SIZE: Final = re.compile(
    r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)\. "
    r"expected (?P<before>\d+), actual (?P<now>\d+)"
)
_RAISED: Final = re.compile(r"^backend='.*' raised:\n")
_RESULT_OF_GUARD: Final = re.compile(r"\s{2,}# ")


class CompileLog:
    """Record of the compilations that calls of one model cause within ``with log:``.

    Torch's compilation metrics are of all models of the process. It asks a hook for "user context"
    in the thread that compiles, and adds the answer, here the name of the log, to the metrics.

    Args:
        note: Function that is called with each new line about a break or a recompilation.
        seconds: Time of earlier compilations.

    Attributes:
        count: Number of compilations so far.
        seconds: Time of compilations: torch's capture of the code, and ORT's sessions.
    """

    def __init__(self, note: Callable[[str], None], *, seconds: float = 0.0) -> None:
        self.count = 0
        self.seconds = seconds
        self._note = note
        self._name = f"ortlab model {next(_NUMBERS)}"
        self._tokens: list[Token[CompileLog | None]] = []
        self._last: object = None
        self._start = 0
        self._places: dict[str, str] = {}  # by Dynamo's number of the code
        self._breaks: dict[str, None] = {}
        self._again: dict[str, list[str]] = {}
        self._skipped: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def __enter__(self) -> None:
        if _name_of_the_call not in (get_hook_for_recompile_user_context() or ()):
            register_hook_for_recompile_user_context(_name_of_the_call)
        self._tokens.append(_current.set(self))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())
        if kind is not None and issubclass(kind, TorchDynamoException):
            self._last = next(reversed(get_compilation_metrics()), None)  # the caller tells it
        else:
            self._read()
        self._retry_skipped(trace)
        if self._skipped != self._told:
            for place, why in self._skipped.items():
                if self._told.get(place) != why:
                    self._note(f"{place} runs in eager torch: {why}")
            self._told = dict(self._skipped)

    def _retry_skipped(self, trace: TracebackType | None) -> None:
        """Let torch compile the code again that it skips since the model raised an error in it."""
        while trace is not None:
            code = trace.tb_frame.f_code
            if self._skipped.pop(_place(code.co_filename, code.co_firstlineno), None):
                reset_code(code)
            trace = trace.tb_next

    @property
    def why_nothing_ran(self) -> str:
        """Torch's reason why operators of a call ran in no graph."""
        reasons = [*self._breaks, *self._skipped.values()]
        if reasons:
            return reasons[-1]
        after = " after a call without operators" if self.count else ""
        return f"torch.compile ignores its forward{after}"

    def recompilations(self) -> Mapping[str, int]:
        """Return how often each code was compiled again so far."""
        return {place: len(reasons) for place, reasons in list(self._again.items())}

    def remarks(self, past: Mapping[str, int] | None = None) -> list[str]:
        """Return lines on code that is skipped, breaks, and code that was compiled again.

        Code that is skipped for one reason shares a line. Of code that was compiled again, that
        with the most recompilations is named.

        Args:
            past: Earlier answer of `recompilations`, to leave those out.
        """
        told = past or {}
        since = {
            place: reasons[told.get(place, 0) :] for place, reasons in list(self._again.items())
        }
        places = defaultdict[str, list[str]](list)
        for place, why in list(self._skipped.items()):
            places[why].append(place)
        skipped = [
            f"{few(of_one)} {'runs' if len(of_one) == 1 else 'run'} in eager torch: {why}"
            for why, of_one in places.items()
        ]
        most = sorted(((p, r) for p, r in since.items() if r), key=lambda each: -len(each[1]))
        again = [
            f"compiled again {_at(place)}: {reasons[0]}"
            if len(reasons) == 1
            else f"compiled {len(reasons)} more times {_at(place)}, the last time: {reasons[-1]}"
            for place, reasons in most[:FEW]
        ]
        if others := [len(reasons) for _, reasons in most[FEW:]]:
            again.append(f"compiled again {counted(sum(others), 'time')} elsewhere")
        return [*skipped, *self._breaks, *again]

    def begin(self) -> str:
        """Begin the record of a compilation, and return the name of this log.

        Torch compiles one piece of code after the other, so that the first graph break from now on
        is of this one.
        """
        self._read()
        self._start = len(graph_break_reasons)
        return self._name

    def _read(self) -> None:
        """Read the metrics since the last time; torch keeps those of 64 compilations only."""
        metrics = get_compilation_metrics()
        if not metrics or metrics[-1] is self._last:
            return
        new: list[Any] = []
        for each in reversed(metrics):
            if each is self._last:
                break
            new.append(each)
        self._last = metrics[-1]
        for each in reversed(new):
            if self._name in (each.recompile_user_contexts or ()):
                self._add(each)

    def _add(self, metrics: Any) -> None:
        self.count += 1
        self.seconds += metrics.entire_frame_compile_time_s or 0.0
        code = str(metrics.compile_id).partition("/")[0]
        if metrics.co_filename:
            self._places[code] = _place(metrics.co_filename, metrics.co_firstlineno)
        place = self._places.get(code, _FORWARD)
        again = metrics.recompile_reason and _why_again(metrics.recompile_reason)
        if metrics.fail_reason:
            if limit := _LIMIT.match(metrics.fail_reason):
                why = f"torch's {limit[1]} is reached ({again})"
            else:
                why = _explained(metrics.fail_reason)
                if metrics.fail_user_frame_filename:
                    file, line = metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno
                    why = f"graph break {_at(_place(file, line))}: {why}"
            self._skipped[place] = why
            return
        if again:
            self._again.setdefault(place, []).append(again)
            self._note(f"compiled again {_at(place)}: {again}")
        for reason in metrics.restart_reasons or ():
            breaks = (each for each in graph_break_reasons[self._start :] if each.reason == reason)
            found = next(breaks, None)  # None for a restart for another reason
            if found is not None:
                told = f"graph break {_at(_line(found.user_stack))}: {_explained(reason)}"
                if told not in self._breaks:
                    self._breaks[told] = None
                    self._note(told)


_current: ContextVar[CompileLog | None] = ContextVar("compile_log", default=None)


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return False for a warning that torch prints of a call in a log, which tells the reason."""
    return record.levelno < logging.WARNING or _current.get() is None


for _module in (torch._dynamo.convert_frame, torch._dynamo.exc, torch._subclasses.fake_tensor):
    logging.getLogger(_module.__name__).addFilter(_is_of_others)


def _name_of_the_call() -> str:
    """Return the name of the log in use; torch calls this at the start of each compilation."""
    log = _current.get()
    return "" if log is None else log.begin()


def _line(stack: Sequence[FrameSummary]) -> str:
    """Return the innermost line outside of torch."""
    outside = [each for each in stack if _TORCH not in Path(each.filename).parents]
    innermost = next(reversed(outside or stack), None)
    return _place(innermost.filename, innermost.lineno) if innermost else _FORWARD


def _place(file: str, line: int | None) -> str:
    """Return the location of a line, without torch's own function around a model's forward."""
    return _FORWARD if _DYNAMO in Path(file).parents else short_place(file, line or 0)


def _at(place: str) -> str:
    return f"in {place}" if place == _FORWARD else f"at {place}"


def _explained(reason: str) -> str:
    """Return what torch's text about a break says, in one line."""
    explanation = _EXPLANATION.search(reason)
    text = explanation[1] if explanation else _RAISED.sub("", reason.strip()).partition("\n")[0]
    return _short(text.removesuffix(" Message: None"))


def _why_again(reason: str) -> str:
    """Return torch's reason for a recompilation, such as "0/0: x == 3    # return y", in words."""
    text = _RESULT_OF_GUARD.split(reason.partition(": ")[2].partition("\n")[0])[0].strip()
    if size := _SIZE.match(text):
        return "size {dim} of {name} changed from {before} to {now}".format(**size.groupdict())
    if text.startswith("BACKEND_MATCH"):  # by torch's isolation of models, only across threads
        return "torch had compiled it for another model"
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:  # it is in words
        return _short(text)
    return f"{_short(text)} is no longer true"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
