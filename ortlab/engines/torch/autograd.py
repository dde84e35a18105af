"""Autograd's graph and gradients below torch's public functions; what a node of ONNX reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
