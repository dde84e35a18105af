"""Session of one Python process: models, runs and trackers, for magics, panel and scripts alike.

It trains, draws and displays nothing itself and does not depend on IPython.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from ortlab.engines import wrapped_models
from ortlab.engines.base import tell, wrapped_model
from ortlab.engines.registry import engine as engine_called
from ortlab.engines.step_check import StepCheck
from ortlab.settings import (
    EngineSettings,
    FinetuneSettings,
    HistorySettings,
    ProfileSettings,
    RaceSettings,
    SearchSettings,
    TuneSettings,
    config_file,
)
from ortlab.training.kernel_status import KernelStatus
from ortlab.training.run_registry import RunRegistry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ortlab.checkpoint.checkpoint import Checkpoint
    from ortlab.cluster.checks import Elsewhere
    from ortlab.cluster.workers import Workers
    from ortlab.engines.base import LossFunction
    from ortlab.engines.ort.model import OrtModel
    from ortlab.engines.torch.user_optimizer import OptimRequest
    from ortlab.graph.capture import Graphs, Overlay, Stage
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute_plans import RecomputePlans
    from ortlab.graph.source_lines import SourceLines
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.run_files import StoredRun
    from ortlab.history.saved_run import SavedRun
    from ortlab.metrics.recorder import Watched
    from ortlab.metrics.user_metrics import Metrics
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune
    from ortlab.training.callbacks import Callbacks
    from ortlab.training.data_loading import Collate
    from ortlab.training.loop_run import LoopRun
    from ortlab.training.run import Run
    from ortlab.training.run_registry import BackgroundSearch, FollowedRun
    from ortlab.training.start import RemoteStepper, RunRequest
    from ortlab.training.tracker import Tracker
    from ortlab.utils.weak_list import Recent

B = TypeVar("B")
"""Type of a batch."""
S = TypeVar("S", "Race", "Tune")


class ModelReports:
    """Graphs, profiles and memory plans of the wrapped models.

    The last profile and the last memory plan of a model are drawn over its graphs.

    Args:
        wrapped: The wrapped models of the session.
        registry: The runs of the session.
    """

    def __init__(self, wrapped: wrapped_models.WrappedModels, registry: RunRegistry) -> None:
        self._wrapped = wrapped
        self._registry = registry
        # The last overlay of each kind, "time" or "memory", that was measured of a model.
        self._measured: weakref.WeakKeyDictionary[
            nn.Module, dict[str, Callable[[Stage], Overlay]]
        ] = weakref.WeakKeyDictionary()

    def profile(self, model: nn.Module, batch: Any = None, **settings: Any) -> Profile:
        """See `ortlab.api.profile`."""
        from ortlab.graph import profiler  # heavy: torch

        chosen = ProfileSettings.of(settings)
        module = wrapped_models.check_model("the first argument", model)
        busy = self._registry.training(module)
        if busy is not None and busy.state != "paused":
            raise ValueError(
                f"{busy.name} is training this model; pause it (%ort pause {busy.name}), or await "
                "it, to profile the model"
            )
        beside = [run.name for run in self._registry.runs if run.state == "running"]
        notes = [f"{name} trained at the same time, so both took longer" for name in beside]
        found = profiler.profile(module, batch, chosen.steps, notes)
        self._measured.setdefault(module, {})["time"] = found.overlay
        return found

    def lines(self, model: nn.Module, batch: Any = None, **settings: Any) -> SourceLines:
        """See `ortlab.api.lines`."""
        from ortlab.graph.source_lines import source_lines  # heavy: torch

        record = wrapped_model(wrapped_models.check_model("the first argument", model))
        if record is None or record.engine != "ort":
            raise ValueError(
                f"only engine 'ort' knows the lines of a {type(model).__name__}; wrap it with "
                "engine='ort'"
            )
        of_ort = cast("OrtModel", record)
        with of_ort.held():  # another thread's call would be the last one
            profile = self.profile(model, batch, **settings)
            return source_lines(of_ort, profile, self.graphs(model))

    def check(self, model: nn.Module) -> StepCheck:
        """See `ortlab.api.check`."""
        module = wrapped_models.check_model("the first argument", model)
        record = wrapped_model(module)
        run = self._registry.training(module)
        if record is None and run is not None:
            used = self._registry.wrapped_by(run)
            record = wrapped_model(used.get(run.current_settings.model.engine))
        name = type(module).__name__
        if record is None:
            raise ValueError(
                f"this {name} does not run in ORT, so there is nothing to compare; wrap it: %%ort, "
                "or ortlab.wrap(model)"
            )
        report = record.report()
        if report.engine_used == "eager":
            raise ValueError(f"this {name} already runs in eager torch: {report.fallback_reason}")
        check = StepCheck(type(record.module).__name__)
        record.check_next(check)
        return check

    def graphs(self, model: nn.Module, batch: Any = None) -> Graphs:
        """See `ortlab.api.graphs`."""
        # heavy: torch
        from ortlab.graph import capture, captured

        record = wrapped_model(model)
        if record is not None and record.engine == "ort":
            found = captured.graphs(cast("OrtModel", record), batch)
        else:
            found = capture.capture(model, batch)
        found.measured += self._measured.get(model, {}).values()
        found.notes += self._scaling(model, found)
        return found

    def _scaling(self, model: nn.Module, graphs: Graphs) -> tuple[str, ...]:
        """Return a note on the loss scale of the last run of `model`, if it had one."""
        run = self._registry.last_with(model)
        last = None if run is None else run.recorder.last
        if run is None or last is None or math.isnan(scale := float(last.loss_scale)):
            return ()
        from ortlab.engines.ort.onnx_model import TANGENTS  # heavy: torch's compiler

        scaled = "the gradients of forward's results"
        stage = graphs.stages.get("gradient")
        given = () if stage is None else stage.model.graph.input
        if names := [each.name for each in given if each.name.startswith(TANGENTS)]:
            scaled += f" ({', '.join(names)})"
        return (
            f"{run.name} multiplies the loss by the loss scale, now {scale:,.10g}, and divides the "
            f"parameters' gradients by it before the optimizer's step, both in torch: {scaled}, "
            "where backward begins, and all that it computes from them are scaled",
        )

    def memory_plan(
        self, model: nn.Module, batch: Any = None, *, optimizer: str = "adamw"
    ) -> MemoryPlan:
        """See `ortlab.api.memory_plan`."""
        # heavy: torch
        from ortlab.graph import capture, captured
        from ortlab.graph.memory import plan

        # Not `self.graphs`: its overlays hold the plan before this one, and so on without end.
        record = wrapped_model(model)
        if record is not None and record.engine == "ort":
            _, graphs = captured.for_any_size(cast("OrtModel", record), batch)
        else:
            graphs = capture.capture(model, batch)
        found = plan(graphs, model, optimizer=optimizer)
        self._measured.setdefault(model, {})["memory"] = found.overlay
        return found

    def plan_for(
        self, target: nn.Module | Run, settings: FinetuneSettings
    ) -> tuple[MemoryPlan, EngineSettings]:
        """Return the memory plan of a training step and the settings that its graph was built for.

        The graph is the one that exists for `settings`, recomputation included, or else the one in
        use. Nothing is exported.

        Args:
            target: A wrapped model, or a run.
            settings: Settings to predict the memory for.

        Raises:
            ValueError: If ORT has no graph of the model yet, or none that holds for any size, or
                cannot recompute what `settings` ask for.
        """
        from ortlab.training.run import Run  # heavy: torch

        model: nn.Module | None
        if isinstance(target, Run):
            wrapped = self._registry.wrapped_by(target)
            of_ort = wrapped.get("ort")
            whole = wrapped.get("ort_fused") if settings.model.engine == "ort_fused" else None
            model = wrapped.get("ortmodule")
            if whole is not None:
                from ortlab.graph.capture import with_loss  # heavy: torch's compiler

                model = with_loss(whole)
        else:
            entry = self._wrapped.entry(target)
            name = None if entry is None else entry.engine.name
            of_ort = target if name == "ort" else None
            model = target if name == "ortmodule" else None
        if settings.model.engine == "ort" and of_ort is not None:
            from ortlab.graph import planned_capture  # heavy: torch's compiler

            record = cast("OrtModel", wrapped_model(of_ort))
            trains = isinstance(target, Run) and not target.over()
            return planned_capture.plan_for(record, settings, trains=trains)
        if model is None:
            raise ValueError(f"engine {settings.model.engine!r} has made no graph of the model")
        from ortlab.graph.recompute_plans import plan_for  # heavy: torch's compiler

        return plan_for(model, settings, choose=functools.partial(self._choose_recompute, model))

    def recompute_plans(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        optimizer: str = "adamw",
        settings: EngineSettings | None = None,
    ) -> RecomputePlans:
        """See `ortlab.api.recompute_plans`; `settings` select the graph built for them."""
        from ortlab.graph.recompute_plans import RecomputePlans  # heavy: torch

        choose = functools.partial(self._choose_recompute, model)
        return RecomputePlans(model, batch, optimizer=optimizer, choose=choose, settings=settings)

    def _choose_recompute(self, model: nn.Module, changes: Mapping[str, Any]) -> None:
        run = self._registry.training(model)
        if run is not None:
            run.apply(**changes)
        else:
            self._wrapped.configure(model, changes)


class Session:
    """State of ortlab in one Python process; all commands go through it.

    Attributes:
        viewers: Functions that are called with every run, tracker, race and search to display.
        waits: Whether a run that fails waits for the user by default, as in a notebook.
        wrapped: The wrapped models.
        workers: The workers that were started last; None before the first ones.
        registry: The runs and searches.
    """

    def __init__(self) -> None:
        self.viewers: list[Callable[[Watched | Race | Tune], None]] = []
        self.waits = False
        self.wrapped = wrapped_models.WrappedModels()
        self.workers: Workers | None = None
        self.registry = RunRegistry()
        self.cell = 0
        """Number of the notebook's cell that runs; 0 outside a notebook."""
        # Cell that started a run, and what it asked for.
        self._cells: weakref.WeakKeyDictionary[Run, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._reports = ModelReports(self.wrapped, self.registry)

    def __repr__(self) -> str:
        return (
            f"<Session: {len(self.wrapped.entries)} wrapped models, {len(self.runs)} runs, "
            f"{len(self.trainers)} Trainer runs, {len(self.searches)} searches>"
        )

    # ---- models ----------------------------------------------------------------------------------

    def bind_cell(
        self,
        namespace: wrapped_models.Namespace,
        bound: Iterable[str],
        names: Sequence[str] = (),
        settings: EngineSettings | None = None,
    ) -> wrapped_models.CellReport:
        """Wrap the models that a cell bound and bind their names to the wrappers.

        Without `names` the trainable modules among the bound values are wrapped, only the outermost
        of nested ones. Two names of one module share one wrapper. A model among `names` that is
        wrapped with the same settings keeps its wrapper.

        Args:
            namespace: The user's variables; changed in place.
            bound: Names that the cell bound.
            names: Names to wrap instead, all of them or none.
            settings: Engine and its options; None for the defaults.

        Returns:
            What was wrapped, and what was not, with the reasons.

        Raises:
            ValueError: If one of `names` cannot be wrapped.
            EngineUnavailable: If the engine cannot run on this machine.
        """
        return self.wrapped.bind_cell(namespace, bound, names, settings or EngineSettings())

    def leave_cell(
        self,
        namespace: wrapped_models.Namespace,
        bound: Iterable[str],
        names: Sequence[str] = (),
    ) -> list[wrapped_models.NotWrapped]:
        """Record the models of a cell that did not finish; none of them is wrapped.

        Args:
            namespace: The user's variables.
            bound: Names that the cell bound, or was going to bind.
            names: Names to wrap instead, as in `bind_cell`.

        Returns:
            The models that `bind_cell` would wrap now.
        """
        return self.wrapped.leave_cell(namespace, bound, names)

    def check_engine(self, name: str) -> None:
        """Check that the engine `name` can run on this machine.

        Raises:
            EngineUnavailable: If it cannot; the message gives the reason.
            ValueError: If there is no such engine.
        """
        engine_called(name)

    # ---- runs ------------------------------------------------------------------------------------

    @property
    def runs(self) -> Recent[Run]:
        """Runs of `ortlab.finetune`, in the order in which they started."""
        return self.registry.runs

    @property
    def trainers(self) -> Recent[FollowedRun]:
        """Runs of Hugging Face's Trainer."""
        return self.registry.trainers

    @property
    def searches(self) -> Recent[BackgroundSearch]:
        """Races and searches of settings."""
        return self.registry.searches

    @property
    def last_run(self) -> Run | None:
        """Run that started last; None before the first one."""
        return self.registry.last_run

    def run(self, name: str | None = None) -> Run:
        """See `RunRegistry.run`."""
        return self.registry.run(name)

    def under_way(self, name: str | None = None) -> Run | FollowedRun:
        """See `RunRegistry.under_way`."""
        return self.registry.under_way(name)

    def training(self, model: nn.Module) -> Run | None:
        """See `RunRegistry.training`."""
        return self.registry.training(model)

    def last_data(self, model: nn.Module) -> Any:
        """See `RunRegistry.last_data`."""
        return self.registry.last_data(model)

    def finetune(
        self,
        model: nn.Module,
        train: Iterable[Any],
        *,
        eval_dataset: Iterable[Any] | None = None,
        loss: str | LossFunction | None = None,
        metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        collate_fn: Collate | None = None,
        resume_from: str | int | Path | Checkpoint | StoredRun | None = None,
        hold: bool | None = None,
        config: str | Path | None = None,
        fresh: bool = False,
        name: str | None = None,
        **settings: Any,
    ) -> Run:
        """See `ortlab.api.finetune`."""
        if config is not None:
            settings = config_file.read(config) | FinetuneSettings.canonical(settings)
            saved = settings.pop("loss", None)
            loss = saved if loss is None else loss
        # heavy: torch
        from ortlab.checkpoint.checkpoint import Checkpoint
        from ortlab.training.resume import Beginning, beginning
        from ortlab.training.start import RunRequest

        request = RunRequest(
            model,
            train,
            eval_dataset=eval_dataset,
            loss=loss,
            metrics=metrics,
            callbacks=callbacks,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            hold=hold,
            fresh=fresh,
            name=name,
            settings=FinetuneSettings.canonical(settings),
        )
        asked = (self.cell, self._asked(request, resume_from))
        if (live := self._started_by_same_cell(model, asked)) is not None:
            return self._show_again(live)
        begin: Beginning | Checkpoint | None
        if resume_from is None or isinstance(resume_from, Checkpoint):
            begin = resume_from
        else:
            begin = beginning(resume_from)
        run = self._start(dataclasses.replace(request, begin=begin))
        self._cells[run] = asked
        return run

    def _asked(self, request: RunRequest, resume_from: object) -> tuple[Any, ...]:
        """Return what a call asks for: the user's names of its values, and its settings."""
        loss = request.loss if isinstance(request.loss, str) else None
        names = request.names(self._names())
        chosen = dict(request.settings), request.hold, request.fresh, request.name
        return names, loss, *chosen, f"{resume_from}"

    def _started_by_same_cell(self, model: nn.Module, asked: tuple[int, Any]) -> Run | None:
        """Return the active run of a model if a cell asks again for what an earlier one asked."""
        run = self.registry.training(model) if wrapped_models.is_model(model) else None
        if run is None or run not in self._cells:
            return None
        entry = self.wrapped.entry(model)
        original = model if entry is None else entry.original
        number, before = self._cells[run]
        again = number != asked[0] and before == asked[1] and run.model is original
        return run if again else None

    def _show_again(self, run: Run) -> Run:
        status = run.status()
        total = "" if status.total_steps is None else f" of {status.total_steps:,}"
        print(
            f"{run.name} trains this model already ({status.state}, step {status.step:,}{total}) "
            f"and is shown again; %ort stop {run.name} ends it",
            flush=True,
        )
        self.show(run)
        return run

    def resume(
        self,
        run: str | int | StoredRun,
        model: nn.Module | None = None,
        train: Iterable[Any] | None = None,
        *,
        eval_dataset: Iterable[Any] | None = None,
        loss: str | LossFunction | None = None,
        metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        collate_fn: Collate | None = None,
        **settings: Any,
    ) -> Run:
        """See `ortlab.api.resume`."""
        # heavy: torch
        from ortlab.history.listing import GOES_ON
        from ortlab.history.run_files import StoredRun
        from ortlab.history.saved_run import run_name
        from ortlab.training import resume
        from ortlab.training.start import RunRequest

        given = {
            "model": model,
            "train": train,
            "eval_dataset": eval_dataset,
            "loss": loss,
            "metrics": metrics,
            "callbacks": callbacks,
            "optimizer": optimizer,
            "lr_scheduler": lr_scheduler,
            "collate_fn": collate_fn,
        }
        name = run.name if isinstance(run, StoredRun) else run_name(run)
        alive = next((each for each in self.runs if each.name == name and not each.over()), None)
        if alive is not None:
            if settings or any(value is not None for value in given.values()):
                raise ValueError(
                    f"{name} is a run of this kernel, {alive.state}: it has its model and data, "
                    f"and run.apply changes settings; resume({name!r}) resumes it"
                )
            alive.resume()
            return alive
        past = resume.resumable(name)
        found = resume.found_by_name(past, given, self._names())
        begin = resume.newest(past.folder)
        earlier = resume.earlier(past, begin)
        if found["eval_dataset"] is None and earlier.evaluated:
            earlier = earlier.saying("it is no longer evaluated: eval_dataset=... was not given")
        called = resume.names_of(past).get("model", "model")
        resumed = self._start(
            RunRequest(
                wrapped_models.check_model(called, found["model"]),
                found["train"],
                eval_dataset=found["eval_dataset"],
                loss=found["loss"],
                metrics=found["metrics"],
                callbacks=found["callbacks"],
                optimizer=found["optimizer"],
                lr_scheduler=found["lr_scheduler"],
                collate_fn=found["collate_fn"],
                begin=begin,
                earlier=earlier,
                settings=settings,
            )
        )
        try:
            past.note(f"{GOES_ON}{resumed.name}")
            resume.clear(past)
        except OSError as error:  # the new run trains already, and the user needs its handle
            warnings.warn(
                f"{past.name} does not record that {resumed.name} continues it: {error}",
                stacklevel=3,
            )
        return resumed

    def _start(self, request: RunRequest) -> Run:
        from ortlab.training.start import RunServices, RunStarter  # heavy: torch

        services = RunServices(
            remote=self._remote_stepper,
            check_workers=self._check_workers,
            plan_for=self.plan_for,
            remote_hosts=lambda: self.workers is not None and self.workers.elsewhere,
            show=self.show,
            names=self._names,
            waits=self.waits,
        )
        return RunStarter(self.wrapped, self.registry, services).start(request)

    def _names(self) -> Mapping[str, Any]:
        """Return the user's variables, of the notebook or of the script that runs."""
        if self.wrapped.namespace is not None:
            return self.wrapped.namespace
        return vars(sys.modules["__main__"])

    # ---- races and searches ----------------------------------------------------------------------

    def race(
        self,
        model: nn.Module,
        data: Iterable[Any],
        *,
        loss: str | LossFunction | None = None,
        **settings: Any,
    ) -> Race:
        """See `ortlab.api.race`."""
        from ortlab.search.race import Race  # heavy: torch

        return self._search(Race, RaceSettings, model, data, loss, settings)

    def tune(
        self,
        model: nn.Module,
        data: Iterable[Any],
        *,
        loss: str | LossFunction | None = None,
        **settings: Any,
    ) -> Tune:
        """See `ortlab.api.tune`."""
        from ortlab.search.tune import Tune  # heavy: torch

        return self._search(Tune, TuneSettings, model, data, loss, settings)

    def _search(
        self,
        kind: Callable[..., S],
        own: type[SearchSettings],
        model: nn.Module,
        data: Iterable[Any],
        loss: str | LossFunction | None,
        given: Mapping[str, Any],
    ) -> S:
        from ortlab.search.start import SearchStarter  # heavy: torch

        starter = SearchStarter(self.wrapped, self.registry, self.workers_for, self.show)
        return starter.start(kind, own, model, data, loss, given)

    # ---- workers ---------------------------------------------------------------------------------

    def start_workers(
        self, count: int, *, profile: str | None = None, hosts: Elsewhere | None = None
    ) -> Workers:
        """See `ortlab.api.workers`."""
        from ortlab.cluster.workers import Workers, refuse_too_many  # heavy: psutil

        if count < 1:
            raise ValueError(f"workers={count} must be at least 1")
        if profile is None and hosts is None:
            refuse_too_many(count)
        before = self.workers
        if before is not None:
            same = (len(before), before.profile, before.hosts) == (count, profile, hosts)
            if same and before.usable():
                return before
            if before.busy is not None:
                raise ValueError(
                    f"the {len(before)} workers are busy with {before.busy}; await it, or "
                    "%ort workers stop"
                )
            tell(before.broken or f"ending the {len(before)} previous workers")
            before.stop()
        self.workers = Workers(count, profile=profile, hosts=hosts)
        return self.workers

    def workers_for(self, count: int) -> Workers:
        """Return `count` workers: the running ones where the number is the same, else new ones.

        Args:
            count: How many. New workers replace running ones of another number; they are local.

        Raises:
            ValueError: If the running workers are busy.
            RuntimeError: If workers cannot be started.
        """
        before = self.workers
        if before is None or len(before) != count:
            return self.start_workers(count)
        return self.start_workers(count, profile=before.profile, hosts=before.hosts)

    def _check_workers(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        optim: OptimRequest | None,
    ) -> None:
        """Check that workers can train `model`, before anything is started."""
        from ortlab.cluster import launch  # heavy: psutil

        launch.installed()
        from ortlab.cluster import remote  # heavy: torch

        remote.check(model, loss, optim)
        from ortlab.engines.distributed import steppers  # heavy: torch

        steppers.check_model(model, settings)
        before = self.workers
        if before is not None and before.usable() and before.busy is not None:
            raise ValueError(
                f"the {len(before)} workers are busy with {before.busy}; await it, or stop it"
            )

    def _remote_stepper(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        settings: FinetuneSettings,
        run: str,
        optim: OptimRequest | None,
    ) -> RemoteStepper:
        from ortlab.cluster.remote import RemoteStepper  # heavy: torch
        from ortlab.engines.distributed import steppers  # heavy: torch

        steppers.check_model(model, settings)  # the settings of a run may have changed
        workers = self.workers_for(settings.parallel.workers)
        return RemoteStepper(workers, model, loss, settings, optim=optim, name=run)

    # ---- views -----------------------------------------------------------------------------------

    def track(
        self,
        what: nn.Module | Iterable[B],
        *,
        name: str | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        resume_from: str | int | Path | StoredRun | None = None,
    ) -> LoopRun | Tracker[B]:
        """See `ortlab.api.track`."""
        # heavy: torch
        from torch import nn

        from ortlab.training.tracker import Tracker

        if isinstance(what, nn.Module):
            return self.loop_run(
                what,
                name=name,
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                resume_from=resume_from,
            )
        if (optimizer, lr_scheduler, resume_from) != (None, None, None):
            raise ValueError(
                "checkpoints need the model: with ortlab.track(model, optimizer=optimizer) as run"
            )
        return Tracker(what, name=name, show=self.show)

    def loop_run(
        self,
        model: nn.Module,
        *,
        name: str | None = None,
        where: str = "a loop",
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        resume_from: str | int | Path | StoredRun | None = None,
    ) -> LoopRun:
        """Return a run for a training loop that is not ortlab's.

        Args:
            model: The model that the loop trains.
            name: Name of the run; None for the next run-N.
            where: What trains, for the title.
            optimizer: Optimizer of the loop, for checkpoints; None for a run without them.
            lr_scheduler: Scheduler of the loop, for checkpoints.
            resume_from: Run or checkpoint file to continue from; None for none.

        Raises:
            ValueError: If the optimizer or the scheduler has no ``state_dict``, the optimizer is of
                another model, or the checkpoint is missing, damaged or of another model or
                optimizer.
        """
        # heavy: torch
        from ortlab.history.saved_run import SavedRun
        from ortlab.training import resume
        from ortlab.training.loop_run import LoopRun
        from ortlab.training.loop_state import LoopState

        entry = self.wrapped.entry(model)
        original = model if entry is None else entry.engine.unwrap(model)
        if optimizer is None and lr_scheduler is not None:
            raise ValueError("lr_scheduler needs the loop's optimizer, too: optimizer=optimizer")
        state = None if optimizer is None else LoopState(original, optimizer, lr_scheduler)
        step, earlier, resumed = 0, None, ""
        if resume_from is not None:
            if state is None:
                raise ValueError("resume_from needs the loop's optimizer, too: optimizer=optimizer")
            begin = resume.beginning(resume_from)
            state.load(begin.checkpoint)
            step = begin.checkpoint.position.step
            folder = begin.path.absolute().parents[1]
            if Path(folder, "run.json").is_file():  # not a copy of the checkpoint elsewhere
                earlier = resume.earlier(SavedRun(folder), begin)
            resumed = resume.origin(begin, earlier)
        run = LoopRun(
            model,
            name=name,
            show=self.show,
            choice="" if entry is None else entry.choice,
            where=where,
            state=state,
            step=step,
            earlier=earlier,
            resumed=resumed,
        )
        self.trainers.append(run)
        return run

    def show(self, watched: Watched | Race | Tune) -> None:
        """Show a run, a tracker, a race or a search to every viewer."""
        for viewer in list(self.viewers):
            viewer(watched)

    # ---- graphs and measurements -----------------------------------------------------------------

    def profile(self, model: nn.Module, batch: Any = None, **settings: Any) -> Profile:
        """See `ortlab.api.profile`."""
        return self._reports.profile(model, batch, **settings)

    def lines(self, model: nn.Module, batch: Any = None, **settings: Any) -> SourceLines:
        """See `ortlab.api.lines`."""
        return self._reports.lines(model, batch, **settings)

    def check(self, model: nn.Module) -> StepCheck:
        """See `ortlab.api.check`."""
        return self._reports.check(model)

    def graphs(self, model: nn.Module, batch: Any = None) -> Graphs:
        """See `ortlab.api.graphs`."""
        return self._reports.graphs(model, batch)

    def memory_plan(
        self, model: nn.Module, batch: Any = None, *, optimizer: str = "adamw"
    ) -> MemoryPlan:
        """See `ortlab.api.memory_plan`."""
        return self._reports.memory_plan(model, batch, optimizer=optimizer)

    def plan_for(
        self, target: nn.Module | Run, settings: FinetuneSettings
    ) -> tuple[MemoryPlan, EngineSettings]:
        """See `ModelReports.plan_for`."""
        return self._reports.plan_for(target, settings)

    def recompute_plans(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        optimizer: str = "adamw",
        settings: EngineSettings | None = None,
    ) -> RecomputePlans:
        """See `ortlab.api.recompute_plans`; `settings` select the graph built for them."""
        return self._reports.recompute_plans(model, batch, optimizer=optimizer, settings=settings)

    def status(self, *notes: str) -> KernelStatus:
        """See `ortlab.api.status`.

        Args:
            *notes: Further lines to show.
        """
        return KernelStatus(
            self.wrapped,
            self.registry,
            workers="" if self.workers is None else self.workers.summary,
            notes=notes,
        )

    # ---- history ---------------------------------------------------------------------------------

    def history(self, **settings: Any) -> History:
        """See `ortlab.api.list_runs`."""
        from ortlab.history import listing  # heavy: numpy

        return listing.history(HistorySettings.of(settings), [*self.runs])

    def open_run(self, run: str | int | StoredRun) -> Run | SavedRun:
        """See `ortlab.api.open_run`."""
        # heavy: numpy
        from ortlab.history.run_files import StoredRun
        from ortlab.history.saved_run import SavedRun, find, run_name

        if isinstance(run, StoredRun):
            return cast("Run | SavedRun", run)
        own = {f"{each.name}": each for each in self.runs}
        name = run_name(run)
        return own[name] if name in own else SavedRun(find(run).folder)

    def compare_runs(self, *runs: str | int | StoredRun) -> RunComparison:
        """See `ortlab.api.compare_runs`."""
        from ortlab.history.comparison import RunComparison  # heavy: numpy

        return RunComparison([self.open_run(run) for run in runs])


session: Final = Session()
"""The session of this process."""
