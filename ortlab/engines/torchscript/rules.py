"""Export rules shared by graphs with a gradient and graphs for inference.

A rule gets the exporter's context ``g`` and the operator's arguments, writes ONNX nodes, and
returns the values that replace the operator's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter import registration, symbolic_opset14

from ortlab.engines.torchscript.nodes import (
    Graph,
    Value,
    cast,
    constant,
    dtype,
    literal,
    missing,
    rank,
    traced_sizes,
)


def attention(
    g: Graph,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout_p: Value | None,
    causal: bool,
    scale: Value | None,
) -> Value:
    """Write scaled dot-product attention in ONNX operators.

    Args:
        g: Export context.
        query: Queries, [batch, heads, length, size].
        key: Keys, with as many heads as `query`.
        value: Values, with as many heads as `query`.
        mask: Boolean mask that is True where a query may attend, or a float mask that is added to
            the scores; None for no mask.
        dropout_p: Dropout probability of the attention weights; None for no dropout.
        causal: Whether each query attends only to the keys up to its own position.
        scale: Factor of the scores; None for torch's default.

    Returns:
        The attention output.
    """
    last = list(range(rank(key)))
    last[-1], last[-2] = last[-2], last[-1]
    scaled = g.op("Mul", query, attention_scale(g, query, scale))
    scores = g.op("MatMul", scaled, g.op("Transpose", key, perm_i=last))
    seen = None
    if causal:
        mask = symbolic_opset14._causal_attention_mask(g, query, key)
    if not missing(mask):
        kind = dtype(query)
        lowest = constant(g, torch.finfo(kind).min, kind)
        if dtype(mask) == torch.bool:
            seen = cast(g, mask, kind)
            # The finite minimum, not infinity: a fully masked row stays finite. Adding the mask
            # instead of filling with it keeps a Where out of the gradient.
            mask = g.op("Where", mask, constant(g, 0.0, kind), lowest)
        elif not causal:
            seen = cast(g, g.op("GreaterOrEqual", mask, cast(g, lowest, dtype(mask))), kind)
            mask = g.op("Max", mask, cast(g, lowest, dtype(mask)))
        scores = g.op("Add", scores, mask)
    weights = g.op("Softmax", scores, axis_i=-1)
    if seen is not None:  # the output of a query that attends to no key is zero
        weights = g.op("Mul", weights, _any_along_last(g, seen))
    ratio = 0.0 if missing(dropout_p) else float(literal(dropout_p, "f"))
    if ratio > 0:
        weights = dropout(g, weights, ratio)
    return g.op("MatMul", weights, value)


def _any_along_last(g: Graph, seen: Value) -> Value:
    """Return the maximum along the last dimension, kept; from opset 18 on, axes are an input."""
    if g.opset < 18:
        return g.op("ReduceMax", seen, axes_i=[-1], keepdims_i=1)
    return g.op("ReduceMax", seen, constant(g, [-1]), keepdims_i=1)


def attention_scale(g: Graph, query: Value, scale: Value | None) -> Value:
    """Return the factor of the scores: `scale` if given, else 1 / sqrt(size of a head).

    Args:
        g: Export context.
        query: Queries, whose type the factor gets.
        scale: Factor that was passed to the operator, if any.
    """
    if scale is not None and not missing(scale):
        given = literal(scale, "f")
        if isinstance(given, (int, float)):
            return constant(g, float(given), dtype(query))
        return cast(g, scale, dtype(query))
    sizes = traced_sizes(next(iter(g.original_node.inputs())))
    if sizes is not None:
        return constant(g, 1 / math.sqrt(sizes[-1]), dtype(query))
    # The sizes of a model's own input are unknown.
    return cast(g, symbolic_opset14._attention_scale(g, query), dtype(query))


def repeat_heads(g: Graph, x: Value, query: Value) -> Value:
    """Repeat each head of `x` in place until there are as many heads as in `query`.

    Args:
        g: Export context.
        x: Keys or values, [batch, heads, length, size].
        query: Queries; their number of heads is a multiple of that of `x`.

    Returns:
        `x` with the repeated heads, [batch, query heads, length, size].
    """
    shape, second = g.op("Shape", x), constant(g, [1])
    batch, heads = (g.op("Gather", shape, constant(g, [i]), axis_i=0) for i in (0, 1))
    rest = g.op("Gather", shape, constant(g, [2, 3]), axis_i=0)
    wanted = g.op("Gather", g.op("Shape", query), second, axis_i=0)
    wide = g.op("Concat", batch, heads, g.op("Div", wanted, heads), rest, axis_i=0)
    flat = g.op("Concat", batch, wanted, rest, axis_i=0)
    return g.op("Reshape", g.op("Expand", g.op("Unsqueeze", x, constant(g, [2])), wide), flat)


# ---- other operators -----------------------------------------------------------------------------


def dropout(g: Graph, x: Value, ratio: float) -> Value:
    """Write dropout with the mask output that ORT's gradient needs.

    Args:
        g: Export context.
        x: Input.
        ratio: Probability of an element to be zeroed.

    Returns:
        The output of the dropout.
    """
    training = constant(g, True, torch.bool)
    halved = dtype(x) == torch.float16 and x.type().device() == torch.device("cpu")
    given = cast(g, x, torch.float32) if halved else x
    kept, _mask = g.op("Dropout", given, constant(g, ratio, torch.float32), training, outputs=2)
    return cast(g, kept, torch.float16) if halved else kept


def diff(
    g: Graph, x: Value, n: Value, dim: Value, prepend: Value = None, append: Value = None
) -> Value:
    """Write ``torch.diff`` as slices and subtractions.

    Args:
        g: Export context.
        x: Input.
        n: How many times the difference is taken; constant.
        dim: Dimension; constant.
        prepend: Values before `x` along `dim`.
        append: Values after `x` along `dim`.

    Returns:
        The n-th difference.
    """
    axis = literal(dim, "i")
    parts = [part for part in (prepend, x, append) if not missing(part)]
    x = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis_i=axis)
    axes = constant(g, [axis])
    for _ in range(literal(n, "i")):
        later = g.op("Slice", x, constant(g, [1]), constant(g, [2**62]), axes)
        earlier = g.op("Slice", x, constant(g, [0]), constant(g, [-1]), axes)
        x = g.op("Sub", later, earlier)
    return x


def unflatten(g: Graph, x: Value, dim: Value, sizes: Value) -> Value:
    """Write ``torch.unflatten`` as a Reshape.

    Args:
        g: Export context.
        x: Input, whose rank is known.
        dim: Dimension to expand; constant.
        sizes: Sizes of the new dimensions, constant or computed in the graph.

    Returns:
        `x` with `dim` replaced by dimensions of these sizes.
    """
    axis = literal(dim, "i") % rank(x)
    if symbolic_helper._is_packed_list(sizes):
        parts = [g.op("Reshape", s, constant(g, [1])) for s in symbolic_helper._unpack_list(sizes)]
    else:
        parts = [constant(g, list(literal(sizes, "is")))]
    shape, along = g.op("Shape", x), constant(g, [0])
    if axis > 0:
        parts.insert(0, g.op("Slice", shape, constant(g, [0]), constant(g, [axis]), along))
    if axis + 1 < rank(x):
        parts.append(g.op("Slice", shape, constant(g, [axis + 1]), constant(g, [rank(x)]), along))
    return g.op("Reshape", x, g.op("Concat", *parts, axis_i=0) if len(parts) > 1 else parts[0])


def order_in_storage(value: Value) -> list[int]:
    """Return the dimensions of a traced tensor in the order of its storage, outermost first.

    Args:
        value: Value of the TorchScript graph.

    Raises:
        RuntimeError: If its strides are unknown, or its storage has gaps or overlaps.
    """
    sizes, strides = traced_sizes(value), value.type().strides()
    if sizes is None or strides is None:
        raise RuntimeError("as_strided of a tensor whose strides are unknown at export")
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            raise RuntimeError("as_strided of a tensor with gaps or overlaps in its storage")
        step *= sizes[dim]
    return order


def in_order_of_storage(g: Graph, x: Value) -> Value:
    """Return `x` transposed to the order of its elements in memory.

    The strides of ``as_strided`` refer to the storage, but the exporter treats them as strides of a
    contiguous tensor. For a transposed tensor it would read the wrong elements.

    Args:
        g: Export context of the operator, whose first input is `x`.
        x: Input of ``as_strided``.
    """
    order = order_in_storage(next(iter(g.original_node.inputs())))
    return x if order == list(range(len(order))) else g.op("Transpose", x, perm_i=order)


def for_inference(opset: int) -> dict[str, Callable[..., Any]]:
    """Return rules for operators whose own rules are wrong or missing in inference, by name.

    The rules of the ortmodule engine are for gradients and write nodes that torch runs.

    Args:
        opset: ONNX opset of the export.
    """
    group = registration.registry.get_function_group("aten::as_strided")
    stock = None if group is None else group.get(opset)
    assert stock is not None

    def as_strided(g: Graph, x: Value, sizes: Value, strides: Value, offset: Value = None) -> Value:
        return stock(g, in_order_of_storage(g, x), sizes, strides, offset)

    return {
        "aten::scaled_dot_product_attention": scaled_dot_product_attention,
        "aten::diff": diff,
        "aten::as_strided": as_strided,
        "aten::unflatten": unflatten,
    }


def scaled_dot_product_attention(
    g: Graph,
    query: Value,
    key: Value,
    value: Value,
    mask: Value = None,
    dropout_p: Value = None,
    is_causal: Value = None,
    scale: Value = None,
    enable_gqa: Value = None,
) -> Value:
    """Write attention in ONNX operators, from the arguments of torch's operator.

    Args:
        g: Export context.
        query: Queries, [batch, heads, length, size].
        key: Keys.
        value: Values.
        mask: Boolean or float mask, see `attention`.
        dropout_p: Dropout probability of the attention weights.
        is_causal: Whether each query attends only to the keys up to its own position; constant.
        scale: Factor of the scores.
        enable_gqa: Whether `key` and `value` have fewer heads, which are repeated; constant.

    Returns:
        The attention output.
    """
    if not missing(enable_gqa) and literal(enable_gqa, "i"):
        key, value = (repeat_heads(g, x, query) for x in (key, value))
    causal = not missing(is_causal) and bool(literal(is_causal, "i"))
    return attention(g, query, key, value, mask, dropout_p, causal, scale)
