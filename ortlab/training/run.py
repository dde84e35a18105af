"""Handle of a run: a model that trains in the background, and the folder that it leaves."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Report, Stepper
from ortlab.engines.registry import engine_for, resolved
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import RunFolder, told_taken
from ortlab.history.run_result import RunResult
from ortlab.metrics.evaluation import Evaluation
from ortlab.metrics.rank_metrics import Rank, table, trained_under
from ortlab.metrics.recorder import Recorder, Status, Watched
from ortlab.metrics.timeline import RankTimeline, Timeline, predicted_bytes
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings import FinetuneSettings, ParallelSettings
from ortlab.settings.signatures import takes
from ortlab.training import changes as setting_changes
from ortlab.training import data_loading, training_state
from ortlab.training.callbacks import Callbacks, RunCallbacks
from ortlab.training.control import ChangeRequest, Control
from ortlab.training.failures import FailurePolicy
from ortlab.training.resume import Earlier
from ortlab.training.run_progress import RunProgress
from ortlab.training.run_record import RunRecord
from ortlab.training.run_view import RunView
from ortlab.training.run_worker import RunWork, RunWorker
from ortlab.training.schedule import check_schedule, length_note, total_steps
from ortlab.utils.errors import brief
from ortlab.utils.interrupts import until
from ortlab.utils.tables import Table

if TYPE_CHECKING:
    from torch import nn

_POLL_S = 0.1


class Run(StoredRun):
    """Model that trains in the background.

    Wait with ``await run`` in a notebook or `result` in a script; both raise the error that ended
    the run. When the run is over, however it ended, the model has the last good weights, the folder
    is complete, and the run itself references neither the model nor the data.

    Args:
        model: The model to train.
        prepare: Creates the stepper for given settings. The run's thread calls it, since an export
            takes time, and calls it again for settings that `apply` asks for.
        train: The training data; see `ortlab.training.data_loading.batches`.
        settings: Settings that the run starts with.
        evaluation: Evaluation data; None for a run without evaluations.
        name: Name of the run; None for the next free one.
        show: Shows the run when it starts.
        root: Folder of all runs; None for the default.
        begin: Checkpoint to resume from, of a run with any engine, in this process or an earlier
            one. `settings` may differ where `ortlab.training.training_state.place` allows it.
        warnings: Warnings about the start of the run, shown to the user.
        choice: Reason for the engine if it was chosen by "auto", shown while it is in use.
        notes: Lines on the start of the run, shown to the user.
        earlier: Run of `begin`, if this run includes its metrics.
        resumed: Where the run resumes from, in words; "" for a new run.
        names: The user's names of `ortlab.training.resume.NAMES`, by which `ortlab.resume` finds
            them again.
        kept: Returns the sizes in bytes of cached engines of earlier settings, by their names.
        metrics: The user's metrics, computed in each evaluation.
        callbacks: The user's callbacks, which are called with this run.
        faults: Treatment of failures. With ``waits``, a failure that need not end the run pauses it
            until `resume` or `stop`, and data that hangs pauses it until the data comes.
        fixed: Reasons why the user's optimizer and scheduler fix settings, by the setting's name.
        collate_fn: The user's function that makes a batch of a Dataset's samples.
        discard: Removes the run, which is over, if it was refused before its first step.

    Raises:
        ValueError: Before anything is written, if the data cannot be used, or for ``keep_best``
            without `evaluation`.
    """

    interactive = True

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[FinetuneSettings], Stepper],
        train: Any,
        *,
        settings: FinetuneSettings,
        evaluation: Any = None,
        name: str | None = None,
        show: Callable[[Watched], None] | None = None,
        root: Path | None = None,
        begin: Checkpoint | None = None,
        warnings: Sequence[str] = (),
        choice: str = "",
        notes: Sequence[str] = (),
        earlier: Earlier | None = None,
        resumed: str = "",
        names: Mapping[str, str] | None = None,
        kept: Callable[[], Mapping[str, int]] = dict,
        metrics: UserMetrics | None = None,
        callbacks: Callbacks | None = None,
        faults: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        fixed: Mapping[str, str] | None = None,
        collate_fn: data_loading.Collate | None = None,
        discard: Callable[[Run], object] = lambda _: None,
    ) -> None:
        data_loading.check_collate(collate_fn, train, evaluation)
        batches = data_loading.batches(train, settings, collate_fn=collate_fn)
        held_out = None
        if evaluation is not None:
            held_out = data_loading.batches(
                evaluation, settings, evaluation=True, collate_fn=collate_fn
            )
        place = None if begin is None else training_state.place(begin, batches, settings)
        self._evaluates = held_out is not None
        setting_changes.check_best(settings.checkpoint, evaluates=self._evaluates, metrics=metrics)
        called = RunCallbacks(callbacks, self)
        total = total_steps(batches, settings, place)
        check_schedule(total, settings.optim)
        length = length_note(batches, settings)
        self.settings = settings
        """Settings that the run began with."""
        self.fixed: Mapping[str, str] = setting_changes.fixed(batches, fixed)
        """Reasons why `apply` cannot change a setting to any value, by the setting's name."""
        self._model = weakref.ref(model)
        self._show = show
        self._interrupts = 0
        self._control = Control()
        self._progress = RunProgress(
            self._control,
            settings,
            total,
            auto=settings.model.engine if choice else "",
            choice=choice,
            last_step=place.step if place else 0,
        )
        super().__init__(RunFolder.create(name, root=root))
        self._record = RunRecord(
            self._folder,
            self._progress,
            model=model,
            names=names,
            earlier=earlier,
            resumed=resumed,
            metrics=metrics,
        )
        notes = [*filter(None, [told_taken(self.name, name)]), *notes, *filter(None, [length])]
        self._view = RunView(
            self._progress, self._record, warnings=warnings, notes=notes, kept=kept
        )
        told = [("warning", warning) for warning in warnings]
        told += [("note", note) for note in (*notes, choice) if note]
        refused = functools.partial(discard, self)
        work = RunWork(model, prepare, batches, held_out, faults, begin, metrics, called, refused)
        self._worker = RunWorker(work, self._progress, self._record, told=told)

    @property
    def title(self) -> str:
        """Title of the run's charts."""
        return self._view.title

    @property
    def recorder(self) -> Recorder:
        """Metrics and events of the run, and of the run that it continues."""
        return self._record.recorder

    @property
    def current_settings(self) -> FinetuneSettings:
        """Settings in effect."""
        return self._progress.settings

    @property
    def earlier_settings(self) -> list[FinetuneSettings]:
        """Settings before each change, the last one last; an undo removes its entry."""
        return self._progress.earlier_settings

    @property
    def error(self) -> BaseException | None:
        """Exception that ended the run; None without one."""
        return self._progress.error

    @property
    def ranks(self) -> Table[Rank]:
        """Ranks of the run: loss, speed, communication, memory, and what ZeRO saves."""
        return table(self.recorder, trained_under(self))

    @property
    def model(self) -> nn.Module | None:
        """Model in training; None once nothing else references it."""
        return self._model()

    @property
    def state(self) -> str:  # not State: jedi completes no attribute where a property is a Literal
        """State of the run."""
        return self._progress.state

    @property
    def step(self) -> int:
        """Optimizer steps done; after a loss of workers, those of the last checkpoint."""
        return self._progress.step

    @property
    def loss(self) -> float:
        """Loss of the last step; NaN before the first."""
        return self._record.loss

    @property
    def evaluations(self) -> list[Evaluation]:
        """Evaluations so far, the first one first."""
        return self._record.evaluations()

    @property
    def engine_asked(self) -> str:
        """Name of the engine that the user asked for, such as "auto"."""
        return self._progress.engine_asked

    @property
    def engine_used(self) -> str:
        """Name of the engine that executes the model; after a fallback, not the one asked for."""
        return self._progress.engine_used

    @property
    def resumed(self) -> str:
        """Description of the start, such as "continues run-3 from step 40"; "" for a new run."""
        return self._record.resumed

    @property
    def fallback_reason(self) -> str | None:
        """Reason of a fallback to another engine; None without one."""
        return self._progress.fallback_reason

    @property
    def report(self) -> Report | None:
        """Report of the engine so far; None while it is being prepared."""
        return self._progress.report

    @property
    def advice(self) -> Mapping[str, Any]:
        """Settings with which a paused run should continue: ``run.resume(**run.advice)``.

        Empty if no failure paused the run, or no settings would help.
        """
        held = self._control.held
        return {} if held is None else dict(held.advice)

    def __repr__(self) -> str:
        return repr(self._view)

    def start(self) -> Run:
        """Start the training thread, show the run, and return at once.

        If the run cannot be shown, it continues, and a warning says why.

        Returns:
            The run itself.

        Raises:
            RuntimeError: If the run was started before.
        """
        self._worker.start()
        if self._show is not None:
            try:
                self._show(self)
            # If this raised, the user would lose the handle of a run that keeps training.
            except Exception as error:  # noqa: BLE001
                told = f"the charts cannot be shown: {type(error).__name__}: {error}"
                self._record.event("warning", told)
                print(f"{self.name} continues, but {told}", flush=True)
        return self

    def pause(self) -> None:
        """Pause before the next step, without waiting for it."""
        self._control.pause()

    @brief
    @takes(FinetuneSettings.declarations().values(), changes=True)
    def resume(self, *, skip: bool = False, **changes: Any) -> None:
        """Resume a run that was paused, by the user or by a failure.

        Data that failed is read again from the end of the last step, in the same order. An
        evaluation that failed is made again. A callback that failed is called again at its next
        event.

        Args:
            skip: Skip the samples of the step in which the data failed, or the evaluation that
                failed; call a callback that failed no more. If the data was not finite, skip all
                such data from now on without another pause; otherwise only the same samples are
                skipped in later epochs.
            **changes: Settings to change first, as in `apply`.

        Raises:
            ValueError: If there is nothing to skip, and as in `apply`. The run stays paused.
        """
        held = self._control.held
        if skip and not (held is not None and held.skips):
            raise ValueError(
                "skip=True skips samples of a Dataset that could not be read, data that is not "
                "finite, an evaluation or a callback that failed, but none of these paused "
                f"{self.name}; use run.resume()"
            )
        if changes:
            self.apply(**changes)
        self._control.resume(skip=skip)

    def stop(self) -> None:
        """Stop the run after the step in flight, also while it is paused, without waiting for it.

        A read of data that hangs is abandoned after a second.
        """
        self._worker.stop()

    def checkpoint(self, path: str | Path | None = None) -> Path:
        """Save the run's exact state to a file.

        The state is taken after the step in flight, or at once while the run is paused. The call
        waits for that; the run continues as soon as the state is copied. After the end of a run, it
        is the final state. ``ortlab.finetune(..., resume_from=path)`` resumes from the file.

        Args:
            path: The file; None for one in the run's folder.

        Returns:
            The path of the file.

        Raises:
            RuntimeError: If the file cannot be written, or the run failed before it began.
        """
        self._check_started()
        final = self._folder.checkpoint_path("final")
        try:
            taken = self._worker.checkpoint()
        except concurrent.futures.CancelledError:
            self._worker.over.wait()
            if (unsaved := self._record.unsaved) is not None:
                return unsaved.save(final if path is None else path)
            if not final.exists():
                raise RuntimeError(
                    f"{self.name} has no checkpoint: it {self.state} at step {self.step}"
                ) from None
            return final if path is None else Checkpoint.load(final).save(path)
        if path is None:
            path = self._record.checkpoints.place(f"step-{taken.position.step}", taken)
        return taken.save(path)

    def timeline(self) -> Timeline:
        """Record the next step on all ranks: when each computes, communicates and waits.

        The call waits for the step, which torch's profiler makes slower; training is not changed.
        ``t = run.timeline()`` shows the ranks one below the other, with the bytes that each has
        sent; ``t.save("trace.json")`` writes all operators for ui.perfetto.dev.

        Returns:
            The timelines of the ranks.

        Raises:
            ValueError: If the run trains in one process, or no step follows: it is paused or over.
        """
        self._check_started()
        trainer = self._progress.trainer
        stepper: Any = None if trainer is None else trainer.stepper
        if trainer is None or self.over():
            raise ValueError(f"{self.name} takes no step: it is {self.state}")
        if not hasattr(stepper, "record"):
            raise ValueError(
                f"{self.name} trains in one process, and a timeline is of several ranks; choose "
                "workers=2 or more, or see a step in one process with %ort profile"
            )
        if self._worker.thread is threading.current_thread():
            raise ValueError("a callback cannot wait for the next step; call it in another thread")
        asked: concurrent.futures.Future[list[RankTimeline]] = stepper.record()
        while not concurrent.futures.wait([asked], _POLL_S).done:
            if self.over() or trainer.stepper is not stepper or self._control.waiting:
                raise ValueError(f"{self.name} takes no step: it is {self.state}")
        sent = _predicted_bytes(self.model, self.current_settings.parallel)
        return Timeline(asked.result(), predicted_bytes=sent)

    @brief
    @takes(FinetuneSettings.declarations().values(), changes=True)
    def apply(self, **changes: Any) -> ChangeRequest:
        """Change settings from the next step on, without waiting for it.

        The weights, the optimizer's state, the order of the data and the random states stay.
        Learning rate, schedule, batch size, accumulation, clipping and weight decay are free to
        change. Engine, precision, kernels and ORT's options need a new stepper; if that or its
        first step fails, the run continues with the previous settings. An event of the recorder
        reports the change and its cost, or the reason of the failure. The epoch continues at the
        next sample, and evaluations use the new batch size too. The schedule continues at the same
        step; batch size and accumulation determine the total number of steps.

        Args:
            **changes: New values of settings.

        Returns:
            Future of the outcome: applied after which step and at which cost, refused and why, or
            dropped because the run ended first. ``run.apply(learning_rate=1e-4).result()`` waits
            for it.

        Raises:
            ValueError: If a setting is unknown or its value is invalid, if the engine does not
                support it here, if it is `fixed` (seed, optimizer, loss, device, and the batch size
                if a loader makes its own batches), or if the run is over.
        """
        if self.over():
            raise ValueError(f"{self.name} is over ({self.state}): its settings cannot be changed")
        asked = self.current_settings.replace(**changes)
        wanted, choice = resolved(asked)
        changes = {name: wanted[name] for name in wanted.canonical(changes)}
        setting_changes.check_change(self.current_settings, wanted, self.fixed)
        setting_changes.check_best(
            wanted.checkpoint, evaluates=self._evaluates, metrics=self._record.metrics
        )
        engine_for(wanted)
        if choice:
            self._progress.auto, self._progress.choice = wanted.model.engine, choice
        return self._control.apply(changes)

    @brief
    def undo(self) -> ChangeRequest:
        """Undo the last change of settings; called again, undo the one before it.

        Returns:
            Future of the outcome, as of `apply`.

        Raises:
            ValueError: If nothing was changed, and as in `apply`.
        """
        if not self.earlier_settings:
            raise ValueError(f"{self.name} has the settings that it started with: nothing to undo")
        before, now = self.earlier_settings[-1].as_dict(), self.current_settings.as_dict()
        return self.apply(**{name: before[name] for name in now if now[name] != before[name]})

    def over(self) -> bool:
        """Return whether the run has ended and its folder is complete."""
        return self._worker.over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Wait until the run is over.

        Args:
            timeout: Seconds to wait at most; None to wait without a limit.

        Returns:
            True if the run is over.
        """
        return self._worker.over.wait(timeout)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait until the run is over, and return its result.

        The first interrupt (Ctrl-C) prints that the run continues. The second one stops the run and
        raises KeyboardInterrupt when it has ended.

        Args:
            timeout: Seconds to wait at most; None to wait without a limit.

        Returns:
            The result.

        Raises:
            TimeoutError: If the run is not over in time.
            BaseException: The error that ended the run, or that paused it.
        """
        self._check_started()
        if threading.current_thread() is self._worker.thread:
            raise RuntimeError(f"{self.name} cannot wait for itself; a callback uses run.so_far()")
        while True:
            try:
                if not self._control.settled.wait(timeout):
                    raise TimeoutError(f"{self.name} is {self.state} after {timeout:g} s")
                if (found := self._outcome()) is not None:
                    return found
            except KeyboardInterrupt:
                if self.over():
                    raise
                self._interrupted("interrupt again to stop it")
                if self._control.stopping:
                    self._worker.over.wait()
                    raise

    def __await__(self) -> Generator[Any, None, RunResult]:
        """Wait until the run is over, with the buttons alive, and return its result.

        The first interrupt ends the wait and prints that the run continues; an interrupt of another
        wait stops the run. A wait that is canceled otherwise, by a timeout for example, prints and
        stops nothing.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> RunResult:
        self._check_started()
        stops = f"interrupt that wait, or use run.stop() or %ort stop {self.name}, to stop it"
        hint = f"await it again to wait for it; {stops}"
        while True:
            await until(self._control.settled, lambda: self._interrupted(hint))
            if (found := self._outcome()) is not None:
                return found

    def _check_started(self) -> None:
        if self._worker.thread is None:
            raise RuntimeError(f"{self.name} was not started: call run.start() first")

    def _interrupted(self, hint: str) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            print(f"{self.name} is still {self.state}, at step {self.step}: {hint}", flush=True)
            return
        self.stop()
        print(f"{self.name} stops after the step in flight", flush=True)

    def _outcome(self) -> RunResult | None:
        """Return the result that a wait ends with; None if the run was resumed meanwhile."""
        if (held := self._control.held) is not None:
            raise self._view.pause_error(held)
        if not self._control.settled.is_set():
            return None
        self._worker.over.wait()
        if self.error is not None:
            raise self.error
        assert self._progress.result is not None
        return self._progress.result

    def so_far(self) -> RunResult:
        """Return the result up to now, whose ``state`` is the current one."""
        return self._progress.result or self._record.summary(self._progress.state)

    def status(self) -> Status:
        """Return the current status. See `ortlab.metrics.recorder.Watched.status`."""
        return self._view.status(over=self.over())


def _predicted_bytes(model: nn.Module | None, parallel: ParallelSettings) -> float | None:
    """Return the bytes that a rank sends in a step; None if the ranks share more than the data."""
    shared = parallel.tensor_parallel * parallel.pipeline_stages > 1
    if model is None or shared or parallel.reduction != "mean":
        return None
    mixed = parallel.param_dtype == "bf16"  # its gradients are reduced in float32
    return predicted_bytes(
        sum(p.numel() * (2 if mixed else p.element_size()) for p in model.parameters()),
        sum(
            p.numel() * (4 if mixed else p.element_size())
            for p in model.parameters()
            if p.requires_grad
        ),
        stage=parallel.zero_stage,
        workers=parallel.workers,
    )
