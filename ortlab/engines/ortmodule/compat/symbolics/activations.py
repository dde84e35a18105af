"""Export rules for activations, and for losses that a model computes itself.

ORT has no gradient for the ONNX operators that the exporter writes for these, so these rules use
operators that have one. At points where a function is not differentiable, each rule takes the same
branch as torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ortlab.engines.ortmodule.compat.symbolics.builder import rule, stock
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
)

_NO_GRADIENT = "no gradient"
_NO_RULE = "no rule"


def _like(g: Graph, x: Value, value: float) -> Value:
    """Add `value` as a constant of the type of `x`."""
    return constant(g, value, dtype(x))


def _where_positive(g: Graph, x: Value, above: Value, below: Callable[[Value], Value]) -> Value:
    """Select `above` where x > 0, else `below` of x; elsewhere `below` gets 0 to stay finite."""
    zero = _like(g, x, 0.0)
    positive = g.op("Greater", x, zero)
    shape = g.op("Shape", x)
    return g.op("Where", positive, above, below(g.op("Where", positive, _zeros(g, shape, x), x)))


def _zeros(g: Graph, shape: Value, x: Value) -> Value:
    value = torch.zeros(1, dtype=dtype(x))
    return g.op("ConstantOfShape", shape, value_t=value)


def _exponential(g: Graph, x: Value, alpha: float, scale: float, input_scale: float) -> Value:
    def below(negative: Value) -> Value:
        raised = g.op("Exp", g.op("Mul", negative, _like(g, x, input_scale)))
        less = g.op("Sub", raised, _like(g, x, 1.0))
        return g.op("Mul", less, _like(g, x, alpha * scale))

    return _where_positive(g, x, g.op("Mul", x, _like(g, x, scale)), below)


@rule("elu", _NO_GRADIENT)
def _elu(g: Graph, x: Value, alpha: Value, scale: Value, input_scale: Value) -> Value:
    return _exponential(g, x, number(alpha), number(scale), number(input_scale))


@rule("selu", _NO_GRADIENT)
def _selu(g: Graph, x: Value) -> Value:
    return _exponential(g, x, 1.6732632423543772, 1.0507009873554805, 1.0)


@rule("celu", _NO_GRADIENT)
def _celu(g: Graph, x: Value, alpha: Value) -> Value:
    return _exponential(g, x, number(alpha), 1.0, 1 / number(alpha))


@rule("prelu", _NO_GRADIENT)
def _prelu(g: Graph, x: Value, weight: Value) -> Value:
    slope = g.op("Reshape", weight, constant(g, [-1] + [1] * (rank(x) - 2)))
    return _where_positive(g, x, x, lambda negative: g.op("Mul", negative, slope))


def _between(g: Graph, x: Value, low: float, high: float) -> Value:
    least, most = _like(g, x, low), _like(g, x, high)
    below = g.op("Where", g.op("Less", x, most), x, most)
    return g.op("Where", g.op("Greater", x, least), below, least)


@rule("hardtanh", "at both limits the gradient of Clip is 1, torch's is 0")
def _hardtanh(g: Graph, x: Value, low: Value, high: Value) -> Value:
    return _between(g, x, number(low), number(high))


@rule("relu6", "like hardtanh: an activation of 0 gets a gradient")
def _relu6(g: Graph, x: Value) -> Value:
    return _between(g, x, 0.0, 6.0)


@rule("hardsigmoid", _NO_GRADIENT)
def _hardsigmoid(g: Graph, x: Value) -> Value:
    moved = g.op("Add", x, _like(g, x, 3.0))
    return g.op("Mul", g.op("Clip", moved, _like(g, x, 0.0), _like(g, x, 6.0)), _like(g, x, 1 / 6))


@rule("hardswish", _NO_GRADIENT)
def _hardswish(g: Graph, x: Value) -> Value:
    return g.op("Mul", x, _hardsigmoid(g, x))


@rule("threshold", "exported only for a threshold of 0")
def _threshold(g: Graph, x: Value, least: Value, value: Value) -> Value:
    above = g.op("Greater", x, _like(g, x, number(least)))
    shape = g.op("Shape", x)
    other = g.op("Add", _zeros(g, shape, x), _like(g, x, number(value)))
    return g.op("Where", above, x, other)


@rule("softplus", _NO_GRADIENT)
def _softplus(g: Graph, x: Value, beta: Value, _threshold: Value) -> Value:
    scale = _like(g, x, number(beta))
    return g.op("Div", _plain_softplus(g, g.op("Mul", x, scale)), scale)


@rule("mish", "no gradient, since Softplus has none")
def _mish(g: Graph, x: Value) -> Value:
    return g.op("Mul", x, g.op("Tanh", _plain_softplus(g, x)))


def _plain_softplus(g: Graph, x: Value) -> Value:
    """Write x/2 + |x|/2 + log(1 + exp(-|x|)), which is finite everywhere with slope 1/2 at 0."""
    size = g.op("Abs", x)
    rest = g.op("Log", g.op("Add", _like(g, x, 1.0), g.op("Exp", g.op("Neg", size))))
    return g.op("Add", g.op("Mul", _like(g, x, 0.5), g.op("Add", x, size)), rest)


@rule("log_sigmoid", "log of ORT's sigmoid: 1% off at -15, -inf from -18.5 on")
def _log_sigmoid(g: Graph, x: Value) -> Value:
    return g.op("Neg", _plain_softplus(g, g.op("Neg", x)))


@rule("rms_norm", _NO_RULE)
def _rms_norm(g: Graph, x: Value, shape: Value, weight: Value, eps: Value) -> Value:
    axes = list(range(rank(x) - len(literal(shape, "is")), rank(x)))
    least = torch.finfo(dtype(x)).eps if missing(eps) else number(eps)
    square = g.op("ReduceMean", g.op("Mul", x, x), axes_i=axes, keepdims_i=1)
    scaled = g.op("Div", x, g.op("Sqrt", g.op("Add", square, _like(g, x, least))))
    return scaled if missing(weight) else g.op("Mul", scaled, weight)


# ---- losses --------------------------------------------------------------------------------------


def _reduced(g: Graph, losses: Value, reduction: Value) -> Value:
    kind = literal(reduction, "i")
    operator = {0: None, 1: "ReduceMean", 2: "ReduceSum"}[kind]
    return losses if operator is None else g.op(operator, losses, keepdims_i=0)


@rule("cross_entropy_loss", "with label smoothing or probabilities as targets: not exported")
def _cross_entropy_loss(
    g: Graph,
    x: Value,
    target: Value,
    weight: Value,
    reduction: Value,
    ignored: Value,
    smoothing: Value,
) -> Value:
    amount, probabilities = number(smoothing), dtype(target).is_floating_point
    if amount == 0 and not probabilities:
        return stock("cross_entropy_loss")(g, x, target, weight, reduction, ignored, smoothing)
    axis = min(rank(x) - 1, 1)
    logs, classes = g.op("LogSoftmax", x, axis_i=axis), g.op("Shape", x)
    classes = cast(g, g.op("Gather", classes, constant(g, axis), axis_i=0), dtype(x))
    weighted = logs
    if not missing(weight):
        shape = constant(g, [-1] + [1] * (rank(x) - 1 - axis))
        weighted = g.op("Mul", logs, g.op("Reshape", weight, shape))
    share = g.op("Div", _like(g, x, amount), classes)
    if probabilities:
        wanted = g.op("Add", g.op("Mul", target, _like(g, x, 1 - amount)), share)
        return _reduced(g, _over_classes(g, g.op("Mul", weighted, wanted), axis), reduction)
    rest = (target, weight, reduction, ignored, constant(g, 0.0, torch.float32))
    hard = stock("cross_entropy_loss")(g, x, *rest)
    kept = g.op("Not", g.op("Equal", target, ignored))
    # Where instead of Mul: if all targets are ignored the mean is 0 / 0, but the gradients are 0.
    smooth = g.op("Where", kept, _over_classes(g, weighted, axis), _like(g, x, 0.0))
    smooth = _mean_of_kept(g, smooth, kept, target, weight, reduction)
    hard = g.op("Mul", hard, _like(g, x, 1 - amount))
    return g.op("Add", hard, g.op("Mul", smooth, share))


def _over_classes(g: Graph, terms: Value, axis: int) -> Value:
    return g.op("Neg", g.op("ReduceSum", terms, constant(g, [axis]), keepdims_i=0))


def _mean_of_kept(
    g: Graph, losses: Value, kept: Value, target: Value, weight: Value, reduction: Value
) -> Value:
    """Reduce `losses`; a mean is the weighted mean over the targets that are not ignored."""
    if literal(reduction, "i") != 1:
        return _reduced(g, losses, reduction)
    count = cast(g, kept, dtype(losses))
    if not missing(weight):
        safe = g.op("Where", kept, target, constant(g, 0))
        count = g.op("Mul", count, g.op("Gather", weight, safe, axis_i=0))
    total = g.op("ReduceSum", count, keepdims_i=0)
    return g.op("Div", g.op("ReduceSum", losses, keepdims_i=0), total)


@rule(
    "binary_cross_entropy_with_logits",
    "log of ORT's sigmoid: 1% off at -15, inf with NaN gradients from -18.5 on",
)
def _binary_cross_entropy_with_logits(
    g: Graph, x: Value, target: Value, weight: Value, of_ones: Value, reduction: Value
) -> Value:
    """Write (1 - y) * x + (1 + (p - 1) * y) * softplus(-x), which is torch's own formula."""
    one = _like(g, x, 1.0)
    missed = _plain_softplus(g, g.op("Neg", x))
    if not missing(of_ones):
        more = g.op("Mul", g.op("Sub", of_ones, one), target)
        missed = g.op("Mul", g.op("Add", one, more), missed)
    losses = g.op("Add", g.op("Mul", g.op("Sub", one, target), x), missed)
    if not missing(weight):
        losses = g.op("Mul", losses, weight)
    return _reduced(g, losses, reduction)


