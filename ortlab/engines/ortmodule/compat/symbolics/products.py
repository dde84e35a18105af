"""Export rules for products with vectors, and for sums of products (einsum).

A vector enters MatMul as a matrix with one row or column, and products of two vectors are written
as sums: the gradient that ORT 1.19 builds for MatMul treats a 1-D operand as a 2-D one
(`MatMulGrad` in orttraining/core/graph/gradient_builder.cc).
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from torch.onnx import symbolic_helper

from ortlab.engines.ortmodule.compat.symbolics.builder import rule, stock
from ortlab.engines.ortmodule.compat.symbolics.run_by_torch import EXPORTS
from ortlab.engines.torchscript.nodes import Graph, Value, constant, dtype, literal, missing, rank

_MOST_OPERANDS = 3
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


@rule("einsum", "no gradient for Einsum; result without dimensions: AssertionError")
def _einsum(g: Graph, equation: Value, operands: Value, path: Value = None) -> Value:
    tensors = symbolic_helper._unpack_list(operands)
    inputs, arrow, output = literal(equation, "s").replace(" ", "").partition("->")
    terms = inputs.split(",")
    if arrow and not output and len(terms) == 2 and terms[0] == terms[1]:
        letters = terms[0]
        if "." not in letters and len(set(letters)) == len(letters):
            return g.op("ReduceSum", g.op("Mul", *tensors), keepdims_i=0)
    if output:
        found = stock("einsum")(g, equation, operands, path)
        if found.node().kind() != "onnx::Einsum":
            return found
    return _einsum_of(g, terms, output if arrow else None, tensors)


def _einsum_of(
    g: Graph, terms: Sequence[str], output: str | None, tensors: Sequence[Value]
) -> Value:
    """Let torch compute an einsum, whose output is by default one of the letters that occur once.

    ORT assumes that the result has the rank of the first operand, hence its sizes are written.
    """
    if len(tensors) > _MOST_OPERANDS:
        raise RuntimeError(f"einsum of more than {_MOST_OPERANDS} tensors has no gradient in ORT")
    if output is None:
        once = [each for each in "".join(terms) if "".join(terms).count(each) == 1]
        output = "..." * ("." in "".join(terms)) + "".join(sorted(set(once) - {"."}))
    unused = [each for each in string.ascii_letters if each not in "".join(terms)]
    left_out = [
        rank(x) - len(term.replace("...", "")) if "." in term else 0
        for term, x in zip(terms, tensors, strict=True)
    ]
    spread = "".join(unused[: max(left_out)])
    letters = [
        term.replace("...", spread[len(spread) - count :])
        for term, count in zip(terms, left_out, strict=True)
    ]
    output = output.replace("...", spread)
    equation = [ord(each) for each in f"{','.join(letters)}->{output}"]
    found: Value = EXPORTS["einsum_of"](g, *tensors, constant(g, equation))
    if not output:
        return found
    sizes: dict[str, Value] = {}
    for term, x in zip(letters, tensors, strict=True):
        shape = g.op("Shape", x)
        for axis, letter in enumerate(term):
            size = g.op("Gather", shape, constant(g, [axis]), axis_i=0)
            # One of the sizes of a letter of the ellipsis may be 1, which is broadcast.
            known = sizes.get(letter)
            sizes[letter] = size if known is None else g.op("Max", known, size)
    return g.op("Reshape", found, g.op("Concat", *(sizes[each] for each in output), axis_i=0))


@rule("tensordot", "no gradient for Einsum")
def _tensordot(g: Graph, x: Value, y: Value, of_x: Value, of_y: Value, *_out: Value) -> Value:
    letters = iter(string.ascii_letters)
    first, second = ([next(letters) for _ in range(rank(each))] for each in (x, y))
    pairs = zip(literal(of_x, "is"), literal(of_y, "is"), strict=True)
    for i, j in pairs:
        second[j] = first[i]
    output = [each for each in (*first, *second) if (each in first) != (each in second)]
    return _einsum_of(g, ["".join(first), "".join(second)], "".join(output), [x, y])


@rule("bilinear", "no rule")
def _bilinear(g: Graph, x: Value, y: Value, weight: Value, bias: Value) -> Value:
    found = _einsum_of(g, ["...a", "bac", "...c"], "...b", [x, weight, y])
    return found if missing(bias) else g.op("Add", found, bias)
