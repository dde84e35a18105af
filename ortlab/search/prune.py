"""What a search measures next, and what it leaves out because it cannot win or cannot fit.

Nothing here knows models or clocks: a `Track` measures, and `Search` decides.

Of engine, precision and micro-batch the speeds go roughly as products: how a precision changes the
speed of one engine, and a micro-batch that of one set-up, bounds what they do to others. So one
set-up, which costs little to begin, is measured at every micro-batch; of the others first one
precision each at the best of these; and the rest only where the bound reaches the leader.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

SLACK = 1.3
"""How far speeds are from products: a bound is so many times what the product says."""
NEAR = 1.05
"""A set-up that takes long to begin tries another micro-batch if it is so near to the leader."""
MARGIN = 1.03
"""Whoever has not come so near to the leader in any of its rounds is left out."""
FIRST = 2
"""Rounds that a candidate has when it is first measured."""


def among(workers: int, zero_stage: int) -> str:
    """How many workers, as labels have it; nothing for one process."""
    stage = f" ZeRO {zero_stage}" if zero_stage else ""
    return f" x {workers}{stage}" if workers > 1 else ""


@dataclass(frozen=True)
class Setup:
    """An engine with a precision, on ``workers`` that share out what ``zero_stage`` says.

    With ``recompute`` it keeps fewer activations and is slower.
    """

    engine: str
    precision: str
    recompute: str | None = None
    _: KW_ONLY
    workers: int = 1
    zero_stage: int = 0

    @property
    def way(self) -> tuple[str, int, int]:
        """What it is but for precision and recomputation: a way to execute the model."""
        return self.engine, self.workers, self.zero_stage

    def __str__(self) -> str:
        again = f" recompute {self.recompute}" if self.recompute else ""
        return f"{self.engine} {self.precision}{among(self.workers, self.zero_stage)}{again}"


@dataclass(frozen=True)
class SearchPoint:
    """A set-up at a micro-batch of ``micro`` samples."""

    setup: Setup
    micro: int

    def __str__(self) -> str:
        return f"{self.setup}, {self.micro} at a time"


@dataclass
class Found:
    """What is known of a candidate: its rates in all rounds, and why it was not measured further.

    ``state`` is "waits", "measured", "left out" or "failed".
    """

    rates: list[float] = field(default_factory=list)
    state: str = "waits"
    reason: str = ""

    @property
    def rate(self) -> float:
        """The median; 0 where it was not measured."""
        return statistics.median(self.rates) if self.rates else 0.0


class Track(Protocol):
    """What measures. A candidate that fails raises nothing and has no rates from then on."""

    def begin(self, setup: Setup, micro: int) -> str | None:
        """Has a set-up make its first step at a micro-batch; why it cannot, or None."""
        ...

    def rounds(
        self, candidates: Sequence[SearchPoint], number: int
    ) -> Mapping[SearchPoint, Sequence[float]]:
        """Rates of `candidates`, in turn, in `number` rounds, after one to warm up."""
        ...

    def too_large(self, candidate: SearchPoint) -> str | None:
        """Why a candidate does not fit into memory, as far as that can be said; None if it may."""
        ...

    def slow_to_begin(self, setup: Setup) -> bool:
        """Whether a set-up takes long to begin, with another micro-batch too."""
        ...

    def forgets(self, setup: Setup) -> bool:
        """Whether a set-up can recompute: whether a graph says what it takes."""
        ...


class Search:
    """The search: `run` measures on a track until one candidate is ahead. `found` is all of it."""

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
        self._rounds = rounds
        self._recompute = recompute
        self._unit = unit
        self.found = {
            SearchPoint(setup, micro): Found() for setup in self.setups for micro in self.sizes
        }
        self._shape: dict[int, float] = {}
        """The speed of the first set-up by micro-batch, in parts of its best."""
        self._begun: dict[Setup, str | None] = {}

    def best(self) -> SearchPoint | None:
        """Who is ahead; None before anyone was measured."""
        going = [c for c, found in self.found.items() if found.state == "measured"]
        return max(going, key=lambda c: self.found[c].rate, default=None)

    def run(self) -> None:
        """Measures, leaves out, and measures again until the rounds are made."""
        reference, *others = self.setups
        self._all_sizes(reference)
        anchor = max(self._shape, key=lambda micro: self._shape[micro], default=self.sizes[0])
        # All of the first engine, whose precisions are the measure for others'.
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
        """From the smallest micro-batch up, so that the next one's memory is known before."""
        for micro in self.sizes:
            self._measure(SearchPoint(setup, micro), alone=True)
        rates = {micro: self.found[SearchPoint(setup, micro)].rate for micro in self.sizes}
        best = max(rates.values())
        self._shape = {micro: rate / best for micro, rate in rates.items() if rate}

    def _by_engine(self, anchor: int) -> tuple[list[Setup], list[Setup]]:
        """Of the other engines the set-ups to begin with, and those that the first ones bound.

        One each to begin with, in the precision that is fastest in the first engine.
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
        """Whether the same engine's other precision leaves it a chance; says so where not."""
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
            f"cannot win: {leader} is about {ahead:.1f} times as fast as {other} says of it",
        )
        return False

    def _other_sizes(self, anchor: int) -> None:
        """The other micro-batches of the set-ups that may win with one."""
        for setup in self._fastest_first(anchor):
            at_anchor = self.found[SearchPoint(setup, anchor)]
            for micro in sorted(self.sizes, key=lambda micro: -self._shape.get(micro, 1.0)):
                candidate, leader = SearchPoint(setup, micro), self.best()
                if self.found[candidate].state != "waits":
                    continue
                # Of a micro-batch that was too large for the first set-up nothing is known.
                expected = at_anchor.rate * self._shape.get(micro, 1.0)
                slack = NEAR if self._track.slow_to_begin(setup) else SLACK
                if leader is None or expected * slack >= self.found[leader].rate:
                    self._measure(candidate)
                else:
                    told = f"{expected:.3g} {self._unit}/s expected, {leader} has more"
                    self._leave_out([candidate], f"cannot win: {told}")
        self._leave_out(
            [c for c, found in self.found.items() if found.state == "waits"],
            "its set-up was not measured at the micro-batch that is best for others",
        )

    def _fastest_first(self, anchor: int) -> list[Setup]:
        measured = [s for s in self.setups if self.found[SearchPoint(s, anchor)].rates]
        return sorted(measured, key=lambda s: -self.found[SearchPoint(s, anchor)].rate)

    def _forgetful(self, anchor: int) -> None:
        """Recomputation costs time at every micro-batch: it is tried for those that do not fit."""
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
        """Rounds among those that may still win, and more of them for fewer."""
        number, made = FIRST, FIRST
        while made < self._rounds:
            left = self._in_reach()
            if len(left) < 2:
                return
            number = min(2 * number, self._rounds - made)
            self._take(left, number, again=True)  # all are compared in the same rounds
            made += number

    def _in_reach(self) -> list[SearchPoint]:
        leader = self.best()
        if leader is None:
            return []
        ahead = self.found[leader].rate
        going = [c for c, found in self.found.items() if found.state == "measured"]
        left = [c for c in going if max(self.found[c].rates) * MARGIN >= ahead]
        for candidate in going:
            if candidate not in left:
                reason = f"behind {leader} in every round"
                self._leave_out([candidate], reason)
        return left

    # ---- measuring -------------------------------------------------------------------------------

    def _measure(self, candidate: SearchPoint, *, alone: bool = False) -> None:
        """The first rounds of a candidate, beside the leader's unless it is to be `alone`."""
        setup = candidate.setup
        if not self._fits(candidate):
            return
        if setup not in self._begun:
            self._begun[setup] = self._track.begin(setup, candidate.micro)
        if (reason := self._begun[setup]) is not None:
            for micro in self.sizes:
                if (known := self.found.get(SearchPoint(setup, micro))) is not None:
                    known.state, known.reason = "failed", reason
            return
        # What was not known before it began: the plan of its graph.
        if not self._fits(candidate):
            return
        leader = None if alone else self.best()
        self._take([candidate] if leader is None else [leader, candidate], FIRST)
        self._fits(candidate)  # now that it was measured

    def _fits(self, candidate: SearchPoint) -> bool:
        """Whether it fits into memory, as far as that can be said; left out where it does not."""
        reason = self._track.too_large(candidate)
        if reason is not None:
            self._leave_out([candidate], reason)
        return reason is None

    def _take(self, candidates: Sequence[SearchPoint], number: int, *, again: bool = False) -> None:
        """Rounds of `candidates`, which count with those before, or `again` in their place."""
        made = self._track.rounds(candidates, number)
        for candidate in candidates:
            found = self.found[candidate]
            if rates := made.get(candidate):
                found.rates = [*rates] if again else [*found.rates, *rates]
                found.state = "measured"
            else:
                found.state, found.reason = "failed", "failed in a round"

    def _leave_out(self, candidates: Iterable[SearchPoint], reason: str) -> None:
        for candidate in candidates:
            found = self.found[candidate]
            if found.state in ("waits", "measured"):
                found.state, found.reason = "left out", reason


def settings_of(candidate: SearchPoint, samples: int) -> dict[str, Any]:
    """What a run has to be told to train as `candidate`, `samples` in an optimizer step."""
    setup = candidate.setup
    found: dict[str, Any] = {"engine": setup.engine, "precision": setup.precision}
    if setup.recompute is not None:
        found["recompute"] = setup.recompute
    if setup.workers > 1:
        found |= {"workers": setup.workers, "zero_stage": setup.zero_stage}
    return found | {"batch_size": candidate.micro, "accumulation": samples // candidate.micro}
