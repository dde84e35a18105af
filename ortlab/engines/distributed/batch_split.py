"""Split of a batch across ranks: contiguous rows for each, and their weight in the loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, LossFunction
from ortlab.engines.single_process import Share
from ortlab.utils.wording import ordinal

IGNORED = -100
"""Target that the cross entropy of torch and of transformers ignores by default."""


def share_of(batch: Batch, rank: int, size: int, weights: torch.Tensor) -> Share:
    """Return the rows of a batch that one rank trains on.

    If the samples cannot be split evenly, the first ranks have one more. A rank without samples, or
    whose samples all have weight zero, takes the sample of the largest weight with a part of zero:
    every rank then runs the same collectives, and no engine gets an empty batch.

    Args:
        batch: The whole batch.
        rank: The rank.
        size: Number of ranks.
        weights: Weight of each sample in the batch's loss, [samples].

    Returns:
        The rows, with their part of the loss.

    Raises:
        ValueError: If a tensor of the batch does not have one row for each sample.
    """
    samples, (least, more) = len(weights), divmod(len(weights), size)
    begin = rank * least + min(rank, more)
    end = begin + least + (rank < more)
    whole = float(weights.sum())
    part = float(weights[begin:end].sum()) / whole if whole else (end - begin) / samples
    if part == 0.0:
        begin = int(weights.argmax())
        end = begin + 1
    return Share(_rows(batch, slice(begin, end), samples, size), part, part)


def _rows(value: Any, rows: slice, samples: int, size: int, name: str = "the batch") -> Any:
    """Return the `rows` of every tensor; a scalar or a tensor of one row is for all ranks."""
    if isinstance(value, Mapping):
        return {key: _rows(each, rows, samples, size, str(key)) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [
            _rows(each, rows, samples, size, f"the {ordinal(place)} element of {name}")
            for place, each in enumerate(value)
        ]
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape[0] == samples:
        return value[rows]
    if value.shape[0] == 1:
        return value
    raise ValueError(
        f"the batch has {samples} samples and {name} has shape {list(value.shape)}, which cannot "
        f"be split across {size} ranks along its first dimension; train with workers=1, or give "
        "every tensor one row for each sample"
    )


def weights_of(batch: Batch, loss: LossFunction | None, owner: nn.Module) -> torch.Tensor:
    """Return the weight of each sample in the batch's loss: 1, or its number of counted targets.

    A loss is assumed to be the mean over samples. If targets are classes and some are -100, which
    torch's ``cross_entropy`` and the losses of transformers ignore, it is the mean over the other
    targets. That is certain for ``cross_entropy`` itself and assumed for a model's own loss, which
    also ignores the first token of each sample if it is transformers' causal loss. It is unknown
    for any other function, where all samples have the same weight: with 22 and 17 targets on two
    ranks, the first loss of a GPT-2 was then off by 0.07%, and the norm of its gradient by 0.3%.

    Args:
        batch: The whole batch.
        loss: The loss function, or None where the model returns its loss.
        owner: The user's model.

    Returns:
        The weights, [samples].
    """
    samples, _ = batches.count(batch)
    target = _classes(batch, loss)
    if target is None or target.dim() == 0 or len(target) != samples:
        return torch.ones(samples)
    counted = (target != IGNORED).reshape(samples, -1)
    if bool(counted.all()):
        return torch.ones(samples)
    if loss is None and target.dim() > 1 and _is_causal(owner):
        counted = counted[:, 1:]
    return counted.sum(1).to("cpu", torch.float32)


def _classes(batch: Batch, loss: LossFunction | None) -> torch.Tensor | None:
    """Return the targets if they may contain -100, else None."""
    if loss is functional.cross_entropy or (loss is None and isinstance(batch, Mapping)):
        target = batches.target_of(batch)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            return target
    return None


def _is_causal(owner: nn.Module) -> bool:
    """Return whether the model's loss is transformers' causal one, which shifts the labels.

    Some models have the property `loss_function`, but a forward that computes another loss.
    """
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return False
    return getattr(getattr(owner, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
