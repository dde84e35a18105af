"""Lowering of a whole FX graph to an ONNX model, and reading of FX graphs."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import onnx
import sympy
import torch
from onnx import helper
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    IR_VERSION,
    MICROSOFT,
    ONNX_TYPES,
    OPSET,
    NotLowered,
    OnnxGraph,
    Value,
    carried,
    hint,
    lower,
    shape_of,
    size_of,
)
from ortlab.utils.errors import short_place

aten = torch.ops.aten

TANGENTS: Final = "tangents_"
"""Beginning of the names of gradients of results, which torch gives to the backward pass."""

_ROOT: Final = re.compile(r"L\['\w+'\](\.__self__)?\.?")
"""The model, or a module whose forward is captured for itself, in Dynamo's paths of modules."""

Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""

_TRACE_LINE: Final = re.compile(r'File "(.+)", line (\d+).*(?:\n\s*(.+))?')

# Reading FX graphs


def is_number(node: fx.Node) -> bool:
    """Return True if the result of a node is a number: a size, or computed from sizes.

    Args:
        node: Node with metadata.
    """
    kinds = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), kinds)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a node's metadata.

    Args:
        value: Tensor, or list or tuple of values.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def form_of(tensor: torch.Tensor) -> Form:
    """Return the type and the shape of a tensor in the call that is being compiled.

    Args:
        tensor: Tensor in a node's metadata.
    """
    return tensor.dtype, tuple(map(hint, tensor.shape))


