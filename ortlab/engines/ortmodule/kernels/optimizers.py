"""Optimizers as operators that a graph calls, one node for each parameter.

They change weights and moments where these lie, in memory that torch and ORT share, by torch's own
fused kernels: what a step gives is what torch's optimizer gives, bit for bit. `judge` decides for
all of them: how long the gradient is, by what it is multiplied to be clipped, and whether the step
counts. Rates come in float64, as torch's own do: ORT hands numbers over in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

DOMAIN = "ortlab_optimizers"
"""The namespace of their names in torch."""

_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm."""


def norm(gradient: Tensor) -> Tensor:
    """The Euclidean norm of one parameter's gradient, of shape [1]."""
    found: Tensor = torch.linalg.vector_norm(gradient)
    return found.reshape(1)


def accumulate(total: Tensor, gradient: Tensor, anew: Tensor) -> Tensor:
    """Adds `gradient` to `total`, or lets it be the first one; gives a view of `total`."""
    return total.copy_(gradient) if anew.item() else total.add_(gradient)


def judge(norms: Tensor, loss: Tensor, bad: Tensor, wishes: Tensor) -> Tensor:
    """What holds for the step: [norm, factor of the gradients, 1 where it counts], in float32.

    `wishes` are the norm to clip at (infinite for none), and 1 in the last micro-batch of the step.
    `bad` is set, and stays so, where the loss or the norm is not finite.
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
    """torch.optim.AdamW's fused step; `rates` are learning rate, decay, both betas, epsilon,
    1 where moments are corrected for their start, and 1 where decay comes after the update.
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
    """torch.optim.SGD's fused step without momentum; `rates` are learning rate and decay."""
    return _sgd(weight, gradient, [], verdict, rates)


def momentum(
    weight: Tensor,
    gradient: Tensor,
    velocity: Tensor,
    verdict: Tensor,
    rates: Tensor,
) -> Tensor:
    """torch.optim.SGD's fused step with momentum, the last of `rates`.

    A first one finds a `velocity` of zero.
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
    """LAMB's step as `ortlab.engines.torch.lamb` has it.

    `rates` are learning rate, decay, both betas, epsilon, and 1 for no trust ratio.
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
    """A gradient may be another one's too, as that of two biases that are added: it stays."""
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
    """Makes them known to torch, for as long as what it returns lives: the process's life."""
    library: Any = torch.library.Library(DOMAIN, "DEF")  # type: ignore[no-untyped-call]
    for schema, function in _SCHEMAS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return cast("object", library)
