"""What need not end a run: which errors, who can let it go on, and what it is told with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ortlab.engines.base import Batch, Stepper
    from ortlab.settings import FinetuneSettings

_SHORT_OF_MEMORY: Final = (
    "can't allocate memory",  # torch's allocator on a CPU: c10/core/impl/alloc_cpu.cpp
    "bad_alloc",  # C++, in ORT's messages and torch's
    "bad allocation",
    "failed to allocate memory",  # ORT's arena: onnxruntime/core/framework/bfc_arena.cc
    "not enough memory",  # our own kernels: ortlab/engines/ortmodule/kernels/kernels.cc
    "out of memory",  # CUDA's own
    "cannot allocate memory",  # the system's ENOMEM, as in a worker that cannot be forked
    "memoryerror",  # Python's own, told by another process
)


@dataclass(frozen=True)
class Cause:
    """Where a step was first not finite, in words.

    With ``in_data`` the batch itself is, in the samples ``rows``, counted from 0 over the step's
    micro-batches; none where it does not tell which.
    """

    told: str
    in_data: bool = False
    rows: Sequence[int] = ()

    @classmethod
    def unknown(cls, error: Exception) -> Cause:
        """That looking for it failed."""
        return cls(f"where it began could not be found: {error}")


@dataclass(frozen=True)
class Faults:
    """What a run does about errors that need not end it.

    With ``waits`` somebody is there who can let it go on, as in a notebook: it then waits where a
    script's run ends with the error. ``examine`` is given the micro-batches of a step of the
    stepper that was not finite, and says where that began; None where it cannot tell.
    ``peak_bytes`` predicts what a step takes under settings, on workers of each; None where nothing
    does. ``far`` says whether workers may be on other machines, whose memory nobody knows here.
    """

    waits: bool = False
    examine: Callable[[Stepper, Sequence[Batch], FinetuneSettings], Cause | None] = lambda *_: None
    peak_bytes: Callable[[FinetuneSettings], int | None] = lambda _: None
    far: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Hold:
    """Why a run waits that nobody has paused, and what lets it go on.

    ``where`` and ``hint`` complete "it waits ...: ..."; ``advice`` are the settings to go on with,
    ``skips`` says whether it can go on past the data of the step, or the evaluation, and
    ``passes`` whether it goes on by itself when the data comes that it is in the middle of reading.
    """

    error: Exception
    where: str
    hint: str
    what: str = ""
    advice: Mapping[str, Any] = field(default_factory=dict)
    skips: bool = False
    passes: bool = False


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory of the host or of a device did not suffice, whoever says so."""
    import torch

    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        said = str(error).lower()
        if isinstance(error, RuntimeError | OSError) and any(s in said for s in _SHORT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def typed(advice: Mapping[str, Any]) -> str:
    """Settings as they are typed: ``lr=1e-05, clip_norm=1.0``."""
    return ", ".join(f"{name}={value!r}" for name, value in advice.items())
