"""The one door: models, runs and trackers, for magics, panel and scripts alike.

Nothing in it trains, draws or knows IPython.
"""

from __future__ import annotations

import functools
import reprlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from ortlab.engines import wrapped_models
from ortlab.settings import (
    LOSSES,
    EngineSettings,
    FinetuneSettings,
    HistorySettings,
    ProfileSettings,
    RaceSettings,
    SearchSettings,
    TuneSettings,
    unknown_name,
)
from ortlab.utils.weak_list import Recent

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from ortlab.checkpoint.checkpoint import Checkpoint
    from ortlab.cluster.workers import Workers
    from ortlab.engines.base import LossFunction, Stepper
    from ortlab.engines.nonfinite import Cause
    from ortlab.graph.capture import Graphs, Overlay, Stage
    from ortlab.graph.memory import MemoryPlan
    from ortlab.graph.profile import Profile
    from ortlab.graph.recompute import RecomputePlans
    from ortlab.history.comparison import RunComparison
    from ortlab.history.listing import History
    from ortlab.history.run_files import StoredRun
    from ortlab.history.saved_run import SavedRun
    from ortlab.metrics.recorder import Watched
    from ortlab.search.comparison import Prefer
    from ortlab.search.race import Race
    from ortlab.search.tune import Tune
    from ortlab.training.resume import Beginning, Earlier
    from ortlab.training.run import Run
    from ortlab.training.tracker import Tracker

B = TypeVar("B")
"""A batch, whatever a loader gives."""
S = TypeVar("S", "Race", "Tune")
R = TypeVar("R", bound="TrainingRun")

_AT_WORK: Final = ("starting", "running", "stopping")


class TrainingRun(Protocol):
    """A run that moves the weights of a model."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def model(self) -> nn.Module | None:
        """The model in training; None once the run is over."""
        ...

    def over(self) -> bool:
        """Return whether nothing more will come."""
        ...


if TYPE_CHECKING:

    class FollowedRun(TrainingRun, Watched, Protocol):
        """A run of Hugging Face's Trainer, which trains by itself and is followed from outside."""


