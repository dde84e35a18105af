"""Set-ups that train side by side and take turns, so that a busy machine meets all of them.

What a turn takes is compared within its round; a figure is the median over rounds, with quartiles.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from ortlab.engines.base import Batch, Stepper
from ortlab.utils.rng import seeded

K = TypeVar("K")

WARMUP = 2
"""Rounds before the first that counts."""
SHORTEST_MS = 30
"""A turn makes as many steps as take so long in eager torch, at most `MOST_STEPS`."""
MOST_STEPS = 50
PAUSE_S = 0.02
"""Before a turn: idle workers of the engine before it stop spinning."""
SEED = 0
"""Shuffles the order of turns."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class TimedTrial:
    """One set-up in training: what `prepare` makes, its first step behind it.

    ``first_step_s`` is from before `prepare` to the end of that step, everything cold. ``losses``
    and ``grad_norms`` have a figure for each turn, of its last step; the first step is a turn.
    `batches` are the micro-batches of the first step. Raises what the engine raises.
    """

    def __init__(
        self,
        prepare: Callable[[], Stepper],
        batches: Sequence[Batch],
        *,
        lr: float,
        seed: int,
    ) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.lr = lr
        synchronize()
        started = time.perf_counter()
        self.stepper = prepare()
        try:
            prepared_s = time.perf_counter() - started
            self.first_step_s = prepared_s + self.turn([batches], seed=seed) / 1e3
        except BaseException:
            self.stepper.close()
            raise

    def turn(self, steps: Sequence[Sequence[Batch]], *, seed: int) -> float:
        """Milliseconds of a step, the mean of `steps`, each given as its micro-batches.

        Set-ups that draw dropout as eager torch does get the same masks for the same `seed`.
        """
        with seeded(seed), no_gc():
            started = time.perf_counter()
            for batches in steps:
                result = self.stepper.step(batches, lr=self.lr)
            synchronize()
            took_s = time.perf_counter() - started
        assert result.grad_norm is not None
        self.losses.append(float(result.loss))
        self.grad_norms.append(float(result.grad_norm))
        return took_s / len(steps) * 1e3


def take_turns(
    order: Sequence[K], turn: Callable[[K], float], fail: Callable[[K, str], None]
) -> dict[K, float]:
    """What `turn` says of each of `order`, one after the other.

    One that raises has its reason told to `fail`, and the others go on.
    """
    took = {}
    gc.collect()
    for key in order:
        time.sleep(PAUSE_S)
        with reasons(lambda reason, key=key: fail(key, reason)):  # type: ignore[misc]
            took[key] = turn(key)
    return took


@contextlib.contextmanager
def reasons(fail: Callable[[str], None]) -> Iterator[None]:
    """What is raised inside is told to `fail`, as a line, and goes no further."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - engines and compilers raise anything; it is shown
        lines = str(error).strip().splitlines()
        fail(lines[0] if lines else type(error).__name__)


def enough(step_ms: float, *, quick: bool = False) -> int:
    """Steps of a turn of eager torch that is long enough to time; one where it is quick."""
    wanted = 1 if quick else math.ceil(SHORTEST_MS / step_ms)
    return min(wanted, MOST_STEPS)


def rounds(keys: Sequence[K], number: int, *, seed: int = SEED) -> Iterator[list[K]]:
    """The order of turns in each of `number` rounds, shuffled by `seed`."""
    shuffled = random.Random(seed)
    for _ in range(number):
        yield shuffled.sample(keys, len(keys))


def synchronize() -> None:
    """Waits for the device, where torch computes on one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Python collects no garbage meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
