"""Capture of forward and backward graphs by TorchDynamo and AOTAutograd, and their compilation."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ortlab.engines.base import EngineUnavailable
from ortlab.engines.ort import attention, check, draws, recurrence, session
from ortlab.engines.ort.lowering.graph import RULES
from ortlab.engines.ort.onnx_model import is_number
from ortlab.engines.ort.segments import FASTER_IN_TORCH, Division, divide
from ortlab.settings import unknown_name
from ortlab.utils import warn_once
from ortlab.utils.files import write_private

aten = torch.ops.aten

Phase = Literal["forward", "backward", "inference"]

_ALSO_DECOMPOSED: Final = (
    aten.addcdiv,
    aten.addcmul,
    aten.addmv,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.elu,
    aten.elu_backward,
    aten.glu,
    aten.glu_backward,
    aten.hardshrink,
    aten.hardsigmoid,
    aten.hardsigmoid_backward,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.index_add,
    aten.leaky_relu_backward,
    aten.lerp,
    aten.linalg_vector_norm,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.logsumexp,
    aten.mish,
    aten.mish_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.norm,
    aten.roll,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.softplus,
    aten.softplus_backward,
    aten.softshrink,
    aten.std,
    aten.tril,
    aten.triu,
    aten.unfold_backward,
    aten.upsample_bilinear2d,
    aten.upsample_nearest2d,
    aten.var,
    aten.var_mean,
)
"""Operators that torch can decompose although they are not in its core list."""


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of the operators that have no rule.

    Operators that draw random numbers are not decomposed: they would draw other numbers.
    """
    found = {**core_aten_decompositions(), **get_decompositions(_ALSO_DECOMPOSED)}
    return {
        operator: decomposition
        for operator, decomposition in found.items()
        if operator not in RULES
        and operator not in FASTER_IN_TORCH
        and torch.Tag.nondeterministic_seeded not in operator.tags
    }


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph of Dynamo, which a forward and a backward pass are made of.

    Attributes:
        inputs: Names of its inputs.
        tensors: Tensors among them in the call that was captured, such as parameters.
    """

    inputs: tuple[str, ...]
    tensors: tuple[weakref.ref[torch.Tensor] | None, ...]

    def names_in(self, module: nn.Module) -> list[str]:
        """Return the names of the inputs that are parameters or buffers of a module, else "".

        Args:
            module: Module that was captured.
        """
        named = [*module.named_parameters(), *module.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        return [names.get(id(tensor and tensor()), "") for tensor in self.tensors]


@dataclass
class CompiledGraph:
    """A graph that was captured and compiled.

    Attributes:
        phase: Forward or backward pass of training, or inference.
        division: Its segments.
        seconds: Time of the compilation, without Dynamo's capture.
        captured: The graph of Dynamo that it belongs to.
        calls: Number of calls so far.
        call_seconds: Time of the calls so far.
        last_call: Number of the model's call that it was last called in.
        sizes: Sizes among its inputs in the last call, by the names of their placeholders.
    """

    phase: Phase
    division: Division
    seconds: float
    captured: Captured
    calls: int = 0
    call_seconds: float = 0.0
    last_call: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = [node for node in self.division.module.graph.nodes if node.op == "placeholder"]
        self._numbers = [(i, node.name) for i, node in enumerate(inputs) if is_number(node)]

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the graph.

        Args:
            arguments: Inputs; the list is emptied, so that they can be released early.

        Returns:
            The outputs.
        """
        started = time.perf_counter()
        self.sizes = {name: arguments[i] for i, name in self._numbers}
        results = self.division.module.forward(arguments)
        self.call_seconds += time.perf_counter() - started
        self.calls += 1
        return results


