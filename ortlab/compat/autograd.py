"""Gradients without torch's override protocol, and none of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx
    import torch

_ADDS_TO_LEAF = "torch::autograd::AccumulateGrad"


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` of `outputs` that a `TorchFunctionMode` does not hear.

    A mode is off while it handles a function that it hears, so within ``torch.autograd.grad`` what
    `torch.utils.checkpoint` computes again would run without it. None for an input that the
    outputs do not depend on. ``.grad`` is not written.
    """
    from torch.autograd.graph import _engine_run_backward

    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        tuple(outputs),
        tuple(cotangents),
        False,  # keep_graph
        False,  # create_graph
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def backward_like_torch(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """TrainingManager._create_autofunction_class with torch's rules in its backward.

    What ORT's backward graph gives hangs on no graph of autograd's: with ``create_graph=True`` the
    gradient of a gradient penalty would be zero, without a word. Torch's ``once_differentiable``
    notices only where a gradient that comes in requires one itself. ORT's state of a forward is
    gone after its backward, and reads parameters where they lie: changed meanwhile, as by an
    optimizer's step, they would give other gradients, where torch raises. And a parameter that no
    output in use depends on would get zeros, which an optimizer decays, where torch gives None.
    """

    @functools.wraps(create)
    def create_autofunction_class(self: Any) -> Any:
        import torch

        function = create(self)
        forward, backward = function.forward, function.backward
        used: dict[tuple[bool, ...], list[bool]] = {}

        def forward_and_remember(ctx: Any, *inputs: torch.Tensor) -> Any:
            outputs = forward(ctx, *inputs)
            ctx.versions = [(each, each._version) for each in inputs if each.requires_grad]
            return outputs

        def first_backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True: ORT's gradients cannot be differentiated again; use "
                    "engine='eager' for gradients of gradients"
                )
            if not hasattr(ctx.run_info, "state"):
                raise RuntimeError(
                    "ORT runs backward once for each forward, retain_graph=True or not: add the "
                    "losses before backward, call the model again, or use engine='eager'"
                )
            if any(each._version != version for each, version in ctx.versions):
                raise RuntimeError(
                    "a parameter or an input was changed in place between forward and backward, as "
                    "by an optimizer's step: call the model again before backward"
                )
            found = backward(ctx, *gradients)
            given = tuple(each is not None for each in gradients)
            if all(given):
                return found
            if given not in used:
                transitions = self._graph_transition_manager
                graph = (
                    transitions._post_export_processed_model_info._post_export_processed_model.graph
                )
                used[given] = _inputs_used(graph, given)
            return tuple(
                each if use else None for each, use in zip(found, used[given], strict=True)
            )

        function.forward = staticmethod(forward_and_remember)
        function.backward = staticmethod(first_backward)
        return function

    return create_autofunction_class


def _inputs_used(graph: onnx.GraphProto, outputs: Sequence[bool]) -> list[bool]:
    """For each input of `graph` whether one of the chosen first `outputs` depends on it."""
    wanted = {each.name for each, chosen in zip(graph.output, outputs, strict=False) if chosen}
    for node in reversed(graph.node):
        if not wanted.isdisjoint(node.output):
            wanted.update(read_by(node))
    return [each.name in wanted for each in graph.input]


def read_by(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, those of its subgraphs included."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from read_by(inner)


def next_number() -> int:
    """The number that autograd will give to the next node that this thread makes."""
    from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

    return int(_get_sequence_nr())


def nodes(roots: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    """The nodes of autograd's graph that backward from `roots` runs, each with its number.

    Those that only add to a leaf's ``.grad`` are left out: `gradients` does not run them.
    """
    waiting: list[Any] = [root.grad_fn for root in roots]
    found: dict[Any, int] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in found or node.name() == _ADDS_TO_LEAF:
            continue
        found[node] = node._sequence_nr()
        waiting += [following for following, _ in node.next_functions]
    return list(found.items())
