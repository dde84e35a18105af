"""Explanation of a failed export: the operator, the user's line and a short reason."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ortlab.utils.errors import place


@dataclass(frozen=True)
class Failure:
    """Cause of a failed export, or of a failure of the exported graph.

    Attributes:
        operator: Name in torch or ONNX ("aten::fft_rfft", "CumSum"), or that of an
            autograd.Function; None if no operator caused the failure.
        source: User's line as "file:line: code"; None if unknown.
        module: Submodule, such as "encoder.layer.0"; None if unknown.
        reason: Short description of the cause.
    """

    operator: str | None
    source: str | None
    module: str | None
    reason: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.reason}{where}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Node:
    """Node of an exported graph and the user's line that created it; None if unknown."""

    name: str
    operator: str
    line: str | None


@dataclass(frozen=True)
class Lines:
    """Source lines of a node: the user's, and the innermost one outside torch and ORT.

    Attributes:
        users: User's line as "file:line: code"; None if unknown.
        innermost: Innermost line in the same form without the file's folder; empty if unknown.
    """

    users: str | None
    innermost: str


_ATTRIBUTE = "_ortlab_failure"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGE = Path(__file__).resolve().parents[2]
_OWN = frozenset({_PACKAGE / "engines", _PACKAGE / "deploy"})
"""Folders whose frames lie between the exporter and the model."""
_PROBES = _PACKAGE / "engines" / "ortmodule" / "compat" / "probes.py"
"""File below them whose models stand for the user's code when patches are tested."""
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")
)
_EXPORTERS = ("torch", "onnxruntime")
_ENTRY = "/onnxruntime/training/ortmodule/_io.py"
"""File in which ORT calls the model's `forward`; frames outside of it are not the model's."""
_ENTRIES = re.compile(rf"(?:{re.escape(_ENTRY)}|/ortlab/deploy/call\.py)\(")
"""Pattern of that file, and of the one in which an export for inference calls `forward`."""
_NO_KERNEL, _NO_TYPE = (
    "ORT has no kernel for {operator}",
    "ORT's {operator} does not support {type}",
)
_TEXTS = (
    (r"Could not find an implementation for (?P<operator>\w+)\(\d+\)", _NO_KERNEL),
    (r"Failed to find kernel for (?:[\w.]+\.)?(?P<operator>\w+)\(\d+\)", _NO_KERNEL),
    (
        r"Type \(tensor\((?P<type>\w+)\)\) of output arg \([^)]*\) of node "
        r"\([^)]*?(?P<operator>[A-Za-z]\w*)\)",
        _NO_TYPE,
    ),
    (
        r"Type 'tensor\((?P<type>\w+)\)' of input parameter \(\w+\) of operator "
        r"\((?P<operator>\w+)\)",
        _NO_TYPE,
    ),
    (
        r"gradient builder has not been registered: (?P<operator>\w+)",
        "ORT has no gradient for {operator}",
    ),
    (
        r"output-(?P<output>\d+): couldn't find the producer node",
        "output {output} of forward, counted from 0, is a constant, but an ORT graph can only "
        "return values computed from its inputs: return it outside of the model",
    ),
)
"""Patterns of messages of ORT's C++ code about an operator, and their meanings."""
_NODE_NAME = re.compile(r"(?:name '|Name:'|Node \(|\(')(/[^')]+)")


def explain(error: BaseException) -> Failure:
    """Explain an exception that ORTModule raised, without ORT's banner, colors and graphs.

    Args:
        error: The exception, with its chain of causes.

    Returns:
        The operator, the user's line and the reason, as far as they are known.
    """
    chain = list(_chain(error))
    for link in chain:
        attached = getattr(link, _ATTRIBUTE, None)
        if isinstance(attached, Failure):
            return attached
    frames = _frames(chain[-1])
    inside = [i for i, (file, _) in enumerate(frames) if file.endswith(_ENTRY)]
    if inside:  # `forward` itself raised: ORT runs it once before the export
        return Failure(None, _line(frames[inside[-1] :]), None, _reason(chain[-1], None))
    return _from_text(chain[-1], ())


def attach(error: BaseException) -> None:
    """Attach the node that the exporter was processing, read from the traceback, to `error`.

    Args:
        error: Exception that the exporter raised; `explain` reads the attached failure.
    """
    setattr(error, _ATTRIBUTE, _from_traceback(error))


def attach_nodes(error: BaseException, nodes: Sequence[Node]) -> None:
    """Attach the source of the failing node to `error`.

    Args:
        error: Exception that ORT raised for a graph; `explain` reads the attached failure.
        nodes: Nodes of that graph.
    """
    setattr(error, _ATTRIBUTE, _from_text(error, nodes))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its chain of causes, the root cause last."""
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
        scope = "/".join(part.rpartition("::")[2] for part in node.scopeName().split("/"))
        reason = _reason(error, operator)
        return Failure(
            operator, lines_of_stack(node.sourceRange()).users, module_path(scope), reason
        )
    function = error.name if isinstance(error, FunctionRefused) else None
    return Failure(function, _line(_frames(error)), None, _reason(error, function))


def _frames(error: BaseException) -> list[tuple[str, int]]:
    """Return the file and line of each frame of the traceback, outermost first."""
    return [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]


def _node(trace: TracebackType | None) -> Any:
    """Return the TorchScript node that was being exported, read from the exporter's frame."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_run_symbolic_function":
            found = trace.tb_frame.f_locals.get("node")
        trace = trace.tb_next
    return found


