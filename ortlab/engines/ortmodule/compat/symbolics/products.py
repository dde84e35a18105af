"""Export rules for products with vectors.

A vector enters MatMul as a matrix with one row or column, and products of two vectors are written
as sums: the gradient that ORT 1.19 builds for MatMul treats a 1-D operand as a 2-D one
(`MatMulGrad` in orttraining/core/graph/gradient_builder.cc).
"""

from __future__ import annotations

from torch.onnx import symbolic_helper

from ortlab.engines.ortmodule.compat.symbolics.builder import rule, stock
from ortlab.engines.torchscript.nodes import Graph, Value, constant, dtype, literal, missing

_SYMPTOM = "with a vector: wrong gradient, or mismatched shapes in backward"


def _rank(value: Value) -> int | None:
    found: int | None = symbolic_helper._get_tensor_rank(value)
    return found


def _product(g: Graph, x: Value, y: Value) -> Value:
    """Write ``x @ y``."""
    ranks = _rank(x), _rank(y)
    if ranks == (1, 1):
        return g.op("ReduceSum", g.op("Mul", x, y), keepdims_i=0)
    if ranks[0] == 1:
        row = g.op("Unsqueeze", x, constant(g, [0]))
        return g.op("Squeeze", g.op("MatMul", row, y), constant(g, [-2]))
    if ranks[1] == 1:
        column = g.op("Unsqueeze", y, constant(g, [1]))
        return g.op("Squeeze", g.op("MatMul", x, column), constant(g, [-1]))
    return stock("matmul")(g, x, y)


for _operator in ("matmul", "mv", "dot"):
    rule(_operator, _SYMPTOM)(_product)
rule("vdot", "no rule")(_product)


@rule("linear", _SYMPTOM)
def _linear(g: Graph, x: Value, weight: Value, bias: Value) -> Value:
    if _rank(weight) == 1:
        found = _product(g, x, weight)
        return found if missing(bias) else g.op("Add", found, bias)
    if _rank(x) == 1:
        row, first = g.op("Unsqueeze", x, constant(g, [0])), constant(g, [0])
        return g.op("Squeeze", stock("linear")(g, row, weight, bias), first)
    return stock("linear")(g, x, weight, bias)


@rule("inner", "no rule")
def _inner(g: Graph, x: Value, y: Value) -> Value:
    if _rank(x) == 1:
        x, y = y, x
    if _rank(y) == 2:
        y = g.op("Transpose", y, perm_i=[1, 0])
    elif _rank(y) != 1:
        raise RuntimeError("inner does not support tensors of more than 2 dimensions; use einsum")
    return _product(g, x, y)


@rule("addmv", "no rule")
def _addmv(g: Graph, x: Value, matrix: Value, vector: Value, beta: Value, alpha: Value) -> Value:
    def times(value: Value, factor: Value) -> Value:
        given = literal(factor, "f")
        return value if given == 1 else g.op("Mul", value, constant(g, given, dtype(value)))

    return g.op("Add", times(x, beta), times(_product(g, matrix, vector), alpha))


@rule("outer", "no gradient for Einsum")
def _outer(g: Graph, x: Value, y: Value) -> Value:
    column, row = (g.op("Unsqueeze", v, constant(g, [i])) for v, i in ((x, 1), (y, 0)))
    return g.op("Mul", column, row)


@rule("einsum", "result without dimensions: AssertionError")
def _einsum(g: Graph, equation: Value, operands: Value, path: Value = None) -> Value:
    inputs, _, output = literal(equation, "s").replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if output or left != right or len(set(left)) < len(left):
        return stock("einsum")(g, equation, operands, path)
    x, y = symbolic_helper._unpack_list(operands)
    return g.op("ReduceSum", g.op("Mul", x, y), keepdims_i=0)
