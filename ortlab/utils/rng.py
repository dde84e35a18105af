"""The random numbers of this process: their states kept, given back, and seeded for runs."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """What Python, numpy, torch and its CUDA devices will draw next."""

    python: Any
    array: Any
    host: torch.Tensor
    devices: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomStates:
        """The states of this moment."""
        # Asking CUDA for its states would otherwise initialize it.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all() if on_cuda else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def give_back(self) -> None:
        """Makes them the states again; of CUDA devices those that are here too."""
        random.setstate(self.python)
        np.random.set_state(self.array)
        torch.set_rng_state(self.host)
        for device, state in zip(range(torch.cuda.device_count()), self.devices, strict=False):
            torch.cuda.set_rng_state(state, device)

    def same_as(self, other: RandomStates) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            self.python == other.python
            and all(np.array_equal(a, b) for a, b in zip(self.array, other.array, strict=True))
            and torch.equal(self.host, other.host)
            and all(map(torch.equal, self.devices, other.devices))
        )


@contextlib.contextmanager
def undisturbed_random() -> Iterator[None]:
    """Gives the random states of now back at the end."""
    states = RandomStates.now()
    try:
        yield
    finally:
        states.give_back()


class _Seeding:
    """The process's random states while runs draw from them: the last one out gives them back.

    Were each to give back what it found, the first to end would set back the one still going, and
    the last would leave a state from the middle of the other.
    """

    def __init__(self) -> None:
        # Taken again by the thread that has it, where gc finalizes a dropped loop inside.
        self._lock = threading.RLock()
        self._runs = 0
        self._before: RandomStates | None = None

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        with self._lock:
            self._runs += 1
            if self._before is None:
                self._before = RandomStates.now()
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if self._runs == 0 and self._before is not None:
                    self._before.give_back()
                    self._before = None


_SEEDING = _Seeding()


def seeded(seed: int) -> contextlib.AbstractContextManager[None]:
    """Seeds Python, numpy and torch; the states of before come back when the last run ends.

    Seeds of runs that overlap do not hold: all draw from the same generators.
    """
    return _SEEDING.seeded(seed)
