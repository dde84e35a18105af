"""Rules for elementwise arithmetic, comparisons, logic and new tensors."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NUMPY_TYPES,
    NotLowered,
    Number,
    OnnxGraph,
    Value,
    carried,
    lowers,
    result,
)
from ortlab.engines.ort.lowering.views import progression

aten = torch.ops.aten
Operand: TypeAlias = "Value | Number"

# New tensors


@lowers(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def _full(graph: OnnxGraph, node: fx.Node, *arguments: Any, **_: Any) -> Value:
    """Lower full to ConstantOfShape."""
    made = result(node)
    return graph.full(made.shape, arguments[-1], made.dtype)


@lowers(aten.fill.Tensor)
def _fill(graph: OnnxGraph, node: fx.Node, x: Value, value: Value) -> Value:
    """Lower fill to Expand."""
    return graph.expand(graph.cast(value, x.dtype), x.shape)


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
    aten.zero.default,
)
def _zeros(graph: OnnxGraph, node: fx.Node, *_: Any, **__: Any) -> Value:
    """Lower zeros, empty to ConstantOfShape."""
    return graph.full(result(node).shape, 0, result(node).dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(graph: OnnxGraph, node: fx.Node, *_: Any, **__: Any) -> Value:
    """Lower ones to ConstantOfShape."""
    return graph.full(result(node).shape, 1, result(node).dtype)


@lowers(aten.scalar_tensor.default)
def _scalar_tensor(graph: OnnxGraph, node: fx.Node, number: Number, **_: Any) -> Value:
    """Lower scalar_tensor to a constant."""
    return graph.scalar(number, result(node).dtype)


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(graph: OnnxGraph, node: fx.Node, *arguments: Number, **_: Any) -> Value:
    """Lower arange to Range, or a constant."""
    made = result(node)
    start, end, step = (0, *arguments, 1) if len(arguments) == 1 else (*arguments, 1)[:3]
    if all(isinstance(each, int | float) for each in (start, end, step)):
        known = torch.arange(start, end, step, dtype=made.dtype)
        if isinstance(made.shape[0], int) and made.dtype in NUMPY_TYPES:
            return graph.constant(known.numpy(), made.dtype)
    if any(isinstance(each, float) for each in (start, end, step)):
        raise NotLowered("a range with a fraction")
    return graph.cast(progression(graph, start, step, made.shape[0]), made.dtype)


# Arithmetic


def _arithmetic(
    graph: OnnxGraph, operator: str, dtype: torch.dtype, one: Operand, other: Operand
) -> Value:
    if dtype is torch.bool:
        operator = {"Mul": "And", "Add": "Or"}.get(operator, "")
        if not operator:
            raise NotLowered("arithmetic on booleans")
    return graph.binary(operator, one, other, dtype=dtype)


def _binary_rule(operator: str, *overloads: Any) -> None:
    @lowers(*overloads)
    def rule(
        graph: OnnxGraph, node: fx.Node, one: Operand, other: Operand, alpha: Number = 1
    ) -> Value:
        """Lower add, sub, mul, div, maximum, minimum to Add, Sub, Mul, Div, Max, Min."""
        dtype = result(node).dtype
        if alpha != 1:
            other = _arithmetic(graph, "Mul", dtype, graph.scalar(other, dtype), alpha)
        return _arithmetic(graph, operator, dtype, one, other)


_binary_rule("Add", aten.add.Tensor, aten.add.Scalar)
_binary_rule("Sub", aten.sub.Tensor, aten.sub.Scalar)
_binary_rule("Mul", aten.mul.Tensor, aten.mul.Scalar)
_binary_rule("Div", aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
_binary_rule("Max", aten.maximum.default)
_binary_rule("Min", aten.minimum.default)


@lowers(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(graph: OnnxGraph, node: fx.Node, one: Value, other: Operand, alpha: Number = 1) -> Value:
    """Lower rsub to Sub."""
    dtype = result(node).dtype
    if alpha != 1:
        one = graph.binary("Mul", one, alpha, dtype=dtype)
    return graph.binary("Sub", other, one, dtype=dtype)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(graph: OnnxGraph, node: fx.Node, one: Value, other: Operand) -> Value:
    """Lower fmod to Mod with fmod=1."""
    return _remainder_of_trunc(graph, graph.cast(one, result(node).dtype), other)


def _remainder_of_trunc(graph: OnnxGraph, one: Value, other: Operand) -> Value:
    divisor = graph.scalar(other, one.dtype)
    made = graph.binary("Add", one, divisor)  # for the shape alone
    return graph.value("Mod", one, divisor, shape=made.shape, dtype=one.dtype, fmod=1)


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(graph: OnnxGraph, node: fx.Node, one: Operand, other: Operand) -> Value:
    """Lower remainder to Mod; for fractions Mod with fmod=1, moved to the divisor's sign."""
    made = result(node)
    left, right = graph.scalar(one, made.dtype), graph.scalar(other, made.dtype)
    if not made.dtype.is_floating_point:
        return graph.binary("Mod", left, right)
    rest = _remainder_of_trunc(graph, left, right)
    return graph.where(_has_other_sign(graph, rest, right), graph.binary("Add", rest, right), rest)


