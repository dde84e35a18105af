"""What the session of a wrapped model runs, for tests: ORT's operators, and kernels by name."""

from __future__ import annotations

import onnx
from torch import nn

import ortlab
from ortlab.engines.ortmodule import kernels

PREFIX = f"{kernels.DOMAIN}::"


def nodes(model: nn.Module) -> list[onnx.NodeProto]:
    """Of the graph that is executed."""
    return list(ortlab.graphs(model).execution.model.graph.node)


def operator(node: onnx.NodeProto) -> str:
    """ORT's name, or for an ATen node that of torch's operator."""
    called = (each.s.decode() for each in node.attribute if each.name == "operator")
    return next(called, node.op_type) if node.op_type == "ATen" else node.op_type


def operators(model: nn.Module) -> list[str]:
    """Those of all nodes, sorted."""
    return sorted(map(operator, nodes(model)))
