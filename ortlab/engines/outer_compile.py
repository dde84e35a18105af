"""Calls of a wrapped model from code that its user compiles, such as a whole training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

C = TypeVar("C", bound=Callable[..., Any])


def untraced(function: C) -> C:
    """Return a function that `torch.compile` calls instead of tracing it, with a graph break.

    Otherwise torch would trace the engine itself, and run the model without ORT.

    Args:
        function: Function that runs a model in ORT.
    """
    disable = cast("Callable[..., Any]", torch.compiler.disable)
    return cast("C", disable(function, reason="ONNX Runtime runs this model"))
