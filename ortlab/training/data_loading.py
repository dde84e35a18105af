"""Data of a run as batches: of samples, of a loader's own, or of a stream.

An epoch that was interrupted resumes at the same place, in the same order; samples also in batches
of another size.
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
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ortlab.checkpoint.checkpoint import Order, Position, Unit
from ortlab.engines import compatibility
from ortlab.engines.base import Batch
from ortlab.settings import DataSettings, FinetuneSettings
from ortlab.utils.rng import RandomStates
from ortlab.utils.wording import ordinal

Read = Callable[[int], list[Any]]
"""Returns the next items of an epoch: the requested number of them, or the rest."""
Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples."""


class Epoch(Iterator[Batch]):
    """Rest of an epoch, as micro-batches.

    Items are samples, and iterating yields batches of `size` of them; without a `size`, items are
    batches already.

    Args:
        read: Reads the next items.
        size: Samples in a micro-batch; None if the items are batches.
        done: Items of the epoch that were read before.
        make: Makes a batch of samples; None for `collate`.
    """

    def __init__(
        self, read: Read, size: int | None, done: int, make: Collate | None = None
    ) -> None:
        self.done = done
        """Items of the epoch that were read."""
        self._read = read
        self._size = size
        self._make = make or collate
        self._kept: list[Any] = []
        self._again: list[Any] = []

    def __next__(self) -> Batch:
        for batch in self.take(1):
            return batch
        raise StopIteration

    def take(self, number: int, size: int | None = None, *, keep: bool = False) -> list[Batch]:
        """Return the next micro-batches; at the end of the epoch fewer and smaller ones.

        Args:
            number: Number of micro-batches.
            size: Samples in each; None for the default. Ignored if the items are batches.
            keep: Keep the items, so that `put_back` can follow.

        Returns:
            The micro-batches; empty at the end of the epoch.
        """
        found: list[Batch] = []
        self._kept = []
        count = 1 if self._size is None else size or self._size
        while len(found) < number and (items := self._next(count)):
            self.done += len(items)
            if keep:
                self._kept += items
            found.append(items[0] if self._size is None else self._make(items))
        return found

    def put_back(self) -> None:
        """Return the items of the last `take`, for the next one to use without reading again."""
        self.done -= len(self._kept)
        self._kept, self._again = [], self._kept + self._again

    def _next(self, count: int) -> list[Any]:
        items, self._again = self._again[:count], self._again[count:]
        return items if len(items) == count else items + self._read(count - len(items))


