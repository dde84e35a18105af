"""What export rules are made of: the decorator that declares one, and the nodes that they write."""

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
"""ORT's declarative form: nodes of (operator, inputs, outputs, attributes)."""

ATEN = "org.pytorch.aten"
DETACHED = "ortlab::detached"
"""Torch's detach() as a copy: ORT writes over memory that nobody seems to read any more, and does
not know of two tensors in one place."""


@dataclass(frozen=True)
class Rule:
    """How one torch operator is exported.

    ``gradient`` is (ATen name, overload, its nodes); without nodes the first input gets none.
    """

    operator: str
    symptom: str
    export: Callable[..., Any]
    gradient: tuple[str, str, Callable[[], Gradient] | None] | None = None


@dataclass(frozen=True)
class Attention:
    """Attention as one kernel: torch's own if `fused`, else ortlab's for a CPU.

    With `low` the products of ortlab's take bfloat16.
    """

    fused: bool
    low: bool = False


RULES: list[Rule] = []
OPSET = 17  # what ORTModule exports at
STOCK: dict[str, Callable[..., Any]] = {}
_attention: Attention | None = None  # of the export under way
_trained: set[str] = set()  # names of the parameters of the export under way
_fixed: set[str] = set()  # and of its buffers, and the parameters that are not trained


@contextlib.contextmanager
def gradients_for(module: torch.nn.Module) -> Iterator[None]:
    """Tells the rules of an export of `module` which of its parameters are trained."""
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        (_trained if each.requires_grad else _fixed).add(name)
    try:
        yield
    finally:
        _trained.clear()
        _fixed.clear()


@contextlib.contextmanager
def attention_as(kernel: Attention | None) -> Iterator[None]:
    """Exports meanwhile write attention as `kernel`; None writes ONNX's operators."""
    global _attention
    before, _attention = _attention, kernel
    try:
        yield
    finally:
        _attention = before


def attention() -> Attention | None:
    """What the export under way writes attention as."""
    return _attention


def stock(operator: str) -> Callable[..., Any]:
    """ORT's or torch's own rule, which one of ours goes on to for the ordinary case."""
    return STOCK[operator]


def rule(
    operator: str,
    symptom: str,
    gradient: tuple[str, str, Callable[[], Gradient] | None] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the decorated function to be the rule for `operator`; `symptom` is what it mends."""

    def add(export: Callable[..., Any]) -> Callable[..., Any]:
        RULES.append(Rule(operator, symptom, export, gradient))
        return export

    return add


# ---- what rules are written with -----------------------------------------------------------------


def backwards(g: Graph, x: Value, axis: int) -> Value:
    """`x` with one dimension reversed, by Gather: the gradient of a Slice takes no negative steps.

    The indices are counted up and subtracted: a Range that counts down to -1, ORT takes for a Slice
    that ends before the last element.
    """
    size = g.op("Gather", g.op("Shape", x), constant(g, axis), axis_i=0)
    up = g.op("Range", constant(g, 0), size, constant(g, 1))
    order = g.op("Sub", g.op("Sub", size, constant(g, 1)), up)
    return g.op("Gather", x, order, axis_i=axis)


def aten(g: Graph, name: str, *inputs: Value, overload: str = "", outputs: int = 1) -> Any:
    """A node that calls a kernel of torch's."""
    return g.op(
        f"{ATEN}::ATen", *inputs, operator_s=name, overload_name_s=overload, outputs=outputs
    )


def aten_node(
    name: str, inputs: list[str], outputs: list[str], overload: str = ""
) -> tuple[Any, ...]:
    """A node of a declared gradient that calls a kernel of torch's."""
    names = {"operator": name, "overload_name": overload}
    attributes = {key: {"value": value, "dtype": "string"} for key, value in names.items()}
    return (("ATen", ATEN), inputs, outputs, attributes)


def all_of(count: int) -> tuple[Any, ...]:
    """A mask that asks a backward kernel for the gradients of its first `count` inputs."""
    value = {"value": [True] * count, "dtype": "bool", "is_tensor": True}
    return ("Constant", [], ["Mask"], {"value": value})


def inputs_of(value: Value) -> Iterator[str]:
    """Names of the graph's inputs that `value` is computed from, not counting their shapes."""
    return (each.debugName() for each in _origins(value))


def _origins(value: Value, *, detached: bool = True) -> Iterator[Value]:
    """The graph's inputs that `value` is computed from; those that it is `detached` of, too."""
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
    """Whether a gradient may go through `value`, to a trained parameter or an input of a call."""
    return any(
        each.debugName() not in _fixed and dtype(each).is_floating_point
        for each in _origins(value, detached=False)
    )


def is_trained(value: Value) -> bool:
    """Whether `value` is computed from a trained parameter."""
    return not _trained.isdisjoint(inputs_of(value))


def with_gradient(g: Graph, x: Value, *parameters: Value) -> Value:
    """`x`, or where nothing trained lies before it, `x` plus the sum of none of one's elements.

    ORT drops the inner nodes of a declared gradient when the first input needs none, and where a
    node gives several of which one is not needed, running it fails.
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
    """Masks of gradients in a built `graph` (`all_of`) leave out those that nobody takes.

    Those of frozen parameters have no name in the graph. Some kernels give one all the same (that
    of a weight along with its bias's), for which ORT needs a place.
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
    """A size that the model fixes, of the operator's input at `position`, as the trace saw it."""
    sizes = traced_sizes(list(g.original_node.inputs())[position])
    if sizes is None:
        raise RuntimeError(f"the size of dimension {dim} is not known at export")
    return sizes[dim]
