"""Rules for views, copies, joins and their gradients: no arithmetic on elements.

Schemas are those of ``aten/src/ATen/native/native_functions.yaml``; each docstring names the ATen
operators and the ONNX operators of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    END,
    NotLowered,
    Number,
    OnnxGraph,
    Size,
    Value,
    lowers,
    product,
    result,
    size_of,
)

aten = torch.ops.aten
prims = torch.ops.prims


@lowers(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _reshaped(graph: OnnxGraph, node: fx.Node, x: Value, *_: Any) -> Value:
    """Lower view, unsqueeze, squeeze to Reshape."""
    return graph.reshape(x, result(node).shape)


@lowers(
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
)
def _same(graph: OnnxGraph, node: fx.Node, x: Value, **_: Any) -> Value:
    """Lower detach, clone to nothing: values of a graph never change."""
    return x


@lowers(aten._to_copy.default, prims.convert_element_type.default)
def _cast(
    graph: OnnxGraph, node: fx.Node, x: Value, dtype: torch.dtype | None = None, **_: Any
) -> Value:
    """Lower _to_copy to Cast."""
    return graph.cast(x, result(node).dtype)


@lowers(aten.t.default)
def _t(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower t to Transpose."""
    return graph.transpose(x, range(x.rank)[::-1])


@lowers(aten.transpose.int)
def _transpose(graph: OnnxGraph, node: fx.Node, x: Value, one: int, other: int) -> Value:
    """Lower transpose to Transpose."""
    if x.rank == 0:
        return x
    order = list(range(x.rank))
    order[one], order[other] = order[other], order[one]
    return graph.transpose(x, order)


@lowers(aten.permute.default)
def _permute(graph: OnnxGraph, node: fx.Node, x: Value, order: list[int]) -> Value:
    """Lower permute to Transpose."""
    return graph.transpose(x, order)


