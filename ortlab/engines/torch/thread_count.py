"""Number of threads that torch computes with: one for small work.

Handing parts of small work to other threads takes longer than computing it. With two threads a
small perceptron's step takes up to three times as long where idle threads sleep, and on a busy
machine it waits for a core with each handover.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch

SMALL: Final = 1 << 24
"""Multiply-adds of a forward pass below which one thread is as fast as several or faster.

Measured on two cores with perceptrons, convolutional networks and BERT; see docs/speed.md.
"""


def products(parameters: int, batch: Batch) -> int:
    """Return an upper bound of the multiply-adds of a forward pass, but for attention's.

    Each parameter is applied at most once per position: a row of a table, and otherwise each
    element of the largest input.

    Args:
        parameters: Number of elements of the model's parameters.
        batch: Batch in any form.
    """
    return parameters * max(map(_positions, batches.tensors(batch)), default=0)


def _positions(tensor: torch.Tensor) -> int:
    table = tensor.dim() == 2 and tensor.is_floating_point()
    return int(tensor.shape[0]) if table else tensor.numel()


@contextlib.contextmanager
def suited_threads(parameters: int, work: Sequence[Batch]) -> Iterator[None]:
    """Let torch compute with one thread if the work is small.

    The batches alone decide, so a run that resumes makes the same choice, and has the same bits.

    Args:
        parameters: Number of elements of the model's parameters.
        work: Batches of the step.
    """
    small = all(products(parameters, batch) < SMALL for batch in work)
    with threads(1 if small else None):
        yield


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set the number of threads that torch computes with, and restore it afterwards.

    Args:
        number: Number of threads, or None to change nothing.
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
