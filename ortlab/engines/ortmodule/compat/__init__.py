"""The only entry point to ONNX Runtime's training package and to torch's private modules.

Importing this package imports neither and changes nothing; the first call of `ortmodule` does both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ortlab.engines.ortmodule.compat import extensions, requirements
from ortlab.engines.ortmodule.compat.base import OrtUnavailable, Progress
from ortlab.engines.torchscript import failures
from ortlab.utils.plain_onnxruntime import IMPORTING


@dataclass(frozen=True)
class TrainingRuntime:
    """Parts of ONNX Runtime's training package that engines need, patched and ready to use.

    The classes and enumerations are ORT's own. ``set_seed`` restarts the generator of ORT's own
    dropout, which is used on a GPU and which torch's seeds do not affect.
    """

    ORTModule: Any
    DebugOptions: Any
    LogLevel: Any
    FallbackPolicy: Any
    SkipCheck: Any
    set_seed: Callable[[int], None]
    version: str


_ort: TrainingRuntime | None = None


def unavailable() -> str | None:
    """Return the reason why ORTModule cannot run here, and the fix; None if it can run.

    Cheap: imports neither torch nor ORT.
    """
    if _ort is not None:  # charts ask at every update, and reading package metadata takes 15 ms
        return None
    finding = requirements.obstacle()
    return None if finding is None else f"{finding.found}. {finding.fix}"


def ortmodule(on_progress: Progress | None = None) -> TrainingRuntime:
    """Return ORTModule and its companions, ready to use.

    The first call builds ORT's torch extensions if this machine has none yet (about 10 s), imports
    torch and ORT, and applies the rows of `patches`. Later calls return the same object at once.

    Args:
        on_progress: Called with a line of text before and after each build.

    Raises:
        OrtUnavailable: If ORTModule cannot run here, with the reason and the fix.
    """
    global _ort
    with IMPORTING:
        if _ort is None:
            _ort = _load(on_progress)
        return _ort


def use_opset(opset: int) -> None:
    """Register the export rules for this ONNX opset too. Call `ortmodule` first.

    ORTModule registers them once per wrapped model, for the opset that its environment variable
    names.

    Args:
        opset: ONNX opset of the graphs that will be exported.
    """
    from onnxruntime.training.ortmodule import (  # optional: onnxruntime-training
        _custom_op_symbolic_registry as rules,
    )

    rules.CustomOpSymbolicRegistry.register_all(opset)


def use_triton() -> None:
    """Allow ORT to generate Triton kernels, from now on for every graph that asks for them."""
    from onnxruntime.training.ort_triton import register_triton_op_executor  # optional: ORT

    register_triton_op_executor()


def explain(error: BaseException) -> failures.Failure:
    """Explain an exception that ORTModule raised.

    Args:
        error: The exception, with its chain of causes.

    Returns:
        The operator, the user's line and a short reason.
    """
    return failures.explain(error)


def _load(on_progress: Progress | None) -> TrainingRuntime:
    finding = requirements.obstacle()
    if finding is not None:
        raise OrtUnavailable(finding.found, finding.fix)
    try:
        return _patched(on_progress)
    except ImportError as error:  # installed, but broken or hidden
        raise OrtUnavailable(
            f"onnxruntime-training is installed but cannot be imported ({error})",
            f"pip install --force-reinstall onnxruntime-training=={requirements.ORT_VERSION}",
        ) from error


def _patched(on_progress: Progress | None) -> TrainingRuntime:
    from ortlab.engines.ortmodule.compat import patches  # heavy: torch

    extensions.build(on_progress)  # all of them here, so that no export waits for a compiler
    patches.apply(extensions.load())
    if patches.installed().cuda:
        extensions.preload_cuda()

    import onnxruntime  # optional: onnxruntime-training
    import torch  # heavy: torch
    from onnxruntime.training import ortmodule as package  # optional: onnxruntime-training
    from onnxruntime.training.ortmodule import _fallback, options  # optional: onnxruntime-training

    def set_seed(seed: int) -> None:
        # Seeds 0 and 1 produce the same numbers, and each dropout takes the next seed.
        onnxruntime.set_seed(seed + 1)

    set_seed(torch.initial_seed() % sys.maxsize)  # importing ORT seeded it with torch's seed as is
    return TrainingRuntime(
        ORTModule=package.ORTModule,
        DebugOptions=package.DebugOptions,
        LogLevel=package.LogLevel,
        FallbackPolicy=_fallback._FallbackPolicy,
        SkipCheck=options._SkipCheck,
        set_seed=set_seed,
        version=onnxruntime.__version__,
    )
