"""Graphs of a model on engine ``ort``: as torch captured them, in ONNX, and as ORT executes them.

Each stage is one graph of all segments of a training step, those that torch runs included.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import onnx
import sympy
import torch
from onnx import helper
from torch import fx, nn

from ortlab.engines.base import Batch, tell
from ortlab.engines.batch import arguments, signature
from ortlab.engines.ort.arena import InArena
from ortlab.engines.ort.capture import Captured, CompiledGraph
from ortlab.engines.ort.draws import Draw
from ortlab.engines.ort.lowering.graph import ONNX_TYPES, size_of
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.ort.onnx_model import (
    TANGENTS,
    Form,
    code_line,
    form_of,
    is_number,
    model_path,
    module_calls,
)
from ortlab.engines.ort.recompute import Call, call_of
from ortlab.engines.ort.segments import FREE, OrtSegment
from ortlab.graph import CAPTURED_STAGES
from ortlab.graph.capture import Graphs, Node, Place, Sessions, Stage

_ARGUMENT: Final = re.compile(r"l_(?:kwargs_)?(?:args_(\d+)|(.+?))_?", re.IGNORECASE)
"""Dynamo's name of an argument of forward: its number or its name."""

TORCH: Final = "torch"
"""Domain of the operators that torch runs, and of all operators of the captured graph."""

_TYPES: Final = ONNX_TYPES | {
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.complex64: onnx.TensorProto.COMPLEX64,
    torch.complex128: onnx.TensorProto.COMPLEX128,
}


def _operator_name(target: Any) -> str:
    """Return the name of what a node calls, without its overload."""
    if isinstance(target, Draw):
        return target.kind
    if isinstance(target, InArena):
        target = target.operator
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


_TORCH_VIEWS: Final = frozenset(f"{TORCH}.{_operator_name(target)}" for target in FREE)
"""Operators in torch whose results are views."""

Names = Any
"""Name of a tensor, list of names, or None for what is not a tensor."""


class CapturedStage(Stage):
    """Stage whose nodes have their modules and lines from torch's capture.

    Args:
        name: One of `CAPTURED_STAGES`.
        model: ONNX model without weights.
        nodes: Its nodes.
        parameters: Tensor of each parameter and buffer, by its name in the model.
        parameter_gradients: Tensor of each parameter's gradient, by the parameter's name.
        sessions: Sessions that its nodes run in.
    """

    def __init__(
        self,
        name: str,
        model: onnx.ModelProto,
        nodes: Sequence[Node],
        parameters: Mapping[str, str],
        parameter_gradients: Mapping[str, str],
        sessions: Sessions,
    ) -> None:
        super().__init__(name, model)
        self.nodes = tuple(nodes)
        self.sessions = sessions
        self.parameters = dict(parameters)
        self.parameter_gradients = dict(parameter_gradients)

    def is_view(self, node: Node) -> bool:
        """See `Stage.is_view`."""
        return node.op in _TORCH_VIEWS or super().is_view(node)


def graphs(record: OrtModel, batch: Batch | None = None) -> Graphs:
    """Return the graphs of the last call of a model, in training and in evaluation.

    Args:
        record: Record of a model on engine ``ort``.
        batch: If given, the graphs that serve this batch are captured first. The model is not
            changed.

    Raises:
        ValueError: If the model has not been called yet, or runs in eager torch.
    """
    name = type(record.module).__name__
    if batch is not None:
        record.capture(*arguments(record.module, batch))
    reason = record.report().fallback_reason
    if reason is not None:
        raise ValueError(f"{name} runs on engine 'eager' and has no graph: {reason}")
    last = record.last_graphs()
    forward, backward = last.get("forward", []), last["backward"]
    both = [*forward, *backward] if forward else []
    wanted = {"captured": both, "forward": forward, "gradient": both, "execution": both}
    wanted["eval"] = last.get("inference", [])
    sizes: dict[str, int] = {}
    stages: dict[str, Stage] = {}
    for stage, compiled in wanted.items():
        if compiled:
            builder = _Builder.of(record.module, stage, compiled, backward)
            stages[stage] = builder.stage()
            sizes = {**builder.sizes, **sizes}  # training's sizes count
    if not stages:
        takes = signature(record.module)
        raise ValueError(f"{name} has no graph yet; call it once, or give a batch for {takes}")
    return Graphs(name, stages, sizes=sizes, about=CAPTURED_STAGES)


