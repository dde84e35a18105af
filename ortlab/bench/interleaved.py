"""Set-ups that train side by side and take turns, so that other load affects all of them.

Turns are compared within their round. A result is the median over rounds, with quartiles.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

from ortlab.engines.base import Batch, Stepper
from ortlab.utils.rng import seeded

K = TypeVar("K")

WARMUP = 2
"""Number of warm-up rounds."""
SHORTEST_MS = 30
"""Minimum duration of a turn in eager torch, which determines its number of steps."""
MOST_STEPS = 50
"""Maximum number of steps in a turn."""
PAUSE_S = 0.02
"""Pause before a turn, in which idle workers of the previous engine stop spinning."""
SEED = 0
"""Seed that shuffles the order of turns."""
LEAST = 3
"""Minimum number of rounds that tell two set-ups apart."""
STUDENT = (6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
"""Value that Student's t exceeds in 1% of cases, for 2 to 10 degrees of freedom.

For more, the last one gives an interval that is slightly too wide.
"""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the median and quartiles of one or more values.

        Args:
            values: Values, at least one.
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratio_interval(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the 98% confidence interval of a ratio that was measured in several rounds.

    It is Student's, of the mean logarithm. Noise that both turns of a round share cancels out, and
    a single disturbed turn widens the interval.

    Args:
        pairs: Numerator and denominator in each round.

    Returns:
        Lower and upper limit, 0 and infinity below `LEAST` rounds.
    """
    logs = [math.log(ours / theirs) for ours, theirs in pairs]
    if len(logs) < LEAST:
        return 0.0, math.inf
    student = STUDENT[min(len(logs) - LEAST, len(STUDENT) - 1)]
    wide = student * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle - wide), math.exp(middle + wide)


class TimedTrial:
    """A set-up that is trained and timed. Its first step is made on creation.

    ``first_step_s`` is the time from before `prepare` to the end of the first step, with cold
    caches. ``losses`` and ``grad_norms`` have the value of each turn's last step. The first step is
    a turn.

    Args:
        prepare: Creates the stepper.
        batches: Micro-batches of the first step.
        lr: Learning rate.
        seed: Seed of the first step.

    Raises:
        Exception: Any error that the engine raises.
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
        """Run steps and return the mean time of a step in milliseconds.

        Set-ups that draw dropout masks as eager torch does get the same masks for the same seed.

        Args:
            steps: Micro-batches of each step.
            seed: Seed of the turn.
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
    """Run one turn for each key and return the results.

    A turn that raises does not affect the others.

    Args:
        order: Keys, in the order of their turns.
        turn: Runs a turn and returns its result.
        fail: Called with the key and the reason if a turn raises.

    Returns:
        Results by key, without failed turns.
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
    """Catch any exception and pass its first line to `fail`.

    Args:
        fail: Called with the line.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - engines and compilers raise anything; it is shown
        lines = str(error).strip().splitlines()
        fail(lines[0] if lines else type(error).__name__)


def enough(step_ms: float, *, quick: bool = False) -> int:
    """Return the number of steps that makes a turn of eager torch long enough to time.

    Args:
        step_ms: Time of a step in eager torch.
        quick: True for a single step.
    """
    wanted = 1 if quick else math.ceil(SHORTEST_MS / step_ms)
    return min(wanted, MOST_STEPS)


def rounds(keys: Sequence[K], number: int, *, seed: int = SEED) -> Iterator[list[K]]:
    """Yield the shuffled order of turns for each round.

    Args:
        keys: Keys that take turns.
        number: Number of rounds.
        seed: Seed of the shuffle.
    """
    shuffled = random.Random(seed)
    for _ in range(number):
        yield shuffled.sample(keys, len(keys))


def synchronize() -> None:
    """Wait for the GPU if torch uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """Disable Python's garbage collection."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