def _has_other_sign(graph: OnnxGraph, rest: Value, divisor: Value) -> Value:
    """Return where a remainder is not zero and its sign is not the divisor's."""
    negative = graph.compare("Less", rest, 0)
    differs = graph.binary("Xor", negative, graph.compare("Less", divisor, 0))
    return graph.binary("And", differs, graph.unary("Not", graph.compare("Equal", rest, 0)))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _rounded_division(
    graph: OnnxGraph,
    node: fx.Node,
    one: Operand,
    other: Operand,
    rounding_mode: str | None = "floor",
) -> Value:
    """Lower div with rounding_mode, floor_divide to Div, Floor, rounded as in torch."""
    dtype = result(node).dtype
    left, right = graph.scalar(one, dtype), graph.scalar(other, dtype)
    if rounding_mode is None:
        return graph.binary("Div", left, right)
    if not dtype.is_floating_point:
        quotient = graph.binary("Div", left, right)
        if rounding_mode == "trunc":
            return quotient
        rest = graph.binary("Sub", left, graph.binary("Mul", quotient, right))
        lower = graph.binary("Sub", quotient, 1)
        return graph.where(_has_other_sign(graph, rest, right), lower, quotient)
    if rounding_mode == "trunc":
        return _truncated(graph, graph.binary("Div", left, right))
    # c10::div_floor_floating: exact although left / right may round up to the next integer.
    rest = _remainder_of_trunc(graph, left, right)
    quotient = graph.binary("Div", graph.binary("Sub", left, rest), right)
    lower = graph.binary("Sub", quotient, 1.0)
    quotient = graph.where(_has_other_sign(graph, rest, right), lower, quotient)
    down = graph.unary("Floor", quotient)
    above = graph.compare("Greater", graph.binary("Sub", quotient, down), 0.5)
    exact = graph.where(above, graph.binary("Add", down, 1.0), down)
    by_zero = graph.compare("Equal", right, 0.0)
    return graph.where(by_zero, graph.binary("Div", left, right), exact)


def _truncated(graph: OnnxGraph, x: Value) -> Value:
    return graph.binary("Mul", graph.unary("Sign", x), graph.unary("Floor", graph.unary("Abs", x)))


