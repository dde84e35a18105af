"""Export rules for tensor operations: shapes, reductions, indexing, arithmetic, CTC loss."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType

from ortlab.engines.ortmodule.compat.symbolics.builder import (
    DETACHED,
    Gradient,
    aten,
    aten_node,
    backwards,
    inputs_of,
    may_have_gradient,
    rule,
    stock,
)
from ortlab.engines.torchscript import rules
from ortlab.engines.torchscript.nodes import (
    Graph,
    Value,
    cast,
    constant,
    dtype,
    literal,
    missing,
    number,
    rank,
    ranked_like_output,
    traced_sizes,
)

rule("diff", "no rule")(rules.diff)


def _cumsum_gradient() -> Gradient:
    return [("CumSum", ["GO(0)", "I(1)"], ["GI(0)"], {"reverse": {"value": 1, "dtype": "int"}})]


@rule(
    "cumsum",
    "bool input: no kernel for CumSum; float input: no gradient",
    ("cumsum", "", _cumsum_gradient),
)
def _cumsum(g: Graph, x: Value, dim: Value, as_type: Value) -> Value:
    result = dtype(x) if missing(as_type) else JitScalarType(literal(as_type, "i")).dtype()
    if result.is_floating_point:
        return ranked_like_output(g, aten(g, "cumsum", cast(g, x, result), dim, as_type))
    return g.op("CumSum", cast(g, x, torch.int64), dim)


@rule("linspace", "with integers as ends: the process ends while the graph is built")
def _linspace(g: Graph, start: Value, end: Value, steps: Value, *_like: Value) -> Value:
    result = dtype(next(iter(g.original_node.outputs())))
    start, end, steps = cast(g, start, result), cast(g, end, result), cast(g, steps, torch.int64)
    places = cast(g, g.op("Range", constant(g, 0), steps, constant(g, 1)), result)
    between = g.op("Max", g.op("Sub", steps, constant(g, 1)), constant(g, 1))
    step = g.op("Div", g.op("Sub", end, start), cast(g, between, result))
    return g.op("Add", g.op("Mul", places, step), start)


@rule("_is_all_true", "no rule")
def _is_all_true(g: Graph, x: Value) -> Value:
    numbers = g.op("Reshape", cast(g, x, torch.int64), constant(g, [-1]))
    return cast(g, g.op("ReduceMin", numbers, keepdims_i=0), torch.bool)


@rule("where", "a broadcast input gets a gradient of the output's shape")
def _where(
    g: Graph, condition: Value, x: Value = None, y: Value = None, _outputs: int | None = None
) -> Value:
    if x is None:
        return stock("where")(g, condition, x, y, _outputs=_outputs)
    if dtype(condition) != torch.bool:
        condition = cast(g, condition, torch.bool)
    values, traced = [x, y], list(g.original_node.inputs())[1:]
    sizes = traced_sizes(next(iter(g.original_node.outputs())))
    shape = None
    for i, value in enumerate(values):
        if not _never_broadcast(value, traced_sizes(traced[i]), sizes):
            shape = shape or g.op("Shape", g.op("Where", condition, x, y))
            values[i] = g.op("Expand", value, shape)
    return g.op("Where", condition, *values)


def _never_broadcast(value: Value, sizes: list[int] | None, output: list[int] | None) -> bool:
    """Return True if `value` has the output's shape in every batch; a 1 may be a batch size."""
    if value.node().kind() in ("onnx::Constant", "prim::Constant"):
        return True  # has no gradient
    return sizes is not None and sizes == output and 1 not in sizes


_UNUSED = "with an unused part: the gradients of the other parts are misplaced"


def _all_used(g: Graph) -> bool:
    return all(part.uses() for part in g.original_node.outputs())


def _slice(g: Graph, x: Value, begin: Value, end: Value, axis: int) -> Value:
    return g.op("Slice", x, begin, end, constant(g, [axis]))


def _split(operator: str) -> None:
    @rule(operator, _UNUSED)
    def export(g: Graph, x: Value, how: Value, dim: Value, **outputs: Any) -> Any:
        sizes = _sizes(how, g.original_node.outputsSize())
        if sizes is None or _all_used(g):
            return stock(operator)(g, x, how, dim, **outputs)
        ends = list(itertools.accumulate(sizes, initial=0))
        axis = literal(dim, "i") % rank(x)
        return [
            _slice(g, x, constant(g, [begin]), constant(g, [end]), axis)
            for begin, end in itertools.pairwise(ends)
        ]


