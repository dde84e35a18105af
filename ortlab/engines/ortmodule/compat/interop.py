"""Support for torch.autograd.Function in ORT graphs: its own forward and backward, run by torch.

During an export, every call of a Function becomes a ``PythonOp`` node. ORT passes the node's
tensors to the `FunctionCall` that is registered under the node's name. It calls the same Function
again, and keeps the part of autograd's graph that this creates until ORT requests the gradients.
All features of torch's autograd for a Function (``needs_input_grad``, ``save_for_backward``,
``mark_non_differentiable``, ``set_materialize_grads``, ``setup_context``) therefore work as in
eager mode.

ORT's own implementation, ``torch_interop_utils``, replaces C++ parts of autograd that change with
every torch version; `interop.cc` only passes Python objects on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.function
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.onnx._internal.torchscript_exporter import registration
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType
from torch.utils.dlpack import from_dlpack

from ortlab.engines.ortmodule.compat import extensions
from ortlab.engines.ortmodule.compat.base import OrtUnavailable
from ortlab.engines.ortmodule.compat.forward_states import RUNS
from ortlab.engines.torchscript.failures import FunctionRefused
from ortlab.engines.torchscript.nodes import cast

_NODE = "prim::PythonOp"
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_C: Any = torch._C
_BASE: Any = torch.autograd.function._SingleLevelFunction
"""Base class whose ``apply`` `torch.autograd.Function.apply` calls, inherited from C++."""
_WITHOUT_REENTRY = "_checkpoint_without_reentrant_generator"
"""Generator of torch.utils.checkpoint that runs before and after a checkpointed part."""
_ORTS_OWN = "onnxruntime.training.ortmodule._io."
"""Prefix of the identities with which ORTModule marks outputs; they have their own export rule."""


# ---- one call of a function in a graph -----------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a tensor in arguments or results, with the tensor's index."""

    index: int


@dataclass
class _State:
    """State of one run of a call for its backward: edges of autograd's graph, without tensors.

    An input or output without gradient has None.
    """

    inputs: list[tuple[GradientEdge, torch.Size, torch.dtype, torch.device] | None]
    outputs: list[GradientEdge | None]
    reference: Any = None


class _Input(Function):
    """Function that makes a tensor an input of autograd's graph without keeping it alive."""

    @staticmethod
    def forward(_ctx: Any, _root: Tensor, held: list[Tensor]) -> Tensor:
        return held.pop()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> Any:
        return None, None


