"""ORTModule's export, kept quiet, repeatable and honest.

Torch's TorchScript exporter is process-wide state: one export runs at a time, and what it or the
traced forward changes (buffers, random numbers, file descriptors) is as before when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ortlab.engines.ortmodule.compat import recompute
from ortlab.engines.torchscript import weightless
from ortlab.engines.torchscript.streams import EXPORT

if TYPE_CHECKING:
    from ortlab.engines.torchscript.failures import Node


def legacy_export(export: Callable[..., Any]) -> Callable[..., Any]:
    """torch.onnx.export as ORTModule means it: the TorchScript exporter.

    Every submodule stays in the mode that it is in: ORTModule's own choice would train a frozen
    BatchNorm or Dropout along, and could not differentiate a model in evaluation mode.
    An autograd.Function becomes a node that torch runs, or is refused by name; a failure is told
    apart while the graph is still there.
    """

    @functools.wraps(export)  # ORTModule looks at the signature
    def export_module(*args: Any, **kwargs: Any) -> Any:
        from torch.onnx import TrainingMode

        from ortlab.engines.ortmodule.compat import interop
        from ortlab.engines.torchscript import failures

        tracing: dict[str, Any] = {
            "training": kwargs["training"] == TrainingMode.TRAINING,
            "opset": kwargs["opset_version"],
        }
        if kwargs["autograd_inlining"]:  # how ORTModule says that its support for them is off
            tracing["refuse"] = "is not exported: custom_autograd is off"
        kwargs |= {"dynamo": False, "training": TrainingMode.PRESERVE, "autograd_inlining": False}
        kwargs["verbose"] = True  # every node with the stack of its making, see `_take_stacks`
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
    """The exporter infers shapes without the values of weights, which it would copy for each node.

    Shapes are computed from whole numbers, and from a few fractions: scales, the ends of a range.
    """
    import torch

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
    """The last export: what it met, and its nodes until its session is made."""

    checkpoints: int = 0
    nodes: Sequence[Node] = ()


_last = _Last()


def _take_stacks(graph: Any) -> list[Node]:
    """The nodes of `graph` with the user's line; of each one's stack its own line is left to it.

    A stack takes kilobytes, and ORT would carry them along.
    """
    from ortlab.engines.torchscript import failures

    found = []
    for node in graph.node:
        lines = failures.lines_of_stack(node.doc_string)
        found.append(failures.Node(node.name, node.op_type, lines.users))
        node.doc_string = lines.innermost
    return found


def located(build: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes ORT's graph or session of an export, whose failures name the line.

    ORT names a node or an operator only. Where in the model that is, the exporter told.
    """

    @functools.wraps(build)
    def build_or_locate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from ortlab.engines.torchscript import failures

        nodes, _last.nodes = _last.nodes, ()
        try:
            result = build(self, *args, **kwargs)
        except Exception as error:
            failures.attach_nodes(error, nodes)
            raise
        if build.__name__ == "_build_graph":  # the session is still to come
            _last.nodes = nodes
        return result

    return build_or_locate


def repeatable(export_model: Callable[..., Any]) -> Callable[..., Any]:
    """GraphTransitionManager._export_model that leaves buffers and random numbers as they were.

    The tracer runs forward in training mode: without this, BatchNorm counts it as a step. ORT puts
    the random states back itself, but not after a failure. What the exporter and its imports warn
    of is no news to the user.
    """

    @functools.wraps(export_model)
    def export_and_restore(*, flattened_module: Any, device: Any, **kwargs: Any) -> Any:
        from torch.onnx import TrainingMode

        from ortlab.engines.ortmodule.compat.symbolics import builder

        quiet: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if weightless.is_asked():  # and so copies what forward may change, see `decisions`
            kwargs["deepcopy_before_model_export"] = False
            quiet = _without_the_advice(kwargs["logger"])
        with quiet, _undisturbed(flattened_module), builder.gradients_for(flattened_module):
            result = export_model(flattened_module=flattened_module, device=device, **kwargs)
            recompute.mark(result[0], _last.checkpoints)
            _last.nodes = _take_stacks(result[0].graph)
        # Which says whether the graph gets a gradient: one in evaluation mode may, too.
        mode = kwargs["model_info_for_export"].export_mode
        if device.type == "cpu" and mode == TrainingMode.TRAINING:
            _refuse_wrong_gradient(result[0].graph)
        *rest, differentiated = result
        return *rest, _without_frozen(differentiated, flattened_module)

    return export_and_restore


@contextlib.contextmanager
def _without_the_advice(logger: logging.Logger) -> Iterator[None]:
    """ORT says of a model that is not copied that memory must be short, and results may differ."""

    def is_other(record: logging.LogRecord) -> bool:
        return "does not create a deep copy" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _without_frozen(names: Sequence[str], module: Any) -> list[str]:
    """The inputs of a graph that it is to have gradients of: ORT takes frozen parameters for such.

    It would compute theirs, and backward through all that comes before, for nobody.
    """
    frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
    return [name for name in names if name not in frozen]


def _refuse_wrong_gradient(graph: Any) -> None:
    from ortlab.engines.torchscript import failures

    if (reason := wrong_gradient(graph)) is not None:
        error = RuntimeError(reason)
        failures.attach_nodes(error, _last.nodes)
        raise error


def wrong_gradient(graph: Any) -> str | None:
    """Which gradient is left to ORT, after the export rules, that harms the process; None for none.

    That of a grouped convolution on the CPU writes out of bounds, and gradients anywhere in the
    model are wrong; that of MaxPool ends in a segmentation fault.
    """
    for node in graph.node:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        if node.op_type == "MaxPool" or (node.op_type == "Conv" and groups > 1):
            what = "grouped convolutions" if node.op_type == "Conv" else "max pooling"
            return f"ORT's gradient of {what} ('{node.name}') is wrong"
    return None


@contextlib.contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    import torch
    from onnxruntime.training.ortmodule import _utils

    with EXPORT, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = _utils.get_random_states()
        before = [(b, b.detach().clone()) for b in module.buffers()]
        cached = torch.is_autocast_cache_enabled()  # the exporter leaves it off where it fails
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            _utils.set_random_states(states)


def wrap_untouched(init: Callable[..., None]) -> Callable[..., None]:
    """ORTModule.__init__ that leaves each submodule in the mode that it is in.

    It also looks every attribute of the model up, and so sets off each one's deprecation warning.
    """

    @functools.wraps(init)
    def wrap(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        modes = [(part, part.training) for part in module.modules()]
        # The filters are the process's: an export in another thread sets them aside as well.
        with EXPORT, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            init(self, module, *args, **kwargs)
        for part, training in modes:
            part.training = training

    return wrap
