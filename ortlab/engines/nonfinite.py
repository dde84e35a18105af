"""Where a step first made a number that is not finite: found by a second pass in eager torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlab.engines import batch as batches
from ortlab.engines.torch.stepper import autocast_for
from ortlab.utils.rng import undisturbed_random

if TYPE_CHECKING:
    from ortlab.engines.base import Batch, LossFunction
    from ortlab.settings import FinetuneSettings

_FEW = 3


def first_bad(
    model: nn.Module,
    loss: LossFunction | None,
    micro_batches: Sequence[Batch],
    settings: FinetuneSettings,
) -> Cause | None:
    """Says where forward or backward of `micro_batches` first is NaN or infinite; None if nowhere.

    Looked for in this order: the batch itself, the weights, the outputs of the modules as they are
    called, the loss, the gradients as backward comes to them. `model` is called as it is, in eager
    torch; weights, ``.grad``, buffers and random states are afterwards what they were.
    """
    device = next(model.parameters()).device
    before = 0
    with _as_it_was(model), undisturbed_random():
        for number, batch in enumerate(micro_batches, 1):
            own = batches.to_device(batch, device)
            in_batch, rows = _in_batch(own)
            found = in_batch or _in_weights(model) or _in_pass(model, loss, own, settings)
            if found:
                told = found if len(micro_batches) == 1 else f"micro-batch {number}: {found}"
                return Cause(told, bool(in_batch), [before + row for row in rows])
            before += batches.count(own)[0]
    return None


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers, which running statistics are, and gradients come back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _in_batch(batch: Batch) -> tuple[str, list[int]]:
    """What of `batch` is not finite, and in which of its samples."""
    named = batch.items() if isinstance(batch, dict) else enumerate(batches.tensors(batch), 1)
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or _good(tensor):
            continue
        what = f"{name!r}" if isinstance(name, str) else f"item {name}"
        bad = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1) if tensor.dim() else None
        rows = [] if bad is None else bad.nonzero().flatten().tolist()
        return f"the data has {_kind(tensor)} in {what} of the batch{_samples(rows)}", rows
    return "", []


def _samples(rows: Sequence[int]) -> str:
    if not rows:
        return ""
    some = ", ".join(map(str, rows[:_FEW]))
    more = f" and {len(rows) - _FEW} more" if len(rows) > _FEW else ""
    return f", sample{'s' * (len(rows) > 1)} {some}{more}"


def _in_weights(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not _good(parameter):
            return f"the weights are {_kind(parameter)}, first in {name}"
    return ""


def _in_pass(
    model: nn.Module, loss: LossFunction | None, batch: Batch, settings: FinetuneSettings
) -> str:
    forward: list[str] = []
    backward: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            hook = _noting(name, module, forward, backward)
            stack.callback(module.register_forward_hook(hook).remove)
        with autocast_for(settings.precision, next(model.parameters()).device):
            value = batches.forward(model, batch, loss).loss
        if forward:
            return forward[0]
        if not _good(value):
            return f"the loss is {_kind(value)}, of outputs that are finite"
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(value, [p for _, p in trained], allow_unused=True)
    if backward:
        return backward[0]
    for (name, _), gradient in zip(trained, found, strict=True):
        if gradient is not None and not _good(gradient):
            return f"the gradient of {name} is {_kind(gradient)}"
    return ""


def _noting(
    name: str, module: nn.Module, forward: list[str], backward: list[str]
) -> Callable[..., None]:
    """A forward hook that notes the module if its output, or that output's gradient, is bad."""
    label = f"{name} ({type(module).__name__})" if name else type(module).__name__

    def hook(_: nn.Module, given: Any, output: Any) -> None:
        for tensor in batches.tensors(given):
            if tensor.is_floating_point() and not _good(tensor):
                forward.append(f"what {label} is given is the first that is {_kind(tensor)}")
        for tensor in batches.tensors(_plain(output)):
            if not tensor.is_floating_point():
                continue
            if not _good(tensor):
                forward.append(f"the output of {label} is the first that is {_kind(tensor)}")
            if tensor.requires_grad:
                tensor.register_hook(back)  # type: ignore[no-untyped-call]

    def back(gradient: torch.Tensor) -> None:
        if not _good(gradient):
            said = f"the gradient at the output of {label} is the first that is {_kind(gradient)}"
            backward.append(said)

    return hook


def _plain(output: Any) -> Any:
    """Hugging Face's outputs are dictionaries in all but name."""
    return dict(output) if hasattr(output, "items") else output


def _good(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"


@dataclass(frozen=True)
class Cause:
    """Where a step was first not finite, in words.

    With ``in_data`` the batch itself is, in the samples ``rows``, counted from 0 over the step's
    micro-batches; none where it does not tell which.
    """

    told: str
    in_data: bool = False
    rows: Sequence[int] = ()

    @classmethod
    def unknown(cls, error: Exception) -> Cause:
        """That looking for it failed."""
        return cls(f"where it began could not be found: {error}")
