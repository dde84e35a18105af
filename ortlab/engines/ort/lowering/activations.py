"""Rules for activation functions, dropout with a given mask, and their gradients.

Activations without a rule are decomposed by torch. Gradients follow ``torch/_decomp`` and
``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    MICROSOFT,
    Number,
    OnnxGraph,
    Value,
    lowers,
)

aten = torch.ops.aten
_TANH_FORM = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
"""Constants of the tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""


@lowers(aten.gelu.default)
def _gelu(graph: OnnxGraph, node: fx.Node, x: Value, *, approximate: str = "none") -> Value:
    """Lower gelu to Gelu."""
    return graph.unary("Gelu", x, approximate=approximate)


@lowers(aten.gelu_backward.default)
def _gelu_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, x: Value, *, approximate: str = "none"
) -> Value:
    """Lower gelu_backward to the derivative with Erf and Exp, or with Tanh."""

    def times(one: Value | float, other: Value | float) -> Value:
        return graph.binary("Mul", one, other)

    if approximate == "none":
        # As few operators as possible: each is a pass over the memory. The density comes first, for
        # three intermediate results at once; after the distribution it would be four.
        part = times(x, 1 / math.sqrt(2))
        density = graph.binary("Div", part, graph.unary("Exp", times(part, part)))
        density = times(density, 1 / math.sqrt(math.pi))
        cdf = graph.unary("HardSigmoid", graph.unary("Erf", part), alpha=0.5, beta=0.5)
        return times(gradient, graph.binary("Add", density, cdf))
    square = times(x, x)
    inner = times(graph.binary("Add", times(square, _CUBIC), 1.0), times(x, _TANH_FORM))
    tanh = graph.unary("Tanh", inner)
    left = times(graph.binary("Add", tanh, 1.0), 0.5)
    slope = graph.binary("Add", times(square, 3 * _CUBIC * _TANH_FORM), _TANH_FORM)
    curve = graph.binary("Sub", 1.0, times(tanh, tanh))
    right = times(times(x, 0.5), times(curve, slope))
    return times(gradient, graph.binary("Add", left, right))


@lowers(aten.silu.default)
def _silu(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower silu to QuickGelu with alpha 1."""
    if x.dtype is not torch.float32:
        return graph.binary("Mul", x, graph.unary("Sigmoid", x))
    return graph.unary("QuickGelu", x, domain=MICROSOFT, alpha=1.0)


@lowers(aten.silu_backward.default)
def _silu_backward(graph: OnnxGraph, node: fx.Node, gradient: Value, x: Value) -> Value:
    """Lower silu_backward to Sigmoid and products."""
    sigmoid = graph.unary("Sigmoid", x)
    rest = graph.binary("Mul", x, graph.binary("Sub", 1.0, sigmoid))
    slope = graph.binary("Mul", sigmoid, graph.binary("Add", rest, 1.0))
    return graph.binary("Mul", gradient, slope)


@lowers(aten.sigmoid_backward.default)
def _sigmoid_backward(graph: OnnxGraph, node: fx.Node, gradient: Value, y: Value) -> Value:
    """Lower sigmoid_backward to products."""
    return graph.binary("Mul", gradient, graph.binary("Mul", y, graph.binary("Sub", 1.0, y)))


@lowers(aten.tanh_backward.default)
def _tanh_backward(graph: OnnxGraph, node: fx.Node, gradient: Value, y: Value) -> Value:
    """Lower tanh_backward to products."""
    return graph.binary("Mul", gradient, graph.binary("Sub", 1.0, graph.binary("Mul", y, y)))


@lowers(aten.threshold_backward.default)
def _threshold_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, x: Value, threshold: Number
) -> Value:
    """Lower threshold_backward, of ReLU, to LessOrEqual, Where; NaN passes, as in torch."""
    return graph.where(graph.compare("LessOrEqual", x, threshold), 0, gradient)


@lowers(aten.hardtanh_backward.default)
def _hardtanh_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, x: Value, low: Number, high: Number
) -> Value:
    """Lower hardtanh_backward, of ReLU6, to comparisons, Or, Where; NaN passes, as in torch."""
    below, above = graph.compare("LessOrEqual", x, low), graph.compare("GreaterOrEqual", x, high)
    outside = graph.value("Or", below, above, shape=x.shape, dtype=torch.bool)
    return graph.where(outside, 0, gradient)


@lowers(aten.leaky_relu.default)
def _leaky_relu(graph: OnnxGraph, node: fx.Node, x: Value, slope: Number = 0.01) -> Value:
    """Lower leaky_relu to LeakyRelu."""
    return graph.unary("LeakyRelu", x, alpha=float(slope))


@lowers(aten.hardswish.default)
def _hardswish(graph: OnnxGraph, node: fx.Node, x: Value) -> Value:
    """Lower hardswish to HardSwish."""
    return graph.unary("HardSwish", x)


@lowers(aten.native_dropout_backward.default)
def _dropout_backward(
    graph: OnnxGraph, node: fx.Node, gradient: Value, mask: Value, scale: Number
) -> Value:
    """Lower native_dropout_backward, or dropout with a drawn mask, to DequantizeLinear, Mul."""
    if mask.dtype is torch.uint8 and gradient.dtype is torch.float32:
        factor = graph.scalar(scale, gradient.dtype)
        kept = graph.value(
            "DequantizeLinear", mask, factor, shape=mask.shape, dtype=gradient.dtype
        )
    else:
        kept = graph.binary("Mul", graph.cast(mask, gradient.dtype), scale)
    return graph.binary("Mul", gradient, kept)
