"""Capture of forward and backward graphs by TorchDynamo and AOTAutograd, and their compilation."""

from __future__ import annotations

import functools
import math
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
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ortlab.engines.base import EngineUnavailable
from ortlab.engines.ort import arena, attention, check, convolution, draws, recurrence, session
from ortlab.engines.ort.lowering.graph import RULES, hint, size_of
from ortlab.engines.ort.onnx_model import TANGENTS, correct_types, is_number, tensors_in
from ortlab.engines.ort.recompute import NOTHING, Call, JointGraph, Recompute
from ortlab.engines.ort.segments import FASTER_IN_TORCH, OF_MODEL, Division, divide
from ortlab.engines.ort.unused_outputs import UnusedOutputs
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
    """Return torch's decompositions of the operators that have no rule, and those of our own.

    Operators that draw random numbers are not decomposed: they would draw other numbers.
    """
    found = {**core_aten_decompositions(), **get_decompositions(_ALSO_DECOMPOSED)}
    without_rule = {
        operator: decomposition
        for operator, decomposition in found.items()
        if operator not in RULES
        and operator not in FASTER_IN_TORCH
        and torch.Tag.nondeterministic_seeded not in operator.tags
    }
    return {**without_rule, **convolution.DECOMPOSITIONS}


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
        step: Forward and backward pass that it belongs to.
        recompute: What the backward pass computes again.
        calls: Number of calls so far.
        call_seconds: Time of the calls so far.
        last_call: Number of the model's call that it was last called in.
        sizes: Sizes among its inputs in the last call, by the names of their placeholders.
    """

    phase: Phase
    division: Division
    step: Step
    recompute: Recompute
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

    def stored_bytes(self) -> int:
        """Return the size of the activations that a backward graph reads, in its last call."""
        inputs = [node for node in self.division.module.graph.nodes if node.op == "placeholder"]
        known = {
            node.meta["val"].node.expr: self.sizes[node.name]
            for node in inputs
            if isinstance(node.meta.get("val"), torch.SymInt) and node.name in self.sizes
        }

        def value(size: Any) -> int:
            found = size_of(size)
            found = found if isinstance(found, int) else found.xreplace(known)
            return int(found) if isinstance(found, int) or found.is_number else hint(size)

        kept = (node for node in inputs if not node.name.startswith((*OF_MODEL, TANGENTS)))
        tensors = (tensor for node in kept for tensor in tensors_in(node.meta.get("val")))
        return sum(math.prod(map(value, t.shape)) * t.element_size() for t in tensors)


@dataclass(eq=False)
class Backend:  # torch compares backends of compiled code: each model's is its own
    """Backend of `torch.compile` that runs graphs in ORT, and remembers them.

    Attributes:
        graphs: Graphs compiled so far.
        call: Number of the model's call that is running.
        starting: Function that is called before a graph of Dynamo is compiled.
        options: Options of the sessions.
        save_onnx: Beginning of the paths that ONNX models are written to; None to write none.
        self_check: Compare the first call of each segment with torch.
        recompute: What the backward pass computes again, from the next forward pass on.
        late_s: Seconds of compilations after Dynamo's, such as those for another plan of recompute.
    """

    graphs: list[CompiledGraph] = field(default_factory=list)
    call: int = 0
    starting: Callable[[], None] = lambda: None
    options: session.Options = field(default_factory=session.Options)
    save_onnx: str | None = None
    self_check: bool = False
    recompute: Recompute = NOTHING
    late_s: float = 0.0
    _in_capture: bool = False

    def __post_init__(self) -> None:
        """Let the arena be released after the last backend."""
        arena.release_after(self)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """See `ortlab`."""
        self.starting()
        if (reason := session.unavailable()) is not None:
            raise EngineUnavailable(reason)
        _replace_functions(module)
        placeholders = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        tensors = (weakref.ref(x) if isinstance(x, torch.Tensor) else None for x in inputs)
        captured = Captured(tuple(placeholders), tuple(tensors))
        step = Step(self, captured)
        compile_with = aot_autograd(
            fw_compiler=step.compile_forward,
            bw_compiler=step.compile_backward,
            inference_compiler=step.compile_inference,
            partition_fn=step.partition,
            decompositions=decompositions(),
        )
        self._in_capture = True  # Dynamo measures this time
        try:
            compiled: Callable[..., Any] = compile_with(module, inputs)
        finally:
            self._in_capture = False
        return step.watching(compiled)

    def held_weakly(self) -> Callable[..., Any]:
        """Return this backend as a function that does not keep it alive.

        Torch keeps each backend that it is given for as long as the process lives
        (``cached_backends`` of torch._dynamo.eval_frame), and with it all graphs and sessions.
        """
        remember = weakref.ref(self)

        def ortlab(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            backend = remember()
            assert backend is not None, "torch compiles code of a model that is gone"
            return backend(module, inputs)

        return ortlab

    def compiled(
        self, phase: Phase, module: fx.GraphModule, step: Step, recompute: Recompute
    ) -> CompiledGraph:
        """Compile a graph of ATen operators and remember it.

        Args:
            phase: Forward or backward pass, or inference.
            module: The graph.
            step: Forward and backward pass that it belongs to.
            recompute: What the backward pass computes again.
        """
        started = time.perf_counter()
        with unset_fake_temporarily():
            if phase == "inference":
                draws.take_out(module)
            division = divide(module, options=self.options)
        if self.self_check:
            check.check_first_calls(division.ort_segments(), _warn)
        if not self._in_capture:
            self.late_s += time.perf_counter() - started
        made = CompiledGraph(phase, division, step, recompute)
        self.graphs.append(made)
        self.save(len(self.graphs) - 1)
        return made

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


@dataclass
class _Pair:
    """Forward and backward graph that are in use together.

    Attributes:
        forward: The forward graph.
        saved: Number of tensors that it saves.
        numbers: Number of sizes that it saves.
        backward: The backward graph; None until torch compiles it.
        empty: Number of empty tensors that are saved in addition, see `Step`.
        moved: True if its sizes are saved in a tensor.
    """

    forward: CompiledGraph
    saved: int
    numbers: int
    backward: CompiledGraph | None = None
    empty: int = 0
    moved: bool = False


class Step:
    """Forward and backward pass made of one graph of Dynamo.

    AOTAutograd calls what was compiled at first. That calls the graphs in use now, which others
    made of the same joint graph can replace: AOTAutograd passes on any number of saved tensors. By
    their number a backward pass finds the graph that its forward pass belongs to; empty tensors
    make the numbers differ. Of saved sizes it passes on as many as at first: those of other graphs
    are in one more tensor.

    Attributes:
        captured: The graph of Dynamo.
        unmet: Why the backend's `Backend.recompute` has no effect here; "" if it has.
    """

    def __init__(self, backend: Backend, captured: Captured) -> None:
        self._backend = backend
        self.captured = captured
        self.unmet = ""
        self._recompute = backend.recompute
        self._joint: JointGraph | None = None
        self._results = self._numbers = 0
        self._exchangeable = True
        self._pairs: dict[Recompute, _Pair] = {}
        self._by_inputs: dict[int, _Pair] = {}
        self._metadata: Any = None
        self._unused: UnusedOutputs | None = None

    def operators(self) -> dict[int, Call]:
        """See `JointGraph.operators`."""
        return {} if self._joint is None else self._joint.operators()

    def watching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return AOTAutograd's function, which tells which outputs a backward pass uses.

        Args:
            run: The function that AOTAutograd made of this step.
        """
        return run if self._unused is None else self._unused.watching(run, self._metadata)

    def partition(self, joint: fx.GraphModule, _: Sequence[Any], **options: Any) -> Any:
        """Divide the joint graph into forward and backward pass."""
        draws.take_out(joint)
        correct_types(joint)
        self._joint = JointGraph(joint, options)
        self._results = options["num_fwd_outputs"]
        self._unused = UnusedOutputs(joint, self._results, self.captured.tensors)
        self.unmet = self._unmet(self._recompute)
        return self._joint.partitioned(self._recompute)

    def compile_inference(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph without a backward pass."""
        correct_types(module)
        made = self._compiled("inference", module, self._recompute)

        def run(arguments: list[Any]) -> Any:
            made.last_call = self._backend.call
            return made(arguments)

        return _boxed(run)

    def compile_forward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Compile the forward pass."""
        context = TracingContext.try_get()
        self._metadata = None if context is None else context.fw_metadata
        saved = _results_of(module)[self._results :]
        self._numbers = sum(map(is_number, saved))
        self._exchangeable = self._metadata is not None and all(map(_is_plain, saved))
        self._pairs[self._recompute] = self._pair(module, self._recompute)
        return _boxed(self._run_forward)

    def compile_backward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Compile the backward pass."""
        _donate_nothing()
        (pair,) = self._pairs.values()
        self._add_backward(pair, module, self._recompute)
        return _boxed(self._run_backward)

    def pair(self, recompute: Recompute, *, make: bool = True) -> _Pair | None:
        """Return the graphs that belong to `recompute`.

        Args:
            recompute: What the backward pass is to compute again.
            make: True to make them where there are none yet.

        Returns:
            The graphs; None if there are none, or autograd cannot keep what they save.
        """
        if make and recompute not in self._pairs and (made := self._made(recompute)):
            self._pairs[recompute] = made
        return self._pairs.get(recompute)

    def calls_of(self, plan: str) -> int:
        """Return the number of calls of the modules that a plan names.

        Args:
            plan: Plan, see `plan_names`.
        """
        return 0 if self._joint is None else self._joint.calls_of(plan)

    def zero_gradients(self, module: nn.Module) -> list[str]:
        """Return the parameters whose gradient was zero where eager torch's is None.

        Args:
            module: Module that was captured.
        """
        names = self.captured.names_in(module)
        return [names[number] for number in self._unused.zeros] if self._unused else []

    def _exchange(self, recompute: Recompute) -> None:
        """Use the graphs that belong to `recompute`."""
        if self.pair(recompute) is None:
            self.unmet = (
                "a graph that was captured before this change stays as it is; wrap the model again"
            )
            return
        self._recompute = recompute
        self.unmet = self._unmet(recompute)
        # Which saved tensors have varying sizes: it tells compiled autograd, and only of one pair.
        getattr(self._metadata, "dynamic_saved_tensors_idxs", {}).clear()

    def _made(self, recompute: Recompute) -> _Pair | None:
        if self._joint is None or not self._exchangeable or not self._by_inputs:
            return None
        forward, backward = self._joint.partitioned(recompute)
        if not all(map(_is_plain, _results_of(forward)[self._results :])):
            return None
        pair = self._pair(forward, recompute)
        pair.moved = True
        self._add_backward(pair, backward, recompute)
        return pair

    def _unmet(self, recompute: Recompute) -> str:
        """Return why plans have no effect; "" if they have."""
        if not recompute.plans or any(map(self.calls_of, recompute.plans)):
            return ""
        return f"a graph does not contain {', '.join(recompute.plans)}"

    def _pair(self, module: fx.GraphModule, recompute: Recompute) -> _Pair:
        kept = _results_of(module)[self._results :]
        numbers = sum(map(is_number, kept))
        made = self._compiled("forward", module, recompute)
        return _Pair(made, len(kept) - numbers, numbers)

    def _add_backward(self, pair: _Pair, module: fx.GraphModule, recompute: Recompute) -> None:
        inputs = len(module.graph.find_nodes(op="placeholder"))
        if pair.moved:
            inputs += self._numbers - pair.numbers + 1
        pair.backward = self._compiled("backward", module, recompute)
        while inputs + pair.empty in self._by_inputs:
            pair.empty += 1
        self._by_inputs[inputs + pair.empty] = pair

    def _compiled(
        self, phase: Phase, module: fx.GraphModule, recompute: Recompute
    ) -> CompiledGraph:
        return self._backend.compiled(phase, module, self, recompute)

    def _run_forward(self, arguments: list[Any]) -> Any:
        if self._recompute != self._backend.recompute:
            self._exchange(self._backend.recompute)
        pair = self._pairs[self._recompute]
        pair.forward.last_call = self._backend.call
        results = pair.forward(arguments)
        if not pair.moved:
            return results
        end = len(results) - pair.numbers
        added = [torch.tensor(results[end:], dtype=torch.int64)]
        added += [torch.empty(0) for _ in range(pair.empty)]
        return [*results[:end], *added, *[0] * self._numbers]

    def _run_backward(self, arguments: list[Any]) -> Any:
        pair = self._by_inputs[len(arguments)]
        assert pair.backward is not None
        pair.backward.last_call = self._backend.call
        if pair.moved:
            end = self._numbers + pair.saved
            numbers = arguments[end].tolist()
            del arguments[end : end + 1 + pair.empty]
            arguments[: self._numbers] = numbers
        assert self._unused is not None
        return self._unused.without(pair.backward(arguments))


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Return a function that AOTAutograd calls with a list, which the function empties."""

    def boxed(arguments: list[Any]) -> Any:
        return run(arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _results_of(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def _is_plain(node: Any) -> bool:
    """Return True for a size, or a saved tensor that autograd keeps as any other."""
    return isinstance(
        node.meta.get("val"), torch.Tensor | torch.SymInt | int
    ) and not node.meta.get("saved_tensor_with_no_vc_check")


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
