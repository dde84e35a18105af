"""Dropout nodes of a graph, of ORT and of ortlab's kernels: find, disable or seed them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from ortlab.engines.ortmodule.kernels.nodes import operator

_ZERO = "ortlab_no_dropout"
_RATIOS = {
    "Dropout": 1,
    "DropoutGrad": 2,
    "BitmaskDropout": 1,
    "BitmaskDropoutGrad": 2,
    "BiasDropout": 3,
    "BitmaskBiasDropout": 3,
    "BiasSoftmaxDropout": 2,
    "SoftmaxDropoutGrad": 3,
}
"""Index of the ratio input by operator; ORT's ContribOperators.md lists its fused operators."""
_RATIOS_OF_OURS = {
    "ortlab_kernels::dropout": 1,
    "ortlab_kernels::dropout_backward": 2,
    "ortlab_kernels::key": 1,
    "ortlab_kernels::dropout_of": 2,
    "ortlab_kernels::attention": 4,
    "ortlab_kernels::attention_of": 5,
    "ortlab_kernels::attention_backward": 6,
    "ortlab::attention": 4,
}
"""Index of the ratio input by kernel, for kernels that ATen nodes call."""
_DRAWING = {name for name in _RATIOS if not name.endswith("Grad")}


def switch_off(graph: onnx.GraphProto) -> int:
    """Set the ratio of every dropout in a graph to zero, in place.

    Args:
        graph: Graph to change.

    Returns:
        The number of dropouts that had another ratio.
    """
    zeros = {each.name for each in graph.initializer if _is_zero(each)}
    nodes = [
        node for node in graph.node if (at := _ratio(node)) >= 0 and node.input[at] not in zeros
    ]
    if nodes:
        zero = onnx.helper.make_tensor(_ZERO, onnx.TensorProto.FLOAT, [], [0.0])
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [_ZERO], value=zero))
    for node in nodes:
        node.input[_ratio(node)] = _ZERO
    return len(nodes)


def draws(graph: onnx.GraphProto) -> bool:
    """Return True if a graph contains an ORT dropout without its own seed.

    Args:
        graph: Graph to search.
    """
    return next(_without_seed(graph), None) is not None


def seed(graph: onnx.GraphProto) -> None:
    """Set a seed on every ORT dropout in a graph, in place, which gives it its own generator.

    Dropouts that ATen nodes call draw from torch's generator, whose state can be restored.

    Args:
        graph: Graph to change.
    """
    for node in _without_seed(graph):
        node.attribute.append(onnx.helper.make_attribute("seed", 0))


def _without_seed(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        if node.op_type in _DRAWING and not any(each.name == "seed" for each in node.attribute):
            yield node


def _ratio(node: onnx.NodeProto) -> int:
    """Return the index of a node's ratio among its inputs, or -1 if it has none."""
    place = _RATIOS.get(node.op_type, _RATIOS_OF_OURS.get(operator(node), -1))
    return place if place < len(node.input) else -1


def _is_zero(tensor: onnx.TensorProto) -> bool:
    return not tensor.dims and not onnx.numpy_helper.to_array(tensor)
