"""Parts of the installed netron that the graph view uses: its drawing, without its server.

Netron's own page checks for updates, asks for consent to cookies and uses the network; none of that
is used. The parts are private to netron, so its version is pinned, and if a file or a marker in it
is missing, the view shows the outline instead.
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
"""Netron's JavaScript modules, each after its imports."""
_DARK: Final = "@media (prefers-color-scheme: dark) {"


class Unusable(RuntimeError):
    """Raised if netron is not installed or lacks a part; the message names it."""


@functools.cache
def bundle() -> bytes:
    """Return netron's parts as gzip-compressed JSON.

    Its keys are ``version``, ``modules`` by name, and the ``light`` and ``dark`` styles. Netron's
    dark style follows the operating system; the styles are separate here, because the page chooses.

    Raises:
        Unusable: If a part is missing.
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
    """Return netron's category of operators ("Layer", "Activation"), by `Node.op`.

    If versions of an operator differ, the newest counts.

    Raises:
        Unusable: If netron's metadata is missing.
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
    """Replace netron's brackets around shapes, which only Chinese and Japanese fonts have."""
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
