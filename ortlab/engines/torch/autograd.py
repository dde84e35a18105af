"""Access to autograd's graph and gradients below torch's public API, and to ONNX node inputs."""

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
    """Compute gradients like `torch.autograd.grad`, hidden from any active `TorchFunctionMode`.

    A mode is disabled while it handles a function. If it intercepted ``torch.autograd.grad``, the
    recomputation of `torch.utils.checkpoint` within it would run without the mode. ``.grad`` is
    not written.

    Args:
        outputs: Tensors to differentiate.
        inputs: Tensors to differentiate with respect to.
        cotangents: Gradient of each output.

    Returns:
        The gradient of each input; None for an input that the outputs do not depend on.
    """
    from torch.autograd.graph import _engine_run_backward  # heavy: torch

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
    """Iterate over the names that a node reads, including those read by its subgraphs.

    Args:
        node: ONNX node.

    Yields:
        Name of each input.
    """
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from read_by(inner)


def next_number() -> int:
    """Return the sequence number of the next autograd node that this thread creates."""
    from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # heavy: torch

    return int(_get_sequence_nr())


def nodes(roots: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    """Return the autograd nodes that a backward pass runs, each with its sequence number.

    Nodes that only accumulate into a leaf's ``.grad`` are omitted, because `gradients` does not
    run them.

    Args:
        roots: Tensors that the backward pass starts from.
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