def _from_text(error: BaseException, nodes: Sequence[Node]) -> Failure:
    """Parse a message of ORT's C++ code, which names operators and nodes only in its text."""
    text = _COLOR.sub("", str(error))
    operator, reason = None, _first_line(text) or type(error).__name__
    for pattern, meaning in _TEXTS:
        found = re.search(pattern, text)
        if found:
            operator = found.groupdict().get("operator")
            reason = meaning.format(**found.groupdict())
    name = _NODE_NAME.search(text)
    at = None
    if name is not None:  # a gradient's nodes are below "<name>_Grad/"
        of = name.group(1).partition("_Grad/")[0]
        at = next((node for node in nodes if node.name == of), None)
    if at is None and operator is not None:
        at = next((node for node in nodes if node.operator == operator), None)
    if at is not None:
        if at.line is not None:  # which says more than the node's name
            reason = reason.replace(f" ('{at.name}')", "")
        return Failure(at.operator, at.line, module_path(_parent(at.name)), reason)
    return Failure(operator, None, module_path(_parent(name.group(1))) if name else None, reason)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


_ROOT = re.compile(r"^(_original_module(\.|$))+")
"""Name of the model within ORTModule and `ortlab.engines.ortmodule.fused_step.WithLoss`."""


def module_path(scope: str) -> str | None:
    """Return the path of a submodule, such as "encoder.layer.0".

    Args:
        scope: Scope as the exporter writes it, such as "/_original_module/encoder/layer.0".

    Returns:
        The path; None for the model itself.
    """
    path: list[str] = []
    for name in filter(None, scope.split("/")):
        if path and name.startswith(path[-1] + "."):
            path.pop()  # the name of a Sequential's item includes that of the Sequential
        path.append(name)
    return _ROOT.sub("", ".".join(path)).strip(".") or None


@functools.lru_cache(maxsize=4096)
def lines_of_stack(stack: str) -> Lines:
    """Return the user's line and the innermost line of a TorchScript source range.

    Args:
        stack: Source range: lines of "file(12): function", innermost first.
    """
    inside = _ENTRIES.split(stack)[0]
    found = re.findall(r"^(?:## )?(.+)\((\d+)\): ", inside, re.MULTILINE)
    frames = [(file, int(line)) for file, line in reversed(found)]  # the innermost comes first
    innermost = next((f for f in reversed(frames) if not _belongs_to(f[0], *_EXPORTERS)), None)
    if innermost is None:
        return Lines(_line(frames), "")
    path, line = innermost
    said = place(path, line).removeprefix(f"{Path(path).parent}{os.sep}")
    return Lines(_line(frames), _short(said, 120))


def _line(frames: Sequence[tuple[str, int]]) -> str | None:
    """Return the innermost line of user code in `frames` (outermost first) as "file:line: code".

    If all frames are library code (a transformers model), return the innermost one outside torch
    and ORT.
    """
    inside = [f for f in frames if not _belongs_to(f[0], *_EXPORTERS) and _has_text(*f)]
    chosen = [f for f in inside if not _is_library(f[0])] or inside
    if not chosen:
        return None
    return _short(place(*chosen[-1]), 200)


def _has_text(file: str, line: int) -> bool:
    """Return False for code that was never in a file or a cell, such as that of python -c."""
    return not file.startswith("<") or bool(linecache.getline(file, line))


@functools.cache
def _belongs_to(file: str, *packages: str) -> bool:
    path = Path(file)
    is_own = not _OWN.isdisjoint(path.parents) and path != _PROBES
    return is_own or any(
        root / package in path.parents for root in _LIBRARIES for package in packages
    )


@functools.cache
def _is_library(file: str) -> bool:
    return file.startswith("<frozen") or any(root in Path(file).parents for root in _LIBRARIES)


def _reason(error: BaseException, operator: str | None) -> str:
    if type(error).__name__ == "UnsupportedOperatorError":
        return f"torch's ONNX exporter has no rule for {operator}"
    return _first_line(str(error)) or type(error).__name__


def _first_line(text: str) -> str:
    """Return the first meaningful line without C++ signatures, truncated to a readable length."""
    lines = (line.strip() for line in _COLOR.sub("", text).splitlines())
    said = next((line for line in lines if line and not set(line) <= set("*=- ")), "")
    said = re.sub(r"^/onnxruntime_src/.*?(?=\[ONNXRuntimeError\])", "", said)
    said = re.sub(r"^/onnxruntime_src/\S+ .*\) (?:const )?", "", said)
    said = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", said)
    said = said.partition("  [Caused by the value ")[0]
    said = re.sub(r"\.? Please feel free to request support .*$", "", said)
    return _short(said, 300)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


class FunctionRefused(RuntimeError):
    """Raised when a torch.autograd.Function cannot be exported; `name` is its full name."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"torch.autograd.Function {name} {reason}")
        self.name = name
