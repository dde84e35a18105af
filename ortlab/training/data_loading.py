"""What a run trains on, as batches: of samples, of a loader's own, of a stream.

Where an epoch was left it goes on, in the same order; samples in batches of another size, too.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from ortlab.checkpoint.checkpoint import Order, Position, Unit
from ortlab.engines.base import Batch
from ortlab.engines.distributed import compatibility
from ortlab.settings import FinetuneSettings
from ortlab.utils.rng import RandomStates

Read = Callable[[int], list[Any]]
"""Gives the next items of an epoch: as many as it is asked for, or those that are left."""


class Epoch(Iterator[Batch]):
    """What is left of an epoch, of which `done` items are read: a micro-batch after the other.

    Items are samples, and iterating gives batches of `size` of them; without a `size` they are
    batches already.
    """

    def __init__(self, read: Read, size: int | None, done: int) -> None:
        self.done = done
        """Items of the epoch that are read."""
        self._read = read
        self._size = size
        self._kept: list[Any] = []
        self._again: list[Any] = []

    def __next__(self) -> Batch:
        for batch in self.take(1):
            return batch
        raise StopIteration

    def take(self, number: int, size: int | None = None, *, keep: bool = False) -> list[Batch]:
        """The next `number` micro-batches of `size` samples; at the epoch's end fewer and smaller.

        With `keep`, `put_back` can follow. A `size` is nothing to batches that are made already.
        """
        found: list[Batch] = []
        self._kept = []
        count = 1 if self._size is None else size or self._size
        while len(found) < number and (items := self._next(count)):
            self.done += len(items)
            if keep:
                self._kept += items
            found.append(items[0] if self._size is None else collate(items))
        return found

    def put_back(self) -> None:
        """The next `take` begins where the last one did: with the same items, not read again."""
        self.done -= len(self._kept)
        self._kept, self._again = [], self._kept + self._again

    def _next(self, count: int) -> list[Any]:
        items, self._again = self._again[:count], self._again[count:]
        return items if len(items) == count else items + self._read(count - len(items))


@dataclass(frozen=True)
class Batches:
    """Data as micro-batches: ``open(n, k)`` reads epoch `n`, counted from 0, without `k` items.

    Items are samples, and ``size`` is how many make a micro-batch where nobody says otherwise; of
    data that makes its own batches those are the items, ``size`` is None, and ``own`` says why.
    ``length`` is the number of items in an epoch, None where only reading tells. ``generators`` are
    those that the user's loader draws its order from, where it has any of its own;
    ``workers_stay`` says whether its workers outlive an epoch, and ``once`` whether what was read
    cannot be read again. ``names(n, places)`` says which samples of a Dataset epoch `n` has there.
    """

    open: Callable[[int, int], Read]
    length: int | None
    size: int | None
    own: str = ""
    generators: tuple[torch.Generator, ...] = ()
    workers_stay: bool = False
    once: bool = False
    names: Callable[[int, Sequence[int]], str] | None = None

    def within(self, around: Callable[[], AbstractContextManager[None]]) -> Batches:
        """The same data, each read of it within what `around` gives."""

        def begin(number: int, skip: int) -> Read:
            with around():
                read = self.open(number, skip)

            def reading(count: int) -> list[Any]:
                with around():
                    return read(count)

            return reading

        return replace(self, open=begin)

    @property
    def unit(self) -> Unit:
        """What the items are."""
        return "micro-batches" if self.size is None else "samples"

    def epoch(self, number: int, skip: int = 0, *, size: int | None = None) -> Epoch:
        """Epoch `number` without its first `skip` items, in micro-batches of `size` samples."""
        return Epoch(self.open(number, skip), self.size and (size or self.size), skip)

    def order(self) -> Order:
        """What the order of an epoch that begins now is drawn from."""
        return Order(RandomStates.now(), [each.get_state() for each in self.generators])

    def again(self, position: Position) -> Epoch:
        """The epoch of `position` as it began then, from its place on.

        What was read before it is read again and dropped; a Dataset that is batched here skips it
        unread. Leaves the random states changed.
        """
        assert position.order is not None
        if self.workers_stay and position.epoch > 0:
            self.open(0, 0)  # such a loader draws its workers' seed in its first epoch alone
        position.order.random.give_back()
        for generator, state in zip(self.generators, position.order.generators, strict=True):
            generator.set_state(state)
        return self.epoch(position.epoch, position.read)


def batches(data: Any, settings: FinetuneSettings, *, evaluation: bool = False) -> Batches:
    """`data` as micro-batches, for training or for `evaluation`.

    A DataLoader or another iterable of batches is used as it is. A torch or ``datasets`` Dataset is
    made of samples: they are batched by ``batch_size`` (see `collate`), and in training those that
    can be indexed come in an order of their own each epoch, drawn from the seed and the epoch's
    number alone.

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
    own = (
        f"the {type(data).__name__} makes its own batches; give the Dataset itself, or set the "
        "loader's batch_size"
    )
    _warn_of_batch_size(data, settings, own)
    stay = getattr(data, "persistent_workers", False) and getattr(data, "num_workers", 0) > 0
    return Batches(
        _reader(data, "micro-batches"),
        length,
        None,
        own,
        _generators(data),
        workers_stay=stay,
        once=isinstance(data, Iterator),
    )


