"""Calls of a wrapped model from code that its user compiles, such as a whole training step.

Torch would trace the engine itself, and run the model without ORT. `apart` is a function that
`torch.compile` calls instead of tracing it, with a graph break.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_possible() -> bool:
    """Return True if torch's compiler is loaded, so that a caller may be compiled code."""
    return torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules


def _run(record: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return record.forward(args, kwargs)


def __getattr__(name: str) -> Any:
    """Make `apart` when it is first needed: that loads torch's compiler, which takes a second."""
    if name != "apart":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    disable: Any = torch.compiler.disable
    made = globals()[name] = disable(_run, reason="ONNX Runtime runs this model")
    return made