@dataclass(frozen=True)
class Batches:
    """Data as micro-batches.

    ``open(n, k)`` reads epoch `n`, counted from 0, without its first `k` items. Items are samples,
    and ``size`` is the default number of them in a micro-batch. If the data makes its own batches,
    these are the items, ``size`` is None, and ``own`` says why. ``length`` is the number of items
    in an epoch; None if unknown before it is read. ``generators`` are the generators from which the
    user's loader draws its order, if it has its own. ``workers_stay`` is True if the loader's
    workers outlive an epoch, and ``once`` if the data can be read only once. ``exact`` is True if
    no epoch has more items than ``length``; a loader of an IterableDataset may have, for example.
    ``indices(n, places)`` are the indices of the samples at these places of epoch `n` in the
    Dataset, whose class is ``kind``, and ``collate_fn`` is the user's function that makes a batch
    of samples.
    """

    open: Callable[[int, int], Read]
    length: int | None
    size: int | None
    own: str = ""
    generators: tuple[torch.Generator, ...] = ()
    workers_stay: bool = False
    once: bool = False
    exact: bool = False
    indices: Callable[[int, Sequence[int]], list[int]] | None = None
    kind: str = ""
    collate_fn: Collate | None = None

    def within(self, around: Callable[[], AbstractContextManager[None]]) -> Batches:
        """Return the same data, with each read inside a context.

        Args:
            around: Creates the context manager of a read.

        Returns:
            The data.
        """

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
        """Unit of the items."""
        return "micro-batches" if self.size is None else "samples"

    def named(self, indices: list[int]) -> str:
        """Name samples of the Dataset, such as "index 7 of the Table".

        Args:
            indices: Their indices, at least one.
        """
        return f"{_told(indices)} of the {self.kind}"

    def epoch(self, number: int, skip: int = 0, *, size: int | None = None) -> Epoch:
        """Return an epoch.

        Args:
            number: Number of the epoch, counted from 0.
            skip: Items to skip at its beginning.
            size: Samples in a micro-batch; None for the default.

        Returns:
            The epoch.
        """
        count = self.size and (size or self.size)
        return Epoch(self.open(number, skip), count, skip, self.collate_fn)

    def order(self) -> Order:
        """Return the random states from which the order of an epoch is drawn that begins now."""
        return Order(RandomStates.now(), [each.get_state() for each in self.generators])

    def again(self, position: Position) -> Epoch:
        """Return the epoch of a position as it began then, from that position on.

        The items before the position are read again and dropped; for a Dataset that is batched here
        they are skipped without a read. The random states change; if the data cannot be read, the
        generators of the loader keep theirs.

        Args:
            position: Position of a checkpoint.

        Returns:
            The rest of the epoch.
        """
        assert position.order is not None
        before = [each.get_state() for each in self.generators]
        try:
            if self.workers_stay and position.epoch > 0:
                self.open(0, 0)  # such a loader draws its workers' seed only in its first epoch
            position.order.random.give_back()
            self._set_generators(position.order.generators)
            return self.epoch(position.epoch, position.read)
        except BaseException:
            self._set_generators(before)
            raise

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def batches(
    data: Any,
    settings: FinetuneSettings,
    *,
    evaluation: bool = False,
    collate_fn: Collate | None = None,
) -> Batches:
    """Return data as micro-batches.

    A DataLoader or another iterable of batches is used as it is. A torch or ``datasets`` Dataset
    consists of samples, which are batched by ``batch_size`` (see `collate`). For training, a
    Dataset with indices is shuffled in each epoch, by the seed and the number of the epoch alone. A
    ``batch_size`` that has no effect warns.

    A run that resumes from a checkpoint reaches its place in the user's own loader or iterable by
    reading the items before it again, from the random states and those of the loader's generators
    at the beginning of the epoch. So the data must come in the same order for the same states.
    State that a sampler or a stream keeps elsewhere, and numbers that it draws in the middle of an
    epoch from generators that others use too, are not restored; neither are the random numbers of
    workers that outlive an epoch (``persistent_workers``).

    Args:
        data: A Dataset, a DataLoader, or another iterable of batches.
        settings: Batch size, seed and epochs of the run.
        evaluation: True for held-out data, which is not shuffled.
        collate_fn: The user's function that makes a batch of a Dataset's samples; None for
            `collate`.

    Returns:
        The data.

    Raises:
        ValueError: If the data is empty or not iterable, or can be read only once and is needed for
            several epochs.
    """
    made_of_samples = of_samples(data)
    single = isinstance(data, torch.Tensor | Mapping | str | bytes)
    if not made_of_samples and (single or not hasattr(data, "__iter__")):
        raise ValueError(
            f"the data is a single {type(data).__name__}; pass a Dataset, a DataLoader or a list "
            "of batches, as in DataLoader(TensorDataset(inputs, targets), batch_size=16)"
        )
    length = length_of(data)
    limits = settings.limits
    once = not evaluation and (limits.num_train_epochs == 1 or limits.max_steps is not None)
    if length == 0:
        raise ValueError(f"the data is empty: the {type(data).__name__} has no elements")
    if made_of_samples:
        made = _batched(data, length, settings.data, shuffle=not evaluation)
        return replace(made, collate_fn=collate_fn)
    if isinstance(data, Iterator) and not once:
        raise ValueError(
            f"a {type(data).__name__} can be read only once, but this data is read several times; "
            "pass a list or a DataLoader, or use num_train_epochs=1 to train on it once"
        )
    own = own_batches(data)
    _warn_of_batch_size(data, settings.data.batch_size, own)
    return Batches(
        _reader(data, "micro-batches"),
        length,
        None,
        own,
        _generators(data),
        workers_stay=_workers_stay(data),
        once=isinstance(data, Iterator),
        exact=_is_exact(data),
    )


