"""Gradients without torch's override protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