def _sizes(how: Value, count: int) -> list[int] | None:
    """Return the sizes of the parts, given as one size or a list; None if computed in the graph."""
    if symbolic_helper._is_packed_list(how):
        given = [literal(value, "i") for value in symbolic_helper._unpack_list(how)]
    elif how.node().kind() == "onnx::Constant":
        held = symbolic_helper._node_get(how.node(), "value")
        given = [int(held)] * count if held.dim() == 0 else held.tolist()
    else:
        return None
    return given if all(isinstance(size, int) for size in given) else None


for _operator in ("split", "split_with_sizes"):
    _split(_operator)


@rule("prim::ConstantChunk", _UNUSED)
def _chunk(g: Graph, x: Value, chunks: int, dim: int) -> Any:
    if _all_used(g):
        return stock("prim::ConstantChunk")(g, x, chunks, dim)
    axis = dim % rank(x)
    size = g.op("Gather", g.op("Shape", x), constant(g, [axis]), axis_i=0)
    each = g.op("Div", g.op("Add", size, constant(g, [chunks - 1])), constant(g, [chunks]))
    ends = [g.op("Mul", each, constant(g, [i])) for i in range(chunks + 1)]
    return [_slice(g, x, begin, end, axis) for begin, end in itertools.pairwise(ends)]


@rule("unbind", _UNUSED)
def _unbind(g: Graph, x: Value, dim: Value, **outputs: Any) -> Any:
    if not outputs or _all_used(g):
        return stock("unbind")(g, x, dim, **outputs)
    axis, count = literal(dim, "i") % rank(x), g.original_node.outputsSize()
    return [g.op("Gather", x, constant(g, i), axis_i=axis) for i in range(count)]


def _reduction(operator: str, at: int) -> None:
    """Declare the rule for an operator with dimensions and keepdim from argument `at` on."""

    @rule(operator, "without keepdim: the gradient is an invalid graph")
    def export(g: Graph, x: Value, *arguments: Value) -> Any:
        others, every = list(arguments), range(rank(x))
        given = every if missing(others[at]) else literal(others[at], "is") or every
        axes = constant(g, [axis % rank(x) for axis in given])
        keep, others[at], others[at + 1] = others[at + 1], axes, constant(g, 1)
        reduced = stock(operator)(g, x, *others)
        return reduced if literal(keep, "i") else g.op("Squeeze", reduced, axes)


_reduction("logsumexp", 0)
_reduction("norm", 1)
_reduction("linalg_vector_norm", 1)


@rule("std", "equal elements: the gradient is NaN, torch's is 0")
def _std(g: Graph, x: Value, *arguments: Value) -> Value:
    return _root(g, stock("std")(g, x, *arguments))


@rule("std_mean", "same as for std")
def _std_mean(g: Graph, x: Value, *arguments: Value) -> Any:
    root, mean = stock("std_mean")(g, x, *arguments)
    return _root(g, root), mean


def _root(g: Graph, root: Value) -> Value:
    """Rewrite the square root `root` so that its gradient at 0 is 0."""
    x, kind = root.node().input(), dtype(next(iter(g.original_node.outputs())))
    zero, one = constant(g, 0.0, kind), constant(g, 1.0, kind)
    none = g.op("Equal", x, zero)
    return g.op("Where", none, zero, g.op("Sqrt", g.op("Where", none, one, x)))


@rule("pow", "0 to the power of 0: the gradient is NaN, torch's is 0")
def _pow(g: Graph, x: Value, exponent: Value) -> Value:
    node = exponent.node()
    never = node.kind() == "onnx::Constant" and symbolic_helper._node_get(node, "value").all()
    if never or not any(inputs_of(x)):
        return stock("pow")(g, x, exponent)
    one, zeroth = constant(g, 1, dtype(x)), g.op("Not", cast(g, exponent, torch.bool))
    whole = g.op("Expand", x, g.op("Shape", g.op("Where", zeroth, one, x)))
    base = g.op("Where", zeroth, one, whole)
    base.setType(x.type().with_sizes([None] * max(rank(x), rank(exponent))))
    return stock("pow")(g, base, exponent)


@rule("pairwise_distance", "eps is added after the power: equal rows get a NaN gradient")
def _pairwise_distance(g: Graph, x: Value, y: Value, p: Value, eps: Value, keepdim: Value) -> Value:
    kind, power, axes = dtype(x), number(p), constant(g, [-1])
    apart = g.op("Abs", g.op("Add", g.op("Sub", x, y), constant(g, number(eps), kind)))
    raised = g.op("Mul", apart, apart) if power == 2 else apart
    if power not in (1, 2):
        raised = g.op("Pow", apart, constant(g, power, kind))
    total = g.op("ReduceSum", raised, axes, keepdims_i=literal(keepdim, "i"))
    if power in (1, 2):
        return total if power == 1 else g.op("Sqrt", total)
    return g.op("Pow", total, constant(g, 1 / power, kind))


