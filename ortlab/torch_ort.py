"""The names of the package torch_ort, on ortlab's engine: a script changes its import line alone.

    from ortlab.torch_ort import ORTModule, DebugOptions, LogLevel

What ORT cannot train right raises an error here, where torch_ort let plain torch go on after a line
in the log; ``ORTModule(model, fallback=True)`` lets it.
"""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortlab.api import wrap
from ortlab.engines.base import tell
from ortlab.engines.ortmodule import compat, options
from ortlab.engines.ortmodule.engine import is_wrapped
from ortlab.session import session

__all__ = ["DebugOptions", "LogLevel", "ORTModule", "load_from_json", "set_seed"]


class LogLevel(enum.IntEnum):
    """How severe a message of ORT's must be to be printed."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


@dataclass(frozen=True)
class DebugOptions:
    """What ORTModule says and saves; the arguments are those of torch_ort.

    With ``save_onnx`` the newest graph is written to files that begin with ``onnx_prefix``, stage
    by stage, in ``save_path`` or the working directory. As in torch_ort the variables
    ORTMODULE_LOG_LEVEL and ORTMODULE_SAVE_ONNX_PATH come before what is given here.

    TypeError for arguments of other types, ValueError for ``save_onnx`` without a prefix.
    """

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, LogLevel):
            raise TypeError(f"log_level={self.log_level!r}: give a LogLevel, as LogLevel.INFO")
        if not isinstance(self.onnx_prefix, str):
            raise TypeError(f"onnx_prefix={self.onnx_prefix!r} is no text")
        if self.save_onnx and not self.onnx_prefix:
            raise ValueError("save_onnx=True needs an onnx_prefix, which the files begin with")

    def settings(self) -> dict[str, Any]:
        """The settings of `ortlab.wrap` that say the same."""
        found: dict[str, Any] = {}
        if not os.environ.get("ORTMODULE_LOG_LEVEL"):
            found["log_level"] = self.log_level.name.lower()
        if self.save_onnx:
            folder = os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or self.save_path
            found["save_onnx"] = os.path.join(folder or os.getcwd(), self.onnx_prefix)
        return found


class _Wrapping(type):
    """Makes a class of what is really a function: what `ORTModule(model)` gives is its instance."""

    def __call__(
        cls, module: nn.Module, debug_options: DebugOptions | None = None, **settings: Any
    ) -> nn.Module:
        debug = DebugOptions() if debug_options is None else debug_options
        if not isinstance(debug, DebugOptions):
            raise TypeError(f"debug_options is a {type(debug).__name__}; import DebugOptions here")
        wrapped = wrap(module, engine="ort", **{**debug.settings(), **settings})
        # torch_ort has torch.manual_seed reach ORT's dropout too; here it does so far.
        set_seed(torch.initial_seed() % sys.maxsize)
        return wrapped

    def __instancecheck__(cls, instance: object) -> bool:
        return is_wrapped(instance)


class ORTModule(nn.Module, metaclass=_Wrapping):
    """``ORTModule(model)`` behaves as `model` does and runs in ONNX Runtime.

    It shares the model's parameters and gives its attributes; ``state_dict`` has the model's own
    names. ORT's own dropout, on a GPU, starts from torch's seed as it is by then. Further keyword
    arguments are settings of `ortlab.wrap`, which also says what is raised.
    """

    def __init_subclass__(cls) -> None:
        raise TypeError("ORTModule cannot be inherited from: wrap the module that does the work")


def set_seed(seed: int) -> None:
    """Restarts ORT's own random numbers, of dropout on a GPU, which torch.manual_seed misses."""
    compat.ortmodule(on_progress=tell).set_seed(seed)


def load_from_json(model: nn.Module, path: str | None = None) -> None:
    """Sets a wrapped `model`'s options from a file of ORTModule's JSON form, for its next call on.

    As in ``torch_ort.experimental.json_config`` the variable ORTMODULE_JSON_CONFIG_PATH comes
    before `path`. ValueError without either, or for what `ortlab.engines.ortmodule.options`
    refuses.
    """
    path = os.environ.get("ORTMODULE_JSON_CONFIG_PATH") or path
    if path is None:
        raise ValueError("give the path of a JSON file, or set ORTMODULE_JSON_CONFIG_PATH")
    session.wrapped.configure(model, options.from_json(path))
