"""Share of a model's compute nodes that run in ORT, and what runs in torch instead."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, Final

import torch
from torch import fx

from ortlab.engines.ort import draws
from ortlab.engines.ort.lowering.graph import VIEWS
from ortlab.engines.ort.model import OrtModel
from ortlab.engines.ort.onnx_model import is_number, tensors_in

_CASTS: Final = frozenset(
    {torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default}
)


def coverage(record: OrtModel) -> dict[str, Any]:
    """Return the fields of `Outcome` about the graphs of `record`."""
    graphs = record._backend.graphs
    parts = [part for graph in graphs for part in graph.division.parts()]
    in_ort = sum(
        _computes(node)
        for graph in graphs
        for segment in graph.division.ort_segments()
        for node in segment.graph.graph.nodes
    )
    in_torch = Counter(
        f"{str(node.target).removesuffix('.default')}: {reason}"
        for part in parts
        for node, reason in part.in_torch.items()
        if _computes(node)
    )
    breaks = torch._dynamo.utils.counters["graph_break"]
    lines = [f"{number} x {name}" for name, number in in_torch.most_common()]
    lines += [f"graph break: {' '.join(reason.split())[:200]}" for reason in breaks]
    lines += record._remarks
    total = in_ort + in_torch.total()
    return {
        "exports": len(graphs),
        "ort_share": in_ort / total if total else 0.0,
        "in_torch": "\n".join(lines),
    }


def _computes(node: fx.Node) -> bool:
    """Return False for views, casts, sizes, assertions, draws and getitem."""
    return (
        node.op == "call_function"
        and not is_number(node)
        and node.target is not operator.getitem
        and node.target not in VIEWS | _CASTS
        and not draws.is_random(node)
        and next(tensors_in(node.meta.get("val")), None) is not None
    )
