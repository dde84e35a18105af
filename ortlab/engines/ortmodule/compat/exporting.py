"""ORTModule's export without output or side effects, and with errors that name the user's line.

Torch's TorchScript exporter has process-wide state. Only one export runs at a time, and buffers,
random states and file descriptors that it or the traced `forward` changes are restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from onnx import TensorProto
from torch.onnx import TrainingMode

from ortlab.engines.ortmodule.compat import gradient_checkpointing, interop, selections
from ortlab.engines.ortmodule.compat.symbolics import builder
from ortlab.engines.torchscript import failures, weightless
from ortlab.engines.torchscript.failures import Node
from ortlab.engines.torchscript.streams import EXPORT


def legacy_export(export: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch.onnx.export so that it runs the TorchScript exporter, as ORTModule expects.

    Every submodule keeps its current mode: ORTModule's default would also train a frozen BatchNorm
    or Dropout, and could not differentiate a model in evaluation mode. An autograd.Function becomes
    a node that torch runs, or is refused by name. A failure is analyzed while the graph still
    exists.

    Args:
        export: Function to wrap.

    Returns:
        The wrapped function.
    """

    @functools.wraps(export)  # ORTModule inspects the signature
    def export_module(*args: Any, **kwargs: Any) -> Any:
        tracing: dict[str, Any] = {
            "training": kwargs["training"] == TrainingMode.TRAINING,
            "opset": kwargs["opset_version"],
        }
        if kwargs["autograd_inlining"]:  # set by ORTModule if its support for Functions is off
            tracing["refuse"] = "is not exported: custom_autograd is off"
        kwargs |= {"dynamo": False, "training": TrainingMode.PRESERVE, "autograd_inlining": False}
        kwargs["verbose"] = True  # stores each node's stack in the graph, see `_take_stacks`
        with interop.traced(**tracing) as seen, _shapes_without_weights():
            try:
                result = export(*args, **kwargs)
            except Exception as error:
                failures.attach(error)
                raise
        _last.checkpoints = seen.checkpoints
        return result

    return export_module


_SHAPES = "_jit_pass_onnx_graph_shape_type_inference"
_MOST_FRACTIONS = 64


@contextlib.contextmanager
def _shapes_without_weights() -> Iterator[None]:
    """Let the exporter infer shapes without the values of weights, which it copies for each node.

    Shapes are computed from integers and from a few floats, such as scales and the ends of a range.
    """
    infer = getattr(torch._C, _SHAPES)

    def infer_without(graph: Any, values: dict[str, torch.Tensor], opset: int) -> None:
        few = {
            name: value
            for name, value in values.items()
            if value.numel() <= _MOST_FRACTIONS or not value.is_floating_point()
        }
        infer(graph, few, opset)

    setattr(torch._C, _SHAPES, infer_without)
    try:
        yield
    finally:
        setattr(torch._C, _SHAPES, infer)


class _Last:
    """Last export: its number of checkpoints, and its nodes until its session is created."""

    checkpoints: int = 0
    nodes: Sequence[Node] = ()


_last = _Last()


def _take_stacks(graph: Any) -> list[Node]:
    """Return the nodes of `graph` with the user's lines; reduce each node's stack to one line.

    A stack takes kilobytes, which ORT would keep in memory.
    """
    found = []
    for node in graph.node:
        lines = failures.lines_of_stack(node.doc_string)
        found.append(failures.Node(node.name, node.op_type, lines.users))
        node.doc_string = lines.innermost
    return found


def located(build: Callable[..., Any], *, of_graph: bool) -> Callable[..., Any]:
    """Wrap a method that creates ORT's graph or session so that its failures name the line.

    ORT names only a node or an operator; the exporter recorded its line in the model. A graph that
    ORT could not run for every batch is refused.

    Args:
        build: Method to wrap.
        of_graph: True if it creates the graph; the session is created later.

    Returns:
        The wrapped method.
    """

    @functools.wraps(build)
    def build_or_locate(self: Any, *args: Any, **kwargs: Any) -> Any:
        nodes, _last.nodes = _last.nodes, ()
        try:
            result = build(self, *args, **kwargs)
            if of_graph:
                _refuse_unfit_selection(self._onnx_models.optimized_model.graph)
        except Exception as error:
            failures.attach_nodes(error, nodes)
            raise
        if of_graph:
            _last.nodes = nodes
        return result

    return build_or_locate


