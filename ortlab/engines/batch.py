"""Handling of batches: move, count, call forward, compute the loss.

A batch is a mapping (keyword arguments of forward), a tuple or list, or one tensor. With a loss
function, the target is the mapping's ``labels`` (or ``label``, ``target``, ``targets``), or the
last item of a tuple or list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ortlab.engines.base import Batch, LossFunction
from ortlab.settings import LOSSES
from ortlab.utils.wording import ordinal

_MOST_NAMES = 6
TARGETS = ("labels", "label", "target", "targets")
_LOSS_TYPED = f"loss={LOSSES[0]!r} (--loss {LOSSES[0]})"


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch with every tensor on a device.

    Args:
        batch: Batch in any form.
        device: Target device.

    Returns:
        The batch in new containers. Values that are not tensors are unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [to_device(value, device) for value in batch]
    return batch


def tensors(batch: Batch) -> list[torch.Tensor]:
    """Return every tensor of a batch, in order.

    Args:
        batch: Batch in any form, nested containers included.
    """
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [tensor for value in batch for tensor in tensors(value)]
    return []


def named_tensors(batch: Batch, *, has_target: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a batch with its name for the user.

    Args:
        batch: Batch in any form, nested containers included.
        has_target: True if the last element of a tuple or list is the target.

    Yields:
        A name such as "the batch's second element, the targets" or "the batch's 'labels'", and the
        tensor.
    """
    if isinstance(batch, torch.Tensor):
        yield "the batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from ((f"the batch's {key!r}", tensor) for tensor in tensors(value))
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            name = f"the batch's {ordinal(place)} element"
            if has_target and len(batch) > 1:
                name += ", the targets" if place == len(batch) - 1 else ", an input"
            yield from ((name, tensor) for tensor in tensors(value))


def count(batch: Batch) -> tuple[int, int]:
    """Count the samples and tokens of a batch.

    Args:
        batch: Batch in any form.

    Returns:
        The number of samples (first dimension of the first tensor) and of tokens (size of
        ``input_ids``, or 0 without it).
    """
    found = tensors(batch)
    samples = int(found[0].shape[0]) if found and found[0].dim() > 0 else 1
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return samples, ids.numel() if isinstance(ids, torch.Tensor) else 0


def describe(batch: Batch) -> str:
    """Return the names, types and shapes of a batch in one line, for an error message.

    Args:
        batch: Batch in any form.
    """
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {describe(value)}" for name, value in batch.items())
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(describe(value) for value in batch) + ")"
    return type(batch).__name__


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass.

    Attributes:
        loss: Scalar loss.
        scores: Predictions of the model, such as logits; None if the output has none.
        target: Targets of the batch; None if it has none.
    """

    loss: torch.Tensor
    scores: torch.Tensor | None
    target: torch.Tensor | None


def forward(module: nn.Module, batch: Batch, loss: LossFunction | None) -> Forward:
    """Run one forward pass and compute the loss.

    Args:
        module: Module to call.
        batch: Batch on the module's device.
        loss: Loss function, or None if the module returns its own loss.

    Returns:
        The loss, the scores and the target.

    Raises:
        ValueError: If the batch does not fit forward's parameters, if there is no loss, or if the
            loss is not a scalar.
    """
    inputs, target = _split(batch, with_target=loss is not None)
    output = _call(module, inputs, has_loss=loss is not None)
    scores = _scores(output)
    if loss is None:
        value = _own_loss(output, batch)
        target = target_of(batch) if isinstance(batch, Mapping) else None
    else:
        if scores is None:
            raise ValueError(
                f"forward returns {type(output).__name__}, which has no tensor to compute a loss of"
            )
        try:
            value = loss(scores, target)
        except Exception as error:
            error.add_note(_loss_arguments(scores, target))
            raise
    # Do not read the size of a scalar: an export would record that as a decision by sizes.
    if not isinstance(value, torch.Tensor) or (value.dim() and value.numel() != 1):
        found = describe(value)
        raise ValueError(f"the loss is {found}, not a scalar; reduce it, for example with .mean()")
    return Forward(value.reshape(()), scores, target)


def inputs(batch: Batch, loss: LossFunction | None) -> Batch:
    """Return the part of a batch that forward takes.

    Args:
        batch: Batch in any form.
        loss: Loss function, or None if the module returns its own loss.

    Returns:
        The batch without the target if there is a loss function, else the whole batch.

    Raises:
        ValueError: If there is a loss function and the batch has no target.
    """
    return _split(batch, with_target=loss is not None)[0]


def with_inputs_of(batch: Batch, kind: torch.dtype, loss: LossFunction | None) -> Batch:
    """Return a copy of a batch with its float32 inputs in another type.

    Args:
        batch: Batch in any form.
        kind: Type for the float32 inputs. Targets and other types are unchanged.
        loss: Loss function, or None if the module returns its own loss.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(kind) if batch.dtype == torch.float32 else batch
    if isinstance(batch, Mapping):
        return {
            name: value if name in TARGETS else with_inputs_of(value, kind, None)
            for name, value in batch.items()
        }
    if isinstance(batch, tuple | list):
        last = len(batch) - (loss is not None)
        return [*(with_inputs_of(value, kind, None) for value in batch[:last]), *batch[last:]]
    return batch


