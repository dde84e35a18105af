"""Threads of a run: the one that trains, and those that watch over data and the end."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines import base
from ortlab.engines.base import Stepper, StepperLost
from ortlab.engines.torch.stepper import training_device
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, memory_advice
from ortlab.training.callbacks import RunCallbacks, called
from ortlab.training.control import Abandoned, PauseReason
from ortlab.training.failures import FailurePolicy
from ortlab.training.run_progress import SLOW_READ_S, RunProgress
from ortlab.training.run_record import RunRecord
from ortlab.training.trainer import Trainer
from ortlab.utils import at_exit
from ortlab.utils.errors import forget_locals, is_refusal, message, shorten, users_line
from ortlab.utils.interrupts import end_in_order, ends_already
from ortlab.utils.threads import Thread, trim

if TYPE_CHECKING:
    from torch import nn

_LAST_WAIT_S = 30.0  # an export cannot be stopped, but Python must end
_READ_WAIT_S = 1.0  # wait for a read of data once the run is to stop
_LATE_READ_S = 30.0  # then a checkpoint is saved: a user who gives up ends the kernel
_HANGING_READ_S = 300.0  # then the run is paused until the data comes


@dataclasses.dataclass
class RunWork:
    """Model, data and stepper factory of a run, released when it ends."""

    model: nn.Module
    prepare: Callable[[FinetuneSettings], Stepper]
    train: data_loading.Batches
    evaluation: data_loading.Batches | None
    faults: FailurePolicy
    begin: Checkpoint | None = None
    metrics: UserMetrics | None = None
    callbacks: RunCallbacks | None = None
    refused: Callable[[], object] = lambda: None
    heard: Stepper | None = None


class RunWorker:
    """Trains a run in a thread of its own, and ends it in order, whatever happens.

    Args:
        work: Model and data of the run.
        progress: Progress of the run, which the worker updates.
        record: Record of the run, which the worker writes.
        told: Kind and text of events about the start of the run, such as its warnings.
    """

    def __init__(
        self,
        work: RunWork,
        progress: RunProgress,
        record: RunRecord,
        *,
        told: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.thread: threading.Thread | None = None
        """Training thread; None before the start."""
        self.over = threading.Event()
        """Set when the run has ended and its folder is complete."""
        self._name = record.folder.name
        self._work: RunWork | None = work
        self._progress = progress
        self._record = record
        self._control = progress.control
        self._told = tuple(told)
        self._earlier_s = (0.0, 0.0)  # export and self-check of the run's earlier engines
        self._kept_state = False
        self._watching: threading.Thread | None = None
        self._trained = threading.Event()
        self._stopping: threading.Thread | None = None
        self._stopping_begins = threading.RLock()  # a thread cannot be joined before it starts

    def start(self) -> None:
        """Start the training thread.

        Raises:
            RuntimeError: If it was started before.
        """
        if self.thread is not None:
            raise RuntimeError(
                f"{self._name} was already started; call finetune again for a new run"
            )
        context = contextvars.copy_context()  # the thread prints into the cell that started it
        earlier = self._record.earlier
        self._control.began = time.perf_counter() - (earlier.time_s if earlier else 0)
        self.thread = Thread(context.run, self._drive, name=f"ortlab-{self._name}")
        at_exit.register(self._end_with_python)
        end_in_order()
        self.thread.start()

    def stop(self) -> None:
        """Ask the run to end after the step in flight, and leave data that hangs after a second."""
        self._control.stop()
        with self._stopping_begins:
            if self._stopping is None and self.thread is not None and not self._trained.is_set():
                self._stopping = Thread(self._see_to_the_end, name=f"ortlab-stop-{self._name}")
                self._stopping.start()

    def checkpoint(self) -> Checkpoint:
        """Return the state after the step in flight; in a callback, that after the last step.

        Raises:
            concurrent.futures.CancelledError: If the run ends before.
        """
        trainer = self._progress.trainer
        if trainer is not None and threading.current_thread() is self.thread:
            return trainer.checkpoint()
        return self._control.checkpoint().result()

    # ---- training ------------------------------------------------------------------------------

    def _drive(self) -> None:
        """Run the training thread."""
        try:
            watching = Thread(self._watch_data, name=f"ortlab-data-{self._name}")
            watching.start()
            self._watching = watching
            self._train()
        except BaseException as error:  # noqa: BLE001 - see `_end`
            if self._control.abandoned:
                return  # the thread that abandoned it ends the run
            self._fail(error)
        with contextlib.suppress(Abandoned):  # left in a callback: another thread ends the run
            self._end()

    def _train(self) -> None:
        work, progress = self._work, self._progress
        assert work is not None
        self._record.begin()
        base.progress.set(self._tell)
        self._record.event("state", "starting")
        self._foretell(work)
        trainer = progress.trainer = self._trainer(work)
        work.begin = None
        progress.stage = "running"
        progress.doing = "evaluating before the first step" if work.evaluation else "first step"
        self._record.event("state", "running")
        self._tell_of_the_start()
        elsewhere = progress.settings.parallel.elsewhere
        for number, _ in enumerate(trainer.steps()):
            if number == 0 and elsewhere:
                took_s = self._control.elapsed_s()
                told = f"{took_s:.1f} s from the start to the end of the first step"
                self._record.event("note", told)
            progress.total = trainer.total
            progress.use(trainer.settings)
            self._hear(trainer.stepper)
        self._hear(trainer.stepper)

    def _trainer(self, work: RunWork) -> Trainer:
        record, settings = self._record, self._progress.settings
        stepper = self._prepare(settings)
        earlier = record.earlier
        return Trainer(
            stepper,
            work.train,
            settings,
            control=self._control,
            recorder=record.recorder,
            evaluation=work.evaluation,
            meter=record.meter,
            begin=work.begin,
            prepare=self._prepare,
            keep=record.keep,
            keep_best=record.checkpoints.keep_best,
            best=earlier.carry_best(record.folder) if earlier else None,
            metrics=work.metrics,
            callbacks=work.callbacks,
            written=lambda: record.checkpoints.written,
            keep_failure=record.keep_failure,
            faults=work.faults,
        )

    def _foretell(self, work: RunWork) -> None:
        """Warn before the first step if it will not fit into memory."""
        settings = self._progress.settings
        if settings.parallel.elsewhere and work.faults.far():
            return
        device = training_device(settings.parallel.device).type
        peak_bytes = work.faults.peak_bytes
        foretold = memory_advice.foretold(work.model, settings, device, peak_bytes)
        self._progress.foretold = foretold
        if foretold is not None:
            self._record.event("warning", foretold)

    def _tell_of_the_start(self) -> None:
        """Record where the run starts from."""
        record, progress = self._record, self._progress
        for kind, text in (*self._told, *(record.earlier.told if record.earlier else ())):
            record.event(kind, text)
        if record.earlier is None and progress.step:
            told = record.resumed or f"resumed from a checkpoint at step {progress.step}"
            record.event("note", told)

    def _prepare(self, settings: FinetuneSettings) -> Stepper:
        assert self._work is not None
        return self._work.prepare(settings)

    def _tell(self, line: str) -> None:
        self._progress.doing = line
        self._record.event("note", line)

    def _hear(self, stepper: Stepper) -> None:
        """Record what the engine reports for the first time."""
        assert self._work is not None
        report, known = stepper.report(), self._progress.report
        if stepper is not self._work.heard:  # after a change, a stepper reports only on itself
            self._work.heard = stepper
            if known is not None:
                self._earlier_s = (known.export_s, known.check_s)
                known = None
        export_s, check_s = self._earlier_s
        report = dataclasses.replace(
            report, export_s=report.export_s + export_s, check_s=report.check_s + check_s
        )
        self._progress.report = report
        if known is not None and known == report:
            return
        for note in report.notes[len(known.notes) if known else 0 :]:
            self._record.event("note", note)
        if report.fallback_reason not in (None, known and known.fallback_reason):
            told = f"fallback to {report.engine_used}: {report.fallback_reason}"
            self._record.event("warning", told)

    # ---- data that does not come ---------------------------------------------------------------

    def _watch_data(self) -> None:
        """Save a checkpoint when data or a callback is late, and pause the run when it hangs."""
        kept = told = held = None  # starts of the reads for which that was done
        while not self._trained.wait(SLOW_READ_S / 2):
            since, work, trainer = self._control.reading_since, self._work, self._progress.trainer
            if since is None or work is None or trainer is None or self._kept_state:
                continue
            waited_s = time.perf_counter() - since
            if waited_s > _LATE_READ_S and kept != since:
                kept = since
                self._keep_in_read(trainer, since)
            if waited_s > _HANGING_READ_S and held != since:
                error = self._hanging()
                if told != since:
                    told = since
                    notes = getattr(error, "__notes__", ())
                    self._record.event("warning", "; ".join((str(error), *notes)))
                ends = "data arrives" if self._control.calling is None else "callback returns"
                hint = f"it resumes when the {ends}, and run.resume() keeps waiting"
                what = f"{self._waited_for} hangs"
                hold = PauseReason(error, "after step {step}", hint, what, passes=True)
                if work.faults.waits and self._control.hold_in_read(hold, since):
                    held = since

    def _keep_in_read(self, trainer: Trainer, since: float) -> None:
        with self._control.kept_in_read(since) as stays:
            if not stays:
                return
            try:
                trainer.keep_in_read()
            # A user's hook, for example: it may fail here although it does not fail in training.
            except Exception as error:  # noqa: BLE001
                self._record.event("warning", f"no checkpoint while the data hangs: {error}")

    def _hanging(self) -> Exception:
        """Return an error that names the data or the callback that hangs, and where it does."""
        frames = list(self._frames())
        lacking = "arrived" if self._control.calling is None else "returned"
        told = f"{self._progress.reading} has not {lacking} for {_HANGING_READ_S:.0f} s"
        error = RuntimeError(told)
        if (place := data_loading.being_read(frames)) is not None:
            error.add_note(f"reading {place}")
        if (line := users_line(frames)) is not None:
            error.add_note(f"at {line}")
        return error

    @property
    def _waited_for(self) -> str:
        calling = self._control.calling
        return "the data" if calling is None else f"the callback {calling}"

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the training thread, the innermost first."""
        number = self.thread.ident if self.thread else None
        frame = None if number is None else sys._current_frames().get(number)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _see_to_the_end(self) -> None:
        """Wait until a stopped run has trained; end it if its thread hangs in a read of data."""
        while not self._trained.wait(_READ_WAIT_S / 4):
            if self._control.abandon(_READ_WAIT_S):
                told = f"{self._waited_for} hangs: the run ends without waiting for it"
                self._record.event("warning", told)
                self._end()
                return

    # ---- the end -------------------------------------------------------------------------------

    def _end(self) -> None:
        """Save, summarize and release the run. A part that fails does not skip the next ones."""
        if not self._kept_state:
            self._kept_state = True
            self._guarded(self._keep_state)
        self._call_back_at_the_end()
        self._trained.set()
        if self._watching is not None:
            self._watching.join()
        self._guarded(self._record.conclude)
        self._guarded(self._record.release)
        self._guarded(self._forget_refused)
        self._control.close()
        if self._progress.error is not None:
            forget_locals(self._progress.error)
        self._progress.release()
        self._work = None
        trim(collect=False)
        self._progress.stage = self._progress.ended
        with self._stopping_begins:
            stopping = self._stopping
        if stopping is not None and stopping is not threading.current_thread():
            stopping.join()
        at_exit.unregister(self._end_with_python)
        if (trouble := self._record.pending.trouble) is not None:
            told = "it is tried again until there is room, and run.checkpoint(path) saves elsewhere"
            with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
                print(f"{self._name} is {self._progress.ended}, but {trouble}: {told}", flush=True)
        self.over.set()

    def _forget_refused(self) -> None:
        """Remove the run if its settings, model or data were refused before the first step."""
        work, error = self._work, self._progress.error
        begun = self._progress.step > 0 or self._record.earlier is not None
        if work is not None and error is not None and not begun and is_refusal(error):
            work.refused()

    def _guarded(self, part: Callable[[], object]) -> None:
        """Store what a part of the end raises, such as a full disk, as the outcome of the run."""
        try:
            part()
        # SystemExit in the user's code, for example: it is raised where the run is awaited.
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _call_back_at_the_end(self) -> None:
        """Call the callbacks for the end, once the final checkpoint is there.

        Raises:
            Abandoned: In a thread that was left in a callback.
        """
        work, control = self._work, self._control
        if work is None or work.callbacks is None:
            return
        self._progress.result = self._record.summary(self._progress.ended)
        events = ("on_checkpoint", "on_run_end") if self._progress.trainer else ("on_run_end",)
        for event in events:
            for callback in work.callbacks.having(event):
                if control.abandoned and control.calling is not None:
                    return  # a callback that hangs would hang again
                name = called(callback, event)
                around = (
                    contextlib.nullcontext() if control.abandoned else control.calling_back(name)
                )
                try:
                    with around:
                        work.callbacks.call(callback, event)
                except Abandoned:
                    raise
                except BaseException as error:  # noqa: BLE001 - a callback may raise anything
                    told = f"the callback {name} raised {type(error).__name__}: {message(error)}"
                    self._record.event("warning", told)
                    print(f"{self._name} is {self._progress.ended}, but {told}", flush=True)

    def _keep_state(self) -> None:
        record, trainer = self._record, self._progress.trainer
        if trainer is None:
            return
        try:
            state = trainer.state()
        except StepperLost as error:
            record.checkpoints.close()
            if (last := record.checkpoints.newest) is not None:
                error.add_note(f"resume_from={str(last)!r} continues from its last checkpoint")
            raise
        self._hear(trainer.stepper)
        trainer.stepper.close()
        record.checkpoints.close()
        record.save_final(state)

    def _fail(self, error: BaseException) -> None:
        first = self._progress.error
        if first is None:
            self._progress.error = error
            shorten(error)
        else:
            first.add_note(f"the run's folder is incomplete too: {error}")

    def _end_with_python(self) -> None:
        """End the run before Python ends, so that its thread is not cut off in a write."""
        ends_already()
        self.stop()
        self.over.wait(_LAST_WAIT_S)
