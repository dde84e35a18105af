"""Nodes of a graph that TorchScript's exporter writes, and the values that they connect."""

from __future__ import annotations

from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType

Graph = Any
"""The exporter's GraphContext: `g.op` adds a node."""


Value = Any
"""A value of the TorchScript or the ONNX graph."""


def constant(g: Graph, value: Any, dtype: torch.dtype = torch.long) -> Value:
    """A constant node."""
    return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))


def literal(value: Value, kind: Any) -> Any:
    """The constant that `value` is ('i', 'f', 'is' as the exporter calls them)."""
    return symbolic_helper._maybe_get_const(value, kind)


def missing(value: Value | None) -> bool:
    """Whether an argument was None or left out."""
    return value is None or symbolic_helper._is_none(value)


def dtype(value: Value) -> torch.dtype:
    """The element type; float32 where the exporter does not know it."""
    return JitScalarType.from_value(value, JitScalarType.FLOAT).dtype()


def rank(value: Value) -> int:
    """The number of dimensions."""
    found = symbolic_helper._get_tensor_rank(value)
    if found is None:
        raise RuntimeError("the number of dimensions is not known at export")
    return int(found)


def number(value: Value) -> float:
    """The number that an argument is at export."""
    return float(literal(value, "f"))


def cast(g: Graph, value: Value, to: torch.dtype) -> Value:
    """`value` with elements of type `to`; itself where it is known to have those."""
    kind = value.type()
    if kind.kind() == "TensorType" and kind.dtype() == to:
        return value
    return g.op("Cast", value, to_i=JitScalarType.from_dtype(to).onnx_type())


def ranked_like_output(g: Graph, value: Value) -> Value:
    """Gives `value` the traced output's type and rank, but no sizes: those are the sample's."""
    traced = next(iter(g.original_node.outputs())).type()
    value.setType(traced.with_sizes([None] * len(traced.sizes())))
    return value


def traced_sizes(value: Value) -> list[int] | None:
    """The sizes that the trace saw, of a value of the TorchScript graph; None if not all."""
    tensor = value.type()
    sizes = tensor.sizes() if tensor.kind() == "TensorType" else None
    return None if sizes is None or None in sizes else list(sizes)
