"""Nodes of the graph that a wrapped model's session runs: ORT's operators, and kernels by name."""

from __future__ import annotations

import onnx
from torch import nn

import ortlab
from ortlab.engines.ortmodule import kernels

PREFIX = f"{kernels.DOMAIN}::"


def nodes(model: nn.Module) -> list[onnx.NodeProto]:
    """Return the nodes of the executed graph."""
    return list(ortlab.graphs(model).execution.model.graph.node)


def operator(node: onnx.NodeProto) -> str:
    """Return ORT's operator name, or for an ATen node the name of torch's operator."""
    called = (each.s.decode() for each in node.attribute if each.name == "operator")
    return next(called, node.op_type) if node.op_type == "ATen" else node.op_type


def operators(model: nn.Module) -> list[str]:
    """Return the operator names of all nodes, sorted."""
    return sorted(map(operator, nodes(model)))
