"""A session of ONNX Runtime that is called with torch tensors and returns torch tensors.

Nothing is copied: the session reads the memory of its inputs, and torch adopts its outputs through
DLPack. Both calls are those of onnxruntime's Python module that ORTModule was built on, and are
the same in onnxruntime-training 1.19.2 and in today's onnxruntime.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import TensorProto

from ortlab.engines import runtimes
from ortlab.engines.ort.lowering.graph import NUMPY_TYPES
from ortlab.utils import session_profile
from ortlab.utils.plain_onnxruntime import let_threads_sleep, turn_off_telemetry
from ortlab.utils.session_profile import Ran


class SessionFailed(Exception):
    """Raised when ONNX Runtime cannot create or run a session; the message is its own."""


_OLDEST: Final = (1, 19)
"""Oldest version of onnxruntime with the operators of opset 21."""


_SPINS_BRIEFLY: Final = (1, 26)
"""Oldest version of onnxruntime whose threads can spin for a given time (onnxruntime#27916)."""

_SPIN_US: Final = 50
"""Microseconds that a thread waits for the next operator before it sleeps.

To wake it takes as long. BERT 4 x 256, 8 x 64 tokens, two cores: 154 ms a step instead of 162.
"""


_LARGEST_FOLDED: Final = 1 << 20
"""Bytes of the largest result that a session computes once and keeps, from onnxruntime 1.27 on.

Whatever depends on no input is folded, such as positions and zeros that are expanded to the size of
a batch: sessions of DeBERTa 4 x 256 held 5 MiB for each sample of 128 tokens.
"""

SILENT: Final = 4
"""Severity at which ORT prints no error: each is raised as well."""


_OF_MASK: Final = {**NUMPY_TYPES, torch.bool: np.uint8}
"""Types of an input that takes numbers of 8 bits, and the memory of booleans as such."""


_TRAINING: Final = "onnxruntime.training.ortmodule"


@functools.cache
def runtime() -> tuple[Any, Any]:
    """Return onnxruntime and its C++ module.

    The import of onnxruntime-training would import ORTModule as well, which takes seconds and
    replaces functions of torch. It does without while that is hidden.
    """
    turn_off_telemetry()
    hidden = "onnxruntime" not in sys.modules
    if hidden:
        sys.modules[_TRAINING] = None  # type: ignore[assignment]  # None makes its import fail
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as native
    finally:
        if hidden:
            del sys.modules[_TRAINING]
    return onnxruntime, native


def _version() -> tuple[int, ...]:
    """Return the first two parts of onnxruntime's version."""
    return tuple(int(part) for part in runtime()[0].__version__.split(".")[:2])


def unavailable() -> str | None:
    """Return why no session can run here, and what to do; None if it can."""
    try:
        version = _version()
    except ImportError as error:
        if getattr(error, "name", None) == "onnxruntime":
            return f"onnxruntime is not installed: {runtimes.repair()}"
        return f"onnxruntime cannot be imported ({error}): {runtimes.repair()}"
    except AttributeError:  # what an uninstalled one leaves behind is a package without content
        return f"onnxruntime is incomplete: {runtimes.repair()}"
    if version < _OLDEST:
        found = runtime()[0].__version__
        return f"onnxruntime {found} is older than 1.19: pip install --upgrade onnxruntime"
    return None


@functools.cache
def _empty(dtype: torch.dtype) -> torch.Tensor:
    """Return memory for tensors without elements: ORT refuses torch's null pointer."""
    return torch.empty(1, dtype=dtype)


@dataclass
class Options:
    """Options of the sessions of a model.

    Attributes:
        severity: Lowest severity of the messages that ORT prints in sessions created from now on.
        arena: Keep freed memory for the next step, see `arena`. A change takes effect at the next
            call.
        threads: Number of threads; None for torch's.
    """

    severity: int = SILENT
    arena: bool = True
    threads: int | None = None


@functools.cache
def _create_arena() -> None:
    """Create the arena that sessions of this process share.

    It grows by what is asked for, not by powers of two, and divides blocks that are larger, so that
    a step takes about as much memory as with malloc.
    """
    ort, _ = runtime()
    kind, memory = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, ort.OrtMemType.DEFAULT
    sizes = {
        "max_mem": 0,  # no limit
        "arena_extend_strategy": 1,  # kSameAsRequested
        "initial_chunk_size_bytes": 1 << 16,
        "max_dead_bytes_per_chunk": 1 << 20,
    }
    with contextlib.suppress(RuntimeError):  # onnxruntime 1.19, if the user has created one
        info = ort.OrtMemoryInfo("Cpu", kind, 0, memory)
        ort.create_and_register_allocator(info, ort.OrtArenaCfg(sizes))


def inference_session(
    model: onnx.ModelProto,
    own: Options,
    *,
    optimize: bool = True,
    path: Path | None = None,
    profiles: Path | None = None,
) -> Any:
    """Return an `onnxruntime.InferenceSession` with the engine's options.

    Args:
        model: Model to run.
        own: Options of the model's sessions.
        optimize: False to run the nodes as they are.
        path: File to write what the session executes to.
        profiles: Folder for a profile of all calls.

    Raises:
        SessionFailed: If ORT refuses the model.
    """
    ort, _ = runtime()
    options = ort.SessionOptions()
    options.log_severity_level = own.severity
    options.intra_op_num_threads = own.threads or torch.get_num_threads()
    # Idle threads that spin take the cores from torch's: a step takes up to 1.56 times as long.
    if _version() >= _SPINS_BRIEFLY:
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    else:
        let_threads_sleep(options)
    # With an arena of its own, a session keeps the memory of its largest call, which no other one
    # can use; with patterns, a call takes all its memory at the start.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    if own.arena:
        _create_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(_LARGEST_FOLDED)
    )
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if path is not None:
        options.optimized_model_filepath = str(path)
    if profiles is not None:
        session_profile.record(profiles, options)
    try:
        return ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            # The rules for products say where a matrix is transposed.
            disabled_optimizers=["GemmTransposeFusion"],
        )
    # ORT's exceptions have no common base class.
    except Exception as error:
        raise SessionFailed(str(error)) from error


