"""Rules for sums, extrema, scans and sorting."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NotLowered,
    Number,
    OnnxGraph,
    Value,
    lowers,
    product,
    result,
)

aten = torch.ops.aten
prims = torch.ops.prims


def _dims(dims: int | list[int] | None) -> list[int] | None:
    return [dims] if isinstance(dims, int) else dims


def _reduction_rule(operator: str, *overloads: Any) -> None:
    @lowers(*overloads)
    def rule(
        graph: OnnxGraph,
        node: fx.Node,
        x: Value,
        dims: int | list[int] | None = None,
        keep: bool = False,
        **_: Any,
    ) -> Value:
        """Lower sum, mean, amax, amin, prod to ReduceSum, ReduceMean, ReduceMax, ..."""
        return graph.reduce(operator, graph.cast(x, result(node).dtype), _dims(dims), keep=keep)


_reduction_rule("ReduceSum", aten.sum.dim_IntList, aten.sum.default)
_reduction_rule("ReduceMean", aten.mean.dim, aten.mean.default)
_reduction_rule("ReduceMax", aten.amax.default, aten.max.default)
_reduction_rule("ReduceMin", aten.amin.default, aten.min.default)
_reduction_rule("ReduceProd", aten.prod.dim_int, aten.prod.default)


@lowers(prims.var.default)
def _variance(
    graph: OnnxGraph, node: fx.Node, x: Value, dims: list[int], correction: float = 1
) -> Value:
    """Lower prims.var to the mean of squared differences, times n / (n - correction)."""
    apart = graph.binary("Sub", x, graph.reduce("ReduceMean", x, dims, keep=True))
    total = graph.reduce("ReduceSum", graph.binary("Mul", apart, apart), dims)
    count = graph.scalar(product(x.shape[i] for i in dims or range(x.rank)), x.dtype)
    return graph.binary(
        "Div", total, graph.binary("Max", graph.binary("Sub", count, correction), 0)
    )


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    dims: int | list[int] | None = None,
    keep: bool = False,
) -> Value:
    """Lower any to ReduceSum of integers, which without elements is 0; extrema are not."""
    numbers = graph.cast(graph.cast(x, torch.bool), torch.int32)
    return graph.cast(graph.reduce("ReduceSum", numbers, _dims(dims), keep=keep), torch.bool)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _all(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    dims: int | list[int] | None = None,
    keep: bool = False,
) -> Value:
    """Lower all to Not of whether any is false."""
    return _not(graph, _any(graph, node, _not(graph, graph.cast(x, torch.bool)), dims, keep))


def _not(graph: OnnxGraph, x: Value) -> Value:
    return graph.value("Not", x, shape=x.shape, dtype=torch.bool)


def _place(graph: OnnxGraph, operator: str, x: Value, dim: int | None, keep: bool) -> Value:
    """Return the index of the first extremum along a dimension, or in the flat tensor."""
    if dim is None:
        x = graph.reshape(x, [product(x.shape)])
    if x.rank == 0:
        return graph.constant(0)
    axis = (dim or 0) % x.rank
    shape = [1 if i == axis else n for i, n in enumerate(x.shape) if keep or i != axis]
    return graph.value(operator, x, shape=shape, dtype=torch.int64, axis=axis, keepdims=int(keep))


def _place_rule(operator: str, overload: Any) -> None:
    @lowers(overload)
    def rule(
        graph: OnnxGraph, node: fx.Node, x: Value, dim: int | None = None, keep: bool = False
    ) -> Value:
        """Lower argmax, argmin to ArgMax, ArgMin."""
        if dim is None and keep:
            return graph.reshape(_place(graph, operator, x, None, False), result(node).shape)
        return _place(graph, operator, x, dim, keep)


_place_rule("ArgMax", aten.argmax.default)
_place_rule("ArgMin", aten.argmin.default)


def _extremum_rule(kind: str, overload: Any) -> None:
    @lowers(overload)
    def rule(
        graph: OnnxGraph, node: fx.Node, x: Value, dim: int, keep: bool = False
    ) -> list[Value]:
        """Lower max, min along a dimension to ReduceMax and ArgMax, or ReduceMin and ArgMin."""
        value = graph.reduce(f"Reduce{kind}", x, [dim], keep=keep)
        return [value, _place(graph, f"Arg{kind}", x, dim, keep)]


_extremum_rule("Max", aten.max.dim)
_extremum_rule("Min", aten.min.dim)


@lowers(aten.cumsum.default)
def _cumsum(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, **_: Any) -> Value:
    """Lower cumsum to CumSum."""
    x = graph.cast(x, result(node).dtype)
    if x.rank == 0:
        return x
    axis = graph.constant(dim % x.rank)
    return graph.value("CumSum", x, axis, shape=x.shape, dtype=x.dtype)


@lowers(aten.topk.default)
def _topk(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    count: Number,
    dim: int = -1,
    largest: bool = True,
    ordered: bool = True,
) -> list[Value]:
    """Lower topk to TopK."""
    if x.rank == 0:
        raise NotLowered("topk of a scalar")
    return _ranked(graph, node, x, graph.sizes([count]), dim, largest)


@lowers(aten.sort.default, aten.sort.stable)
def _sort(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
) -> list[Value]:
    """Lower sort to TopK of all elements, which keeps the order of equal ones."""
    if x.rank == 0:
        return [x, graph.constant(0)]
    return _ranked(graph, node, x, graph.sizes([x.shape[dim % x.rank]]), dim, descending)


@lowers(aten.median.dim)
def _median(
    graph: OnnxGraph, node: fx.Node, x: Value, dim: int = -1, keep: bool = False
) -> list[Value]:
    """Lower median to the last of the smaller half that TopK returns, the lower one of two."""
    if x.rank == 0 or x.dtype.is_floating_point is False:
        raise NotLowered("the median of a scalar or of integers")
    axis = dim % x.rank
    size = x.shape[axis]
    if not isinstance(size, int):
        raise NotLowered("the median of a number of elements that varies")
    half = (size + 1) // 2
    names = graph.node("TopK", x, graph.sizes([half]), outputs=2, axis=axis, largest=0, sorted=1)
    last, shape = graph.constant(half - 1), result(node, 0).shape
    found = []
    for name, dtype in zip(names, (x.dtype, torch.int64), strict=True):
        ranked = Value(name, (*x.shape[:axis], half, *x.shape[axis + 1 :]), dtype)
        one = (*x.shape[:axis], *x.shape[axis + 1 :])
        taken = graph.value("Gather", ranked, last, shape=one, dtype=dtype, axis=axis)
        found.append(graph.reshape(taken, shape))
    return found


def _ranked(
    graph: OnnxGraph, node: fx.Node, x: Value, count: Value, dim: int, largest: bool
) -> list[Value]:
    shape, axis = result(node, 0).shape, dim % x.rank
    numbers = graph.cast(x, torch.int32) if x.dtype is torch.bool else x
    values, places = graph.node(
        "TopK", numbers, count, outputs=2, axis=axis, largest=int(largest), sorted=1
    )
    found = Value(values, shape, numbers.dtype)
    return [graph.cast(found, x.dtype), Value(places, shape, torch.int64)]
