"""Helpers for export rules: nodes that the TorchScript exporter writes, and their values."""

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
    """Add a constant node.

    Args:
        g: Export context.
        value: Number, or nested list of numbers.
        dtype: Element type of the constant.

    Returns:
        The output of the node.
    """
    return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))


def literal(value: Value, kind: Any) -> Any:
    """Return the Python value of a constant, or `value` itself if it is not constant.

    Args:
        value: Argument of the exported operator.
        kind: Type as the exporter abbreviates it, such as "i", "f", "s", "b" or "is".
    """
    return symbolic_helper._maybe_get_const(value, kind)


def missing(value: Value | None) -> bool:
    """Return True if an argument is None or was left out.

    Args:
        value: Argument of the exported operator.
    """
    return value is None or symbolic_helper._is_none(value)


def dtype(value: Value) -> torch.dtype:
    """Return the element type of a value; float32 if the exporter does not know it.

    Args:
        value: Value of either graph.
    """
    return JitScalarType.from_value(value, JitScalarType.FLOAT).dtype()


def rank(value: Value) -> int:
    """Return the number of dimensions of a value.

    Args:
        value: Value of either graph.

    Raises:
        RuntimeError: If the exporter does not know it.
    """
    found = symbolic_helper._get_tensor_rank(value)
    if found is None:
        raise RuntimeError("the number of dimensions is unknown at export")
    return int(found)


def number(value: Value) -> float:
    """Return a constant argument as a float.

    Args:
        value: Argument of the exported operator.
    """
    return float(literal(value, "f"))


def cast(g: Graph, value: Value, to: torch.dtype) -> Value:
    """Convert `value` to the element type `to`; no node is added if it is known to have it.

    Args:
        g: Export context.
        value: Value to convert.
        to: Element type of the result.

    Returns:
        The converted value.
    """
    kind = value.type()
    if kind.kind() == "TensorType" and kind.dtype() == to:
        return value
    return g.op("Cast", value, to_i=JitScalarType.from_dtype(to).onnx_type())


def ranked_like_output(g: Graph, value: Value) -> Value:
    """Set the type and rank of `value` to the traced output's, without the sample's sizes.

    Args:
        g: Export context of the operator.
        value: Value that replaces the operator's first output.

    Returns:
        `value` itself.
    """
    traced = next(iter(g.original_node.outputs())).type()
    value.setType(traced.with_sizes([None] * len(traced.sizes())))
    return value


def traced_sizes(value: Value) -> list[int] | None:
    """Return the sizes of a value in the trace; None unless all of them are known.

    Args:
        value: Value of the TorchScript graph.
    """
    tensor = value.type()
    sizes = tensor.sizes() if tensor.kind() == "TensorType" else None
    return None if sizes is None or None in sizes else list(sizes)
