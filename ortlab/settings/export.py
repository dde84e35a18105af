"""How a model is exported for inference."""

from __future__ import annotations

from dataclasses import dataclass

from ortlab.settings.choices import EXPORT_OPSETS
from ortlab.settings.declaration import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """How a model leaves for inference; the options of ``%ort export`` and ``ortlab.export``."""

    opset: int = setting(
        17,
        minimum=EXPORT_OPSETS[0],
        maximum=EXPORT_OPSETS[1],
        help="the version of the ONNX operators",
    )
    fp16: bool = setting(False, help="one more file in half precision, its difference told")
    int8: bool = setting(False, help="one more file with weights of eight bits, likewise")
    external_data: bool = setting(
        False, help="the weights in a file of their own, as they are from 2 GiB on"
    )
