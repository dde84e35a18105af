"""torch.autograd.Function in ORT's graphs: its own forward and backward, run by torch.

In an export every call of a Function becomes a ``PythonOp`` node. ORT hands the node's tensors to
the `FunctionCall` that was registered under the node's name, which calls the very Function again,
and keeps the piece of autograd's graph that this makes until ORT asks for the gradients. So
everything that torch's autograd does for a Function (``needs_input_grad``, ``save_for_backward``,
``mark_non_differentiable``, ``set_materialize_grads``, ``setup_context``) it does here as well.

What ORT ships for this, ``torch_interop_utils``, takes the place of autograd's C++ parts, and those
change with every torch; `interop.cc` only passes Python objects on.
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

_NODE = "prim::PythonOp"
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_C: Any = torch._C
_BASE: Any = torch.autograd.function._SingleLevelFunction
"""What `torch.autograd.Function.apply` goes on to; it inherits its own from C++."""
_WITHOUT_REENTRY = "_checkpoint_without_reentrant_generator"
"""Of torch.utils.checkpoint: what goes on before and after a part that is computed again later."""
_ORTS_OWN = "onnxruntime.training.ortmodule._io."
"""ORTModule marks outputs with identities, which have an export rule of their own."""


# ---- one call of a function in a graph -----------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among arguments or results: which one it is."""

    index: int


@dataclass
class _State:
    """What one run of a call leaves for its backward: edges of autograd's graph, no tensors.

    Of an input that needs no gradient, and of an output that has none, there is None.
    """

    inputs: list[tuple[GradientEdge, torch.Size, torch.dtype, torch.device] | None]
    outputs: list[GradientEdge | None]
    reference: Any = None


class _Input(Function):
    """Makes a tensor an input of autograd's graph, which does not keep the tensor alive."""

    @staticmethod
    def forward(_ctx: Any, _root: Tensor, held: list[Tensor]) -> Tensor:
        return held.pop()

    @staticmethod
    def backward(_ctx: Any, _gradient: Tensor) -> Any:
        return None, None


