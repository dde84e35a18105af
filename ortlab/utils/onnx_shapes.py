"""Evaluation of the symbolic sizes that ORT's shape inference writes."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import onnx


def bytes_of(kind: int, sizes: tuple[int | str, ...], dims: Mapping[str, int]) -> int:
    """Return the size of a tensor in bytes.

    Args:
        kind: ONNX element type, a value of ``onnx.TensorProto.DataType``.
        sizes: Shape, as numbers or symbolic sizes.
        dims: Values of the symbolic dimensions, by name.
    """
    count = math.prod(size_of(size, dims) for size in sizes)
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "floor": math.floor,
    "ceiling": math.ceil,
    "Max": max,
    "Min": min,
}


@functools.lru_cache(maxsize=4096)
def _parsed(size: str) -> ast.expr | None:
    """Parse a size in sympy's notation; None for a name that is not a valid identifier."""
    try:
        return ast.parse(size, mode="eval").body
    except SyntaxError:
        return None


@functools.lru_cache(maxsize=4096)
def follows(size: str, dims: tuple[str, ...]) -> bool:
    """Return True if `size` depends on no other dimensions than `dims`.

    Args:
        size: Symbolic size.
        dims: Names of the known dimensions.
    """
    parsed = _parsed(size)
    if parsed is None:
        return size in dims
    names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    return names <= {*dims, *_FUNCTIONS}


def size_of(size: int | str, dims: Mapping[str, int]) -> int:
    """Return the value of a size.

    Python's `eval` is not used, because the names in `size` come from a file.

    Args:
        size: Number or symbolic size.
        dims: Values of the symbolic dimensions, by name.

    Raises:
        KeyError: A dimension is missing in `dims`.
        ValueError: `size` contains something other than arithmetic.
    """
    if isinstance(size, int):
        return size
    parsed = _parsed(size)
    return dims[size] if parsed is None else int(_value(parsed, dims))


def _value(node: ast.expr, dims: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, dims)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, dims), _value(right, dims))
        case ast.Call(func=ast.Name(id=name), args=given) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(each, dims) for each in given))
    raise ValueError(f"unsupported expression in a tensor size: {ast.unparse(node)!r}")
