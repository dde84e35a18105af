"""Start of a run: choose its settings, wrap its model for each engine, create the `Run`."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn

from ortlab.checkpoint.checkpoint import Checkpoint, NotSaved
from ortlab.engines import wrapped_models
from ortlab.engines.base import LossFunction, Stepper, tell
from ortlab.engines.losses import loss_function
from ortlab.engines.nonfinite import Cause, first_bad
from ortlab.engines.own_optimizer import OwnOptim
from ortlab.engines.registry import engine as engine_called
from ortlab.engines.registry import engine_for, resolved, succeed
from ortlab.engines.single_process import OneProcess
from ortlab.engines.torch.user_optimizer import OptimRequest
from ortlab.metrics.evaluation import goal
from ortlab.metrics.user_metrics import Metrics, UserMetrics
from ortlab.settings import LOSSES, OWN, EngineSettings, FinetuneSettings, is_own
from ortlab.training import initial_weights, settings_preview
from ortlab.training.callbacks import Callbacks
from ortlab.training.data_loading import Collate, of_samples, unevenly
from ortlab.training.failures import FailurePolicy
from ortlab.training.resume import Beginning, Earlier, chosen_by_auto, origin
from ortlab.training.run import Run
from ortlab.training.training_state import check_state

if TYPE_CHECKING:
    from ortlab.graph.memory import MemoryPlan
    from ortlab.metrics.recorder import Watched
    from ortlab.training.run_registry import RunRegistry


class RemoteStepper(Stepper, Protocol):
    """A stepper that trains in worker processes."""

    def first_bad(self, micro_batches: Sequence[Any], settings: FinetuneSettings) -> Cause | None:
        """Return the first layer whose value is not finite, found on the workers."""
        ...


@dataclass(frozen=True)
class RunRequest:
    """Arguments of one call that starts a run.

    Attributes:
        model: The model to train, wrapped or not.
        train: Training data.
        eval_dataset: Evaluation data; None for none.
        loss: Loss function or its name; None where the model returns its own loss.
        metrics: The user's metrics; None for none.
        callbacks: The user's callbacks; None for none.
        optimizer: Name of an optimizer, or the user's, its class or factory; None for that of the
            settings.
        lr_scheduler: The user's scheduler, its class or factory; None for that of the settings.
        collate_fn: The user's function that makes a batch of samples; None for ortlab's.
        begin: Checkpoint to resume from; None to start from the model's current weights.
        earlier: The run that this one continues, with its metrics; None for a new run.
        hold: Whether a run that fails waits for the user; None for the session's default.
        fresh: Whether to start from the weights from before the model's first run.
        name: Name of the run; None for the next run-N.
        settings: Settings that the user gave by name.
    """

    model: nn.Module
    train: Iterable[Any]
    eval_dataset: Iterable[Any] | None = None
    loss: str | LossFunction | None = None
    metrics: Metrics | None = None
    callbacks: Callbacks | None = None
    optimizer: Any = None
    lr_scheduler: Any = None
    collate_fn: Collate | None = None
    begin: Beginning | Checkpoint | None = None
    earlier: Earlier | None = None
    hold: bool | None = None
    fresh: bool = False
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Checkpoint to resume from."""
        return self.begin.checkpoint if isinstance(self.begin, Beginning) else self.begin

    def names(self, namespace: Mapping[str, Any]) -> dict[str, str]:
        """Return the names that the user has for the model, the data and the rest of a run.

        Args:
            namespace: The user's variables.

        Returns:
            The names by `ortlab.training.resume.NAMES`, where there is one. A loss function without
            a variable has its own name; a loss given by name has none here, because the settings
            record it.
        """
        values = {
            "model": self.model,
            "train": self.train,
            "eval_dataset": self.eval_dataset,
            "loss": self.loss,
            "metrics": self.metrics,
            "callbacks": self.callbacks,
            "optimizer": None if isinstance(self.optimizer, str) else self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "collate_fn": self.collate_fn,
        }
        names = {id(v): n for n, v in reversed(list(namespace.items())) if n[:1] != "_"}
        found = {each: names.get(id(value)) for each, value in values.items() if value is not None}
        if callable(self.loss) and found["loss"] is None:
            found["loss"] = getattr(self.loss, "__name__", None)
        elif not callable(self.loss):
            found.pop("loss", None)
        return {each: name for each, name in found.items() if name is not None}


