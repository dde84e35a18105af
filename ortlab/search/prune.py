"""Strategy of a search: which candidate to measure next, and which ones to skip.

A candidate is skipped if it cannot win or does not fit into memory. Nothing here depends on models
or clocks: a `Track` measures, and `Search` decides.

Speeds are roughly products of factors for engine, precision and micro-batch: the effect of a
precision on the speed of one engine, and of a micro-batch on the speed of one set-up, bounds the
effect on others. Therefore one set-up with a fast first step is measured at every micro-batch. Each
other engine is first measured in one precision, at the best micro-batch so far. The rest is
measured only if its bound reaches the leader.

A measured candidate is dropped once the rounds say that it is slower than another one, by the
confidence interval of the ratio of both in the rounds that they shared.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from ortlab.bench.interleaved import LEAST, ratio_interval
from ortlab.utils.tables import rounded

RAN = ("measured", "slower")
"""States of candidates that ran and fit into memory."""
SLACK = 1.3
"""Factor by which a speed may exceed the product of factors that predicts it."""
NEAR = 1.05
"""Like `SLACK`, for another micro-batch of a set-up whose first step is slow."""
FIRST = LEAST
"""Number of rounds of a candidate's first measurement, if the search has as many."""


def among(workers: int, zero_stage: int) -> str:
    """Return the number of workers as part of a label, or an empty string for one process.

    Args:
        workers: Number of workers.
        zero_stage: ZeRO stage.
    """
    stage = f" ZeRO {zero_stage}" if zero_stage else ""
    return f" x {workers}{stage}" if workers > 1 else ""


@dataclass(frozen=True)
class Setup:
    """An engine with a precision, optionally on several workers and with recompute.

    Attributes:
        engine: Name of the engine.
        precision: Precision of matrix products.
        recompute: Recompute plan, which saves memory and takes time. None for no recompute.
        workers: Number of workers.
        zero_stage: ZeRO stage, which says what is sharded across the workers.
    """

    engine: str
    precision: str
    recompute: str | None = None
    _: KW_ONLY
    workers: int = 1
    zero_stage: int = 0

    @property
    def way(self) -> tuple[str, int, int]:
        """Engine, workers and ZeRO stage: everything but precision and recompute."""
        return self.engine, self.workers, self.zero_stage

    def __str__(self) -> str:
        again = f" recompute {self.recompute}" if self.recompute else ""
        return f"{self.engine} {self.precision}{among(self.workers, self.zero_stage)}{again}"


@dataclass(frozen=True)
class SearchPoint:
    """A set-up with a micro-batch of ``micro`` samples."""

    setup: Setup
    micro: int

    def __str__(self) -> str:
        return f"{self.setup}, batch size {self.micro}"


@dataclass
class Found:
    """Measurements of a candidate, and the reason if it is not measured further.

    Attributes:
        by_round: Rate in each round as it was measured, by the number of the round.
        rates: Rates to rank by, corrected for rounds that were slower or faster for all.
        state: "waits", "measured", "slower", "left out" or "failed".
        reason: Reason of the state.
    """

    by_round: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    state: str = "waits"
    reason: str = ""

    @property
    def rate(self) -> float:
        """Median rate, or 0 if it was not measured."""
        return statistics.median(self.rates) if self.rates else 0.0


class Track(Protocol):
    """Measurement of candidates. One that fails raises nothing and has no rates from then on."""

    def begin(self, setup: Setup, micro: int) -> str | None:
        """Create a set-up, which makes its first step.

        Args:
            setup: Set-up to create.
            micro: Samples in a micro-batch of the first step.

        Returns:
            The reason why it cannot run, or None.
        """
        ...

    def rounds(
        self, candidates: Sequence[SearchPoint], number: int
    ) -> Mapping[SearchPoint, Sequence[float]]:
        """Measure candidates in turn, after one round to warm up.

        Args:
            candidates: Candidates to measure.
            number: Number of rounds.

        Returns:
            Rate of each candidate in each round.
        """
        ...

    def too_large(self, candidate: SearchPoint) -> str | None:
        """Return the reason why a candidate does not fit into memory, or None if it may fit.

        Args:
            candidate: Candidate to check.
        """
        ...

    def slow_to_begin(self, setup: Setup) -> bool:
        """Return True if a set-up's first step is slow, also with another micro-batch.

        Args:
            setup: Set-up to check.
        """
        ...

    def forgets(self, setup: Setup) -> bool:
        """Return True if a set-up can recompute, which requires a graph with a memory plan.

        Args:
            setup: Set-up to check.
        """
        ...