def hits(result: Forward) -> tuple[int, int]:
    """Count the correct class predictions of a forward pass.

    Only scores [N, C] with targets [N], and [N, C, ...] with [N, ...], are counted as classes: a
    language model shifts its sequence labels internally. Negative targets are ignored.

    Args:
        result: Result of `forward`.

    Returns:
        The number of correct predictions and of all predictions; (0, 0) if the targets are not
        classes.
    """
    scores, target = result.scores, result.target
    if scores is None or target is None or target.is_floating_point():
        return 0, 0
    if scores.dim() != target.dim() + 1 or scores.shape[0] != target.shape[0]:
        return 0, 0
    if scores.shape[2:] != target.shape[1:]:
        return 0, 0
    counted = target >= 0
    right = (scores.argmax(1) == target) & counted
    return int(right.sum()), int(counted.sum())


def on_host(result: Forward) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the predictions and the targets of a forward pass on the CPU.

    Args:
        result: Result of `forward`.

    Returns:
        Both; 16-bit floats, which NumPy does not have all of, are float32.
    """

    def there(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        half = value.dtype in (torch.float16, torch.bfloat16)
        return value.detach().to("cpu", torch.float32 if half else value.dtype)

    return there(result.scores), there(result.target)


def _split(batch: Batch, *, with_target: bool) -> tuple[Batch, Any]:
    if not with_target:
        return batch, None
    if isinstance(batch, Mapping):
        name = next((name for name in TARGETS if name in batch), None)
        if name is None:
            raise ValueError(
                f"a loss function needs a target: the batch has {', '.join(map(str, batch))}, "
                f"none of {', '.join(TARGETS)}"
            )
        return {key: value for key, value in batch.items() if key != name}, batch[name]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return list(batch[:-1]), batch[-1]
    raise ValueError(f"a loss function needs (inputs, target); the batch is {describe(batch)}")


def _call(module: nn.Module, inputs: Batch, *, has_loss: bool) -> Any:
    arguments = list(inputs) if isinstance(inputs, tuple | list) else []
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    if isinstance(inputs, torch.Tensor):
        arguments = [inputs]
    try:
        return module(*arguments, **named)
    except Exception as error:
        mismatch = _mismatch(module, arguments, named)
        described = describe(inputs).removeprefix("(").removesuffix(")")
        if isinstance(error, TypeError) and mismatch:
            message = f"the batch ({described}) does not fit forward: {mismatch}"
            if not has_loss and arguments and _mismatch(module, arguments[:-1], named) is None:
                message += f"; if its last element is the targets, name a loss: {_LOSS_TYPED}"
            raise ValueError(message) from error
        error.add_note(f"the batch was ({described})")
        raise


def _loss_arguments(scores: torch.Tensor, target: Any) -> str:
    """Return a line about what a loss that raised was called with, and how to make it fit."""
    told = f"the loss was called with predictions {describe(scores)}, targets {describe(target)}"
    column = [*target.shape, 1] if isinstance(target, torch.Tensor) else None
    if column == list(scores.shape):
        told += "; for one output per sample, pass targets.float().unsqueeze(-1) as targets"
    return told


def arguments(module: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of forward.

    Args:
        module: Module whose forward is called.
        batch: Batch in any form.

    Returns:
        Positional arguments and keyword arguments.

    Raises:
        ValueError: If the batch has a wrong type or does not fit forward's parameters.
    """
    given = tuple(batch) if isinstance(batch, tuple | list) else ()
    named = dict(batch) if isinstance(batch, Mapping) else {}
    if isinstance(batch, torch.Tensor):
        given = (batch,)
    elif not isinstance(batch, Mapping | tuple | list):
        raise ValueError(
            f"a batch must be a dictionary, a tuple or a tensor, not a {type(batch).__name__}; "
            "for a data loader pass next(iter(loader))"
        )
    if (mismatch := _mismatch(module, list(given), named)) is not None:
        described = describe(batch).removeprefix("(").removesuffix(")")
        raise ValueError(f"the batch ({described}) does not fit forward: {mismatch}")
    return given, named


