"""Search for the origin of a value that is not finite, by a second pass in eager torch."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ortlab.engines import batch as batches
from ortlab.engines.torch.stepper import autocast_for
from ortlab.utils.errors import users_line
from ortlab.utils.rng import undisturbed_random
from ortlab.utils.wording import few

if TYPE_CHECKING:
    from ortlab.engines.base import Batch, LossFunction
    from ortlab.settings import FinetuneSettings


def first_bad(
    model: nn.Module,
    loss: LossFunction | None,
    micro_batches: Sequence[Batch],
    settings: FinetuneSettings,
) -> Cause | None:
    """Find the first value of a step that is NaN or infinite.

    Searches in this order: the batch, the weights, the outputs of the modules in the order of
    their calls, the loss, the gradients in the order of the backward pass. The model runs in eager
    torch. Weights, ``.grad``, buffers and random states are restored afterwards.

    Args:
        model: The user's module, not wrapped.
        loss: Loss function, or None if the model returns its own loss.
        micro_batches: Micro-batches of the step.
        settings: Settings of the run.

    Returns:
        The cause, or None if all values are finite.
    """
    device = next(model.parameters()).device
    before = 0
    with _as_it_was(model), undisturbed_random():
        for number, batch in enumerate(micro_batches, 1):
            own = batches.to_device(batch, device)
            in_batch, rows = _in_batch(own, has_target=loss is not None)
            found = Cause(in_batch or _in_weights(model), bool(in_batch), rows)
            if not found.told:
                found = _in_pass(model, loss, own, settings)
            if found.told:
                many = len(micro_batches) > 1
                told = f"micro-batch {number}: {found.told}" if many else found.told
                return replace(found, told=told, rows=[before + row for row in found.rows])
            before += batches.count(own)[0]
    return None


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore buffers (which include running statistics) and gradients on exit."""
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


def _in_batch(batch: Batch, *, has_target: bool) -> tuple[str, list[int]]:
    """Describe the first part of `batch` that is not finite, and return its bad samples."""
    for name, tensor in batches.named_tensors(batch, has_target=has_target):
        if not tensor.is_floating_point() or _good(tensor):
            continue
        rows = _bad_rows(tensor)
        kind = _kind(tensor).replace("infinite", "infinity")
        return f"the data has {kind} in {name}{_samples(rows)}", rows
    return "", []


def _bad_rows(tensor: torch.Tensor) -> list[int]:
    if not tensor.dim():
        return []
    bad = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)
    rows: list[int] = bad.nonzero().flatten().tolist()
    return rows


def _samples(rows: Sequence[int]) -> str:
    if not rows:
        return ""
    return f", sample{'s' * (len(rows) > 1)} {few([*map(str, rows)])}"


def _in_weights(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not _good(parameter):
            return f"the weights are {_kind(parameter)}, first in {name}"
    return ""


def _in_pass(
    model: nn.Module, loss: LossFunction | None, batch: Batch, settings: FinetuneSettings
) -> Cause:
    """Return the first bad value of a pass; its text is "" if all values are finite."""
    forward: list[str] = []
    backward: list[str] = []
    operations = _Operations(batches.count(batch)[0])
    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            hook = _noting(name, module, forward, backward, operations)
            stack.callback(module.register_forward_hook(hook).remove)
        cast = autocast_for(settings.model.precision, next(model.parameters()).device)
        with cast, operations:
            value = batches.forward(model, batch, loss).loss
        if forward:
            return operations.cause(forward[0])
        if not _good(value):
            return operations.cause(f"the loss is {_kind(value)} although all outputs are finite")
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(value, [p for _, p in trained], allow_unused=True)
    if backward:
        return Cause(backward[0])
    for (name, _), gradient in zip(trained, found, strict=True):
        if gradient is not None and not _good(gradient):
            return Cause(f"the gradient of {name} is {_kind(gradient)}")
    return Cause("")


class _Operations(TorchFunctionMode):
    """Notes the last operator whose result was the first that is not finite.

    The last, because masks of -inf, which softmax takes away, are no fault.

    Args:
        samples: Samples of the batch.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.noting = True
        self._samples = samples
        self._last = Cause("")

    def cause(self, told: str) -> Cause:
        """Return the operator as the cause.

        Args:
            told: Where the value was found, in words.
        """
        return replace(self._last, told=f"{told}{self._last.told}{_samples(self._last.rows)}")

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.noting and self._makes_bad(args, result):
            name = resolve_name(func) or getattr(func, "__name__", "an operator")
            line = users_line(frame for frame, _ in traceback.walk_stack(None))
            where = f", from {name}" + ("" if line is None else f" at {line}")
            of_data = self._of_data((*args, *(kwargs or {}).values()))
            self._last = Cause(where, of_data, self._rows(result), line is not None)
        return result

    def _of_data(self, args: Sequence[Any]) -> bool:
        """Return whether no weight that is trained goes into the arguments of an operator."""
        given = [each.requires_grad for each in batches.tensors(list(args))]
        return torch.is_grad_enabled() and bool(given) and not any(given)

    def _rows(self, result: Any) -> list[int]:
        """Return the samples that are bad in a result; all at once say nothing about one."""
        for made in batches.tensors(result):
            if made.dim() and len(made) == self._samples and made.is_floating_point():
                rows = _bad_rows(made)
                if 0 < len(rows) < self._samples:
                    return rows
        return []

    def _makes_bad(self, args: Sequence[Any], result: Any) -> bool:
        made = [t for t in batches.tensors(result) if t.is_floating_point()]
        return not all(map(_good, made)) and all(
            _good(given) for given in batches.tensors(list(args)) if given.is_floating_point()
        )


def _noting(
    name: str,
    module: nn.Module,
    forward: list[str],
    backward: list[str],
    operations: _Operations,
) -> Callable[..., None]:
    """Return a forward hook that records a module with a bad input, output or output gradient."""
    label = f"{name} ({type(module).__name__})" if name else type(module).__name__

    def hook(_: nn.Module, given: Any, output: Any) -> None:
        for tensor in batches.tensors(given):
            if tensor.is_floating_point() and not _good(tensor):
                forward.append(f"the input of {label} is the first {_kind(tensor)} value")
        for tensor in batches.tensors(_plain(output)):
            if not tensor.is_floating_point():
                continue
            if not _good(tensor):
                forward.append(f"the output of {label} is the first {_kind(tensor)} value")
                operations.noting = False
            if tensor.requires_grad:
                tensor.register_hook(back)  # type: ignore[no-untyped-call]

    def back(gradient: torch.Tensor) -> None:
        if not _good(gradient):
            said = f"the gradient at the output of {label} is the first {_kind(gradient)} value"
            backward.append(said)

    return hook


def _plain(output: Any) -> Any:
    """Convert Hugging Face's output classes, which behave like dictionaries, to a dictionary."""
    return dict(output) if hasattr(output, "items") else output


def _good(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"


@dataclass(frozen=True)
class Cause:
    """Origin of a value that is not finite.

    Attributes:
        told: Description in words.
        in_data: True if the batch contains the value, or forward computes it from the batch alone.
        rows: Samples with bad values, counted from 0 over the step's micro-batches; empty if the
            samples are not known.
        in_code: True if `told` names the line of the user's code that computes the value.
    """

    told: str
    in_data: bool = False
    rows: Sequence[int] = ()
    in_code: bool = False

    @classmethod
    def unknown(cls, error: Exception) -> Cause:
        """Return the cause for a search that failed.

        Args:
            error: Error that ended the search.
        """
        return cls(f"the first bad value could not be found: {error}")
