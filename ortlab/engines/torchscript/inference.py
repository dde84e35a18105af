"""Forward alone as plain ONNX: torch's TorchScript exporter, without anything of training.

That exporter rather than ``torch.onnx.export(dynamo=True)``: of the 52 models of the zoo that both
were tried on it exports as many right, each in under a second where the other takes 4 to 20, it
writes opset 17 where the other begins at 18, and it needs no further package (onnxscript). What it
freezes in silence, the caller hears from `Frozen` and from checks at other sizes.
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

_PREFIX = "_original_module"  # as ORTModule has it, which `failures` knows


@dataclass(frozen=True)
class Traced:
    """An exported graph, whose weights are still to be added, and what it froze.

    ``weights`` are the tensors of the graph's further inputs, by their names in the module.
    """

    model: onnx.ModelProto
    weights: Mapping[str, torch.Tensor]
    frozen: decisions.Frozen


class NotExportable(RuntimeError):
    """Torch's exporter cannot take the model: ``failure`` says what and where."""

    def __init__(self, failure: failures.Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Forward(nn.Module):
    """What the exporter sees: `module` called as `call` does, with tensors in and out."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        known: frozenset[decisions.Place],
    ) -> None:
        super().__init__()
        self.add_module(_PREFIX, module)
        # In evaluation mode the exporter makes parameters of equal values one.
        self.training = True
        self._call = call
        self._known = known
        self.frozen = decisions.Frozen()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, each one a tensor of its own."""
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
    """The graph of `call`, which runs `module` on the values of `tensors`, in evaluation mode.

    `axes` name the sizes that vary, by input and dimension; `known` is where an ordinary call reads
    a tensor's value in Python. NotExportable says which operator has no rule, and the line.
    The module has to be in evaluation mode already.
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
                    export_params=False,  # they would have to fit into one message of protobuf
                    do_constant_folding=False,
                    training=torch.onnx.TrainingMode.PRESERVE,
                )
        # Whatever it is, the operator and the user's line are told, with this as the cause.
        except Exception as error:
            failures.attach(error)
            raise NotExportable(failures.explain(error)) from error
    model = onnx.load_model_from_string(file.getvalue())
    model.graph.doc_string = ""
    return Traced(model, _name_weights(model.graph, module, set(tensors)), forward.frozen)


def _name_weights(
    graph: onnx.GraphProto, module: nn.Module, inputs: set[str]
) -> dict[str, torch.Tensor]:
    """Gives parameters and buffers in `graph` the module's own names, and nodes their scopes.

    A parameter that is called as an input or an output is "parameter.x".
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
    # What `call` computes besides the module, as a loss, has names without the prefix already.
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
    """Meanwhile the exporter's rules are torch's own and those of `rules.for_inference`.

    ORTModule registers its rules, and ours, for the whole process: they write nodes of torch's.
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
    """TransformerEncoder's fast path is one operator, which no exporter knows."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
