"""Optimizers as operators that a graph calls, one node for each parameter.

They change weights and moments in place, in memory shared by torch and ORT, with torch's own fused
kernels, so the result is bit-identical to torch's optimizer. `judge` decides for all parameters:
norm of the gradients, clipping factor, and whether the step is applied. Rates are float64, as in
torch, whereas ORT passes numbers as float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

DOMAIN = "ortlab_optimizers"
"""Namespace of the operators in torch."""

_EPS = 1e-6
"""Value that torch.nn.utils.clip_grad_norm_ adds to the norm."""


def norm(gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of one parameter's gradient.

    Args:
        gradient: Gradient of any shape.

    Returns:
        Norm, of shape [1].
    """
    found: Tensor = torch.linalg.vector_norm(gradient)
    return found.reshape(1)


def accumulate(total: Tensor, gradient: Tensor, anew: Tensor) -> Tensor:
    """Add a gradient to a sum, or start the sum with it.

    Args:
        total: Sum, changed in place.
        gradient: Gradient to add.
        anew: True to start a new sum.

    Returns:
        View of `total`.
    """
    return total.copy_(gradient) if anew.item() else total.add_(gradient)


def judge(norms: Tensor, loss: Tensor, bad: Tensor, wishes: Tensor) -> Tensor:
    """Decide whether and how a step is applied.

    Args:
        norms: Gradient norm of each parameter.
        loss: Loss of the micro-batch.
        bad: Set to 1, for good, if the loss or the norm is not finite.
        wishes: Norm to clip at (infinity for none), and 1 in the last micro-batch of a step.

    Returns:
        Norm of all gradients, factor to multiply them by, and 1 if the step is applied, in float32.
    """
    most, last = wishes.tolist()
    total = torch.linalg.vector_norm(norms)
    finite = bool(torch.isfinite(loss)) and (not last or bool(torch.isfinite(total)))
    if not finite:
        bad.fill_(1)
    factor = (most / (total + _EPS)).clamp(max=1.0)
    counts = torch.tensor(float(bool(last) and not bad))
    return torch.stack((total, factor, counts))


def adamw(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    verdict: Tensor,
    rates: Tensor,
) -> Tensor:
    """Update a weight as torch.optim.AdamW's fused kernel does.

    Args:
        weight: Weight, changed in place.
        gradient: Its gradient.
        first: First moment, changed in place.
        second: Second moment, changed in place.
        step: Number of steps, changed in place.
        verdict: Result of `judge`.
        rates: Learning rate, weight decay, both betas, epsilon, 1 for bias correction of the
            moments, and 1 to apply weight decay after the update.

    Returns:
        1 if the weight was updated, of shape [1].
    """
    if not verdict[2]:
        return torch.zeros(1)
    lr, decay, beta1, beta2, eps, corrected, after = rates.tolist()
    gradient = _clipped(gradient, verdict)
    step.add_(1)
    if corrected:
        torch.ops.aten._fused_adamw_(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [step],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0 if after else decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    else:
        if not after:
            weight.mul_(1 - lr * decay)
        _moments(gradient, first, second, beta1, beta2)
        weight.addcdiv_(first, second.sqrt().add_(eps), value=-lr)
    if after:
        weight.mul_(1 - lr * decay)
    return torch.ones(1)


def _moments(gradient: Tensor, first: Tensor, second: Tensor, beta1: float, beta2: float) -> None:
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def sgd(weight: Tensor, gradient: Tensor, verdict: Tensor, rates: Tensor) -> Tensor:
    """Update a weight as torch.optim.SGD's fused kernel does without momentum.

    Args:
        weight: Weight, changed in place.
        gradient: Its gradient.
        verdict: Result of `judge`.
        rates: Learning rate and weight decay.

    Returns:
        1 if the weight was updated, of shape [1].
    """
    return _sgd(weight, gradient, [], verdict, rates)


def momentum(
    weight: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    verdict: Tensor,
    rates: Tensor,
) -> Tensor:
    """Update a weight as torch.optim.SGD's fused kernel does with momentum.

    Args:
        weight: Weight, changed in place.
        gradient: Its gradient.
        velocity: Momentum buffer, changed in place. 0 before the first step.
        verdict: Result of `judge`.
        rates: Learning rate, weight decay and momentum.

    Returns:
        1 if the weight was updated, of shape [1].
    """
    return _sgd(weight, gradient, [velocity], verdict, rates)


def _sgd(
    weight: Tensor,
    gradient: Tensor,
    velocity: list[Tensor],
    verdict: Tensor,
    rates: Tensor,
) -> Tensor:
    if not verdict[2]:
        return torch.zeros(1)
    lr, decay, *factor = rates.tolist()
    torch.ops.aten._fused_sgd_(
        [weight],
        [_clipped(gradient, verdict)],
        velocity,
        weight_decay=decay,
        momentum=factor[0] if factor else 0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return torch.ones(1)


def lamb(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    verdict: Tensor,
    rates: Tensor,
) -> Tensor:
    """Update a weight by LAMB, as in `ortlab.engines.torch.lamb`.

    Args:
        weight: Weight, changed in place.
        gradient: Its gradient.
        first: First moment, changed in place.
        second: Second moment, changed in place.
        verdict: Result of `judge`.
        rates: Learning rate, weight decay, both betas, epsilon, and 1 for no trust ratio.

    Returns:
        1 if the weight was updated, of shape [1].
    """
    if not verdict[2]:
        return torch.zeros(1)
    lr, decay, beta1, beta2, eps, plain = rates.tolist()
    gradient = _clipped(gradient, verdict)
    _moments(gradient, first, second, beta1, beta2)
    update = second.sqrt().add_(eps).reciprocal_().mul_(first)
    if decay:
        update.add_(weight, alpha=decay)
    if not plain:
        length, change = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
        if length and change:
            update.mul_(length / (change + eps))
    weight.add_(update, alpha=-lr)
    return torch.ones(1)


def _clipped(gradient: Tensor, verdict: Tensor) -> Tensor:
    """Return the clipped gradient, as a copy, because several parameters may share a gradient."""
    return gradient if verdict[1] == 1.0 else gradient * verdict[1]


_MOVED = "Tensor weight, Tensor gradient"
_BY = "Tensor verdict, Tensor rates) -> Tensor"
_SCHEMAS: dict[str, Callable[..., Tensor]] = {
    "norm(Tensor gradient) -> Tensor": norm,
    "accumulate(Tensor total, Tensor gradient, Tensor anew) -> Tensor": accumulate,
    "judge(Tensor norms, Tensor loss, Tensor bad, Tensor wishes) -> Tensor": judge,
    f"adamw({_MOVED}, Tensor first, Tensor second, Tensor step, {_BY}": adamw,
    f"lamb({_MOVED}, Tensor first, Tensor second, {_BY}": lamb,
    f"momentum({_MOVED}, Tensor velocity, {_BY}": momentum,
    f"sgd({_MOVED}, {_BY}": sgd,
}


@functools.cache
def register() -> object:
    """Register the operators with torch.

    Returns:
        Library. The operators exist as long as it does, which is the life of the process.
    """
    library: Any = torch.library.Library(DOMAIN, "DEF")  # type: ignore[no-untyped-call]
    for schema, function in _SCHEMAS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return cast("object", library)