def check_collate(collate_fn: Any, train: Any, evaluation: Any) -> None:
    """Check that the user's function that makes batches is one, and has samples to make them of.

    Args:
        collate_fn: The function; None for none.
        train: The training data.
        evaluation: The evaluation data; None for none.

    Raises:
        ValueError: If it is not a function, or all data makes its own batches.
    """
    if collate_fn is None:
        return
    if not callable(collate_fn):
        raise ValueError(f"collate_fn={collate_fn!r} is not a function of a list of samples")
    if not (of_samples(train) or of_samples(evaluation)):
        raise ValueError(
            f"collate_fn has no effect: the {type(train).__name__} makes its own batches; pass the "
            "Dataset itself, or give collate_fn to the DataLoader"
        )


def _workers_stay(data: Any) -> bool:
    return getattr(data, "persistent_workers", False) and getattr(data, "num_workers", 0) > 0


def _is_exact(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return not isinstance(data.dataset, IterableDataset)
    return isinstance(data, Sequence)


def _reader(data: Any, unit: Unit) -> Callable[[int, int], Read]:
    """Return a function that opens epochs of data without indices, and reads what it skips."""

    def begin(_: int, skip: int) -> Read:
        items = iter(data)
        read = sum(1 for _ in itertools.islice(items, skip))
        if read < skip:
            raise ValueError(
                f"the data ended after {read} {unit}, but the checkpoint was taken after {skip}; "
                "pass the data that the checkpoint was trained on"
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
    """Return the item of a Dataset that is being read, such as "index 7 of the Table".

    Args:
        frames: Frames of a thread, the innermost first.

    Returns:
        The item, or None if the frames do not tell, as those of a DataLoader whose workers read.
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
"""Module in which a DataLoader without workers reads its Dataset."""
_INDICES = ("index", "idx", "indices", "possibly_batched_index")
"""Names of the indices in `_item`, in `_fetched`, and in torch's fetchers."""


def _told(place: Any) -> str | None:
    """Return an index, or the first of several, in words; None for a stream, which has none."""
    if isinstance(place, int):
        return f"index {place}"
    if not isinstance(place, list) or not place or not isinstance(place[0], int):
        return None
    if len(place) == 1:
        return _told(place[0])
    some = ", ".join(map(str, place[:8]))
    return f"indices {some}" + (f" and {len(place) - 8} more" if len(place) > 8 else "")


def _generators(data: Any) -> tuple[torch.Generator, ...]:
    """Return the generators of a DataLoader and of its samplers, each once."""
    batch_sampler = getattr(data, "batch_sampler", None)
    places = (data, getattr(data, "sampler", None), batch_sampler)
    found = [getattr(each, "generator", None) for each in (*places, _sampler(batch_sampler))]
    generators = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return tuple(generators.values())


def _sampler(batch_sampler: Any) -> Any:
    return getattr(batch_sampler, "sampler", None)


def own_batches(data: Any) -> str:
    """Return why ``batch_size`` has no effect on data that makes its own batches.

    Args:
        data: The data.

    Returns:
        The reason, and what to do; "" for samples, which ortlab batches.
    """
    if of_samples(data):
        return ""
    return (
        f"the {type(data).__name__} makes its own batches; pass the Dataset itself, or set "
        "the loader's batch_size"
    )


def of_samples(data: Any) -> bool:
    """Return whether data consists of samples, not of batches.

    Args:
        data: The data.

    Returns:
        True for a Dataset of torch or of the package ``datasets``.
    """
    # Such a Dataset exists only if the package was imported, and an import takes a second.
    hub = sys.modules.get("datasets")
    hub_types = (hub.Dataset, hub.IterableDataset) if hub is not None else ()
    return isinstance(data, (Dataset, *hub_types))


def unevenly(data: Any, settings: FinetuneSettings) -> str | None:
    """Return a note if workers have micro-batches of different sizes.

    Args:
        data: The training data.
        settings: Batch size and workers of the run.

    Returns:
        The note, or None if all sizes are equal.
    """
    batch_size = settings.data.batch_size
    places = compatibility.data_parallel_size(settings.parallel, settings.parallel.workers)
    least, more = divmod(batch_size, places)
    if not more or not of_samples(data):
        return None
    return (
        f"{batch_size=} is split unevenly: {least + 1} samples for {more} and "
        f"{least} for {places - more} of {places} workers, which wait for the larger shares; the "
        "losses equal those of one process"
    )


def length_of(data: Any) -> int | None:
    """Return the length of data.

    Args:
        data: The data.

    Returns:
        ``len(data)``, or None if it has no length.
    """
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _batched(data: Any, length: int | None, settings: DataSettings, *, shuffle: bool) -> Batches:
    if length is None or isinstance(data, IterableDataset):
        return Batches(_reader(data, "samples"), None, settings.batch_size)

    def order(number: int) -> Sequence[int]:
        return _shuffled(length, settings.seed, number) if shuffle else range(length)

    def begin(number: int, skip: int) -> Read:
        left = itertools.islice(order(number), skip, None)
        return lambda count: _fetched(data, list(itertools.islice(left, count)))

    def indices(number: int, places: Sequence[int]) -> list[int]:
        given = order(number)
        return [given[place] for place in places]

    kind = type(data).__name__
    return Batches(begin, length, settings.batch_size, exact=True, indices=indices, kind=kind)


def _shuffled(length: int, seed: int, epoch: int) -> list[int]:
    order = torch.Generator()
    order.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
    # A DataLoader draws its workers' seed first, and its checkpoints must resume here.
    torch.empty((), dtype=torch.int64).random_(generator=order)
    return torch.randperm(length, generator=order).tolist()


def _fetched(data: Any, indices: list[int]) -> list[Any]:
    """Return the samples at `indices`, in one call if the Dataset supports it.

    A DataLoader does the same. A note on an exception of the Dataset names the index.
    """
    at_once = getattr(data, "__getitems__", None)
    if at_once is None or not indices:
        return [_item(data, index) for index in indices]
    try:
        return list(at_once(indices))
    except Exception:
        for index in indices:
            _item(data, index)  # finds the bad one
        raise


def _item(data: Any, index: int) -> Any:
    try:
        return data[index]
    except Exception as error:
        error.add_note(f"the {type(data).__name__} raised this at index {index}")
        raise


def _warn_of_batch_size(data: Any, batch_size: int, own: str) -> None:
    default = DataSettings.declarations()["batch_size"].default
    if batch_size not in (default, getattr(data, "batch_size", None)):
        warnings.warn(f"{batch_size=} has no effect: {own}", stacklevel=4)


def collate(samples: Sequence[Any]) -> Batch:
    """Return a batch of samples. Text in a mapping is left out, since no model takes it.

    Args:
        samples: Mappings, tuples, or values that torch can convert to a tensor.

    Returns:
        The samples, stacked along a new first dimension.

    Raises:
        ValueError: If a value is not a tensor, or the samples have different shapes: padding is up
            to the tokenizer.
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
            _stack(f"the {ordinal(place)} element", values)
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
            f"{name} of a sample is {type(values[0]).__name__}, which cannot be a tensor: {error}; "
            "pass a collate_fn"
        ) from error
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        some = ", ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise ValueError(
            f"{name} has different shapes in one batch ({some}); pad the samples, as with "
            "tokenizer(..., padding='max_length'), or pass a collate_fn that does"
        )
    return torch.stack(tensors)
