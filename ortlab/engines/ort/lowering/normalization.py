"""Rules for softmax, the normalizations and their gradients."""

from __future__ import annotations

import math

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NotLowered,
    Number,
    OnnxGraph,
    Size,
    Value,
    lowers,
    product,
    result,
)

aten = torch.ops.aten
Results = list[Value | None]


@lowers(aten._softmax.default)
def _softmax(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, _: bool) -> Value:
    """Lower _softmax to Softmax."""
    if x.rank == 0:
        return graph.scalar(1, x.dtype)
    return graph.unary("Softmax", x, axis=dim % x.rank)


@lowers(aten._safe_softmax.default)
def _safe_softmax(
    graph: OnnxGraph, node: fx.Node, x: Value, dim: int, dtype: torch.dtype | None = None
) -> Value:
    """Lower _safe_softmax to Softmax, and zeros for rows that are masked everywhere."""
    x = graph.cast(x, result(node).dtype)
    largest = graph.reduce("ReduceMax", x, [dim], keep=True)
    masked = graph.compare("Equal", largest, -math.inf)
    return graph.where(masked, 0, graph.unary("Softmax", x, axis=dim % x.rank))


@lowers(aten._log_softmax.default)
def _log_softmax(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, _: bool) -> Value:
    """Lower _log_softmax to LogSoftmax."""
    if x.rank == 0:
        return graph.scalar(0, x.dtype)
    return graph.unary("LogSoftmax", x, axis=dim % x.rank)


@lowers(aten._softmax_backward_data.default)
def _softmax_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, y: Value, dim: int, _: torch.dtype
) -> Value:
    """Lower _softmax_backward_data to y (g - sum(g y))."""
    weighted = graph.binary("Mul", gradient, y)
    total = graph.reduce("ReduceSum", weighted, [dim], keep=True)
    return graph.binary("Sub", weighted, graph.binary("Mul", y, total))


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, y: Value, dim: int, _: torch.dtype
) -> Value:
    """Lower _log_softmax_backward_data to g - exp(y) sum(g)."""
    total = graph.reduce("ReduceSum", gradient, [dim], keep=True)
    return graph.binary("Sub", gradient, graph.binary("Mul", graph.unary("Exp", y), total))


@lowers(aten.native_layer_norm.default)
def _layer_norm(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    normalized: list[Size],
    weight: Value | None,
    bias: Value | None,
    epsilon: float,
) -> Results:
    """Lower native_layer_norm to LayerNormalization with mean and inverse deviation."""
    axis = x.rank - len(normalized)
    if weight is None:
        weight = graph.full(normalized, 1, x.dtype)
    names = graph.node(
        "LayerNormalization", x, weight, bias, outputs=3, axis=axis, epsilon=float(epsilon)
    )
    shapes = (x.shape, result(node, 1).shape, result(node, 2).shape)
    return [Value(name, shape, x.dtype) for name, shape in zip(names, shapes, strict=True)]


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    normalized: list[Size],
    mean: Value,
    deviation: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: list[bool],
) -> Results:
    """Lower native_layer_norm_backward to its formula, with sums over the normalized dimensions."""
    axis = x.rank - len(normalized)
    inner, outer = list(range(axis, x.rank)), list(range(axis))
    scaled = _times(graph, graph.binary("Sub", x, mean), deviation)
    found: Results = [None, None, None]
    if wanted[0]:
        weighted = gradient if weight is None else _times(graph, gradient, weight)
        found[0] = _times(graph, _centered(graph, weighted, scaled, inner), deviation)
    if wanted[1]:
        found[1] = _summed(graph, _times(graph, gradient, scaled), outer)
    if wanted[2]:
        found[2] = _summed(graph, gradient, outer)
    return found


def _times(graph: OnnxGraph, one: Value, other: Value | Number) -> Value:
    return graph.binary("Mul", one, other)


def _summed(graph: OnnxGraph, x: Value, dims: list[int]) -> Value:
    return graph.reduce("ReduceSum", x, dims) if dims else x


def _centered(graph: OnnxGraph, gradient: Value, scaled: Value, dims: list[int]) -> Value:
    """Return g - mean(g) - x mean(g x) for a normalized x: its gradient times the deviation."""
    mean = graph.reduce("ReduceMean", gradient, dims, keep=True)
    along = graph.reduce("ReduceMean", _times(graph, gradient, scaled), dims, keep=True)
    return graph.binary("Sub", graph.binary("Sub", gradient, mean), _times(graph, scaled, along))


