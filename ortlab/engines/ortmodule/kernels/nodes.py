"""The nodes by which a graph of ORT's calls kernels of torch's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from ortlab.engines.ortmodule.kernels import DOMAIN

ATEN = "org.pytorch.aten"
BACKWARD = "__backwardpass"
"""ORT's mark of nodes after the yield: by its order of priority they wait for that."""


def call(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
) -> onnx.NodeProto:
    """A node that calls an operator of torch's: "ortlab_kernels::norm"."""
    return helper.make_node(
        "ATen", inputs, outputs, domain=ATEN, operator=operator, overload_name="", **attributes
    )


def operator(node: onnx.NodeProto) -> str:
    """The operator of torch's that a node of a graph calls: "ortlab::attention"; "" for none."""
    if node.op_type != "ATen":
        return ""
    return next((each.s.decode() for each in node.attribute if each.name == "operator"), "")


def called(node: onnx.NodeProto) -> str:
    """The name of the kernel of ours that a node of a graph calls, "" where it calls none."""
    domain, _, name = operator(node).rpartition("::")
    return name if domain == DOMAIN else ""


def mark_backward(node: onnx.NodeProto) -> onnx.NodeProto:
    """`node`, marked as one of backward."""
    if not any(each.name == BACKWARD for each in node.attribute):
        node.attribute.append(helper.make_attribute(BACKWARD, 1))
    return node