def _nll_loss(operator: str) -> None:
    @rule(operator, "no gradient, and an error that names no operator")
    def export(
        g: Graph, x: Value, target: Value, weight: Value, reduction: Value, ignored: Value
    ) -> Value:
        axis = min(rank(x) - 1, 1)
        kept = g.op("Not", g.op("Equal", target, ignored))
        safe, axes = g.op("Where", kept, target, constant(g, 0)), constant(g, [axis])
        logs = g.op("GatherElements", x, g.op("Unsqueeze", safe, axes), axis_i=axis)
        losses = g.op("Neg", g.op("Squeeze", logs, axes))
        if not missing(weight):
            losses = g.op("Mul", losses, g.op("Gather", weight, safe, axis_i=0))
        losses = g.op("Where", kept, losses, _like(g, x, 0.0))
        return _mean_of_kept(g, losses, kept, target, weight, reduction)


for _operator in ("nll_loss", "nll_loss2d", "nll_loss_nd"):
    _nll_loss(_operator)


@rule("l1_loss", _NO_RULE)
def _l1_loss(g: Graph, x: Value, y: Value, reduction: Value) -> Value:
    return _reduced(g, g.op("Abs", g.op("Sub", x, y)), reduction)


@rule("smooth_l1_loss", _NO_RULE)
def _smooth_l1_loss(g: Graph, x: Value, y: Value, reduction: Value, beta: Value) -> Value:
    losses = _rounded(g, g.op("Sub", x, y), number(beta))
    return _reduced(g, g.op("Div", losses, _like(g, x, number(beta))), reduction)


@rule("huber_loss", _NO_RULE)
def _huber_loss(g: Graph, x: Value, y: Value, reduction: Value, delta: Value) -> Value:
    return _reduced(g, _rounded(g, g.op("Sub", x, y), number(delta)), reduction)


def _rounded(g: Graph, difference: Value, bend: float) -> Value:
    """Write the Huber loss m * (|d| - m / 2) with m = min(|d|, bend).

    This is d^2 / 2 up to `bend`, and bend * (|d| - bend / 2) beyond.
    """
    size = g.op("Abs", difference)
    inner = g.op("Clip", size, _like(g, difference, 0.0), _like(g, difference, bend))
    half = g.op("Mul", inner, _like(g, difference, 0.5))
    return g.op("Mul", inner, g.op("Sub", size, half))
