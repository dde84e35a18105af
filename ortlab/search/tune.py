"""The search for the settings that train a model fastest here, at a fixed global batch.

Each engine in each precision begins once, on a copy of the model, and has all its micro-batches
from there. What is measured, and what is left out, `prune` decides.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import gc
import html
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from ortlab import batching, history, turns
from ortlab.bench.machine import Machine, machine
from ortlab.bench.result import origin
from ortlab.engines.base import LossFunction
from ortlab.engines.batch import count
from ortlab.engines.torch_native import training_device
from ortlab.graph import bars
from ortlab.graph.memory import memory, parse_bytes
from ortlab.memory import free_bytes
from ortlab.search import footprint
from ortlab.search.background import Background
from ortlab.search.feed import Feed
from ortlab.search.footprint import Line
from ortlab.search.prune import Candidate, Found, Search, Setup, settings_of
from ortlab.search.race import LONG_S, PLAIN, Entrant
from ortlab.search.result import plain, rates_picture
from ortlab.settings import FinetuneSettings, TuneSettings
from ortlab.tables import Column, Table
from ortlab.turns import Spread

if TYPE_CHECKING:
    from ortlab.runs import Run

FORM = 1
STEPS = 4
"""Different steps of data, which all candidates go through in turn."""
_MARGIN = 0.01
"""Of the memory that there is, what a step leaves free."""


@dataclass(frozen=True)
class Row:
    """A candidate: ``settings`` are what a run takes to train so, ``rates`` its rounds.

    ``state`` is "waits", "measured", "left out" or "failed", and ``reason`` says why.
    """

    label: str
    settings: Mapping[str, Any]
    state: str
    reason: str = ""
    rates: tuple[float, ...] = ()
    peak_bytes: float = math.nan

    @property
    def spread(self) -> Spread | None:
        """What a second has, the median with quartiles; None where it was not measured."""
        return Spread.of(self.rates) if self.rates and self.state != "failed" else None


@dataclass(frozen=True)
class TuneResult:
    """What a search found, the fastest first. ``target`` is what a second has most of."""

    model: str
    rows: tuple[Row, ...]
    samples: int
    target: str
    budget_bytes: int
    shared: Mapping[str, Any]
    took_s: float
    environment: Mapping[str, Any]
    machine: Machine
    date: str
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    doing: str = dataclasses.field(default="", compare=False)

    def best(self) -> Row | None:
        """The candidate that is ahead of all that were not left out; None before there is one."""
        going = [row for row in self.rows if row.state == "measured" and row.spread]
        return max(going, key=lambda row: Spread.of(row.rates).median, default=None)

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `ortlab.finetune`. ValueError where nothing was measured."""
        best = self.best()
        if best is None:
            raise ValueError("nothing was measured, so there is nothing to choose from")
        return {**self.shared, **best.settings}

    @property
    def headline(self) -> str:
        """Who is ahead, and how far the search is."""
        best = self.best()
        if best is None or best.spread is None:
            return f"{self.model}: {self.doing or 'nothing was measured'}"
        ahead = f"{best.label} is ahead with {best.spread.median:.4g} {self.target}/s"
        after = f"after {self.took_s:.0f} s"
        state = "stopped before the end" if self.interrupted else self.doing
        return f"{self.model}: {ahead} {after}" + (f"; {state}" if state else "")

    def table(self) -> Table[Row]:
        """A row for each candidate; the notes say what the figures are."""
        columns: list[Column[Row]] = [
            Column("candidate", lambda row: row.label),
            Column(f"{self.target}/s", _rate, number=True),
            Column("rounds", lambda row: str(len(row.rates) or ""), number=True),
            Column("peak memory", _peak, number=True),
            Column("", lambda row: row.state),
            Column("why", lambda row: row.reason),
        ]
        counts = {s: sum(row.state == s for row in self.rows) for s in ("left out", "failed")}
        unmeasured = sum(not row.rates for row in self.rows)
        notes = [
            f"An optimizer step of {self.samples} samples, in micro-batches of so many at a time: "
            f"median and quartiles of the rounds. {len(self.rows)} candidates, {unmeasured} of "
            f"them never measured; {counts['left out']} left out, {counts['failed']} failed.",
            f"A step may take {memory(self.budget_bytes)}: by the graph, or by what was measured.",
            *self.notes,
        ]
        if self.machine.busy:
            notes.append(f"something else was computing: the load was {self.machine.load:.1f}")
        return Table(
            self.rows, columns, notes=[*notes, origin(self.environment, self.machine, self.date)]
        )

    def picture(self) -> str:
        """What was measured as bars, in SVG."""
        shown = [(row.label, row.spread, "") for row in self.rows if row.spread is not None]
        return rates_picture(shown, self.target)

    def __repr__(self) -> str:
        return f"{self.headline}\n\n{self.table()!r}"

    def _repr_html_(self) -> str:
        picture = bars.image(self.picture(), self.headline)
        return f"<p><b>{html.escape(self.headline)}</b></p>{picture}{self.table()._repr_html_()}"

    def to_dict(self) -> dict[str, Any]:
        """Every figure as JSON has it: null for what is not known."""
        found: dict[str, Any] = plain(
            {"form": FORM, **dataclasses.asdict(dataclasses.replace(self, doing=""))}
        )
        best = self.best()
        return found | {"best": None if best is None else best.label}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """What `to_dict` gave. ValueError if it did not."""
        if stored.get("form") != FORM:
            raise ValueError(f"form {stored.get('form')!r} of a search, expected {FORM}")
        values = {name: stored[name] for name in stored if name not in ("form", "best")}
        values["machine"] = Machine(**stored["machine"])
        values["notes"] = tuple(stored["notes"])
        values["rows"] = tuple(map(_row, stored["rows"]))
        return cls(**values)


