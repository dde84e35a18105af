"""Nodes of an ORT graph that call torch's and ortlab's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from ortlab.engines.ortmodule.kernels import DOMAIN

ATEN = "org.pytorch.aten"
BACKWARD = "__backwardpass"
"""ORT's attribute of nodes after the yield node. In priority order they run after it."""


def call(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    """Return a node that calls a torch operator.

    Args:
        operator: Name of the operator, such as "ortlab_kernels::norm".
        inputs: Names of the input tensors.
        outputs: Names of the output tensors.
        **attributes: Further attributes of the node.
    """
    return helper.make_node(
        "ATen", inputs, outputs, domain=ATEN, operator=operator, overload_name="", **attributes
    )


def operator(node: onnx.NodeProto) -> str:
    """Return the torch operator that a node calls, or "" if it calls none.

    Args:
        node: Node of a graph.

    Returns:
        Name such as "ortlab::attention".
    """
    if node.op_type != "ATen":
        return ""
    return next((each.s.decode() for each in node.attribute if each.name == "operator"), "")


def called(node: onnx.NodeProto) -> str:
    """Return the name of the ortlab kernel that a node calls, or "" if it calls none.

    Args:
        node: Node of a graph.
    """
    domain, _, name = operator(node).rpartition("::")
    return name if domain == DOMAIN else ""


def mark_backward(node: onnx.NodeProto) -> onnx.NodeProto:
    """Mark a node as part of the backward pass, and return it.

    Args:
        node: Node to mark, in place.
    """
    if not any(each.name == BACKWARD for each in node.attribute):
        node.attribute.append(helper.make_attribute(BACKWARD, 1))
    return node
