"""Graph of a whole step: forward, backward and optimizer in one, as in the papers on ORT.

It is built from the graph that ORTModule's session runs, in which forward yields to autograd and
receives the gradients of its outputs. Here the loss's gradient is an input, and the parameters'
gradients are passed to an optimizer's nodes (`ortlab.engines.ortmodule.kernels.optimizers`).

Those nodes change weights in place, which ORT does not know. They depend on the norm of all
gradients, so every node that reads a weight to compute the loss or a gradient runs before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from ortlab.engines.ortmodule.kernels import nodes
from ortlab.engines.ortmodule.kernels.nodes import mark_backward
from ortlab.engines.ortmodule.kernels.optimizers import DOMAIN

PREFIX = "ortlab."
"""Prefix of the names of inputs and outputs that the model's own graph does not have."""
LOSS_GRADIENT = f"{PREFIX}loss_gradient"
"""Input: gradient of the loss, which is 1 / number of micro-batches."""
ANEW = f"{PREFIX}anew"
"""Input: true in the first micro-batch of a step."""
BAD = f"{PREFIX}bad"
"""Input: 1 once a step was not finite, see `optimizers.judge`."""
WISHES = f"{PREFIX}wishes"
"""Input, see `optimizers.judge`."""
VERDICT, UPDATED = f"{PREFIX}verdict", f"{PREFIX}updated"
"""Outputs: result of `optimizers.judge`, and which parameters were updated."""


@dataclass(frozen=True)
class Update:
    """Update rule of one parameter of a graph.

    Attributes:
        parameter: Graph input of the parameter.
        gradient: Graph output of its gradient.
        operator: Name of an operator in `kernels.optimizers`.
        keys: Names of the optimizer's state tensors.
        group: Index of the parameter group, whose rates apply.
    """

    parameter: str
    gradient: str
    operator: str
    keys: tuple[str, ...]
    group: int

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the inputs with the optimizer's state."""
        return tuple(f"{PREFIX}{key}.{self.parameter}" for key in self.keys)

    @property
    def total(self) -> str:
        """Name of the input in which gradients of micro-batches accumulate."""
        return f"{PREFIX}total.{self.parameter}"


def rates(group: int) -> str:
    """Return the name of the input with the rates of a parameter group.

    Args:
        group: Index of the group.
    """
    return f"{PREFIX}rates.{group}"


def joined(
    model: onnx.ModelProto, updates: Sequence[Update], *, accumulate: bool
) -> onnx.ModelProto:
    """Return the graph of a whole step.

    Args:
        model: Graph that yields its loss first. It is modified and must not be used afterwards.
        updates: Update rule of each parameter.
        accumulate: True to accumulate gradients of micro-batches in inputs.

    Raises:
        ValueError: If the loss has no gradient, or another output has one.
    """
    made = _Made(model.graph)
    outputs = made.close_yield()
    gradients = {each.gradient: each.gradient for each in updates}
    if accumulate:
        for each in updates:
            inputs = [each.total, each.gradient, ANEW]
            gradients[each.gradient] = made.call("accumulate", inputs, f"{each.total}.sum")
            made.take(each.total)
        made.take(ANEW, TensorProto.BOOL, [1])
    norms = [
        made.call("norm", [gradients[each.gradient]], f"{PREFIX}norm.{each.parameter}")
        for each in updates
    ]
    together = made.concatenated(norms, f"{PREFIX}norms")
    made.take(BAD, sizes=[])
    made.take(WISHES, sizes=[2])
    verdict = made.call("judge", [together, outputs[0], BAD, WISHES], VERDICT)
    done = []
    for each in updates:
        for name in each.state:
            made.take(name)
        inputs = [each.parameter, gradients[each.gradient], *each.state]
        inputs += [verdict, rates(each.group)]
        done.append(made.call(each.operator, inputs, f"{PREFIX}updated.{each.parameter}"))
    for group in sorted({each.group for each in updates}):
        made.take(rates(group), TensorProto.DOUBLE)
    made.concatenated(done, UPDATED)
    made.finish({**dict.fromkeys(outputs), VERDICT: [3], UPDATED: [len(updates)]})
    return model


class _Made:
    """A graph to which nodes are added."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self._known = {each.name: each for each in (*graph.value_info, *graph.output)}

    def close_yield(self) -> list[str]:
        """Replace the yield node by the loss's gradient, and return forward's output names."""
        place, node = next(
            (i, each) for i, each in enumerate(self.graph.node) if each.op_type == "YieldOp"
        )
        outputs, gradients = list(node.input), list(node.output)
        if not gradients:
            raise ValueError("the loss depends on no parameter that requires a gradient")
        (gradient, *others) = gradients
        if any(others):
            raise ValueError(f"{', '.join(others)}: only the loss may have a gradient")
        self.take(LOSS_GRADIENT, sizes=[])
        given = mark_backward(helper.make_node("Identity", [LOSS_GRADIENT], [gradient]))
        self.graph.node[place].CopyFrom(given)
        return outputs

    def take(
        self, name: str, kind: int = TensorProto.FLOAT, sizes: Sequence[int] | None = None
    ) -> None:
        """Add an input, of any shape if `sizes` is None."""
        self.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))

    def call(self, operator: str, inputs: Sequence[str], output: str) -> str:
        """Add a node that calls an operator of `optimizers`, and return its output's name."""
        node = nodes.call(f"{DOMAIN}::{operator}", inputs, [output], name=output)
        self.graph.node.append(mark_backward(node))
        # ORT infers no types for outputs of torch operators.
        told = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        self.graph.value_info.append(told)
        return output

    def concatenated(self, names: Iterable[str], output: str) -> str:
        """Add a node that concatenates vectors, and return its output's name."""
        node = helper.make_node("Concat", list(names), [output], name=output, axis=0)
        self.graph.node.append(mark_backward(node))
        return output

    def finish(self, outputs: Mapping[str, Any]) -> None:
        """Replace the graph's outputs, which were the gradients."""
        self.graph.value_info.extend(self.graph.output)  # the only record of their types
        del self.graph.output[:]
        for name, sizes in outputs.items():
            known = self._known.get(name)
            if known is None:
                known = helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
            self.graph.output.append(known)
