"""Rules for pooling and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NotLowered,
    OnnxGraph,
    Size,
    Value,
    lowers,
    product,
    result,
    size_of,
)
from ortlab.engines.ort.lowering.views import padded

aten = torch.ops.aten


def _each(sizes: Sequence[int], count: int) -> list[int]:
    """Return one number per dimension; torch accepts one for all."""
    return list(sizes) * count if len(sizes) == 1 else list(sizes)


def _kernel(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], count: int
) -> tuple[list[int], list[int], list[int]]:
    sizes = _each(kernel, count)
    return sizes, _each(stride, count) if stride else sizes, _each(padding, count)


@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> list[Value]:
    """Lower max_pool_with_indices to MaxPool, whose indices count in the whole tensor, and Mod."""
    count = 2 if node.target is aten.max_pool2d_with_indices.default else 3
    sizes, steps, pads = _kernel(kernel, stride, padding, count)
    made = result(node, 0)
    batched = _batched(graph, x, count)
    names = graph.node(
        "MaxPool",
        batched,
        outputs=2,
        kernel_shape=sizes,
        strides=steps,
        pads=pads * 2,
        dilations=_each(dilation, count),
        ceil_mode=int(ceil),
    )
    shape = (1, *made.shape) if x.rank == count + 1 else made.shape
    places = Value(names[1], shape, torch.int64)
    in_plane = graph.binary("Mod", places, product(x.shape[-count:]))
    values = Value(names[0], shape, x.dtype)
    return [graph.reshape(each, made.shape) for each in (values, in_plane)]


def _batched(graph: OnnxGraph, x: Value, count: int) -> Value:
    """Return a tensor with a dimension for the batch, which torch allows to be missing."""
    return graph.reshape(x, [1, *x.shape]) if x.rank == count + 1 else x


@lowers(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default
)
def _max_pool_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
    places: Value,
) -> Value:
    """Lower max_pool_with_indices_backward to ScatterElements with addition, per plane."""
    count = 2 if node.target is aten.max_pool2d_with_indices_backward.default else 3
    planes = list(x.shape[:-count])
    inside, outside = product(gradient.shape[-count:]), product(x.shape[-count:])
    zeros = graph.full([*planes, outside], 0, x.dtype)
    flat = (graph.reshape(each, [*planes, inside]) for each in (places, gradient))
    made = graph.value(
        "ScatterElements",
        zeros,
        *flat,
        shape=zeros.shape,
        dtype=x.dtype,
        axis=len(planes),
        reduction="add",
    )
    return graph.reshape(made, x.shape)


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _avg_pool(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    kernel: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> Value:
    """Lower avg_pool to AveragePool."""
    count = 2 if node.target is aten.avg_pool2d.default else 3
    sizes, steps, pads = _kernel(kernel, stride, padding, count)
    if divisor is not None or (ceil and any(pads)):
        raise NotLowered("avg_pool with divisor_override, or with ceil_mode and padding")
    batched = _batched(graph, x, count)
    shape = result(node).shape
    made = graph.value(
        "AveragePool",
        batched,
        shape=(1, *shape) if batched is not x else shape,
        dtype=x.dtype,
        kernel_shape=sizes,
        strides=steps,
        pads=pads * 2,
        ceil_mode=int(ceil),
        count_include_pad=int(count_padding),
    )
    return graph.reshape(made, shape)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _avg_pool_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    count_padding: bool,
    divisor: int | None,
) -> Value:
    """Lower avg_pool_backward to Expand, where windows neither overlap nor leave the input."""
    count = 2 if node.target is aten.avg_pool2d_backward.default else 3
    sizes, steps, pads = _kernel(kernel, stride, padding, count)
    if sizes != steps or any(pads) or ceil or divisor is not None:
        raise NotLowered("the gradient of an avg_pool whose windows overlap or are padded")
    return _spread(graph, gradient, x.shape, sizes)


def _spread(graph: OnnxGraph, gradient: Value, shape: Sequence[Size], sizes: list[int]) -> Value:
    """Return each element's share at all places of its window, and zeros behind the windows."""
    count = len(sizes)
    planes, inside = list(gradient.shape[:-count]), gradient.shape[-count:]
    share = graph.binary("Div", gradient, float(torch.Size(sizes).numel()))
    apart = [size for each in inside for size in (each, 1)]
    wide = [size for each, n in zip(inside, sizes, strict=True) for size in (each, n)]
    whole = [size_of(each * n) for each, n in zip(inside, sizes, strict=True)]
    windows = graph.expand(graph.reshape(share, [*planes, *apart]), [*planes, *wide])
    made = graph.reshape(windows, [*planes, *whole])
    behind = [size_of(n - m) for n, m in zip(shape[-count:], whole, strict=True)]
    if all(each == 0 for each in behind):
        return made
    none = [0] * len(planes)
    return padded(graph, made, [0] * len(shape), [*none, *behind], shape)


def _averages(inside: Size, outside: Size) -> np.ndarray:
    """Return the matrix of adaptive average pooling of one dimension, [outside, inside]."""
    if not isinstance(inside, int) or not isinstance(outside, int):
        raise NotLowered("adaptive pooling of a size that varies")
    matrix = np.zeros((outside, inside))
    for i in range(outside):
        first, end = i * inside // outside, -(-(i + 1) * inside // outside)
        matrix[i, first:end] = 1 / (end - first)
    return matrix


def _multiplied(graph: OnnxGraph, x: Value, dim: int, matrix: np.ndarray) -> Value:
    """Return the product of a matrix and one dimension of a tensor."""
    last = [*(i for i in range(x.rank) if i != dim), dim]
    moved = graph.transpose(x, last)
    shape = (*moved.shape[:-1], matrix.shape[0])
    weights = graph.constant(matrix.T, x.dtype)
    made = graph.value("MatMul", moved, weights, shape=shape, dtype=x.dtype)
    return graph.transpose(made, [last.index(i) for i in range(x.rank)])


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def _adaptive_avg_pool(graph: OnnxGraph, node: fx.Node, x: Value, size: list[Size]) -> Value:
    """Lower _adaptive_avg_pool to ReduceMean, or a product with a matrix for each dimension."""
    count = len(size)
    if all(each == 1 for each in size):
        return graph.reduce("ReduceMean", x, range(x.rank - count, x.rank), keep=True)
    for dim in range(x.rank - count, x.rank):
        x = _multiplied(graph, x, dim, _averages(x.shape[dim], result(node).shape[dim]))
    return x


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def _adaptive_avg_pool_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, x: Value
) -> Value:
    """Lower _adaptive_avg_pool_backward to Expand, or products with the transposed matrices."""
    count = 2 if node.target is aten._adaptive_avg_pool2d_backward.default else 3
    if all(each == 1 for each in gradient.shape[-count:]):
        number = graph.scalar(product(x.shape[-count:]), x.dtype)
        return graph.expand(graph.binary("Div", gradient, number), x.shape)
    for dim in range(x.rank - count, x.rank):
        matrix = _averages(x.shape[dim], gradient.shape[dim]).T
        gradient = _multiplied(graph, gradient, dim, matrix)
    return gradient
