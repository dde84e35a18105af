"""Registry of the runs of this process: what each one trains, and what is known of each model.

Importing it imports no torch. Apart from the last run and the last search, which stay available
after a cell has dropped its name for them, it keeps no run, model or data alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from ortlab.settings import unknown_name
from ortlab.utils.weak_list import Recent

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from ortlab.metrics.recorder import Watched
    from ortlab.training.run import Run

R = TypeVar("R", bound="TrainingRun")

_ACTIVE: Final = ("starting", "running", "stopping")
_LAST_STEP_S: Final = 10.0
"""Longest wait for a stopped run. A callback of that run, which cannot end then, waits so long."""


class TrainingRun(Protocol):
    """A run that updates the weights of a model."""

    @property
    def name(self) -> str:
        """Name of the run."""
        ...

    @property
    def model(self) -> nn.Module | None:
        """Model in training; None once the run is over."""
        ...

    def over(self) -> bool:
        """Return whether the run has ended."""
        ...


class BackgroundSearch(Protocol):
    """A race or a search of settings that runs in the background."""

    name: str
    doing: str
    error: BaseException | None

    @property
    def standing(self) -> Any:
        """Result so far."""
        ...

    def stop(self) -> None:
        """Stop after the turn in flight."""
        ...

    def over(self) -> bool:
        """Return whether the search has ended."""
        ...


if TYPE_CHECKING:

    class FollowedRun(TrainingRun, Watched, Protocol):
        """A run of Hugging Face's Trainer, which trains by itself and is only observed."""

        @property
        def engine_asked(self) -> str:
            """Name of the engine that was asked for."""
            ...

        @property
        def engine_used(self) -> str:
            """Name of the engine that executes the model."""
            ...

        @property
        def resumed(self) -> str:
            """Description of the checkpoint that the run resumes from; "" for a new run."""
            ...

        @property
        def about(self) -> dict[str, Any]:
            """Content of run.json; see `ortlab.history.run_folder`."""
            ...


