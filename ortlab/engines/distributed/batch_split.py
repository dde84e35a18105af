"""How a batch is shared out: contiguous rows for every rank, and their weight in its loss."""

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

IGNORED = -100
"""The target that torch's and transformers' cross entropy leave out, unless told otherwise."""


def share_of(batch: Batch, rank: int, size: int, weights: torch.Tensor) -> Share:
    """What `rank` of `size` takes of `batch`, whose samples have `weights` [samples] in its loss.

    The first ranks have a sample more where they cannot be shared out evenly. A rank whose samples
    weigh nothing, or that has none, takes the one that weighs most, with a part of zero: so every
    rank goes through the same collectives, and no engine meets an empty batch.

    ValueError for a tensor that is not made of the batch's samples.
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
    """`rows` of every tensor; those of one row, or without dimensions, are everybody's."""
    if isinstance(value, Mapping):
        return {key: _rows(each, rows, samples, size, str(key)) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [
            _rows(each, rows, samples, size, f"item {place} of {name}")
            for place, each in enumerate(value)
        ]
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if value.shape[0] == samples:
        return value[rows]
    if value.shape[0] == 1:
        return value
    raise ValueError(
        f"the batch has {samples} samples, and {name} is {list(value.shape)}, which cannot be "
        f"shared out to {size} ranks by its first dimension; train with workers=1, or give every "
        "tensor one row for each sample"
    )


def weights_of(batch: Batch, loss: LossFunction | None, owner: nn.Module) -> torch.Tensor:
    """What each sample of `batch` weighs in its loss, [samples]: one, or its counted targets.

    A loss is taken for the mean over samples. Where targets are classes and some are -100, which
    torch's ``cross_entropy`` and the losses of transformers leave out, it is the mean over the
    others: that is known of ``cross_entropy`` itself, and believed of a model's own loss, which
    leaves out the first token of each sample too where it is transformers' causal one. Of any
    other function it is not known, and there samples weigh the same: with 22 and 17 targets on two
    ranks a GPT-2's first loss was then off by 0.07%, and the norm of its gradient by 0.3%.
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
    """The targets where they may hold -100."""
    if loss is functional.cross_entropy or (loss is None and isinstance(batch, Mapping)):
        target = batches.target_of(batch)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            return target
    return None


def _is_causal(owner: nn.Module) -> bool:
    """Whether the model's own loss is transformers' for causal models, which shifts the labels.

    Some have the property that gives it, and a forward that computes another.
    """
    code = getattr(inspect.unwrap(type(owner).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return False
    return getattr(getattr(owner, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
