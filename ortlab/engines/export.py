"""One exported graph of a module: built by ORTModule's own parts, and run.

ORTModule keeps a single graph and decides by luck when to make another. Here every graph has a
manager of its own, so a backward pass under way keeps the graph of its forward pass.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import nn

from ortlab.compat import decisions, interop, outputs
from ortlab.engines import options

_RATIO = "ortlab_no_dropout"
_HALF = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}


class Export:
    """A graph of `module` that fits one kind of call; `build` makes it, `run` calls it.

    `ort_module` is the ORTModule whose options it shares. With `gradient` it holds forward and
    backward, else forward alone.
    """

    def __init__(self, ort_module: nn.Module, module: nn.Module, *, gradient: bool) -> None:
        self._ort_module: Any = ort_module
        self._module = module
        self.gradient = gradient
        model: Any = self._ort_module._torch_module
        manager = model._execution_manager(gradient)
        self.torch_module: Any = type(model)(
            module,
            manager._debug_options,
            self._ort_module._fallback_manager,
            self._ort_module._logger,
        )
        options.share(manager, self.manager)
        self.torch_module._flattened_module.training = module.training
        self.torch_module.is_training = lambda: gradient
        self.decisions: tuple[decisions.Decision, ...] = ()
        """What the graph's last outputs are compared with after each run."""
        self.left_out: tuple[str, ...] = ()
        """Results of the model that are None in the graph's."""

    @property
    def manager(self) -> Any:
        """ORT's graph execution manager for this graph."""
        return self.torch_module._execution_manager(self.gradient)

    @property
    def functions(self) -> list[Any]:
        """The torch.autograd.Functions that the graph calls, by class."""
        exported = self.manager._graph_transition_manager._exported_model_info.exported_model
        return interop.functions(exported.graph)

    def build(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Exports the module as it is now and makes the session. Raises ORT's own exceptions."""
        self._build(args, kwargs, export=True)

    def _build(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, export: bool) -> None:
        manager = self.manager
        transitions = manager._graph_transition_manager
        if export:
            transitions.get_post_processed_model(args, kwargs)
            self.decisions = decisions.last_decisions()
            self.left_out = outputs.last_left_out()
        manager._initialize_graph_builder(transitions._post_export_processed_model_info)
        manager._detect_from_inputs(args, kwargs)
        manager._build_graph(manager._get_graph_transformer_config())
        manager._create_execution_agent()
        self._check_outputs(transitions)
        if self.gradient:
            manager._gradient_accumulation_manager.initialize(
                manager._runtime_options.enable_grad_acc_optimization,
                manager._flattened_module,
                manager._graph_info,
            )

    def _check_outputs(self, transitions: Any) -> None:
        """Makes a run check its decisions, and give outputs the types that the graph declares.

        The CPU provider runs half-precision nodes in float32 and drops the casts around them, up to
        the graph's own outputs.
        """
        given = transitions._exported_model_info.exported_model.graph.output
        count = len(given) - len(self.decisions)
        declared = [_HALF.get(each.type.tensor_type.elem_type) for each in given[:count]]
        if not any(declared) and not self.decisions:
            return
        info = transitions._post_export_processed_model_info
        restore = functools.partial(type(info).restore_outputs, info)  # a twin has ours by now

        def restore_outputs(found: Sequence[torch.Tensor]) -> Any:
            decisions.check(self.decisions, found[count:])
            typed = zip(found, declared, strict=False)  # declared are the model's own outputs only
            return restore([value.to(dtype) if dtype else value for value, dtype in typed])

        info.restore_outputs = restore_outputs

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The module's outputs, of ORT; OtherDecision where this graph is not that of the call."""
        return self.manager.forward(*args, **kwargs)

    def without_dropout(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Export:
        """The same exported graph with all dropout ratios zero; itself when it has no dropout."""
        source = self.manager._graph_transition_manager
        processed = source._post_export_processed_model_info
        edited = onnx.ModelProto()
        edited.CopyFrom(processed._post_export_processed_model)
        if not _zero_dropout(edited.graph):
            return self
        twin = Export(self._ort_module, self._module, gradient=self.gradient)
        options.share(self.manager, twin.manager, save=False)
        twin.decisions = self.decisions
        target = twin.manager._graph_transition_manager
        target._exported_model_info = source._exported_model_info
        target._model_info_for_export = source._model_info_for_export
        target._post_export_processed_model_info = copy.copy(processed)
        target._post_export_processed_model_info._post_export_processed_model = edited
        target._post_export_processed_model_info._buffer_for_ort_runs = None
        twin._build(args, kwargs, export=False)
        return twin


def _zero_dropout(graph: onnx.GraphProto) -> int:
    """Sets the ratio of every Dropout node of `graph` to zero; returns how many there are."""
    nodes = [node for node in graph.node if node.op_type == "Dropout" and len(node.input) > 1]
    if nodes:
        zero = onnx.helper.make_tensor(_RATIO, onnx.TensorProto.FLOAT, [], [0.0])
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [_RATIO], value=zero))
    for node in nodes:
        node.input[1] = _RATIO
    return len(nodes)