def for_any_size(record: OrtModel, batch: Batch | None = None) -> tuple[OrtModel, Graphs]:
    """Return the graphs of a training step in which the sizes of the batch may vary.

    They are captured anew, since graphs hold for the sizes of the first call until there are
    others. The model is not changed.

    Args:
        record: Record of a model on engine ``ort``.
        batch: Batch to capture; None for one like that of the last capture.

    Returns:
        The record that the graphs are of, and the graphs.

    Raises:
        ValueError: If the model has not been called yet, or runs in eager torch.
    """
    name = type(record.module).__name__
    if (reason := record.report().fallback_reason) is not None:
        raise ValueError(f"{name} runs on engine 'eager' and has no graph: {reason}")
    call = arguments(record.module, batch) if batch is not None else record.example()
    known = batch is None and bool(record.last_graphs().get("forward"))
    if known and _holds_for_any_size(record, _forward_stage(record)[0]):
        return record, graphs(record)
    if call is None:
        takes = signature(record.module)
        raise ValueError(f"{name} has no graph yet; call it once, or give a batch for {takes}")
    args, kwargs = call
    tell(f"capturing {name} for any size")
    with torch.enable_grad():
        twin = record.for_any_size(args, kwargs)
    found = graphs(twin)
    bound = inspect.signature(record.module.forward).bind(*args, **kwargs).arguments
    shapes = {name: tuple(x.shape) for name, x in bound.items() if isinstance(x, torch.Tensor)}
    for stage in found.stages.values():
        found.sizes.update(stage.sizes(shapes))
    return twin, found


def known_for_any_size(record: OrtModel) -> tuple[OrtModel, dict[str, int]]:
    """Return a record whose graphs of a training step hold for any size, without a capture.

    Args:
        record: Record of a model on engine ``ort``.

    Returns:
        The record, and the sizes of its last call by their names in the stages.

    Raises:
        ValueError: If there are no such graphs.
    """
    if not record.last_graphs().get("forward"):
        raise ValueError(f"{type(record.module).__name__} has no graph yet")
    stage, sizes = _forward_stage(record)
    if _holds_for_any_size(record, stage):
        return record, sizes
    if record.twin is None:
        raise ValueError("its graph holds for one size of the batch; %ort memory makes one for any")
    return record.twin, _forward_stage(record.twin)[1]


def _forward_stage(record: OrtModel) -> tuple[Stage, dict[str, int]]:
    """Return the stage ``forward`` of the last training step, and its sizes."""
    last = record.last_graphs()
    built = _Builder.of(record.module, "forward", last["forward"], last["backward"])
    return built.stage(), built.sizes


def _holds_for_any_size(record: OrtModel, stage: Stage) -> bool:
    """Return True if the batch, and all sizes of integer inputs such as texts, may vary."""
    names = inspect.signature(record.module.forward).parameters
    for value in stage.model.graph.input:
        if value.name in names:
            kind, sizes = stage.tensors[value.name]
            of_text = kind in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
            varying = sizes if of_text else sizes[:1]
            if not all(isinstance(size, str) for size in varying):
                return False
    return True


def last_graphs(record: OrtModel) -> list[CompiledGraph]:
    """Return the graphs of the last call of a model, forward before backward.

    Args:
        record: Record of the model.
    """
    last = record.last_graphs()
    called = [*last.get("forward", ()), *last.get("inference", ())]
    latest = max((graph.last_call for graph in called), default=0)
    forward = [graph for graph in called if graph.last_call == latest]
    trains = any(graph.phase == "forward" for graph in forward)
    return [*forward, *last["backward"]] if trains else forward


def last_step(record: OrtModel) -> tuple[Stage, dict[str, int], list[Place]]:
    """Return the last call of a model: what ORT executed, its sizes, and its lines of code.

    The lines are in the order in which torch captured them.

    Args:
        record: Record of the model.
    """
    graphs = last_graphs(record)
    backward = [graph for graph in graphs if graph.phase == "backward"]
    made, code = (
        _Builder.of(record.module, stage, graphs, backward) for stage in ("execution", "captured")
    )
    return made.stage(), made.sizes, list(code.places)


Origin = tuple[int, str]
"""The id of a segment and the name of an ONNX node, or of a graph and of an operator in torch."""


def executed(module: nn.Module, graphs: Sequence[CompiledGraph]) -> dict[Origin, Node]:
    """Return the nodes of the stage ``execution``, by what they are in the segments.

    Args:
        module: Module that the graphs are of.
        graphs: Graphs that run, forward before backward.
    """
    backward = [graph for graph in graphs if graph.phase == "backward"]
    return _Builder.of(module, "execution", graphs, backward).origins


