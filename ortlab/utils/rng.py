"""Random number generators of this process: saving and restoring their states, and seeding runs."""

from __future__ import annotations

import contextlib
import math
import random
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_WORDS = 624
"""Words in the table of a Mersenne Twister, the generator of Python, numpy and torch on a CPU."""


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

    def check(self) -> None:
        """Check the states without setting them on the global generators.

        Raises:
            ValueError: A generator cannot have its state.
        """
        valid = {
            "python": _is_python_state(self.python),
            "numpy": _is_numpy_state(self.array),
            "torch": is_torch_state(self.host),
            "CUDA": isinstance(self.devices, list) and all(map(_is_cuda_state, self.devices)),
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"the random state of {name} is not valid")

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


# A table of zeros yields zeros only, from which drawing a normal number would never end. numpy and
# torch read beyond the end of the table if the place is there, since they check it too little.


def _is_python_state(state: Any) -> bool:
    if not _has_types(state, int, tuple, float | None):
        return False
    made = random.Random()
    try:
        made.setstate(state)
    except (OverflowError, TypeError, ValueError):
        return False
    _, words, normal = state
    return made.getstate() == state and any(words[1:_WORDS]) and math.isfinite(normal or 0.0)


def _is_numpy_state(state: Any) -> bool:
    if not _has_types(state, str, np.ndarray, int, int, float):
        return False
    kind, words, place, has_normal, normal = state
    return (
        (kind, words.dtype, words.shape) == ("MT19937", np.uint32, (_WORDS,))
        and 0 <= place <= _WORDS
        and has_normal in (0, 1)
        and math.isfinite(normal)
        and bool(words[1:].any())
    )


def is_torch_state(state: Any, device: torch.device | str = "cpu") -> bool:
    """Return whether a generator of torch can have a state.

    Args:
        state: The state.
        device: Device of the generator.
    """
    made = torch.Generator(device)
    try:
        made.set_state(state)
    except (RuntimeError, TypeError):
        return False
    if made.device.type != "cpu":
        return True
    # CPUGeneratorImplStateLegacy in torch's CPUGeneratorImpl.cpp: seed, words left plus one,
    # whether it is seeded, place of the next word, table.
    raw = made.get_state().numpy().tobytes()
    _, left, _, place, *words = struct.unpack_from(f"=QiiQ{_WORDS}Q", raw)
    return left + place <= _WORDS + 1 and any(words[1:])


def _is_cuda_state(state: Any) -> bool:
    """Return whether a CUDA device can have a state, without initializing CUDA.

    It is a seed and an offset of 8 bytes each (torch's CUDAGeneratorImpl.cpp).
    """
    return (
        isinstance(state, torch.Tensor)
        and (state.dtype, state.shape) == (torch.uint8, (16,))
        and int(state[8]) % 4 == 0  # the lowest byte of the offset
    )


def _has_types(state: Any, *types: Any) -> bool:
    return (
        isinstance(state, tuple) and len(state) == len(types) and all(map(isinstance, state, types))
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
