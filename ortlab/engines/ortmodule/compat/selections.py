"""Graphs with selections, such as ``x[mask]``, of which a batch may leave no element.

Some of ORT's CPU kernels end the process on tensors without elements, and some fail in backward,
when a step can no longer run elsewhere. Such a graph is refused before it runs.
"""

from __future__ import annotations

from typing import Any, Final

from onnx import TensorProto

_SELECTIONS: Final = frozenset({"NonZero", "Compress", "Unique", "NonMaxSuppression"})
"""Operators whose number of results depends on the data."""

_FIT: Final = frozenset(
    {
        "Abs",
        "Add",
        "And",
        "BroadcastGradientArgs",
        "Cast",
        "Ceil",
        "Clip",
        "Concat",
        "ConstantOfShape",
        "Cos",
        "Div",
        "Elu",
        "Equal",
        "Erf",
        "Exp",
        "Expand",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherGrad",
        "GatherND",
        "GatherNDGrad",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "IsNaN",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Reciprocal",
        "ReduceSum",
        "ReduceSumTraining",
        "Relu",
        "ReluGrad",
        "ScatterElements",
        "ScatterND",
        "Selu",
        "Shape",
        "Sigmoid",
        "SigmoidGrad",
        "Sign",
        "Sin",
        "Size",
        "Slice",
        "SliceGrad",
        "Softplus",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "TanhGrad",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)
"""Operators whose kernels give torch's results for no elements, each tried in ORT 1.19.2."""

_AS_FIRST: Final = frozenset({"ScatterElements", "ScatterND", "GatherGrad", "GatherNDGrad"})
"""Operators whose result has the sizes of the first input, or those that it holds."""

_FLOATS: Final = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
)


def unfit_selection(graph: Any) -> tuple[Any, str] | None:
    """Find a selection that ORT cannot run if no element is left.

    Args:
        graph: ONNX graph that ORT built, with its gradient.

    Returns:
        The node of the selection, and the operator that does not support tensors without
        elements; None if there is none.
    """
    if not any(node.op_type in _SELECTIONS for node in graph.node):
        return None
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {each.name: each.type.tensor_type.elem_type for each in values}
    selected: dict[str, Any] = {}  # the selection that the sizes of a value depend on
    waiting = list(graph.node)
    while waiting:  # ORT does not write all nodes after those that they read
        left = []
        for node in waiting:
            read = node.input[:1] if node.op_type in _AS_FIRST else node.input
            source = next((selected[name] for name in read if name in selected), None)
            if node.op_type in _SELECTIONS:
                source = node
            elif any(name in selected for name in node.input) and not _fits(node, types):
                return next(selected[name] for name in node.input if name in selected), node.op_type
            if source is None or _is_full_sum(node):
                left.append(node)
            else:
                selected.update((name, source) for name in node.output if name)
        if len(left) == len(waiting):
            return None
        waiting = left
    return None


def _fits(node: Any, types: dict[str, int]) -> bool:
    if node.op_type == "Div":  # of integers, it ends the process
        return types.get(node.output[0]) in _FLOATS
    return node.op_type in _FIT


def _is_full_sum(node: Any) -> bool:
    kept = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
    return node.op_type == "ReduceSum" and len(node.input) == 1 and not kept
