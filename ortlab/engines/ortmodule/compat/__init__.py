"""The one door to ONNX Runtime's training package and to torch's private modules.

Importing it imports neither and changes nothing; `ortmodule` does both when it is first called.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.engines.ortmodule.compat.base import OrtUnavailable, Progress
from ortlab.utils.plain_onnxruntime import IMPORTING

if TYPE_CHECKING:
    from ortlab.engines.torchscript.failures import Failure


@dataclass(frozen=True)
class TrainingRuntime:
    """What engines need of ONNX Runtime's training package, patched and ready.

    The classes and enumerations are ORT's own. ``set_seed`` restarts the generator of ORT's own
    dropout, which draws on a GPU and which torch's seeds do not reach.
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
    """Why ORTModule cannot run here and what to do; None when it can. Cheap: imports nothing."""
    from ortlab.engines.ortmodule.compat import requirements

    if _ort is not None:  # charts ask with every update, and to read packages takes 15 ms
        return None
    finding = requirements.obstacle()
    return None if finding is None else f"{finding.found}. {finding.fix}"


def ortmodule(on_progress: Progress | None = None) -> TrainingRuntime:
    """ORTModule and what belongs to it, ready to use.

    The first call builds ORT's torch extensions if this machine has none yet (about 10 s, told to
    `on_progress`), imports torch and ORT, and applies the rows of `patches`. Later calls return the
    same object at once. Raises OrtUnavailable with the reason and the fix.
    """
    global _ort
    with IMPORTING:
        if _ort is None:
            _ort = _load(on_progress)
        return _ort


def use_opset(opset: int) -> None:
    """Makes the export rules hold for graphs at this ONNX opset too. `ortmodule` comes first.

    ORTModule registers them once for each wrapped model, at the opset that its environment says.
    """
    from onnxruntime.training.ortmodule import _custom_op_symbolic_registry as rules

    rules.CustomOpSymbolicRegistry.register_all(opset)


def use_triton() -> None:
    """Lets ORT make Triton kernels, from now on for every graph that asks for them."""
    from onnxruntime.training.ort_triton import register_triton_op_executor

    register_triton_op_executor()


def explain(error: BaseException) -> Failure:
    """What an exception of ORTModule's says: operator, the user's line, a reason in a few words."""
    from ortlab.engines.torchscript import failures

    return failures.explain(error)


def _load(on_progress: Progress | None) -> TrainingRuntime:
    from ortlab.engines.ortmodule.compat import requirements

    finding = requirements.obstacle()
    if finding is not None:
        raise OrtUnavailable(finding.found, finding.fix)
    from ortlab.engines.ortmodule.compat import extensions, patches

    loaded = extensions.load(on_progress)
    with contextlib.suppress(OrtUnavailable):  # `native` does it in Python then
        extensions.load_native(on_progress)
    patches.apply(loaded)
    if patches.installed().cuda:
        extensions.preload_cuda()

    import onnxruntime
    import torch
    from onnxruntime.training import ortmodule as package
    from onnxruntime.training.ortmodule import _fallback, options

    def set_seed(seed: int) -> None:
        # Of 0 and 1 the generator makes the same numbers, and each dropout takes the next seed.
        onnxruntime.set_seed(seed + 1)

    set_seed(torch.initial_seed() % sys.maxsize)  # its import took torch's as it is
    return TrainingRuntime(
        ORTModule=package.ORTModule,
        DebugOptions=package.DebugOptions,
        LogLevel=package.LogLevel,
        FallbackPolicy=_fallback._FallbackPolicy,
        SkipCheck=options._SkipCheck,
        set_seed=set_seed,
        version=onnxruntime.__version__,
    )
