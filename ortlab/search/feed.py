"""What every set-up of a race or a search trains on: the same samples, in the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ortlab.engines.base import Batch
from ortlab.engines.batch import count
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading
from ortlab.utils.rng import undisturbed_random


class Feed:
    """Some optimizer steps of data, read once; `steps` gives them again and again.

    They are those that a run with `settings` begins with, `number` of them or as many as there are,
    all with as many samples as the first. The random states, and those of the loader's generators,
    are as before. ValueError for what can be read only once, and for what a run refuses.
    """

    def __init__(self, data: Any, settings: FinetuneSettings, number: int) -> None:
        if isinstance(data, Iterator):
            raise ValueError(
                f"a {type(data).__name__} can be read only once, and would be used up; give a "
                "list, a Dataset or a DataLoader"
            )
        with undisturbed_random():
            source = data_loading.batches(data, settings)
            states = [generator.get_state() for generator in source.generators]
            wanted = number * settings.accumulation
            read = list(itertools.islice(source.epoch(0), wanted))
            for generator, state in zip(source.generators, states, strict=True):
                generator.set_state(state)
        if not read:
            raise ValueError("the data is empty")
        size = settings.accumulation
        groups = [read[at : at + size] for at in range(0, len(read), size)]
        self.samples = _samples(groups[0])
        """Of an optimizer step."""
        self.micro = count(groups[0][0])[0]
        """Samples in a micro-batch."""
        self._steps = [group for group in groups if _samples(group) == self.samples]

    def __len__(self) -> int:
        return len(self._steps)

    def steps(self, begin: int, number: int, *, micro: int | None = None) -> list[list[Batch]]:
        """`number` steps from step `begin` on, each as its micro-batches, of `micro` samples."""
        chosen = [self._steps[at % len(self._steps)] for at in range(begin, begin + number)]
        if micro is None or micro == self.micro:
            return chosen
        return [
            [part for batch in step for part in split(batch, min(micro, count(batch)[0]))]
            for step in chosen
        ]

    def close(self) -> None:
        """Lets go of the data."""
        self._steps.clear()

    def all(self) -> list[Batch]:
        """Every micro-batch once."""
        return [batch for step in self._steps for batch in step]


def _samples(batches: list[Batch]) -> int:
    return sum(count(batch)[0] for batch in batches)


def split(batch: Batch, rows: int) -> list[Batch]:
    """`batch` in parts of `rows` samples; what is not one for each sample goes into every part."""
    whole, _ = count(batch)
    return [_rows(batch, whole, at, at + rows) for at in range(0, whole, rows)]


def _rows(batch: Batch, whole: int, begin: int, end: int) -> Batch:
    if isinstance(batch, torch.Tensor):
        return batch[begin:end] if batch.dim() and batch.shape[0] == whole else batch
    if isinstance(batch, Mapping):
        return {name: _rows(value, whole, begin, end) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_rows(value, whole, begin, end) for value in batch]
    return batch
