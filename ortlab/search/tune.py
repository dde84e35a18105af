"""Search for the settings that train a model fastest here, with a fixed global batch.

Each engine makes its first step once in each precision, on a copy of the model, and is then
measured with all micro-batches. `prune` decides which candidates are measured and which are
dropped.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ortlab.bench import interleaved
from ortlab.engines.base import LossFunction
from ortlab.engines.batch import count
from ortlab.search import memory as footprint
from ortlab.search.candidate import PLAIN, Candidate
from ortlab.search.comparison import ALONE, Comparison, Surroundings
from ortlab.search.feed import Feed
from ortlab.search.memory import Line
from ortlab.search.prune import Found, Search, SearchPoint, Setup, settings_of
from ortlab.search.result import Row, TuneResult
from ortlab.settings import REFERENCE, FinetuneSettings, TuneSettings
from ortlab.training import data_loading
from ortlab.utils.process_memory import memory

STEPS = 4
"""Number of different steps of data, which all candidates cycle through."""


class Tune(Comparison[TuneResult, Row]):
    """Search in the background: ``await tune`` or ``tune.result()`` waits for its result.

    Args:
        model: Model to train copies of.
        data: Dataset, DataLoader or list of batches.
        settings: Settings of the search.
        shared: Settings that all set-ups have and that the user chose.
        loss: Loss function, or None if the model returns a loss.
        around: Access to the session.

    Raises:
        ValueError: If data or settings are not valid, before anything starts.
    """

    kind = "tune"
    _entrants: dict[Setup, Candidate]

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: TuneSettings,
        *,
        shared: Mapping[str, Any],
        loss: LossFunction | None = None,
        around: Surroundings = ALONE,
    ) -> None:
        base = FinetuneSettings.of({**PLAIN, **shared})
        feed, sizes, notes = _feed(data, base, settings)
        self._amount = feed.samples
        if settings.target == "tokens":
            self._amount = sum(count(batch)[1] for batch in feed.steps(0, 1)[0])
            if not self._amount:
                raise ValueError("target='tokens' needs batches with input_ids; use 'samples'")
        super().__init__(
            model,
            feed,
            base,
            settings,
            shared=shared,
            loss=loss,
            around=around,
        )
        self._settings = settings
        self._loader_s_own = () if data_loading.of_samples(data) else ("batch_size",)
        self._peaks: dict[SearchPoint, float] = {}
        self._failures: dict[SearchPoint, str] = {}
        self._turn_steps = settings.steps or 1
        self._began, self._took_s = time.perf_counter(), math.nan
        self._search = Search(
            setups_of(settings),
            sizes,
            self,
            rounds=settings.rounds,
            recompute=None if settings.recompute == "off" else settings.recompute,
            unit=settings.target,
        )
        self._result = TuneResult(
            **self._about(), rows=(), target=settings.target, took_s=math.nan, notes=notes
        )

    def _found(self) -> dict[str, Any]:
        rows = [self._row(*pair) for pair in list(self._search.found.items())]
        rows.sort(key=lambda row: -row.score)
        took_s = self._took_s
        if math.isnan(took_s):
            took_s = time.perf_counter() - self._began
        return {"rows": tuple(rows), "took_s": took_s}

    def _row(self, candidate: SearchPoint, found: Found) -> Row:
        chosen = settings_of(candidate, self._feed.samples)
        return Row(
            str(candidate),
            {name: value for name, value in chosen.items() if name not in self._loader_s_own},
            found.state,
            self._failures.get(candidate, found.reason),
            tuple(found.rates),
            self._peaks.get(candidate, math.nan),
        )

    def _compare(self) -> None:
        try:
            self._search.run()
        finally:
            self._took_s = time.perf_counter() - self._began

    # ---- prune.Track -----------------------------------------------------------------------------

    def begin(self, setup: Setup, micro: int) -> str | None:
        """See `prune.Track.begin`."""
        self._go_on()
        self._tell(f"{setup}: first step")
        reasons: list[str] = []
        with interleaved.reasons(reasons.append):
            changes = settings_of(SearchPoint(setup, micro), self._feed.samples)
            self._enter(setup, changes, micro=micro)
            self._note_peak(SearchPoint(setup, micro))
            return None
        self._leave(setup)
        return reasons[0]

    def rounds(
        self, candidates: Sequence[SearchPoint], number: int
    ) -> Mapping[SearchPoint, Sequence[float]]:
        """See `prune.Track.rounds`."""
        self._tell(f"{len(candidates)} in turn: {candidates[-1]}")
        rates: dict[SearchPoint, list[float]] = {candidate: [] for candidate in candidates}

        def fail(candidate: SearchPoint, reason: str) -> None:
            self._failures[candidate] = reason
            rates.pop(candidate, None)

        for place, order in enumerate(interleaved.rounds(candidates, 1 + number)):
            self._go_on()
            took = self._take_turns([c for c in order if c in rates], self._turn, fail)
            for candidate, ms in took.items():
                if place == 0:
                    self._settle(candidate, ms)
                else:
                    rates[candidate].append(1e3 * self._amount / ms)
            self.version += 1
        return rates

    def too_large(self, candidate: SearchPoint) -> str | None:
        """See `prune.Track.too_large`."""
        expected = self._expected_bytes(candidate)
        if math.isnan(expected) or expected <= self._budget * (1 - footprint.MARGIN):
            return None
        return f"takes {memory(expected)}, more than {memory(self._budget)}"

    def slow_to_begin(self, setup: Setup) -> bool:
        """See `prune.Track.slow_to_begin`."""
        return setup in self._entrants and self._entrants[setup].slow_to_begin

    def forgets(self, setup: Setup) -> bool:
        """See `prune.Track.forgets`."""
        return setup in self._entrants and self._entrants[setup].plan is not None

    def _turn(self, candidate: SearchPoint) -> float:
        self._go_on()
        ms = self._entrants[candidate.setup].turn(self._turn_steps, micro=candidate.micro)
        if math.isnan(self._peaks.get(candidate, math.nan)):
            self._note_peak(candidate)
        return ms

    def _settle(self, candidate: SearchPoint, ms: float) -> None:
        """Set the number of steps in a turn after the very first turn."""
        first = next(iter(self._entrants))
        if self._settings.steps is None and self._turn_steps == 1 and candidate.setup == first:
            self._turn_steps = interleaved.enough(ms)

    def _note_peak(self, candidate: SearchPoint) -> None:
        """Record the memory of a step, from the graph or by running another step."""
        entrant = self._entrants[candidate.setup]
        if entrant.plan is None:
            step = functools.partial(entrant.turn, 1, micro=candidate.micro)
            self._peaks[candidate], _ = entrant.peak_bytes(step)
        if entrant.plan is not None:
            self._peaks[candidate] = self._expected_bytes(candidate)

    def _expected_bytes(self, candidate: SearchPoint) -> float:
        """Return the memory that a step is expected to take, or NaN if it cannot be predicted."""
        entrant = self._entrants.get(candidate.setup)
        if entrant is None:
            return math.nan
        if entrant.plan is not None and "batch" in entrant.plan.dims:
            more = footprint.gradient_bytes(entrant.model)
            adds = more if candidate.micro < self._feed.samples else 0
            return entrant.plan.peak_bytes(batch=candidate.micro) + adds
        if candidate in self._peaks:
            return self._peaks[candidate]
        known = [(c.micro, peak) for c, peak in self._peaks.items() if c.setup == candidate.setup]
        if not known:
            return math.nan
        stays = footprint.state_bytes(entrant.lane.stepper, entrant.model)
        *_, other, largest = sorted([(0, float(stays)), *known])
        least = max((peak for micro, peak in known if micro <= candidate.micro), default=math.nan)
        expected = Line(largest, other).peak_bytes(candidate.micro)
        return least if math.isnan(expected) else expected


def setups_of(settings: TuneSettings) -> list[Setup]:
    """Return all set-ups of a search: workers times engines times precisions.

    Args:
        settings: Settings of the search.

    Returns:
        Set-ups. Plain torch, which is measured at every micro-batch, is first.
    """
    chosen = [
        Setup(engine, precision, **each)
        for each in settings.parallel
        for engine in settings.engines.split(",")
        for precision in settings.precisions.split(",")
    ]
    plain_one = Setup(*REFERENCE, **settings.parallel[0])
    return sorted(chosen, key=lambda setup: setup != plain_one)


def _feed(
    data: Any, base: FinetuneSettings, settings: TuneSettings
) -> tuple[Feed, list[int], tuple[str, ...]]:
    """Return global batches of the data, the micro-batches to try, and notes for the user."""
    if data_loading.of_samples(data):
        samples = settings.global_batch or base.data.batch_size
        feed = Feed(data, base.replace(batch_size=samples), STEPS)
        return feed, list(_halves(feed.samples, settings.sizes)), ()
    micro = Feed(data, base, 1).micro
    samples = settings.global_batch or micro
    if samples % micro:
        raise ValueError(
            f"global_batch={samples} is not a multiple of the {micro} samples in a batch of this "
            f"{type(data).__name__}; pass its Dataset, or use {samples // micro * micro or micro}"
        )
    feed = Feed(data, base.replace(gradient_accumulation_steps=samples // micro), STEPS)
    note = (
        f"the {type(data).__name__} returns batches of {micro}, so no other micro-batch was tried; "
        "pass its Dataset to search other sizes"
    )
    return feed, [micro], (note,)


def _halves(samples: int, number: int) -> Iterator[int]:
    """Yield `samples`, half of it, and so on as long as it is even."""
    for _ in range(number):
        yield samples
        if samples % 2:
            return
        samples //= 2
