"""Building blocks of export rules: the decorator that declares a rule, and nodes to write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from onnx.helper import make_tensor_value_info

from ortlab.engines.torchscript.nodes import Graph, Value, cast, constant, dtype, traced_sizes

Gradient = list[tuple[Any, ...]]
"""Gradient in ORT's declarative form: nodes as (operator, inputs, outputs, attributes)."""

ATEN = "org.pytorch.aten"
DETACHED = "ortlab::detached"
"""Torch's detach() as a copy: ORT overwrites memory that no node reads anymore, and does not know
that two tensors can share memory."""


@dataclass(frozen=True)
class Rule:
    """Export rule of one torch operator.

    Attributes:
        operator: Name of the operator.
        symptom: What goes wrong without the rule.
        export: Function that writes the nodes.
        gradient: (ATen name, overload, function that returns the gradient's nodes); without the
            function the first input gets no gradient. None if ORT has the gradient.
    """

    operator: str
    symptom: str
    export: Callable[..., Any]
    gradient: tuple[str, str, Callable[[], Gradient] | None] | None = None


@dataclass(frozen=True)
class Attention:
    """Attention as one kernel.

    Attributes:
        fused: Use torch's own kernel instead of ortlab's CPU kernel.
        low: Compute the products of ortlab's kernel in bfloat16.
    """

    fused: bool
    low: bool = False


RULES: list[Rule] = []
OPSET = 17  # opset of ORTModule's exports
STOCK: dict[str, Callable[..., Any]] = {}
_attention: Attention | None = None  # of the current export
_trained: set[str] = set()  # names of the trained parameters in the current export
_fixed: set[str] = set()  # names of its buffers and of its frozen parameters


@contextlib.contextmanager
def gradients_for(module: torch.nn.Module) -> Iterator[None]:
    """Provide the export rules with the names of the trained parameters of a module.

    Args:
        module: Module that is exported in this context.
    """
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        (_trained if each.requires_grad else _fixed).add(name)
    try:
        yield
    finally:
        _trained.clear()
        _fixed.clear()


@contextlib.contextmanager
def attention_as(kernel: Attention | None) -> Iterator[None]:
    """Select the form in which exports in this context write attention.

    Args:
        kernel: Kernel to call; None for ONNX operators.
    """
    global _attention
    before, _attention = _attention, kernel
    try:
        yield
    finally:
        _attention = before


def attention() -> Attention | None:
    """Return the attention kernel of the current export; None for ONNX operators."""
    return _attention


def stock(operator: str) -> Callable[..., Any]:
    """Return ORT's or torch's own rule, which an ortlab rule calls in the ordinary case.

    Args:
        operator: Name of the operator.
    """
    return STOCK[operator]


