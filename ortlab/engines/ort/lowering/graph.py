"""Construction of an ONNX graph from ATen operators: values with torch's shape and type, nodes.

Sizes are integers or sympy expressions of torch's size symbols. Expressions are compared by their
structure, never through SymInt, whose comparisons would add guards to the compiled function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import onnx
import sympy
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

OPSET: Final = 21
IR_VERSION: Final = 10
"""Newest versions that both runtimes read: onnxruntime-training 1.19.2 and today's onnxruntime."""

MICROSOFT: Final = "com.microsoft"
"""Domain of ONNX Runtime's own operators: docs/ContribOperators.md in its repository."""

ONNX_TYPES: Final = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
"""Types of the values of an ORT segment; operators on others run in torch, see also `carried`."""

HALVES: Final = {
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float16: TensorProto.FLOAT16,
}
"""Types of 16-bit floats, which a segment has as float32, rounded."""

NUMPY_TYPES: Final = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}

aten = torch.ops.aten

VIEWS: Final = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.detach.default,
        aten.alias.default,
    }
)
"""Operators that cost nothing in torch."""

_MOVES: Final = VIEWS | {
    aten.clone.default,
    aten.contiguous.default,
    aten.cat.default,
    aten.stack.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.embedding.default,
    aten.flip.default,
    aten.repeat.default,
    aten.neg.default,
    aten.relu.default,
}
"""Operators whose results have the precision of their arguments: they are not rounded."""

Size: TypeAlias = "int | sympy.Expr"
"""Size of a dimension."""

Rule = Callable[..., Any]
F = TypeVar("F", bound=Rule)

RULES: Final[dict[Any, Rule]] = {}
"""Rules by operator overload. A rule gets the graph, the FX node and its arguments."""


class NotLowered(Exception):
    """Raised when a rule does not cover a call; the operator then runs in torch."""


