"""Export of `forward` alone as plain ONNX with torch's TorchScript exporter, for inference.

The TorchScript exporter is used instead of ``torch.onnx.export(dynamo=True)`` for these reasons: of
the 52 zoo models tried with both, it exports as many correctly; each takes it less than a second
instead of 4 to 20; it writes opset 17, where the other starts at 18; and it needs no additional
package (onnxscript). It freezes some values silently; `Frozen` and checks at other sizes report
these to the caller.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import registration

from ortlab.engines.torchscript import decisions, failures, rules, streams

_PREFIX = "_original_module"  # the same name as in ORTModule, which `failures` strips


@dataclass(frozen=True)
class Traced:
    """Exported graph without its weights, and the values that the trace froze.

    Attributes:
        model: Graph whose weights are inputs.
        weights: Tensors of those inputs, keyed by their names in the module.
        frozen: Places where the trace froze a value.
        nodes: Nodes of the graph with the user's lines, which the graph does not contain.
    """

    model: onnx.ModelProto
    weights: Mapping[str, torch.Tensor]
    frozen: decisions.Frozen
    nodes: Sequence[failures.Node] = ()


class NotExportable(RuntimeError):
    """Raised when torch's exporter fails on the model; ``failure`` holds the cause and the line."""

    def __init__(self, failure: failures.Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Forward(nn.Module):
    """Module that the exporter traces: runs `call` on `module`, with tensors in and out."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        known: frozenset[decisions.Place],
    ) -> None:
        super().__init__()
        self.add_module(_PREFIX, module)
        # In evaluation mode the exporter merges parameters with equal values.
        self.training = True
        self._call = call
        self._known = known
        self.frozen = decisions.Frozen()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the call as a tuple.

        Args:
            *tensors: Inputs of the graph.
        """
        with decisions.frozen_in_trace(self._known) as self.frozen:
            found = self._call(tensors)
        return tuple(found)


def export(
    module: nn.Module,
    call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    *,
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    opset: int,
    known: frozenset[decisions.Place],
) -> Traced:
    """Export the graph of `call`, which runs `module` on the values of `tensors`.

    Args:
        module: Module whose parameters and buffers become inputs; already in evaluation mode.
        call: Function that takes the tensors in order and returns the outputs.
        tensors: Sample inputs, keyed by their names in the graph.
        outputs: Names of the outputs.
        axes: Names of the sizes that vary, keyed by input and dimension.
        opset: ONNX opset of the graph.
        known: Places where an ordinary call reads a tensor's value in Python.

    Returns:
        The graph, its weights, and the places where the trace froze a value.

    Raises:
        NotExportable: If the exporter fails. The message names the operator without a rule and the
            user's line.
    """
    forward = _Forward(module, call, known)
    file = io.BytesIO()
    with streams.EXPORT, streams.streams_filtered(), _plain_rules(opset), _no_fast_path():
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    forward,
                    tuple(tensor.clone() for tensor in tensors.values()),
                    file,  # type: ignore[arg-type]
                    dynamo=False,
                    opset_version=opset,
                    input_names=list(tensors),
                    output_names=list(outputs),
                    dynamic_axes={name: dict(each) for name, each in axes.items() if each},
                    export_params=False,  # all of them would have to fit into one protobuf message
                    do_constant_folding=False,
                    training=torch.onnx.TrainingMode.PRESERVE,
                    verbose=True,  # stores each node's stack in the graph
                )
        # Any exception is reported with the operator and the user's line, and kept as the cause.
        except Exception as error:
            failures.attach(error)
            raise NotExportable(failures.explain(error)) from error
    model = onnx.load_model_from_string(file.getvalue())
    model.graph.doc_string = ""
    lines = [failures.lines_of_stack(node.doc_string).users for node in model.graph.node]
    weights = _name_weights(model.graph, module, set(tensors))
    nodes = [
        failures.Node(node.name, node.op_type, line)
        for node, line in zip(model.graph.node, lines, strict=True)
    ]
    return Traced(model, weights, forward.frozen, nodes)


def _name_weights(
    graph: onnx.GraphProto, module: nn.Module, inputs: set[str]
) -> dict[str, torch.Tensor]:
    """Rename the parameters, buffers and scopes in `graph` to the module's own names.

    A parameter whose name is also that of an input or output becomes "parameter.x".
    """
    held: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    held |= dict(module.named_buffers(remove_duplicate=False))
    taken = inputs | {each.name for each in graph.output}
    weights, renamed = {}, {}
    for each in graph.input:
        if each.name in inputs:
            continue
        own = each.name.removeprefix(f"{_PREFIX}.")
        renamed[each.name] = f"parameter.{own}" if own in taken else own
        weights[renamed[each.name]] = held[own].detach()
    _rename(graph, renamed)
    return weights


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    # Nodes that `call` adds outside the module, such as a loss, have names without the prefix.
    outside = {name for node in graph.node for name in (node.name, *node.output)}

    def own(name: str) -> str:
        shorter = name.removeprefix(f"/{_PREFIX}")
        inside = name.startswith(f"/{_PREFIX}/") and shorter not in outside
        return names.get(name) or (shorter if inside else name)

    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = own(value.name)
    for node in graph.node:
        node.name = own(node.name)
        node.doc_string = ""
        for place in (node.input, node.output):
            place[:] = [own(name) for name in place]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, names)


@contextlib.contextmanager
def _plain_rules(opset: int) -> Iterator[None]:
    """Restrict the exporter's rules to torch's own and those of `rules.for_inference`.

    ORTModule registers its rules, and ours, for the whole process; they write nodes that torch
    runs.
    """
    registry = registration.registry
    with streams.EXPORT:
        before = []
        for name in list(registry.all_functions()):
            group = registry.get_function_group(name)
            assert group is not None
            functions = group._functions
            for version in [each for each in functions if functions.overridden(each)]:
                before.append((functions, version, functions._overrides[version]))
                functions.remove_override(version)
        try:
            ours = rules.for_inference(opset)
            for name, rule in ours.items():
                registry.register(name, opset, rule, custom=True)
            try:
                yield
            finally:
                for name in ours:
                    registry.unregister(name, opset)
        finally:
            for functions, version, rule in before:
                functions.override(version, rule)


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Turn off the fast path of TransformerEncoder: one operator, which no exporter supports."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
