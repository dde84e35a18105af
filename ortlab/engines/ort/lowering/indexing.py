"""Rules for embeddings, indexing, gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NotLowered,
    Number,
    OnnxGraph,
    Size,
    Value,
    broadcast,
    lowers,
    product,
    result,
)

aten = torch.ops.aten


@lowers(aten.embedding.default)
def _embedding(graph: OnnxGraph, node: fx.Node, weight: Value, at: Value, *_: Any) -> Value:
    """Lower embedding to Gather."""
    return graph.value("Gather", weight, at, shape=result(node).shape, dtype=weight.dtype, axis=0)


def _put_rows(graph: OnnxGraph, x: Value, at: Value, values: Value) -> Value:
    """Return ScatterND without a reduction, for indices that differ from each other."""
    return graph.value("ScatterND", x, at, values, shape=x.shape, dtype=x.dtype)


def _add_rows(graph: OnnxGraph, x: Value, at: Value, values: Value) -> Value:
    """Return `x` with `values` added at `at`, [*rows, number of leading dimensions of `x`].

    ScatterElements adds one after the other. ScatterND with a reduction adds in several threads at
    once, and loses some where indices are equal (onnxruntime#18048, seen in 1.19.2 and 1.32).
    """
    count = at.shape[-1]
    assert isinstance(count, int)
    leading, rest = x.shape[:count], product(x.shape[count:])
    rows = product(at.shape[:-1])
    sizes = graph.sizes(leading)
    counted = graph.where(graph.compare("Less", at, 0), graph.binary("Add", at, sizes), at)
    strides = graph.sizes([product(leading[i + 1 :]) for i in range(count)])
    places = graph.reduce("ReduceSum", graph.binary("Mul", counted, strides), [-1])
    flat = graph.reshape(x, [product(leading), rest])
    made = graph.value(
        "ScatterElements",
        flat,
        graph.expand(graph.reshape(places, [rows, 1]), [rows, rest]),
        graph.reshape(values, [rows, rest]),
        shape=flat.shape,
        dtype=x.dtype,
        axis=0,
        reduction="add",
    )
    return graph.reshape(made, x.shape)


@lowers(aten.gather.default)
def _gather(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, at: Value, **_: Any) -> Value:
    """Lower gather to GatherElements."""
    if x.rank == 0 or at.rank == 0:
        raise NotLowered("gather of a scalar")
    return graph.value("GatherElements", x, at, shape=at.shape, dtype=x.dtype, axis=dim % x.rank)


@lowers(aten.index_select.default)
def _index_select(graph: OnnxGraph, node: fx.Node, x: Value, dim: int, at: Value) -> Value:
    """Lower index_select to Gather."""
    if x.rank == 0:
        return x
    at = graph.reshape(at, [product(at.shape)])
    return graph.value("Gather", x, at, shape=result(node).shape, dtype=x.dtype, axis=dim % x.rank)


_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _scatter_elements(
    graph: OnnxGraph, x: Value, dim: int, at: Value, source: Value | Number, reduction: str
) -> Value:
    """Return ScatterElements; torch reads as much of the source as there are indices."""
    if x.rank == 0:
        raise NotLowered("scatter into a scalar")
    if not isinstance(source, Value):
        source = graph.full(at.shape, source, x.dtype)
    elif source.shape != at.shape:
        source = graph.slice(source, range(at.rank), [0] * at.rank, at.shape, at.shape)
    return graph.value(
        "ScatterElements",
        x,
        at,
        source,
        shape=x.shape,
        dtype=x.dtype,
        axis=dim % x.rank,
        reduction=reduction,
    )


@lowers(aten.scatter.src, aten.scatter.value)
def _scatter(
    graph: OnnxGraph, node: fx.Node, x: Value, dim: int, at: Value, source: Value | Number
) -> Value:
    """Lower scatter to ScatterElements."""
    return _scatter_elements(graph, x, dim, at, source, "none")


@lowers(aten.scatter_add.default)
def _scatter_add(
    graph: OnnxGraph, node: fx.Node, x: Value, dim: int, at: Value, source: Value
) -> Value:
    """Lower scatter_add to ScatterElements with addition."""
    return _scatter_elements(graph, x, dim, at, source, "add")


@lowers(aten.scatter_reduce.two)
def _scatter_reduce(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    dim: int,
    at: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """Lower scatter_reduce to ScatterElements with the reduction."""
    if reduce not in _REDUCTIONS or not include_self:
        raise NotLowered(f"scatter_reduce with {reduce} or include_self=False")
    return _scatter_elements(graph, x, dim, at, source, _REDUCTIONS[reduce])


@lowers(aten.nonzero.default)
def _nonzero(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower nonzero to NonZero, Transpose."""
    count, rank = result(node).shape
    if rank == 0:
        raise NotLowered("nonzero of a scalar")
    found = graph.value("NonZero", x, shape=[rank, count], dtype=torch.int64)
    return graph.transpose(found, [1, 0])


# Indexing with tensors


def _chosen(graph: OnnxGraph, mask: Value) -> tuple[Value, sympy.Symbol]:
    """Return the places of a mask's elements, [rank of the mask, count], and their count."""
    if mask.rank == 0:
        raise NotLowered("a mask that is a scalar")
    count = sympy.Dummy("count", integer=True, nonnegative=True)
    places = graph.value("NonZero", mask, shape=[mask.rank, count], dtype=torch.int64)
    graph.bind_shape(places)
    return places, count


def _by_dimension(
    graph: OnnxGraph, x: Value, indices: Sequence[Value | None]
) -> list[Value | None]:
    """Return an index of integers for each dimension; a mask has one for each of its own."""
    found: list[Value | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(None if index is None else graph.cast(index, torch.int64))
            continue
        places, count = _chosen(graph, graph.cast(index, torch.bool))
        names = graph.node(
            "Split", places, graph.sizes([1] * index.rank), outputs=index.rank, axis=0
        )
        found += [graph.reshape(Value(n, (1, count), torch.int64), [count]) for n in names]
    return found + [None] * (x.rank - len(found))


class _Places:
    """The elements that a list of indices names, for GatherND and ScatterND.

    Attributes:
        at: Indices of shape [*shape, number of indexed dimensions].
        shape: Shape that the indices broadcast to.
        order: Dimensions of the tensor, the indexed ones first.
        rest: Dimensions that are not indexed.
        before: Number of dimensions of the result before those of the indices.
    """

    def __init__(self, graph: OnnxGraph, x: Value, indices: Sequence[Value | None]) -> None:
        dims = [i for i, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        if not given:
            raise NotLowered("an index without a tensor")
        self.shape: tuple[Size, ...] = ()
        for index in given:
            self.shape = broadcast(self.shape, index.shape)
        columns = [
            graph.reshape(graph.expand(index, self.shape), [*self.shape, 1]) for index in given
        ]
        shape = [*self.shape, len(given)]
        self.at = (
            graph.value("Concat", *columns, shape=shape, dtype=torch.int64, axis=-1)
            if len(columns) > 1
            else columns[0]
        )
        self.rest = [i for i in range(x.rank) if i not in dims]
        self.order = [*dims, *self.rest]
        neighbors = dims == list(range(dims[0], dims[-1] + 1))
        self.before = dims[0] if neighbors else 0

    def arranged(self, graph: OnnxGraph, value: Value) -> Value:
        """Move the dimensions of the indices from the front to their place in torch's result."""
        count = len(self.shape)
        order = [count + i for i in range(self.before)]
        order += [*range(count), *range(count + self.before, value.rank)]
        return graph.transpose(value, order)

    def in_front(self, graph: OnnxGraph, value: Value) -> Value:
        """Undo `arranged`."""
        count = len(self.shape)
        order = list(range(self.before, self.before + count))
        order += [*range(self.before), *range(self.before + count, value.rank)]
        return graph.transpose(value, order)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(graph: OnnxGraph, node: fx.Node, x: Value, indices: list[Value | None]) -> Value:
    """Lower index to Gather along one dimension, else GatherND; masks through NonZero."""
    shape = result(node).shape
    found = _by_dimension(graph, x, indices)
    dims = [i for i, index in enumerate(found) if index is not None]
    if len(dims) == 1:
        at = found[dims[0]]
        return graph.value("Gather", x, at, shape=shape, dtype=x.dtype, axis=dims[0])
    places = _Places(graph, x, found)
    taken = [*places.shape, *(x.shape[i] for i in places.rest)]
    made = graph.value(
        "GatherND", graph.transpose(x, places.order), places.at, shape=taken, dtype=x.dtype
    )
    return Value(places.arranged(graph, made).name, shape, x.dtype)


@lowers(
    aten.index_put.default,
    aten._unsafe_index_put.default,
)
def _index_put(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    indices: list[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """Lower index_put to ScatterND; a scalar at a mask -> Where."""
    values = graph.cast(values, x.dtype)
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and mask.dtype is torch.bool and all(n == 1 for n in values.shape):
        wide = graph.reshape(mask, [*mask.shape, *[1] * (x.rank - mask.rank)])
        scalar = graph.reshape(values, [])
        return graph.where(wide, graph.binary("Add", x, scalar) if accumulate else scalar, x)
    places = _Places(graph, x, _by_dimension(graph, x, indices))
    rest = [x.shape[i] for i in places.rest]
    shape = [*rest[: places.before], *places.shape, *rest[places.before :]]
    wide = places.in_front(graph, graph.expand(values, shape))
    target = graph.transpose(x, places.order)
    put = _add_rows if accumulate else _put_rows
    made = put(graph, target, places.at, wide)
    return graph.transpose(made, [places.order.index(i) for i in range(x.rank)])


@lowers(aten.masked_select.default)
def _masked_select(graph: OnnxGraph, node: fx.Node, x: Value, mask: Value) -> Value:
    """Lower masked_select to NonZero, GatherND."""
    shape = broadcast(x.shape, mask.shape)
    wide, chosen = graph.expand(x, shape), graph.expand(mask, shape)
    at = graph.transpose(_chosen(graph, chosen)[0], [1, 0])
    return graph.value("GatherND", wide, at, shape=result(node).shape, dtype=x.dtype)


@lowers(aten.masked_scatter.default)
def _masked_scatter(graph: OnnxGraph, node: fx.Node, x: Value, mask: Value, source: Value) -> Value:
    """Lower masked_scatter to NonZero, ScatterND of as many elements of the source."""
    places, count = _chosen(graph, graph.expand(mask, x.shape))
    flat = graph.reshape(source, [product(source.shape)])
    values = graph.slice(flat, [0], [0], [count], [count])
    return _put_rows(graph, x, graph.transpose(places, [1, 0]), values)