@dataclass
class FunctionCall:
    """One call of a Function in an exported graph; ORT runs it by `apply` and `backward`.

    `arguments` and `results` are as in the export, with a `_Slot` for each tensor. The tensors'
    types are `input_types` and `output_types`.
    """

    function: Any
    name: str
    training: bool
    arguments: Any
    input_types: list[torch.dtype]
    results: Any = None
    output_types: list[torch.dtype] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """What the Function returns. An `apply` of its own, in its class, has been run before."""
        args, kwargs = _put_back(self.arguments, tensors)
        return vars(Function)["apply"].__get__(None, self.function)(*args, **kwargs)

    def apply(
        self, requires_grad: Sequence[bool], training: bool, capsules: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Forward: the state for `backward`, or None where there is none, and the outputs.

        Raises what the Function raises, and RuntimeError where it returns another kind of result
        than it did in the export.
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
            raise RuntimeError("it returned another kind of result than when it was exported")
        state = _State(edges, [get_gradient_edge(y) if y.requires_grad else None for y in outputs])
        kept = RUNS.keep(state) if any(state.outputs) else None
        return kept, *(_sent(y, to) for y, to in zip(outputs, self.output_types, strict=True))

    def backward(
        self, _requires_grad: Sequence[bool], _training: bool, arguments: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Gradients of the inputs, None for those that need none; zeros where it gives None."""
        reference, *capsules = arguments
        state = reference()
        if state is None:
            raise RuntimeError("its forward pass is gone: backward runs once for every forward")
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
    """A copy of ORT's tensor: what the Function keeps of it, ORT may overwrite."""
    value: Tensor = from_dlpack(capsule)
    return value.to(dtype, copy=True)


def _sent(value: Tensor, dtype: torch.dtype) -> Any:
    """A copy for ORT, which may overwrite it: the Function may have kept `value`."""
    if value.dtype != dtype:
        raise RuntimeError(f"it gave {value.dtype} where it gave {dtype} when it was exported")
    wire = torch.uint8 if dtype is torch.bool else dtype
    value = value.detach().to(wire, copy=True, memory_format=torch.contiguous_format)
    return _C._to_dlpack(value)


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with a `_Slot` in the place of every tensor, which goes to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value)(_take_out(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _take_out(item, tensors) for key, item in value.items()}
    return value


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `_take_out`."""
    if isinstance(value, _Slot):
        return tensors[value.index]
    if type(value) in (tuple, list):
        return type(value)(_put_back(item, tensors) for item in value)
    if type(value) is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    return value


# ---- what keeps a run's states -------------------------------------------------------------------


# ---- the export ----------------------------------------------------------------------------------


class _Traced(Function):
    """What the tracer sees of a Function: one node, which holds the `FunctionCall`."""

    @staticmethod
    def forward(ctx: Any, call: FunctionCall, *tensors: Tensor) -> Any:
        state = _C._get_tracing_state()
        _C._set_tracing_state(None)
        try:
            versions = [tensor._version for tensor in tensors]
            outputs: list[Tensor] = []
            with _C.DisableTorchFunction():  # what it decides by values, it decides anew every time
                found = call.run(tensors)
            call.results = _take_out(found, outputs)
            # Whoever reads these from now on reads the node's output.
            changed = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
            ctx.mark_dirty(*changed)
            # The tracer cannot end a tuple of one that nobody reads.
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        finally:
            _C._set_tracing_state(state)


@dataclass
class Traced:
    """What an export met: how often checkpointing was asked for."""

    checkpoints: int = 0


_calls: dict[str, FunctionCall] = {}
_numbers = itertools.count(1)


@contextlib.contextmanager
def traced(*, training: bool, opset: int, refuse: str | None = None) -> Iterator[Traced]:
    """Within it, in this thread, a traced Function becomes a node that ORT can run.

    Checkpointed parts are traced as if they were not. `training` is whether the graph gets a
    gradient, `opset` its ONNX opset. FunctionRefused is raised by the Function that cannot be
    exported; with `refuse` every one is, for that reason. Not for two threads at once: hold
    `streams.EXPORT`.
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
                name, "is made anew in every forward, and a graph would keep the first; define it "
                "outside of forward"
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

    # Below Function.apply, which may have been taken as a bound method long ago.
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
    """The number that torch gives to the next class of Functions."""
    mark: Any = type("_Mark", (Function,), {})
    return int(mark._backward_cls._autograd_function_id)


def _trace(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Any:
    """What the Function returns, as a node of the trace."""
    name = _name(cls)
    tensors: list[Tensor] = []
    arguments = _take_out((args, kwargs), tensors)
    hidden = next(_hiding(arguments), None)
    if hidden is not None:
        raise FunctionRefused(
            name, f"takes a {hidden}, whose tensors a graph would keep as they are; pass the "
            "tensors themselves"
        )  # fmt: skip
    if not tensors:
        raise FunctionRefused(name, "takes no tensor, so a graph would keep its first result")
    types = [tensor.dtype for tensor in tensors]
    call = FunctionCall(cls, f"{name}#{next(_numbers)}", training, arguments, types)
    with torch.no_grad():  # the tracer refuses what requires a gradient and is no input
        found = _Traced.apply(call, *tensors)  # type: ignore[no-untyped-call]
    outputs: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
    other = next(_other_than_tensors(call.results), None)
    if other is not None or not outputs:
        raise FunctionRefused(name, f"returns {other or 'no tensor'}, and ORT passes tensors only")
    call.output_types = [tensor.dtype for tensor in outputs]
    _register(call)
    return _put_back(call.results, outputs)


def _register(call: FunctionCall) -> None:
    """For the life of the process, as ORT keeps what is registered."""
    _calls[call.name] = call
    runs = {"apply": staticmethod(call.apply), "backward": staticmethod(call.backward)}
    # ORT takes classes of Functions only, and looks `forward` up for a mode that is not used here.
    as_class = type(call.function.__name__, (Function,), {**runs, "forward": runs["apply"]})
    _ort().register_torch_autograd_function(call.name, as_class)


def _hiding(value: Any) -> Iterator[str]:
    """Types of arguments that hold tensors where `_take_out` does not look."""
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
    """Types of results that are no tensors, and can change from run to run."""
    if type(value) in (tuple, list):
        for item in value:
            yield from _other_than_tensors(item)
    elif not isinstance(value, (_Slot, type(None))):
        yield type(value).__name__


def _node(g: Any, call: FunctionCall, *tensors: Any, **_attributes: Any) -> Any:
    """The export rule: the node whose forward and backward are the call's."""
    from ortlab.engines.torchscript.nodes import cast

    given = zip(tensors, call.input_types, strict=True)
    inputs = [cast(g, tensor, _wire(dtype)) for tensor, dtype in given]
    outputs_traced = [value.type() for value in g.original_node.outputs()]
    found = g.op(
        "com.microsoft::PythonOp",
        *inputs,
        func_name_s=call.name,  # another one for each call, so ORT merges no two
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
    """The type that a tensor has between ORT and torch: ORT's DLPack knows no bool."""
    return torch.uint8 if dtype is torch.bool else dtype


def _onnx_type(dtype: torch.dtype) -> Any:
    return JitScalarType.from_dtype(_wire(dtype)).onnx_type()


@functools.cache
def _ready() -> None:
    """Gives ORT what runs the nodes; builds it where this machine has none yet."""
    address = extensions.load_interop()
    _ort().register_forward_runner(address)
    _ort().register_backward_runner(address)
    # Before the interpreter ends: ORT would let its Python objects go after it.
    atexit.register(_ort().unregister_python_functions)


def _ort() -> Any:
    from onnxruntime.capi import _pybind_state

    return _pybind_state


# ---- what engines ask ----------------------------------------------------------------------------


def functions(graph: Any) -> list[Any]:
    """The Functions that an exported ONNX graph calls, by class; empty for most graphs."""
    found = []
    for node in graph.node:
        if node.op_type == "PythonOp":
            name = next(a.s.decode() for a in node.attribute if a.name == "func_name")
            found.append(_calls[name].function)
    return found


def definition(function: Any) -> object:
    """What bears the Function's name now: another class, where a cell that defines it ran again.

    The Function itself where it was defined in a function, or its name is gone.
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
    """Within it, in this thread, checkpointing with re-entry does without.

    Its gradients are the same, and those of chosen inputs can be asked for. Where no input requires
    a gradient, re-entry gives the part's parameters none, and neither does this.
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
