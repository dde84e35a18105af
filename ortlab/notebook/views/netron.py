"""What the graph view takes from the installed netron: its drawing of graphs, without its server.

Netron's own page asks for its age, for cookies and for the network; none of that is taken. What is
taken is private to netron, so its version is pinned, and where a file or a mark in it is missing
the view shows the outline instead.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

MODULES: Final = ("base.js", "dagre.js", "grapher.js", "view.js")
"""Its JavaScript modules, each after those that it imports."""
_DARK: Final = "@media (prefers-color-scheme: dark) {"


class Unusable(RuntimeError):
    """This netron is not there, or not as the view needs it; the message says what is missing."""


@functools.cache
def bundle() -> bytes:
    """JSON, compressed with gzip: ``version``, ``modules`` by name, ``light`` and ``dark`` styles.

    Netron's dark style follows the system's; they come apart, for here it is the page that chooses.
    """
    styles = _text("grapher.css")
    light, mark, dark = styles.partition(_DARK)
    if not mark:
        raise Unusable(f"netron {_version()} has no dark style")
    content = {
        "version": _version(),
        "modules": {name: _with_common_brackets(_text(name)) for name in MODULES},
        "light": light,
        "dark": dark.rpartition("}")[0],
    }
    return gzip.compress(json.dumps(content).encode(), mtime=0)


@functools.cache
def categories() -> dict[str, str]:
    """Netron's kind of each operator that has one ("Layer", "Activation"), by `Node.op`.

    That of the operator's newest version, where versions differ.
    """
    found: dict[str, str] = {}
    described: list[dict[str, Any]] = json.loads(_text("onnx-metadata.json"))
    for operator in sorted(described, key=lambda operator: operator["version"]):
        domain = operator["module"]
        name = operator["name"] if domain == "ai.onnx" else f"{domain}.{operator['name']}"
        if category := operator.get("category"):
            found[name] = category
    return found


def _with_common_brackets(script: str) -> str:
    """Netron writes shapes in brackets that only Chinese and Japanese fonts have."""
    return script.replace(r"\u3008", r"\u27e8").replace(r"\u3009", r"\u27e9")


def _text(name: str) -> str:
    try:
        return (_folder() / name).read_text(encoding="utf-8")
    except OSError:
        raise Unusable(f"netron {_version()} has no {name}") from None


def _folder() -> Path:
    spec = importlib.util.find_spec("netron")
    if spec is None or spec.origin is None:
        raise Unusable("the package netron is not installed")
    return Path(spec.origin).parent


def _version() -> str:
    return importlib.metadata.version("netron")