def executed(model: onnx.ModelProto, *, optimize: bool) -> onnx.ModelProto:
    """Return what a session of a model executes, with the nodes in the order in which it does.

    Args:
        model: Model of the session.
        optimize: Whether the session optimizes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "executed.onnx"
        inference_session(model, Options(arena=False), optimize=optimize, path=path)
        return onnx.load(path)


class Session:
    """Session of one model.

    Attributes:
        inputs: Names of the model's inputs, in the order of a call.
        outputs: Names of its outputs, in the order of the results.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        lasting: int = 0,
        optimize: bool = True,
        options: Options | None = None,
        profiles: Path | None = None,
    ) -> None:
        """Create the session.

        Args:
            model: Model to run.
            inputs: Names of its inputs.
            outputs: Names of its outputs.
            lasting: Number of inputs, the first ones, that mostly stay where they are, such as
                parameters, and have the same shape in each call.
            optimize: False to run the nodes as they are.
            options: Options of the session; None for the default ones.
            profiles: Folder for a profile of all calls; None for no profile.

        Raises:
            SessionFailed: If ORT refuses the model, for example for an operator without a kernel.
        """
        native = runtime()[1]
        self.inputs, self.outputs = list(inputs), list(outputs)
        options = options or Options()
        session = inference_session(model, options, optimize=optimize, profiles=profiles)
        self._session = session._sess
        self._vector = native.OrtValueVector
        self._run_options = native.RunOptions()
        self._run_options.log_severity_level = options.severity
        device = native.OrtDevice
        self._device = device(device.cpu(), device.default_memory(), 0)
        self._devices = [self._device] * len(self.inputs), [self._device] * len(self.outputs)
        graph = model.graph
        types = {
            each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)
        }
        byte, boolean = TensorProto.UINT8, TensorProto.BOOL
        self._types = [_OF_MASK if types[name] == byte else NUMPY_TYPES for name in self.inputs]
        self._booleans = [i for i, name in enumerate(self.outputs) if types[name] == boolean]
        self._known: list[tuple[int, Any]] = [(0, None)] * lasting  # pointers and ORT's values

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model.

        Args:
            tensors: Inputs in order, contiguous, on the CPU.

        Returns:
            The outputs in order.

        Raises:
            SessionFailed: If a kernel fails, or makes no tensor.
        """
        given, results = self._vector(), self._vector()
        given.reserve(len(tensors))
        pointers = [tensor.data_ptr() or _empty(tensor.dtype).data_ptr() for tensor in tensors]

        def give(first: int, end: int) -> None:
            part, known = tensors[first:end], self._types[first:end]
            try:
                types = [each[tensor.dtype] for each, tensor in zip(known, part, strict=True)]
            except KeyError as error:  # torch's kernel has returned what its fake tensor has not
                raise SessionFailed(f"an input has the type {error}") from error
            given.push_back_batch(
                part,
                pointers[first:end],
                types,
                [tensor.shape for tensor in part],
                self._devices[0][first:end],
            )

        for i, (pointer, (before, value)) in enumerate(zip(pointers, self._known, strict=False)):
            if pointer == before:  # half the time of a new value
                given.push_back(value)
            else:
                give(i, i + 1)
                self._known[i] = pointer, given[i]
        give(len(self._known), len(tensors))
        try:
            self._session.run_with_ortvaluevector(
                self._run_options, self.inputs, given, self.outputs, results, self._devices[1]
            )
            adopted: list[torch.Tensor] = results.to_dlpacks(torch._C._from_dlpack)
        except Exception as error:
            raise SessionFailed(str(error)) from error
        for i in self._booleans:  # bytes in onnxruntime 1.19.2
            adopted[i] = adopted[i].view(torch.bool)
        return adopted

    def end_profile(self) -> list[Ran]:
        """End the profile, and return what each call ran."""
        return session_profile.read(Path(self._session.end_profiling()))