def execution(
    module: nn.Module, forward: Sequence[CompiledGraph], backward: Sequence[CompiledGraph]
) -> Stage:
    """Return the stage ``execution`` of a training step.

    Args:
        module: Module that the graphs are of.
        forward: Graphs of the forward pass.
        backward: Graphs of the backward pass, in the order in which they run.
    """
    return _Builder.of(module, "execution", [*forward, *backward], backward).stage()


class _Builder:
    """A stage under construction.

    Attributes:
        sizes: Sizes of the last call, by the names that they have in the stage.
        origins: Nodes by what they are in the segments.
        places: Lines of code, in the order of their first nodes that are no random draws: these
            come first, wherever the model needs them.
    """

    @classmethod
    def of(
        cls,
        module: nn.Module,
        stage: str,
        graphs: Iterable[CompiledGraph],
        backward: Iterable[CompiledGraph],
    ) -> _Builder:
        """Return a stage with the nodes of graphs.

        Args:
            module: Module that the graphs are of.
            stage: Name of the stage.
            graphs: Graphs in the stage, forward before backward.
            backward: Graphs of the backward pass, in the stage or not.
        """
        made = cls(module, stage, backward)
        for graph in graphs:
            made.add(graph)
        return made

    def __init__(self, module: nn.Module, stage: str, backward: Iterable[CompiledGraph]) -> None:
        self.origins: dict[Origin, Node] = {}
        self.places: dict[Place, None] = {}
        self._stage = stage
        self._saved = {graph.step.captured: _saved(graph) for graph in backward}
        self._modules = frozenset(n for n, _ in module.named_modules(remove_duplicate=False))
        self._root = module
        self._trained = {name for name, each in module.named_parameters() if each.requires_grad}
        self._ends: dict[int, int] = {}
        self._planned: dict[str, tuple[int, tuple[int | str, ...]]] = {}
        self._protos: list[onnx.NodeProto] = []
        self._nodes: list[Node] = []
        self._constants: list[onnx.TensorProto] = []
        self._infos: dict[str, onnx.ValueInfoProto] = {}
        self._inputs: dict[str, None] = {}
        self._outputs: dict[str, None] = {}
        self._parameters: dict[str, str] = {}
        self._gradients: dict[str, str] = {}
        self._symbols: dict[int, dict[sympy.Symbol, sympy.Expr]] = defaultdict(dict)
        self._expressions: dict[str, sympy.Expr] = {}
        self.sizes: dict[str, int] = {}
        self._taken: set[str] = set()
        self._phase = "forward"
        self._shared: dict[tuple[int, str], str] = {}
        self._forward: dict[tuple[int, int], str] = {}
        self._capture = 0
        self._operators: dict[int, Call] = {}
        self._viewed: dict[str, Names] = {}
        self._results: dict[str, Form] = {}  # of forward graphs
        self._passed: dict[int, dict[int, str]] = defaultdict(dict)
        self._tangents: dict[str, str] = {}
        """Gradients of results that a later graph reads, by the result."""

    def stage(self) -> Stage:
        """Return the stage."""

        def infos(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
            return [self._infos[name] for name in names if name in self._infos]

        ends = {*self._inputs, *self._outputs}
        graph = helper.make_graph(
            self._protos,
            self._stage,
            infos(self._inputs),
            infos(self._outputs),
            initializer=self._constants,
            value_info=infos(name for name in self._infos if name not in ends),
        )
        return CapturedStage(
            self._stage,
            helper.make_model(graph),
            self._nodes,
            self._parameters,
            self._gradients,
            Sessions(
                tuple(self._ends.get(i) for i in range(len(self._nodes))), dict(self._planned)
            ),
        )

    def add(self, graph: CompiledGraph) -> None:
        """Add the nodes of a graph; forward before backward."""
        self._phase = "backward" if graph.phase == "backward" else "forward"
        self._capture = id(graph.step.captured)
        self._operators = graph.step.operators()
        self._is_of_model = _is_of_model(graph.step.captured, self._root)
        self._viewed.clear()
        module = graph.division.module
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        parameters = graph.step.captured.names_in(self._root)
        if graph.phase == "backward":
            found = self._walked(module, [self._kept(node) for node in placeholders])
            for name, made in zip(parameters, found, strict=False):
                if made is not None and name in self._trained:
                    self._gradients[name] = made
            for i, name in self._passed.get(self._capture, {}).items():
                if found[i] is not None:
                    self._tangents[name] = found[i]
        else:
            inputs = zip(placeholders, parameters, graph.step.captured.inputs, strict=True)
            given = [self._input(i, *each) for i, each in enumerate(inputs)]
            self._fix_sizes(graph)
            found = self._walked(module, given)
            end = len(found) - self._saved.get(graph.step.captured, 0)
            (output,) = module.graph.find_nodes(op="output")
            for node, made in zip(output.args[0][:end], found[:end], strict=True):
                if made is not None:
                    self._results[made] = form_of(node.meta["val"])
            found = found[:end]
            self._tell_sizes(graph)
        self._outputs.update(dict.fromkeys(made for made in found if made is not None))

    def _input(self, place: int, node: fx.Node, parameter: str, argument: str) -> Names:
        """Return the name of an input of a forward graph."""
        if is_number(node):
            return None
        name = parameter or self._argument(argument)
        if not parameter and (passed := self._from_before(node, name)):
            self._passed[self._capture][place] = passed
            self._shared[self._capture, node.name] = passed
            return passed
        for i, size in enumerate(node.meta["val"].shape):
            size = size_of(size)
            if isinstance(size, sympy.Symbol):
                named = sympy.Symbol(f"{name}_dim{i}", integer=True)
                self._symbols[self._capture].setdefault(size, named)
        if parameter in self._parameters:  # of another graph, after a graph break
            made = self._parameters[parameter]
        else:
            made = self._tensor(name, node.meta["val"])
        self._shared[self._capture, node.name] = made
        self._inputs[made] = None
        if parameter:
            self._parameters[parameter] = made
        return made

    def _from_before(self, node: fx.Node, name: str) -> str | None:
        """Return the result of an earlier graph that an input after a graph break is.

        It is the last one of its type and shape: Dynamo does not tell.
        """
        if name in inspect.signature(self._root.forward).parameters:
            return None
        like = form_of(node.meta["val"])
        found = next(
            (made for made in reversed(self._results) if self._results[made] == like), None
        )
        sizes = [] if found is None else self._infos[found].type.tensor_type.shape.dim
        for size, dim in zip(node.meta["val"].shape, sizes, strict=False):
            size = size_of(size)
            if isinstance(size, sympy.Symbol):
                same = self._expressions.get(dim.dim_param, dim.dim_value)
                self._symbols[self._capture].setdefault(size, sympy.sympify(same))
        return found

    def _argument(self, name: str) -> str:
        """Return the name of an argument of forward by Dynamo's name of it."""
        found = _ARGUMENT.fullmatch(name)
        if found is None:
            return name
        number, plain = found.groups()
        if plain is not None:
            return plain
        names = list(inspect.signature(self._root.forward).parameters)
        return names[int(number)] if int(number) < len(names) else f"{names[-1]}_{number}"

    def _kept(self, node: fx.Node) -> Names:
        """Return the name of an input of a backward graph: what forward saved, or a gradient."""
        if is_number(node):
            return None
        made = self._shared.get((self._capture, node.name))
        if made is None and node.name.startswith(TANGENTS):
            like = form_of(node.meta["val"])
            known = (name for name in self._tangents if self._results[name] == like)
            made = self._tangents.pop(next(known, ""), None)
        if made is None:
            made = self._tensor(node.name, node.meta["val"])
            self._inputs[made] = None
        return made

    def _fix_sizes(self, graph: CompiledGraph) -> None:
        """Give sizes that no input has, such as numbers among the arguments, their last values."""
        for node in graph.division.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                last = graph.sizes.get(node.name)
                if last is not None and isinstance(value.node.expr, sympy.Symbol):
                    fixed = sympy.Integer(last)
                    self._symbols[self._capture].setdefault(value.node.expr, fixed)

    def _tell_sizes(self, graph: CompiledGraph) -> None:
        for node in graph.division.module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.SymInt):
                symbol = self._symbols[self._capture].get(value.node.expr)
                if isinstance(symbol, sympy.Symbol) and node.name in graph.sizes:
                    self.sizes[str(symbol)] = graph.sizes[node.name]

    # Graphs

    def _walked(self, module: fx.GraphModule, given: Sequence[Names]) -> list[Names]:
        """Add the nodes of a graph and return the names of its results."""
        waiting = iter(given)
        known: dict[fx.Node, Names] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(waiting)
            elif node.op == "call_module":
                segment = module.get_submodule(str(node.target))
                assert isinstance(segment, OrtSegment)
                taken = [known.get(each) for each in node.args]
                if segment.divided is not None:
                    known[node] = self._walked(segment.divided.module, taken)
                elif self._stage == "captured":
                    known[node] = self._walked(segment.graph, taken)
                else:
                    known[node] = self._segment(segment, taken)
            else:
                self._operator(module, node, known)
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        return [known.get(each) for each in output.args[0]]

    def _operator(self, module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Names]) -> None:
        """Add an operator of torch."""
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, torch.Tensor):
                known[node] = self._tensor(str(node.target), value)
                self._inputs[known[node]] = None
            return
        if node.op != "call_function" or is_number(node):
            return
        if node.target is operator.getitem:
            made = known.get(node.all_input_nodes[0])
            i: Any = node.args[1]
            known[node] = made[i] if isinstance(made, list) else made
            self._share(node, known[node])
            return
        if node.name in self._viewed:
            known[node] = self._viewed[node.name]
            return
        value = node.meta.get("val")
        if isinstance(value, list | tuple):
            known[node] = [
                None if each is None else self._tensor(f"{node.name}.{i}", each)
                for i, each in enumerate(value)
            ]
        else:
            known[node] = None if value is None else self._tensor(node.name, value)
        self._share(node, known[node])
        if self._stage == "captured" and node.target in FREE:
            self._viewed[node.name] = known[node]
        results = known[node] if isinstance(known[node], list) else [known[node]]
        reads = [known.get(each) for each in node.all_input_nodes]
        flat = [each for part in reads for each in (part if isinstance(part, list) else [part])]
        proto = helper.make_node(
            _operator_name(node.target),
            [each for each in flat if each],
            [each or "" for each in results],
            self._node_name(node, node.name),
            domain=TORCH,
            **_numbers(node),
        )
        self._add(proto, node, (id(module), node.name))

    def _segment(self, segment: OrtSegment, given: Sequence[Names]) -> list[Names]:
        """Add the ONNX nodes of a segment and return the names of its results."""
        lowered = segment.lowered
        model = segment.executed() if self._stage == "execution" else lowered.model
        (output,) = (node for node in segment.graph.graph.nodes if node.op == "output")
        by_name = {node.name: node for node in segment.graph.graph.nodes}
        tensors: dict[str, str] = {"": ""}
        for name, (i, _) in lowered.inputs.items():
            tensors[name] = given[i] or self._number(name)
        for name, node in zip(lowered.outputs, output.args[0], strict=True):
            tensors[name] = self._tensor(node.name, node.meta["val"])
            self._share(node, tensors[name])
        for constant in model.graph.initializer:
            if constant.name not in tensors:  # a result can be one, which ORT has computed
                tensors[constant.name] = self._tensor(constant.name, None)
            added = onnx.TensorProto()
            added.CopyFrom(constant)
            added.name = tensors[constant.name]
            self._constants.append(added)
        for proto in model.graph.node:
            for name in (*proto.input, *proto.output):
                if name not in tensors:
                    tensors[name] = self._tensor(name, lowered.values.get(name))
        for value in model.graph.value_info:
            sizes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if value.name in tensors and all(sizes):
                kind = value.type.tensor_type.elem_type
                self._planned[tensors[value.name]] = kind, tuple(sizes)
        first, end = len(self._nodes), len(self._nodes) + len(model.graph.node) - 1
        self._ends |= dict.fromkeys(range(first, end + 1), end)
        for proto in model.graph.node:
            names = (proto.name, *proto.output)
            maker = next((by_name[n] for n in map(_maker, names) if n in by_name), None)
            copy = onnx.NodeProto()
            copy.CopyFrom(proto)
            copy.input[:] = [tensors[name] for name in proto.input]
            copy.output[:] = [tensors[name] for name in proto.output]
            copy.name = self._node_name(maker, proto.name or proto.op_type)
            self._add(copy, maker, (id(segment), proto.name))
        return [tensors[name] for name in lowered.outputs]

    def _share(self, node: fx.Node, made: Names) -> None:
        """Remember a result of the forward pass: the backward pass reads it by its node's name."""
        if self._phase == "forward":
            self._shared[self._capture, node.name] = made

    def _add(self, proto: onnx.NodeProto, made: fx.Node | None, origin: Origin) -> None:
        meta = {} if made is None else made.meta
        number = meta.get("seq_nr", -1)
        key = self._capture, number
        backward = self._phase == "backward"
        again = backward and meta.get("partitioner_tag") == "is_forward"
        linked = backward and not again and not meta.get("is_gradient_acc")
        if again:
            proto.name += "_recompute"
        elif not backward and made is not None and self._operators.get(number) == call_of(made):
            self._forward[key] = proto.name  # the last one gives the operator's result
        line = None if made is None else code_line(made)
        place = None if line is None else (line.file, line.number)
        if made is not None and place is not None and not isinstance(made.target, Draw):
            self.places[place] = None
        self._protos.append(proto)
        self.origins[origin] = node = Node(
            proto.name,
            f"{proto.domain}.{proto.op_type}" if proto.domain else proto.op_type,
            tuple(proto.input),
            tuple(proto.output),
            self._phase,
            "" if made is None else self._module(made),
            self._forward.get(key) if linked else None,
            "" if line is None else f"{line.place}: {line.text}",
            place,
        )
        self._nodes.append(node)

    # Names

    def _unique(self, name: str) -> str:
        made, i = name, 1
        while made in self._taken:
            i += 1
            made = f"{name}.{i}"
        self._taken.add(made)
        return made

    def _tensor(self, name: str, like: Any) -> str:
        """Return a new name for a tensor with the shape and type of a tensor or a `Value`."""
        made = self._unique(name)
        kind = None if like is None else _TYPES.get(like.dtype)
        if kind is not None:
            sizes = [self._size(size) for size in like.shape]
            self._infos[made] = helper.make_tensor_value_info(made, kind, sizes)
        return made

    def _number(self, name: str) -> str:
        """Return a new name for a size that a segment reads."""
        made = self._unique(name)
        self._infos[made] = helper.make_tensor_value_info(made, onnx.TensorProto.INT64, [1])
        self._inputs[made] = None
        return made

    def _size(self, size: Any) -> int | str:
        size = size_of(size)
        if not isinstance(size, int):
            size = size.xreplace(self._symbols[self._capture])
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        self._expressions[str(size)] = size
        return str(size)

    def _node_name(self, made: fx.Node | None, name: str) -> str:
        scope = "" if made is None else self._call(made)
        return self._unique(f"{scope}/{name}" if scope else name)

    def _module(self, node: fx.Node) -> str:
        """Return the path of the innermost module that a node belongs to."""
        paths = (path for _, path in reversed(self._stack(node)))
        return next((path for path in paths if path in self._modules), "")

    def _call(self, node: fx.Node) -> str:
        """Return the call of the innermost module of a node: its path, and its number."""
        for key, path in reversed(self._stack(node)):
            return path + "".join(re.findall(r"@\d+$", key))
        return ""

    def _stack(self, node: fx.Node) -> list[tuple[str, str]]:
        """Return the calls of modules that a node is part, or a gradient, of: outermost first."""
        return [
            (key, model_path(path))
            for key, path in module_calls(node)
            if self._is_of_model or ".__self__" in path
        ]