def carried(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which an ORT segment has tensors of a type: float32 for 16-bit floats.

    ORT's kernels for CPUs compute in float32, and results are rounded to the 16-bit type, as in
    torch's kernels.

    Args:
        dtype: Type of a tensor in torch.
    """
    return torch.float32 if dtype in HALVES else dtype


def lowers(*operators: Any) -> Callable[[F], F]:
    """Register a function as the rule of operators.

    Args:
        *operators: Overloads such as ``torch.ops.aten.mm.default``.
    """

    def register(rule: F) -> F:
        for operator in operators:
            assert operator not in RULES, operator
            RULES[operator] = rule
        return rule

    return register


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """Value of an ONNX graph, with the shape and the type that it has in torch.

    Attributes:
        name: Name in the graph.
        shape: Sizes.
        dtype: Type of the elements.
        transposed: For the result of a Transpose, its input and the permutation.
        merged: For the result of a Reshape that merges the first two of four dimensions, its input.
        exact: For a result that is rounded to 16 bits, the result before.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    transposed: tuple[Value, tuple[int, ...]] | None = None
    merged: Value | None = None
    exact: Value | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


Number: TypeAlias = "int | float | sympy.Expr"
"""Scalar argument of an operator; an expression where torch has a SymInt or SymFloat."""


def size_of(size: Any) -> Size:
    """Return a size of torch as an integer or an expression.

    Args:
        size: Integer, SymInt or sympy expression.
    """
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    return int(size) if isinstance(size, int | sympy.Integer) else size


def shape_of(shape: Iterable[Any]) -> tuple[Size, ...]:
    """Return a shape of torch as integers and expressions.

    Args:
        shape: Sizes of a tensor.
    """
    return tuple(map(size_of, shape))


def hint(size: Any) -> int:
    """Return a size in the call that is being compiled; 1 where that is unknown.

    Args:
        size: Integer or SymInt.
    """
    return (size.node.hint or 1) if isinstance(size, torch.SymInt) else size


def hints(node: Any) -> list[int]:
    """Return the shape of a node's tensor in the call that is being compiled.

    Args:
        node: Node of a graph of FX.
    """
    return [hint(size) for size in node.meta["val"].shape]


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes.

    Args:
        sizes: Integers or expressions.
    """
    return size_of(math.prod(sizes))


def is_positive(size: Size) -> bool:
    """Return True if a size cannot be 0.

    Args:
        size: Integer or expression.
    """
    return bool(size > 0 if isinstance(size, int) else size.is_positive)


class OnnxGraph:
    """ONNX graph under construction.

    Equal nodes are created once. Names of nodes start with the name of their FX node.

    Attributes:
        nodes: Nodes in order of execution.
        constants: Initializers by content.
        values: Results of nodes, by name.
        current: FX node whose rule is running.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[Any, TensorProto] = {}
        self.values: dict[str, Value] = {}
        self.current: fx.Node | None = None
        self._made: dict[Any, list[str]] = {}
        self._sizes: dict[sympy.Expr, Value] = {}
        self._count = 0

    # Nodes

    def node(
        self,
        operator: str,
        *inputs: Value | None,
        outputs: int,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node, or return the outputs of an equal one.

        Args:
            operator: ONNX operator.
            *inputs: Inputs; None for an optional one that is left out.
            outputs: Number of outputs.
            domain: Domain of the operator.
            **attributes: Attributes of the node; those with value None are left out.

        Returns:
            Names of the outputs.
        """
        names = ["" if value is None else value.name for value in inputs]
        while names and not names[-1]:
            names.pop()
        given = {key: value for key, value in attributes.items() if value is not None}
        key = (operator, domain, outputs, *names, *((k, str(v)) for k, v in sorted(given.items())))
        if key not in self._made:
            origin = "" if self.current is None else self.current.name
            self._count += 1
            results = [f"{origin}/{operator}.{self._count}.{i}" for i in range(outputs)]
            made = helper.make_node(
                operator,
                names,
                results,
                f"{origin}/{operator}.{self._count}",
                domain=domain,
                **given,
            )
            self.nodes.append(made)
            self._made[key] = results
        return self._made[key]

    def copied(self, value: Value) -> Value:
        """Return a tensor of the same content with memory of its own.

        Args:
            value: Tensor.
        """
        self._count += 1
        name = f"{value.name}/copy.{self._count}"
        self.nodes.append(helper.make_node("Identity", [value.name], [name], name))
        return Value(name, value.shape, value.dtype)

    def value(
        self,
        operator: str,
        *inputs: Value | None,
        shape: Sequence[Size],
        dtype: torch.dtype,
        domain: str = "",
        **attributes: Any,
    ) -> Value:
        """Add a node with one output.

        Args:
            operator: ONNX operator.
            *inputs: Inputs; None for an optional one that is left out.
            shape: Sizes of the output.
            dtype: Type of the output.
            domain: Domain of the operator.
            **attributes: Attributes of the node.

        Returns:
            The output.
        """
        (name,) = self.node(operator, *inputs, outputs=1, domain=domain, **attributes)
        self.values[name] = Value(name, tuple(shape), dtype)
        return self.values[name]

    # Constants and sizes

    def constant(self, content: Any, dtype: torch.dtype = torch.int64) -> Value:
        """Return an initializer.

        Args:
            content: Number, nested sequence or array.
            dtype: Type of the elements.
        """
        if dtype not in NUMPY_TYPES:
            raise NotLowered(f"a constant of type {dtype}")
        array: np.ndarray[Any, Any] = np.asarray(content, dtype=NUMPY_TYPES[dtype])
        key = (array.tobytes(), array.shape, dtype)
        if key not in self.constants:
            name = f"constant.{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(np.ascontiguousarray(array), name)
            self.constants[key].dims[:] = array.shape  # ascontiguousarray makes scalars vectors
        return Value(self.constants[key].name, array.shape, dtype)

    def bind(self, size: sympy.Expr, value: Value) -> None:
        """Let `value` be the value of a size expression, unless it has one.

        Args:
            size: Symbol or expression.
            value: Tensor of type int64 and shape [1].
        """
        self._sizes.setdefault(size, value)

    def bind_shape(self, value: Value) -> None:
        """Let the symbols in the shape of a tensor be read from it, unless they have a value.

        Args:
            value: Tensor.
        """
        for i, size in enumerate(value.shape):
            if isinstance(size, sympy.Expr) and size not in self._sizes:
                read = self.value("Shape", value, shape=[1], dtype=torch.int64, start=i, end=i + 1)
                self._sizes[size] = read

    def number(self, number: Number) -> Value:
        """Return a number as a tensor of shape [1]; int64, or float64 for a fraction.

        Args:
            number: Integer or float, or an expression of size symbols.

        Raises:
            NotLowered: If an expression has a function or a symbol without a value here.
        """
        if not isinstance(number, sympy.Expr):
            return self.constant(
                [number], torch.float64 if isinstance(number, float) else torch.int64
            )
        if number.is_Integer:
            return self.constant([int(number)])
        if number.is_Float or number.is_Rational:
            return self.constant([float(number)], torch.float64)
        if number not in self._sizes:
            self._sizes[number] = self._computed(number)
        return self._sizes[number]

    def _computed(self, number: sympy.Expr) -> Value:
        name = type(number).__name__
        if number.is_Symbol:
            raise NotLowered(f"the size {number}, which is not known here")
        values = [self.number(argument) for argument in number.args]
        if name in ("Add", "Mul", "Max", "Min"):
            result = values[0]
            for value in values[1:]:
                result = self._arithmetic(name, result, value)
            return result
        if name == "Pow" and number.args[1].is_Integer and int(number.args[1]) > 0:
            result = values[0]
            for _ in range(int(number.args[1]) - 1):
                result = self._arithmetic("Mul", result, values[0])
            return result
        if name in ("FloorDiv", "CleanDiv"):
            return self._arithmetic("Div", *values)
        if name in ("Mod", "PythonMod"):
            return self._arithmetic("Mod", *values)
        if name in ("IntTrueDiv", "FloatTrueDiv"):
            return self._arithmetic("Div", *(self.cast(value, torch.float64) for value in values))
        if name == "ToFloat":
            return self.cast(values[0], torch.float64)
        if name in _ROUNDING:
            value = self.cast(values[0], torch.float64)
            if (operator := _ROUNDING[name]) is not None:
                value = self.value(operator, value, shape=[1], dtype=value.dtype)
            return self.cast(value, torch.int64)
        raise NotLowered(f"the size {number}")

    def _arithmetic(self, operator: str, one: Value, other: Value) -> Value:
        dtype = torch.promote_types(one.dtype, other.dtype)
        return self.value(
            operator, self.cast(one, dtype), self.cast(other, dtype), shape=[1], dtype=dtype
        )

    def sizes(self, sizes: Sequence[Number]) -> Value:
        """Return integers as a vector of type int64, such as a shape.

        Args:
            sizes: Integers or expressions.
        """
        known = [size_of(size) for size in sizes]
        if all(isinstance(size, int) for size in known):
            return self.constant(np.array(known, dtype=np.int64))
        parts = [self.number(size) for size in known]
        return self.value("Concat", *parts, shape=[len(parts)], dtype=torch.int64, axis=0)

    def scalar(self, number: Value | Number, dtype: torch.dtype) -> Value:
        """Return a number as a tensor; one that is a tensor already is cast.

        Args:
            number: Number or tensor.
            dtype: Type of the result.
        """
        if isinstance(number, Value):
            return self.cast(number, dtype)
        if isinstance(number, sympy.Expr) and not number.is_number:
            return self.cast(self.reshape(self.number(number), []), dtype)
        return self.constant(float(number) if isinstance(number, sympy.Expr) else number, dtype)

    # Common operators

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """Round a float32 tensor to the precision of a 16-bit type.

        Args:
            value: Tensor.
            dtype: torch.bfloat16 or torch.float16.
        """
        half = self.value("Cast", value, shape=value.shape, dtype=dtype, to=HALVES[dtype])
        return replace(self.cast(half, value.dtype), exact=value)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Cast a tensor.

        Args:
            value: Tensor.
            dtype: New type.
        """
        if value.dtype == dtype:
            return value
        if dtype not in ONNX_TYPES:
            raise NotLowered(f"a tensor of type {dtype}")
        return self.value("Cast", value, shape=value.shape, dtype=dtype, to=ONNX_TYPES[dtype])

    def reshape(self, value: Value, shape: Sequence[Size]) -> Value:
        """Reshape a tensor.

        Args:
            value: Tensor.
            shape: New sizes, all of them.
        """
        shape = shape_of(shape)
        if shape == value.shape:
            return value
        unknown = [i for i, size in enumerate(shape) if not isinstance(size, int)]
        if len(unknown) == 1 and 0 not in shape:  # needs no arithmetic
            target = self.constant([-1 if i in unknown else size for i, size in enumerate(shape)])
        else:
            target = self.sizes(shape)
        # allowzero: a size of 0 is meant as such.
        made = self.value("Reshape", value, target, shape=shape, dtype=value.dtype, allowzero=1)
        merges = len(shape) == 3 and value.rank == 4 and shape[1:] == value.shape[2:]
        return replace(made, merged=value) if merges else made

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """Permute the dimensions of a tensor.

        Args:
            value: Tensor.
            order: Dimension of `value` for each dimension of the result.
        """
        order = tuple(i % value.rank for i in order)
        if value.transposed is not None:
            value, first = value.transposed
            order = tuple(first[i] for i in order)
        if order == tuple(range(value.rank)):
            return value
        shape = tuple(value.shape[i] for i in order)
        made = self.value("Transpose", value, shape=shape, dtype=value.dtype, perm=order)
        return Value(made.name, shape, value.dtype, (value, order))

    def expand(self, value: Value, shape: Sequence[Size]) -> Value:
        """Broadcast a tensor.

        Args:
            value: Tensor.
            shape: New sizes.
        """
        shape = shape_of(shape)
        if shape == value.shape:
            return value
        if 0 in shape:  # ORT's optimizer drops an Expand to no elements
            return self.full(shape, 0, value.dtype)
        return self.value("Expand", value, self.sizes(shape), shape=shape, dtype=value.dtype)

    def unary(self, operator: str, value: Value, **attributes: Any) -> Value:
        """Apply an elementwise operator that keeps shape and type.

        Args:
            operator: ONNX operator.
            value: Tensor.
            **attributes: Attributes of the node.
        """
        return self.value(operator, value, shape=value.shape, dtype=value.dtype, **attributes)

    def binary(
        self,
        operator: str,
        one: Value | Number,
        other: Value | Number,
        *,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """Apply an elementwise operator with broadcasting.

        Args:
            operator: ONNX operator.
            one: Tensor or number.
            other: Tensor or number.
            dtype: Type in which to compute; by default that of the first tensor.
        """
        if dtype is None:
            dtype = next(each.dtype for each in (one, other) if isinstance(each, Value))
        left, right = self.scalar(one, dtype), self.scalar(other, dtype)
        shape = broadcast(left.shape, right.shape)
        return self.value(operator, left, right, shape=shape, dtype=dtype)

    def compare(self, operator: str, one: Value | Number, other: Value | Number) -> Value:
        """Compare two tensors elementwise.

        Args:
            operator: ONNX operator that returns booleans.
            one: Tensor or number.
            other: Tensor or number.
        """
        made = self.binary(operator, one, other)
        return Value(made.name, made.shape, torch.bool)

    def where(self, condition: Value, one: Value | Number, other: Value | Number) -> Value:
        """Select between two tensors elementwise.

        Args:
            condition: Booleans.
            one: Tensor or number where the condition holds.
            other: Tensor or number elsewhere.
        """
        dtype = next(each.dtype for each in (one, other) if isinstance(each, Value))
        left, right = self.scalar(one, dtype), self.scalar(other, dtype)
        shape = broadcast(condition.shape, broadcast(left.shape, right.shape))
        return self.value("Where", condition, left, right, shape=shape, dtype=dtype)

    def reduce(
        self, operator: str, value: Value, dims: Sequence[int] | None, *, keep: bool = False
    ) -> Value:
        """Reduce dimensions of a tensor.

        Args:
            operator: ONNX operator, such as "ReduceSum".
            value: Tensor.
            dims: Dimensions to reduce; None or empty for all.
            keep: True to keep them with size 1.
        """
        if value.rank == 0:
            return value
        axes = sorted(i % value.rank for i in dims or range(value.rank))
        if operator == "ReduceMean" and not is_positive(
            count := product(value.shape[i] for i in axes)
        ):  # ORT's mean of no elements is 0, torch's is 0 / 0
            total = self.reduce("ReduceSum", value, axes, keep=keep)
            return self.binary("Div", total, self.scalar(count, value.dtype))
        shape = [1 if i in axes else n for i, n in enumerate(value.shape) if keep or i not in axes]
        first, rest = value.shape[: len(axes)], value.shape[len(axes) :]
        if (
            operator == "ReduceSum"
            and value.dtype is torch.float32
            and axes == list(range(len(first)))
            and all(isinstance(n, int) for n in rest)
            and math.prod(rest) >= _WIDE
            and all(map(is_positive, first))
        ):
            # As for a bias: a product with ones is two to three times as fast.
            rows, columns = product(first), math.prod(rest)
            return self.reshape(
                self.value(
                    "Gemm",
                    self.full([1, rows], 1, value.dtype),
                    self.reshape(value, [rows, columns]),
                    shape=[1, columns],
                    dtype=value.dtype,
                ),
                shape,
            )
        return self.value(
            operator, value, self.constant(axes), shape=shape, dtype=value.dtype, keepdims=int(keep)
        )

    def full(self, shape: Sequence[Size], number: Number, dtype: torch.dtype) -> Value:
        """Return a tensor with one number everywhere.

        Args:
            shape: Sizes.
            number: Number; it may be an expression.
            dtype: Type of the elements.
        """
        shape = shape_of(shape)
        if not shape or isinstance(number, sympy.Expr):
            return self.expand(self.scalar(number, dtype), shape)
        if dtype not in ONNX_TYPES:
            raise NotLowered(f"a tensor of type {dtype}")
        content = numpy_helper.from_array(np.asarray([number], dtype=NUMPY_TYPES[dtype]))
        return self.value(
            "ConstantOfShape", self.sizes(shape), shape=shape, dtype=dtype, value=content
        )

    def slice(
        self,
        value: Value,
        dims: Sequence[int],
        starts: Sequence[Number],
        ends: Sequence[Number],
        shape: Sequence[Size],
        steps: Sequence[Number] = (),
    ) -> Value:
        """Return a range of some dimensions.

        Args:
            value: Tensor.
            dims: Dimensions.
            starts: First index in each of them.
            ends: Index after the last.
            shape: Sizes of the result.
            steps: Distance between the indices of each of them; 1 by default.
        """
        inputs = (self.sizes(each) for each in (starts, ends, dims, steps) if each)
        return self.value("Slice", value, *inputs, shape=shape, dtype=value.dtype)


_ROUNDING: Final = {
    "TruncToInt": None,  # as Cast does
    "FloorToInt": "Floor",
    "CeilToInt": "Ceil",
    "floor": "Floor",
    "ceiling": "Ceil",
}
"""ONNX operators of the functions that round a fraction to a size."""

_WIDE: Final = 64
"""Columns from which on rows are added by a product."""

END: Final = 2**62
"""Index behind the end of any dimension."""


def broadcast(one: Sequence[Size], other: Sequence[Size]) -> tuple[Size, ...]:
    """Return the shape that two shapes broadcast to.

    Args:
        one: Sizes.
        other: Sizes.
    """
    rank = max(len(one), len(other))
    pairs = zip([1] * (rank - len(one)) + [*one], [1] * (rank - len(other)) + [*other], strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


@dataclass(frozen=True)
class Result:
    """Shape and type of a tensor that an FX node returns.

    Attributes:
        shape: Sizes.
        dtype: Type of the elements, see `carried`.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype


def result(node: fx.Node, i: int | None = None) -> Result:
    """Return shape and type of an FX node's result.

    Args:
        node: FX node with a fake tensor in its metadata.
        i: Number of the result, for an operator with several.
    """
    value = node.meta["val"] if i is None else node.meta["val"][i]
    return Result(shape_of(value.shape), carried(value.dtype))


def lower(graph: OnnxGraph, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Add the nodes of one FX node to a graph.

    Args:
        graph: Graph under construction.
        node: Call of an operator.
        known: Values of the FX nodes before it.

    Returns:
        A value, or a list of values and None for an operator with several results.

    Raises:
        NotLowered: If no rule covers the call.
    """
    rule = RULES.get(node.target)
    if rule is None:
        raise NotLowered("no rule for this operator")
    graph.current = node

    def argument(given: Any) -> Any:
        if isinstance(given, fx.Node):
            return known[given]
        if isinstance(given, list | tuple):
            return [argument(each) for each in given]
        return carried(given) if isinstance(given, torch.dtype) else given

    arguments = [argument(each) for each in node.args]
    named = {name: argument(each) for name, each in node.kwargs.items()}
    try:
        made = _as_torch_has_it(rule(graph, node, *arguments, **named), node.meta["val"])
        return made if node.target in _MOVES else _rounded(graph, made, node.meta["val"])
    except NotLowered:
        raise
    # A defect of a rule costs speed, not the model: torch runs the operator, as the report says.
    except Exception as error:
        raise NotLowered(f"{DEFECT} ({type(error).__name__}: {error})") from error


def _as_torch_has_it(made: Any, meant: Any) -> Any:
    """Return a rule's result with sizes in torch's form; equal ones may differ in their form."""
    if made is None or meant is None:
        return None
    if not isinstance(made, Value):
        return [_as_torch_has_it(*each) for each in zip(made, meant, strict=True)]
    shape = shape_of(meant.shape)
    known = [
        one == other
        for one, other in zip(made.shape, shape, strict=True)
        if isinstance(one, int) and isinstance(other, int)
    ]
    assert made.dtype is carried(meant.dtype), f"{made} in place of {meant.dtype}"
    assert all(known), f"{made} in place of {shape}"
    return replace(made, shape=shape)


def _rounded(graph: OnnxGraph, made: Any, meant: Any) -> Any:
    """Return a rule's result with the precision that it has in torch."""
    if isinstance(made, list):
        return [_rounded(graph, *each) for each in zip(made, meant, strict=True)]
    is_half = made is not None and made.dtype is not meant.dtype
    return graph.rounded(made, meant.dtype) if is_half else made


DEFECT: Final = "its rule failed"
"""Start of the reason for an operator in torch whose rule has a defect."""