class Session:
    """What the lab holds in one Python process.

    ``viewers`` are called with every run, tracker and race that is to be seen; ``wrapped`` are the
    models; ``runs``, ``trainers`` (runs of Hugging Face's) and ``searches`` (races too) are those
    of this process; ``workers`` those that were started last, None before.
    """

    def __init__(self) -> None:
        self.viewers: list[Callable[[Watched | Race | Tune], None]] = []
        self.waits = False
        """Whether somebody is there to let a run go on that is held: in a notebook."""
        self.wrapped = wrapped_models.WrappedModels()
        self.runs: Recent[Run] = Recent(last=True)
        # Not even the last: the error of one that failed keeps its Trainer and model alive.
        self.trainers: Recent[FollowedRun] = Recent(last=False)
        self.workers: Workers | None = None
        # What each run trains, by engine; the run itself keeps it alive as long as it trains.
        self._executed: weakref.WeakKeyDictionary[
            Run, weakref.WeakValueDictionary[str, nn.Module]
        ] = weakref.WeakKeyDictionary()
        self.searches: Recent[Race | Tune] = Recent(last=True)
        # What each model was trained on last; of lists, which take no weak reference, a batch.
        self._data: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._preferred: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        # By model, and by what is measured: the last measurement takes the place of the one before.
        self._measured: weakref.WeakKeyDictionary[
            nn.Module, dict[str, Callable[[Stage], Overlay]]
        ] = weakref.WeakKeyDictionary()

    def bind_cell(
        self,
        namespace: wrapped_models.Namespace,
        bound: Iterable[str],
        names: Sequence[str] = (),
        settings: EngineSettings | None = None,
    ) -> wrapped_models.CellReport:
        """Wraps the models that a cell bound and binds their names to the wrappers.

        `bound` are the names that the cell bound. Of their values the trainable modules are
        wrapped, outermost only, and two names of one module share one wrapper. With `names` those
        are wrapped instead, all or none: ValueError names the one that cannot be.
        """
        return self.wrapped.bind_cell(namespace, bound, names, settings or EngineSettings())

    def check_engine(self, name: str) -> None:
        """EngineUnavailable says why the engine `name` cannot run here; ValueError if unknown."""
        from ortlab.engines.registry import engine as engine_called

        engine_called(name)

    def finetune(
        self,
        model: nn.Module,
        train: Iterable[Any],
        *,
        eval_data: Iterable[Any] | None = None,
        loss: str | LossFunction | None = None,
        resume_from: str | int | Path | Checkpoint | StoredRun | None = None,
        hold: bool | None = None,
        **settings: Any,
    ) -> Run:
        """See `ortlab.api.finetune`."""
        from ortlab.checkpoint.checkpoint import Checkpoint
        from ortlab.training.resume import beginning

        begin: Beginning | Checkpoint | None
        if resume_from is None or isinstance(resume_from, Checkpoint):
            begin = resume_from
        else:
            begin = beginning(resume_from)
        return self._finetune(model, train, eval_data, loss, begin, None, hold, settings)

    def resume(
        self,
        run: str | int | StoredRun,
        model: nn.Module | None = None,
        train: Iterable[Any] | None = None,
        *,
        eval_data: Iterable[Any] | None = None,
        loss: str | LossFunction | None = None,
        **settings: Any,
    ) -> Run:
        """See `ortlab.api.resume`."""
        from ortlab.history.listing import GOES_ON
        from ortlab.history.run_files import StoredRun
        from ortlab.history.saved_run import run_name
        from ortlab.training import resume

        given = {"model": model, "train": train, "eval_data": eval_data, "loss": loss}
        name = run.name if isinstance(run, StoredRun) else run_name(run)
        alive = next((each for each in self.runs if each.name == name and not each.over()), None)
        if alive is not None:
            if settings or any(value is not None for value in given.values()):
                raise ValueError(
                    f"{name} is a run of this kernel, {alive.state}: it has its model and data, "
                    f"and run.apply changes settings; resume({name!r}) lets it go on"
                )
            alive.resume()
            return alive
        past = resume.resumable(name)
        found = resume.found_by_name(past, given, self._names())
        begin = resume.newest(past.folder)
        before = resume.earlier(past, begin)
        if found["eval_data"] is None and before.evaluated:
            before = before.saying("it is evaluated no more: eval_data=... was not given")
        goes_on = self._finetune(
            wrapped_models.check_model(resume.names_of(past).get("model", "model"), found["model"]),
            found["train"],
            found["eval_data"],
            found["loss"],
            begin,
            before,
            None,
            settings,
        )
        try:
            past.note(f"{GOES_ON}{goes_on.name}")
            resume.clear(past)
        except OSError as error:  # the run trains already, and its handle is the user's
            warnings.warn(f"{past.name} does not say that it goes on: {error}", stacklevel=3)
        return goes_on

    def _names(self) -> Mapping[str, Any]:
        """What the user calls things: in the notebook, or the script that runs."""
        if self.wrapped.namespace is not None:
            return self.wrapped.namespace
        return vars(sys.modules["__main__"])

    def _called(self, values: Mapping[str, Any]) -> dict[str, str]:
        """What the user calls `values`; a loss that has no name there by its own."""
        names = {id(v): n for n, v in reversed(list(self._names().items())) if n[:1] != "_"}
        found = {each: names.get(id(value)) for each, value in values.items() if value is not None}
        loss = values["loss"]
        if callable(loss) and found["loss"] is None:
            found["loss"] = getattr(loss, "__name__", None)
        elif not callable(loss):
            found.pop("loss", None)  # the settings have it
        return {each: name for each, name in found.items() if name is not None}

    def _finetune(
        self,
        model: nn.Module,
        train: Iterable[Any],
        eval_data: Iterable[Any] | None,
        loss: str | LossFunction | None,
        given: Beginning | Checkpoint | None,
        earlier: Earlier | None,
        hold: bool | None,
        settings: dict[str, Any],
    ) -> Run:
        from ortlab.checkpoint.checkpoint import check_model
        from ortlab.engines.base import tell
        from ortlab.engines.registry import engine as engine_called
        from ortlab.engines.registry import engine_for
        from ortlab.training.data_loading import of_samples, unevenly
        from ortlab.training.failures import FailurePolicy
        from ortlab.training.resume import Beginning
        from ortlab.training.run import Run

        module = wrapped_models.check_model("the first argument", model)
        entry = self.wrapped.entry(module)
        begin = given.checkpoint if isinstance(given, Beginning) else given
        own = {} if entry is None else entry.settings.as_dict()
        if given is not None:
            # Of another version's settings those that there still are.
            known = FinetuneSettings.declarations()
            own |= {n: v for n, v in given.settings.items() if n in known and not known[n].here}
        else:
            own |= self._preferred.get(self._original(module), {})
        function, loss_name = _loss(loss, own.get("loss"))
        chosen = FinetuneSettings.of({**own, **settings, "loss": loss_name})
        warnings = [given.damaged] if isinstance(given, Beginning) and given.damaged else []
        if given is not None and (told := _not_taken(given.settings, chosen, settings)):
            warnings.append(told)
        executed: dict[str, nn.Module] = {}
        shared: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        if entry is None:
            original = module
            reason = self.wrapped.unfit(module)
            if reason is not None:
                raise ValueError(f"cannot fine-tune this {type(module).__name__}: it {reason}")
        else:
            original = entry.engine.unwrap(module)
            # Its own engine goes on with what it has exported already.
            executed[entry.settings.engine] = module
        self._check_free(original)
        if begin is not None:
            check_model(begin.model, original.state_dict())
        engine_for(chosen)
        if chosen.elsewhere:
            self._check_workers(original, function)

        def prepare(settings: FinetuneSettings) -> Stepper:
            engine = engine_for(settings)
            if settings.elsewhere:
                from ortlab.cluster.remote import RemoteStepper

                workers = self.workers_for(settings.workers)
                if told := unevenly(train, settings):
                    tell(told)
                return RemoteStepper(workers, original, function, settings, name=run.name)
            if engine.name not in executed:
                # Kept as long as the run is, so that a return to this engine exports nothing anew.
                plain = settings.replace(precision="fp32")  # which is not for wrapping to choose
                executed[engine.name] = engine.wrap(original, plain)
            shared[engine.name] = executed[engine.name]
            return engine.prepare(executed[engine.name], function, settings)

        def kept() -> dict[str, int]:
            return {
                f"{name} {settings}": size
                for name, module in list(shared.items())
                for settings, size in engine_called(name).kept(module).items()
            }

        def examine(
            stepper: Stepper, micro_batches: Sequence[Any], settings: FinetuneSettings
        ) -> Cause | None:
            if settings.elsewhere:
                from ortlab.cluster.remote import RemoteStepper

                assert isinstance(stepper, RemoteStepper)
                return stepper.first_bad(micro_batches, settings)
            from ortlab.engines.nonfinite import first_bad

            return first_bad(original, function, micro_batches, settings)

        def far() -> bool:
            return self.workers is not None and self.workers.profile is not None

        def peak_bytes(settings: FinetuneSettings) -> int | None:
            from ortlab.training import settings_preview

            try:
                plan, of = self.plan_for(run if shared else module, settings)
                size = settings.batch_size if of_samples(train) else None
                return settings_preview.foreseen(plan, of, settings, batch=size)[0]
            except (ValueError, MemoryError):  # no graph yet, or none that tells
                return None

        waits = self.waits if hold is None else hold
        run = Run(
            original,
            prepare,
            train,
            kept=kept,
            faults=FailurePolicy(waits, examine, peak_bytes, far),
            evaluation=eval_data,
            settings=chosen,
            show=self.show,
            begin=begin,
            warnings=warnings,
            earlier=earlier,
            names=self._called(
                {"model": model, "train": train, "eval_data": eval_data, "loss": loss}
            ),
        )
        self.runs.append(run)
        self._data[original] = _reference(train)
        self._executed[run] = shared
        run.start()
        return run

    def race(
        self,
        model: nn.Module,
        data: Iterable[Any],
        *,
        loss: str | LossFunction | None = None,
        **settings: Any,
    ) -> Race:
        """See `ortlab.api.race`."""
        from ortlab.search.race import Race

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
        from ortlab.search.tune import Tune

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
        """Starts a race or a search of the settings that were `given`."""
        from ortlab.search.comparison import Surroundings

        original, shared = self._to_search(model)
        settings, more = own.apart(given)
        function, _ = _loss(loss, None)
        named = {"loss": loss} if isinstance(loss, str) else {}
        found = kind(
            original,
            data,
            settings,
            shared={**shared, **more, **named},
            loss=function,
            around=Surroundings(self._at_work, self._preferring(original), self.workers_for),
        )
        self.searches.append(found)
        found.start(self.show)
        return found

    def _to_search(self, model: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
        """The user's own module, and what its wrapper was told that is no default.

        ValueError where it cannot be trained, or something else trains or searches just now.
        """
        from ortlab.engines.base import unfit

        module = wrapped_models.check_model("the first argument", model)
        original = self._original(module)
        if (reason := unfit(original)) is not None:
            raise ValueError(f"cannot train this {type(module).__name__}: it {reason}")
        busy = [*self._at_work(), *(each.name for each in self.searches if not each.over())]
        if busy:
            raise ValueError(
                f"{busy[0]} is at work, and both would be slower: await it, or %ort stop {busy[0]}"
            )
        entry = self.wrapped.entry(module)
        if entry is None:
            return original, {}
        declared = EngineSettings.declarations()
        told = entry.settings.as_dict()
        without = SearchSettings.without
        left = {n: v for n, v in told.items() if n not in without and v != declared[n].default}
        return original, left

    def _original(self, module: nn.Module) -> nn.Module:
        """The user's own module in `module`, or itself."""
        entry = self.wrapped.entry(module)
        return module if entry is None else entry.engine.unwrap(module)

    def last_data(self, model: nn.Module) -> Any:
        """What `model` was trained on last, or a batch of it; None where nobody holds it now."""
        known = self._data.get(model)
        return None if known is None else known()

    def _at_work(self) -> list[str]:
        """The runs that train just now."""
        going = [run.name for run in self.runs if run.state in _AT_WORK]
        return going + [run.name for run in self.trainers if run.status().state in _AT_WORK]

    def _preferring(self, model: nn.Module) -> Prefer:
        """What has settings hold for `model`, which it does not keep alive."""
        known = weakref.ref(model)

        def prefer(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
            model = known()
            if model is None:
                raise ValueError("nobody holds the model any more")
            told = ", ".join(f"{name}={value}" for name, value in changes.items())
            if (run := self.training(model)) is not None:
                run.apply(**changes)
                return f"{run.name} goes on with {told}"
            self._preferred[model] = {n: v for n, v in settings.items() if n != "loss"}
            kind = type(model).__name__
            return f"finetune of this {kind} takes {told}, where nothing else is chosen"

        return prefer

    def start_workers(self, count: int, *, profile: str | None = None) -> Workers:
        """See `ortlab.api.workers`."""
        from ortlab.cluster.workers import Workers, refuse_too_many
        from ortlab.engines.base import tell

        if count < 1:
            raise ValueError(f"workers={count}: at least one")
        if profile is None:
            refuse_too_many(count)
        before = self.workers
        if before is not None:
            if before.usable() and (len(before), before.profile) == (count, profile):
                return before
            if before.busy is not None:
                raise ValueError(
                    f"the {len(before)} workers are busy with {before.busy}; wait for its end, or "
                    "%ort workers stop"
                )
            tell(before.broken or f"the {len(before)} workers before end")
            before.stop()
        self.workers = Workers(count, profile=profile)
        return self.workers

    def workers_for(self, count: int) -> Workers:
        """`count` workers: those that are there, wherever they are, or fresh ones of their kind.

        Local ones where there were none of that number.
        """
        before = self.workers
        if before is None or len(before) != count:
            return self.start_workers(count)
        return self.start_workers(count, profile=before.profile)

    def _check_workers(self, model: nn.Module, loss: LossFunction | None) -> None:
        """ValueError where a run cannot have them; RuntimeError where none can be started."""
        from ortlab.cluster import launch

        launch.installed()
        from ortlab.cluster import remote

        remote.check(model, loss)
        before = self.workers
        if before is not None and before.usable() and before.busy is not None:
            raise ValueError(
                f"the {len(before)} workers are busy with {before.busy}; await it, or stop it"
            )

    def track(self, loader: Iterable[B], *, name: str | None = None) -> Tracker[B]:
        """See `ortlab.api.track`."""
        from ortlab.training.tracker import Tracker

        return Tracker(loader, name=name, show=self.show)

    def show(self, watched: Watched | Race | Tune) -> None:
        """Lets every viewer show `watched`."""
        for viewer in list(self.viewers):
            viewer(watched)

    @property
    def last_run(self) -> Run | None:
        """The run that was started last."""
        return self.runs.last

    def run(self, name: str | None = None) -> Run:
        """The run called `name`, or the last one; ValueError when there is none."""
        last = self.last_run
        if last is None:
            raise ValueError("there is no run yet; ortlab.finetune and %ort finetune start one")
        if name is None:
            return last
        named = {run.name: run for run in self.runs}
        if name not in named:
            raise ValueError(
                f"no run is called {name!r}: {_left(name) or unknown_name(name, named)}"
            )
        return named[name]

    def under_way(self, name: str | None = None) -> Run | FollowedRun:
        """The run called `name`, a Trainer's too; without one the last that goes on, or that was.

        Where both kinds go on it is `last_run`. ValueError when there is none.
        """
        if name is not None:
            named = {run.name: run for run in self.trainers}
            return named[name] if name in named else self.run(name)
        going = [run for run in self.trainers if not run.over()]
        trained = self.trainers.last
        if self.last_run is None and trained is not None:
            return trained
        return going[-1] if going and self.run().over() else self.run()

    def profile(self, model: nn.Module, batch: Any = None, **settings: Any) -> Profile:
        """See `ortlab.api.profile`."""
        from ortlab.graph import profiler

        chosen = ProfileSettings.of(settings)
        module = wrapped_models.check_model("the first argument", model)
        busy = self.training(module)
        if busy is not None and busy.state != "paused":
            raise ValueError(
                f"{busy.name} is training this model; pause it (%ort pause {busy.name}), or await "
                "it, to profile the model"
            )
        beside = [run.name for run in self.runs if run.state == "running"]
        notes = [f"{name} trained beside it: both take longer" for name in beside]
        found = profiler.profile(module, batch, chosen.steps, notes)
        self._measured.setdefault(module, {})["time"] = found.overlay
        return found

    def graphs(self, model: nn.Module, batch: Any = None) -> Graphs:
        """See `ortlab.api.graphs`."""
        from ortlab.graph.capture import capture

        found = capture(model, batch)
        found.measured += self._measured.get(model, {}).values()
        return found

    def memory_plan(
        self, model: nn.Module, batch: Any = None, *, optimizer: str = "adamw"
    ) -> MemoryPlan:
        """See `ortlab.api.memory_plan`."""
        from ortlab.graph.capture import capture
        from ortlab.graph.memory import plan

        # Not `graphs`, which have the plan before, and that the one before it.
        found = plan(capture(model, batch), model, optimizer=optimizer)
        self._measured.setdefault(model, {})["memory"] = found.overlay
        return found

    def plan_for(
        self, target: nn.Module | Run, settings: FinetuneSettings
    ) -> tuple[MemoryPlan, EngineSettings]:
        """The memory plan of what a model or a run trains, and the settings that its graph has.

        The graph is the one that was made for `settings`, with what they have computed again in it,
        or else the one that is in use; nothing is exported. ValueError where ORT has made
        none yet, or cannot compute that again.
        """
        from ortlab.graph.capture import with_loss
        from ortlab.graph.recompute import plan_for
        from ortlab.training.run import Run

        model: nn.Module | None
        if isinstance(target, Run):
            shared = dict(self._executed.get(target) or {})
            whole = shared.get("offload") if settings.engine == "offload" else None
            model = shared.get("ort") if whole is None else with_loss(whole)
        else:
            entry = self.wrapped.entry(target)
            model = target if entry is not None and entry.engine.name == "ort" else None
        if model is None:
            raise ValueError("engine 'ort' has made no graph of the model")
        return plan_for(model, settings, choose=functools.partial(self._choose_recompute, model))

    def recompute_plans(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        optimizer: str = "adamw",
        settings: EngineSettings | None = None,
    ) -> RecomputePlans:
        """See `ortlab.api.recompute_plans`; of the graph made for `settings`, where given."""
        from ortlab.graph.recompute import RecomputePlans

        choose = functools.partial(self._choose_recompute, model)
        return RecomputePlans(model, batch, optimizer=optimizer, choose=choose, settings=settings)

    def _choose_recompute(self, model: nn.Module, plan: str) -> None:
        run = self.training(model)
        if run is not None:
            run.apply(recompute=plan)
        else:
            self.wrapped.configure(model, {"recompute": plan})

    def _check_free(self, model: nn.Module) -> None:
        """Two runs must not move the same weights."""
        run = self.training(model) or _moves(self.trainers, model)
        if run is not None:
            raise ValueError(
                f"{run.name} is training this model; await it, or stop it "
                f"(%ort stop {run.name}) before the next run"
            )

    def training(self, model: nn.Module) -> Run | None:
        """The run that moves weights of `model`, or will when it goes on."""
        return _moves(self.runs, model)

    def history(self, **settings: Any) -> History:
        """See `ortlab.api.list_runs`."""
        from ortlab.history import listing

        return listing.history(HistorySettings.of(settings), [*self.runs])

    def open_run(self, run: str | int | StoredRun) -> Run | SavedRun:
        """See `ortlab.api.open_run`."""
        from ortlab.history.run_files import StoredRun
        from ortlab.history.saved_run import SavedRun, find, run_name

        if isinstance(run, StoredRun):
            return cast("Run | SavedRun", run)
        own = {f"{each.name}": each for each in self.runs}
        name = run_name(run)
        return own[name] if name in own else SavedRun(find(run).folder)

    def compare_runs(self, *runs: str | int | StoredRun) -> RunComparison:
        """See `ortlab.api.compare_runs`."""
        from ortlab.history.comparison import RunComparison

        return RunComparison([self.open_run(run) for run in runs])


def _moves(runs: Iterable[R], model: nn.Module) -> R | None:
    """The one of `runs` that goes on and trains weights of `model`."""
    weights = {id(p) for p in model.parameters() if p.requires_grad}
    for run in runs:
        busy = None if run.over() else run.model
        if busy is not None and any(id(p) in weights for p in busy.parameters()):
            return run
    return None


def _left(name: str) -> str | None:
    """What to do where only a folder is left of the run called `name`; None without one."""
    from ortlab.history.saved_run import find

    try:
        find(name)
    except ValueError:
        return None
    return f"it is no longer in this kernel; ortlab.open_run({name!r}) shows what it left"


def _reference(data: Iterable[Any]) -> Callable[[], Any]:
    """Gives `data` back as long as somebody holds it; of a list its first batch, always."""
    if isinstance(data, list | tuple):
        kept = list(data[:1])
        return lambda: kept or None
    try:
        return weakref.ref(data)
    except TypeError:  # a generator's like, which is read once
        return lambda: None


def _not_taken(kept: Mapping[str, Any], chosen: FinetuneSettings, given: Mapping[str, Any]) -> str:
    """Which of a checkpoint's settings do not hold since it does not choose them; "" for none.

    Those that were `given` are the user's own.
    """
    found = {
        name: f"{name}={getattr(chosen, name)!r}, not {reprlib.repr(kept[name])}"
        for name, declared in chosen.declarations().items()
        if declared.here and name in kept and name not in given
        if kept[name] != getattr(chosen, name)
    }
    if not found:
        return ""
    told = "; ".join(found.values())
    return f"{told}: a checkpoint does not choose {', '.join(found)}; give what is to hold"


def _loss(
    loss: str | LossFunction | None, before: str | None
) -> tuple[LossFunction | None, str | None]:
    """The function that `loss` means and the name under which the settings keep it.

    Where none is given that of a checkpoint, called `before`, holds.
    """
    if loss is None and before is not None and before not in LOSSES:
        raise ValueError(
            f"the checkpoint's loss is a function called {before!r}, which a file does not hold; "
            "give it once more: loss=..."
        )
    loss = before if loss is None else loss
    if loss is None:
        return None, None
    if isinstance(loss, str):
        from ortlab.engines.batch import loss_function

        return loss_function(loss), loss
    if not callable(loss):
        raise ValueError(
            f"loss={loss!r} is no function; give loss(output, target) or one of {', '.join(LOSSES)}"
        )
    return loss, getattr(loss, "__name__", type(loss).__name__)


session: Final = Session()
"""The session of this process."""
