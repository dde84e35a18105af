"""What the modules of this folder share: the errors and the limits of the training runtime."""

from __future__ import annotations

from collections.abc import Callable

ORT_LOG_FORMAT = "%(asctime)s %(name)s [%(levelname)s] - %(message)s"


MAX_IR, MAX_OPSET = 10, 21
"""The newest form of an ONNX model that ORT 1.19.2 reads."""


Progress = Callable[[str], None]
"""Takes one line of text about something that takes seconds."""


class OrtUnavailable(RuntimeError):
    """ORTModule cannot run here: `reason` says why and `fix` what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. {fix}")
        self.reason = reason
        self.fix = fix
