"""Why ORTModule could not take a model: the operator, the user's line and a short reason."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What stopped an export or the graph made from it.

    ``operator`` is torch's or ONNX's name ("aten::fft_rfft", "Gather"), None when no operator is
    to blame. ``source`` is the user's line, "file:line: code", None when it is not known.
    """

    operator: str | None
    source: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} (at {self.source})" if self.source else self.reason


_ATTRIBUTE = "_ortlab_failure"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")
)


def explain(error: BaseException) -> Failure:
    """What the exception that ORTModule raised says, without ORT's banner, colours and graphs."""
    chain = list(_chain(error))
    for link in chain:
        attached = getattr(link, _ATTRIBUTE, None)
        if isinstance(attached, Failure):
            return attached
    return _from_text(chain[-1])


def attach(error: BaseException) -> None:
    """Keeps on `error` what only its traceback's frames know: the node that the exporter was at."""
    setattr(error, _ATTRIBUTE, _from_traceback(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it came from, the cause last."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__context__ or link.__cause__


def _from_traceback(error: BaseException) -> Failure:
    node = _node(error.__traceback__)
    if node is not None:
        operator = str(node.kind())
        return Failure(operator, _user_line(node.sourceRange()), _reason(error, operator))
    from ortlab.compat.exporting import FunctionRefused

    operator_name = error.name if isinstance(error, FunctionRefused) else None
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    return Failure(operator_name, _source(frames), _reason(error, operator_name))


def _node(trace: TracebackType | None) -> Any:
    """The TorchScript node that a symbolic function was called for, from the exporter's frame."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_run_symbolic_function":
            found = trace.tb_frame.f_locals.get("node")
        trace = trace.tb_next
    return found


def _user_line(source_range: str) -> str | None:
    """The innermost line of the user's in a TorchScript source range: "file(12): forward" lines."""
    found = re.findall(r"^(.+)\((\d+)\): ", source_range, re.MULTILINE)
    frames = [(file, int(line)) for file, line in found]
    return _source(frames[::-1])  # the range lists the innermost first


def _source(frames: list[tuple[str, int]]) -> str | None:
    """The last of `frames`, outermost first, that is code of the user's: "file:line: code".

    Where all is library code (a model of transformers), the last frame outside torch and ORT.
    """
    inside = [f for f in frames if not _belongs_to(f[0], "torch", "onnxruntime")]
    users = [f for f in inside if not _is_library(f[0])]
    chosen = users or inside
    if not chosen:
        return None
    file, line = chosen[-1]
    code = linecache.getline(file, line).strip()
    return f"{file}:{line}: {code}" if code else f"{file}:{line}"


def _belongs_to(file: str, *packages: str) -> bool:
    path = Path(file)
    return _OURS in path.parents or any(
        root / package in path.parents for root in _LIBRARIES for package in packages
    )


def _is_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<frozen") or any(root in path.parents for root in _LIBRARIES)


def _reason(error: BaseException, operator: str | None) -> str:
    name = type(error).__name__
    if name == "UnsupportedOperatorError":
        return f"torch's ONNX exporter has no rule for {operator}"
    first = _first_line(str(error))
    return first or name


def _from_text(error: BaseException) -> Failure:
    """What ORT's C++ code has to say: it names nodes and operators in its text only."""
    text = _COLOUR.sub("", str(error))
    kernel = re.search(r"Could not find an implementation for (\w+)\((\d+)\)", text)
    if kernel:
        operator = kernel.group(1)
        return Failure(operator, None, f"ORT has no kernel for {operator} here")
    gradient = re.search(r"The gradient builder has not been registered: (\w+)", text)
    if gradient:
        operator = gradient.group(1)
        return Failure(operator, None, f"ORT has no gradient for {operator}")
    node = re.search(r"Op \((\w+)\)", text) or re.search(r"Non-zero status code .* (\w+) node", text)
    return Failure(node.group(1) if node else None, None, _first_line(text) or type(error).__name__)


def _first_line(text: str) -> str:
    """The first line that is no banner, cut to a readable length."""
    lines = (line.strip() for line in _COLOUR.sub("", text).splitlines())
    said = next((line for line in lines if line and not set(line) <= set("*=- ")), "")
    said = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", said)
    said = re.sub(r"^\S*/onnxruntime/\S+:\d+ \S.*?\) ", "", said)
    return said if len(said) <= 300 else said[:297] + "..."