def signature(module: nn.Module) -> str:
    """Return forward's signature, for an error message: "forward(input_ids, labels, ...)".

    Args:
        module: Module whose forward is described.
    """
    names = list(inspect.signature(module.forward).parameters)
    more = ", ..." if len(names) > _MOST_NAMES else ""
    return f"forward({', '.join(names[:_MOST_NAMES])}{more})"


def signature_names(module: nn.Module) -> list[str]:
    """Return the names of forward's positional parameters, in order.

    Args:
        module: Module whose forward is described.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(module.forward).parameters.values()
    return [each.name for each in found if each.kind in kinds]


def _mismatch(module: nn.Module, arguments: list[Any], named: dict[str, Any]) -> str | None:
    try:
        # The forward of torch.compile's module accepts any arguments.
        original: nn.Module = getattr(module, "_orig_mod", module)
        inspect.signature(original.forward).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    return None


def target_of(batch: Batch) -> torch.Tensor | None:
    """Return the target of a batch: of a mapping by name, else the last item.

    Args:
        batch: Batch in any form.

    Returns:
        The target, or None if there is none or it is not a tensor.
    """
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in TARGETS if name in batch), None)
    else:
        found = batch[-1] if isinstance(batch, tuple | list) and batch else None
    return found if isinstance(found, torch.Tensor) else None


def _own_loss(output: Any, batch: Batch) -> Any:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    elif isinstance(output, torch.Tensor):
        found = output
    else:
        found = getattr(output, "loss", None)
    if found is None or (isinstance(output, torch.Tensor) and output.numel() != 1):
        has_target = isinstance(batch, Mapping) and any(name in batch for name in TARGETS)
        hint = "" if has_target or not isinstance(batch, Mapping) else "; the batch has no labels"
        raise ValueError(
            f"the model returns no loss{hint}; name one: {_LOSS_TYPED}, another of "
            f"{', '.join(LOSSES[1:])}, or a function"
        )
    return found


def _scores(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        candidates = [output.get("logits"), *output.values()]
    elif isinstance(output, tuple | list):
        candidates = list(output)
    else:
        candidates = [getattr(output, "logits", None)]
    return next((c for c in candidates if isinstance(c, torch.Tensor) and c.dim() > 0), None)