# Batch normalization


def _per_channel(graph: OnnxGraph, x: Value, rank: int) -> Value:
    """Return a vector of the channels in a shape that broadcasts."""
    return graph.reshape(x, [1, x.shape[0], *[1] * (rank - 2)])


def _inverse_deviation(graph: OnnxGraph, variance: Value, epsilon: float) -> Value:
    return graph.unary("Reciprocal", graph.unary("Sqrt", graph.binary("Add", variance, epsilon)))


@lowers(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Results:
    """Lower _native_batch_norm_legit_functional to its formula; returns the new statistics last."""
    if not training:
        assert mean is not None
        assert variance is not None
        y = _with_statistics(graph, x, weight, bias, mean, variance, epsilon)
        nothing = graph.full([0], 0, x.dtype)
        return [y, nothing, nothing, mean, variance]
    dims = [0, *range(2, x.rank)]
    channels = [x.shape[1]]
    batch_mean = graph.reduce("ReduceMean", x, dims, keep=True)
    apart = graph.binary("Sub", x, batch_mean)
    batch_variance = graph.reduce("ReduceMean", _times(graph, apart, apart), dims, keep=True)
    inverse = _inverse_deviation(graph, batch_variance, epsilon)
    factor = (
        inverse if weight is None else _times(graph, inverse, _per_channel(graph, weight, x.rank))
    )
    y = _times(graph, apart, factor)
    if bias is not None:
        y = graph.binary("Add", y, _per_channel(graph, bias, x.rank))
    flat_mean, flat_inverse = graph.reshape(batch_mean, channels), graph.reshape(inverse, channels)
    found: Results = [y, flat_mean, flat_inverse, None, None]
    if mean is not None and variance is not None:
        # Torch's running variance is that of a sample: divided by n - 1.
        count = graph.scalar(product(x.shape[i] for i in dims), x.dtype)
        unbiased = graph.binary("Div", count, graph.binary("Sub", count, 1))
        sample = _times(graph, graph.reshape(batch_variance, channels), unbiased)
        found[3] = _moved(graph, mean, flat_mean, momentum)
        found[4] = _moved(graph, variance, sample, momentum)
    return found


def _moved(graph: OnnxGraph, average: Value, value: Value, momentum: float) -> Value:
    kept = _times(graph, average, 1 - momentum)
    return graph.binary("Add", kept, _times(graph, value, momentum))


def _with_statistics(
    graph: OnnxGraph,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    epsilon: float,
) -> Value:
    """Return the batch normalization with given statistics: x times a factor plus a term."""
    factor = _inverse_deviation(graph, variance, epsilon)
    if weight is not None:
        factor = _times(graph, factor, weight)
    term = graph.unary("Neg", _times(graph, mean, factor))
    if bias is not None:
        term = graph.binary("Add", term, bias)
    scaled = _times(graph, x, _per_channel(graph, factor, x.rank))
    return graph.binary("Add", scaled, _per_channel(graph, term, x.rank))


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_in_evaluation(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    momentum: float,
    epsilon: float,
) -> Results:
    """Lower _native_batch_norm_legit_no_training to Mul, Add with the running statistics."""
    nothing = graph.full([0], 0, x.dtype)
    return [
        _with_statistics(graph, x, weight, bias, mean, variance, epsilon), nothing, nothing
    ]  # fmt: skip


@lowers(aten._native_batch_norm_legit.no_stats)
def _batch_norm_without_statistics(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Results:
    """Lower _native_batch_norm_legit.no_stats, as in instance_norm to as with statistics."""
    made = _batch_norm(graph, node, x, weight, bias, None, None, True, momentum, epsilon)
    return made[:3]


@lowers(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_variance: Value | None,
    mean: Value | None,
    inverse: Value | None,
    training: bool,
    epsilon: float,
    wanted: list[bool],
) -> Results:
    """Lower native_batch_norm_backward to its formula, with sums over all but channels."""
    dims, channels = [0, *range(2, x.rank)], [x.shape[1]]
    if not training:
        assert running_mean is not None
        assert running_variance is not None
        mean = running_mean
        inverse = _inverse_deviation(graph, running_variance, epsilon)
    if mean is None or inverse is None:
        raise NotLowered("batch normalization without the batch's statistics")
    factor = _per_channel(graph, inverse, x.rank)
    scaled = _times(graph, graph.binary("Sub", x, _per_channel(graph, mean, x.rank)), factor)
    total = graph.reduce("ReduceSum", gradient, dims, keep=True)
    along = graph.reduce("ReduceSum", _times(graph, gradient, scaled), dims, keep=True)
    found: Results = [None, graph.reshape(along, channels), graph.reshape(total, channels)]
    if wanted[0]:
        if weight is not None:
            factor = _times(graph, factor, _per_channel(graph, weight, x.rank))
        centered = gradient
        if training:
            count = graph.scalar(product(x.shape[i] for i in dims), x.dtype)
            centered = graph.binary("Sub", gradient, graph.binary("Div", total, count))
            part = _times(graph, scaled, graph.binary("Div", along, count))
            centered = graph.binary("Sub", centered, part)
        found[0] = _times(graph, centered, factor)
    return [value if want else None for value, want in zip(found, wanted, strict=True)]


# Group normalization


@lowers(aten.native_group_norm.default)
def _group_norm(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    rows: Size,
    channels: Size,
    positions: Size,
    groups: int,
    epsilon: float,
) -> Results:
    """Lower native_group_norm to its formula over [rows, groups, the rest]."""
    shape = (rows, groups, product([channels // groups, positions]))
    grouped = graph.reshape(x, shape)
    mean = graph.reduce("ReduceMean", grouped, [2], keep=True)
    apart = graph.binary("Sub", grouped, mean)
    variance = graph.reduce("ReduceMean", _times(graph, apart, apart), [2], keep=True)
    inverse = _inverse_deviation(graph, variance, epsilon)
    y = graph.reshape(_times(graph, apart, inverse), x.shape)
    if weight is not None:
        y = _times(graph, y, _per_channel(graph, weight, x.rank))
    if bias is not None:
        y = graph.binary("Add", y, _per_channel(graph, bias, x.rank))
    flat = (rows, groups)
    return [y, graph.reshape(mean, flat), graph.reshape(inverse, flat)]


@lowers(aten.native_group_norm_backward.default)
def _group_norm_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    mean: Value,
    inverse: Value,
    weight: Value | None,
    rows: Size,
    channels: Size,
    positions: Size,
    groups: int,
    wanted: list[bool],
) -> Results:
    """Lower native_group_norm_backward to its formula over [rows, groups, channels, positions]."""
    shape = (rows, groups, channels // groups, positions)
    per_group = (rows, groups, 1, 1)
    mean, inverse = graph.reshape(mean, per_group), graph.reshape(inverse, per_group)
    grouped = graph.reshape(gradient, shape)
    scaled = _times(graph, graph.binary("Sub", graph.reshape(x, shape), mean), inverse)
    found: Results = [None, None, None]
    if wanted[0]:
        weighted = grouped
        if weight is not None:
            per_channel = graph.reshape(weight, (1, groups, channels // groups, 1))
            weighted = _times(graph, grouped, per_channel)
        centered = _times(graph, _centered(graph, weighted, scaled, [2, 3]), inverse)
        found[0] = graph.reshape(centered, x.shape)
    if wanted[1]:
        along = graph.reduce("ReduceSum", _times(graph, grouped, scaled), [0, 3])
        found[1] = graph.reshape(along, [channels])
    if wanted[2]:
        found[2] = graph.reshape(graph.reduce("ReduceSum", grouped, [0, 3]), [channels])
    return found


# Weight normalization


@lowers(aten._weight_norm_interface.default)
def _weight_norm(graph: OnnxGraph, node: fx.Node, v: Value, g: Value, dim: int = 0) -> Results:
    """Lower _weight_norm_interface to v g / |v|."""
    dims = [i for i in range(v.rank) if i != dim % v.rank]
    norm = graph.unary("Sqrt", graph.reduce("ReduceSum", _times(graph, v, v), dims, keep=True))
    return [_times(graph, v, graph.binary("Div", g, norm)), norm]


@lowers(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, v: Value, g: Value, norm: Value, dim: int
) -> Results:
    """Lower _weight_norm_interface_backward to its formula."""
    dims = [i for i in range(v.rank) if i != dim % v.rank]
    along = graph.reduce("ReduceSum", _times(graph, gradient, v), dims, keep=True)
    of_g = graph.binary("Div", along, norm)
    back = _times(graph, v, graph.binary("Div", of_g, norm))
    return [
        _times(graph, graph.binary("Sub", gradient, back), graph.binary("Div", g, norm)), of_g
    ]  # fmt: skip
