"""Settings of the export of a model for inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ortlab.settings.choices import EXPORT_OPSETS
from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Settings of an export for inference: options of ``%ort export`` and ``ortlab.export``."""

    command: ClassVar[str] = "export"

    opset: int = setting(
        17,
        minimum=EXPORT_OPSETS[0],
        maximum=EXPORT_OPSETS[1],
        help="ONNX opset version",
    )
    fp16: bool = setting(False, help="also write a half-precision file, and report its error")
    int8: bool = setting(False, help="also write a file with 8-bit weights, and report its error")
    external_data: bool = setting(
        False, help="store the weights in a separate file, as always from 2 GiB on"
    )
