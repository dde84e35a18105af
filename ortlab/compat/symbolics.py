"""Export rules for operators that torch's exporter or ORT's gradient builder get wrong or lack.

Each rule names the operator, what happens without it, and writes ONNX nodes in its place. ``ATen``
nodes call torch's own kernel; their gradients are declared beside the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter import (
    _globals,
    symbolic_opset9,
    symbolic_opset14,
)
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType

Graph = Any
"""The exporter's GraphContext: `g.op` adds a node."""
Value = Any
"""A value of the TorchScript or the ONNX graph."""
Gradient = list[tuple[Any, ...]]
"""ORT's declarative form: nodes of (operator, inputs, outputs, attributes)."""

_ATEN = "org.pytorch.aten"


@dataclass(frozen=True)
class Rule:
    """How one torch operator is exported; ``gradient`` is (ATen name, overload, its nodes)."""

    operator: str
    symptom: str
    export: Callable[..., Any]
    gradient: tuple[str, str, Callable[[], Gradient]] | None = None


RULES: list[Rule] = []
_stock: dict[str, Any] = {}
"""ORT's own rules that ours took the place of, to go on to in the ordinary case."""


def register(registry: Any, gradients: Any) -> None:
    """Puts the rules into ORT's registries, which ORTModule hands to torch and to ORT."""
    for rule in RULES:
        stock = registry._SYMBOLICS.get(f"::{rule.operator}")
        if stock is not rule.export:
            _stock[rule.operator] = stock
        registry.register(rule.operator, "", rule.export)
        if rule.gradient is not None:
            name, overload, nodes = rule.gradient
            gradients.register(_ATEN, "ATen", (name, overload), nodes)