@dataclass(eq=False)
class Backend:  # torch compares backends of compiled code: each model's is its own
    """Backend of `torch.compile` that runs graphs in ORT, and remembers them.

    Attributes:
        graphs: Graphs compiled so far.
        call: Number of the model's call that is running.
        starting: Function that is called before a graph of Dynamo is compiled.
        severity: Lowest severity of the messages that ORT prints in graphs compiled from now on.
        save_onnx: Beginning of the paths that ONNX models are written to; None to write none.
        self_check: Compare the first call of each segment with torch.
    """

    __name__ = "ortlab"  # as torch names it in errors

    graphs: list[CompiledGraph] = field(default_factory=list)
    call: int = 0
    starting: Callable[[], None] = lambda: None
    severity: int = session.SILENT
    save_onnx: str | None = None
    self_check: bool = False

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """See `ortlab`."""
        self.starting()
        if (reason := session.unavailable()) is not None:
            raise EngineUnavailable(reason)
        _replace_functions(module)
        placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        tensors = (weakref.ref(x) if isinstance(x, torch.Tensor) else None for x in inputs)
        captured = Captured(tuple(placeholders), tuple(tensors))
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=self._compiler("forward", captured),
            bw_compiler=self._compiler("backward", captured),
            inference_compiler=self._compiler("inference", captured),
            partition_fn=_partition,
            decompositions=decompositions(),
        )(module, inputs)
        return compiled

    def _compiler(self, phase: Phase, captured: Captured) -> Callable[..., Any]:
        def compile_graph(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            started = time.perf_counter()
            _donate_nothing()
            with unset_fake_temporarily():
                if phase == "inference":
                    draws.take_out(module)
                division = divide(module, severity=self.severity)
            if self.self_check:
                check.check_first_calls(division.ort_segments(), _warn)
            made = CompiledGraph(phase, division, time.perf_counter() - started, captured)
            self.graphs.append(made)
            self.save(len(self.graphs) - 1)

            def run(arguments: list[Any]) -> Any:
                made.last_call = self.call
                return made(arguments)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    def save(self, number: int) -> None:
        """Write the ONNX models of a graph to ``<save_onnx>_<graph>_<phase>_<segment>.onnx``.

        Graphs and segments are numbered from 0. Files that cannot be written are named in a
        warning.

        Args:
            number: Number of the graph in `graphs`.
        """
        if self.save_onnx is None:
            return
        graph = self.graphs[number]
        start = f"{self.save_onnx}_{number}_{graph.phase}_"
        for i, segment in enumerate(graph.division.ort_segments()):
            path = Path(f"{start}{i}.onnx").expanduser()
            try:
                write_private(path, segment.lowered.model.SerializeToString())
            except OSError as error:
                warn_once.say(str(path), f"not written: {error}")


def _replace_functions(module: fx.GraphModule) -> None:
    """Let a graph of Dynamo, and graphs that it contains, call functions that ORT can run."""
    replaced: dict[Any, Callable[..., Any]] = {**attention.REPLACED, **recurrence.REPLACED}
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            for node in child.graph.nodes:
                if node.op == "call_function" and node.target in replaced:
                    node.target = replaced[node.target]
            child.recompile()


def _donate_nothing() -> None:
    """Let the backward pass that is being compiled keep the saved tensors, for retain_graph.

    Torch lets a backend overwrite them, and then refuses a second pass. ORT overwrites no input.
    Switched off by its option, torch 2.13 still refuses: it compares None with the empty list.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _warn(moved: check.Moved) -> None:
    """Warn of a move: no view shows the models of torch.compile."""
    warnings.warn(f"backend 'ortlab': {moved}", stacklevel=2)


def ortlab(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the backend ``"ortlab"`` of `torch.compile`.

    Torch finds it through the entry point group ``torch_dynamo_backends``, without an import.

    Args:
        module: Graph of torch functions.
        inputs: Example inputs.
        options: Options of `torch.compile`. ``self_check=True`` compares the first call of each ORT
            segment with torch and moves operators whose results are wrong to torch, with a warning;
            default False.
        mode: Mode of `torch.compile`; only its default is accepted.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: If a mode is given, or an option is unknown or of a wrong type.
        EngineUnavailable: If there is no onnxruntime.

    Example:
        >>> compiled = torch.compile(model, backend="ortlab", options={"self_check": True})
    """
    if mode is not None:  # torch puts "backend='ortlab' raised:" before these messages
        raise ValueError(f"mode={mode!r} is not supported; leave out mode=")
    return Backend(self_check=_self_check(options or {}))(module, inputs)


def _self_check(options: object) -> bool:
    """Return the option `self_check` of `torch.compile`; refuse all others."""
    if not isinstance(options, Mapping):
        raise ValueError(f"options={options!r} is not a dict; use options={{'self_check': True}}")
    for name in options:
        if name != "self_check":
            raise ValueError(f"unknown option {name!r}; {unknown_name(str(name), ['self_check'])}")
    chosen = options.get("self_check", False)
    if not isinstance(chosen, bool):
        raise ValueError(f"option self_check={chosen!r} must be True or False")
    return chosen


def _partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Divide a joint graph into forward and backward pass: what is cheap is computed twice."""
    draws.take_out(joint)
    return min_cut_rematerialization_partition(joint, inputs, **options)