@lowers(aten.expand.default)
def _expand(graph: OnnxGraph, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    """Lower expand to Expand."""
    return graph.expand(x, result(node).shape)


@lowers(prims.broadcast_in_dim.default)
def _broadcast_in_dim(
    graph: OnnxGraph, node: fx.Node, x: Value, shape: list[Number], dims: list[int]
) -> Value:
    """Lower prims.broadcast_in_dim to Reshape, Expand."""
    wide = [x.shape[dims.index(i)] if i in dims else 1 for i in range(len(shape))]
    return graph.expand(graph.reshape(x, wide), result(node).shape)


@lowers(aten.repeat.default)
def _repeat(graph: OnnxGraph, node: fx.Node, x: Value, repeats: list[Number]) -> Value:
    """Lower repeat to Tile."""
    x = graph.reshape(x, [1] * (len(repeats) - x.rank) + [*x.shape])
    shape = result(node).shape
    return graph.value("Tile", x, graph.sizes(repeats), shape=shape, dtype=x.dtype)


@lowers(aten.slice.Tensor)
def _slice(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    dim: int = 0,
    start: Number | None = None,
    end: Number | None = None,
    step: Number = 1,
) -> Value:
    """Lower slice to Slice."""
    shape = result(node).shape
    start, end = 0 if start is None else start, END if end is None else end
    if shape == x.shape and step == 1:
        return x
    return graph.slice(x, [dim % x.rank], [start], [end], shape, [step])


@lowers(aten.select.int)
def _select(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, index: Number) -> Value:
    """Lower select to Gather with a scalar index."""
    at = graph.reshape(graph.sizes([index]), [])
    return graph.value("Gather", x, at, shape=result(node).shape, dtype=x.dtype, axis=dim % x.rank)


@lowers(aten.cat.default)
def _cat(graph: OnnxGraph, node: fx.Node, parts: list[Value], dim: int = 0) -> Value:
    """Lower cat to Concat; torch skips inputs of shape [0]."""
    made = result(node)
    parts = [graph.cast(part, made.dtype) for part in parts if part.shape != (0,)] or parts[:1]
    axis = dim % len(made.shape)
    return graph.value("Concat", *parts, shape=made.shape, dtype=made.dtype, axis=axis)


@lowers(aten.stack.default)
def _stack(graph: OnnxGraph, node: fx.Node, parts: list[Value], dim: int = 0) -> Value:
    """Lower stack to Reshape, Concat."""
    made = result(node)
    axis = dim % len(made.shape)
    rows = [
        graph.reshape(graph.cast(part, made.dtype), _with(part.shape, axis, 1)) for part in parts
    ]
    return graph.value("Concat", *rows, shape=made.shape, dtype=made.dtype, axis=axis)


@lowers(aten.split.Tensor, aten.split_with_sizes.default)
def _split(graph: OnnxGraph, node: fx.Node, x: Value, _: Any, dim: int = 0) -> list[Value]:
    """Lower split to Split."""
    axis = dim % x.rank
    shapes = [result(node, i).shape for i in range(len(node.meta["val"]))]
    sizes = graph.sizes([shape[axis] for shape in shapes])
    names = graph.node("Split", x, sizes, outputs=len(shapes), axis=axis)
    return [Value(name, shape, x.dtype) for name, shape in zip(names, shapes, strict=True)]


@lowers(aten.unbind.int)
def _unbind(graph: OnnxGraph, node: fx.Node, x: Value, dim: int = 0) -> list[Value]:
    """Lower unbind to Split, Reshape."""
    axis, count = dim % x.rank, len(node.meta["val"])
    if count == 0:
        raise NotLowered("unbind of a dimension without elements")
    shape = result(node, 0).shape
    names = graph.node("Split", x, graph.sizes([1] * count), outputs=count, axis=axis)
    return [graph.reshape(Value(name, _with(shape, axis, 1), x.dtype), shape) for name in names]


@lowers(aten.flip.default)
def _flip(graph: OnnxGraph, node: fx.Node, x: Value, dims: list[int]) -> Value:
    """Lower flip to Slice with step -1."""
    if not dims or x.rank == 0:
        return x
    axes, back = [dim % x.rank for dim in dims], [-1] * len(dims)
    return graph.slice(x, axes, back, [-END] * len(dims), x.shape, back)


@lowers(aten.constant_pad_nd.default)
def _pad(graph: OnnxGraph, node: fx.Node, x: Value, pad: list[Number], value: Number = 0) -> Value:
    """Lower constant_pad_nd to Pad; torch names the last dimension first."""
    before: list[Number] = [0] * x.rank
    after: list[Number] = [0] * x.rank
    for i in range(len(pad) // 2):
        before[x.rank - 1 - i], after[x.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    return padded(graph, x, before, after, result(node).shape, value)


def padded(
    graph: OnnxGraph,
    x: Value,
    before: Sequence[Number],
    after: Sequence[Number],
    shape: Sequence[Size],
    value: Number = 0,
) -> Value:
    """Pad a tensor with a number; negative counts remove elements.

    Args:
        graph: Graph under construction.
        x: Tensor.
        before: Number of elements to add at the start of each dimension.
        after: Number of elements to add at the end of each dimension.
        shape: Sizes of the result.
        value: Number to pad with.
    """
    pads = graph.sizes([*before, *after])
    return graph.value("Pad", x, pads, graph.scalar(value, x.dtype), shape=shape, dtype=x.dtype)


@lowers(aten.slice_backward.default)
def _slice_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    sizes: list[Number],
    dim: int,
    start: Number,
    end: Number,
    step: Number,
) -> Value:
    """Lower slice_backward to Pad; with a step, zeros are put between the rows first."""
    dim %= gradient.rank
    whole, count = size_of(sizes[dim]), gradient.shape[dim]
    first = _first(start, whole)
    if not isinstance(step, int):
        raise NotLowered("a step that is a size")
    if step != 1:
        apart = _with(gradient.shape, dim + 1, 1)
        wide = _with(gradient.shape, dim + 1, step)
        pads = [step - 1 if i == dim + 1 else 0 for i in range(len(apart))]
        gradient = padded(graph, graph.reshape(gradient, apart), [0] * len(apart), pads, wide)
        merged = [*wide[:dim], count * step, *wide[dim + 2 :]]
        gradient, count = graph.reshape(gradient, merged), size_of(count * step)
    before = [first if i == dim else 0 for i in range(gradient.rank)]
    after = [size_of(whole - first - count) if i == dim else 0 for i in range(gradient.rank)]
    return padded(graph, gradient, before, after, result(node).shape)


@lowers(aten.select_backward.default)
def _select_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, sizes: list[Number], dim: int, index: Number
) -> Value:
    """Lower select_backward to Reshape, Pad."""
    shape = result(node).shape
    dim %= len(shape)
    first = _first(index, shape[dim])
    row = graph.reshape(gradient, _with(gradient.shape, dim, 1))
    before = [first if i == dim else 0 for i in range(len(shape))]
    after = [size_of(shape[dim] - first - 1) if i == dim else 0 for i in range(len(shape))]
    return padded(graph, row, before, after, shape)


@lowers(aten.slice_scatter.default)
def _slice_scatter(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Number | None = None,
    end: Number | None = None,
    step: Number = 1,
) -> Value:
    """Lower slice_scatter to Slice, Concat."""
    if step != 1:
        raise NotLowered("a step in slice_scatter")
    dim %= x.rank
    first = _first(0 if start is None else start, x.shape[dim])
    return _replaced(graph, x, graph.cast(source, x.dtype), dim, first)


@lowers(aten.select_scatter.default)
def _select_scatter(
    graph: OnnxGraph, node: fx.Node, x: Value, source: Value, dim: int, index: Number
) -> Value:
    """Lower select_scatter to Slice, Concat."""
    dim %= x.rank
    row = graph.reshape(graph.cast(source, x.dtype), _with(source.shape, dim, 1))
    return _replaced(graph, x, row, dim, _first(index, x.shape[dim]))


def _replaced(graph: OnnxGraph, x: Value, source: Value, dim: int, first: Size) -> Value:
    """Return `x` with `source` in place of the elements from `first` on."""
    last = size_of(first + source.shape[dim])
    rest = size_of(x.shape[dim] - last)
    parts = [source]
    if first != 0:
        parts.insert(0, graph.slice(x, [dim], [0], [first], _set(x.shape, dim, first)))
    if rest != 0:
        parts.append(graph.slice(x, [dim], [last], [END], _set(x.shape, dim, rest)))
    if len(parts) == 1:
        return source
    return graph.value("Concat", *parts, shape=x.shape, dtype=x.dtype, axis=dim)


@lowers(aten.copy.default)
def _copy(graph: OnnxGraph, node: fx.Node, x: Value, source: Value, *_: Any) -> Value:
    """Lower copy to Cast, Expand."""
    return graph.expand(graph.cast(source, x.dtype), result(node).shape)


@lowers(aten.diagonal.default)
def _diagonal(
    graph: OnnxGraph, node: fx.Node, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """Lower diagonal to Transpose, Reshape, Gather of the flat indices."""
    shape = result(node).shape
    order, at = _on_diagonal(graph, x.shape, offset, dim1, dim2, shape[-1])
    moved = graph.transpose(x, order)
    flat = graph.reshape(moved, [*moved.shape[:-2], product(moved.shape[-2:])])
    return graph.value("Gather", flat, at, shape=shape, dtype=x.dtype, axis=x.rank - 2)


def _on_diagonal(
    graph: OnnxGraph, shape: Sequence[Size], offset: int, dim1: int, dim2: int, count: Size
) -> tuple[list[int], Value]:
    """Return the order with rows and columns last, and the places of a diagonal in their plane."""
    rows, columns = dim1 % len(shape), dim2 % len(shape)
    rest = [i for i in range(len(shape)) if i not in (rows, columns)]
    width = shape[columns]
    first = offset if offset >= 0 else -offset * width
    return [*rest, rows, columns], progression(graph, first, width + 1, count)


@lowers(aten.diagonal_backward.default)
def _diagonal_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    sizes: list[Number],
    offset: int,
    dim1: int,
    dim2: int,
) -> Value:
    """Lower diagonal_backward to ScatterElements into zeros, Transpose."""
    shape = result(node).shape
    order, at = _on_diagonal(graph, shape, offset, dim1, dim2, gradient.shape[-1])
    moved = [shape[i] for i in order]
    zeros = graph.full([*moved[:-2], product(moved[-2:])], 0, gradient.dtype)
    made = graph.value(
        "ScatterElements",
        zeros,
        graph.expand(at, gradient.shape),
        gradient,
        shape=zeros.shape,
        dtype=gradient.dtype,
        axis=len(shape) - 2,
    )
    return graph.transpose(graph.reshape(made, moved), [order.index(i) for i in range(len(shape))])


@lowers(aten.unfold.default)
def _unfold(
    graph: OnnxGraph, node: fx.Node, x: Value, dim: int, size: Number, step: Number
) -> Value:
    """Lower unfold to Gather of the windows' indices, Transpose."""
    shape = result(node).shape
    dim %= x.rank
    starts = graph.reshape(progression(graph, 0, step, shape[dim]), [shape[dim], 1])
    at = graph.binary("Add", starts, progression(graph, 0, 1, size))
    taken = [*x.shape[:dim], shape[dim], size_of(size), *x.shape[dim + 1 :]]
    windows = graph.value("Gather", x, at, shape=taken, dtype=x.dtype, axis=dim)
    return graph.transpose(windows, [i for i in range(len(taken)) if i != dim + 1] + [dim + 1])


def progression(graph: OnnxGraph, first: Number, step: Number, count: Number) -> Value:
    """Return `count` integers from `first` in steps of `step`.

    Args:
        graph: Graph under construction.
        first: First number.
        step: Difference of two neighbors.
        count: Number of integers.
    """
    known = [size_of(each) for each in (first, step, count)]
    if all(isinstance(each, int) for each in known):
        start, by, number = known
        return graph.constant([start + by * i for i in range(int(number))])
    start, by, number = (graph.reshape(graph.number(each), []) for each in known)
    zero, one = graph.constant(0), graph.constant(1)
    count_up = graph.value("Range", zero, number, one, shape=[known[2]], dtype=torch.int64)
    return graph.binary("Add", graph.binary("Mul", count_up, by), start)


def _first(index: Number, size: Size) -> Size:
    """Return the index of the first element, clamped as torch does and counted from the start."""
    index = size_of(index)
    if isinstance(index, int):
        if index < 0:
            return max(0, index + size) if isinstance(size, int) else size_of(index + size)
        return min(index, size) if isinstance(size, int) else index
    if not index.is_nonnegative:
        raise NotLowered(f"the index {index}, which may be negative")
    return index


def _with(shape: Sequence[Size], dim: int, size: Size) -> tuple[Size, ...]:
    """Return a shape with one more dimension."""
    return (*shape[:dim], size, *shape[dim:])


def _set(shape: Sequence[Size], dim: int, size: Size) -> tuple[Size, ...]:
    """Return a shape with another size of one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])
