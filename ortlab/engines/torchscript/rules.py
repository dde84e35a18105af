"""Export rules that graphs with a gradient and graphs for inference share."""

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
    """Attention in ONNX's operators."""
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
            # The finite minimum, not infinity: a row that is masked out whole stays finite. Adding
            # it, where filling would do too, keeps the gradient free of a Where.
            mask = g.op("Where", mask, constant(g, 0.0, kind), lowest)
        elif not causal:
            seen = cast(g, g.op("GreaterOrEqual", mask, cast(g, lowest, dtype(mask))), kind)
            mask = g.op("Max", mask, cast(g, lowest, dtype(mask)))
        scores = g.op("Add", scores, mask)
    weights = g.op("Softmax", scores, axis_i=-1)
    if seen is not None:  # a query that sees no key gets nothing
        weights = g.op("Mul", weights, _any_along_last(g, seen))
    ratio = 0.0 if missing(dropout_p) else float(literal(dropout_p, "f"))
    if ratio > 0:
        weights = dropout(g, weights, ratio)
    return g.op("MatMul", weights, value)


def _any_along_last(g: Graph, seen: Value) -> Value:
    """The largest along the last dimension, which stays; from opset 18 on axes are an input."""
    if g.opset < 18:
        return g.op("ReduceMax", seen, axes_i=[-1], keepdims_i=1)
    return g.op("ReduceMax", seen, constant(g, [-1]), keepdims_i=1)


def attention_scale(g: Graph, query: Value, scale: Value | None) -> Value:
    """What torch multiplies the scores by: as given, else one over the root of the heads' size."""
    if scale is not None and not missing(scale):
        given = literal(scale, "f")
        if isinstance(given, (int, float)):
            return constant(g, float(given), dtype(query))
        return cast(g, scale, dtype(query))
    sizes = traced_sizes(next(iter(g.original_node.inputs())))
    if sizes is not None:
        return constant(g, 1 / math.sqrt(sizes[-1]), dtype(query))
    # Of a model's own input no size is known.
    return cast(g, symbolic_opset14._attention_scale(g, query), dtype(query))


def repeat_heads(g: Graph, x: Value, query: Value) -> Value:
    """[batch, heads, length, size] with as many heads as `query`, each one repeated in place."""
    shape, second = g.op("Shape", x), constant(g, [1])
    batch, heads = (g.op("Gather", shape, constant(g, [i]), axis_i=0) for i in (0, 1))
    rest = g.op("Gather", shape, constant(g, [2, 3]), axis_i=0)
    wanted = g.op("Gather", g.op("Shape", query), second, axis_i=0)
    wide = g.op("Concat", batch, heads, g.op("Div", wanted, heads), rest, axis_i=0)
    flat = g.op("Concat", batch, wanted, rest, axis_i=0)
    return g.op("Reshape", g.op("Expand", g.op("Unsqueeze", x, constant(g, [2])), wide), flat)


# ---- torch's fused kernels -----------------------------------------------------------------------


def dropout(g: Graph, x: Value, ratio: float) -> Value:
    """Dropout with the mask output that ORT's gradient needs."""
    training = constant(g, True, torch.bool)
    halved = dtype(x) == torch.float16 and x.type().device() == torch.device("cpu")
    given = cast(g, x, torch.float32) if halved else x
    kept, _mask = g.op("Dropout", given, constant(g, ratio, torch.float32), training, outputs=2)
    return cast(g, kept, torch.float16) if halved else kept


def diff(
    g: Graph, x: Value, n: Value, dim: Value, prepend: Value = None, append: Value = None
) -> Value:
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
    """The dimensions of a traced tensor as they follow each other in its storage."""
    sizes, strides = traced_sizes(value), value.type().strides()
    if sizes is None or strides is None:
        raise RuntimeError("as_strided of a tensor whose strides are not known at export")
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            raise RuntimeError("as_strided of a tensor with gaps or overlaps in its storage")
        step *= sizes[dim]
    return order


def in_order_of_storage(g: Graph, x: Value) -> Value:
    """Return `x` transposed to the order that its elements have in memory.

    The strides of ``as_strided`` are those of the storage, and the exporter takes them for a
    contiguous tensor's: of a transposed one it would read other elements.
    """
    order = order_in_storage(next(iter(g.original_node.inputs())))
    return x if order == list(range(len(order))) else g.op("Transpose", x, perm_i=order)


def for_inference(opset: int) -> dict[str, Callable[..., Any]]:
    """Return the rules for operators that torch's own get wrong or lack in inference, by name.

    The rules of engine ortmodule are for gradients, and write nodes that torch runs.
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
    """Return attention in ONNX's operators, from the arguments of torch's operator."""
    if not missing(enable_gqa) and literal(enable_gqa, "i"):
        key, value = (repeat_heads(g, x, query) for x in (key, value))
    causal = not missing(is_causal) and bool(literal(is_causal, "i"))
    return attention(g, query, key, value, mask, dropout_p, causal, scale)