def _is_of_model(captured: Captured, module: nn.Module) -> bool:
    """Return True if the paths in a graph begin at the model, not at a module within it.

    After a graph break in a loop, forward of the modules within is captured for itself.
    """
    names = zip(captured.inputs, captured.names_in(module), strict=True)
    return any(argument.lower().endswith(_arguments_of(name)) for argument, name in names if name)


def _arguments_of(name: str) -> tuple[str, ...]:
    """Return how Dynamo's name of a parameter and of a buffer ends, in lower case."""
    *path, own = name.lower().split(".")
    owner = "".join(f"modules_{part}_" for part in path)
    return tuple(f"{owner}{kind}_{own}_" for kind in ("parameters", "buffers"))


def _saved(backward: CompiledGraph) -> int:
    """Return the number of results of the forward pass, the last ones, that it saves."""
    inputs = (node for node in backward.division.module.graph.nodes if node.op == "placeholder")
    return sum(not node.name.startswith(TANGENTS) for node in inputs)


def _maker(name: str) -> str:
    return name.partition("/")[0]


def _numbers(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator that are no tensors, as attributes."""
    target = node.target.operator if isinstance(node.target, InArena) else node.target
    if not isinstance(target, torch._ops.OpOverload):
        return {}
    named = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(named, node.args, strict=False)), **node.kwargs}
    return {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in given.items()
        if isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and not any(isinstance(x, fx.Node) for x in value))
    }