@lowers(aten.trunc.default)
def _trunc(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower trunc to Sign, Abs, Floor."""
    return _truncated(graph, x) if x.dtype.is_floating_point else x


@lowers(aten.pow.Tensor_Scalar)
def _pow(graph: OnnxGraph, node: fx.Node, x: Value, exponent: Number) -> Value:
    """Lower pow to products for small exponents, Sqrt, Reciprocal, or Pow."""
    x = graph.cast(x, result(node).dtype)
    if exponent == 1:
        return x
    if exponent in (2, 3):
        square = graph.binary("Mul", x, x)
        return square if exponent == 2 else graph.binary("Mul", square, x)
    if x.dtype.is_floating_point:
        if exponent in (0.5, -0.5):
            x = graph.unary("Sqrt", x)
        if exponent == 0.5:
            return x
        if exponent in (-1, -0.5):
            return graph.unary("Reciprocal", x)
    return graph.binary("Pow", x, exponent)


@lowers(aten.pow.Scalar, aten.pow.Tensor_Tensor)
def _pow_tensor(graph: OnnxGraph, node: fx.Node, base: Operand, exponent: Value) -> Value:
    """Lower pow to Pow."""
    return graph.binary("Pow", base, exponent, dtype=result(node).dtype)


# Functions of one tensor

_FUNCTIONS = {
    "neg": "Neg", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "abs": "Abs", "tanh": "Tanh",
    "sigmoid": "Sigmoid", "relu": "Relu", "cos": "Cos", "sin": "Sin", "tan": "Tan", "acos": "Acos",
    "asin": "Asin", "atan": "Atan", "cosh": "Cosh", "sinh": "Sinh", "acosh": "Acosh",
    "asinh": "Asinh", "atanh": "Atanh", "erf": "Erf", "reciprocal": "Reciprocal", "sign": "Sign",
    "floor": "Floor", "ceil": "Ceil", "round": "Round",
}  # fmt: skip


def _unary_rule(name: str, operator: str) -> None:
    @lowers(getattr(aten, name).default)
    def rule(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
        """Lower function of each element to the ONNX operator of the same name."""
        dtype = result(node).dtype
        if name in ("floor", "ceil", "round") and not dtype.is_floating_point:
            return x
        return graph.unary(operator, graph.cast(x, dtype))


for _name, _operator in _FUNCTIONS.items():
    _unary_rule(_name, _operator)


@lowers(aten.isnan.default)
def _isnan(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower isnan to IsNaN."""
    if not x.dtype.is_floating_point:
        return graph.full(x.shape, False, torch.bool)
    return graph.value("IsNaN", x, shape=x.shape, dtype=torch.bool)


@lowers(aten.isinf.default)
def _isinf(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower isinf to IsInf."""
    if not x.dtype.is_floating_point:
        return graph.full(x.shape, False, torch.bool)
    return graph.value("IsInf", x, shape=x.shape, dtype=torch.bool)


@lowers(aten.rsqrt.default)
def _rsqrt(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower rsqrt to Sqrt, Reciprocal."""
    return graph.unary("Reciprocal", graph.unary("Sqrt", graph.cast(x, result(node).dtype)))


@lowers(aten.log1p.default)
def _log1p(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower log1p to Log of 1 + x, corrected for the rounding of that sum (Kahan)."""
    x = graph.cast(x, result(node).dtype)
    plus = graph.binary("Add", x, 1.0)
    logarithm = graph.unary("Log", plus)
    corrected = graph.binary(
        "Mul", logarithm, graph.binary("Div", x, graph.binary("Sub", plus, 1.0))
    )
    exact = graph.where(graph.compare("Equal", plus, 1.0), x, corrected)
    return graph.where(graph.compare("Less", graph.unary("Abs", x), 0.5), exact, logarithm)


@lowers(aten.expm1.default)
def _expm1(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower expm1 to Exp, corrected near 0 as in `_log1p`."""
    x = graph.cast(x, result(node).dtype)
    power = graph.unary("Exp", x)
    minus = graph.binary("Sub", power, 1.0)
    corrected = graph.binary("Mul", minus, graph.binary("Div", x, graph.unary("Log", power)))
    exact = graph.where(graph.compare("Equal", power, 1.0), x, corrected)
    return graph.where(graph.compare("Less", graph.unary("Abs", x), 0.5), exact, minus)


def _logarithm_rule(overload: Any, base: float) -> None:
    @lowers(overload)
    def rule(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
        """Lower log2, log10 to Log."""
        x = graph.cast(x, result(node).dtype)
        return graph.binary("Mul", graph.unary("Log", x), 1 / math.log(base))


_logarithm_rule(aten.log2.default, 2)
_logarithm_rule(aten.log10.default, 10)


@lowers(aten.exp2.default)
def _exp2(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower exp2 to Pow."""
    return graph.binary("Pow", 2.0, graph.cast(x, result(node).dtype))


# Limits and choices


@lowers(aten.clamp.default, aten.clamp.Tensor)
def _clamp(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    low: Operand | None = None,
    high: Operand | None = None,
) -> Value:
    """Lower clamp to Max, Min."""
    dtype = result(node).dtype
    x = graph.cast(x, dtype)
    if low is not None:
        x = graph.binary("Max", x, low, dtype=dtype)
    if high is not None:
        x = graph.binary("Min", x, high, dtype=dtype)
    return x


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def _clamp_min(graph: OnnxGraph, node: fx.Node, x: Value, low: Operand) -> Value:
    """Lower clamp_min to Max."""
    return _clamp(graph, node, x, low)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def _clamp_max(graph: OnnxGraph, node: fx.Node, x: Value, high: Operand) -> Value:
    """Lower clamp_max to Min."""
    return _clamp(graph, node, x, None, high)


@lowers(aten.hardtanh.default)
def _hardtanh(
    graph: OnnxGraph, node: fx.Node, x: Value, low: Number = -1, high: Number = 1
) -> Value:
    """Lower hardtanh to Max, Min."""
    return _clamp(graph, node, x, low, high)


@lowers(aten.where.self)
def _where(graph: OnnxGraph, node: fx.Node, condition: Value, one: Value, other: Value) -> Value:
    """Lower where to Where."""
    dtype = result(node).dtype
    condition = graph.cast(condition, torch.bool)
    return graph.where(condition, graph.cast(one, dtype), graph.cast(other, dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(graph: OnnxGraph, node: fx.Node, x: Value, mask: Value, value: Operand) -> Value:
    """Lower masked_fill to Where."""
    return graph.where(mask, graph.scalar(value, x.dtype), x)


# Comparisons and logic


def _common_type(node: fx.Node) -> torch.dtype:
    """Return the type in which torch compares the two arguments of a node."""
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in node.args[:2]]
    plain = [_plain(value) for value in values]
    if not any(isinstance(value, torch.Tensor) for value in plain):
        raise NotLowered("a comparison of two numbers")
    return torch.result_type(*plain)


def _compared(number: Operand, dtype: torch.dtype) -> Operand:
    """Return what torch compares tensors of a type with: a number is rounded to the type."""
    is_plain = isinstance(number, int | float) and dtype.is_floating_point
    return torch.tensor(number, dtype=dtype).item() if is_plain else number


def _plain(value: Any) -> Any:
    """Return a number of the same type in place of one that torch knows by its symbol."""
    if isinstance(value, torch.SymInt):
        return 1
    return 1.0 if isinstance(value, torch.SymFloat) else value


def _comparison_rule(name: str, operator: str, *, negate: bool = False) -> None:
    @lowers(getattr(aten, name).Tensor, getattr(aten, name).Scalar)
    def rule(graph: OnnxGraph, node: fx.Node, one: Value, other: Operand) -> Value:
        """Lower eq, ne, lt, le, gt, ge to Equal, Less, LessOrEqual, ..., Not."""
        common = _common_type(node)
        other, dtype = _compared(other, common), carried(common)
        if dtype is torch.bool and operator != "Equal":
            dtype = torch.int32
        made = graph.compare(operator, graph.cast(one, dtype), graph.scalar(other, dtype))
        return graph.unary("Not", made) if negate else made


for _name, _operator in {
    "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual",
}.items():  # fmt: skip
    _comparison_rule(_name, _operator)
_comparison_rule("ne", "Equal", negate=True)


def _logic_rule(operator: str, bitwise: Any, logical: Any) -> None:
    @lowers(*bitwise, logical)
    def rule(graph: OnnxGraph, node: fx.Node, one: Operand, other: Operand) -> Value:
        """Lower bitwise_and, logical_and, ... to And, Or, Xor, or their bitwise form."""
        dtype = result(node).dtype
        if node.target is logical:
            one, other = _truth(graph, one), _truth(graph, other)
        return graph.binary(
            operator if dtype is torch.bool else f"Bitwise{operator}", one, other, dtype=dtype
        )


def _truth(graph: OnnxGraph, x: Operand) -> Value:
    return graph.cast(graph.scalar(x, torch.bool) if not isinstance(x, Value) else x, torch.bool)


_logic_rule("And", (aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), aten.logical_and.default)
_logic_rule("Or", (aten.bitwise_or.Tensor, aten.bitwise_or.Scalar), aten.logical_or.default)
_logic_rule("Xor", (aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar), aten.logical_xor.default)


@lowers(aten.bitwise_not.default)
def _bitwise_not(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower bitwise_not to Not, BitwiseNot."""
    return graph.unary("Not" if x.dtype is torch.bool else "BitwiseNot", x)


@lowers(aten.logical_not.default)
def _logical_not(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower logical_not to Not."""
    return graph.unary("Not", graph.cast(x, torch.bool))