class RunRegistry:
    """Runs, Trainer runs and searches of one process, in the order in which they started.

    Attributes:
        runs: Runs of `ortlab.finetune`.
        trainers: Runs of Hugging Face's Trainer.
        searches: Races and searches of settings.
        initial: File with the weights of each model from before its first run.
    """

    def __init__(self) -> None:
        self.runs: Recent[Run] = Recent(last=True)
        # Not even the last one is kept alive: the error of a failed run holds its Trainer.
        self.trainers: Recent[FollowedRun] = Recent(last=False)
        self.searches: Recent[BackgroundSearch] = Recent(last=True)
        # Wrapped model of each run, by engine. The run itself keeps them alive while it trains.
        self._wrapped: weakref.WeakKeyDictionary[
            Run, weakref.WeakValueDictionary[str, nn.Module]
        ] = weakref.WeakKeyDictionary()
        self._data: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.initial: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()
        self._folders: weakref.WeakKeyDictionary[nn.Module, list[Path]] = (
            weakref.WeakKeyDictionary()
        )
        self._preferred: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return (
            f"<RunRegistry: {len(self.runs)} runs, {len(self.trainers)} Trainer runs, "
            f"{len(self.searches)} searches>"
        )

    def add(
        self,
        run: Run,
        *,
        model: nn.Module,
        data: Iterable[Any],
        wrapped: weakref.WeakValueDictionary[str, nn.Module],
    ) -> None:
        """Register a new run.

        Args:
            run: The run, before it starts.
            model: The user's own module, which the run trains.
            data: The training data, remembered as the last data of `model`.
            wrapped: The wrapped model of the run by engine; filled as the run prepares engines.
        """
        self.runs.append(run)
        self._data[model] = _weak(data)
        self._wrapped[run] = wrapped
        self._folders.setdefault(model, []).append(run.folder)

    def discard(self, run: Run) -> None:
        """Forget a run that made no step, and remove its folder.

        Args:
            run: The run, which is over.
        """
        from ortlab.history.prune import remove  # heavy: numpy

        with contextlib.suppress(OSError):  # it stays in the history if its folder is in use
            remove(run.folder)
            self.runs.remove(run)
            for folders in list(self._folders.values()):
                if run.folder in folders:
                    folders.remove(run.folder)

    @property
    def last_run(self) -> Run | None:
        """Run that started last; None before the first one."""
        return self.runs.last

    def run(self, name: str | None = None) -> Run:
        """Return the run called `name`, or the last run.

        Args:
            name: Name of the run; None for the run that started last.

        Raises:
            ValueError: If there is no run yet, or no run of that name in this process.
        """
        last = self.last_run
        if last is None:
            raise ValueError("there is no run yet; ortlab.finetune and %ort finetune start one")
        if name is None:
            return last
        named = {run.name: run for run in self.runs}
        if name not in named:
            raise ValueError(
                f"no run is called {name!r}: {_only_saved(name) or unknown_name(name, named)}"
            )
        return named[name]

    def under_way(self, name: str | None = None) -> Run | FollowedRun:
        """Return the run called `name`, or the run that a command without a name is for.

        Without a name this is the last run of `ortlab.finetune`, unless it is over and a Trainer
        run is active, or there are only Trainer runs.

        Args:
            name: Name of a run, of a Trainer too; None to choose one.

        Raises:
            ValueError: If there is no such run.
        """
        if name is not None:
            named = {run.name: run for run in self.trainers}
            return named[name] if name in named else self.run(name)
        active = [run for run in self.trainers if not run.over()]
        trained = self.trainers.last
        if self.last_run is None and trained is not None:
            return trained
        return active[-1] if active and self.run().over() else self.run()

    def active_runs(self) -> list[str]:
        """Return the names of the runs that are training now."""
        active = [run.name for run in self.runs if run.state in _ACTIVE]
        return active + [run.name for run in self.trainers if run.status().state in _ACTIVE]

    def check_idle(self) -> None:
        """Check that nothing trains or searches.

        Raises:
            ValueError: If a run is training or a search is active; timings would disturb each
                other.
        """
        busy = [*self.active_runs(), *(each.name for each in self.searches if not each.over())]
        if busy:
            raise ValueError(
                f"{busy[0]} is active, and two at a time would slow each other down: await it, or "
                f"%ort stop {busy[0]}"
            )

    def training(self, model: nn.Module) -> Run | None:
        """Return the run that updates weights of `model`, paused or not; None without one.

        It waits some seconds for the last step of a stopped run, so that a cell can call
        ``run.stop()`` and use the model at once.
        """
        run = _updates(self.runs, model)
        if run is not None and run.state == "stopping" and run.wait_over(_LAST_STEP_S):
            return None
        return run

    def check_free(self, model: nn.Module) -> None:
        """Check that no run updates weights of `model`.

        Raises:
            ValueError: If one does; two runs must not update the same weights.
        """
        run = self.training(model) or _updates(self.trainers, model)
        if run is not None:
            raise ValueError(
                f"{run.name} is training this model; await it or stop it (%ort stop {run.name}) "
                f"before the next run, or change its settings (%ort apply {run.name}, run.apply)"
            )

    def wrapped_by(self, run: Run) -> dict[str, nn.Module]:
        """Return the wrapped models that `run` has prepared so far, by engine."""
        return dict(self._wrapped.get(run) or {})

    def last_with(self, model: nn.Module) -> Run | None:
        """Return the last run that trained a wrapped model, or None without one.

        Args:
            model: The wrapped model.
        """
        return next(
            (run for run in reversed([*self.runs]) if model in self.wrapped_by(run).values()), None
        )

    def folders(self, model: nn.Module) -> Sequence[Path]:
        """Return the folders of all runs that have trained `model`, in order, even removed ones."""
        return self._folders.get(model, ())

    def last_data(self, model: nn.Module) -> Any:
        """Return the data that `model` was last trained on.

        Returns:
            The data; of a list its first batch, in a list; None where the data is gone.
        """
        known = self._data.get(model)
        return None if known is None else known()

    def preferred(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the settings that a race or a search chose for the next runs of `model`."""
        return self._preferred.get(model, {})

    def prefer(self, model: nn.Module) -> Callable[[Mapping[str, Any], Mapping[str, Any]], str]:
        """Return a function that applies the best settings of a search to `model`.

        Args:
            model: The user's own module. The function does not keep it alive.

        Returns:
            A function of the changed settings and of all settings. It changes the active run of the
            model, or else the defaults of its next runs, and returns a line that says which.
        """
        reference = weakref.ref(model)

        def apply(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
            model = reference()
            if model is None:
                raise ValueError("the model no longer exists; finetune the new one with .settings")
            changed = ", ".join(f"{name}={value}" for name, value in changes.items())
            if (run := self.training(model)) is not None:
                run.apply(**changes)
                return f"{run.name} continues with {changed}"
            self._preferred[model] = {n: v for n, v in settings.items() if n != "loss"}
            kind = type(model).__name__
            return f"the next finetune of this {kind} uses {changed} by default"

        return apply


def _updates(runs: Iterable[R], model: nn.Module) -> R | None:
    """Return the active one of `runs` that trains weights of `model`."""
    weights = {id(p) for p in model.parameters() if p.requires_grad}
    for run in runs:
        busy = None if run.over() else run.model
        if busy is not None and any(id(p) in weights for p in busy.parameters()):
            return run
    return None


def _only_saved(name: str) -> str | None:
    """Return the advice for a run that exists only as a folder; None without a folder."""
    from ortlab.history.saved_run import find  # heavy: numpy

    try:
        find(name)
    except ValueError:
        return None
    return f"it is no longer in this kernel; ortlab.open_run({name!r}) opens its saved folder"


def _weak(data: Iterable[Any]) -> Callable[[], Any]:
    """Return a weak reference to `data`; lists allow none, so their first batch is kept."""
    if isinstance(data, list | tuple):
        first = list(data[:1])
        return lambda: first or None
    try:
        return weakref.ref(data)
    except TypeError:  # a generator, for instance, which is read only once anyway
        return lambda: None
