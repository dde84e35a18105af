"""Gradients of what only unused outputs depend on: None, as autograd leaves them.

A loss may use some outputs of a model only. A parameter that no used output depends on has the
gradient None then, and an optimizer skips it. AOTAutograd passes zeros for the outputs that are not
used: the parameter's gradient would be zero, and AdamW would decay the parameter.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from ortlab.engines.ort.onnx_model import TANGENTS

_WITH_TANGENT = (
    OutputType.non_alias,
    OutputType.unsafe_view_alias,
    OutputType.custom_function_view,
)
"""Outputs whose gradients AOTAutograd passes to the backward pass; others have a base that is."""


class UnusedOutputs:
    """The outputs that no gradient arrived for, in each backward pass of a graph.

    Args:
        joint: Graph of the forward and backward pass.
        results: Number of the forward pass's results in it; the gradients follow them.
        inputs: The tensors that the gradients are of; None for other inputs.

    Attributes:
        zeros: Numbers of the inputs whose gradient was zero where eager torch's is None.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        results: int,
        inputs: Sequence[weakref.ref[torch.Tensor] | None],
    ) -> None:
        self.zeros: set[int] = set()
        self._metadata: Any = None
        self._places: list[int] = []
        self._absent = threading.local()
        tangents = 0
        outputs: dict[fx.Node, int] = {}  # as bits, those that a node's value depends on
        for node in joint.graph.nodes:
            if node.op == "placeholder" and node.name.startswith(TANGENTS):
                outputs[node] = 1 << tangents
                tangents += 1
            else:
                of_inputs = (outputs[each] for each in node.all_input_nodes)
                outputs[node] = functools.reduce(operator.or_, of_inputs, 0)
        self._every = (1 << tangents) - 1
        (output,) = joint.graph.find_nodes(op="output")
        self._outputs = [
            outputs[each] if isinstance(each, fx.Node) else 0 for each in output.args[0][results:]
        ]
        # AOTAutograd makes one of inputs that are the same tensor.
        self._inputs = inputs if len(inputs) == len(self._outputs) else [None] * len(self._outputs)

    def watching(self, run: Callable[..., Any], metadata: Any) -> Callable[..., Any]:
        """Return `run` such that each of its calls tells which outputs a backward pass uses.

        Args:
            run: AOTAutograd's function, from inputs to outputs.
            metadata: AOTAutograd's metadata of the graph.

        Returns:
            The function; `run` itself where each gradient depends on every output.
        """
        if metadata is None or all(each in (0, self._every) for each in self._outputs):
            return run
        self._metadata, self._places = metadata, list(_places_of_tangents(metadata))
        if len(self._places) != self._every.bit_length():
            return run

        def watched(*inputs: Any) -> Any:
            results = run(*inputs)
            if (node := self._node(results)) is not None:
                node.register_prehook(self._note)
            return results

        return watched

    def without(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return a backward pass's gradients, None for those of unused outputs alone.

        Args:
            gradients: The gradients as they were computed.
        """
        absent, self._absent.outputs = getattr(self._absent, "outputs", 0), 0
        if not absent:
            return gradients
        found = list(gradients)
        for number, outputs in enumerate(self._outputs):
            if outputs and not outputs & ~absent:
                if self._has_hook(number):
                    self.zeros.add(number)
                else:
                    found[number] = None
        return found

    def _has_hook(self, number: int) -> bool:
        reference = self._inputs[number]
        tensor: Any = None if reference is None else reference()
        return bool(
            getattr(tensor, "_backward_hooks", None)
            or getattr(tensor, "_post_accumulate_grad_hooks", None)
        )

    def _note(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note the outputs without gradients; autograd then calls the backward pass."""
        absent = (1 << i for i, place in enumerate(self._places) if gradients[place] is None)
        self._absent.outputs = sum(absent)

    def _node(self, results: Sequence[Any]) -> Any:
        """Return autograd's node of the call that had `results`; views have it as their next."""
        for result in results:
            last: Any = getattr(result, "grad_fn", None)
            for node in (last, *(each for each, _ in getattr(last, "next_functions", ()))):
                made_by = getattr(node, "_forward_cls", None)
                if getattr(made_by, "metadata", None) is self._metadata:
                    return node
        return None


def _places_of_tangents(metadata: Any) -> Iterator[int]:
    """Yield where the tangents of a graph are among the gradients that autograd passes.

    See ``_codegen_backward_prologue`` of torch/_functorch/_aot_autograd/runtime_wrappers.py.
    """
    changed = metadata.mutated_inp_runtime_indices
    for place, number in enumerate(changed):
        info = metadata.input_info[number]
        if info.mutates_data and info.requires_grad:
            yield place
    for place, info in enumerate(metadata.output_info, len(changed)):
        # torch 2.13 added the first of the names.
        requires_grad = getattr(info, "requires_grad_for_backward", info.requires_grad)
        is_tensor = issubclass(info.raw_type, torch.Tensor)
        if is_tensor and requires_grad and info.output_type in _WITH_TANGENT:
            yield place
    end = len(changed) + len(metadata.output_info)
    yield from range(end, end + metadata.num_intermediate_bases)
