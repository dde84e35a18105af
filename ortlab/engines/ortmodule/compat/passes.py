"""Forward and backward through ORT's session under torch's autograd, called by ORTModule.

ORTModule itself creates a DLPack capsule of every parameter in every forward, and a Python tensor
of every gradient. Here parameters are passed again only after their memory has moved, and gradients
go from the session to autograd in C++ (`native`).
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ortlab.engines.ortmodule.compat import forward_states, native
from ortlab.engines.ortmodule.compat.native import Tensors
from ortlab.engines.torch.autograd import read_by

if TYPE_CHECKING:
    import onnx


class Passes:
    """Replacement of the ``autograd.Function`` that ORTModule creates for a training graph.

    Unlike ORTModule's own, it follows torch's rules in three cases:

    - The gradients of ORT's backward graph are not part of autograd's graph. With
      ``create_graph=True``, the gradient of a gradient penalty would silently be zero; here it
      raises.
    - ORT releases the state of a forward after its backward, and backward reads parameters and the
      call's tensors in place. If an optimizer step or the next batch changed them in the meantime,
      the gradients would be different; here it raises, as torch does.
    - A parameter that no used output depends on would get zeros, which an optimizer decays; here
      its gradient is None, as in torch.

    Args:
        manager: ORT's execution manager of the training graph.
    """

    def __init__(self, manager: Any) -> None:
        from onnxruntime.capi import _pybind_state  # optional: onnxruntime-training
        from onnxruntime.training.ortmodule import (  # optional: onnxruntime-training
            _runtime_inspector,
            _utils,
            options,
        )

        self.manager = manager
        self.ort, self.utils, self.phase = _pybind_state, _utils, _runtime_inspector.Phase
        self._unchecked = options._SkipCheck.SKIP_CHECK_DEVICE
        self._own: list[int] = []
        """Indices of the module's own inputs; the others are passed with each call."""
        self._given: list[int] = []
        """Indices of inputs that are passed to ORT in each call: the call's own, and those of the
        module that are not contiguous, which are copied."""
        self._pick: Callable[[Tensors], Tensors] = lambda inputs: tuple(
            [inputs[i] for i in self._own]
        )
        self._values: list[Any] = []
        """ORT's values of the other inputs."""
        self._trained: Tensors = ()
        """Inputs that need a gradient, among those that are not passed in each call."""
        self._layout: Hashable = None
        self._kept: list[int] = []
        """Indices of the call's inputs that ORT's backward reads again."""
        self._used: dict[tuple[bool, ...], list[bool]] = {}

    def apply(self, *inputs: torch.Tensor) -> Tensors:
        """Run forward and record it in autograd.

        Args:
            *inputs: All inputs of the graph, in the graph's order.

        Returns:
            The session's outputs, in the graph's order.
        """
        manager, info = self.manager, self.manager._graph_info
        observer = manager._runtime_inspector.memory_ob
        observer.inspect_memory(self.phase.PRE_FORWARD)
        self.check_device("Input argument to forward", inputs)
        state = self.ort.PartialGraphExecutionState()
        found = self.ort.OrtValueVector()
        agent = manager._execution_agent
        with torch.no_grad(), forward_states.keeping_states() as states:
            cache = manager._gradient_accumulation_manager.cache
            agent.run_forward(self._feeds(inputs), found, state, cache)
        outputs: Tensors = self.utils._ortvalues_to_torch_tensor(found, manager._device)
        observer.inspect_memory(self.phase.POST_FORWARD)
        trained = self._needing_gradients(inputs)
        if not (torch.is_grad_enabled() and trained):
            return outputs
        # Inference tensors have no version counter, and cannot be changed outside inference mode.
        kept = [inputs[i] for i in self._kept if not inputs[i].is_inference()]
        backward = _Backward(self, agent, state, states, (*trained, *kept), outputs)
        without = tuple(outputs[i] for i in info.output_grad_indices_non_differentiable)
        return native.record(inputs, outputs, without, backward)

    def _feeds(self, inputs: Tensors) -> Any:
        """Convert `inputs` to ORT's values, reusing those that have not moved."""
        if not self._values:
            transitions = self.manager._graph_transition_manager
            info = transitions._post_export_processed_model_info
            given = set(info.onnx_graph_input_names_user_defined)
            names = info.onnx_graph_input_names
            self._own = [i for i, name in enumerate(names) if name not in given]
            self._values = [None] * len(inputs)
            again = _read_again(self.manager._onnx_models.optimized_model.graph)
            self._kept = [i for i, name in enumerate(names) if name in again and name in given]
            if len(self._own) > 1:  # for a single index, itemgetter returns no tuple
                self._pick = operator.itemgetter(*self._own)
        layout = native.layout(self._pick(inputs))
        if layout != self._layout:
            whole = [i for i in self._own if inputs[i].is_contiguous()]
            self._given = sorted({*range(len(inputs))} - {*whole})
            for i in whole:
                self._values[i] = self._value(inputs[i])
            self._trained = tuple(inputs[i] for i in whole if inputs[i].requires_grad)
            self._layout = layout
        values = self._values.copy()
        for i in self._given:
            values[i] = self._value(inputs[i])
        feeds = self.ort.OrtValueVector()
        feeds.reserve(len(values))
        deque(map(feeds.push_back, values), maxlen=0)
        return feeds

    def _value(self, tensor: torch.Tensor) -> Any:
        return self.ort.OrtValue.from_dlpack(*lent(tensor))

    def _needing_gradients(self, inputs: Tensors) -> Tensors:
        """Return the inputs that need a gradient; `inputs` are those of the last `_feeds`."""
        given = [inputs[i] for i in self._given]
        return (*self._trained, *(each for each in given if each.requires_grad))

    def check_device(self, what: str, tensors: Sequence[torch.Tensor | None]) -> None:
        """Raise if a tensor is not on the graph's device, unless `skip_checks` disables the check.

        Args:
            what: Description of the tensors for the error message.
            tensors: Tensors to check.
        """
        if not self.manager._runtime_options.skip_check.is_set(self._unchecked):
            self.utils._check_same_device(self.manager._device, what, *tensors)

    def used(self, given: tuple[bool, ...]) -> list[bool]:
        """Return for each input whether an output with a gradient depends on it.

        Args:
            given: For each output, whether it has a gradient.
        """
        if given not in self._used:
            transitions = self.manager._graph_transition_manager
            processed = transitions._post_export_processed_model_info
            graph = processed._post_export_processed_model.graph
            self._used[given] = _inputs_used(graph, given)
        return self._used[given]


