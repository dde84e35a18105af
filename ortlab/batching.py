"""What a run trains on, as batches: of samples, of a loader's own, of a stream.

Where an epoch was left it goes on, in the same order.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ortlab.checkpoint import Order, Position
from ortlab.engines.base import Batch
from ortlab.randomness import RandomStates
from ortlab.settings import FinetuneSettings


@dataclass(frozen=True)
class Batches:
    """Data as micro-batches: ``epoch(n, k)`` iterates over epoch `n`, counted from 0, without `k`.

    ``length`` is the number of micro-batches in an epoch, None where only reading tells.
    ``generators`` are those that the user's loader draws its order from, where it has any of its
    own; ``workers_stay`` says whether its workers outlive an epoch.
    """

    epoch: Callable[..., Iterator[Batch]]
    length: int | None
    generators: tuple[torch.Generator, ...] = ()
    workers_stay: bool = False

    def order(self) -> Order:
        """What the order of an epoch that begins now is drawn from."""
        return Order(RandomStates.now(), [each.get_state() for each in self.generators])

    def again(self, position: Position) -> Iterator[Batch]:
        """The epoch of `position` as it began then, from its micro-batch on.

        What was read before it is read again and dropped; a Dataset that is batched here skips it
        unread. Leaves the random states changed.
        """
        assert position.order is not None
        if self.workers_stay and position.epoch > 0:
            self.epoch(0)  # such a loader draws its workers' seed in its first epoch alone
        position.order.random.give_back()
        for generator, state in zip(self.generators, position.order.generators, strict=True):
            generator.set_state(state)
        return self.epoch(position.epoch, position.batch)


def batches(data: Any, settings: FinetuneSettings, *, evaluation: bool = False) -> Batches:
    """`data` as micro-batches, for training or for `evaluation`.

    A DataLoader or another iterable of batches is used as it is. A torch or ``datasets`` Dataset is
    made of samples: they are batched by ``batch_size`` (see `collate`), and in training those that
    can be indexed come in an order of their own each epoch, drawn from the seed.

    ValueError for what is empty, is no iterable, or can be read once but is needed for several
    epochs; a ``batch_size`` that has no effect warns.

    A run that goes on from a checkpoint reaches its place in the user's own loader or iterable by
    reading what came before it once more, from the random states and those of the loader's
    generators at the beginning of the epoch. So data must come in the same order for the same
    states: what a sampler or a stream remembers apart from them, or draws in the middle of an epoch
    from generators that others draw from too, is not found again; neither are the random numbers of
    workers that outlive an epoch (``persistent_workers``).
    """
    made_of_samples = of_samples(data)
    single = isinstance(data, torch.Tensor | Mapping | str | bytes)
    if not made_of_samples and (single or not hasattr(data, "__iter__")):
        raise ValueError(
            f"the data is one {type(data).__name__}; give a Dataset, a DataLoader or a list of "
            "batches, as in DataLoader(TensorDataset(inputs, targets), batch_size=16)"
        )
    length = length_of(data)
    once = settings.epochs == 1 and not evaluation
    if length == 0:
        raise ValueError(f"the data is empty: the {type(data).__name__} has no element")
    if made_of_samples:
        return _batched(data, length, settings, shuffle=not evaluation)
    if isinstance(data, Iterator) and not once:
        raise ValueError(
            f"a {type(data).__name__} can be read only once, and this data is read several times; "
            "give a list or a DataLoader (to train on it once: epochs=1)"
        )
    _warn_of_batch_size(data, settings)

    def epoch(_: int, skip: int = 0) -> Iterator[Batch]:
        return _without(iter(data), skip)

    stay = getattr(data, "persistent_workers", False) and getattr(data, "num_workers", 0) > 0
    return Batches(epoch, length, _generators(data), stay)


def _without(items: Iterator[Batch], count: int) -> Iterator[Batch]:
    """`items` without the first `count`, which are read here and now."""
    read = sum(1 for _ in itertools.islice(items, count))
    if read < count:
        raise ValueError(
            f"the data ended after {read} micro-batches, and the checkpoint was taken after "
            f"{count}; go on with the data that it was trained on"
        )
    return items


def _generators(data: Any) -> tuple[torch.Generator, ...]:
    """The generators of a DataLoader and of its samplers, each once."""
    batch_sampler = getattr(data, "batch_sampler", None)
    places = (data, getattr(data, "sampler", None), batch_sampler)
    found = [getattr(each, "generator", None) for each in (*places, _sampler(batch_sampler))]
    generators = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return tuple(generators.values())


def _sampler(batch_sampler: Any) -> Any:
    return getattr(batch_sampler, "sampler", None)


def of_samples(data: Any) -> bool:
    """Whether `data` yields samples, not batches."""
    # Only who imported it can have made one, and importing it takes a second.
    hub = sys.modules.get("datasets")
    hub_types = (hub.Dataset, hub.IterableDataset) if hub is not None else ()
    return isinstance(data, (Dataset, *hub_types))


def length_of(data: Any) -> int | None:
    """``len(data)``; None where it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _batched(
    data: Any, length: int | None, settings: FinetuneSettings, *, shuffle: bool
) -> Batches:
    size = settings.batch_size
    if length is None or isinstance(data, IterableDataset):
        return Batches(
            lambda _, skip=0: _without(map(collate, _grouped(iter(data), size)), skip), None
        )

    def epoch(number: int, skip: int = 0) -> Iterator[Batch]:
        order = torch.Generator()
        order.manual_seed(int(np.random.SeedSequence([settings.seed, number]).generate_state(1)[0]))
        sampler: Sampler[int] = SequentialSampler(data)
        if shuffle:
            sampler = RandomSampler(data, generator=order)
        groups: Any = itertools.islice(BatchSampler(sampler, size, drop_last=False), skip, None)
        loader: DataLoader[Any] = DataLoader(
            data, batch_sampler=groups, generator=order, collate_fn=collate
        )
        return iter(loader)

    return Batches(epoch, math.ceil(length / size))


def _warn_of_batch_size(data: Any, settings: FinetuneSettings) -> None:
    default = FinetuneSettings.declarations()["batch_size"].default
    if settings.batch_size not in (default, getattr(data, "batch_size", None)):
        warnings.warn(
            f"batch_size={settings.batch_size} has no effect: the {type(data).__name__} makes its "
            "own batches; give the Dataset itself, or set the loader's batch_size",
            stacklevel=4,
        )


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := list(itertools.islice(items, size)):
        yield group


def collate(samples: Sequence[Any]) -> Batch:
    """One batch of `samples`: mappings, tuples, or values that torch can make a tensor of.

    Text in a mapping is left out, since no model takes it. ValueError for samples of different
    shapes: padding them is the tokenizer's affair.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {
            name: _stack(str(name), [sample[name] for sample in samples])
            for name, value in first.items()
            if not isinstance(value, str)
        }
    if isinstance(first, tuple | list):
        return [
            _stack(f"item {place}", values)
            for place, values in enumerate(zip(*samples, strict=True))
        ]
    return _stack("the data", samples)


def _stack(name: str, values: Sequence[Any]) -> Batch:
    if isinstance(values[0], Mapping):
        return collate(values)
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} of a sample is {type(values[0]).__name__}, which is no tensor: {error}; "
            "give a DataLoader with a collate_fn"
        ) from error
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        some = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise ValueError(
            f"{name} has different shapes in one batch ({some}); pad the samples, as with "
            "tokenizer(..., padding='max_length'), or give a DataLoader with a collate_fn"
        )
    return torch.stack(tensors)