@rule("cosine_similarity", "a row of zeros gets a NaN gradient")
def _cosine_similarity(g: Graph, x: Value, y: Value, dim: Value, eps: Value) -> Value:
    axes = constant(g, [literal(dim, "i")])
    least = constant(g, number(eps) ** 2, dtype(x))

    def total(a: Value, b: Value) -> Value:
        return g.op("ReduceSum", g.op("Mul", a, b), axes, keepdims_i=0)

    sizes = [g.op("Sqrt", g.op("Clip", total(each, each), least)) for each in (x, y)]
    return g.op("Div", total(x, y), g.op("Mul", *sizes))


@rule("flip", "the gradient fails with 'narrowing_error'")
def _flip(g: Graph, x: Value, dims: Value) -> Value:
    for axis in literal(dims, "is"):
        x = backwards(g, x, axis % rank(x))
    return x


@rule(
    "as_strided",
    "strides refer to the storage, but the exporter treats them as a contiguous tensor's: it reads "
    "the wrong elements of a transposed one",
)
def _as_strided(g: Graph, x: Value, sizes: Value, strides: Value, offset: Value = None) -> Value:
    return stock("as_strided")(g, rules.in_order_of_storage(g, x), sizes, strides, offset)


@rule("index_add", "if an index occurs twice, only one of its terms is added")
def _index_add(
    g: Graph, x: Value, dim: Value, index: Value, terms: Value, alpha: Value = None
) -> Value:
    if not missing(alpha) and literal(alpha, "f") != 1:
        terms = g.op("Mul", terms, cast(g, alpha, dtype(x)))
    return ranked_like_output(g, _added_at(g, x, literal(dim, "i") % rank(x), index, terms))


def _added_at(g: Graph, x: Value, axis: int, index: Value, terms: Value) -> Value:
    index = g.op("Reshape", index, constant(g, [-1] + [1] * (rank(x) - 1 - axis)))
    index = g.op("Expand", index, g.op("Shape", terms))
    return _scatter_add(g, x, constant(g, axis), index, terms)


@rule("scatter_add", "elements that something is added to get no gradient")
def _scatter_add(g: Graph, x: Value, dim: Value, index: Value, terms: Value) -> Value:
    zeros = g.op("ConstantOfShape", g.op("Shape", x), value_t=torch.zeros(1, dtype=dtype(x)))
    return g.op("Add", x, stock("scatter_add")(g, zeros, dim, index, terms))


@rule("index_put", "with accumulate: if an index occurs twice, only one of its terms is added")
def _index_put(g: Graph, x: Value, where: Value, terms: Value, accumulate: Value = None) -> Value:
    if missing(accumulate) or not literal(accumulate, "b"):
        return stock("index_put")(g, x, where, terms, accumulate)
    shape, indices = g.op("Shape", x), _indices(g, where)
    places, count = _places(g, shape, indices), constant(g, [len(indices)])
    rest = g.op("Slice", shape, count, constant(g, [2**62]), constant(g, [0]))
    terms = g.op("Expand", cast(g, terms, dtype(x)), _joined(g, g.op("Shape", places), rest))
    rows = _joined(g, constant(g, [-1]), rest)
    flat, places = g.op("Reshape", x, rows), g.op("Reshape", places, constant(g, [-1]))
    flat.setType(x.type().with_sizes([None] * (rank(x) - len(indices) + 1)))
    flat = _added_at(g, flat, 0, places, g.op("Reshape", terms, rows))
    return ranked_like_output(g, g.op("Reshape", flat, shape))


def _joined(g: Graph, *shapes: Value) -> Value:
    return g.op("Concat", *shapes, axis_i=0)


def _indices(g: Graph, where: Value) -> list[Value]:
    """Return one index tensor per leading dimension; a mask becomes the positions of its True."""
    packed = symbolic_helper._is_packed_list(where)
    found = []
    for each in symbolic_helper._unpack_list(where) if packed else [where]:
        if missing(each):
            raise RuntimeError("index_put with accumulate does not support None among its indices")
        if dtype(each) in (torch.bool, torch.uint8):
            true = g.op("NonZero", cast(g, each, torch.bool))
            found += [g.op("Gather", true, constant(g, i), axis_i=0) for i in range(rank(each))]
        else:
            found.append(cast(g, each, torch.int64))
    return found


