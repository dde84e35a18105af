"""The import of onnxruntime for inference, without what comes along with its training build."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


IMPORTING = threading.Lock()


def plain_onnxruntime() -> ModuleType:
    """onnxruntime, for inference; ImportError where it is not here.

    Its import brings its training package along, and that DeepSpeed, which takes a second and
    prints a warning: that is hidden meanwhile.
    """
    with IMPORTING:
        if "onnxruntime" not in sys.modules and "deepspeed" not in sys.modules:
            sys.modules["deepspeed"] = None  # type: ignore[assignment]  # Python's way to hide one
            try:
                importlib.import_module("onnxruntime")
            finally:
                del sys.modules["deepspeed"]
        return importlib.import_module("onnxruntime")
