"""The graph of a whole step: forward, backward and optimizer in one, as the ORT papers have it.

It is made of the graph that ORTModule's session runs, where forward yields to autograd and is
given the gradients of its outputs. Here the loss's gradient is an input, and the parameters'
gradients go to an optimizer's nodes (`ortlab.engines.ortmodule.kernels.optimizers`).

Those nodes change weights in place, which ORT does not see. They depend on the norm of all
gradients: whatever reads a weight on its way to the loss or to a gradient has run before.
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
"""Of the names of inputs and outputs that the model's own graph has not."""
LOSS_GRADIENT = f"{PREFIX}loss_gradient"
"""What the loss counts for: 1 over the number of micro-batches."""
ANEW = f"{PREFIX}anew"
"""Whether gradients are the first of a step's."""
BAD = f"{PREFIX}bad"
"""Whether some step was not finite: see `optimizers.judge`."""
WISHES = f"{PREFIX}wishes"
"""See `optimizers.judge`."""
VERDICT, UPDATED = f"{PREFIX}verdict", f"{PREFIX}updated"
"""Outputs: what `optimizers.judge` gave, and which parameters were updated."""


@dataclass(frozen=True)
class Update:
    """How one parameter of a graph is updated.

    `operator` is one of `kernels.optimizers`. ``parameter`` is the name of the graph's
    input, ``gradient`` that of its output, ``keys`` name what the optimizer keeps, and ``group``
    tells whose rates hold.
    """

    parameter: str
    gradient: str
    operator: str
    keys: tuple[str, ...]
    group: int

    @property
    def state(self) -> tuple[str, ...]:
        """The names of the inputs with what the optimizer keeps."""
        return tuple(f"{PREFIX}{key}.{self.parameter}" for key in self.keys)

    @property
    def total(self) -> str:
        """The name of the input that gradients of micro-batches add up in."""
        return f"{PREFIX}total.{self.parameter}"


def rates(group: int) -> str:
    """The name of the input with what holds for a group: see the operators."""
    return f"{PREFIX}rates.{group}"


def joined(
    model: onnx.ModelProto, updates: Sequence[Update], *, accumulate: bool
) -> onnx.ModelProto:
    """The graph of a whole step, of `model` that yields its loss first; `model` is used up.

    With `accumulate` gradients add up in inputs. ValueError where the loss has no gradient.
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
        """Puts the loss's gradient where the graph yields; the names of forward's outputs."""
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
        """Another input; of any shape without `sizes`."""
        self.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))

    def call(self, operator: str, inputs: Sequence[str], output: str) -> str:
        """A node that calls an operator of `optimizers`; the name of its output."""
        node = nodes.call(f"{DOMAIN}::{operator}", inputs, [output], name=output)
        self.graph.node.append(mark_backward(node))
        # ORT infers no types of what torch computes.
        told = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
        self.graph.value_info.append(told)
        return output

    def concatenated(self, names: Iterable[str], output: str) -> str:
        """Vectors one after the other."""
        node = helper.make_node("Concat", list(names), [output], name=output, axis=0)
        self.graph.node.append(mark_backward(node))
        return output

    def finish(self, outputs: Mapping[str, Any]) -> None:
        """Gives the graph these outputs, of these sizes, in place of the gradients."""
        self.graph.value_info.extend(self.graph.output)  # their types are told nowhere else
        del self.graph.output[:]
        for name, sizes in outputs.items():
            known = self._known.get(name)
            if known is None:
                known = helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
            self.graph.output.append(known)