def _places(g: Graph, shape: Value, indices: list[Value]) -> Value:
    """Combine `indices` of the leading dimensions into an index of the flattened dimension."""
    found = None
    for dim, index in enumerate(indices):
        size = g.op("Gather", shape, constant(g, dim), axis_i=0)
        index = _from_start(g, index, size)
        found = index if found is None else g.op("Add", g.op("Mul", found, size), index)
    return found


def _from_start(g: Graph, index: Value, size: Value) -> Value:
    """Convert negative elements of `index`, which count from the end of `size` elements."""
    return g.op("Where", g.op("Less", index, constant(g, 0)), g.op("Add", index, size), index)


@rule("index", "with two or more index tensors, a negative index reads the wrong element")
def _index(g: Graph, x: Value, where: Value) -> Value:
    packed = symbolic_helper._is_packed_list(where)
    indices = symbolic_helper._unpack_list(where) if packed else [where]
    if sum(not missing(each) for each in indices) > 1:
        shape = g.op("Shape", x)
        for dim, each in enumerate(indices):
            if not missing(each) and dtype(each) in (torch.int32, torch.int64):
                size = g.op("Gather", shape, constant(g, dim), axis_i=0)
                indices[dim] = _from_start(g, cast(g, each, torch.int64), size)
        where = g.op("prim::ListConstruct", *indices)
    return stock("index")(g, x, where)


@rule("embedding_bag", "exported as Loop: no gradient, and the process crashes if it needs none")
def _embedding_bag(_g: Graph, *_arguments: Value) -> Value:
    raise RuntimeError(
        "ORT has no gradient for embedding_bag; use nn.Embedding and sum or average its rows"
    )


@rule("index_fill", "not exported")
def _index_fill(g: Graph, x: Value, dim: Value, index: Value, value: Value) -> Value:
    axis, shape = literal(dim, "i") % rank(x), g.op("Shape", x)
    size = g.op("Gather", shape, constant(g, [axis]), axis_i=0)
    index = g.op("Reshape", index, constant(g, [-1]))
    ones = g.op("ConstantOfShape", g.op("Shape", index), value_t=torch.ones(1, dtype=torch.long))
    zeros = g.op("ConstantOfShape", size, value_t=torch.zeros(1, dtype=torch.long))
    chosen = cast(g, g.op("ScatterElements", zeros, index, ones), torch.bool)
    chosen = g.op("Reshape", chosen, constant(g, [-1] + [1] * (rank(x) - 1 - axis)))
    return g.op("Where", chosen, g.op("Expand", cast(g, value, dtype(x)), shape), x)


@rule("detach", "gradients flow through it", (DETACHED, "", None))
def _detach(g: Graph, x: Value) -> Value:
    # True for most values computed under no_grad, such as positions. Detached integers are
    # decisions of `forward`: ORT backpropagates from these too, and fails at some operators.
    if dtype(x).is_floating_point and not may_have_gradient(x):
        return x
    return ranked_like_output(g, _detached(g, x))


def _detached(g: Graph, value: Value) -> Value:
    # ORT requests a gradient from the first node after a parameter even if it is a detach.
    first = aten(g, DETACHED, value) if value.node().kind() == "prim::Param" else value
    return aten(g, DETACHED, first)


rule("unflatten", "exporter computes the rank in the graph: no gradient")(rules.unflatten)


@rule(
    "div",
    "by a number: ORT fuses a sum of such quotients to ScaledSum, which has no CPU kernel, and "
    "which reads the input of a third term instead of the term",
)
def _div(g: Graph, x: Value, y: Value, *rounding: Value) -> Value:
    if rounding and literal(rounding[0], "s") == "floor":
        return _floor_divide(g, x, y)
    scalar = traced_sizes(list(g.original_node.inputs())[1]) == []
    if rounding or not scalar or not dtype(x).is_floating_point or any(inputs_of(y)):
        return stock("div")(g, x, y, *rounding)
    # ORT rewrites x * (1 / y) as a division, but does not recognize Reciprocal.
    return g.op("Mul", x, g.op("Reciprocal", cast(g, y, dtype(x))))


