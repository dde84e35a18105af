"""Largest batch that a set-up trains under a memory limit, found by trials in fresh processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortlab.bench.claims.children import Request, SetUp, TrialFailed, child, children
from ortlab.bench.claims.claim import ClaimSettings
from ortlab.bench.models import HEAVY, MODELS
from ortlab.bench.papers import PAPERS
from ortlab.engines.base import tell
from ortlab.settings import ENGINES, setting

MOST_ROWS = 4096
"""Largest batch that is tried."""
FIRST_ROWS, FIRST_ROWS_QUICK = 8, 256
"""Batch that is tried first where nothing is known."""
PROBE_ROWS = 4
"""Batch whose memory is measured for a prediction."""
_WITH_PLAN = ("ort", "ortmodule")
_RESERVE = 0.02
"""Share of the limit that a predicted batch leaves to what no plan knows.

Kernels reserve scratch memory that they do not write to, which counts, too: oneDNN reserves four
times the weight for each thread where an image is smaller than the kernel.
"""
PREDICTION = (
    f"Predicted batch: the largest whose predicted peak is {1 - _RESERVE:.0%} of the limit or less."
)


def _set_ups(engine: str, **options: object) -> tuple[SetUp, ...]:
    """Return an engine in ORT without and with recomputed layers."""
    return SetUp.of(engine, **options), SetUp.of(engine, **options, recompute="layers")


def ort_with_budget(budget: float) -> SetUp:
    """Return engine `ort` with an activation budget.

    Args:
        budget: The budget.
    """
    return SetUp.of("ort", arena=False, activation_budget=budget)


SET_UPS: dict[str, tuple[SetUp, ...]] = {
    "eager": (SetUp("eager", "eager"), SetUp("eager, checkpointing", "eager", checkpointing=True)),
    "compile": (SetUp("compile", "compile"),),
    # What ORT's arena keeps counts as used.
    "ort": (*_set_ups("ort", arena=False), ort_with_budget(0.1)),
    "ortmodule": _set_ups("ortmodule", arena=False),
}
"""Ways to train with each engine, the plain one first."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings(ClaimSettings):
    """Settings of a search for the largest batch."""

    models: str = setting(
        "bert-256/8x64",
        choices=(*MODELS, *PAPERS),
        many=True,
        help="models to train, separated by commas",
    )
    engines: str = setting(
        ",".join(each for each in ENGINES if each in SET_UPS),
        choices=tuple(SET_UPS),
        many=True,
        help="engines to compare, separated by commas",
    )
    memory: str = setting(
        "400MiB", help="memory of the process beyond that of the libraries, such as 400MiB"
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings(SearchSettings):
    """Settings of the claim about recomputed activations."""

    models: str = setting(
        "deberta-v2-xxlarge",
        choices=(*MODELS, *PAPERS),
        many=True,
        help="models to train, separated by commas",
    )
    engines: str = setting(
        "eager,ort,ortmodule",
        choices=tuple(SET_UPS),
        many=True,
        help="engines to compare, separated by commas",
    )
    rounds: int = setting(5, minimum=1, help="measured rounds; in each, every set-up has a turn")


@dataclass(frozen=True, kw_only=True)
class ZeroSettings(SearchSettings):
    """Settings of the claim about ZeRO."""

    models: str = setting(
        "bert-512/16x16",
        choices=(*HEAVY, *MODELS, *PAPERS),
        many=True,
        help="models to train, separated by commas",
    )
    engines: str = setting(
        "eager,ort",
        choices=("eager", "ort"),
        many=True,
        help="engines to compare, separated by commas",
    )
    workers: str = setting(
        "1,2,4",
        choices=("1", "2", "4", "8"),
        many=True,
        help="numbers of processes that train together",
    )
    stages: str = setting(
        "0,1,2,3",
        choices=("0", "1", "2", "3"),
        many=True,
        help="stages of ZeRO; one process alone has nothing to shard",
    )


@dataclass(frozen=True)
class Largest:
    """Largest batch of a set-up.

    Attributes:
        model: Name of the model.
        set_up: Label of the set-up.
        rows: Samples of the largest batch that fits, 0 if not even one does, None after an error.
        refused_rows: Smallest batch tried that does not fit.
        why: The error of that batch.
        library_bytes: Memory of the process before it builds the model.
        peak_bytes: Peak of the process beyond `library_bytes`, with the largest batch.
        state_bytes: Its parameters, gradients and optimizer state, by the fields of `StateBytes`.
        predicted_rows: Largest batch by ortlab's plan, None without one, see `unplanned`.
        predicted_bytes: Peak with the largest batch by that plan.
        unplanned: Reason why no batch is predicted.
        trials: Batches tried, with True for those that fit.
        error: Reason why nothing was found.
    """

    model: str
    set_up: str
    rows: int | None = None
    refused_rows: int | None = None
    why: str = ""
    library_bytes: int | None = None
    peak_bytes: int | None = None
    predicted_rows: int | None = None
    predicted_bytes: int | None = None
    unplanned: str = ""
    trials: tuple[tuple[int, bool], ...] = ()
    error: str = ""
    state_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows_error(self) -> float | None:
        """Relative error of the predicted batch, None without one."""
        if self.predicted_rows is None or not self.rows:
            return None
        return self.predicted_rows / self.rows - 1

    @property
    def bytes_error(self) -> float | None:
        """Relative error of the predicted peak, None without one."""
        if self.predicted_bytes is None or not self.peak_bytes:
            return None
        return self.predicted_bytes / self.peak_bytes - 1


def bisected(
    fits: Callable[[int], bool], *, start: int, step: int, close: float = 0.0
) -> tuple[int, int]:
    """Return the largest number that fits, 0 if none does, and a larger one that does not.

    Steps away from `start` double until one number fits and one does not; then they are bisected.

    Args:
        fits: Tries a number. All below one that fits must fit.
        start: Number that is tried first.
        step: First step away from it.
        close: Relative difference at which the search ends; 0 for neighbors.

    Raises:
        ValueError: If more than `MOST_ROWS` fits.
    """
    if fits(start):
        low, high = start, start + step
        while fits(high):
            if high > MOST_ROWS:
                raise ValueError(f"a batch of {high} still fits; choose less memory")
            step *= 2
            low, high = high, high + step
    else:
        low, high = start - step, start
        while low > 0 and not fits(low):
            step *= 2
            low, high = low - step, low
        low = max(low, 0)
    while high - low > max(1, close * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


class Search:
    """Search for the largest batch of one set-up.

    Args:
        model: Name of the model.
        set_up: The set-up.
        limit_bytes: Memory beyond that of the libraries.
        settings: Settings of the claim.
        close: Relative difference between the largest batch and one that does not fit at which the
            search ends; 0 for neighbors.
    """

    def __init__(
        self,
        model: str,
        set_up: SetUp,
        limit_bytes: int,
        settings: ClaimSettings,
        *,
        close: float = 0.0,
    ) -> None:
        self._set_up = set_up
        self._limit_bytes = limit_bytes
        self._quick = settings.quick
        self._close = close
        self._probe = Request(
            model,
            set_up.engine,
            PROBE_ROWS,
            options=set_up.options,
            checkpointing=set_up.checkpointing,
            threads=settings.threads,
            quick=settings.quick,
        )
        self._answers: dict[int, dict[str, Any]] = {}

    def run(self, hint: int | None = None) -> Largest:
        """Return the largest batch. What fails for another reason than memory is an error in it.

        Args:
            hint: Batch near the largest, None if nothing is known.
        """
        found = Largest(self._probe.model, self._set_up.label)
        try:
            predicted, unplanned = self._predicted()
            by_plan = sum(size <= self._limit_bytes * (1 - _RESERVE) for size in predicted)
            if predicted:
                hint = by_plan
            start = hint or (FIRST_ROWS_QUICK if self._quick else FIRST_ROWS)
            near = int(start * self._close) or start // 8
            step = max(1, near) if hint and not self._quick else start
            close = 1.0 if self._quick else self._close
            rows, refused = bisected(self._fits, start=start, step=step, close=close)
        except (TrialFailed, ValueError) as error:
            return dataclasses.replace(found, error=str(error), trials=self._trials())
        at = self._answers.get(rows, {})
        return dataclasses.replace(
            found,
            rows=rows,
            refused_rows=refused,
            why=self._answers[refused]["why"],
            library_bytes=at.get("library_bytes"),
            peak_bytes=at.get("peak_bytes"),
            predicted_rows=by_plan if by_plan < len(predicted) else None,
            unplanned=unplanned or f"more than {len(predicted)}",
            predicted_bytes=predicted[rows - 1] if 0 < rows <= len(predicted) else None,
            trials=self._trials(),
            state_bytes=at.get("state_bytes", {}),
        )

    def _predicted(self) -> tuple[list[int], str]:
        """Return the predicted peak for batches from one sample on, or none and the reason.

        See `trial.Trial.predicted`.
        """
        if self._set_up.engine not in _WITH_PLAN:
            return [], "no plan"
        tell(f"{self._probe.model}, {self._set_up.label}: memory plan")
        with child(dataclasses.replace(self._probe, predict_bytes=self._limit_bytes)) as probe:
            answer = probe.answer()
        if not answer["fits"]:
            raise TrialFailed(answer["why"])
        return answer["predicted"], answer["unplanned"]

    def _fits(self, rows: int) -> bool:
        limited = dataclasses.replace(self._probe, rows=rows, limit_bytes=self._limit_bytes)
        with children(limited) as trial:
            answer = self._answers[rows] = trial.answer()
        told = "fits" if answer["fits"] else "does not fit"
        tell(f"{self._probe.model}, {self._set_up.label}: batch {rows} {told}")
        return bool(answer["fits"])

    def _trials(self) -> tuple[tuple[int, bool], ...]:
        return tuple((rows, bool(answer["fits"])) for rows, answer in self._answers.items())
