"""Export rules for layers: convolution, normalization, dropout, recurrence, pooling, resizing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter import (
    symbolic_opset9,
)

from ortlab.engines.ortmodule.compat.symbolics.builder import (
    Gradient,
    all_of,
    aten,
    aten_node,
    backwards,
    rule,
    size,
    stock,
    with_gradient,
)
from ortlab.engines.ortmodule.compat.symbolics.run_by_torch import EXPORTS
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
)
from ortlab.engines.torchscript.rules import dropout

# ---- convolution ---------------------------------------------------------------------------------


def _convolution_gradient() -> Gradient:
    return [
        ("Shape", ["I(2)"], ["Bias_Sizes"]),
        all_of(3),
        aten_node(
            "convolution_backward",
            ["GO(0)", "I(0)", "I(1)", "Bias_Sizes", *(f"I({i})" for i in range(3, 9)), "Mask"],
            ["GI(0)", "GI(1)", "GI(2)"],
        ),
    ]


@rule(
    "_convolution",
    "groups > 1: ORT's CPU gradient writes out of bounds and can corrupt every gradient of the "
    "model; transposed: no gradient on CPU",
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
    if literal(groups, "i") == 1 and not literal(transposed, "i"):
        return stock("_convolution")(
            g, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *rest
        )
    x = with_gradient(g, x, weight, bias)
    if missing(bias):
        bias = _zero_bias(g, weight, int(literal(groups, "i")) if literal(transposed, "i") else 0)
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    return ranked_like_output(g, aten(g, "convolution", x, weight, bias, *settings))


@rule(
    "_convolution_mode",
    "padding='same' or 'valid' with groups > 1: same as for _convolution",
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
    if literal(groups, "i") == 1:
        return stock("_convolution_mode")(g, x, weight, bias, stride, padding, dilation, groups)
    steps = literal(dilation, "is")
    spatial = rank(weight) - 2
    before, after = [0] * spatial, [0] * spatial
    if literal(padding, "s") == "same":
        for i in range(spatial):
            total = steps[i % len(steps)] * (size(g, 1, 2 + i) - 1)
            before[i], after[i] = total // 2, total - total // 2
    pads = constant(g, [0, 0, *before, 0, 0, *after])
    x = g.op("Pad", with_gradient(g, x, weight, bias), pads, mode_s="constant")
    if missing(bias):
        bias = _zero_bias(g, weight, 0)
    nothing = constant(g, [0] * spatial)
    no, many = constant(g, False, torch.bool), groups
    inputs = (x, weight, bias, stride, nothing, dilation, no, nothing, many)
    return ranked_like_output(g, aten(g, "convolution", *inputs))


def _zero_bias(g: Graph, weight: Value, transposed_groups: int) -> Value:
    """Add a zero bias that depends on `weight`, since the gradient must have three outputs."""
    zero = constant(g, 0.0, dtype(weight))
    if not transposed_groups:
        axes = list(range(1, rank(weight)))
        total = g.op("ReduceSum", weight, constant(g, axes), keepdims_i=0)
        return g.op("Mul", total, zero)
    axes = [0, *range(2, rank(weight))]
    total = g.op("ReduceSum", weight, constant(g, axes), keepdims_i=0)
    repeated = g.op("Concat", *[total] * transposed_groups, axis_i=0)
    return g.op("Mul", repeated, zero)


# ---- normalization -------------------------------------------------------------------------------


@rule(
    "layer_norm",
    "without a bias or a weight: 'Duplicate definition of name (_grad)'; under autocast: 'bound to "
    "different types'",
)
def _layer_norm(
    g: Graph, x: Value, shape: Value, weight: Value, bias: Value, eps: Value, cudnn: Value
) -> Value:
    sizes = literal(shape, "is")

    def filled(number: float, kind: torch.dtype) -> Value:
        if isinstance(sizes, list):
            return g.op("Constant", value_t=torch.full(sizes, number, dtype=kind))
        given = _as_tensor(g, shape)  # such as x.shape[-1:]
        return g.op("ConstantOfShape", given, value_t=torch.tensor([number], dtype=kind))

    if missing(weight):
        weight = filled(1.0, dtype(x))
    if missing(bias):
        bias = filled(0.0, dtype(weight))
    if not isinstance(sizes, list):  # only their number counts from here on
        shape = constant(g, [1] * len(symbolic_helper._unpack_list(shape)))
    kind, precise = dtype(x), dtype(weight)
    if kind == precise:
        return stock("layer_norm")(g, x, shape, weight, bias, eps, cudnn)
    # Under autocast, torch's CPU kernel accepts half-precision inputs with a float32 weight.
    x = cast(g, x, precise)
    return cast(g, stock("layer_norm")(g, x, shape, weight, bias, eps, cudnn), kind)


def _batch_norm_gradient() -> Gradient:
    inputs = ["GO(0)", "I(0)", "I(1)", "I(3)", "I(4)", "O(1)", "O(2)", "I(5)", "I(7)", "Mask"]
    return [
        all_of(3),
        aten_node("native_batch_norm_backward", inputs, ["GI(0)", "GI(1)", "GI(2)"]),
    ]


@rule(
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
    _cudnn: Value,
) -> Value:
    # In evaluation mode too: ORT's gradient would treat it as a BatchNorm in training mode.
    if missing(weight):
        weight, bias = _ones_and_zeros(g, x)
    else:
        x = with_gradient(g, x, weight, bias)
    numbers = (cast(g, number, torch.float32) for number in (momentum, eps))
    # Torch's kernel updates the running statistics in place, in the module's own buffers.
    inputs = (x, weight, bias, mean, variance, training, *numbers)
    return ranked_like_output(g, aten(g, "native_batch_norm", *inputs, outputs=3)[0])


def _ones_and_zeros(g: Graph, x: Value) -> tuple[Value, Value]:
    """Return a weight and a bias without effect for the channels of `x`.

    Both depend on `x`, since the gradient of a norm must have three outputs.
    """
    axes = [axis for axis in range(rank(x)) if axis != 1]
    total = g.op("ReduceSum", x, constant(g, axes), keepdims_i=0)
    zeros = g.op("Mul", total, constant(g, 0.0, dtype(x)))
    return g.op("Add", zeros, constant(g, 1.0, dtype(x))), zeros


@rule(
    "group_norm",
    "'Const_0 is not a valid intermediate output' if its input needs no gradient; without a "
    "weight: no gradient",
)
def _group_norm(
    g: Graph, x: Value, groups: Value, weight: Value, bias: Value, eps: Value, cudnn: Value
) -> Value:
    if missing(weight) or missing(bias):
        ones, zeros = _ones_and_zeros(g, x)
        weight, bias = ones if missing(weight) else weight, zeros if missing(bias) else bias
    else:
        x = with_gradient(g, x, weight, bias)
    return stock("group_norm")(g, x, groups, weight, bias, eps, cudnn)


@rule("instance_norm", "no gradient for InstanceNormalization")
def _instance_norm(
    g: Graph,
    x: Value,
    weight: Value,
    bias: Value,
    mean: Value,
    _variance: Value,
    of_input: Value,
    _momentum: Value,
    eps: Value,
    cudnn: Value,
) -> Value:
    """Write it as a group norm of one channel each; running statistics are not supported."""
    if not (missing(mean) and literal(of_input, "i")):
        raise RuntimeError("instance_norm with running statistics is not supported")
    return _group_norm(g, x, constant(g, size(g, 0, 1)), weight, bias, eps, cudnn)


# ---- dropout -------------------------------------------------------------------------------------


@rule(
    "dropout",
    "p = 1: ORT's kernel fails; half precision on a CPU: its gradient is written as operators that "
    "freeze the ratio at export",
)
def _dropout(g: Graph, x: Value, ratio: Value, training: Value) -> Value:
    if not literal(training, "b"):
        return x
    if number(ratio) == 1:
        return g.op("Mul", x, constant(g, 0.0, dtype(x)))
    return dropout(g, x, number(ratio))


# ---- recurrence ----------------------------------------------------------------------------------


def _recurrent(operator: str, kind: str) -> None:
    @rule(operator, "with dropout: not exported in training; bidirectional: no gradient")
    def export(g: Graph, *args: Any) -> Any:
        if symbolic_helper._is_tensor_list(args[3]):  # of a packed sequence
            return stock(operator)(g, *args)
        x, hidden, weights, biased, count, ratio, training, both_ways, batch_first = args
        layers, ways = literal(count, "i"), 2 if literal(both_ways, "i") else 1
        drop = literal(ratio, "f") if literal(training, "i") else 0.0
        states = symbolic_helper._unpack_list(hidden) if kind == "LSTM" else [hidden]
        flat = symbolic_helper._unpack_list(weights)
        each = len(flat) // (layers * ways)
        swap = {"perm_i": [1, 0, 2]} if literal(batch_first, "i") else None
        x = g.op("Transpose", x, **swap) if swap else x
        last: list[list[Value]] = [[] for _ in states]
        for layer in range(layers):
            if layer > 0 and drop > 0:
                x = dropout(g, x, drop)
            found = []
            for way in range(ways):
                number = layer * ways + way
                begin, end, axis = (constant(g, [n]) for n in (number, number + 1, 0))
                first = [g.op("Slice", state, begin, end, axis) for state in states]
                y, *after = symbolic_opset9._generic_rnn(
                    g,
                    kind,
                    backwards(g, x, 0) if way else x,
                    first if kind == "LSTM" else first[0],
                    flat[number * each : (number + 1) * each],
                    literal(biased, "i"),
                    1,
                    0.0,
                    True,
                    False,
                )
                found.append(backwards(g, y, 0) if way else y)
                for values, value in zip(last, after, strict=True):
                    values.append(value)
            x = g.op("Concat", *found, axis_i=2) if ways == 2 else found[0]
        x = g.op("Transpose", x, **swap) if swap else x
        return (x, *(g.op("Concat", *values, axis_i=0) for values in last))


for _operator, _kind in (("lstm", "LSTM"), ("gru", "GRU")):
    _recurrent(_operator, _kind)


# ---- pooling -------------------------------------------------------------------------------------


def _max_pool_gradient(dims: int) -> Gradient:
    inputs = ["GO(0)", *(f"I({i})" for i in range(6)), "O(1)"]
    return [aten_node(f"max_pool{dims}d_with_indices_backward", inputs, ["GI(0)"])]


def _max_pool(operator: str, dims: int) -> None:
    """Declare the rule for `operator`; 1-D pooling is written as 2-D with a dimension of size 1."""
    flat, dims = dims == 1, max(dims, 2)
    kernel = f"max_pool{dims}d_with_indices"
    gradient = (kernel, "", functools.partial(_max_pool_gradient, dims))

    @rule(operator, "ORT's CPU gradient of MaxPool crashes: segmentation fault", gradient)
    def export(g: Graph, x: Value, *settings: Value) -> Any:
        size, stride, padding, dilation = (list(literal(each, "is")) for each in settings[:4])
        lists = [size, stride or size, padding, dilation]
        if flat:
            lists = [[fill, *each] for fill, each in zip((1, 1, 0, 1), lists, strict=True)]
            x = g.op("Unsqueeze", x, constant(g, [-2]))
        inputs = (x, *(constant(g, each) for each in lists), settings[4])
        found = aten(g, kernel, *inputs, outputs=2)
        if flat:
            found = [g.op("Squeeze", each, constant(g, [-2])) for each in found]
        ranked_like_output(g, found[0])
        return found if operator.endswith("_indices") else found[0]


for _dims in (1, 2, 3):
    _max_pool(f"max_pool{_dims}d", _dims)
    _max_pool(f"max_pool{_dims}d_with_indices", _dims)


# ---- padding and resizing ----------------------------------------------------------------------


@rule("pad", "'Pad gradient currently supports constant mode only'")
def _pad(g: Graph, x: Value, sizes: Value, mode: Value, value: Value) -> Value:
    kind, edges = literal(mode, "s"), literal(sizes, "is")
    name = {"reflect": "reflection", "replicate": "replication"}.get(kind)
    if name is None or not isinstance(edges, list):
        return stock("pad")(g, x, sizes, mode, value)
    return EXPORTS[f"{name}_pad{len(edges) // 2}d"](g, x, constant(g, edges))


def _resize(operator: str, dims: int, *, corners: bool) -> None:
    """Declare the rule of a resize, which is told whether to align corners if `corners`."""
    first = 2 + corners
    scales = [f"I({first + i})" for i in range(dims)]

    def gradient() -> Gradient:
        inputs = ["GO(0)", "I(1)", "Sizes", *["I(2)"][:corners], *scales]
        return [
            ("Shape", ["I(0)"], ["Sizes"]),
            aten_node(f"{operator}_backward", inputs, ["GI(0)"]),
        ]

    @rule(operator, "no ResizeGrad on CPU, or a gradient of one size", (operator, "", gradient))
    def export(g: Graph, x: Value, output_size: Value, *rest: Value) -> Value:
        factors = rest[-1]
        if missing(factors):
            wanted, given = _as_tensor(g, output_size), [factors] * dims
        else:
            numbers = literal(factors, "fs")
            shape = g.op("Slice", g.op("Shape", x), constant(g, [2]), constant(g, [2 + dims]))
            scaled = g.op("Mul", cast(g, shape, torch.float64), constant(g, numbers, torch.float64))
            wanted = cast(g, g.op("Floor", scaled), torch.int64)
            given = [constant(g, number, torch.float32) for number in numbers]
        return ranked_like_output(g, aten(g, operator, x, wanted, *rest[:-1], *given))


def _as_tensor(g: Graph, sizes: Value) -> Value:
    """Convert a list of sizes, some of them computed in the graph, to a tensor."""
    if not symbolic_helper._is_packed_list(sizes):
        return sizes
    parts = symbolic_helper._unpack_list(sizes)
    return g.op("Concat", *(g.op("Reshape", p, constant(g, [1])) for p in parts), axis_i=0)


for _operator, _dims in (
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_bicubic2d", 2),
    ("upsample_trilinear3d", 3),
):
    _resize(_operator, _dims, corners=True)
for _dims in (1, 2, 3):
    _resize(f"upsample_nearest{_dims}d", _dims, corners=False)
