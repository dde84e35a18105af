"""Errors and limits of the training runtime that the modules of this package share."""

from __future__ import annotations

from collections.abc import Callable

ORT_LOG_FORMAT = "%(asctime)s %(name)s [%(levelname)s] - %(message)s"


MAX_IR, MAX_OPSET = 10, 21
"""Newest IR version and opset of an ONNX model that ORT 1.19.2 can read."""


Progress = Callable[[str], None]
"""Callback that receives one line of text about an operation that takes seconds."""


class OrtUnavailable(RuntimeError):
    """Raised when ORTModule cannot run here; `reason` is the cause and `fix` the remedy."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. {fix}")
        self.reason = reason
        self.fix = fix
