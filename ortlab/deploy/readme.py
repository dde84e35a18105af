"""README.md of an export: its files, their differences from torch, and programs that run them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ortlab._version import __version__
from ortlab.deploy import snippets
from ortlab.deploy.check import Expected
from ortlab.deploy.exported import MODEL, Exported, size
from ortlab.deploy.graph import Port

_PLAIN = re.compile(r"[\w.]+", re.ASCII)
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$]|^[#+\-=]|(?<=^\d)[.)])")


def text(exported: Exported, example: Expected) -> str:
    """Return the text of README.md.

    Args:
        exported: The export.
        example: The example, whose sizes the programs use.
    """
    sizes = _sizes(exported.inputs, example)
    parts = [
        f"# {escaped(exported.model)}\n\n"
        f"Exported by ortlab {__version__} for inference, at ONNX opset {exported.opset}. "
        "Each file was run in onnxruntime and compared with eager torch on "
        f"{escaped(', '.join(exported.tried))}. The outputs of {MODEL} differ by at most "
        f"{exported.forms[0].relative:.1e}, relative to an output's largest value, or to 1 if that "
        "is less.",
        "## Files\n\n" + _files(exported),
        "## Inputs\n\n" + _ports(exported.inputs),
        "## Outputs\n\n" + _ports(exported.outputs),
    ]
    if exported.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {escaped(note)}" for note in exported.notes))
    parts.append(
        "## Programs\n\nEach program runs the model on placeholder values (0.5 for floats, 1 for "
        f"other types) and prints the first {snippets.SHOWN} values of every output. Run them in "
        "this folder."
    )
    for program in snippets.programs(exported.inputs, exported.outputs, sizes, MODEL):
        run = "" if program.is_run else " (not tested)"
        parts.append(f"### {program.language}{run}\n\n```{program.fence}\n{program.code}\n```")
    return "\n\n".join(parts) + "\n"


def escaped(given: str) -> str:
    """Return a text with Markdown's special characters escaped, on one line.

    Args:
        given: The text.
    """
    return _SPECIAL.sub(r"\\\1", " ".join(given.split()))


def _code(name: str) -> str:
    """Return a name as code, or as escaped text if it has special characters."""
    return f"`{name}`" if _PLAIN.fullmatch(name) else escaped(name)


def _sizes(inputs: Sequence[Port], example: Expected) -> dict[str, int]:
    """Return the example's values of the sizes that vary, by name."""
    return {
        name: example.tensors[port.name].shape[dim]
        for port in inputs
        for dim, name in enumerate(port.shape)
        if isinstance(name, str)
    }


def _files(exported: Exported) -> str:
    measured = any(form.accuracy is not None for form in exported.forms)
    heads = ["file", "precision", "size", "largest difference", "relative", "at"]
    heads += ["accuracy", "in torch"] if measured else []
    rows = [heads, ["---"] * len(heads)]
    for form in exported.forms:
        row = [_code(form.file), form.name, size(form.bytes)]
        row += [f"{form.difference:.1e}", f"{form.relative:.1e}", escaped(form.worst)]
        if measured:
            row += [f"{form.accuracy:.4f}", f"{form.torch_accuracy:.4f}"]
        rows.append(row)
    return _table(rows)


def _ports(ports: Sequence[Port]) -> str:
    rows = [["name", "type", "shape"], ["---"] * 3]
    for port in ports:
        dims = (escaped(str(dim)) for dim in port.shape)
        rows.append([_code(port.name), port.type, " x ".join(dims) or "a single value"])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
