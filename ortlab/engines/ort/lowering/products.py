"""Rules for matrix products. Transposed operands are read where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    MICROSOFT,
    NotLowered,
    Number,
    OnnxGraph,
    Size,
    Value,
    hints,
    lowers,
    result,
)

aten = torch.ops.aten

_LARGE: Final = 500_000_000
"""Products from which on a first matrix is transposed before, not within, a multiplication.

ORT transposes it anew for each block of columns. A weight's gradient of 3072 x 768 from 1024 rows
took 38 ms within, 32 ms with the smaller matrix and the result transposed, on two cores.
"""


def _is_turned(x: Value) -> bool:
    """Return True if a matrix is the transpose of one that is laid out by rows."""
    inner = x.merged or x
    return inner.transposed is not None and inner.transposed[1][-2] == inner.transposed[0].rank - 1


def _operand(graph: OnnxGraph, x: Value) -> tuple[Value, int]:
    """Return a matrix, or one whose transpose it is, and whether it is to be transposed.

    Where the matrix has to be laid out anew, whole rows are moved rather than single elements.
    """
    inner = x.merged or x
    if inner.transposed is None or not _is_turned(x):
        return x, 0
    source, order = inner.transposed
    turned = graph.transpose(source, (*order[:-2], order[-1], order[-2]))
    return graph.reshape(turned, (*x.shape[:-2], x.shape[-1], x.shape[-2])), 1


@lowers(aten.mm.default)
def _mm(graph: OnnxGraph, node: fx.Node, one: Value, other: Value) -> Value:
    """Lower mm to Gemm, or MatMul of integers."""
    shape = result(node).shape
    if not one.dtype.is_floating_point:
        return graph.value("MatMul", one, other, shape=shape, dtype=one.dtype)
    (rows, inner), (_, columns) = map(hints, node.args)
    if rows * inner * columns < _LARGE or not _is_turned(one) or _is_turned(other):
        return _gemm(graph, shape, one, other)
    if rows <= columns:
        return graph.value("Gemm", one, other, shape=shape, dtype=one.dtype)
    turned = (graph.transpose(each, [1, 0]) for each in (other, one))
    made = graph.value("Gemm", *turned, shape=shape[::-1], dtype=one.dtype)
    return graph.transpose(made, [1, 0])


@lowers(aten.addmm.default)
def _addmm(
    graph: OnnxGraph,
    node: fx.Node,
    bias: Value,
    one: Value,
    other: Value,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Value:
    """Lower addmm to Gemm."""
    if not one.dtype.is_floating_point:
        raise NotLowered("addmm of integers")
    return _gemm(graph, result(node).shape, one, other, bias, beta, alpha)


def _gemm(
    graph: OnnxGraph,
    shape: Sequence[Size],
    one: Value,
    other: Value,
    bias: Value | None = None,
    beta: Number = 1,
    alpha: Number = 1,
) -> Value:
    (left, turn_left), (right, turn_right) = _operand(graph, one), _operand(graph, other)
    return graph.value(
        "Gemm",
        left,
        right,
        bias,
        shape=shape,
        dtype=one.dtype,
        transA=turn_left,
        transB=turn_right,
        alpha=float(alpha),
        beta=float(beta),
    )


@lowers(aten.bmm.default)
def _bmm(graph: OnnxGraph, node: fx.Node, one: Value, other: Value) -> Value:
    """Lower bmm to MatMul, or FusedMatMul with transposed operands."""
    return _matmul(graph, node, one, other, 1)


@lowers(aten.baddbmm.default)
def _baddbmm(
    graph: OnnxGraph,
    node: fx.Node,
    bias: Value,
    one: Value,
    other: Value,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Value:
    """Lower baddbmm to MatMul, Add; with beta=0 the bias is ignored, even if it is NaN."""
    made = _matmul(graph, node, one, other, alpha)
    if beta == 0:
        return made
    return graph.binary("Add", made, bias if beta == 1 else graph.binary("Mul", bias, beta))


def _matmul(graph: OnnxGraph, node: fx.Node, one: Value, other: Value, alpha: Number) -> Value:
    made = result(node)
    if one.dtype is torch.float32:
        (left, turn_left), (right, turn_right) = _operand(graph, one), _operand(graph, other)
        if turn_left or turn_right or alpha != 1:
            return graph.value(
                "FusedMatMul",
                left,
                right,
                shape=made.shape,
                dtype=one.dtype,
                domain=MICROSOFT,
                transA=turn_left,
                transB=turn_right,
                alpha=float(alpha),
            )
    product = graph.value("MatMul", one, other, shape=made.shape, dtype=one.dtype)
    return product if alpha == 1 else graph.binary("Mul", product, alpha)


@lowers(aten.mv.default)
def _mv(graph: OnnxGraph, node: fx.Node, matrix: Value, vector: Value) -> Value:
    """Lower mv to Gemm, or MatMul, with a matrix of one column.

    Not with the vector itself: ORT fuses a transpose before MatMul into FusedMatMul, which reads a
    transposed matrix wrongly if the other operand is a vector (onnxruntime 1.19.2 and 1.32).
    """
    column = graph.reshape(vector, [*vector.shape, 1])
    shape = (*result(node).shape, 1)
    if matrix.dtype.is_floating_point:
        made = _gemm(graph, shape, matrix, column)
    else:
        made = graph.value("MatMul", matrix, column, shape=shape, dtype=matrix.dtype)
    return graph.reshape(made, shape[:-1])


@lowers(aten.dot.default)
def _dot(graph: OnnxGraph, node: fx.Node, one: Value, other: Value) -> Value:
    """Lower dot to Mul, ReduceSum."""
    return graph.reduce("ReduceSum", graph.binary("Mul", one, other), None)


@lowers(aten._trilinear.default)
def _trilinear(
    graph: OnnxGraph,
    node: fx.Node,
    one: Value,
    two: Value,
    three: Value,
    expand_one: list[int],
    expand_two: list[int],
    expand_three: list[int],
    summed: list[int],
    unroll_dim: int = 1,
) -> Value:
    """Lower _trilinear, of nn.Bilinear, to Reshape, Mul, ReduceSum."""
    wide = []
    for x, dims in ((one, expand_one), (two, expand_two), (three, expand_three)):
        shape = list(x.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        wide.append(graph.reshape(x, shape))
    whole = graph.binary("Mul", graph.binary("Mul", wide[0], wide[1]), wide[2])
    return graph.reduce("ReduceSum", whole, summed) if summed else whole
