"""Rules for the negative log likelihood, which cross entropy ends in, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import OnnxGraph, Size, Value, lowers

aten = torch.ops.aten
_NONE, _MEAN = 0, 1
"""at::Reduction."""


@dataclass(frozen=True)
class _Targets:
    """Targets of a loss over the classes in dimension `dim`.

    Attributes:
        dim: Dimension of the classes.
        places: Class indices with that dimension of size 1; 0 for ignored targets.
        weight: Weight of each target, of the same shape; 0 for ignored targets.
        shape: Shape of the targets.
    """

    dim: int
    places: Value
    weight: Value
    shape: tuple[Size, ...]


def _targets(
    graph: OnnxGraph, x: Value, target: Value, weight: Value | None, ignored: int
) -> _Targets:
    dim = 0 if x.rank == 1 else 1
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    wide = graph.reshape(graph.cast(target, torch.int64), shape)
    counted = graph.unary("Not", graph.compare("Equal", wide, ignored))
    places = graph.where(counted, wide, 0)
    each = graph.cast(counted, x.dtype)
    if weight is not None:
        taken = graph.value("Gather", weight, places, shape=shape, dtype=x.dtype, axis=0)
        each = graph.where(counted, taken, 0)
    return _Targets(dim, places, each, target.shape)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignored: int,
) -> list[Value]:
    """Lower nll_loss_forward to GatherElements, and a weighted mean or sum."""
    targets = _targets(graph, x, target, weight, ignored)
    shape = targets.places.shape
    picked = graph.value(
        "GatherElements", x, targets.places, shape=shape, dtype=x.dtype, axis=targets.dim
    )
    # Where, not a product: an ignored target may stand at an infinite log probability.
    zero = graph.compare("Equal", targets.weight, 0)
    losses = graph.where(zero, 0, graph.unary("Neg", graph.binary("Mul", picked, targets.weight)))
    if reduction == _NONE:
        return [graph.reshape(losses, targets.shape), graph.scalar(0, x.dtype)]
    total = graph.reduce("ReduceSum", targets.weight, None)
    summed = graph.reduce("ReduceSum", losses, None)
    return [graph.binary("Div", summed, total) if reduction == _MEAN else summed, total]


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignored: int,
    total: Value,
) -> Value:
    """Lower nll_loss_backward to ScatterElements of the negative weights into zeros."""
    targets = _targets(graph, x, target, weight, ignored)
    if reduction == _MEAN:
        gradient = graph.binary("Div", gradient, total)
    elif reduction == _NONE:
        gradient = graph.reshape(gradient, targets.places.shape)
    each = graph.binary("Mul", gradient, graph.unary("Neg", targets.weight))
    return graph.value(
        "ScatterElements",
        graph.full(x.shape, 0, x.dtype),
        targets.places,
        graph.expand(each, targets.places.shape),
        shape=x.shape,
        dtype=x.dtype,
        axis=targets.dim,
    )