def rule(
    operator: str,
    symptom: str,
    gradient: tuple[str, str, Callable[[], Gradient] | None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the export rule of an operator.

    Args:
        operator: Name of the operator.
        symptom: What goes wrong without the rule.
        gradient: See `Rule.gradient`.

    Returns:
        The decorator; it returns the function unchanged.
    """

    def add(export: Callable[..., Any]) -> Callable[..., Any]:
        RULES.append(Rule(operator, symptom, export, gradient))
        return export

    return add


# ---- nodes and queries for rules -----------------------------------------------------------------


def backwards(g: Graph, x: Value, axis: int) -> Value:
    """Reverse one dimension with Gather; the gradient of Slice does not support negative steps.

    The indices count up and are then subtracted: ORT treats a Range that counts down to -1 as a
    Slice that ends before the last element.

    Args:
        g: Export context.
        x: Input.
        axis: Dimension to reverse, not negative.

    Returns:
        The reversed value.
    """
    size = g.op("Gather", g.op("Shape", x), constant(g, axis), axis_i=0)
    up = g.op("Range", constant(g, 0), size, constant(g, 1))
    order = g.op("Sub", g.op("Sub", size, constant(g, 1)), up)
    return g.op("Gather", x, order, axis_i=axis)


def aten(g: Graph, name: str, *inputs: Value, overload: str = "", outputs: int = 1) -> Any:
    """Add a node that calls a torch kernel.

    Args:
        g: Export context.
        name: Name of the ATen operator.
        *inputs: Its inputs.
        overload: Overload name of the operator.
        outputs: Number of outputs.

    Returns:
        The output, or a list of outputs if there are several.
    """
    return g.op(
        f"{ATEN}::ATen", *inputs, operator_s=name, overload_name_s=overload, outputs=outputs
    )


def aten_node(
    name: str, inputs: list[str], outputs: list[str], overload: str = ""
) -> tuple[Any, ...]:
    """Return a node of a declared gradient that calls a torch kernel.

    Args:
        name: Name of the ATen operator.
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        overload: Overload name of the operator.
    """
    names = {"operator": name, "overload_name": overload}
    attributes = {key: {"value": value, "dtype": "string"} for key, value in names.items()}
    return (("ATen", ATEN), inputs, outputs, attributes)


def all_of(count: int) -> tuple[Any, ...]:
    """Return a mask node that requests the gradients of a backward kernel's first inputs.

    Args:
        count: Number of inputs.
    """
    value = {"value": [True] * count, "dtype": "bool", "is_tensor": True}
    return ("Constant", [], ["Mask"], {"value": value})


def inputs_of(value: Value) -> Iterator[str]:
    """Yield the names of the graph inputs that `value` depends on, except through their shapes.

    Args:
        value: Value of the ONNX graph.
    """
    return (each.debugName() for each in _origins(value))


def _origins(value: Value, *, detached: bool = True) -> Iterator[Value]:
    """Yield the graph inputs that `value` depends on; with `detached`, also through a detach."""
    waiting, seen = [value], {value.unique()}
    while waiting:
        node = (current := waiting.pop()).node()
        if node.kind() == "prim::Param":
            yield current
        elif node.kind() != "onnx::Shape" and (detached or not _is_detach(node)):
            fresh = [each for each in node.inputs() if each.unique() not in seen]
            seen.update(each.unique() for each in fresh)
            waiting += fresh


def _is_detach(node: Any) -> bool:
    return bool(node.kind() == f"{ATEN}::ATen" and node.s("operator") == DETACHED)


def may_have_gradient(value: Value) -> bool:
    """Return True if a gradient may flow through `value` to a trained parameter or a call's input.

    Args:
        value: Value of the ONNX graph.
    """
    return any(
        each.debugName() not in _fixed and dtype(each).is_floating_point
        for each in _origins(value, detached=False)
    )


def is_trained(value: Value) -> bool:
    """Return True if `value` depends on a trained parameter.

    Args:
        value: Value of the ONNX graph.
    """
    return not _trained.isdisjoint(inputs_of(value))


def with_gradient(g: Graph, x: Value, *parameters: Value) -> Value:
    """Make `x` depend on a trained parameter if it does not, by adding an empty sum of one.

    ORT drops the inner nodes of a declared gradient if the first input needs no gradient, and a
    node with several outputs of which one is not needed fails at run time.

    Args:
        g: Export context.
        x: First input of the operator.
        *parameters: Its other inputs that may be trained.

    Returns:
        `x`, or `x` plus the sum of an empty slice of the first trained parameter.
    """
    values = filter(is_trained, (x, *parameters))
    trained = next(values, x)
    if trained is x:
        return x
    flat, start = g.op("Reshape", trained, constant(g, [-1])), constant(g, [0])
    zero = g.op("ReduceSum", g.op("Slice", flat, start, start, start), keepdims_i=0)
    return g.op("Add", x, cast(g, zero, dtype(x)))


def _is_mask(value: np.ndarray | None, shape: tuple[int, ...]) -> bool:
    return value is not None and value.dtype == bool and value.shape == shape


def ask_for_what_is_taken(graph: Any) -> None:
    """Restrict the gradient masks (`all_of`) in a built graph to the gradients that are used.

    The gradients of frozen parameters have no name in the graph. Some kernels return one anyway
    (that of a weight together with its bias's), for which ORT needs an output.

    Args:
        graph: ONNX graph that ORT built, changed in place.
    """
    masks = {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t)
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    masks |= {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {each.name: each.type.tensor_type.elem_type for each in values}
    for node in graph.node:
        taken = np.array([bool(name) for name in node.output])
        if node.op_type != "ATen" or taken.all():
            continue
        fitting = (i for i, name in enumerate(node.input) if _is_mask(masks.get(name), taken.shape))
        at = next(fitting, None)
        if at is None:
            continue
        name = f"{node.input[at]}_taken"
        graph.initializer.append(numpy_helper.from_array(masks[node.input[at]] & taken, name))
        node.input[at] = name
        kind = next(types[name] for name in (*node.output, *node.input) if name in types)
        for place in np.flatnonzero(~taken):
            node.output[place] = f"{node.name}_untaken_{place}"
            graph.value_info.append(make_tensor_value_info(node.output[place], kind, None))


def size(g: Graph, position: int, dim: int) -> int:
    """Return a traced size of an operator's input. Only for sizes that the model fixes.

    Args:
        g: Export context of the operator.
        position: Index of the input.
        dim: Dimension.

    Raises:
        RuntimeError: If the trace does not know the input's sizes.
    """
    sizes = traced_sizes(list(g.original_node.inputs())[position])
    if sizes is None:
        raise RuntimeError(f"the size of dimension {dim} is unknown at export")
    return sizes[dim]
