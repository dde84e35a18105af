"""Trace of a model's call into a graph, with the sizes that may vary in it."""

from __future__ import annotations

from torch import nn

from ortlab.deploy.axes import Axes
from ortlab.deploy.call import ModelCall
from ortlab.engines.base import tell
from ortlab.engines.torchscript import inference
from ortlab.engines.torchscript.decisions import Place
from ortlab.engines.torchscript.isolation import NotInGraph
from ortlab.utils.errors import place


def trace(
    module: nn.Module, call: ModelCall, axes: Axes, *, opset: int, known: frozenset[Place]
) -> tuple[inference.Traced, Axes]:
    """Trace a call of a model into a graph.

    Args:
        module: The model.
        call: The call to trace.
        axes: Sizes that may vary.
        opset: Version of ONNX's operators.
        known: Places where forward reads a tensor's value in Python; see `decisions.reads`.

    Returns:
        The graph, and the axes that do vary in it.

    Raises:
        NotInGraph: If the model cannot be exported, or if the graph would take the example's
            branch for every input.
    """
    tell(f"exporting {type(module).__name__} at opset {opset}")
    try:
        traced = inference.export(
            module,
            call.results,
            call.tensors,
            outputs=call.outputs,
            axes=axes.by_input(),
            opset=opset,
            known=known,
        )
    except inference.NotExportable as error:
        raise NotInGraph(f"{type(module).__name__} cannot be exported: {error}") from error
    if traced.frozen.values:
        raise NotInGraph(
            f"forward reads a tensor's value in Python at {place(*traced.frozen.values[0])}: the "
            "graph would always use the example's value; compute with tensors instead, for "
            "example with torch.where"
        )
    if traced.frozen.sizes and axes.found:
        where = place(*traced.frozen.sizes[0])
        names = [axis.name for axis in axes.found]
        fixed = axes.without(names, f"forward branches on sizes at {where}")
        return trace(module, call, fixed, opset=opset, known=known)
    return traced, axes
