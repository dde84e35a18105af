"""Runs: a model in training in a thread of its own, and the folder that is left of it."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextvars
import dataclasses
import datetime
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Report, Stepper, StepperLost, progress
from ortlab.engines.registry import engine_for
from ortlab.engines.torch.stepper import training_device
from ortlab.history import sqlite_index
from ortlab.history.run_files import StoredRun
from ortlab.history.run_folder import RunFolder
from ortlab.metrics.rank_metrics import Rank, table, trained_under
from ortlab.metrics.recorder import INDEX, NAN, Event, Recorder, State, Status, Watched
from ortlab.settings import FinetuneSettings
from ortlab.training import data_loading, memory_advice, trainer
from ortlab.training.checkpoint_writer import CheckpointWriter
from ortlab.training.control import Control
from ortlab.training.failures import FailurePolicy, PauseReason, typed
from ortlab.training.resume import Earlier
from ortlab.training.trainer import Evaluation, best
from ortlab.utils.environment import environment
from ortlab.utils.errors import concise, forget_locals, message, shorten, users_line
from ortlab.utils.interrupts import end_in_order, ends_already, until
from ortlab.utils.process_memory import SAMPLER, Meter, memory
from ortlab.utils.tables import Table, rounded
from ortlab.utils.threads import Thread, trim

if TYPE_CHECKING:
    from torch import nn

_LAST_WAIT_S = 30.0  # an export cannot be stopped; Python must end nonetheless
_READ_WAIT_S = 1.0  # that a read of data is waited for once a run is to stop
_SLOW_READ_S = 2.0  # from then on it is told that data is waited for
_LATE_READ_S = 30.0  # then a checkpoint is kept: who gives it up ends the kernel
_HANGING_READ_S = 300.0  # then the run is held, until the data comes
_OVER: tuple[State, ...] = ("stopped", "finished", "failed")


@dataclasses.dataclass(frozen=True, repr=False)
class RunResult:
    """What a run gave. Numbers that are not known are NaN.

    ``before`` and ``after`` are the first and the last evaluation, ``best`` is the one with the
    lowest loss, that before training aside; None without evaluation data.
    Rates count the time of the steps alone; ``wall_s`` is everything, pauses included. The peak is
    that of the resident size, or on CUDA of torch's allocated bytes; of workers that of the one
    that took most. ``skipped_steps`` are those of ``steps`` whose gradients overflowed in fp16,
    ``loss_scale`` is the last one.
    """

    state: State
    steps: int
    wall_s: float
    final_loss: float = NAN
    before: Evaluation | None = None
    after: Evaluation | None = None
    best: Evaluation | None = None
    samples_per_s: float = NAN
    tokens_per_s: float = NAN
    peak_bytes: float = NAN
    export_s: float = 0.0
    check_s: float = 0.0
    skipped_steps: int = 0
    loss_scale: float = NAN

    def __str__(self) -> str:
        parts = [f"{self.state} after {self.steps} steps in {self.wall_s:.1f} s"]
        if not math.isnan(self.final_loss):
            parts.append(f"loss {self.final_loss:.4g}")
        if self.before is not None and self.after is not None:
            parts.append(f"held out before: {self.before}; after: {self.after}")
        if not math.isnan(self.samples_per_s):
            parts.append(f"{rounded(self.samples_per_s)} samples/s")
        if not math.isnan(self.peak_bytes):
            parts.append(f"peak {self.peak_bytes / 1024**2:.0f} MiB")
        if self.skipped_steps:
            parts.append(_skipped(self.skipped_steps, self.loss_scale))
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"<RunResult: {self}>"

    def as_dict(self) -> dict[str, Any]:
        """Name to value, as run.json holds it."""
        return dataclasses.asdict(self)


class Run(StoredRun):
    """A model in training, in the background.

    `prepare` makes the stepper for its settings, inside the run's thread, since exporting takes
    time, and others where `apply` asks for them. Wait with ``await run`` in a notebook or `result`
    in a script; both raise what the run raised. When it is over, however it ended, the model has
    the last good weights and the folder is complete. The run itself then holds neither model nor
    data.

    `kept` says what waits for a return to earlier settings, in bytes. `faults` says what becomes of
    errors that need not end it: with ``waits`` it is held, as in a pause, until `resume` or `stop`,
    and by data that hangs until that comes.

    With `begin` it goes on where that was taken, by another run of any engine, in this process or
    an earlier one; ``settings`` may differ in what `loop.place` does not check. `warnings` are of
    where it begins, for the user to see. `earlier` is that run, where this one has its numbers
    too. `names` are what model and data are called, by ``model``, ``train``, ``eval_data``
    and ``loss``: `ortlab.resume` finds them again by these.

    ValueError, before anything is written, for data that cannot be used (see `batching.batches`),
    and for ``keep_best`` without `evaluation`.
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
        earlier: Earlier | None = None,
        names: Mapping[str, str] | None = None,
        kept: Callable[[], Mapping[str, int]] = dict,
        faults: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
    ) -> None:
        batches = data_loading.batches(train, settings)
        held_out = None
        if evaluation is not None:
            held_out = data_loading.batches(evaluation, settings, evaluation=True)
        place = None if begin is None else trainer.place(begin, batches, settings)
        self._evaluates = held_out is not None
        self._check_best(settings)
        self._total = trainer.total_steps(batches, settings, place)
        trainer.check_schedule(self._total, settings)
        self.settings = settings
        """What the run began with."""
        self.current_settings = settings
        """What holds now."""
        self.earlier_settings: list[FinetuneSettings] = []
        """What held before each change, the last one last; an undo takes it away again."""
        self.fixed: Mapping[str, str] = trainer.fixed(batches)
        """The settings that `apply` cannot change, whatever the value, each with the reason."""
        self._work: _Work | None = _Work(model, prepare, batches, held_out, faults, begin)
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self._show = show
        self._kept = kept
        self._foretold: str | None = None
        self._stopping: threading.Thread | None = None
        self._stopping_begins = threading.RLock()  # and one that has not begun cannot be joined
        self._control = Control()
        self._state: State = "starting"
        self._report: Report | None = None
        self._earlier_s = (0.0, 0.0)
        self._doing = "preparing"
        self._step = place.step if place else 0
        self._interrupts = 0
        self._meter: Meter | None = None
        self._thread: threading.Thread | None = None
        self._watching: threading.Thread | None = None
        self._trained = threading.Event()
        self._over = threading.Event()
        self._result: RunResult | None = None
        self.error: BaseException | None = None
        """What the run raised."""
        super().__init__(RunFolder.create(name, root=root))
        self._folder.hold()
        self._created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._folder.write_json("settings", settings.as_dict())
        self._folder.write_json("environment", environment())
        self._parameters = sum(p.numel() for p in model.parameters())
        self._names, self._earlier, self._warnings = dict(names or {}), earlier, tuple(warnings)
        self._write_about(None)
        metrics = self._folder.metrics()
        if earlier is not None:
            metrics.write(earlier.rows, earlier.events)
        self.recorder = Recorder(sinks=[metrics], of_rank=lambda rank: [self._folder.metrics(rank)])
        """The numbers of the run, and those of what it goes on with."""
        if earlier is not None:
            self.recorder.restore(earlier.rows, earlier.events)
        self._keeping = CheckpointWriter(self._folder, first=self.recorder.flush, tell=self._event)

    @property
    def title(self) -> str:
        """What stands above the charts."""
        return f"{self.name}: {self._kind} on {self.engine_used}"

    @property
    def ranks(self) -> Table[Rank]:
        """How the ranks stand: loss, speed, communication, memory, and what ZeRO saved."""
        return table(self.recorder, trained_under(self))

    @property
    def model(self) -> nn.Module | None:
        """The model in training; None when nobody else holds it any more."""
        return self._model()

    @property
    def state(self) -> State:
        """Where the run is."""
        if self._state in _OVER:
            return self._state
        if self._control.stopping:
            return "stopping"
        held = self._control.held
        still = self._control.waiting or (held is not None and not held.passes)
        return "paused" if still else self._state

    @property
    def step(self) -> int:
        """Optimizer steps done; of a run that is held those of its last checkpoint."""
        course = self._work.course if self._work else None
        return self._step if course is None else course.step

    @property
    def engine_asked(self) -> str:
        """The engine that the settings name."""
        return self.current_settings.engine

    @property
    def engine_used(self) -> str:
        """The engine that executes the model; another than was asked for after a fallback."""
        return self._report.engine_used if self._report else self.engine_asked

    @property
    def fallback_reason(self) -> str | None:
        """Why another engine is used; None without a fallback."""
        return self._report.fallback_reason if self._report else None

    @property
    def report(self) -> Report | None:
        """What the engine has said so far; None while it is being prepared."""
        return self._report

    def __repr__(self) -> str:
        total = "" if self._total is None else f"/{self._total}"
        return f"<Run {self.name}: {self.state}, step {self.step}{total}, {self.engine_used}>"

    def start(self) -> Run:
        """Starts the training thread, shows the run, and returns at once.

        A viewer that fails is told of; the run goes on without it.
        """
        if self._thread is not None:
            raise RuntimeError(f"{self.name} was started already; finetune again makes a new run")
        context = contextvars.copy_context()  # what the thread prints stays with its own cell
        self._control.began = time.perf_counter() - (self._earlier.time_s if self._earlier else 0)
        self._thread = Thread(context.run, self._drive, name=f"ortlab-{self.name}")
        atexit.register(self._end_with_python)
        end_in_order()
        self._thread.start()
        if self._show is not None:
            try:
                self._show(self)
            # Raising would take the handle from the user while the training goes on.
            except Exception as error:  # noqa: BLE001
                told = f"the charts cannot be shown: {type(error).__name__}: {error}"
                self._event("warning", told)
                print(f"{self.name} goes on, but {told}", flush=True)
        return self

    def pause(self) -> None:
        """Pauses before the next step; not waited for."""
        self._control.pause()

    def resume(self, *, skip: bool = False, **changes: Any) -> None:
        """Goes on after a pause, or where it was held, with `changes` as in `apply`.

        After data has failed it is read on from the end of the last step, in the same order; with
        `skip` after the samples of the step that failed. An evaluation that has failed is made
        again, and with `skip` left out. ValueError where nothing that can be left out held the run,
        and as in `apply`; the run waits on then.
        """
        held = self._control.held
        if skip and not (held is not None and held.skips):
            raise ValueError(
                "skip=True leaves out samples of a Dataset that failed to be read, or an "
                f"evaluation that failed, and nothing of the kind holds {self.name}; run.resume() "
                "goes on"
            )
        if changes:
            self.apply(**changes)
        self._control.resume(skip=skip)

    @property
    def advice(self) -> Mapping[str, Any]:
        """The settings that a run which is held should go on with: ``run.resume(**run.advice)``.

        Empty where it is not held, or no settings would help.
        """
        held = self._control.held
        return {} if held is None else dict(held.advice)

    def stop(self) -> None:
        """Ends the run after the step in flight, from a pause too; not waited for.

        Data that hangs is left alone after a second; the run then ends without it.
        """
        self._control.stop()
        with self._stopping_begins:
            if self._stopping is None and self._thread is not None and not self._trained.is_set():
                self._stopping = Thread(self._see_to_the_end, name=f"ortlab-stop-{self.name}")
                self._stopping.start()

    def _see_to_the_end(self) -> None:
        """Waits until a run that is to stop has trained; ends it where its thread hangs in data."""
        while not self._trained.wait(_READ_WAIT_S / 4):
            if self._control.abandon(_READ_WAIT_S):
                self._event("warning", "the data hangs: the run ends without what it was to give")
                self._end()
                return

    def checkpoint(self, path: str | Path | None = None) -> Path:
        """Keeps the run's exact state in a file, and returns the file's path.

        Taken after the step in flight, which is waited for, or at once in a pause; the run goes on
        as soon as the state is copied. ``ortlab.finetune(..., resume_from=path)`` goes on from it.
        Of a run that is over it is what the run ended with. Without a `path` the file lies in the
        run's folder.

        RuntimeError where the disk does not take it, and for a run that failed before it began.
        """
        self._check_started()
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"{self.name} cannot wait for itself; ask from another thread")
        final = self._folder.checkpoint_path("final")
        try:
            taken = self._control.checkpoint().result()
        except concurrent.futures.CancelledError:
            self._over.wait()
            if not final.exists():
                raise RuntimeError(
                    f"{self.name} has no checkpoint: it {self.state} at step {self.step}"
                ) from None
            return final if path is None else Checkpoint.load(final).save(path)
        if path is None:
            path = self._keeping.place(f"step-{taken.position.step}", taken)
        return taken.save(path)

    def apply(self, **changes: Any) -> None:
        """Changes settings while the run trains, from the next step on; not waited for.

        Weights, the optimizer's state, the order of the data and the random states go on. Learning
        rate, schedule, batch size, accumulation, clipping and decay cost nothing; engine,
        precision, kernels and ORT's options have another stepper made, and where that or its first
        step fails, the run goes on with what it had. An event of the recorder says what was changed
        and its cost, or why not. The epoch goes on at the next sample, evaluations have the new
        batch size too. The schedule goes on at the same step; of how many, batch size and
        accumulation decide.

        ValueError for what is unknown or wrong, for what an engine cannot do here, for what is
        `fixed` (seed, optimizer, loss, device, and the batch size where a loader makes its own
        batches), and when the run is over.
        """
        if self.over():
            raise ValueError(f"{self.name} is over ({self.state}): nothing can be applied to it")
        wanted = self.current_settings.replace(**changes)
        trainer.check_change(self.current_settings, wanted, self.fixed)
        self._check_best(wanted)
        engine_for(wanted)
        self._control.apply(changes)

    def _check_best(self, settings: FinetuneSettings) -> None:
        if settings.keep_best and not self._evaluates:
            raise ValueError(
                f"keep_best={settings.keep_best!r} is of an evaluation, and the run has none; give "
                "eval_data, or leave keep_best out"
            )

    def undo(self) -> None:
        """Applies what held before the last change; once more, what held before that.

        ValueError as in `apply`, and where nothing was changed.
        """
        if not self.earlier_settings:
            raise ValueError(f"{self.name} has the settings that it began with: nothing to undo")
        before, now = self.earlier_settings[-1].as_dict(), self.current_settings.as_dict()
        self.apply(**{name: before[name] for name in now if now[name] != before[name]})

    def over(self) -> bool:
        """Whether the run has ended and its folder is complete."""
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Blocks until the run is over, at most `timeout` seconds; returns `over`."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> RunResult:
        """Blocks until the run is over, at most `timeout` seconds; raises what the run raised.

        The first interrupt (Ctrl-C) leaves the run going and says so, the second stops it and
        raises KeyboardInterrupt when it has ended.
        """
        self._check_started()
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
                    self._over.wait()
                    raise

    def __await__(self) -> Generator[Any, None, RunResult]:
        """Waits with the buttons alive; raises what the run raised.

        The first interrupt ends the wait, leaves the run going and says so; interrupting another
        wait stops the run. A wait that is cancelled otherwise (a timeout) says and stops nothing.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> RunResult:
        self._check_started()
        stops = f"interrupt that wait, run.stop() or %ort stop {self.name} to stop it"
        hint = f"await it again to wait; {stops}"
        while True:
            await until(self._control.settled, lambda: self._interrupted(hint))
            if (found := self._outcome()) is not None:
                return found

    def _check_started(self) -> None:
        if self._thread is None:
            raise RuntimeError(f"{self.name} was not started: run.start() first")

    def _interrupted(self, hint: str) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            print(f"{self.name} goes on, {self.state} at step {self.step}: {hint}", flush=True)
            return
        self.stop()
        print(f"{self.name} stops after the step in flight", flush=True)

    def _outcome(self) -> RunResult | None:
        """What a wait comes to; None where nothing holds the run any more, and it goes on."""
        if (held := self._control.held) is not None:
            raise self._hold_error(held)
        if not self._control.settled.is_set():
            return None
        self._over.wait()
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return self._result

    def _hold_error(self, held: PauseReason) -> Exception:
        """What holds the run, with what can be done about it."""
        where = held.where.format(step=self.step)
        told = f"{self.name} waits {where}: {held.hint}, run.stop() ends it"
        shorten(held.error)
        if told not in getattr(held.error, "__notes__", ()):
            held.error.add_note(told)
        return held.error

    def so_far(self) -> RunResult:
        """What the run has given up to now; ``state`` is the one that it is in."""
        return self._result or self._summary(self.state)

    def status(self) -> Status:
        """See `telemetry.Watched.status`."""
        return Status(
            state=self.state,
            step=self.step,
            total_steps=self._total,
            elapsed_s=self._result.wall_s if self._result else self._control.elapsed_s(),
            left_s=self._left_s(),
            badges=self._badges(),
            lines=self._lines(),
            error=self._told_error(),
            advice=typed(self.advice),
        )

    def _told_error(self) -> str | None:
        held = self._control.held
        if held is not None and held.what:
            return "\n".join(concise(self._hold_error(held)))
        return None if self.error is None else "\n".join(concise(self.error))

    def _left_s(self) -> float | None:
        if self._total is None or self.over() or self.recorder.count == 0:
            return None  # a run that was resumed is at a step before it has made one
        return (self._total - self.step) * self.recorder.mean("step_ms", 64) / 1e3

    def _badges(self) -> tuple[str, ...]:
        badges = []
        if self.fallback_reason is not None:
            badges.append(f"fallback to {self.engine_used}: {self.fallback_reason}")
        if (held := self._control.held) is not None:
            told = held.what or f"{held.error}; resume goes on from step {self.step}"
            badges.append(f"held: {told}")
        if self._foretold is not None and self.step == 0 and not self.over():
            badges.append(self._foretold)
        badges += filter(None, (*self._warnings, self._keeping.trouble, self.recorder.trouble))
        return tuple(badges)

    def _lines(self) -> tuple[str, ...]:
        lines = []
        if self.step == 0 and not self.over():
            lines.append(self._doing)
        since = self._control.reading_since
        waited_s = 0.0 if since is None else time.perf_counter() - since
        if waited_s > _SLOW_READ_S and not self.over():
            lines.append(f"waiting for {self._read_now()} since {waited_s:.0f} s; Stop ends it")
        evaluations = self._evaluations()
        if evaluations:
            before, after = evaluations[0], evaluations[-1]
            first = f" (before training: {before})" if after.step else ""
            lines.append(f"held out at step {after.step}: {after}{first}")
        if skipped := int(self.recorder.total("skipped")):
            lines.append(_skipped(skipped, _loss_scale(self.recorder)))
        if self._report is not None and self._report.export_s:
            lines.append(f"export to ORT {self._report.export_s:.2g} s")
        if self._report is not None and self._report.check_s:
            lines.append(f"self-check against eager {self._report.check_s:.2g} s")
        if self._report is not None:
            lines += self._report.remarks
        if not self.over() and (kept := self._kept()):
            told = ", ".join(f"{settings} ({memory(size)})" for settings, size in kept.items())
            lines.append(f"kept for a return: {told}")
        return tuple(lines)

    def _evaluations(self) -> list[Evaluation]:
        return [
            Evaluation(event.step, event.values["loss"], event.values["accuracy"])
            for event in self.recorder.events("eval")
        ]

    def _drive(self) -> None:
        """The training thread."""
        try:
            watching = Thread(self._watch_data, name=f"ortlab-data-{self.name}")
            watching.start()
            self._watching = watching
            self._train()
        except BaseException as error:  # noqa: BLE001 - see `_end`
            if self._control.abandoned:
                return  # who has abandoned it ends it
            self._fail(error)
        self._end()

    def _watch_data(self) -> None:
        """Beside training: where data does not come a checkpoint is kept, then the run is held."""
        kept = told = held = None  # since when the reads began for which that was done
        while not self._trained.wait(_SLOW_READ_S / 2):
            since, work = self._control.reading_since, self._work
            if since is None or work is None or work.course is None:
                continue
            waited_s = time.perf_counter() - since
            if waited_s > _LATE_READ_S and kept != since:
                kept = since
                self._keep_in_read(work.course, since)
            if waited_s > _HANGING_READ_S and held != since:
                error = self._hanging()
                if told != since:
                    told = since
                    notes = getattr(error, "__notes__", ())
                    self._event("warning", "; ".join((str(error), *notes)))
                hint = "when the data comes it goes on by itself, run.resume() waits on"
                hold = PauseReason(error, "after step {step}", hint, "the data hangs", passes=True)
                if work.faults.waits and self._control.hold_in_read(hold, since):
                    held = since

    def _keep_in_read(self, course: trainer.Trainer, since: float) -> None:
        with self._control.kept_in_read(since) as stays:
            if not stays:
                return
            try:
                course.keep_in_read()
            # A hook of the user's, for one: it may fail here, and not where the training does.
            except Exception as error:  # noqa: BLE001
                self._event("warning", f"no checkpoint while the data hangs: {error}")

    def _hanging(self) -> Exception:
        """What says that data does not come, and where it is waited for."""
        frames = list(self._frames())
        error = RuntimeError(f"{self._read_now()} has not come for {_HANGING_READ_S:.0f} s")
        if (place := data_loading.being_read(frames)) is not None:
            error.add_note(f"it reads {place}")
        if (line := users_line(frames)) is not None:
            error.add_note(f"it stands at {line}")
        return error

    def _read_now(self) -> str:
        """The data that the loop waits for, in words."""
        if self._control.reads_held_out:
            return f"the held-out data after step {self.step}"
        return f"the data of step {self.step + 1}"

    def _frames(self) -> Iterator[FrameType]:
        """What the training thread executes now, the innermost first."""
        number = self._thread.ident if self._thread else None
        frame = None if number is None else sys._current_frames().get(number)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _end(self) -> None:
        """What comes after training. However one part ends, the next ones come."""
        self._trained.set()
        if self._watching is not None:
            self._watching.join()
        for part in (self._keep_state, self._conclude, self._file):
            try:
                part()
            # SystemExit in the user's code, a disk that is full: whatever is raised is the run's
            # outcome, kept here and raised where the run is awaited.
            except BaseException as error:  # noqa: BLE001
                self._fail(error)
        self._control.close()
        if self.error is not None:
            forget_locals(self.error)
        self._step, self._work = self.step, None
        trim(collect=False)
        self._state = self._ended()
        with self._stopping_begins:
            stopping = self._stopping
        if stopping is not None and stopping is not threading.current_thread():
            stopping.join()
        atexit.unregister(self._end_with_python)
        self._over.set()

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            shorten(error)
        else:
            self.error.add_note(f"and the run's folder is not complete: {error}")

    def _ended(self) -> State:
        if self.error is not None:
            return "failed"
        return "stopped" if self._control.stopping else "finished"

    def _train(self) -> None:
        work = self._work
        assert work is not None
        sqlite_index.note(self.folder)
        self._meter = SAMPLER.start()
        progress.set(self._tell)
        self._event("state", "starting")
        self._foretell(work)
        stepper = self._prepare(self.settings)
        work.course = trainer.Trainer(
            stepper,
            work.train,
            self.settings,
            control=self._control,
            recorder=self.recorder,
            evaluation=work.evaluation,
            meter=self._meter,
            begin=work.begin,
            prepare=self._prepare,
            keep=lambda taken: self._keeping.keep(taken, self.current_settings.keep_checkpoints),
            keep_best=self._keeping.keep_best,
            best=self._earlier.carry_best(self._folder) if self._earlier else None,
            faults=work.faults,
        )
        work.begin = None
        self._state = "running"
        self._doing = "evaluating before the first step" if work.evaluation else "first step"
        self._event("state", "running")
        for warning in self._warnings:
            self._event("warning", warning)
        if self._earlier is not None:
            for kind, text in self._earlier.told:
                self._event(kind, text)
        elif self.step:
            self._event("note", f"goes on from a checkpoint at step {self.step}")
        course = work.course
        for number, _ in enumerate(course.steps()):
            if number == 0 and self.settings.elsewhere:
                took_s = self._control.elapsed_s()
                self._event("note", f"{took_s:.1f} s from the start to the end of the first step")
            self._total = course.total
            self._use(course.settings)
            self._hear(course.stepper)
        self._hear(course.stepper)

    def _foretell(self, work: _Work) -> None:
        """Says before the first step where it will not fit into memory."""
        if self.settings.elsewhere and work.faults.far():
            return
        device = training_device(self.settings.device).type
        peak_bytes = work.faults.peak_bytes
        self._foretold = memory_advice.foretold(work.model, self.settings, device, peak_bytes)
        if self._foretold is not None:
            self._event("warning", self._foretold)

    def _prepare(self, settings: FinetuneSettings) -> Stepper:
        assert self._work is not None
        stepper = self._work.prepare(settings)
        # What it has begun, workers for one, is to end after this run when Python does.
        atexit.unregister(self._end_with_python)
        atexit.register(self._end_with_python)
        return stepper

    def _use(self, settings: FinetuneSettings) -> None:
        if settings == self.current_settings:
            return
        if self.earlier_settings and settings == self.earlier_settings[-1]:
            self.earlier_settings.pop()
        else:
            self.earlier_settings.append(self.current_settings)
        self.current_settings = settings

    def _tell(self, line: str) -> None:
        self._doing = line
        self._event("note", line)

    def _hear(self, stepper: Stepper) -> None:
        """Makes events of what the engine says for the first time."""
        assert self._work is not None
        report, known = stepper.report(), self._report
        if stepper is not self._work.heard:  # settings were changed, and it tells of itself alone
            self._work.heard = stepper
            if known is not None:
                self._earlier_s = (known.export_s, known.check_s)
                known = None
        export_s, check_s = self._earlier_s
        report = dataclasses.replace(
            report, export_s=report.export_s + export_s, check_s=report.check_s + check_s
        )
        self._report = report
        if known is not None and known == report:
            return
        for note in report.notes[len(known.notes) if known else 0 :]:
            self._event("note", note)
        if report.fallback_reason and not (known and known.fallback_reason):
            self._event("warning", f"fallback to {report.engine_used}: {report.fallback_reason}")

    def _event(self, kind: str, text: str) -> None:
        self.recorder.event(Event(kind, self.step, self._control.elapsed_s(), text))

    def _keep_state(self) -> None:
        work = self._work
        if work is None or work.course is None:
            return
        try:
            state = work.course.state()
        except StepperLost as error:
            self._keeping.close()
            if (last := self._keeping.newest) is not None:
                error.add_note(f"resume_from={str(last)!r} goes on from its last checkpoint")
            raise
        self._hear(work.course.stepper)
        work.course.stepper.close()
        self._keeping.close()
        state.save(self._folder.checkpoint_path("final"))
        self._keeping.trim(self.current_settings.keep_checkpoints - 1)

    def _conclude(self) -> None:
        """Completes the folder."""
        self._keeping.close()
        if self._meter is not None:
            SAMPLER.end(self._meter)
        if self.error is not None:
            self._event("error", f"{type(self.error).__name__}: {message(self.error)}")
        self._event("state", self._ended())
        self._result = self._summary(self._ended())
        self.recorder.close()
        self._write_about(self._result)

    def _file(self) -> None:
        """Lets the folder go, and has it listed."""
        self._folder.release()
        sqlite_index.note(self.folder)

    def _summary(self, state: State) -> RunResult:
        recorder, evaluations = self.recorder, self._evaluations()
        last = recorder.last
        step_s = recorder.total("step_ms") / 1e3 or NAN
        report = self._report
        return RunResult(
            state=state,
            steps=self.step,
            wall_s=self._control.elapsed_s(),
            final_loss=float(last.loss) if last else NAN,
            before=evaluations[0] if evaluations else None,
            after=evaluations[-1] if evaluations else None,
            best=best(evaluations[1:] or evaluations),
            samples_per_s=recorder.total("samples") / step_s,
            tokens_per_s=recorder.total("tokens") / step_s or NAN,
            peak_bytes=self._peak_bytes(),
            export_s=report.export_s if report else 0.0,
            check_s=report.check_s if report else 0.0,
            skipped_steps=int(recorder.total("skipped")),
            loss_scale=_loss_scale(recorder),
        )

    def _peak_bytes(self) -> float:
        """Of this process, or of the rank that took most."""
        of_ranks = [recorder.rows() for recorder in self.recorder.ranks]
        if of_ranks:
            both = np.concatenate(of_ranks)[:, [INDEX["cuda_peak_bytes"], INDEX["peak_bytes"]]]
            on_cuda, resident = np.nan_to_num(both, nan=-1.0).max(axis=0)
            return float(resident if on_cuda < 0 else on_cuda)
        return self._meter.highest_peak_bytes() if self._meter else NAN

    def _write_about(self, result: RunResult | None) -> None:
        ended = None
        if result is not None:
            ended = {
                "steps": result.steps,
                "engine_asked": self.engine_asked,
                "engine_used": self.engine_used,
                "precision": self.current_settings.precision,
                "workers": self.current_settings.workers,
                "fallback_reason": self.fallback_reason,
                "error": self.error and f"{type(self.error).__name__}: {message(self.error)}",
                "result": result.as_dict(),
            }
        self._folder.write_about(
            model=self._kind,
            parameters=self._parameters,
            created=self._created,
            state="running" if result is None else result.state,
            names=self._names,
            continues=self._earlier.name if self._earlier else None,
            ended=ended,
        )

    def _end_with_python(self) -> None:
        """Python is ending: the run's thread must not be cut off in the middle of a write."""
        ends_already()
        self.stop()
        self._over.wait(_LAST_WAIT_S)


def _loss_scale(recorder: Recorder) -> float:
    """That of the next step; NaN without one."""
    last = recorder.last
    return float(last.loss_scale) if last else NAN


def _skipped(steps: int, loss_scale: float) -> str:
    now = "" if math.isnan(loss_scale) else f", scale {loss_scale:,.10g}"
    return f"{steps} step{'s' * (steps > 1)} skipped: gradients overflowed{now}"


@dataclasses.dataclass
class _Work:
    """What a run needs while it trains, and lets go of at the end."""

    model: nn.Module
    prepare: Callable[[FinetuneSettings], Stepper]
    train: data_loading.Batches
    evaluation: data_loading.Batches | None
    faults: FailurePolicy
    begin: Checkpoint | None = None
    course: trainer.Trainer | None = None
    heard: Stepper | None = None
