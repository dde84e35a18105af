"""What need not end a run: which errors, who can let it go on, and what it is told with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortlab.engines.nonfinite import Cause

if TYPE_CHECKING:
    from ortlab.engines.base import Batch, Stepper
    from ortlab.settings import FinetuneSettings


@dataclass(frozen=True)
class FailurePolicy:
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
class PauseReason:
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


def typed(advice: Mapping[str, Any]) -> str:
    """Settings as they are typed: ``lr=1e-05, clip_norm=1.0``."""
    return ", ".join(f"{name}={value!r}" for name, value in advice.items())
