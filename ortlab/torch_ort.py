"""The names of the package torch_ort, on ortlab's engines: a script changes only its import line.

    from ortlab.torch_ort import ORTModule, DebugOptions, LogLevel

Where onnxruntime-training is installed the engine is ``"ortmodule"``; elsewhere, on any Python that
has onnxruntime, it is ``"ort"``.

Where torch_ort logs a line and continues in plain torch because ORT cannot train a model correctly,
this module raises an error. ``ORTModule(model, fallback=True)`` allows the fallback.
"""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ortlab.api import wrap
from ortlab.engines.base import tell, wrapped_model
from ortlab.engines.ortmodule import compat, options
from ortlab.session import session
from ortlab.utils.findings import package_version

__all__ = ["DebugOptions", "LogLevel", "ORTModule", "load_from_json", "set_seed"]


class LogLevel(enum.IntEnum):
    """Lowest severity of ORT's messages that is printed."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


@dataclass(frozen=True)
class DebugOptions:
    """Messages and files of ORTModule; the arguments are those of torch_ort.

    As in torch_ort, the environment variables ORTMODULE_LOG_LEVEL and ORTMODULE_SAVE_ONNX_PATH take
    precedence over the arguments.

    Engine ``"ortmodule"`` writes upstream's files, a stage of the newest graph each:
    ``<prefix>_torch_exported_training.onnx``, ``<prefix>_execution_model_training.onnx`` and those
    between. Engine ``"ort"`` writes the ONNX model of each ORT segment when it is made, to
    ``<prefix>_<graph>_<forward, backward or inference>_<segment>.onnx``, such as
    ``mlp_0_forward_0.onnx``; graphs and segments are numbered from 0.

    Args:
        log_level: Lowest severity of the messages that are printed.
        save_onnx: Whether to write the graphs to files.
        onnx_prefix: Beginning of the names of these files.
        save_path: Folder of these files; empty for the working directory.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``save_onnx`` is given without a prefix.
    """

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""
    save_path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, LogLevel):
            raise TypeError(
                f"log_level={self.log_level!r} must be a LogLevel, such as LogLevel.INFO"
            )
        if not isinstance(self.onnx_prefix, str):
            raise TypeError(f"onnx_prefix={self.onnx_prefix!r} must be a string")
        if self.save_onnx and not self.onnx_prefix:
            raise ValueError("save_onnx=True needs an onnx_prefix, with which file names begin")

    @classmethod
    def of(cls, given: Any) -> DebugOptions:
        """Return the options that an object with the same attributes has, such as upstream's.

        Args:
            given: These options, those of ``onnxruntime.training.ortmodule``, or None for the
                defaults.

        Raises:
            TypeError: If it is another object, or an attribute has the wrong type.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if not hasattr(given, "log_level"):
            raise TypeError(
                f"debug_options is a {type(given).__name__}; give an ortlab.torch_ort.DebugOptions"
            )
        saved = getattr(given, "save_onnx_models", None)
        return cls(
            _level(given.log_level),
            bool(saved.save if saved else getattr(given, "save_onnx", False)),
            saved.name_prefix if saved else getattr(given, "onnx_prefix", ""),
            saved.path if saved else getattr(given, "save_path", ""),
        )

    def settings(self) -> dict[str, Any]:
        """Return the equivalent settings of `ortlab.wrap`."""
        found: dict[str, Any] = {}
        if not os.environ.get("ORTMODULE_LOG_LEVEL"):
            found["log_level"] = self.log_level.name.lower()
        if self.save_onnx:
            folder = os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or self.save_path
            found["save_onnx"] = os.path.join(folder or os.getcwd(), self.onnx_prefix)
        return found


def _level(level: Any) -> LogLevel:
    """Return a level that another enumeration, or a number, means."""
    name, value = getattr(level, "name", None), getattr(level, "value", level)
    try:
        if isinstance(name, str):
            return LogLevel[name]
        return LogLevel(value)
    except (KeyError, ValueError):
        known = ", ".join(LogLevel.__members__)
        raise TypeError(f"log_level={level!r} must be one of {known}") from None


def _engine() -> Literal["ort", "ortmodule"]:
    """Return the engine of `ORTModule` here."""
    return "ort" if package_version("onnxruntime-training") is None else "ortmodule"


class _Wrapping(type):
    """Metaclass that makes wrapped models the instances of `ORTModule`."""

    def __call__(cls, module: nn.Module, debug_options: Any = None, **settings: Any) -> nn.Module:
        debug = DebugOptions.of(debug_options)
        wrapped = wrap(module, engine=_engine(), **{**debug.settings(), **settings})
        # In torch_ort torch.manual_seed seeds ORT's dropout, too; here, the seed so far does.
        set_seed(torch.initial_seed() % sys.maxsize)
        return wrapped

    def __instancecheck__(cls, instance: object) -> bool:
        return wrapped_model(instance) is not None


class ORTModule(nn.Module, metaclass=_Wrapping):
    """A model that runs in ONNX Runtime and otherwise behaves as before.

    It shares the parameters of the model and exposes its attributes; ``state_dict`` has the model's
    own names, and ``module`` is the model. On a GPU, the dropout of onnxruntime-training starts
    from torch's current seed.

    Args:
        module: The model to wrap.
        debug_options: Messages and files, as a `DebugOptions` or the object of the same name in
            ``onnxruntime.training.ortmodule``; None for the defaults.
        **settings: Settings of `ortlab.wrap`, which documents the errors, too.

    Example:
        >>> model = ORTModule(model, DebugOptions(log_level=LogLevel.INFO))
        >>> loss_function(model(x), y).backward()
    """

    def __init_subclass__(cls) -> None:
        raise TypeError("ORTModule cannot be subclassed; subclass nn.Module and wrap the instance")


def set_seed(seed: int) -> None:
    """Reset ORT's random numbers of dropout on a GPU, which `torch.manual_seed` does not reset.

    Without onnxruntime-training it does nothing: torch's generator draws all random numbers.

    Args:
        seed: The seed.
    """
    if _engine() == "ort":
        return
    compat.ortmodule(on_progress=tell).set_seed(seed)


def load_from_json(model: nn.Module, path: str | None = None) -> None:
    """Set the options of a wrapped model from a file in ORTModule's JSON form.

    They take effect at its next call. As in ``torch_ort.experimental.json_config``, the environment
    variable ORTMODULE_JSON_CONFIG_PATH takes precedence over `path`.

    Args:
        model: A model wrapped in engine ``"ortmodule"``.
        path: Path of the file; None for the environment variable.

    Raises:
        ValueError: If there is neither, `ortlab.engines.ortmodule.options` does not accept the
            file, or the model is wrapped in another engine, which has none of these options.
    """
    path = os.environ.get("ORTMODULE_JSON_CONFIG_PATH") or path
    if path is None:
        raise ValueError("give the path of a JSON file, or set ORTMODULE_JSON_CONFIG_PATH")
    record = wrapped_model(model)
    if record is not None and record.engine != "ortmodule":
        raise ValueError(
            f"the file has options of engine 'ortmodule', and this model runs in engine "
            f"{record.engine!r}; give ORTModule(model, ...) the settings of ortlab.wrap instead"
        )
    session.wrapped.configure(model, options.from_json(path))
