"""Import of onnxruntime for inference, without the side effects of its training build."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

IMPORTING = threading.Lock()
NO_TELEMETRY: Final[Mapping[str, str]] = {"ORT_DISABLE_TELEMETRY": "1"}
"""Environment in which onnxruntime sends no usage data, from its import on (Privacy.md of it)."""


def let_threads_sleep(options: Any) -> None:
    """Make a session's idle threads sleep: spinning, they would hold cores that torch needs.

    Args:
        options: An ``onnxruntime.SessionOptions``, changed in place.
    """
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")


def turn_off_telemetry() -> None:
    """Keep onnxruntime from sending usage data, unless ``ORT_DISABLE_TELEMETRY`` is already set.

    Call this before onnxruntime is imported, which is when it reads the variable.
    """
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)


def plain_onnxruntime() -> ModuleType:
    """Import onnxruntime for inference.

    The training build also imports its training package, which imports DeepSpeed; that takes a
    second and prints a warning. DeepSpeed is therefore hidden during the import.

    Returns:
        The module `onnxruntime`.

    Raises:
        ImportError: onnxruntime is not installed.
    """
    turn_off_telemetry()
    with IMPORTING:
        if "onnxruntime" not in sys.modules and "deepspeed" not in sys.modules:
            sys.modules["deepspeed"] = None  # type: ignore[assignment]  # makes its import fail
            try:
                importlib.import_module("onnxruntime")
            finally:
                del sys.modules["deepspeed"]
        return importlib.import_module("onnxruntime")
