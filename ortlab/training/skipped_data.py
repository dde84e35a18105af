"""Data with values that are not finite, which the user has chosen to train without."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set

import torch

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch
from ortlab.utils.wording import few


class SkippedData:
    """Samples that the user has accepted to skip, and the steps that were skipped for them."""

    def __init__(self) -> None:
        self._accepted: set[bytes] = set()
        self._accepts_all = False
        self._steps: list[int] = []
        self._rows: set[int] = set()

    def __str__(self) -> str:
        noun, numbers = ("row", sorted(self._rows)) if self._rows else ("step", self._steps)
        where = f"{noun}{'s' * (len(numbers) > 1)} {few([*map(str, numbers)])}"
        many = f"{len(self._steps)} batch{'es' * (len(self._steps) > 1)}"
        return f"skipped {many} with values that are not finite ({where})"

    def accepts(self, rows: Set[bytes]) -> bool:
        """Return True if the user has accepted all of these rows before.

        Args:
            rows: Result of `fingerprints`.
        """
        return self._accepts_all or rows <= self._accepted

    def accept(self, rows: Set[bytes], *, all_others: bool) -> None:
        """Train without these rows from now on.

        Args:
            rows: Result of `fingerprints`.
            all_others: Train without any other row that is not finite, too.
        """
        self._accepted |= rows
        self._accepts_all |= all_others

    def add(self, step: int, rows: Sequence[int]) -> None:
        """Count a skipped step.

        Args:
            step: Number of the step.
            rows: Indices of its bad samples in the user's Dataset; empty if they have none.
        """
        self._steps.append(step)
        self._rows.update(rows)


def fingerprints(group: Sequence[Batch], rows: Sequence[int]) -> set[bytes]:
    """Return digests of some samples of a step, by which a shuffled epoch finds them again.

    Args:
        group: Micro-batches of the step.
        rows: The samples, counted from 0 over the micro-batches; empty for all.
    """
    found, first = set(), 0
    for batch in group:
        samples = batches.count(batch)[0]
        for row in range(samples):
            if rows and first + row not in rows:
                continue
            digest = hashlib.sha256()
            for tensor in batches.tensors(batch):
                of_sample = tensor.dim() > 0 and len(tensor) == samples
                values = (tensor[row] if of_sample else tensor).detach().cpu().contiguous()
                digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
            found.add(digest.digest())
        first += samples
    return found