class Search:
    """Search that measures on a track until one candidate is ahead.

    Args:
        setups: Set-ups to search. The first is measured at every micro-batch.
        sizes: Micro-batches to try, in samples.
        track: Track that measures.
        rounds: Number of rounds of the last candidates.
        recompute: Recompute plan to try for set-ups that do not fit, or None.
        unit: Unit of the rates, per second.
    """

    def __init__(
        self,
        setups: Sequence[Setup],
        sizes: Sequence[int],
        track: Track,
        *,
        rounds: int = 8,
        recompute: str | None = None,
        unit: str = "samples",
    ) -> None:
        self.setups = list(setups)
        self.sizes = sorted(sizes)
        self._track = track
        self._rounds, self._first = rounds, min(FIRST, rounds)
        self._recompute = recompute
        self._unit = unit
        self.found = {
            SearchPoint(setup, micro): Found() for setup in self.setups for micro in self.sizes
        }
        self._numbers = itertools.count()
        """Numbers of the next rounds."""
        self._shape: dict[int, float] = {}
        """Speed of the first set-up for each micro-batch: relative to its best, or 1 if tied."""
        self._begun: dict[Setup, str | None] = {}

    def best(self) -> SearchPoint | None:
        """Return the fastest candidate, or None before anything was measured."""
        return next(iter(self._ranking()), None)

    def run(self) -> None:
        """Measure and drop candidates until all rounds are done. Results are in `found`."""
        reference, *others = self.setups
        self._all_sizes(reference)
        leader = self.best()
        anchor = self.sizes[0] if leader is None else leader.micro
        # All set-ups of the first engine, whose precisions predict those of other engines.
        for setup in others:
            if setup.way == reference.way:
                self._measure(SearchPoint(setup, anchor))
        first, later = self._by_engine(anchor)
        for setup in first:
            self._measure(SearchPoint(setup, anchor))
        for setup in later:
            if self._can_win(setup, anchor):
                self._measure(SearchPoint(setup, anchor))
        self._other_sizes(anchor)
        self._forgetful(anchor)
        self._finals()

    # ---- the parts -------------------------------------------------------------------------------

    def _all_sizes(self, setup: Setup) -> None:
        """Measure all micro-batches in the same rounds."""
        ready = []
        for micro in self.sizes:
            if self._begins(candidate := SearchPoint(setup, micro)):
                # Alone and smallest first, so that the next one's memory is predicted.
                self._track.rounds([candidate], 0)
                ready.append(candidate)
        if ready:
            self._take(ready, self._first)
        made = {micro: self.found[SearchPoint(setup, micro)] for micro in self.sizes}
        best = max(found.rate for found in made.values())
        self._shape = {
            micro: 1.0 if found.state == "measured" else found.rate / best
            for micro, found in made.items()
            if found.rates
        }

    def _by_engine(self, anchor: int) -> tuple[list[Setup], list[Setup]]:
        """Return the set-ups of other engines: one to begin with for each engine, and all others.

        The one to begin with has the precision that is fastest in the first engine.
        """
        others = [s for s in self.setups if s.way != self.setups[0].way]
        others.sort(key=lambda s: -self._rate_of_precision(s.precision, anchor))
        first = {setup.way: setup for setup in reversed(others)}
        return list(first.values()), [s for s in others if s not in first.values()]

    def _rate_of_precision(self, precision: str, anchor: int) -> float:
        like = replace(self.setups[0], precision=precision)
        known = self.found.get(SearchPoint(like, anchor))
        return known.rate if known else 0.0

    def _can_win(self, setup: Setup, anchor: int) -> bool:
        """Return True if a set-up may win, judged by the same engine's other precision."""
        leader = self.best()
        others = [
            s
            for s in self.setups
            if s.way == setup.way and self.found[SearchPoint(s, anchor)].rates
        ]
        ours = self._rate_of_precision(setup.precision, anchor)
        if leader is None or not others or not ours:
            return True
        other = others[0]
        theirs = self._rate_of_precision(other.precision, anchor)
        expected = self.found[SearchPoint(other, anchor)].rate * ours / theirs if theirs else 0.0
        if not theirs or expected * SLACK >= self.found[leader].rate:
            return True
        ahead = self.found[leader].rate / expected
        self._leave_out(
            (SearchPoint(setup, micro) for micro in self.sizes),
            f"cannot win: {leader} is about {ahead:.1f} times as fast as expected from {other}",
        )
        return False

    def _other_sizes(self, anchor: int) -> None:
        """Measure the other micro-batches of set-ups that may win with one."""
        for setup in self._fastest_first(anchor):
            at_anchor = self.found[SearchPoint(setup, anchor)]
            for micro in sorted(self.sizes, key=lambda micro: -self._shape.get(micro, 1.0)):
                candidate, leader = SearchPoint(setup, micro), self.best()
                if self.found[candidate].state != "waits":
                    continue
                # For a micro-batch that was too large for the first set-up nothing is known.
                expected = at_anchor.rate * self._shape.get(micro, 1.0)
                slack = NEAR if self._track.slow_to_begin(setup) else SLACK
                if leader is None or expected * slack >= self.found[leader].rate:
                    self._measure(candidate)
                else:
                    told = f"{expected:.3g} {self._unit}/s expected, {leader} is faster"
                    self._leave_out([candidate], f"cannot win: {told}")
        self._leave_out(
            [c for c, found in self.found.items() if found.state == "waits"],
            "set-up not measured at the micro-batch that is best for others",
        )

    def _fastest_first(self, anchor: int) -> list[Setup]:
        measured = [s for s in self.setups if self.found[SearchPoint(s, anchor)].rates]
        return sorted(measured, key=lambda s: -self.found[SearchPoint(s, anchor)].rate)

    def _forgetful(self, anchor: int) -> None:
        """Try recompute for micro-batches that do not fit, as it always costs time."""
        if self._recompute is None:
            return
        for setup in self._fastest_first(anchor):
            unfit = [m for m in self.sizes if self._track.too_large(SearchPoint(setup, m))]
            if not unfit or not self._track.forgets(setup):
                continue
            again = replace(setup, recompute=self._recompute)
            self.setups.append(again)
            self.found |= {SearchPoint(again, micro): Found() for micro in unfit}
            for micro in unfit:
                self._measure(SearchPoint(again, micro))

    def _finals(self) -> None:
        """Measure candidates that may still win, with more rounds as they become fewer."""
        number = made = self._first
        while made < self._rounds:
            left = [c for c, found in self.found.items() if found.state == "measured"]
            if len(left) < 2:
                return
            number = min(number, self._rounds - made)
            self._take(left, number)
            made += number
            number *= 2

    # ---- measuring -------------------------------------------------------------------------------

    def _measure(self, candidate: SearchPoint) -> None:
        """Make a candidate's first rounds, together with the leader."""
        if self._begins(candidate):
            leader = self.best()
            self._take([candidate] if leader is None else [leader, candidate], self._first)

    def _begins(self, candidate: SearchPoint) -> bool:
        """Return True if a candidate may fit and its set-up runs, which makes its first step."""
        setup = candidate.setup
        if not self._fits(candidate):
            return False
        if setup not in self._begun:
            self._begun[setup] = self._track.begin(setup, candidate.micro)
        if (reason := self._begun[setup]) is not None:
            for micro in self.sizes:
                if (known := self.found.get(SearchPoint(setup, micro))) is not None:
                    known.state, known.reason = "failed", reason
            return False
        # The plan of its graph is known only after its first step.
        return self._fits(candidate)

    def _fits(self, candidate: SearchPoint) -> bool:
        """Return True if a candidate may fit into memory, otherwise drop it."""
        reason = self._track.too_large(candidate)
        if reason is not None:
            self._leave_out([candidate], reason)
        return reason is None

    def _take(self, candidates: Sequence[SearchPoint], number: int) -> None:
        """Measure rounds, and compare all candidates by all rounds so far."""
        made = self._track.rounds(candidates, number)
        self._add(made)
        for candidate in candidates:
            found = self.found[candidate]
            if candidate in made:
                found.state = "measured"
                self._fits(candidate)  # checked again with the measured memory
            else:
                found.state, found.reason = "failed", "failed in a round"
        self._judge()

    def _add(self, made: Mapping[SearchPoint, Sequence[float]]) -> None:
        """Add the rates of rounds, scaled to the speed of the machine in the rounds before.

        The candidates that were measured before tell that speed. If there is only one, its rates
        are not added: they say nothing about itself.
        """
        known = {c: self.found[c].rate for c in made if self.found[c].rates}
        for each in zip(*made.values(), strict=True):
            number, rates = next(self._numbers), dict(zip(made, each, strict=True))
            pace = statistics.median([rates[c] / known[c] for c in known] or [1.0])
            for candidate, rate in rates.items():
                found = self.found[candidate]
                found.by_round[number] = rate
                if candidate not in known or len(known) > 1:
                    found.rates.append(rate / pace)

    def _ranking(self) -> list[SearchPoint]:
        """Return the candidates that ran and fit into memory, fastest first."""
        ran = [c for c, found in self.found.items() if found.state in RAN]
        return sorted(ran, key=lambda c: -self.found[c].rate)

    def _judge(self) -> None:
        """Mark the candidates that are slower than another one, directly or through a third one.

        The upper limit of a candidate's speed relative to another one, times the limit of that one
        relative to a third one, is a limit relative to the third one.
        """
        limits: dict[SearchPoint, tuple[float, SearchPoint]] = {}
        for candidate in self._ranking():
            found, limit, ahead = self.found[candidate], 1.0, candidate
            ours = found.by_round
            for other, (others_limit, others_ahead) in limits.items():
                theirs = self.found[other].by_round
                shared = ours.keys() & theirs.keys()
                _, high = ratio_interval((ours[number], theirs[number]) for number in shared)
                if high * others_limit < limit:
                    limit, ahead = high * others_limit, others_ahead
            limits[candidate] = limit, ahead
            slower = "slower", f"behind {ahead} by at least {rounded(100 - 100 * limit)}%"
            found.state, found.reason = slower if limit < 1 else ("measured", "")

    def _leave_out(self, candidates: Iterable[SearchPoint], reason: str) -> None:
        for candidate in candidates:
            found = self.found[candidate]
            if found.state in ("waits", "measured"):
                found.state, found.reason = "left out", reason


def settings_of(candidate: SearchPoint, samples: int) -> dict[str, Any]:
    """Return the settings of a run that trains as a candidate does.

    Args:
        candidate: Candidate to train.
        samples: Samples in an optimizer step.
    """
    setup = candidate.setup
    found: dict[str, Any] = {"engine": setup.engine, "precision": setup.precision}
    if setup.recompute is not None:
        found["recompute"] = setup.recompute
    if setup.workers > 1:
        found |= {"workers": setup.workers, "zero_stage": setup.zero_stage}
    return found | {
        "batch_size": candidate.micro,
        "gradient_accumulation_steps": samples // candidate.micro,
    }
