"""Commands for runs: start, watch, change, pause, resume and stop them; list and compare them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from ortlab.api import prune_runs
from ortlab.engines.wrapped_models import is_model
from ortlab.history.exporters import check_free
from ortlab.history.run_files import StoredRun
from ortlab.session import session
from ortlab.settings import HistorySettings

if TYPE_CHECKING:
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.prune import Pruning
    from ortlab.metrics.timeline import Timeline
    from ortlab.notebook.magics.parsing import ParsedCommand
    from ortlab.notebook.magics.variables import Variables
    from ortlab.training.run import Run
    from ortlab.training.run_registry import BackgroundSearch, FollowedRun


_RESUMED = (
    *("model", "train", "eval_dataset", "loss", "metrics", "callbacks"),
    *("optimizer", "lr_scheduler", "collate_fn"),
)
"""Arguments of ``%ort resume`` that are names of variables."""


class RunCommands:
    """One method per command, named like the command.

    Args:
        variables: The user's variables.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def finetune(self, given: ParsedCommand) -> Run:
        """Start a run."""
        settings = dict(given.settings)
        loss = settings.pop("loss", None)
        return session.finetune(
            self._variables.model(given.words["model"]),
            self._variables.value("loader", given.words["train"]),
            eval_dataset=self._variables.optional("loader", given.words["eval_dataset"]),
            loss=self._variables.loss(loss),
            metrics=self._variables.optional("metrics", given.words["metrics"]),
            callbacks=self._variables.optional("callbacks", given.words["callbacks"]),
            optimizer=self._variables.optimizer(settings.pop("optimizer", None)),
            lr_scheduler=self._variables.optional("scheduler", given.words["lr_scheduler"]),
            collate_fn=self._variables.optional("function", given.words["collate_fn"]),
            resume_from=given.words["resume_from"],
            config=given.words["config"],
            name=given.words["name"],
            **settings,
        )

    def panel(self, given: ParsedCommand) -> None:
        """Show the settings of a run or of a model as controls."""
        from ortlab.notebook.views.panel import Panel, show  # heavy: torch

        name, data = given.words["target"], given.words["data"]
        trained = session.last_run is not None or bool(session.trainers)
        if name is None and not trained:
            name = next(iter(self._variables.names("model")), None)
        value = self._variables.get(name)
        if not is_model(value):
            if name is not None and not trained:
                self._variables.model(name)
            show(Panel(_own_run(self._run(name), "panels are for runs of ortlab.finetune")))
            return
        busy = session.training(value)
        if busy is not None:
            show(Panel(busy))
            return
        self._variables.optional("loader", data)
        show(Panel(value, name=name, data=data, variables=self._variables))

    def apply(self, given: ParsedCommand) -> None:
        """Change settings of an active run."""
        if not given.settings:
            raise UsageError("%ort apply: name a setting, as in %ort apply --lr 1e-4")
        run = _own_run(self._active_run(given), "stop it, and train with other arguments")
        run.apply(**given.settings)
        names = ", ".join(given.settings)
        print(f"{run.name} changes {names} after the step in flight; %ort undo reverts it")

    def undo(self, given: ParsedCommand) -> None:
        """Revert the last change of settings."""
        run = _own_run(self._active_run(given), "its arguments cannot change while it trains")
        run.undo()
        print(f"{run.name} reverts its last change after the step in flight")

    def timeline(self, given: ParsedCommand) -> Timeline:
        """Record a step of a run on all ranks."""
        return _own_run(self._active_run(given), "it has no workers of its own").timeline()

    def checkpoint(self, given: ParsedCommand) -> Path:
        """Save a checkpoint and return its path."""
        run = _own_run(
            self._run(given.words["run"]),
            "TrainingArguments(save_steps=...) makes it save checkpoints",
        )
        return run.checkpoint(given.words["to"])

    def pause(self, given: ParsedCommand) -> None:
        """Pause a run."""
        run = self._active_run(given)
        if not run.interactive:
            raise ValueError(
                f"{run.name} occupies the main thread and cannot pause; await trainer.train_async()"
            )
        run.pause()
        print(f"{run.name} pauses after the step in flight; %ort resume continues it")

    def resume(self, given: ParsedCommand) -> Run | None:
        """Resume a paused run, or continue a saved one as a new run."""
        words = given.words
        others = [words[each] for each in _RESUMED]
        if words["run"] is None or (self._is_active(words["run"]) and not any(others)):
            run = self._active_run(given)
            run.resume()
            print(f"{run.name} resumed")
            return None
        value = self._variables.get(words["run"])
        model, train, evaluation, loss, metrics, callbacks, *optim = others
        optimizer, scheduler, collate_fn = optim
        return session.resume(
            value if isinstance(value, StoredRun) else words["run"],
            None if model is None else self._variables.model(model),
            self._variables.optional("loader", train),
            eval_dataset=self._variables.optional("loader", evaluation),
            loss=self._variables.loss(loss),
            metrics=self._variables.optional("metrics", metrics),
            callbacks=self._variables.optional("callbacks", callbacks),
            optimizer=self._variables.optimizer(optimizer),
            lr_scheduler=self._variables.optional("scheduler", scheduler),
            collate_fn=self._variables.optional("function", collate_fn),
        )

    def stop(self, given: ParsedCommand) -> None:
        """Stop a run, a race or a search."""
        if (search := self._active_search(given)) is not None:
            search.stop()
            print(f"{search.name} stops after the turn in flight and keeps its results")
            return
        run = self._active_run(given)
        run.stop()
        print(f"{run.name} stops after the step in flight and keeps its weights")

    def runs(self, given: ParsedCommand) -> History | Pruning | None:
        """List saved runs, remove old ones or write them as event files for TensorBoard."""
        declared = HistorySettings.declarations()
        filters = {name: value for name, value in given.settings.items() if name in declared}
        prunes = {name: value for name, value in given.settings.items() if name not in declared}
        folder = given.words["tensorboard"]
        if prunes.pop("prune", False):
            for name in ("sort", "reverse", "limit", "wide"):
                if name in filters:
                    raise UsageError(f"%ort runs: --{name} cannot be combined with --prune")
            if folder is not None:
                raise UsageError("%ort runs: --tensorboard cannot be combined with --prune")
            return prune_runs(**prunes, **filters)
        if prunes:
            flags = ", ".join("--" + name.replace("_", "-") for name in prunes)
            raise UsageError(f"%ort runs: {flags} removes runs; add --prune")
        found = session.history(**filters)
        if folder is None:
            return found
        check_free(Path(folder), (entry.name for entry in found))
        for entry in found:
            print(session.open_run(entry.name).to_tensorboard(folder), flush=True)
        print(f"{len(found)} runs written: tensorboard --logdir {shlex.quote(folder)}")
        return None

    def compare(self, given: ParsedCommand) -> RunComparison:
        """Compare runs."""
        names = given.words["runs"]
        values = (self._variables.get(name) for name in names)
        runs = [
            value if isinstance(value, StoredRun) else name
            for name, value in zip(names, values, strict=True)
        ]
        return session.compare_runs(*runs)

    def _run(self, name: str | None) -> Run | FollowedRun:
        """Return the run of that name or variable; without a name the last run."""
        value = self._variables.get(name)
        known = (*session.runs, *session.trainers)
        return next((run for run in known if run is value), None) or session.under_way(name)

    def _active_run(self, given: ParsedCommand) -> Run | FollowedRun:
        run = self._run(given.words["run"])
        if run.over():
            status = run.status()
            raise ValueError(f"{run.name} is over ({status.state}) after {status.step} steps")
        return run

    def _is_active(self, name: str) -> bool:
        """Return whether a run of that name or variable is active in this kernel."""
        value = self._variables.get(name)
        known: tuple[Run | FollowedRun, ...] = (*session.runs, *session.trainers)
        return any(not r.over() and (r is value or r.name == name) for r in known)

    def _active_search(self, given: ParsedCommand) -> BackgroundSearch | None:
        """Return the active race or search of that name or variable, or without a name any."""
        name = given.words["run"]
        value = self._variables.get(name)
        active = (search for search in session.searches if not search.over())
        return next((s for s in active if name is None or s is value or s.name == name), None)


def _own_run(run: Run | FollowedRun, advice: str) -> Run:
    """Return `run`; raise a ValueError with `advice` where it is a run of a Trainer."""
    from ortlab.training.run import Run  # heavy: torch

    if not isinstance(run, Run):
        raise ValueError(f"{run.name} is a Trainer's run: {advice}")
    return run