@dataclass(frozen=True)
class RunServices:
    """Services of the session that a run uses.

    Attributes:
        remote: Return a stepper of the workers for a model, a loss, settings, a run's name, and the
            user's optimizer and scheduler.
        check_workers: Raise where a model, a loss, and the user's optimizer and scheduler cannot be
            sent to workers, or the model not be divided among them as settings say.
        plan_for: Return the memory plan of a model or a run under settings.
        remote_hosts: Return whether workers may be on other machines.
        show: Show the run to every viewer.
        names: Return the user's variables.
        waits: Whether a run that fails waits for the user by default.
    """

    remote: Callable[
        [nn.Module, LossFunction | None, FinetuneSettings, str, OptimRequest | None], RemoteStepper
    ]
    check_workers: Callable[
        [nn.Module, LossFunction | None, FinetuneSettings, OptimRequest | None], None
    ]
    plan_for: Callable[[nn.Module | Run, FinetuneSettings], tuple[MemoryPlan, EngineSettings]]
    remote_hosts: Callable[[], bool]
    show: Callable[[Watched], None]
    names: Callable[[], Mapping[str, Any]]
    waits: bool


@dataclass(frozen=True)
class ChosenSettings:
    """Settings of a new run, with what follows from them.

    Attributes:
        settings: The settings, which name an engine.
        loss: Loss function that they mean.
        warnings: Warnings for the user.
        choice: Reason for the engine if "auto" was asked for; "" if it was named.
        optim: The user's optimizer and scheduler; None for those of the settings.
    """

    settings: FinetuneSettings
    loss: LossFunction | None
    warnings: list[str]
    choice: str = ""
    optim: OptimRequest | None = None


class RunModel:
    """The model of one run: the user's module and one wrapper per engine.

    The run holds it while it trains and releases it at the end. Wrappers stay alive until then, so
    a return to an engine exports nothing again.
    """

    def __init__(
        self,
        request: RunRequest,
        original: nn.Module,
        engine: str | None,
        chosen: ChosenSettings,
        services: RunServices,
        own: OwnOptim | None,
        *,
        initial: MutableMapping[nn.Module, Path] | None,
    ) -> None:
        self.run: Run | None = None
        """The run; set once it exists."""
        self.prepared: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        """Wrapper of each engine that the run has prepared."""
        self._module, self._data = request.model, request.train
        self._original = original
        self._loss = chosen.loss
        self._chosen = bool(chosen.choice)  # whether "auto" chose the engine
        self._optim, self._own = chosen.optim, own
        self._services = services
        self._initial = initial  # where to record the file of the weights; None to save none
        # A wrapped model keeps what its own engine has exported already.
        self._wrappers = {} if engine is None else {engine: self._module}

    def prepare(self, settings: FinetuneSettings) -> Stepper:
        """Return a stepper for `settings`: in this process, or of the workers."""
        self._save_initial()
        engine = engine_for(settings)
        if settings.parallel.elsewhere:
            if uneven := unevenly(self._data, settings):
                tell(uneven)
            assert self.run is not None
            remote = self._services.remote
            return remote(self._original, self._loss, settings, self.run.name, self._optim)
        if engine.name not in self._wrappers:
            plain = settings.model.replace(precision="fp32")  # the stepper chooses the precision
            self._wrappers[engine.name] = engine.wrap(self._original, plain)
            succeed(self._wrappers[engine.name], chosen=self._chosen)
        wrapper = self.prepared[engine.name] = self._wrappers[engine.name]
        if self._own is None:
            return engine.prepare(wrapper, self._loss, settings)
        processes = functools.partial(OneProcess, given=self._own)
        return engine.prepare(wrapper, self._loss, settings, processes=processes)

    def _save_initial(self) -> None:
        """Save the weights from before the first run of the model, in the run's own thread."""
        files, self._initial = self._initial, None
        if files is None or self.run is None:
            return
        try:
            files[self._original] = initial_weights.save(self._original, self.run.folder)
        except (NotSaved, ValueError) as error:
            tell(f"fresh=True (--fresh) will not be possible: {error}")

    def first_nonfinite(
        self, stepper: Stepper, micro_batches: Sequence[Any], settings: FinetuneSettings
    ) -> Cause | None:
        """Return the first layer whose value is not finite in a step; None where unknown."""
        if settings.parallel.elsewhere:
            return cast("RemoteStepper", stepper).first_bad(micro_batches, settings)
        return first_bad(self._original, self._loss, micro_batches, settings)

    def peak_bytes(self, settings: FinetuneSettings) -> int | None:
        """Return the predicted memory of a step under `settings`; None without a prediction."""
        target = self.run if self.prepared and self.run is not None else self._module
        size = settings.data.batch_size if of_samples(self._data) else None
        try:
            plan, of = self._services.plan_for(target, settings)
            return settings_preview.foreseen(plan, of, settings, batch=size)[0]
        except (ValueError, MemoryError):  # no graph yet, or none that predicts it
            return None