@rule("floor_divide", "rounds toward zero, torch rounds down")
def _floor_divide(g: Graph, x: Value, y: Value) -> Value:
    if _is_size(x) and _is_size(y):
        return stock("floor_divide")(g, x, y)  # never negative; the exporter can track sizes here
    x, y = _of_one_type(g, x, y)
    if not dtype(x).is_floating_point:
        return g.op("Div", g.op("Sub", x, g.op("Mod", x, y)), y)
    return _whole_times(g, x, y, down=True)


@rule("remainder", "floats: 1 % 0.1 is 0, torch's is almost 0.1")
def _remainder(g: Graph, x: Value, y: Value) -> Value:
    return _rest(g, x, y, down=True)


@rule("fmod", "no gradient")
def _fmod(g: Graph, x: Value, y: Value) -> Value:
    return _rest(g, x, y, down=False)


def _rest(g: Graph, x: Value, y: Value, *, down: bool) -> Value:
    x, y = _of_one_type(g, x, y)
    if not dtype(x).is_floating_point:
        return g.op("Mod", x, y, fmod_i=int(not down))
    return g.op("Sub", x, g.op("Mul", _whole_times(g, x, y, down=down), y))


def _of_one_type(g: Graph, *values: Value) -> list[Value]:
    """Convert `values` to the type of the traced output."""
    kind = dtype(next(iter(g.original_node.outputs())))
    return [cast(g, value, kind) for value in values]


def _whole_times(g: Graph, x: Value, y: Value, *, down: bool) -> Value:
    """Return the quotient x / y rounded down or toward zero, without a gradient.

    The floating-point quotient may be rounded up to an integer, so ONNX's Mod gives the remainder.
    """
    kind, zero = dtype(x), constant(g, 0.0, dtype(x))
    x, y = (_without_gradient(g, value) for value in (x, y))
    over = g.op("Mod", x, y, fmod_i=1)  # with the sign of x
    times = g.op("Round", g.op("Div", g.op("Sub", x, over), y))
    if down:
        apart = g.op("Xor", g.op("Less", over, zero), g.op("Less", y, zero))
        more = g.op("And", apart, g.op("Not", g.op("Equal", over, zero)))
        times = g.op("Sub", times, cast(g, more, kind))
    return g.op("Where", g.op("Equal", y, zero), g.op("Div", x, y), times)


def _without_gradient(g: Graph, value: Value) -> Value:
    if not any(inputs_of(value)):
        return value
    kept = _detached(g, value)
    kept.setType(value.type().with_sizes([None] * rank(value)))
    return kept


_OF_SIZES = {
    f"onnx::{name}"
    for name in ("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mod", "Mul", "Reshape",
                 "Slice", "Squeeze", "Unsqueeze")
}  # fmt: skip


def _is_size(value: Value) -> bool:
    """Return True if `value` depends only on sizes and constants and is never negative."""
    node = value.node()
    if node.kind() == "onnx::Constant":
        held = symbolic_helper._node_get(node, "value")
        return not held.is_floating_point() and bool((held >= 0).all())
    if node.kind() in _OF_SIZES:
        return all(_is_size(each) for each in node.inputs())
    return str(node.kind()) == "onnx::Shape"


def _ctc_gradient() -> Gradient:
    inputs = ["GO(0)", "I(0)", "I(1)", "I(2)", "I(3)", "O(0)", "O(1)", "I(4)", "I(5)"]
    return [aten_node("_ctc_loss_backward", inputs, ["GI(0)"], overload="Tensor")]


@rule("ctc_loss", "no rule", ("_ctc_loss", "Tensor", _ctc_gradient))
def _ctc_loss(
    g: Graph,
    log_probs: Value,
    targets: Value,
    input_lengths: Value,
    target_lengths: Value,
    blank: Value,
    reduction: Value,
    zero_infinity: Value,
) -> Value:
    inputs = (log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    losses, _alpha = aten(g, "_ctc_loss", *inputs, overload="Tensor", outputs=2)
    # ORT assumes that the output has the rank of the first input.
    losses = g.op("Reshape", losses, constant(g, [-1]))
    if literal(zero_infinity, "i"):
        zero = constant(g, 0.0, dtype(log_probs))
        losses = g.op("Where", g.op("IsInf", losses), zero, losses)
    kind = literal(reduction, "i")
    if kind == 1:  # the mean of the losses per target
        lengths = g.op("Max", cast(g, target_lengths, torch.int64), constant(g, [1]))
        mean = g.op("Div", losses, cast(g, lengths, dtype(log_probs)))
        return g.op("ReduceMean", mean, keepdims_i=0)
    return g.op("ReduceSum", losses, keepdims_i=0) if kind == 2 else losses
