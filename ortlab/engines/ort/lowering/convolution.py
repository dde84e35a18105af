"""Rules for convolution and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ortlab.engines.ort.lowering.graph import (
    NotLowered,
    OnnxGraph,
    Size,
    Value,
    lowers,
    product,
    result,
    size_of,
)

aten = torch.ops.aten


@lowers(aten.convolution.default)
def _convolution(
    graph: OnnxGraph,
    node: fx.Node,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    """Lower convolution to Conv or ConvTranspose."""
    _check_sizes(stride, padding, dilation)
    return graph.value(
        "ConvTranspose" if transposed else "Conv",
        x,
        weight,
        bias,
        shape=result(node).shape,
        dtype=x.dtype,
        strides=stride,
        pads=padding * 2,
        dilations=dilation,
        group=groups,
        output_padding=output_padding if transposed else None,
    )


def _check_sizes(*sizes: Sequence[Size]) -> None:
    if not all(isinstance(size, int) for each in sizes for size in each):
        raise NotLowered("a convolution whose stride, padding or dilation is a size of the input")


@lowers(aten.convolution_backward.default)
def _convolution_backward(
    graph: OnnxGraph,
    node: fx.Node,
    gradient: Value,
    x: Value,
    weight: Value,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> list[Value | None]:
    """Lower convolution_backward to ConvTranspose or Conv, Conv or Gemm, and ReduceSum."""
    _check_sizes(stride, padding, dilation)
    found: list[Value | None] = [None, None, None]
    if wanted[0]:
        shared: dict[str, Any] = {
            "strides": stride,
            "pads": padding * 2,
            "dilations": dilation,
            "group": groups,
        }
        if transposed:
            found[0] = graph.value("Conv", gradient, weight, shape=x.shape, dtype=x.dtype, **shared)
        else:
            made = graph.value(
                "ConvTranspose",
                gradient,
                weight,
                # As many rows as an input can have that gives this output; then those of the input.
                output_padding=[step - 1 for step in stride],
                shape=x.shape,
                dtype=x.dtype,
                **shared,
            )
            found[0] = _cut(graph, made, x.shape) if any(step > 1 for step in stride) else made
    if wanted[1]:
        pair = (gradient, x) if transposed else (x, gradient)
        found[1] = _of_weight(graph, *pair, weight.shape, stride, padding, dilation, groups)
    if wanted[2]:
        found[2] = graph.reduce("ReduceSum", gradient, [0, *range(2, gradient.rank)])
    return found


def _cut(graph: OnnxGraph, x: Value, shape: Sequence[Size]) -> Value:
    """Return the first elements of the spatial dimensions."""
    dims = range(2, len(shape))
    return graph.slice(x, dims, [0] * len(dims), shape[2:], shape)


def _of_weight(
    graph: OnnxGraph,
    x: Value,
    gradient: Value,
    shape: Sequence[Size],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Value:
    """Return the weight's gradient: a convolution over the batch, stride and dilation swapped."""
    if groups == 1 and all(size == 1 for size in shape[2:]) and not any(padding):
        return _of_channels(graph, x, gradient, stride)
    rows, channels, outputs = x.shape[0], x.shape[1], gradient.shape[1]
    spatial = list(range(2, x.rank))
    if groups == 1:
        left, right = (graph.transpose(each, [1, 0, *spatial]) for each in (x, gradient))
        inner = channels
    else:
        inner, outer = channels // groups, outputs // groups
        after = [i + 1 for i in spatial]
        split = graph.reshape(x, [rows, groups, inner, *x.shape[2:]])
        merged = [inner, product([groups, rows]), *x.shape[2:]]
        left = graph.reshape(graph.transpose(split, [2, 1, 0, *after]), merged)
        split = graph.reshape(gradient, [rows, groups, outer, *gradient.shape[2:]])
        merged = [outputs, rows, *gradient.shape[2:]]
        right = graph.reshape(graph.transpose(split, [1, 2, 0, *after]), merged)
    # Rows of the input that no window reached make the result larger than the kernel.
    made = graph.value(
        "Conv",
        left,
        right,
        shape=[size_of(inner), outputs, *shape[2:]],
        dtype=x.dtype,
        strides=dilation,
        pads=padding * 2,
        dilations=stride,
        group=groups,
    )
    return graph.transpose(_cut(graph, made, made.shape), [1, 0, *spatial])


def _of_channels(graph: OnnxGraph, x: Value, gradient: Value, stride: list[int]) -> Value:
    """Return the gradient of a weight of size 1: a product of matrices of channels by places."""
    spatial = list(range(2, x.rank))
    if any(step > 1 for step in stride):
        read = [*x.shape[:2], *gradient.shape[2:]]
        x = graph.slice(x, spatial, [0] * len(spatial), x.shape[2:], read, stride)
    places = product([x.shape[0], *x.shape[2:]])
    left, right = (
        graph.reshape(graph.transpose(each, [1, 0, *spatial]), [each.shape[1], places])
        for each in (gradient, x)
    )
    shape = [left.shape[0], right.shape[0]]
    made = graph.value("Gemm", left, right, shape=shape, dtype=x.dtype, transB=1)
    return graph.reshape(made, [*shape, *[1] * len(spatial)])