def _reader(data: Any, unit: Unit) -> Callable[[int, int], Read]:
    """Epochs of what can only be read on: what is to be skipped is read as well."""

    def begin(_: int, skip: int) -> Read:
        items = iter(data)
        read = sum(1 for _ in itertools.islice(items, skip))
        if read < skip:
            raise ValueError(
                f"the data ended after {read} {unit}, and the checkpoint was taken after {skip}; "
                "go on with the data that it was trained on"
            )

        def reading(count: int) -> list[Any]:
            try:
                return list(itertools.islice(items, count))
            except Exception as error:
                frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
                if (place := being_read(reversed(frames))) is not None:
                    error.add_note(f"the {type(data).__name__} was reading {place}")
                raise

        return reading

    return begin


def being_read(frames: Iterable[FrameType]) -> str | None:
    """What of a Dataset is being read in `frames`, the innermost first: "index 7 of the Table".

    None where they do not tell, as those of a DataLoader whose workers read.
    """
    place = None
    for frame in frames:
        if frame.f_globals.get("__name__") not in (__name__, _FETCHERS):
            continue
        there = frame.f_locals
        if place is None:
            place = next((_told(there[name]) for name in _INDICES if name in there), None)
        for dataset in (there.get("data"), getattr(there.get("self"), "dataset", None)):
            if place is not None and of_samples(dataset):
                return f"{place} of the {type(dataset).__name__}"
    return None


_FETCHERS = "torch.utils.data._utils.fetch"
"""Where a DataLoader without workers reads its Dataset, that in `_MapDatasetFetcher.fetch`."""
_INDICES = ("index", "idx", "indices", "possibly_batched_index")
"""What `_item` and `_fetched` call what they read, and torch's fetchers."""


def _told(place: Any) -> str | None:
    """An index, or the first of several; None for others, as a stream's fetcher is told."""
    if isinstance(place, int):
        return f"index {place}"
    if not isinstance(place, list) or not place or not isinstance(place[0], int):
        return None
    if len(place) == 1:
        return _told(place[0])
    some = ", ".join(map(str, place[:8]))
    return f"indices {some}" + (f" and {len(place) - 8} more" if len(place) > 8 else "")


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


def unevenly(data: Any, settings: FinetuneSettings) -> str | None:
    """What is to be said where workers have micro-batches of different sizes; None elsewhere."""
    places = compatibility.data_parallel_size(settings, settings.workers)
    least, more = divmod(settings.batch_size, places)
    if not more or not of_samples(data):
        return None
    return (
        f"batch_size={settings.batch_size} is shared out unevenly: {least + 1} samples to {more} "
        f"and {least} to {places - more} of {places} workers, who wait for the larger; losses stay "
        "those of one process"
    )


def length_of(data: Any) -> int | None:
    """``len(data)``; None where it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _batched(
    data: Any, length: int | None, settings: FinetuneSettings, *, shuffle: bool
) -> Batches:
    if length is None or isinstance(data, IterableDataset):
        return Batches(_reader(data, "samples"), None, settings.batch_size)

    def order(number: int) -> Sequence[int]:
        return _shuffled(length, settings.seed, number) if shuffle else range(length)

    def begin(number: int, skip: int) -> Read:
        left = itertools.islice(order(number), skip, None)
        return lambda count: _fetched(data, list(itertools.islice(left, count)))

    def names(number: int, places: Sequence[int]) -> str:
        given = order(number)
        return f"{_told([given[place] for place in places])} of the {type(data).__name__}"

    return Batches(begin, length, settings.batch_size, names=names)


def _shuffled(length: int, seed: int, epoch: int) -> list[int]:
    order = torch.Generator()
    order.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    # A DataLoader draws its workers' seed first, and checkpoints of runs that had one go on here.
    torch.empty((), dtype=torch.int64).random_(generator=order)
    return torch.randperm(length, generator=order).tolist()


def _fetched(data: Any, indices: list[int]) -> list[Any]:
    """The samples at `indices`, at once where the Dataset can, as torch's DataLoader has them.

    A note of what a Dataset raises says at which of them.
    """
    at_once = getattr(data, "__getitems__", None)
    if at_once is None or not indices:
        return [_item(data, index) for index in indices]
    try:
        return list(at_once(indices))
    except Exception:
        for index in indices:
            _item(data, index)  # one by one the bad one is found
        raise


def _item(data: Any, index: int) -> Any:
    try:
        return data[index]
    except Exception as error:
        error.add_note(f"the {type(data).__name__} raised it at index {index}")
        raise


def _warn_of_batch_size(data: Any, settings: FinetuneSettings, own: str) -> None:
    default = FinetuneSettings.declarations()["batch_size"].default
    if settings.batch_size not in (default, getattr(data, "batch_size", None)):
        warnings.warn(
            f"batch_size={settings.batch_size} has no effect: {own}",
            stacklevel=4,
        )


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