class _Backward:
    """Backward pass of one forward pass; it can run once."""

    def __init__(
        self,
        passes: Passes,
        agent: Any,
        state: Any,
        states: list[Any],
        inputs: Tensors,
        outputs: Tensors,
    ) -> None:
        self._passes = passes
        self._agent = agent
        """Session of that forward pass, which owns its state; the manager's may be newer."""
        self._state = state
        self._states = states
        """States of the autograd.Functions in the graph, kept until the backward pass."""
        self._outputs = [(each.shape, each.device, each.dtype) for each in outputs]
        info = passes.manager._graph_info
        # Detached tensors share the version counter, but do not keep autograd's graph alive.
        read = [
            outputs[i].detach()
            for i in info.module_output_indices_requires_save_for_backward
            if i < len(outputs)
        ]
        self._read = (*inputs, *read)
        self._edits = native.edits(self._read)

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> list[Any]:
        """See `native.Backward`."""
        self._refuse()
        passes, manager = self._passes, self._passes.manager
        observer = manager._runtime_inspector.memory_ob
        observer.inspect_memory(passes.phase.PRE_BACKWARD)
        passes.check_device("Input argument to backward", gradients)
        feeds, found = passes.ort.OrtValueVector(), passes.ort.OrtValueVector()
        without = manager._graph_info.output_grad_indices_non_differentiable
        for i, gradient in enumerate(gradients):
            if i not in without:
                feeds.push_back(*lent(self._zeros(i) if gradient is None else gradient))
        # The memory of the pass is released as soon as it has run.
        agent, state, self._agent, self._state = self._agent, self._state, None, None
        agent.run_backward(feeds, found, state)
        self._read = ()
        capsules = found.to_dlpacks(None)
        observer.inspect_memory(passes.phase.POST_BACKWARD)
        order = [capsules[i] if i != -1 else None for i in manager._gradient_map]
        given = tuple(gradient is not None for gradient in gradients)
        if all(given):
            return order
        used = passes.used(given)
        return [each if use else None for each, use in zip(order, used, strict=True)]

    def _refuse(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported: ORT's gradients cannot be differentiated; use "
                "engine='eager' for gradients of gradients"
            )
        if self._state is None:
            raise RuntimeError(
                "ORT can run backward only once per forward, even with retain_graph=True: add the "
                "losses before backward, call the model again, or use engine='eager'"
            )
        if native.edits(self._read) != self._edits:
            raise RuntimeError(
                "a parameter, input or output was changed in place between forward and backward, "
                "for example by an optimizer step: call the model again before backward"
            )

    def _zeros(self, i: int) -> torch.Tensor:
        """Return zeros for an output without gradient; a single zero where ORT accepts it."""
        shape, device, dtype = self._outputs[i]
        whole = i in self._passes.manager._graph_info.output_grad_indices_require_full_shape
        return torch.zeros(shape if whole else (), device=device, dtype=dtype)


def lent(tensor: torch.Tensor) -> tuple[Any, bool]:
    """Return a DLPack capsule of a tensor for ORT, and whether the tensor is boolean.

    ORT's DLPack does not support bool, so a boolean tensor is passed as uint8.

    Args:
        tensor: Tensor to pass; copied if it is not contiguous.
    """
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bool:
        return to_dlpack(tensor.view(torch.uint8)), True
    return to_dlpack(tensor), False


def _inputs_used(graph: onnx.GraphProto, outputs: Sequence[bool]) -> list[bool]:
    """Return for each input of `graph` whether a selected output depends on it."""
    wanted = {each.name for each, chosen in zip(graph.output, outputs, strict=False) if chosen}
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(read_by(node))
    return [each.name in wanted for each in graph.input]


_VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators whose output shares the memory of their input in ORT."""
_OF_SHAPE = {"Shape", "Size"}


def _read_again(graph: onnx.GraphProto) -> set[str]:
    """Return the inputs of a training `graph` that its backward part reads in place."""
    wanted: set[str] = set()
    forward = []
    for node in reversed(graph.node):
        if node.op_type == "YieldOp" or not wanted.isdisjoint(node.output):
            wanted.update(read_by(node))
            forward.append(node)
    source = {each.name: each.name for each in graph.input}
    for node in reversed(forward):
        if node.op_type in _VIEWS and node.input[0] in source:
            source[node.output[0]] = source[node.input[0]]
    before = set(map(id, forward))
    return {
        source[name]
        for node in graph.node
        if id(node) not in before and node.op_type not in _OF_SHAPE
        for name in read_by(node)
        if name in source
    }