def elements_of(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor in the call that is being compiled.

    Args:
        tensor: Tensor in a node's metadata.
    """
    return math.prod(map(hint, tensor.shape))


def bytes_of(node: fx.Node) -> int:
    """Return the size of the tensors of a node in the call that is being compiled.

    Args:
        node: Node with metadata.
    """
    tensors = tensors_in(node.meta.get("val"))
    return sum(elements_of(tensor) * tensor.element_size() for tensor in tensors)


_NORMS: Final = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._native_batch_norm_legit_functional.default,
)


def correct_types(module: fx.GraphModule) -> None:
    """Give results of norms the type that torch's kernels for CPUs return, in the metadata.

    With 16-bit floats and parameters of type float32, statistics are float32, and a gradient has 16
    bits. Torch's fake tensors say otherwise, in torch 2.13.

    Args:
        module: Graph that torch has traced.
    """
    for node in module.graph.nodes:
        like = _like(*node.args) if node.target is operator.getitem else None
        if like is not None and like.dtype is not node.meta["val"].dtype:
            norm, i = node.args
            values = list(norm.meta["val"])
            values[i] = node.meta["val"] = node.meta["val"].to(like.dtype)
            norm.meta["val"] = tuple(values)


def _like(norm: fx.Node, i: int) -> torch.Tensor | None:
    """Return a tensor of the type that a result of a norm has; None if the metadata is right."""
    given = [each.meta.get("val") for each in norm.args[1:] if isinstance(each, fx.Node)]
    tensors = (each for each in given if isinstance(each, torch.Tensor))
    of_parameters = norm.target in _NORMS and i > 0
    of_input = norm.target is aten.native_group_norm_backward.default and i == 0
    return next(tensors, None) if of_parameters or of_input else None


def module_calls(node: fx.Node) -> list[tuple[str, str]]:
    """Return the calls of modules that a node is part, or a gradient, of: outermost first.

    Args:
        node: Node with the metadata of Dynamo's capture.

    Returns:
        Dynamo's key of each call, and its path of the module.
    """
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return [(key, path) for key, (path, _) in stack.items()]


def model_path(path: str) -> str:
    """Return the path of a module in the model, "" for the model itself.

    Args:
        path: Dynamo's path of the module.
    """
    return _ROOT.sub("", path)


class CodeLine(NamedTuple):
    """A line of code: its file, its number, starting at 1, and its text."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        """Location as people read it: "model.py:12", or "cell 2, line 9" in a notebook."""
        return short_place(self.file, self.number)


def code_line(node: fx.Node) -> CodeLine | None:
    """Return the innermost line of code, outside of torch, that a node belongs to; None if unknown.

    Dynamo leaves out the lines of torch's own modules. A gradient has the line of its operator.

    Args:
        node: Node with the metadata of Dynamo's capture.
    """
    lines = _TRACE_LINE.findall(str(node.meta.get("stack_trace") or ""))
    if not lines:
        return None
    file, number, text = lines[-1]
    return CodeLine(file, int(number), text.strip())


def source_line(node: fx.Node) -> str:
    """Return the place of the line of code that a node belongs to, see `code_line`; "" if unknown.

    Args:
        node: Node with the metadata of Dynamo's capture.
    """
    line = code_line(node)
    return "" if line is None else line.place


# Lowering


@dataclass(frozen=True)
class Lowered:
    """An FX graph as an ONNX model; 16-bit floats are float32 in its inputs and outputs.

    Attributes:
        model: The model.
        inputs: Names of its inputs, each with the number of the FX placeholder, and the order of
            its dimensions in memory where that is another.
        outputs: Names of its outputs, in the order of the FX outputs.
        values: Results of its nodes whose shapes are known, by name.
    """

    model: onnx.ModelProto
    inputs: dict[str, tuple[int, list[int] | None]]
    outputs: list[str]
    values: dict[str, Value]


class _Offered(NamedTuple):
    """Input of a model as far as it is used: number of the placeholder, see `Lowered`, and type."""

    number: int
    order: list[int] | None
    info: onnx.ValueInfoProto


class NodeNotLowered(Exception):
    """Raised if ORT cannot run a node.

    Attributes:
        node: The node; None if it is unknown which of a segment it is.
        reason: Why ORT cannot run it.
    """

    def __init__(self, node: fx.Node | None, reason: str) -> None:
        super().__init__(f"{node}: {reason}")
        self.node, self.reason = node, reason


def values_of(node: fx.Node, names: Iterator[str]) -> Any:
    """Return values with the shapes and types of a node's results.

    Args:
        node: Node with metadata.
        names: Names for the values.

    Returns:
        A value, a list of values and None, or a number.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return Value(next(names), shape_of(value.shape), carried(value.dtype))
    if isinstance(value, list | tuple):
        return [
            None if each is None else Value(next(names), shape_of(each.shape), carried(each.dtype))
            for each in value
        ]
    return _number(value)


def _number(value: Any) -> Any:
    """Return the number that a node has in an ONNX graph: torch's expression of a size."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return size_of(value) if isinstance(value, torch.SymInt) else value.node.expr
    return value


def bind_number(graph: OnnxGraph, node: fx.Node, number: sympy.Expr) -> Value:
    """Let a node be the value of a number in a graph.

    Args:
        graph: Graph under construction.
        node: FX node of the number.
        number: The number as an expression.

    Returns:
        The value: of type float64 for a fraction, else int64.
    """
    is_fraction = isinstance(node.meta["val"], torch.SymFloat)
    value = Value(node.name, (1,), torch.float64 if is_fraction else torch.int64)
    graph.bind(number, value)
    return value


def lowered(module: fx.GraphModule) -> Lowered:
    """Lower an FX graph to an ONNX model.

    Args:
        module: Graph of ATen operators whose output is a list of tensors.

    Returns:
        The model, and how its inputs and outputs belong to those of the graph.

    Raises:
        NodeNotLowered: If no rule covers a node.
    """
    graph = OnnxGraph()
    known: dict[fx.Node, Any] = {}
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    offered: dict[str, _Offered] = {}
    reads: list[Value] = []
    for i, node in enumerate(placeholders):
        value, order = node.meta["val"], None
        if isinstance(value, torch.Tensor):
            dtype = torch.uint8 if _is_mask(node) else carried(value.dtype)
            known[node] = read = Value(node.name, shape_of(value.shape), dtype)
            order = _order_in_memory(value)
            if order is not None:
                read = Value(read.name, tuple(read.shape[i] for i in order), dtype)
                known[node] = graph.transpose(read, [order.index(i) for i in range(read.rank)])
            reads.append(read)
            info = helper.make_tensor_value_info(node.name, ONNX_TYPES[dtype], _named(read.shape))
        else:
            known[node] = number = _number(value)
            if not isinstance(number, sympy.Expr):
                continue
            bound = bind_number(graph, node, number)
            info = helper.make_tensor_value_info(node.name, ONNX_TYPES[bound.dtype], [1])
        offered[node.name] = _Offered(i, order, info)
    for symbols in (True, False):  # a symbol's own size before sizes that are computed from it
        for read in reads:
            _bind(graph, read, symbols=symbols)
    for node in nodes:
        if node.op == "get_attr":
            tensor = getattr(module, str(node.target)).detach()
            tensor = tensor.to(carried(tensor.dtype))
            known[node] = graph.constant(tensor.numpy(), tensor.dtype)
        elif node.op == "call_function":
            known[node] = _lowered_node(graph, node, known)
    (output,) = (node for node in nodes if node.op == "output")
    return _assembled(graph, output.args[0], known, offered)


def _is_mask(node: fx.Node) -> bool:
    """Return True for booleans of which only dropout reads: numbers save it a pass over them."""
    return node.meta["val"].dtype is torch.bool and all(
        user.target is aten.native_dropout_backward.default for user in node.users
    )


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions from the longest stride to the shortest; None if that is their order.

    A saved tensor is often a transposed view: read in the order of its memory, it is not copied.
    """
    strides = [hint(stride) for stride in tensor.stride()]
    order = sorted(range(tensor.dim()), key=lambda i: -strides[i])
    return None if 0 in strides or order == sorted(order) else order


def _bind(graph: OnnxGraph, value: Value, *, symbols: bool) -> None:
    sizes = [size for size in value.shape if isinstance(size, sympy.Expr)]
    if any(size.is_Symbol == symbols for size in sizes):
        graph.bind_shape(value)


def _lowered_node(graph: OnnxGraph, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    if is_number(node):
        return _number(node.meta["val"])
    if node.target is operator.getitem:
        source, i = node.args
        assert isinstance(source, fx.Node)
        return known[source][i]
    try:
        made = lower(graph, node, known)
    except NotLowered as error:
        raise NodeNotLowered(node, str(error)) from error
    for value in made if isinstance(made, list) else [made]:
        if value is not None:  # sizes that depend on data, such as a number of selected rows
            graph.current = node
            graph.bind_shape(value)
            graph.values[value.name] = value
    return made


def _assembled(
    graph: OnnxGraph,
    wanted: Sequence[fx.Node],
    known: Mapping[fx.Node, Any],
    offered: Mapping[str, _Offered],
) -> Lowered:
    graph.current = None
    taken = {*offered, *(each.name for each in graph.constants.values())}
    outputs: dict[str, onnx.ValueInfoProto] = {}
    for node in wanted:
        value = known[node]
        if value is None:
            raise NodeNotLowered(operator_of(node), "its rule leaves out a result")
        if value.exact is not None and value.dtype is not node.meta["val"].dtype:
            value = value.exact  # torch rounds it
        if value.name in taken:
            value = graph.copied(value)  # a result may be written to, and the other must not change
        taken.add(value.name)
        outputs[value.name] = helper.make_tensor_value_info(
            value.name, ONNX_TYPES[value.dtype], _named(value.shape)
        )
    needed, kept = set(outputs), []
    for each in reversed(graph.nodes):
        if not needed.isdisjoint(each.output):
            kept.append(each)
            needed.update(each.input)
    inputs = {name: each for name, each in offered.items() if name in needed}
    made_graph = helper.make_graph(
        kept[::-1],
        "segment",
        [each.info for each in inputs.values()],
        list(outputs.values()),
        [each for each in graph.constants.values() if each.name in needed],
    )
    model = helper.make_model(
        made_graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=IR_VERSION,
    )
    reads = {name: (each.number, each.order) for name, each in inputs.items()}
    return Lowered(model, reads, list(outputs), graph.values)


def operator_of(node: fx.Node) -> fx.Node:
    """Return the operator that a node belongs to: the call whose result getitem takes apart.

    Args:
        node: Call of an operator, or getitem.
    """
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, fx.Node)
    return source


def _named(shape: Iterable[Any]) -> list[int | str]:
    return [size if isinstance(size, int) else str(size) for size in shape]
