"""Threads that torch computes with: their number, and the end of those that are idle.

Handing parts of small work to other threads takes longer than computing it. With two threads a
small perceptron's step takes up to three times as long where idle threads sleep, and on a busy
machine it waits for a core with each handover.

After an operator, torch's other threads spin for several milliseconds (libgomp) before they sleep,
on cores that ONNX Runtime's threads need then.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch
from ortlab.utils.contention import spinning

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


_SOFT: Final = 1
"""Kind of pause after which OpenMP creates its threads again (OpenMP 5.2, section 18.6)."""


def end_idle_threads() -> None:
    """End torch's threads that wait for this one and spin; the next operator creates them again.

    That takes 0.1 ms. On two cores, ORT's product of 1024 x 1024 matrices takes 12 ms after it and
    19 ms beside a thread that spins. Nothing happens where they sleep, or torch computes without
    libgomp.
    """
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Any:
    """Return OpenMP's function that ends the threads of its caller, as torch finds it, or None."""
    if sys.platform != "linux" or not spinning():
        return None
    try:
        # Found in libgomp, on which this library depends.
        library = ctypes.CDLL(str(Path(inspect.getfile(torch)).parent / "lib" / "libtorch_cpu.so"))
        return library.omp_pause_resource_all
    except (OSError, AttributeError):
        return None
