"""Training data of a race or a search: the same samples in the same steps for every set-up."""

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
    """Optimizer steps of data that are read once and returned repeatedly by `steps`.

    These are the first steps of a run with `settings`, all with as many samples as the first.
    Random states, including those of the loader's generators, are restored.

    Args:
        data: Dataset, DataLoader or list of batches.
        settings: Settings of the run.
        number: Number of steps, or fewer if the data is shorter.

    Raises:
        ValueError: If the data can be read only once, is empty or would be rejected by a run.
    """

    def __init__(self, data: Any, settings: FinetuneSettings, number: int) -> None:
        if isinstance(data, Iterator):
            raise ValueError(
                f"a {type(data).__name__} can be read only once and would be exhausted; pass a "
                "list, a Dataset or a DataLoader"
            )
        with undisturbed_random():
            source = data_loading.batches(data, settings)
            states = [generator.get_state() for generator in source.generators]
            wanted = number * settings.data.gradient_accumulation_steps
            read = list(itertools.islice(source.epoch(0), wanted))
            for generator, state in zip(source.generators, states, strict=True):
                generator.set_state(state)
        if not read:
            raise ValueError("the data is empty; pass at least one batch")
        size = settings.data.gradient_accumulation_steps
        groups = [read[at : at + size] for at in range(0, len(read), size)]
        self.samples = _samples(groups[0])
        """Samples in an optimizer step."""
        self.micro = count(groups[0][0])[0]
        """Samples in a micro-batch."""
        self._steps = [group for group in groups if _samples(group) == self.samples]

    def __len__(self) -> int:
        return len(self._steps)

    def steps(self, begin: int, number: int, *, micro: int | None = None) -> list[list[Batch]]:
        """Return steps, each as a list of its micro-batches. After the last step the first follows.

        Args:
            begin: Index of the first step.
            number: Number of steps.
            micro: Samples in a micro-batch. By default as the data has it.
        """
        chosen = [self._steps[at % len(self._steps)] for at in range(begin, begin + number)]
        if micro is None or micro == self.micro:
            return chosen
        return [
            [part for batch in step for part in split(batch, min(micro, count(batch)[0]))]
            for step in chosen
        ]

    def close(self) -> None:
        """Release the data."""
        self._steps.clear()

    def all(self) -> list[Batch]:
        """Return every micro-batch once."""
        return [batch for step in self._steps for batch in step]


def _samples(batches: list[Batch]) -> int:
    return sum(count(batch)[0] for batch in batches)


def split(batch: Batch, rows: int) -> list[Batch]:
    """Return a batch in parts. Values that do not have one entry per sample are in every part.

    Args:
        batch: Batch to split.
        rows: Samples in a part.
    """
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
