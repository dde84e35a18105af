"""Gradients without torch's override protocol, and none of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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


def once_differentiable(create: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """TrainingManager._create_autofunction_class whose backward refuses to be differentiated.

    What ORT's backward graph gives hangs on no graph of autograd's: with ``create_graph=True`` the
    gradient of a gradient penalty would be zero, without a word. Torch's own decorator of this name
    notices only where a gradient that comes in requires one itself.
    """

    @functools.wraps(create)
    def create_autofunction_class(self: Any) -> Any:
        import torch

        function = create(self)
        backward = function.backward

        def first_backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True: ORT's gradients cannot be differentiated again; use "
                    "engine='eager' for gradients of gradients"
                )
            return backward(ctx, *gradients)

        function.backward = staticmethod(first_backward)
        return function

    return create_autofunction_class
