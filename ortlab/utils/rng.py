"""Random number generators of this process: saving and restoring their states, and seeding runs."""

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
    """States of the global generators of Python, numpy, torch and torch's CUDA devices."""

    python: Any
    array: Any
    host: torch.Tensor
    devices: list[torch.Tensor]

    @classmethod
    def now(cls) -> RandomStates:
        """Return the current states."""
        # Reading the states would otherwise initialize CUDA.
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all() if on_cuda else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), devices)

    def give_back(self) -> None:
        """Restore these states; those of CUDA devices that do not exist here are skipped."""
        random.setstate(self.python)
        np.random.set_state(self.array)
        torch.set_rng_state(self.host)
        for device, state in zip(range(torch.cuda.device_count()), self.devices, strict=False):
            torch.cuda.set_rng_state(state, device)

    def same_as(self, other: RandomStates) -> bool:
        """Return True if both states are equal, so that nothing was drawn between them.

        Args:
            other: The states to compare with.
        """
        return (
            self.python == other.python
            and all(np.array_equal(a, b) for a, b in zip(self.array, other.array, strict=True))
            and torch.equal(self.host, other.host)
            and all(map(torch.equal, self.devices, other.devices))
        )


@contextlib.contextmanager
def undisturbed_random() -> Iterator[None]:
    """Restore the current random states at the end of the block."""
    states = RandomStates.now()
    try:
        yield
    finally:
        states.give_back()


class _Seeding:
    """Random states of the process before any run seeded them; the last run to end restores them.

    If each run restored the states that it found, the first one to end would reset the generators
    of a run that is still active, and the last one would leave a state from the middle of another.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may finalize a dropped loop while this thread has it.
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
    """Seed Python, numpy and torch; the previous states are restored when the last run ends.

    Runs that overlap are not reproducible, because all of them draw from the same generators.

    Args:
        seed: Seed of all generators.

    Returns:
        A context manager for the duration of the run.
    """
    return _SEEDING.seeded(seed)