class RunStarter:
    """Creates and starts the runs of a session.

    Args:
        wrapped: The wrapped models of the session.
        registry: Registry that new runs are added to.
        services: What the runs use of the session.
    """

    def __init__(
        self,
        wrapped: wrapped_models.WrappedModels,
        registry: RunRegistry,
        services: RunServices,
    ) -> None:
        self._wrapped = wrapped
        self._registry = registry
        self._services = services

    def start(self, request: RunRequest) -> Run:
        """Start a run and return it at once.

        Args:
            request: What to train, on what data, with which settings.

        Raises:
            ValueError: If settings, model, data or checkpoint do not fit, or another run trains
                the model.
        """
        module = wrapped_models.check_model("the first argument", request.model)
        entry = self._wrapped.entry(module)
        original = module if entry is None else entry.engine.unwrap(module)
        own = {} if entry is None else entry.settings.as_dict()
        chosen = choose_settings(request, own, self._registry.preferred(original))
        if entry is None and (reason := self._wrapped.unfit(module)) is not None:
            raise ValueError(f"cannot fine-tune this {type(module).__name__}: it {reason}")
        self._registry.check_free(original)
        past = initial_weights.trained_by(self._registry.folders(original))
        restored, notes = self._weights(request, original, past)
        engine_for(chosen.settings)
        if chosen.settings.parallel.elsewhere:
            self._services.check_workers(original, chosen.loss, chosen.settings, chosen.optim)
        chosen, optim = with_own_optimizer(chosen, request, original)
        if request.checkpoint is not None:
            check_state(request.checkpoint, original, chosen.settings, optim)
        engine = None if entry is None else entry.settings.engine
        if entry is not None and engine == chosen.settings.model.engine:
            chosen = dataclasses.replace(chosen, choice=chosen.choice or entry.choice)
        initial = self._registry.initial if past is None else None
        model = RunModel(request, original, engine, chosen, self._services, optim, initial=initial)
        fixed = chosen.optim.fixed | optim.fixed if chosen.optim and optim else {}
        run = model.run = self._create(request, original, model, chosen, notes, fixed)
        if restored is not None:  # now that nothing else can be wrong
            original.load_state_dict(restored.model)
        self._registry.add(run, model=original, data=request.train, wrapped=model.prepared)
        run.start()
        return run

    def _weights(
        self, request: RunRequest, original: nn.Module, past: initial_weights.Trained | None
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return the weights to restore, and lines on the weights that the run starts from."""
        if request.fresh and request.begin is not None:
            raise ValueError("fresh and resume_from exclude each other; leave one of them out")
        if past is None or request.begin is not None:
            return None, []
        file = self._registry.initial.get(original)
        first = "" if file is None else file.parent.name
        if request.fresh:
            found = initial_weights.load(original, file)
            return found, [f"starts from the weights before {first}"]
        if not initial_weights.are_of(past, original):
            return None, []
        offer = "create the model again for a fresh start"
        if file is not None and file.exists():
            offer = f"fresh=True (--fresh) starts from the weights before {first}"
        return None, [f"continues from weights that {past}; {offer}"]

    def _create(
        self,
        request: RunRequest,
        original: nn.Module,
        model: RunModel,
        chosen: ChosenSettings,
        notes: Sequence[str],
        fixed: Mapping[str, str],
    ) -> Run:
        waits = self._services.waits if request.hold is None else request.hold
        return Run(
            original,
            model.prepare,
            request.train,
            # Of the weak references alone: the run keeps this function when it is over.
            kept=functools.partial(cached_bytes, model.prepared),
            faults=FailurePolicy(
                waits, model.first_nonfinite, model.peak_bytes, self._services.remote_hosts
            ),
            evaluation=request.eval_dataset,
            metrics=None if request.metrics is None else UserMetrics(request.metrics),
            callbacks=request.callbacks,
            settings=chosen.settings,
            name=request.name,
            show=self._services.show,
            begin=request.checkpoint,
            warnings=chosen.warnings,
            choice=chosen.choice,
            notes=notes,
            earlier=request.earlier,
            resumed="" if request.begin is None else origin(request.begin, request.earlier),
            names=request.names(self._services.names()),
            fixed=fixed,
            collate_fn=request.collate_fn,
            discard=self._registry.discard,
        )


def cached_bytes(prepared: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the memory of what engines keep for a return to earlier settings.

    Args:
        prepared: Wrapped models by engine.

    Returns:
        Bytes by engine and settings.
    """
    return {
        f"{name} {settings}": size
        for name, module in list(prepared.items())
        for settings, size in engine_called(name).kept(module).items()
    }


def choose_settings(
    request: RunRequest, own: Mapping[str, Any], preferred: Mapping[str, Any]
) -> ChosenSettings:
    """Return the settings of a new run.

    Those that the user gave take precedence, then those of the checkpoint or, for a new run, those
    that a search chose for the model, then those that the model was wrapped with.

    Args:
        request: The call that starts the run.
        own: Settings that the model was wrapped with; empty where it is not wrapped.
        preferred: Settings that a race or a search chose for the model.

    Raises:
        ValueError: If settings are wrong or exclude each other.
    """
    begin = request.begin
    base = dict(own)
    if begin is not None:
        # Another version may have written settings that no longer exist.
        known = FinetuneSettings.declarations()
        base |= {n: v for n, v in begin.settings.items() if n in known and not known[n].here}
    else:
        base |= preferred
    function, loss = loss_called(request.loss, base.get("loss"))
    given = FinetuneSettings.canonical(request.settings)
    for name in given.keys() & {"sampler", "batch_sampler", "shuffle", "num_workers"}:
        raise ValueError(
            f"{name} is an argument of a DataLoader; pass one as the data: "
            f"DataLoader(dataset, {name}=..., batch_size=16)"
        )
    optimizer = request.optimizer
    if isinstance(optimizer, str):
        given, optimizer = {**given, "optimizer": optimizer}, None
    optim = OptimRequest.of(optimizer, request.lr_scheduler, given, resumed=begin is not None)
    named = {} if optim is None else optim.names
    chosen = FinetuneSettings.of({**base, **given, "loss": loss, **named})
    for name, argument in (("optimizer", "optimizer"), ("lr_scheduler_type", "lr_scheduler")):
        if is_own(chosen[name]) and name not in named:
            raise ValueError(
                f"the {argument} is an object of yours, {chosen[name].removeprefix(OWN)}, which a "
                f"file cannot store; give it once more: {argument}=..."
            )
    warnings = [begin.damaged] if isinstance(begin, Beginning) and begin.damaged else []
    if begin is not None and (warning := _not_restored(begin.settings, chosen, given)):
        warnings.append(warning)
    chosen, choice = resolved(chosen)
    # A checkpoint has the name of the engine that was chosen.
    if isinstance(begin, Beginning) and "engine" not in given and (run := chosen_by_auto(begin)):
        choice = f"engine auto: {chosen.model.engine}, as in {run}"
    return ChosenSettings(chosen, function, warnings, choice, optim)


def with_own_optimizer(
    chosen: ChosenSettings, request: RunRequest, model: nn.Module
) -> tuple[ChosenSettings, OwnOptim | None]:
    """Build the user's optimizer and scheduler, and record their rate in the settings.

    Args:
        chosen: Settings of the run.
        request: The call that starts the run.
        model: The user's model.

    Returns:
        The settings, and optimizer and scheduler; None for those of the settings.

    Raises:
        ValueError: If they cannot train the model, or the scheduler needs evaluations.
    """
    if chosen.optim is None:
        return chosen, None
    own = chosen.optim.build(model, chosen.settings)
    if own.by_metric:
        _check_metric(own.scheduler, chosen.settings, request)
    recorded: dict[str, Any] = dict(own.names)
    if not own.named and request.begin is None:
        values = {"learning_rate": own.learning_rate, "weight_decay": own.weight_decay}
        recorded |= {name: value for name, value in values.items() if value is not None}
    return (
        dataclasses.replace(
            chosen,
            settings=chosen.settings.replace(**recorded),
            warnings=[*chosen.warnings, *own.warnings],
        ),
        own,
    )


def _check_metric(scheduler: Any, settings: FinetuneSettings, request: RunRequest) -> None:
    """Check that a scheduler that is stepped with a metric has one, and knows what is better."""
    name = type(scheduler).__name__
    if request.eval_dataset is None:
        raise ValueError(f"{name} is stepped with the metric of evaluations: pass eval_dataset")
    metrics = None if request.metrics is None else UserMetrics(request.metrics)
    wanted = goal(settings.checkpoint, metrics)
    mode = getattr(scheduler, "mode", wanted.way)
    if mode != wanted.way:
        raise ValueError(
            f"{name}(mode={mode!r}) is stepped with {wanted.name}, of which {wanted.way!r} is "
            f"better; create it with mode={wanted.way!r}, or change keep_best, whose metric it gets"
        )


def loss_called(
    loss: str | LossFunction | None, saved: str | None = None
) -> tuple[LossFunction | None, str | None]:
    """Return a loss function and the name that settings record it by.

    Args:
        loss: A function, a name of `ortlab.settings.LOSSES`, or None.
        saved: Name of the checkpoint's loss, used where `loss` is None.

    Returns:
        The function and its name; both None where the model returns its own loss.

    Raises:
        ValueError: If `loss` is neither, or the checkpoint's loss is a function, which no file
            stores.
    """
    if loss is None and saved is not None and saved not in LOSSES:
        raise ValueError(
            f"the checkpoint's loss is a function called {saved!r}, which a file cannot store; "
            "give it once more: loss=..."
        )
    loss = saved if loss is None else loss
    if loss is None:
        return None, None
    if isinstance(loss, str):
        return loss_function(loss), loss
    if not callable(loss):
        raise ValueError(
            f"loss={loss!r} is not a function; give loss(output, target) or one of "
            f"{', '.join(LOSSES)}"
        )
    return loss, getattr(loss, "__name__", type(loss).__name__)


def _not_restored(
    saved: Mapping[str, Any], chosen: FinetuneSettings, given: Mapping[str, Any]
) -> str:
    """Return a warning about settings of this session that differ from the checkpoint's."""
    found = {
        name: f"{name}={chosen[name]!r}, not {reprlib.repr(saved[name])}"
        for name, declared in chosen.declarations().items()
        if declared.here and name in saved and name not in given
        if saved[name] != chosen[name]
    }
    if not found:
        return ""
    differing = "; ".join(found.values())
    return f"{differing}: a checkpoint does not restore {', '.join(found)}; give the value you want"
