"""Failures that need not end a run: data or callbacks that raise, NaN, low memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import torch

from ortlab.engines import batch as batches
from ortlab.engines.base import Batch, NotFinite, Stepper, StepperLost
from ortlab.engines.nonfinite import Cause
from ortlab.engines.torch.stepper import training_device
from ortlab.metrics.recorder import INDEX
from ortlab.settings import LOWEST_LOSS_SCALE, FinetuneSettings
from ortlab.training.control import PauseReason
from ortlab.training.memory_advice import hint as memory_hint
from ortlab.training.skipped_data import SkippedData, fingerprints
from ortlab.training.training_state import count_of
from ortlab.utils.errors import forget_locals, message
from ortlab.utils.threads import trim

if TYPE_CHECKING:
    from ortlab.training.control import Control
    from ortlab.training.memory_advice import MemoryAdvisor
    from ortlab.training.training_state import TrainingState


PAUSED: Final = "paused"
"""Beginning of the warning of a failure that pauses a run."""
_START_AGAIN = "stop the run, and start again with a lower learning_rate and fresh=True (--fresh)"
_SKIPS = (
    "run.resume() or the Resume button skips the data of the step, now and in later epochs; "
    "run.resume(skip=True) skips all data that is not finite without another pause"
)
_NO_WEIGHT = (
    "no weight goes into it, so that no setting helps: correct the line, or the data in place"
)
_CORRECT = (
    "if the line is wrong (a square root or logarithm of a negative number, a division by 0), "
    "correct it and train a new model"
)
_LOST: Final = 1e3
"""Rise of the loss, as a factor, after which no learning rate makes up for the weights."""


@dataclass(frozen=True)
class FailurePolicy:
    """Treatment of failures that need not end a run.

    With ``waits``, somebody can resume the run, as in a notebook: it pauses where a script's run
    ends with the error. ``examine`` receives the stepper and the micro-batches of a step that was
    not finite, and returns the cause, or None if it cannot tell. ``peak_bytes`` predicts the peak
    memory of a step under given settings, per worker; None if there is no prediction. ``far``
    returns whether workers may run on other machines, whose memory is unknown here.
    """

    waits: bool = False
    examine: Callable[[Stepper, Sequence[Batch], FinetuneSettings], Cause | None] = lambda *_: None
    peak_bytes: Callable[[FinetuneSettings], int | None] = lambda _: None
    far: Callable[[], bool] = lambda: False


def typed(advice: Mapping[str, Any]) -> str:
    """Return settings as a user types them.

    Args:
        advice: Values of settings, by name.

    Returns:
        Text such as ``learning_rate=1e-05, max_grad_norm=1.0``.
    """
    return ", ".join(f"{name}={value!r}" for name, value in advice.items())


class FailureHandler:
    """Pauses a run after a failure, or raises the error where nobody could resume the run.

    Args:
        state: State of the run.
        policy: Treatment of failures.
        control: Control that pauses the run.
        advisor: Advisor for settings that need less memory.
        proceed: Waits while the run is paused, and returns False if the run is to end.
        keep_failure: Receives the description of a failure when the run pauses for it, and "" when
            the run is resumed.
    """

    def __init__(
        self,
        state: TrainingState,
        policy: FailurePolicy,
        *,
        control: Control,
        advisor: MemoryAdvisor,
        proceed: Callable[[], bool],
        keep_failure: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.stopped_not_finite = False
        """True if the run was stopped while it was paused for values that are not finite."""
        self._state = state
        self._policy = policy
        self._control = control
        self._advisor = advisor
        self._proceed = proceed
        self._keep_failure = keep_failure
        self._bad_data = SkippedData()
        self._resumed_at: int | None = None  # step of the last pause for a value that is not finite
        self._ended_at: tuple[int, int] | None = None  # epoch and item of an early end of the data

    @property
    def waits(self) -> bool:
        """True if a failure pauses the run instead of ending it."""
        return self._policy.waits and not self._state.train.once

    def pause(self, reason: PauseReason) -> bool:
        """Pause the run and wait.

        Args:
            reason: Reason of the pause, with the error.

        Returns:
            True if the run was resumed, False if it is to end.

        Raises:
            Exception: The error of `reason` if nobody could resume the run.
        """
        error = reason.error
        if not self.waits:
            raise error
        forget_locals(error)  # the interrupted computation uses memory
        said = " ".join(message(error).split())
        notes = getattr(error, "__notes__", ())
        told = reason.told or "; ".join((f"{type(error).__name__}: {said}", *notes))
        return self._wait(reason, told, f"{PAUSED} at step {self._state.step}: {told}")

    def _wait(self, reason: PauseReason, told: str, event: str) -> bool:
        """Record a failure, pause the run, and wait while it is paused."""
        self._keep_failure(told)  # before anybody knows of the pause, and may kill the process
        self._control.hold(reason)
        self._state.tell("warning", event)
        resumed = self._proceed()
        if resumed:
            self._keep_failure("")
        return resumed

    def free_memory(self, error: Exception) -> None:
        """Release the memory of an interrupted computation.

        Args:
            error: Exception whose frames still reference tensors.
        """
        forget_locals(error)
        self._state.stepper.rest()
        trim()
        if self._device() == "cuda":
            torch.cuda.empty_cache()

    # ---- data ----------------------------------------------------------------------------------

    def data_failed(self, error: Exception, read: int) -> bool:
        """Pause a run whose data raised an exception.

        Args:
            error: The exception.
            read: Items of the epoch that were read before it.

        Returns:
            True if the epoch is to be read again from the end of the last step.

        Raises:
            Exception: `error` if nobody could resume the run, or in the first step of the run.
        """
        state, train = self._state, self._state.train
        error.add_note(
            f"the data failed in step {state.step + 1}, after {count_of(read, train.unit)} of "
            f"epoch {state.epoch + 1}"
        )
        if state.step == state.began_at:
            raise error  # nothing is lost by starting over
        skips = train.size is not None and train.length is not None
        hint = "fix the data, then run.resume() or the Resume button reads it from there"
        if skips:
            hint += "; run.resume(skip=True) skips the samples of that step"
        if not self.pause(
            PauseReason(error, "at step {step}", hint, "the data failed", skips=skips)
        ):
            return False
        if skips and self._control.skipping:
            asked = state.settings.data.batch_size * state.settings.data.gradient_accumulation_steps
            first, state.read = state.read, min(state.read + asked, train.length or 0)
            state.recount()
            state.tell(
                "note", f"{state.read - first} samples are skipped, from number {first + 1} on"
            )
        return True

    def data_ended_early(self, read: int) -> bool:
        """Pause a run whose data ended before its stated length.

        Args:
            read: Items of the epoch that were read.

        Returns:
            True if the epoch is to be read again. False if it ends here, as it does if the data
            ends at the same item once more.
        """
        state = self._state
        told = (
            f"epoch {state.epoch + 1} of the data ended after {read} of {state.train.length} "
            f"{state.train.unit}, in step {state.step + 1}"
        )
        if self._ended_at is not None or not self.waits:
            if self._ended_at != (state.epoch, read):
                state.tell("warning", told)
            return False
        self._ended_at = state.epoch, read
        hint = (
            "run.resume() reads more if there is more by then, and otherwise ends the epoch there"
        )
        return self.pause(
            PauseReason(RuntimeError(told), "at step {step}", hint, "the data ended early")
        )

    # ---- memory --------------------------------------------------------------------------------

    def out_of_memory(self, error: Exception, settings: FinetuneSettings) -> bool:
        """Pause a run whose next step ran out of memory.

        Args:
            error: The exception.
            settings: Settings of the step that failed.

        Returns:
            True if the step is to be tried again.

        Raises:
            Exception: `error` if nobody could resume the run, or with pipeline stages, which the
                failure leaves in the middle of their schedule.
        """
        state = self._state
        if state.settings.parallel.pipeline_stages > 1:
            raise error
        self.free_memory(error)
        self._advisor.remember(state.step, state.settings)
        held = 0
        if (
            state.settings.parallel.workers == 1
        ):  # with several workers, parts of the state lie elsewhere
            state_dict = state.stepper.state_dict()
            held = sum(_bytes(each) for each in (state_dict["model"], state_dict["optimizer"]))
            del state_dict
        changes = self._advisor.advice(settings, self._device(), held)
        why = memory_hint(changes, settings, self._device())
        error.add_note(f"not enough memory for step {state.step + 1}; {why}")
        hint = "run.resume() tries the step again"
        if changes:
            hint = f"run.resume({typed(changes)}) or its button continues with these settings"
        return self.pause(PauseReason(error, "at step {step}", hint, "out of memory", changes))

    # ---- workers -------------------------------------------------------------------------------

    def workers_lost(self, error: StepperLost, *, memory: bool) -> bool:
        """Pause a run that lost its workers, whatever the policy.

        Args:
            error: The exception.
            memory: True if the workers ran out of memory.

        Returns:
            True if the run continues from its last checkpoint, with new workers.
        """
        state = self._state
        hint = "run.resume() or the Resume button continues from there with new workers"
        changes: dict[str, Any] = {}
        if memory:
            self._advisor.remember(state.step, state.settings)
            changes = self._advisor.advice(state.settings, self._device())
        if changes:
            told = typed(changes)
            hint = f"out of memory; run.resume({told}) or its button continues from there"
        where = "at step {step}, the one of its last checkpoint"
        reason = PauseReason(error, where, hint, advice=changes)
        return self._wait(reason, f"{error}", f"{PAUSED}: {error}")

    # ---- evaluation ----------------------------------------------------------------------------

    def evaluation_failed(self, error: Exception, *, memory: bool) -> bool:
        """Pause a run whose evaluation raised an exception.

        Args:
            error: The exception.
            memory: True if the evaluation ran out of memory.

        Returns:
            True if the evaluation is to be made again.

        Raises:
            Exception: `error` if nobody could resume the run.
        """
        what = "out of memory" if memory else "the evaluation failed"
        hint = "run.resume() or the Resume button evaluates again; run.resume(skip=True) skips that"
        if not self.pause(PauseReason(error, "after step {step}", hint, what, skips=True)):
            return False
        if self._control.skipping:
            self._state.evaluated = self._state.step
            return False
        return True

    # ---- callbacks -----------------------------------------------------------------------------

    def callback_failed(self, error: Exception, name: str) -> bool:
        """Pause a run whose callback raised an exception.

        Args:
            error: The exception.
            name: The callback and its method.

        Returns:
            True if the callback is to be called no more.

        Raises:
            Exception: `error` if nobody could resume the run.
        """
        error.add_note(f"the callback {name} raised this after step {self._state.step}")
        hint = "run.resume() goes on; run.resume(skip=True) goes on without this callback"
        what = f"the callback {name} failed"
        self.pause(PauseReason(error, "after step {step}", hint, what, skips=True))
        return self._control.skipping

    # ---- values that are not finite ------------------------------------------------------------

    def raise_not_finite(self) -> NoReturn:
        """Set the step back to the last finite one and raise.

        Raises:
            NotFinite: Always, with the step, the settings and advice.
        """
        state, settings = self._state, self._state.settings
        state.recorder.count  # noqa: B018 - fetches the losses that are still on the device
        step = state.recorder.not_finite_step or state.step
        state.step = step - 1
        state.evaluated = min(state.evaluated, state.step)  # no weight has changed since
        rate = f"learning_rate={settings.optim.learning_rate:g}"
        if settings.model.precision == "fp16":
            raise NotFinite(
                f"the loss or its gradient overflows float16 at step {step} although the loss "
                f"scale has fallen to {LOWEST_LOSS_SCALE:g}; {self._weights()}. Choose "
                f"precision='bf16', lower {rate}, or look for NaN in the data"
            )
        raise NotFinite(
            f"the loss or its gradient is not finite at step {step}; {self._weights()}. Lower "
            f"{rate}, or look for NaN in the data"
        )

    def _weights(self) -> str:
        state = self._state
        ends = "has" if self._policy.waits and state.step > state.began_at else "ends with"
        return f"the run {ends} the weights of step {state.step}"

    def explain_not_finite(self, error: NotFinite, group: Sequence[Batch]) -> Cause | None:
        """Find the first value that is not finite, and have the error name it.

        Args:
            error: The exception.
            group: Micro-batches of the step.

        Returns:
            The cause, or None if the policy cannot tell.

        Raises:
            StepperLost: If the workers are lost while they look for the cause.
        """
        try:
            cause = self._policy.examine(self._state.stepper, group, self._state.settings)
        except StepperLost:
            raise
        except Exception as again:  # noqa: BLE001 - it may fail as the step did, in any way
            cause = Cause.unknown(again)
        if cause is not None:
            told = f"{cause.told}{self._names(cause.rows, group)}"
            cause = dataclasses.replace(cause, told=told)
            if self._state.settings.model.precision == "fp16":
                error.add_note(f"in eager torch {told}")
            else:
                error.args = (f"{self._became(cause)}; {self._weights()}",)
        return cause

    def not_finite(self, error: NotFinite, cause: Cause | None, group: Sequence[Batch]) -> bool:
        """Pause a run after a step that was not finite.

        A step whose data the user has accepted before is skipped without a pause.

        Args:
            error: The exception.
            cause: Result of `explain_not_finite`.
            group: Micro-batches of the step.

        Returns:
            True if the run continues without the step.

        Raises:
            NotFinite: `error` if nobody could resume the run.
        """
        if cause is None or not cause.in_data:
            return self._pause_not_finite(error, cause)
        data = self._bad_data
        rows = fingerprints(group, cause.rows)
        if not (self.waits and data.accepts(rows)):
            if not self._pause_not_finite(error, cause):
                return False
            data.accept(rows, all_others=self._control.skipping)
        data.add(self._state.step + 1, self._indices(cause.rows, group))
        self._state.tell("skipped_data", str(data))
        return True

    def _pause_not_finite(self, error: NotFinite, cause: Cause | None) -> bool:
        """Pause with advice that suits the cause; return True if the run is resumed."""
        settings = self._state.settings
        change: dict[str, Any] = {
            "learning_rate": float(f"{settings.optim.learning_rate / 10:.3g}")
        }
        if settings.model.precision == "fp16":
            change = {"precision": "bf16"}
        hint = (
            f"run.resume({typed(change)}) or its button continues with these settings, "
            "run.resume() with the current ones; the data of the step is skipped"
        )
        in_code = cause is not None and cause.in_code
        in_data = cause is not None and cause.in_data
        if in_data:  # no settings would help
            change, hint = {}, f"{_NO_WEIGHT}; {_SKIPS}" if in_code else _SKIPS
        elif (risen := self._risen()) is not None:
            change, hint = {}, f"the weights are likely lost, as the loss {risen}; {_START_AGAIN}"
        else:
            again = self._resumed_at == self._state.step - 1 and "learning_rate" in change
            if again:
                change, hint = {}, _START_AGAIN
            if in_code:
                hint = f"{_CORRECT}; otherwise {hint}"
            if again:
                hint = f"the first step after resuming failed, too; {hint}"
        where = "with the weights of step {step}"
        resumed = self.pause(
            PauseReason(
                error, where, hint, "not finite", change, skips=in_data, told=self._became(cause)
            )
        )
        self.stopped_not_finite |= not resumed
        self._resumed_at = None if in_data else self._state.step
        return resumed

    def _became(self, cause: Cause | None) -> str:
        """Return what is not finite in the step after the last good one, with the cause."""
        state = self._state
        rows, _ = state.recorder.since(max(state.recorder.count - 64, 0))
        losses = rows[rows[:, INDEX["step"]] == state.step + 1, INDEX["loss"]]
        what = "a gradient became NaN or infinite"
        if len(losses) and not np.isfinite(losses[-1]):
            what = f"the loss became {'NaN' if np.isnan(losses[-1]) else 'infinite'}"
        told = f"{what} at step {state.step + 1}"
        # The learning rate has no part in a first step, nor in bad data.
        if state.step > state.began_at and (cause is None or not cause.in_data):
            risen = self._risen()
            told += f", after it {risen}" if risen and what.startswith("the loss") else ""
            told += f" (learning_rate={state.settings.optim.learning_rate:g})"
        return told if cause is None else f"{told}: {cause.told}"

    def _risen(self) -> str | None:
        """Return how the loss has risen, if it is far beyond where it began; else None."""
        losses = self._state.recorder.rows()[:, INDEX["loss"]]
        losses = losses[np.isfinite(losses)]
        if len(losses) < 2 or abs(losses[-1]) < _LOST * max(abs(losses[0]), 1e-3):
            return None
        return f"rose from {losses[0]:.3g} to {losses[-1]:.3g}"

    def _names(self, rows: Sequence[int], group: Sequence[Batch]) -> str:
        """Name the samples at `rows` of a step's micro-batches as the user's Dataset does."""
        found = self._indices(rows, group)
        return f": {self._state.train.named(found)}" if found else ""

    def _indices(self, rows: Sequence[int], group: Sequence[Batch]) -> list[int]:
        """Return the indices in the user's Dataset of the samples at `rows`; empty without one."""
        state = self._state
        if state.train.indices is None or not rows:
            return []
        first = state.read - sum(batches.count(batch)[0] for batch in group)
        return state.train.indices(state.epoch, [first + row for row in rows])

    def _device(self) -> str:
        return training_device(self._state.settings.parallel.device).type


def _bytes(state: Any) -> int:
    """Sum the sizes of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, Mapping) else state
    return sum(map(_bytes, parts)) if isinstance(state, Mapping | list | tuple) else 0
