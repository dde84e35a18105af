"""Fine-tuning as a generator of optimizer steps, without threads or files.

``for result in Trainer(...).steps()`` trains in the caller's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.engines.base import Batch, NotFinite, Stepper, StepperLost, StepResult
from ortlab.metrics.evaluation import Evaluation
from ortlab.metrics.recorder import Recorder
from ortlab.metrics.user_metrics import UserMetrics
from ortlab.settings import FinetuneSettings
from ortlab.training.callbacks import RunCallbacks, called
from ortlab.training.changes import SettingChanger
from ortlab.training.checkpoint_writer import CheckpointSchedule
from ortlab.training.control import Control
from ortlab.training.data_loading import Batches, Epoch
from ortlab.training.evaluator import Evaluator
from ortlab.training.failures import FailureHandler, FailurePolicy
from ortlab.training.memory_advice import MemoryAdvisor
from ortlab.training.schedule import learning_rate
from ortlab.training.step_metrics import rank_sample, step_sample
from ortlab.training.training_state import TrainingState, place
from ortlab.utils.errors import out_of_memory
from ortlab.utils.process_memory import Meter
from ortlab.utils.rng import RandomStates, seeded


class Trainer:
    """Steps of one run, and its exact state between two of them.

    A stepper that is lost pauses the run. When it is resumed, another stepper continues from the
    last checkpoint.

    Args:
        stepper: Stepper that trains first.
        train: The training data.
        settings: Settings that the run starts with.
        control: Pauses, stops and changes the run from other threads.
        recorder: Receives samples and events.
        evaluation: Evaluation data; None for a run without evaluations.
        meter: Memory meter of this process; None to leave the memory unknown.
        begin: Checkpoint to resume from: its order of the data, position in it, random states and
            schedule.
        prepare: Creates a stepper for other settings. With it, the engine and its options can be
            changed during the run (`Control.apply`), while all other state stays. If the new
            settings fail, when the stepper is created or in its first step, the old ones are
            restored.
        keep: Receives a checkpoint every ``save_steps`` steps, after ``checkpoint_minutes``,
            in a pause, and when `keep_in_read` asks for one.
        faults: Treatment of failures. If somebody can resume the run, it pauses when the data
            raises, memory does not suffice or, after the first step, values are not finite;
            otherwise it ends with the error.
        keep_best: Receives the checkpoint of each evaluation that is better by the metric
            ``keep_best`` than all before.
        best: Best evaluation before this run.
        metrics: The user's metrics, computed in each evaluation.
        callbacks: The user's callbacks.
        written: Returns the number of checkpoints that were written.
        keep_failure: Receives the description of a failure that pauses the run, and "" when the
            run is resumed.

    Raises:
        ValueError: If `begin` does not match the settings or the data.
    """

    def __init__(
        self,
        stepper: Stepper,
        train: Batches,
        settings: FinetuneSettings,
        *,
        control: Control,
        recorder: Recorder,
        evaluation: Batches | None = None,
        meter: Meter | None = None,
        begin: Checkpoint | None = None,
        prepare: Callable[[FinetuneSettings], Stepper] | None = None,
        keep: Callable[[Checkpoint], object] = lambda _: None,
        faults: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
        keep_best: Callable[[Checkpoint], object] = lambda _: None,
        best: Evaluation | None = None,
        metrics: UserMetrics | None = None,
        callbacks: RunCallbacks | None = None,
        written: Callable[[], int] = lambda: 0,
        keep_failure: Callable[[str], object] = lambda _: None,
    ) -> None:
        if begin is not None:
            begin = dataclasses.replace(begin, position=place(begin, train, settings))
        self._begin = begin
        self._prepare = prepare
        self._control = control
        self._recorder = recorder
        self._meter = meter
        self._recorded = 0  # steps that the recorder has: repeated ones are not recorded again
        self._warms_up = True  # the next step may export, compile and warm up
        self._lost_at = -1  # step after which workers were lost last
        self._state = state = TrainingState(
            stepper,
            train.within(control.reading),
            settings,
            control=control,
            recorder=recorder,
            begin=begin.position if begin else None,
        )
        self._changes = SettingChanger(state, control, prepare, faults.peak_bytes)
        self._checkpoints = CheckpointSchedule(state, control, keep)
        self._advisor = MemoryAdvisor(faults.peak_bytes, own_batches=train.size is None)
        self._failures = FailureHandler(
            state,
            faults,
            control=control,
            advisor=self._advisor,
            proceed=self._proceed,
            keep_failure=keep_failure,
        )
        self._callbacks = callbacks
        self._written = written
        self._told_written = 0  # checkpoints that the callbacks know of
        self._telling_pause = False
        self._evaluator = Evaluator(
            state,
            evaluation.within(control.reading_held_out) if evaluation else None,
            failures=self._failures,
            proceed=self._proceed,
            keep_best=keep_best,
            best=best,
            metrics=metrics,
            after=functools.partial(self.call_back, "on_evaluate"),
        )

    @property
    def settings(self) -> FinetuneSettings:
        """Settings in effect."""
        return self._state.settings

    @property
    def stepper(self) -> Stepper:
        """Stepper that trains now."""
        return self._state.stepper

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; None if unknown."""
        return self._state.total

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._state.step

    def steps(self) -> Iterator[StepResult]:
        """Train, and yield the result of every optimizer step.

        Samples and "eval" events go to the recorder. Evaluations run before the first step, after
        every epoch or every ``eval_steps`` steps, and at the end unless the run is stopped.

        The seed governs all random numbers of Python, numpy and torch, whose generators are global
        to the process: other code that draws from them during the run sees the run's numbers.
        When the generator ends or is closed, the generators' states are restored. Runs that overlap
        draw from the same states, so their seeds do not hold; the last of them to end restores the
        states from before the first.

        Yields:
            The result of each step. The generator ends early if the control asks for it.

        Raises:
            NotFinite: If a loss or a gradient is NaN or infinite: at once on a CPU, on another
                device as soon as the recorder has fetched the loss. The stepper has changed no
                weight since. In fp16 such a step is skipped: it counts as a step of the schedule,
                its data is used up, and the error comes when the loss scale cannot fall further.
        """
        with seeded(self.settings.data.seed):
            try:
                yield from self._steps()
            finally:
                self._state.drawn = self._state.drawn or RandomStates.now()
                self._changes.close()

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the last step. See `TrainingState.checkpoint`."""
        return self._state.checkpoint()

    def state(self) -> Checkpoint:
        """Return `TrainingState.snapshot`; before the start, the checkpoint to resume from."""
        return self._begin or self._state.snapshot()

    def keep_in_read(self) -> None:
        """Save a checkpoint while `Control.kept_in_read` keeps the loop in a read of data.

        Another thread calls this. It does nothing if other processes train, since these answer
        only to the thread of the loop.
        """
        if not self.settings.parallel.elsewhere:
            self._checkpoints.save_unsaved()

    def call_back(self, event: str) -> None:
        """Call the user's callbacks, in the thread of the loop.

        Args:
            event: One of `ortlab.training.callbacks.EVENTS`.

        Raises:
            Exception: The exception of a callback, if nobody could resume the run.
        """
        if self._callbacks is None:
            return
        for callback in self._callbacks.having(event):
            name = called(callback, event)
            random, before = RandomStates.now(), self._state.drawn
            # A checkpoint that is taken meanwhile has the random states of the loop.
            self._state.drawn = before or random
            try:
                with self._control.calling_back(name):
                    self._callbacks.call(callback, event)
            except Exception as error:  # noqa: BLE001 - a callback may raise anything
                if self._failures.callback_failed(error, name):
                    self._callbacks.remove(callback)
            finally:
                random.give_back()
                self._state.drawn = before

    def _steps(self) -> Iterator[StepResult]:
        self.call_back("on_run_start")
        while True:
            try:
                yield from self._steps_of_stepper()
            except StepperLost as error:
                if self._recover(error):
                    continue
            return

    def _steps_of_stepper(self) -> Iterator[StepResult]:
        """Yield the steps until the end of the run, or until the stepper is lost."""
        state = self._state
        self._warms_up = True
        data = self._resume()
        if self.settings.parallel.elsewhere and state.recovery is None:
            state.remember(state.checkpoint())
        if state.evaluated < 0 or self._evaluation_due():
            self._evaluator.evaluate()
        while not self._epochs_are_over():
            yield from self._steps_of_epoch(data)
            data = None
            if self._control.stopping or state.done:
                break
            if not state.read:
                state.tell("warning", f"epoch {state.epoch + 1} of the data is empty: the run ends")
                break
            if self.settings.checkpoint.eval_steps is None:
                self._evaluator.evaluate()
            state.epoch, state.read, state.order = state.epoch + 1, 0, None
        if not self._control.stopping:
            self._evaluator.evaluate()
        if not self.stepper.finite() and not self._failures.stopped_not_finite:
            self._failures.raise_not_finite()

    def _epochs_are_over(self) -> bool:
        limits = self.settings.limits
        if limits.max_steps is not None:  # as many epochs as these take
            return self._state.done
        return self._state.epoch >= limits.num_train_epochs

    def _resume(self) -> Epoch | None:
        """Load the checkpoint that the run resumes from, and return the rest of its epoch."""
        state, begin, data = self._state, self._begin, None
        if begin is None:
            return None
        # The data first: if it ends before the position, the model still has its own weights.
        if state.order is not None and not state.done:
            data = state.train.again(begin.position)
        state.load(begin)
        self._begin = None
        state.remember(begin)
        state.drawn = None
        return data

    def _steps_of_epoch(self, data: Epoch | None) -> Iterator[StepResult]:
        """Yield the steps of an epoch, or of the rest of it in `data`."""
        state = self._state
        if data is None:
            state.order = state.train.order()
            data = self._opened(lambda: state.train.epoch(state.epoch))
        while data is not None and not state.done and self._proceed():
            began = time.perf_counter()
            wanted = self._changes.requested()
            try:
                group = self._read(data, wanted)
            except Exception as error:  # noqa: BLE001 - a Dataset may raise anything
                data = self._after_failed_read(error, data, wanted)
                continue
            data_s = time.perf_counter() - began
            if not group:
                if not self._ends_early(data):
                    break
                data = self._again() if self._failures.data_ended_early(data.done) else None
                continue
            try:
                result = self._step(group, wanted, began)
            # An engine may raise any exception. If the change is not at fault but a batch, for
            # example, the same is raised again when the step is made under the old settings.
            except Exception as error:
                remedy = self._remedy(error)
                if remedy == "none":
                    raise
                if remedy == "make room":
                    del group
                    self._changes.settle()
                    data = self._with_room(error, self.settings)
                else:
                    self._changes.revert(error)
                    data.put_back()
                continue
            self._warms_up |= self._changes.settle()
            state.step, state.read = state.step + 1, data.done
            made = state.step
            try:
                self._record(result, time.perf_counter() - began, data_s)
            except NotFinite as error:
                if not self._skip_not_finite(error, group, made=made):
                    return
                self._evaluate_if_due()
                continue
            if not state.done:
                self._checkpoints.save_if_due()
            yield result
            self._changes.publish()
            self.call_back("on_step_end")
            if (written := self._written()) > self._told_written:
                self._told_written = written
                self.call_back("on_checkpoint")
            self._evaluate_if_due()
        if state.step == 0 and not self._control.stopping:
            raise ValueError("the training data is empty: it yielded no batch")

    def _read(self, data: Epoch, wanted: FinetuneSettings) -> list[Batch]:
        """Read the micro-batches of the next step."""
        state = self._state
        if state.read == 0:  # a sampler may draw its order: no state amid that is valid
            state.drawn = RandomStates.now()
        group = data.take(
            wanted.data.gradient_accumulation_steps,
            wanted.data.batch_size,
            keep=self._changes.pending,
        )
        state.drawn = None
        return group

    def _step(self, group: Sequence[Batch], wanted: FinetuneSettings, began: float) -> StepResult:
        """Make a step, under other settings if they were requested."""
        if self._changes.pending:
            self._changes.begin(wanted, began)
        lr = learning_rate(self.step, self.total, self.settings.optim)
        return self.stepper.step(group, lr=lr)

    def _remedy(self, error: Exception) -> Literal["none", "make room", "revert"]:
        """Return what can be done about a step that failed."""
        # A lost stepper can neither try a step again nor adopt other settings: see `_recover`.
        lost = isinstance(error, StepperLost)
        memory = out_of_memory(error) and not lost
        trial = self._changes.trial
        if trial is None:
            return "make room" if memory else "none"
        if trial.taken is None:
            if lost:
                return "none"
            if memory and self._advisor.is_too_large(self.step, trial.before):
                return "make room"  # the settings before the change do not fit either
        return "revert"

    def _recover(self, error: StepperLost) -> bool:
        """Continue from the last checkpoint with a new stepper, once somebody resumes the run."""
        state = self._state
        if state.recovery is None or self._prepare is None:
            raise error
        # If it gets no further than the last time, another try would end there too.
        by_itself = self.settings.parallel.isolated and state.step > self._lost_at
        self._lost_at = state.step
        self._recorded = max(self._recorded, state.step)
        state.rewind(state.recovery.position)
        state.lost = True
        self._changes.abandon()
        self.stepper.close()
        if by_itself:
            state.tell("warning", f"restarting in a new process: {error}")
            if self._control.stopping:
                return False
        elif not self._failures.workers_lost(error, memory=out_of_memory(error)):
            return False
        try:
            state.stepper = self._prepare(self.settings)
        except StepperLost as again:
            return self._recover(again)
        state.lost, self._begin = False, state.recovery
        state.tell("note", f"resumed from the checkpoint of step {state.step}")
        return True

    def _opened(self, begin: Callable[[], Epoch]) -> Epoch | None:
        """Return the epoch that `begin` opens; None if that fails and the run is to end."""
        try:
            return begin()
        except Exception as error:  # noqa: BLE001 - a Dataset may raise anything
            return self._again() if self._failures.data_failed(error, self._state.read) else None

    def _again(self) -> Epoch | None:
        """Return the epoch from the end of the last step, read again in the same order."""

        def begin() -> Epoch:
            position = self._state.position()
            found = self._state.train.again(position)
            position.random.give_back()
            return found

        return self._opened(begin)

    def _after_failed_read(
        self, error: Exception, data: Epoch, wanted: FinetuneSettings
    ) -> Epoch | None:
        """Return the data to continue with; None if the run is to end."""
        if out_of_memory(error):
            return self._with_room(error, wanted)
        return self._again() if self._failures.data_failed(error, data.done) else None

    def _with_room(self, error: Exception, settings: FinetuneSettings) -> Epoch | None:
        """Return the data of a step that ran out of memory; None if the run is to end."""
        return self._again() if self._failures.out_of_memory(error, settings) else None

    def _ends_early(self, data: Epoch) -> bool:
        """Return whether the data ended before its stated length."""
        length = self._state.train.length
        return length is not None and data.done < length and not self._control.stopping

    def _skip_not_finite(self, error: NotFinite, group: Sequence[Batch], *, made: int) -> bool:
        """Continue after steps, up to `made`, that were not finite; False if the run is to end.

        They count, as those that a loss scale skips; no weight has changed in them.
        """
        state = self._state
        cause = self._failures.explain_not_finite(error, group)
        first = state.step + 1
        if not self._changes.can_rebuild or state.step == state.began_at:
            raise error
        if not self._failures.not_finite(error, cause, group):
            return False
        taken = state.checkpoint()
        self._recorder.count  # noqa: B018 - makes the recorder find the bad losses
        self._recorder.not_finite_step = None
        state.step = made
        self._changes.rebuild(self.settings, taken)
        self._warms_up = True
        span = f"step {first}" if first == made else f"steps {first} to {made}"
        state.tell("note", f"{span} changed no weights; the run continues after that")
        return True

    def _evaluate_if_due(self) -> None:
        if not self._state.done and self._evaluation_due():
            self._evaluator.evaluate()

    def _evaluation_due(self) -> bool:
        every = self.settings.checkpoint.eval_steps
        return every is not None and self.step % every == 0

    def _proceed(self) -> bool:
        control, state = self._control, self._state
        if not control.pausing:
            return control.proceed(self.checkpoint)
        # A pause may be the last action of this process: a laptop closes, a kernel ends.
        self._checkpoints.save_unsaved()
        began = time.perf_counter()
        state.tell("pause", "paused")
        if not self._telling_pause:  # a callback that raises there pauses, too
            self._telling_pause = True
            try:
                self.call_back("on_pause")
            finally:
                self._telling_pause = False
        goes_on = control.proceed(self.checkpoint)
        waited_s = time.perf_counter() - began
        state.tell("pause", f"{'resumed' if goes_on else 'stopped'} after {waited_s:,.0f} s")
        return goes_on

    def _record(self, result: StepResult, step_s: float, data_s: float) -> None:
        """Record a step; raise `NotFinite` if it, or one before it, was not finite."""
        state = self._state
        if state.step > self._recorded:
            length = state.train.length
            epoch = state.epoch + (state.read / length if length else 0.0)
            now = self._control.elapsed_s()
            self._recorder.add(
                step_sample(
                    result,
                    step=state.step,
                    epoch=epoch,
                    time_s=now,
                    step_s=step_s,
                    data_s=data_s,
                    meter=self._meter,
                    rated=not self._warms_up,
                )
            )
            for rank, told in enumerate(result.ranks):
                sample = rank_sample(told, step=state.step, epoch=epoch, time_s=now)
                self._recorder.rank(rank).add(sample)
        self._warms_up = False
        # On another device the stepper would have to wait; the recorder finds out a moment later.
        on_host = result.loss.device.type == "cpu"
        if (on_host and not self.stepper.finite()) or self._recorder.not_finite_step is not None:
            self._failures.raise_not_finite()
