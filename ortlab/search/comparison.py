"""Comparison of set-ups of one model in the background: common part of races and searches."""

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
"""Applies settings to a model: those of a set-up, then all with shared ones. Returns a message."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Access of a comparison to its session. The defaults are for a comparison without one."""

    beside: Callable[[], Sequence[str]] = tuple
    """Returns the names of other training runs in this process."""
    prefer: Prefer | None = None
    """Applies the best settings to the model."""
    workers: Callable[[int], Workers] | None = None
    """Returns the given number of workers, for set-ups that use several."""
    notes: tuple[str, ...] = ()
    """Further lines to show."""


ALONE: Final = Surroundings()


class Comparison(Background[R], Generic[R, E]):
    """Set-ups that take turns in training copies of a model. The model itself is not changed.

    Args:
        model: Model to copy.
        feed: Training data.
        base: Settings of plain torch, with the shared settings.
        settings: Settings of the comparison.
        shared: Settings that all set-ups have and that the user chose.
        loss: Loss function, or None if the model returns a loss.
        around: Access to the session.

    Raises:
        ValueError: If settings are not valid, before anything starts.
    """

    _result: R
    """Initial fields of `standing`."""
    _entrants: dict[Any, Candidate]
    """Set-ups that are training, by the key that the race or the search uses for them."""

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
        self._device = training_device(base.parallel.device)
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
        """Measurements so far, which every view shows."""
        over = self.over()
        disturbed = (f"{name} trained at the same time" for name in self._disturbed)
        return dataclasses.replace(
            self._result,
            interrupted=over and self._cut_short,
            notes=(*self._result.notes, *self._around.notes, *disturbed),
            doing="" if over else self.doing,
            **self._found(),
        )

    def table(self) -> Table[E]:
        """Return a table of the measurements so far."""
        found: Table[E] = self.standing.table()
        return found

    def best(self) -> E | None:
        """Return the fastest set-up, or None before anything was measured."""
        found: E | None = self.standing.best()
        return found

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the best set-up, for ``ortlab.finetune(model, data, **race.settings)``.

        They include the user's own loss function.

        Raises:
            ValueError: If nothing was measured.
        """
        found = self.standing.settings
        own = self._loss is not None and "loss" not in self._shared
        return found | {"loss": self._loss} if own else found

    def apply(self, run: Run | None = None) -> str:
        """Apply the best settings to a run.

        Args:
            run: Run to change. By default the run that trains the model, or if there is none, the
                model's next runs.

        Returns:
            Text that says what was done.

        Raises:
            ValueError: If nothing was measured yet, or the run cannot apply the settings (see
                `Run.apply`).
        """
        standing = self.standing
        settings, best = standing.settings, standing.best()
        assert best is not None
        if run is not None:
            run.apply(**best.settings)
            return f"{run.name} continues with {best.label}"
        if self._around.prefer is None:
            raise ValueError(f"{self.name} has no run to change; pass one: {self.kind}.apply(run)")
        return self._around.prefer(best.settings, settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements so far in a form that JSON can store."""
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
        """Do all work in the thread. `_go_on` ends it if a stop was requested."""

    @abc.abstractmethod
    def _found(self) -> dict[str, Any]:
        """Return the fields of the result that change during the comparison."""

    def _about(self) -> dict[str, Any]:
        """Return the fields that every result has."""
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
            # Otherwise torch.compile would compile code that it has seen with other sizes for
            # dynamic shapes, which is slower.
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
        """Create a set-up, which makes its first step. Raise the errors of settings and engine."""
        settings = FinetuneSettings.of({**PLAIN, **self._shared, **changes})
        workers = None
        if settings.parallel.workers > 1:
            engine_for(settings)  # raises before any workers are started
            if self._around.workers is None:
                raise ValueError(f"{self.name} has no workers; start it with ortlab.{self.kind}")
            workers = self._around.workers(settings.parallel.workers)
        entrant = Candidate(
            settings, self._model, self._loss, self._feed, micro=micro, workers=workers
        )
        self._entrants[key] = entrant
        return entrant

    def _leave(self, key: object) -> None:
        """Close a set-up if it was created."""
        if (entrant := self._entrants.pop(key, None)) is not None:
            entrant.close()

    def _take_turns(
        self, order: Sequence[K], turn: Callable[[K], float], fail: Callable[[K, str], None]
    ) -> dict[K, float]:
        """Take turns (see `interleaved.take_turns`) and record other runs that train meanwhile."""
        self._disturbed |= dict.fromkeys(self._around.beside())
        return interleaved.take_turns(order, turn, fail)
