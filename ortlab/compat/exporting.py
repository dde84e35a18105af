"""ORTModule's export, kept quiet, repeatable and honest.

Torch's TorchScript exporter is process-wide state: one export runs at a time, and what it or the
traced forward changes (buffers, random numbers, file descriptors) is as before when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

EXPORT = threading.RLock()
"""Held during an export."""

_HARMLESS = ("onnxruntime.training.ortmodule._io.", "torch.utils.checkpoint._NoopSaveInputs")
"""ORTModule marks outputs with identities; checkpointing without re-entry keeps its inputs."""


class FunctionRefused(RuntimeError):
    """A torch.autograd.Function in a model to export; `name` is its full name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch.autograd.Function {name} has a backward of its own, which the export would lose"
        )
        self.name = name


def legacy_export(export: Callable[..., Any]) -> Callable[..., Any]:
    """torch.onnx.export as ORTModule means it: the TorchScript exporter.

    Every submodule stays in the mode that it is in: ORTModule's own choice would train a frozen
    BatchNorm or Dropout along, and could not differentiate a model in evaluation mode.
    An autograd.Function is refused by name; a failure is told apart while the graph is still there.
    """

    @functools.wraps(export)  # ORTModule looks at the signature
    def export_module(*args: Any, **kwargs: Any) -> Any:
        from torch.onnx import TrainingMode

        from ortlab.compat import failures

        kwargs["dynamo"] = False
        kwargs["training"] = TrainingMode.PRESERVE
        with _functions_refused():
            try:
                return export(*args, **kwargs)
            except Exception as error:
                failures.attach(error)
                raise

    return export_module


@contextlib.contextmanager
def _functions_refused() -> Iterator[None]:
    """In this thread, calling an autograd.Function raises FunctionRefused."""
    from torch.autograd import Function

    original: Any = Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if threading.get_ident() == thread and not name.startswith(_HARMLESS):
            raise FunctionRefused(name)
        return original.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        Function.apply = original


def repeatable(export_model: Callable[..., Any]) -> Callable[..., Any]:
    """GraphTransitionManager._export_model that leaves buffers and random numbers as they were.

    And without the warnings of the exporter and of what it imports. The tracer runs forward in training mode: without this, BatchNorm counts it as a step. ORT puts
    the random states back itself, but not after a failure.
    """

    @functools.wraps(export_model)
    def export_and_restore(*, flattened_module: Any, **kwargs: Any) -> Any:
        import torch
        from onnxruntime.training.ortmodule import _utils

        with EXPORT, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = _utils.get_random_states()
            before = [(b, b.detach().clone()) for b in flattened_module.buffers()]
            try:
                return export_model(flattened_module=flattened_module, **kwargs)
            finally:
                with torch.no_grad():
                    for buffer, value in before:
                        buffer.copy_(value)
                _utils.set_random_states(states)

    return export_and_restore


def wrap_untouched(init: Callable[..., None]) -> Callable[..., None]:
    """ORTModule.__init__ that leaves each submodule in the mode that it is in.

    It also looks every attribute of the model up, and so sets off each one's deprecation warning.
    """

    @functools.wraps(init)
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        modes = [(part, part.training) for part in module.modules()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init(self, module, *args, **kwargs)
        for part, training in modes:
            part.training = training

    return __init__


@contextlib.contextmanager
def streams_suppressed(enable: bool = True, on_exit: object = None) -> Iterator[None]:
    """What C++ code writes to the process's standard streams is dropped.

    ORT's own form asks sys.stdout for its descriptor, which in a notebook is another one than
    C++ writes to, and elsewhere raises; and it logs what it caught.
    """
    if not enable:
        yield
        return
    with EXPORT, tempfile.TemporaryFile() as sink:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = {}
        try:
            for stream in (1, 2):
                with contextlib.suppress(OSError):  # closed, as in a daemon
                    saved[stream] = os.dup(stream)
                    os.dup2(sink.fileno(), stream)
            yield
        finally:
            for stream, copy in saved.items():
                os.dup2(copy, stream)
                os.close(copy)
