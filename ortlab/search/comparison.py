"""Set-ups of one model compared in training, in the background: what races and searches share."""

from __future__ import annotations

import abc
import copy
import dataclasses
import datetime
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch
from torch import nn

from ortlab.bench import interleaved
from ortlab.bench.machine import machine
from ortlab.engines.base import LossFunction
from ortlab.engines.registry import engine_for
from ortlab.engines.torch.stepper import training_device
from ortlab.search.background import Background
from ortlab.search.candidate import PLAIN, Candidate
from ortlab.search.feed import Feed
from ortlab.search.result import Result, TrialResult
from ortlab.settings import FinetuneSettings, SearchSettings
from ortlab.utils import environment
from ortlab.utils.process_memory import free_bytes, parse_bytes
from ortlab.utils.tables import Table

if TYPE_CHECKING:
    from ortlab.cluster.workers import Workers
    from ortlab.training.run import Run

R = TypeVar("R", bound=Result[Any])
E = TypeVar("E", bound=TrialResult)
K = TypeVar("K")
Prefer = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
"""Has settings hold for a model: what makes a set-up, and all that goes with it. Says what for."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a comparison knows of the session that it is part of; by itself it knows nothing."""

    beside: Callable[[], Sequence[str]] = tuple
    """Names what else trains in this process."""
    prefer: Prefer | None = None
    """Has the best settings hold for the model."""
    workers: Callable[[int], Workers] | None = None
    """Gives so many workers to the set-ups that take several."""


ALONE: Final = Surroundings()


class Comparison(Background[R], Generic[R, E]):
    """Set-ups that take turns on copies of a model, which itself stays as it is.

    `base` are the settings that plain torch has, `shared` those of them that all set-ups are given.
    ValueError, before anything starts, for settings that are wrong.
    """

    _result: R
    """What `standing` begins with."""
    _entrants: dict[Any, Candidate]
    """The set-ups that train, by what the race or the search knows them by."""

    def __init__(
        self,
        model: nn.Module,
        feed: Feed,
        base: FinetuneSettings,
        settings: SearchSettings,
        *,
        shared: Mapping[str, Any],
        loss: LossFunction | None,
        around: Surroundings,
    ) -> None:
        self._device = training_device(base.device)
        budget = settings.memory
        self._budget = free_bytes(self._device.type) if budget is None else parse_bytes(budget)
        super().__init__()
        self._model = copy.deepcopy(model)
        self._feed = feed
        self._loss = loss
        self._shared = dict(shared)
        self._around = around
        self._disturbed: dict[str, None] = {}
        self._entrants = {}
        self._cut_short = True

    @property
    def standing(self) -> R:
        """What was measured so far, which every view shows."""
        over = self.over()
        disturbed = (f"{name} trained beside it" for name in self._disturbed)
        return dataclasses.replace(
            self._result,
            interrupted=over and self._cut_short,
            notes=(*self._result.notes, *disturbed),
            doing="" if over else self.doing,
            **self._found(),
        )

    def table(self) -> Table[E]:
        """What was measured so far, as a table."""
        found: Table[E] = self.standing.table()
        return found

    def best(self) -> E | None:
        """Who is ahead; None before anyone is."""
        found: E | None = self.standing.best()
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """The best settings: ``ortlab.finetune(model, data, **race.settings)``.

        A loss function of the user's own is among them. ValueError where nothing was measured.
        """
        found = self.standing.settings
        own = self._loss is not None and "loss" not in self._shared
        return found | {"loss": self._loss} if own else found

    def apply(self, run: Run | None = None) -> str:
        """Has the best settings hold in `run`; says in words what it did.

        Without one in the run that trains the model, or else in the model's next runs. ValueError
        where there is no best yet, or the run cannot take them (see `Run.apply`).
        """
        standing = self.standing
        settings, best = standing.settings, standing.best()
        assert best is not None
        if run is not None:
            run.apply(**best.settings)
            return f"{run.name} goes on with {best.label}"
        if self._around.prefer is None:
            raise ValueError(f"{self.name} knows of no run: give one, {self.kind}.apply(run)")
        return self._around.prefer(best.settings, settings)

    def to_dict(self) -> dict[str, Any]:
        """What was measured so far, as JSON has it."""
        return self.standing.to_dict()

    def __repr__(self) -> str:
        if self.over():
            return repr(self.standing)
        return f"<{type(self).__name__} {self.name}: {self.doing}>"

    def _repr_html_(self) -> str:
        return self.standing._repr_html_()

    # ---- the work --------------------------------------------------------------------------------

    @abc.abstractmethod
    def _compare(self) -> None:
        """Does it all, in the thread; `_go_on` ends it where a stop was asked for."""

    @abc.abstractmethod
    def _found(self) -> dict[str, Any]:
        """The fields of the result that change while it goes on."""

    def _about(self) -> dict[str, Any]:
        """The fields that every result has."""
        return {
            "model": type(self._model).__name__,
            "samples": self._feed.samples,
            "budget_bytes": self._budget,
            "shared": self._shared,
            "environment": environment.environment(),
            "machine": machine(self._device.type),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }

    def _work(self) -> None:
        if "torch._dynamo" in sys.modules and not self._around.beside():
            # Code that torch.compile has met with other sizes it would compile for any, and slower.
            torch.compiler.reset()
        try:
            self._compare()
            self._cut_short = False
        finally:
            while self._entrants:
                self._entrants.popitem()[1].close()
            self._model = nn.Module()
            self._feed.close()
            gc.collect()

    def _enter(self, key: object, changes: Mapping[str, Any], *, micro: int) -> Candidate:
        """Has a set-up make its first step. Raises what the settings and the engine raise."""
        settings = FinetuneSettings.of({**PLAIN, **self._shared, **changes})
        workers = None
        if settings.workers > 1:
            engine_for(settings)  # says what cannot be before any are started
            if self._around.workers is None:
                raise ValueError(f"{self.name} has no workers; ortlab.{self.kind} gives it some")
            workers = self._around.workers(settings.workers)
        entrant = Candidate(
            settings, self._model, self._loss, self._feed, micro=micro, workers=workers
        )
        self._entrants[key] = entrant
        return entrant

    def _leave(self, key: object) -> None:
        """Closes a set-up, if it had begun."""
        if (entrant := self._entrants.pop(key, None)) is not None:
            entrant.close()

    def _take_turns(
        self, order: Sequence[K], turn: Callable[[K], float], fail: Callable[[K, str], None]
    ) -> dict[K, float]:
        """See `turns.take_turns`; what trains beside it is noted."""
        self._disturbed |= dict.fromkeys(self._around.beside())
        return interleaved.take_turns(order, turn, fail)