def _rule(
    operator: str, symptom: str, gradient: tuple[str, str, Callable[[], Gradient]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(export: Callable[..., Any]) -> Callable[..., Any]:
        RULES.append(Rule(operator, symptom, export, gradient))
        return export

    return add


# ---- small words ---------------------------------------------------------------------------------


def _constant(g: Graph, value: Any, dtype: torch.dtype = torch.long) -> Value:
    return g.op("Constant", value_t=torch.tensor(value, dtype=dtype))


def _literal(value: Value, kind: Any) -> Any:
    """The constant that `value` is ('i', 'f', 'is' as the exporter calls them)."""
    return symbolic_helper._maybe_get_const(value, kind)


def _missing(value: Value | None) -> bool:
    return value is None or symbolic_helper._is_none(value)


def _dtype(value: Value) -> torch.dtype:
    return JitScalarType.from_value(value, JitScalarType.FLOAT).dtype()


def _is_bool(value: Value) -> bool:
    return _dtype(value) == torch.bool


def _rank(value: Value) -> int:
    rank = symbolic_helper._get_tensor_rank(value)
    if rank is None:
        raise RuntimeError("the number of dimensions is not known at export")
    return int(rank)


def _ranked_like_output(g: Graph, value: Value) -> Value:
    """Gives `value` the traced output's type and rank, but no sizes: those are the sample's."""
    traced = next(iter(g.original_node.outputs())).type()
    value.setType(traced.with_sizes([None] * len(traced.sizes())))
    return value


def _aten(g: Graph, name: str, *inputs: Value, overload: str = "", outputs: int = 1) -> Any:
    return g.op(
        f"{_ATEN}::ATen", *inputs, operator_s=name, overload_name_s=overload, outputs=outputs
    )


def _aten_node(name: str, inputs: list[str], outputs: list[str]) -> tuple[Any, ...]:
    return (("ATen", _ATEN), inputs, outputs, {"operator": {"value": name, "dtype": "string"}})


def _all_three() -> tuple[Any, ...]:
    """A mask that asks a backward kernel for the gradients of input, weight and bias."""
    value = {"value": [True, True, True], "dtype": "bool", "is_tensor": True}
    return ("Constant", [], ["Mask"], {"value": value})


def _with_gradient(g: Graph, x: Value, weight: Value) -> Value:
    """`x`, or where no parameter lies before it, `x` plus a zero that depends on `weight`.

    ORT drops the inner nodes of a declared gradient when the first input needs none.
    """
    waiting, seen = [x], {x.unique()}
    while waiting:
        value = waiting.pop()
        if value.node().kind() == "prim::Param" and value.debugName() in g.params_dict:
            return x
        fresh = [v for v in value.node().inputs() if v.unique() not in seen]
        seen.update(v.unique() for v in fresh)
        waiting += fresh
    total = g.op("ReduceSum", weight, keepdims_i=0)
    return g.op("Add", x, g.op("Mul", total, _constant(g, 0.0, _dtype(weight))))


# ---- attention -----------------------------------------------------------------------------------


@_rule(
    "scaled_dot_product_attention",
    "with dropout: 'i < node_->OutputDefs().size() was false', for want of Dropout's mask output",
)
def _attention(
    g: Graph,
    query: Value,
    key: Value,
    value: Value,
    mask: Value = None,
    dropout_p: Value = None,
    is_causal: Value = None,
    scale: Value = None,
    enable_gqa: Value = None,
) -> Value:
    if not _missing(enable_gqa) and _literal(enable_gqa, "i"):
        key, value = (_repeat_heads(g, x, query) for x in (key, value))
    dtype = _dtype(query)
    last = list(range(_rank(key)))
    last[-1], last[-2] = last[-2], last[-1]
    scaled = g.op("Mul", query, _scale(g, query, scale, dtype))
    scores = g.op("MatMul", scaled, g.op("Transpose", key, perm_i=last))
    if not _missing(is_causal) and _literal(is_causal, "i"):
        mask = symbolic_opset14._causal_attention_mask(g, query, key)
    if not _missing(mask):
        if _is_bool(mask):
            # The finite minimum, not infinity: a row that is masked out whole stays finite. Adding
            # it, where filling would do too, keeps the gradient free of a Where.
            zero, least = _constant(g, 0.0, dtype), _constant(g, torch.finfo(dtype).min, dtype)
            mask = g.op("Where", mask, zero, least)
        scores = g.op("Add", scores, mask)
    weights = g.op("Softmax", scores, axis_i=-1)
    ratio = 0.0 if _missing(dropout_p) else float(_literal(dropout_p, "f"))
    if ratio > 0:
        training = _constant(g, True, torch.bool)
        weights, _ = g.op(
            "Dropout", weights, _constant(g, ratio, torch.float32), training, outputs=2
        )
    return g.op("MatMul", weights, value)


def _scale(g: Graph, query: Value, scale: Value | None, dtype: torch.dtype) -> Value:
    """What torch multiplies the scores by: as given, else one over the root of the heads' size."""
    if scale is not None and not _missing(scale):
        given = _literal(scale, "f")
        if isinstance(given, (int, float)):
            return _constant(g, float(given), dtype)
        return g.op("Cast", scale, to_i=JitScalarType.from_dtype(dtype).onnx_type())
    sizes = _traced_sizes(next(iter(g.original_node.inputs())))
    if sizes is not None:
        return _constant(g, 1 / math.sqrt(sizes[-1]), dtype)
    computed = symbolic_opset14._attention_scale(g, query)  # of a model's input no size is known
    return g.op("Cast", computed, to_i=JitScalarType.from_dtype(dtype).onnx_type())


def _size(g: Graph, position: int, dim: int) -> int:
    """A size that the model fixes, of the operator's input at `position`, as the trace saw it."""
    sizes = _traced_sizes(list(g.original_node.inputs())[position])
    if sizes is None:
        raise RuntimeError(f"the size of dimension {dim} is not known at export")
    return sizes[dim]


def _traced_sizes(value: Value) -> list[int] | None:
    tensor = value.type()
    sizes = tensor.sizes() if tensor.kind() == "TensorType" else None
    return None if sizes is None or None in sizes else list(sizes)


def _repeat_heads(g: Graph, x: Value, query: Value) -> Value:
    """[batch, heads, length, size] with as many heads as `query`, each one repeated in place."""
    shape, second = g.op("Shape", x), _constant(g, [1])
    batch, heads = (g.op("Gather", shape, _constant(g, [i]), axis_i=0) for i in (0, 1))
    rest = g.op("Gather", shape, _constant(g, [2, 3]), axis_i=0)
    wanted = g.op("Gather", g.op("Shape", query), second, axis_i=0)
    wide = g.op("Concat", batch, heads, g.op("Div", wanted, heads), rest, axis_i=0)
    flat = g.op("Concat", batch, wanted, rest, axis_i=0)
    return g.op("Reshape", g.op("Expand", g.op("Unsqueeze", x, _constant(g, [2])), wide), flat)


# ---- convolution ---------------------------------------------------------------------------------


def _convolution_gradient() -> Gradient:
    return [
        ("Shape", ["I(2)"], ["Bias_Sizes"]),
        _all_three(),
        _aten_node(
            "convolution_backward",
            ["GO(0)", "I(0)", "I(1)", "Bias_Sizes", *(f"I({i})" for i in range(3, 9)), "Mask"],
            ["GI(0)", "GI(1)", "GI(2)"],
        ),
    ]


@_rule(
    "_convolution",
    "groups > 1: ORT's CPU gradient writes out of bounds, wrong gradients anywhere in the model; "
    "transposed: no gradient on CPU",
    ("convolution", "", _convolution_gradient),
)
def _convolution(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value,
    stride: Value,
    padding: Value,
    dilation: Value,
    transposed: Value,
    output_padding: Value,
    groups: Value,
    *rest: Value,
) -> Value:
    if _literal(groups, "i") == 1 and not _literal(transposed, "i"):
        return _stock["_convolution"](
            g, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *rest
        )
    x = _with_gradient(g, x, weight)
    if _missing(bias):
        bias = _zero_bias(g, weight, int(_literal(groups, "i")) if _literal(transposed, "i") else 0)
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    return _ranked_like_output(g, _aten(g, "convolution", x, weight, bias, *settings))


@_rule(
    "_convolution_mode",
    "padding='same' or 'valid' with groups > 1: as for _convolution",
)
def _convolution_mode(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value,
    stride: Value,
    padding: Value,
    dilation: Value,
    groups: Value,
) -> Value:
    if _literal(groups, "i") == 1:
        return _stock["_convolution_mode"](g, x, weight, bias, stride, padding, dilation, groups)
    steps = _literal(dilation, "is")
    spatial = _rank(weight) - 2
    before, after = [0] * spatial, [0] * spatial
    if _literal(padding, "s") == "same":
        for i in range(spatial):
            total = steps[i % len(steps)] * (_size(g, 1, 2 + i) - 1)
            before[i], after[i] = total // 2, total - total // 2
    pads = _constant(g, [0, 0, *before, 0, 0, *after])
    x = g.op("Pad", _with_gradient(g, x, weight), pads, mode_s="constant")
    if _missing(bias):
        bias = _zero_bias(g, weight, 0)
    nothing = _constant(g, [0] * spatial)
    no, many = _constant(g, False, torch.bool), groups
    inputs = (x, weight, bias, stride, nothing, dilation, no, nothing, many)
    return _ranked_like_output(g, _aten(g, "convolution", *inputs))


def _zero_bias(g: Graph, weight: Value, transposed_groups: int) -> Value:
    """A bias of zeros that depends on `weight`, since the gradient has to have three outputs."""
    rank = _rank(weight)
    zero = _constant(g, 0.0, _dtype(weight))
    if not transposed_groups:
        axes = list(range(1, rank))
        total = g.op("ReduceSum", weight, _constant(g, axes), keepdims_i=0)
        return g.op("Mul", total, zero)
    axes = [0, *range(2, rank)]
    total = g.op("ReduceSum", weight, _constant(g, axes), keepdims_i=0)
    repeated = g.op("Concat", *[total] * transposed_groups, axis_i=0)
    return g.op("Mul", repeated, zero)



# ---- normalisation -------------------------------------------------------------------------------


@_rule("layer_norm", "without a bias or a weight: 'Duplicate definition of name (_grad)'")
def _layer_norm(
    g: Graph, x: Value, shape: Value, weight: Value, bias: Value, eps: Value, cudnn: Value
) -> Value:
    sizes, dtype = _literal(shape, "is"), _dtype(x)
    if _missing(weight):
        weight = g.op("Constant", value_t=torch.ones(*sizes, dtype=dtype))
    if _missing(bias):
        bias = g.op("Constant", value_t=torch.zeros(*sizes, dtype=dtype))
    return _stock["layer_norm"](g, x, shape, weight, bias, eps, cudnn)


def _batch_norm_gradient() -> Gradient:
    inputs = ["GO(0)", "I(0)", "I(1)", "I(3)", "I(4)", "O(1)", "O(2)", "I(5)", "I(7)", "Mask"]
    return [
        _all_three(),
        _aten_node("native_batch_norm_backward", inputs, ["GI(0)", "GI(1)", "GI(2)"]),
    ]


@_rule(
    "batch_norm",
    "the running statistics are not updated, and differ from torch's",
    ("native_batch_norm", "", _batch_norm_gradient),
)
def _batch_norm(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value,
    mean: Value,
    variance: Value,
    training: Value,
    momentum: Value,
    eps: Value,
    cudnn: Value,
) -> Value:
    if not _globals.GLOBALS.export_training and not _missing(weight):
        return symbolic_opset14.batch_norm(
            g, x, weight, bias, mean, variance, training, momentum, eps, cudnn
        )
    if _missing(weight):
        # They depend on x, since the gradient has to have three outputs.
        axes = [axis for axis in range(_rank(x)) if axis != 1]
        total = g.op("ReduceSum", x, _constant(g, axes), keepdims_i=0)
        bias = g.op("Mul", total, _constant(g, 0.0, _dtype(x)))
        weight = g.op("Add", bias, _constant(g, 1.0, _dtype(x)))
    else:
        x = _with_gradient(g, x, weight)
    float32 = JitScalarType.FLOAT.onnx_type()
    numbers = (g.op("Cast", number, to_i=float32) for number in (momentum, eps))
    # Torch's kernel updates the running statistics in place, in the module's own buffers.
    inputs = (x, weight, bias, mean, variance, training, *numbers)
    return _ranked_like_output(g, _aten(g, "native_batch_norm", *inputs, outputs=3)[0])


# ---- the rest ------------------------------------------------------------------------------------


@_rule("diff", "no rule")
def _diff(
    g: Graph, x: Value, n: Value, dim: Value, prepend: Value = None, append: Value = None
) -> Value:
    axis = _literal(dim, "i")
    parts = [part for part in (prepend, x, append) if not _missing(part)]
    x = parts[0] if len(parts) == 1 else g.op("Concat", *parts, axis_i=axis)
    axes = _constant(g, [axis])
    for _ in range(_literal(n, "i")):
        later = g.op("Slice", x, _constant(g, [1]), _constant(g, [2**62]), axes)
        earlier = g.op("Slice", x, _constant(g, [0]), _constant(g, [-1]), axes)
        x = g.op("Sub", later, earlier)
    return x


def _cumsum_gradient() -> Gradient:
    return [("CumSum", ["GO(0)", "I(1)"], ["GI(0)"], {"reverse": {"value": 1, "dtype": "int"}})]


@_rule(
    "cumsum",
    "of a bool: no kernel for CumSum; of floats: no gradient",
    ("cumsum", "", _cumsum_gradient),
)
def _cumsum(g: Graph, x: Value, dim: Value, dtype: Value) -> Value:
    result = _dtype(x) if _missing(dtype) else JitScalarType(_literal(dtype, "i")).dtype()
    if result.is_floating_point:
        x = g.op("Cast", x, to_i=JitScalarType.from_dtype(result).onnx_type())
        return _ranked_like_output(g, _aten(g, "cumsum", x, dim, dtype))
    return g.op("CumSum", g.op("Cast", x, to_i=JitScalarType.INT64.onnx_type()), dim)


@_rule("where", "an input that is broadcast gets a gradient of the output's shape")
def _where(g: Graph, condition: Value, x: Value = None, y: Value = None, *rest: Value) -> Value:
    if x is None:
        return symbolic_opset9.where(g, condition, x, y, *rest)
    if not _is_bool(condition):
        condition = g.op("Cast", condition, to_i=JitScalarType.BOOL.onnx_type())
    values, traced = [x, y], list(g.original_node.inputs())[1:]
    sizes = _traced_sizes(next(iter(g.original_node.outputs())))
    shape = None
    for i, value in enumerate(values):
        if not _never_broadcast(value, _traced_sizes(traced[i]), sizes):
            shape = shape or g.op("Shape", g.op("Where", condition, x, y))
            values[i] = g.op("Expand", value, shape)
    return g.op("Where", condition, *values)


def _never_broadcast(value: Value, sizes: list[int] | None, output: list[int] | None) -> bool:
    """Whether `value` has the output's shape in every batch; a 1 may be the sample's batch size."""
    if value.node().kind() in ("onnx::Constant", "prim::Constant"):
        return True  # has no gradient
    return sizes is not None and sizes == output and 1 not in sizes


@_rule("unflatten", "the exporter computes the rank in the graph: no gradient")
def _unflatten(g: Graph, x: Value, dim: Value, sizes: Value) -> Value:
    rank, axis = _rank(x), _literal(dim, "i") % _rank(x)
    if symbolic_helper._is_packed_list(sizes):
        parts = [g.op("Reshape", s, _constant(g, [1])) for s in symbolic_helper._unpack_list(sizes)]
    else:
        parts = [_constant(g, list(_literal(sizes, "is")))]
    shape, along = g.op("Shape", x), _constant(g, [0])
    if axis > 0:
        parts.insert(0, g.op("Slice", shape, _constant(g, [0]), _constant(g, [axis]), along))
    if axis + 1 < rank:
        parts.append(g.op("Slice", shape, _constant(g, [axis + 1]), _constant(g, [rank]), along))
    return g.op("Reshape", x, g.op("Concat", *parts, axis_i=0) if len(parts) > 1 else parts[0])