@dataclass
class FunctionCall:
    """One call of a Function in an exported graph; ORT runs it with `apply` and `backward`.

    Attributes:
        function: The Function.
        name: Unique name of the call.
        training: Whether the graph has a gradient.
        arguments: Arguments at export, with a `_Slot` for each tensor.
        input_types: Types of the tensors in `arguments`.
        results: Result at export, with a `_Slot` for each tensor.
        output_types: Types of the tensors in `results`.
    """

    function: Any
    name: str
    training: bool
    arguments: Any
    input_types: list[torch.dtype]
    results: Any = None
    output_types: list[torch.dtype] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Call the Function and return its result.

        An ``apply`` that the Function's class overrides has already run.

        Args:
            tensors: Tensors for the slots in `arguments`.
        """
        args, kwargs = _put_back(self.arguments, tensors)
        return vars(Function)["apply"].__get__(None, self.function)(*args, **kwargs)

    def apply(
        self, requires_grad: Sequence[bool], training: bool, capsules: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Run forward.

        Exceptions of the Function are passed on.

        Args:
            requires_grad: For each input, whether it needs a gradient.
            training: Whether the graph runs with a gradient.
            capsules: DLPack capsules of the inputs.

        Returns:
            A weak reference to the state for `backward`, or None without one, and capsules of the
            outputs.

        Raises:
            RuntimeError: If the structure or type of the result differs from that at export.
        """
        inputs = [_received(each, to) for each, to in zip(capsules, self.input_types, strict=True)]
        with torch.set_grad_enabled(training):
            root = torch.empty(0, requires_grad=True)
            for i, needed in enumerate(requires_grad):
                if needed and training:
                    inputs[i] = _Input.apply(root, [inputs[i]])  # type: ignore[no-untyped-call]
            edges = [
                (get_gradient_edge(x), x.shape, x.dtype, x.device) if x.requires_grad else None
                for x in inputs
            ]
            found = self.run(inputs)
            del inputs
        outputs: list[Tensor] = []
        if _take_out(found, outputs) != self.results:
            raise RuntimeError("the structure of its result differs from that at export")
        state = _State(edges, [get_gradient_edge(y) if y.requires_grad else None for y in outputs])
        kept = RUNS.keep(state) if any(state.outputs) else None
        return kept, *(_sent(y, to) for y, to in zip(outputs, self.output_types, strict=True))

    def backward(
        self, _requires_grad: Sequence[bool], _training: bool, arguments: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Run backward.

        Args:
            arguments: Reference that `apply` returned, and capsules of the outputs' gradients.

        Returns:
            Capsules of the inputs' gradients: None for an input that needs no gradient, zeros if
            the Function returns None.

        Raises:
            RuntimeError: If the state of the forward pass was released.
        """
        reference, *capsules = arguments
        state = reference()
        if state is None:
            raise RuntimeError(
                "the state of this forward pass was released: backward can run once per forward"
            )
        given = [
            (edge, from_dlpack(capsule).clone())
            for edge, capsule in zip(state.outputs, capsules, strict=True)
            if edge is not None and capsule is not None
        ]
        edges = [each[0] for each in state.inputs if each is not None]
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in given],
                edges,
                [gradient for _, gradient in given],
                allow_unused=True,
            )
            if given
            else [None] * len(edges)
        )
        gradients: list[Any] = []
        for each in state.inputs:
            if each is None:
                gradients.append(None)
                continue
            _, shape, dtype, device = each
            gradient = next(found)
            if gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            gradients.append(_sent(gradient, dtype))
        state.inputs, state.outputs = [], []
        return tuple(gradients)


def _received(capsule: Any, dtype: torch.dtype) -> Tensor:
    """Return a copy of ORT's tensor: the Function may save it, and ORT may overwrite its memory."""
    value: Tensor = from_dlpack(capsule)
    return value.to(dtype, copy=True)


def _sent(value: Tensor, dtype: torch.dtype) -> Any:
    """Return a copy for ORT, which may overwrite it: the Function may have saved `value`."""
    if value.dtype != dtype:
        raise RuntimeError(f"it returned {value.dtype}, but {dtype} at export")
    wire = torch.uint8 if dtype is torch.bool else dtype
    value = value.detach().to(wire, copy=True, memory_format=torch.contiguous_format)
    return _C._to_dlpack(value)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """Replace every tensor in `value` with a `_Slot`, and append the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(_take_out(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _take_out(item, tensors) for key, item in value.items()}
    return value


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Replace every `_Slot` in `value` with its tensor; the inverse of `_take_out`."""
    if isinstance(value, _Slot):
        return tensors[value.index]
    if type(value) in (tuple, list):
        return type(value)(_put_back(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    return value


# ---- the export ----------------------------------------------------------------------------------


class _Traced(Function):
    """Function that the tracer records: one node, which holds the `FunctionCall`."""

    @staticmethod
    def forward(ctx: Any, call: FunctionCall, *tensors: Tensor) -> Any:
        state = _C._get_tracing_state()
        _C._set_tracing_state(None)
        try:
            versions = [tensor._version for tensor in tensors]
            outputs: list[Tensor] = []
            with _C.DisableTorchFunction():  # its decisions run in Python at every call
                found = call.run(tensors)
            call.results = _take_out(found, outputs)
            # Later reads of these tensors read the node's output.
            changed = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
            ctx.mark_dirty(*changed)
            # The tracer fails on a tuple of one output that is never read.
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        finally:
            _C._set_tracing_state(state)


@dataclass
class Traced:
    """Observations of an export: the number of calls of checkpointing."""

    checkpoints: int = 0


_calls: dict[str, FunctionCall] = {}
_numbers = itertools.count(1)


@contextlib.contextmanager
def traced(*, training: bool, opset: int, refuse: str | None = None) -> Iterator[Traced]:
    """Export each traced Function in this thread as a node that ORT can run.

    Checkpointed parts are traced like any other code. A Function that cannot be exported raises
    FunctionRefused when it is called. Only one thread may be in this context: hold
    `streams.EXPORT`.

    Args:
        training: Whether the graph gets a gradient.
        opset: ONNX opset of the graph.
        refuse: Reason to refuse every Function; None to export them.

    Yields:
        The observations of the export, updated as they occur.
    """
    seen = Traced()
    thread = threading.get_ident()
    born = _next_function_id()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = super(_BASE, cls).apply
        if threading.get_ident() != thread or not _C._is_tracing() or cls is _Traced:
            return call(*args, **kwargs)
        name = _name(cls)
        if name.startswith(_ORTS_OWN):
            return call(*args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction:
            seen.checkpoints += 1
            part, _preserve_random_state, *inputs = args
            return part(*inputs)
        if refuse is not None:
            raise FunctionRefused(name, refuse)
        if cls._backward_cls._autograd_function_id >= born:
            raise FunctionRefused(
                name, "is created in every forward, but a graph would keep the first one; define "
                "it outside of forward"
            )  # fmt: skip
        try:
            _ready()
        except OrtUnavailable as error:
            raise FunctionRefused(name, f"cannot run in ORT: {error}") from None
        return _trace(cls, args, kwargs, training=training)

    around: Any = getattr(torch_checkpoint, _WITHOUT_REENTRY)

    def around_part(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != thread or not _C._is_tracing():
            yield from around(*args, **kwargs)
        else:
            seen.checkpoints += 1
            yield

    # In the base class, since Function.apply may have been stored as a bound method before.
    _BASE.apply = classmethod(apply)
    setattr(torch_checkpoint, _WITHOUT_REENTRY, around_part)
    registration.registry.register(_NODE, opset, _node, custom=True)
    try:
        yield seen
    finally:
        registration.registry.unregister(_NODE, opset)
        setattr(torch_checkpoint, _WITHOUT_REENTRY, around)
        del _BASE.apply


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _next_function_id() -> int:
    """Return the id that torch assigns to the next subclass of Function."""
    mark: Any = type("_Mark", (Function,), {})
    return int(mark._backward_cls._autograd_function_id)


def _trace(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Any:
    """Record the call as a node of the trace and return its result."""
    name = _name(cls)
    tensors: list[Tensor] = []
    arguments = _take_out((args, kwargs), tensors)
    hidden = next(_hiding(arguments), None)
    if hidden is not None:
        raise FunctionRefused(
            name, f"takes a {hidden}, whose tensors a graph would freeze at export; pass the "
            "tensors themselves"
        )  # fmt: skip
    if not tensors:
        raise FunctionRefused(name, "takes no tensor, so a graph would freeze its first result")
    types = [tensor.dtype for tensor in tensors]
    call = FunctionCall(cls, f"{name}#{next(_numbers)}", training, arguments, types)
    with torch.no_grad():  # the tracer rejects a tensor that requires a gradient and is no input
        found = _Traced.apply(call, *tensors)  # type: ignore[no-untyped-call]
    outputs: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
    other = next(_other_than_tensors(call.results), None)
    if other is not None or not outputs:
        raise FunctionRefused(name, f"returns {other or 'no tensor'}, but ORT passes only tensors")
    call.output_types = [tensor.dtype for tensor in outputs]
    _register(call)
    return _put_back(call.results, outputs)


def _register(call: FunctionCall) -> None:
    """Register the call with ORT, which keeps it for the life of the process."""
    _calls[call.name] = call
    runs = {"apply": staticmethod(call.apply), "backward": staticmethod(call.backward)}
    # ORT accepts only subclasses of Function, and looks up `forward` for a mode that is unused.
    as_class = type(call.function.__name__, (Function,), {**runs, "forward": runs["apply"]})
    _ort().register_torch_autograd_function(call.name, as_class)


def _hiding(value: Any) -> Iterator[str]:
    """Yield the types of arguments that contain tensors where `_take_out` does not look."""
    if type(value) in (tuple, list):
        for item in value:
            yield from _hiding(item)
    elif type(value) is dict:
        yield from _hiding(list(value.values()))
    elif not isinstance(value, (*_ATOMS, _Slot, torch.nn.Module, type)):
        inside = getattr(value, "__dict__", {}).values()
        if isinstance(value, tuple | list | set):
            inside = [*inside, *value]
        elif isinstance(value, dict):
            inside = [*inside, *value.values()]
        if any(isinstance(item, Tensor) for item in inside):
            yield type(value).__name__


def _other_than_tensors(value: Any) -> Iterator[str]:
    """Yield the types of results that are not tensors and may differ between runs."""
    if type(value) in (tuple, list):
        for item in value:
            yield from _other_than_tensors(item)
    elif not isinstance(value, (_Slot, type(None))):
        yield type(value).__name__


def _node(g: Any, call: FunctionCall, *tensors: Any, **_attributes: Any) -> Any:
    """Write the node that runs a call's forward and backward; this is the export rule."""
    given = zip(tensors, call.input_types, strict=True)
    inputs = [cast(g, tensor, _wire(dtype)) for tensor, dtype in given]
    outputs_traced = [value.type() for value in g.original_node.outputs()]
    found = g.op(
        "com.microsoft::PythonOp",
        *inputs,
        func_name_s=call.name,  # unique per call, so that ORT merges no two nodes
        input_convention_s="d" * len(inputs),
        input_tensor_types_i=[_onnx_type(dtype) for dtype in call.input_types],
        input_tensor_ranks_i=[value.type().dim() for value in g.original_node.inputs()],
        output_tensor_types_i=[_onnx_type(dtype) for dtype in call.output_types],
        output_tensor_ranks_i=[kind.dim() for kind in outputs_traced],
        training_mode_i=int(call.training),
        comment_s="",
        outputs=len(outputs_traced),
    )
    outputs = [found] if len(outputs_traced) == 1 else list(found)
    for i, (kind, dtype) in enumerate(zip(outputs_traced, call.output_types, strict=True)):
        outputs[i].setType(kind.with_dtype(_wire(dtype)).with_sizes([None] * kind.dim()))
        outputs[i] = cast(g, outputs[i], dtype)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _wire(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor between ORT and torch: ORT's DLPack does not support bool."""
    return torch.uint8 if dtype is torch.bool else dtype


def _onnx_type(dtype: torch.dtype) -> Any:
    return JitScalarType.from_dtype(_wire(dtype)).onnx_type()


@functools.cache
def _ready() -> None:
    """Register the runner of the nodes with ORT."""
    address = extensions.load_interop()
    _ort().register_forward_runner(address)
    _ort().register_backward_runner(address)
    # Before the interpreter exits: otherwise ORT would release its Python objects after it.
    atexit.register(_ort().unregister_python_functions)


def _ort() -> Any:
    from onnxruntime.capi import _pybind_state  # optional: onnxruntime-training

    return _pybind_state


# ---- queries of the engines ----------------------------------------------------------------------


def functions(graph: Any) -> list[Any]:
    """Return the Functions that an exported graph calls; empty for most graphs.

    Args:
        graph: ONNX graph that was exported in this process.
    """
    found = []
    for node in graph.node:
        if node.op_type == "PythonOp":
            name = next(a.s.decode() for a in node.attribute if a.name == "func_name")
            found.append(_calls[name].function)
    return found


def definition(function: Any) -> object:
    """Return the object that now has a Function's name.

    This is another class if the cell that defines the Function was run again.

    Args:
        function: A Function.

    Returns:
        The object, or `function` itself if it was defined in a function or its name was deleted.
    """
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return function if found is None else found


class _WithoutReentry(threading.local):
    on = False


_without_reentry = _WithoutReentry()
_lock = threading.Lock()
_threads_without = 0


@contextlib.contextmanager
def without_reentry() -> Iterator[None]:
    """Run reentrant checkpointing without re-entry in this thread.

    The gradients are the same, and those of selected inputs can be requested. If no input requires
    a gradient, reentrant checkpointing computes no gradients of the part's parameters, and neither
    does this.
    """
    global _threads_without
    function: Any = torch_checkpoint.CheckpointFunction
    before, _without_reentry.on = _without_reentry.on, True
    with _lock:
        _threads_without += 1
        function.apply = _apply_checkpoint
    try:
        yield
    finally:
        _without_reentry.on = before
        with _lock:
            _threads_without -= 1
            if not _threads_without:
                del function.apply


def _apply_checkpoint(part: Any, preserve_random_state: bool, *args: Any) -> Any:
    if not _without_reentry.on:
        inherited: Any = vars(Function)["apply"].__get__(None, torch_checkpoint.CheckpointFunction)
        return inherited(part, preserve_random_state, *args)
    if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():
            return part(*args)
    return torch_checkpoint.checkpoint(
        part, *args, use_reentrant=False, preserve_rng_state=preserve_random_state
    )
