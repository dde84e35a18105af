"""Graphs that ONNX Runtime builds from a model: stages, memory, time and recompute plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STAGES: Final[Mapping[str, str]] = {
    "exported": "as exported by torch",
    "forward": "optimized by ORT before it builds the gradient",
    "gradient": "with the gradient that ORT builds",
    "execution": "as executed by ORT's session",
    "eval": "of the forward pass only, as exported for evaluation",
}
"""Stages of a model's graph on engine ``ortmodule``, each with a short description."""

CAPTURED_STAGES: Final[Mapping[str, str]] = {
    "captured": "as captured by torch, with the gradient",
    "forward": "of the forward pass, in ONNX",
    "gradient": "of both passes, in ONNX",
    "execution": "of both passes, as executed by ORT's sessions",
    "eval": "of the forward pass without gradients, in ONNX",
}
"""Stages of a model's graph on engine ``ort``."""