def _row(stored: Mapping[str, Any]) -> Row:
    peak = stored["peak_bytes"]
    known = {"rates": tuple(stored["rates"]), "peak_bytes": math.nan if peak is None else peak}
    return Row(**{**stored, **known})


class Tune(Background[TuneResult]):
    """A search in the background: ``await tune`` or ``tune.result()`` waits for what it found.

    It trains copies; the model stays as it is. ValueError, before anything starts, for data and
    settings that are wrong.
    """

    kind = "tune"

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: TuneSettings,
        *,
        shared: Mapping[str, Any],
        loss: LossFunction | None = None,
        beside: Callable[[], Sequence[str]] = tuple,
        prefer: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None,
    ) -> None:
        base = FinetuneSettings.of({**PLAIN, **shared})
        device = training_device(base.device)
        budget = settings.memory
        self._budget = free_bytes(device.type) if budget is None else parse_bytes(budget)
        self._feed, sizes, self._notes = _feed(data, base, settings)
        super().__init__()
        self._model = copy.deepcopy(model)
        self._loss = loss
        self._settings = settings
        self._shared = dict(shared)
        self._beside = beside
        self._prefer = prefer
        self._disturbed: dict[str, None] = {}
        self._entrants: dict[Setup, Entrant] = {}
        self._peaks: dict[Candidate, float] = {}
        self._failures: dict[Setup, str] = {}
        self._made: dict[Setup, int] = {}
        self._turn_steps = settings.steps or 1
        self._began, self._took_s = time.perf_counter(), math.nan
        self._cut_short = True
        self._search = Search(
            setups_of(settings),
            sizes,
            self,
            rounds=settings.rounds,
            recompute=None if settings.recompute == "off" else settings.recompute,
        )
        self._amount = self._feed.samples
        if settings.target == "tokens":
            self._amount = sum(count(batch)[1] for batch in self._feed.steps(0, 1)[0])
            if not self._amount:
                raise ValueError("target='tokens': the batches have no input_ids; take 'samples'")
        self._result = TuneResult(
            model=type(model).__name__,
            rows=(),
            samples=self._feed.samples,
            target=settings.target,
            budget_bytes=self._budget,
            shared=self._shared,
            took_s=math.nan,
            environment=history.environment(),
            machine=machine(device.type),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    @property
    def standing(self) -> TuneResult:
        """What was found so far."""
        over = self.over()
        took_s = self._took_s if over else time.perf_counter() - self._began
        rows = [
            self._row(candidate, found) for candidate, found in list(self._search.found.items())
        ]
        rows.sort(key=lambda row: (row.state != "measured", -(row.spread or _NONE).median))
        disturbed = (f"{name} trained beside it" for name in self._disturbed)
        return dataclasses.replace(
            self._result,
            rows=tuple(rows),
            took_s=took_s,
            interrupted=over and self._cut_short,
            notes=(*self._notes, *disturbed),
            doing="" if over else self.doing,
        )

    def _row(self, candidate: Candidate, found: Found) -> Row:
        return Row(
            str(candidate),
            settings_of(candidate, self._feed.samples),
            found.state,
            found.reason or self._failures.get(candidate.setup, ""),
            tuple(found.rates),
            self._peaks.get(candidate, math.nan),
        )

    def table(self) -> Table[Row]:
        """See `TuneResult.table`."""
        return self.standing.table()

    def best(self) -> Row | None:
        """See `TuneResult.best`."""
        return self.standing.best()

    @property
    def settings(self) -> dict[str, Any]:
        """The best settings: ``ortlab.finetune(model, data, **tune.settings)``."""
        found = self.standing.settings
        own = self._loss is not None and "loss" not in self._shared
        return found | {"loss": self._loss} if own else found

    def to_dict(self) -> dict[str, Any]:
        """See `TuneResult.to_dict`."""
        return self.standing.to_dict()

    def apply(self, run: Run | None = None) -> str:
        """Has the best settings hold in `run`; says in words what it did.

        Without one in the run that trains the model, or else in the model's next runs. ValueError
        where there is no best yet, or the run cannot take them (see `Run.apply`).
        """
        best, settings = self.best(), self.standing.settings
        assert best is not None
        if run is not None:
            run.apply(**best.settings)
            return f"{run.name} goes on with {best.label}"
        if self._prefer is None:
            raise ValueError(f"{self.name} knows of no run: give one, {self.kind}.apply(run)")
        return self._prefer(best.settings, settings)

    def __repr__(self) -> str:
        return repr(self.standing) if self.over() else f"<Tune {self.name}: {self.doing}>"

    def _repr_html_(self) -> str:
        return self.standing._repr_html_()

    def _work(self) -> None:
        if "torch._dynamo" in sys.modules and not self._beside():
            # Code that torch.compile has met with other sizes it would compile for any, and slower.
            torch.compiler.reset()
        try:
            self._search.run()
            self._cut_short = False
        finally:
            self._took_s = time.perf_counter() - self._began
            while self._entrants:
                self._entrants.popitem()[1].close()
            self._model = nn.Module()
            self._feed.close()
            gc.collect()

    # ---- prune.Track -----------------------------------------------------------------------------

    def begin(self, setup: Setup, micro: int) -> str | None:
        """See `prune.Track.begin`."""
        self._go_on()
        self._tell(f"{setup}: first step")
        try:
            with turns.reasons(functools.partial(self._failures.__setitem__, setup)):
                changes = settings_of(Candidate(setup, micro), self._feed.samples)
                chosen = FinetuneSettings.of({**self._shared, **changes})
                self._entrants[setup] = entrant = Entrant(chosen)
                entrant.begin(self._model, self._loss, self._feed, micro=micro)
                self._made[setup] = 1
                self._note_peak(Candidate(setup, micro))
        finally:
            if setup in self._failures and setup in self._entrants:
                self._entrants.pop(setup).close()
        return self._failures.get(setup)

    def rounds(
        self, candidates: Sequence[Candidate], number: int
    ) -> Mapping[Candidate, Sequence[float]]:
        """See `prune.Track.rounds`."""
        self._tell(f"{len(candidates)} in turn: {candidates[-1]}")
        rates: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        self._disturbed |= dict.fromkeys(self._beside())

        def fail(candidate: Candidate, reason: str) -> None:
            self._failures[candidate.setup] = reason
            rates.pop(candidate, None)

        for place, order in enumerate(turns.rounds(candidates, 1 + number)):
            self._go_on()
            took = turns.take_turns([c for c in order if c in rates], self._turn, fail)
            for candidate, ms in took.items():
                if place == 0:
                    self._settle(candidate, ms)
                else:
                    rates[candidate].append(1e3 * self._amount / ms)
            self.version += 1
        return rates

    def too_large(self, candidate: Candidate) -> str | None:
        """See `prune.Track.too_large`."""
        expected = self._expected_bytes(candidate)
        if math.isnan(expected) or expected <= self._budget * (1 - _MARGIN):
            return None
        return f"takes {memory(expected)}, more than {memory(self._budget)}"

    def slow_to_begin(self, setup: Setup) -> bool:
        """See `prune.Track.slow_to_begin`."""
        lane = self._entrants[setup].lane if setup in self._entrants else None
        return lane is not None and lane.first_step_s > LONG_S

    def forgets(self, setup: Setup) -> bool:
        """See `prune.Track.forgets`."""
        return setup in self._entrants and self._entrants[setup].plan is not None

    def _turn(self, candidate: Candidate) -> float:
        self._go_on()
        entrant = self._entrants[candidate.setup]
        begin, number = self._made[candidate.setup], self._turn_steps
        assert entrant.lane is not None
        steps = self._feed.steps(begin, number, micro=candidate.micro)
        ms = entrant.lane.turn(steps, seed=entrant.settings.seed + begin)
        self._made[candidate.setup] = begin + number
        if math.isnan(self._peaks.get(candidate, math.nan)):
            self._note_peak(candidate)
        return ms

    def _settle(self, candidate: Candidate, ms: float) -> None:
        """The first turn of all says how many steps one is."""
        first = next(iter(self._made))
        if self._settings.steps is None and self._turn_steps == 1 and candidate.setup == first:
            self._turn_steps = turns.enough(ms)

    def _note_peak(self, candidate: Candidate) -> None:
        """What a step takes: by its graph, which the first step made, or by one step more."""
        entrant = self._entrants[candidate.setup]
        lane = entrant.lane
        assert lane is not None
        if entrant.plan is None:
            steps = self._feed.steps(0, 1, micro=candidate.micro)
            peak, _ = entrant.peak_bytes(lambda: lane.turn(steps, seed=entrant.settings.seed))
            self._peaks[candidate] = peak
        if entrant.plan is not None:
            self._peaks[candidate] = self._expected_bytes(candidate)

    def _expected_bytes(self, candidate: Candidate) -> float:
        """What a step is expected to take; NaN where nothing says."""
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
        if not known or entrant.lane is None:
            return math.nan
        stays = footprint.state_bytes(entrant.lane.stepper, entrant.model)
        *_, other, largest = sorted([(0, float(stays)), *known])
        least = max((peak for micro, peak in known if micro <= candidate.micro), default=math.nan)
        expected = Line(largest, other).peak_bytes(candidate.micro)
        return least if math.isnan(expected) else expected


_NONE: Final = Spread(0.0, 0.0, 0.0)


def setups_of(settings: TuneSettings) -> list[Setup]:
    """Engines times precisions; the first, which is measured at every size, is plain torch."""
    chosen = [
        Setup(engine, precision)
        for engine in settings.engines.split(",")
        for precision in settings.precisions.split(",")
    ]
    plain_one = Setup(**PLAIN)
    return sorted(chosen, key=lambda setup: setup != plain_one)


def _feed(
    data: Any, base: FinetuneSettings, settings: TuneSettings
) -> tuple[Feed, list[int], tuple[str, ...]]:
    """Global batches of `data`, the micro-batches that there may be, and what is to be said."""
    if batching.of_samples(data):
        samples = settings.global_batch or base.batch_size
        feed = Feed(data, base.replace(batch_size=samples), STEPS)
        return feed, list(_halves(feed.samples, settings.sizes)), ()
    micro = Feed(data, base, 1).micro
    samples = settings.global_batch or micro
    if samples % micro:
        raise ValueError(
            f"global_batch={samples} is no multiple of the {micro} samples of a batch of this "
            f"{type(data).__name__}; give its Dataset, or {samples // micro * micro or micro}"
        )
    feed = Feed(data, base.replace(accumulation=samples // micro), STEPS)
    note = (
        f"the {type(data).__name__} makes batches of {micro}, so no other micro-batch was tried; "
        "give its Dataset to have them searched"
    )
    return feed, [micro], (note,)


def _halves(samples: int, number: int) -> Iterator[int]:
    """`samples`, its half, and so on while it can be halved."""
    for _ in range(number):
        yield samples
        if samples % 2:
            return
        samples //= 2


def _rate(row: Row) -> str:
    found = row.spread
    return "" if found is None else f"{found.median:.4g} ({found.low:.4g} to {found.high:.4g})"


def _peak(row: Row) -> str:
    return "" if math.isnan(row.peak_bytes) else memory(row.peak_bytes)