def repeatable(export_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GraphTransitionManager._export_model so that it restores buffers and random states.

    The tracer runs `forward` in training mode: without this, BatchNorm counts it as a step. ORT
    restores the random states itself, but not after a failure. Warnings of the exporter and its
    imports are suppressed; they do not concern the user.

    Args:
        export_model: Method to wrap.

    Returns:
        The wrapped method.
    """

    @functools.wraps(export_model)
    def export_and_restore(*, flattened_module: Any, device: Any, **kwargs: Any) -> Any:
        quiet: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if weightless.is_asked():  # then `traced_decisions` makes a copy
            kwargs["deepcopy_before_model_export"] = False
            quiet = _without_the_advice(kwargs["logger"])
        with quiet, _undisturbed(flattened_module), builder.gradients_for(flattened_module):
            result = export_model(flattened_module=flattened_module, device=device, **kwargs)
            gradient_checkpointing.mark(result[0], _last.checkpoints)
            _last.nodes = _take_stacks(result[0].graph)
        # The mode tells whether the graph gets a gradient, which is possible in evaluation mode.
        mode = kwargs["model_info_for_export"].export_mode
        if device.type == "cpu" and mode == TrainingMode.TRAINING:
            _refuse_wrong_gradient(result[0].graph)
        *rest, differentiated = result
        return *rest, _without_frozen(differentiated, flattened_module)

    return export_and_restore


@contextlib.contextmanager
def _without_the_advice(logger: logging.Logger) -> Iterator[None]:
    """Suppress ORT's warning that a model without a copy means little memory and other results."""

    def is_other(record: logging.LogRecord) -> bool:
        return "does not create a deep copy" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _without_frozen(names: Sequence[str], module: Any) -> list[str]:
    """Remove frozen parameters from the inputs of a graph that ORT computes gradients of.

    ORT would compute their gradients, and run backward up to the first layer, for no purpose.
    """
    frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
    return [name for name in names if name not in frozen]


def _refuse_wrong_gradient(graph: Any) -> None:
    if (reason := wrong_gradient(graph)) is not None:
        error = RuntimeError(reason)
        failures.attach_nodes(error, _last.nodes)
        raise error


def wrong_gradient(graph: Any) -> str | None:
    """Return a description of a gradient in the graph that ORT computes wrongly; None for none.

    Export rules normally replace these operators. ORT's CPU gradient of a grouped convolution
    writes out of bounds and can corrupt every gradient of the model; that of MaxPool ends in a
    segmentation fault; and it leaves out what goes through a sequence of tensors, such as the parts
    of a split whose sizes the graph computes.

    Args:
        graph: Exported ONNX graph.
    """
    for node in graph.node:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type == "MaxPool" or (node.op_type == "Conv" and groups > 1):
            what = "grouped convolutions" if node.op_type == "Conv" else "max pooling"
            return f"ORT's gradient of {what} ('{node.name}') is wrong"
        if node.op_type == "SequenceAt" and not _are_whole(node.output, graph):
            return f"ORT leaves out the gradient of SequenceAt ('{node.name}')"
    return None


def _are_whole(names: Sequence[str], graph: Any) -> bool:
    """Return True if these values of a graph are known to be no floats."""
    types = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    return all(types.get(name) in _WHOLE for name in names)


_WHOLE = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL})


def _refuse_unfit_selection(graph: Any) -> None:
    found = selections.unfit_selection(graph)
    if found is not None:
        selection, operator = found
        raise RuntimeError(
            f"the size of a selection ('{selection.name}') depends on the data, and ORT's "
            f"{operator} does not support tensors without elements"
        )


@contextlib.contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    from onnxruntime.training.ortmodule import _utils  # optional: onnxruntime-training

    with EXPORT, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = _utils.get_random_states()
        before = [(b, b.detach().clone()) for b in module.buffers()]
        cached = torch.is_autocast_cache_enabled()  # the exporter leaves it off if it fails
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            _utils.set_random_states(states)


def wrap_untouched(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ORTModule.__init__ so that it keeps the mode of each submodule.

    ORTModule.__init__ also reads every attribute of the model, which triggers their deprecation
    warnings; these are suppressed.

    Args:
        init: Method to wrap.

    Returns:
        The wrapped method.
    """

    @functools.wraps(init)
    def wrap(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        modes = [(part, part.training) for part in module.modules()]
        # Warning filters are process-wide, and an export in another thread replaces them too.
        with EXPORT, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init(self, module, *args, **kwargs)
        for part, training in modes:
            part.training = training

    return wrap
