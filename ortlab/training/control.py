"""Control of a run's loop from other threads: pauses, stops, checkpoints and changes of settings.

The loop looks at it between two steps, and around every read of data.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Literal

from ortlab.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class PauseReason:
    """Reason of a pause that nobody asked for, and what resumes the run.

    ``where`` and ``hint`` complete "it waits ...: ...". ``what`` names the failure in a few words.
    ``told`` describes it for the run's record; "" for the error with its notes.
    ``advice`` are the settings to resume with. ``skips`` is True if the run can skip the data of
    the step, the evaluation or the callback. ``passes`` is True if the run resumes by itself when
    the data comes that it is reading, or the callback returns.
    """

    error: Exception
    where: str
    hint: str
    what: str = ""
    advice: Mapping[str, Any] = field(default_factory=dict)
    skips: bool = False
    passes: bool = False
    told: str = ""


@dataclass(frozen=True)
class ChangeOutcome:
    """Outcome of a requested change of settings.

    ``state`` is "applied"; "refused" if the settings do not fit the run, or failed in their first
    step, so that it continues without them; or "dropped" if the run ended before. ``text`` lists
    the settings that differ, "" if they were in effect already, or says why the change was not
    applied. ``step`` is the last step before the change; None if it was dropped. ``cost_s`` is the
    time in seconds that it took, apart from an ordinary step.
    """

    state: Literal["applied", "refused", "dropped"]
    text: str = ""
    step: int | None = None
    cost_s: float = 0.0


class ChangeRequest(Future[ChangeOutcome]):
    """Requested change of settings, whose result is a `ChangeOutcome`.

    Changes that are requested before the same step are applied together and have one outcome; of
    two values of the same setting, the later one counts.

    Args:
        changes: Values of settings, by name.
    """

    def __init__(self, changes: Mapping[str, Any]) -> None:
        super().__init__()
        self.changes: Mapping[str, Any] = dict(changes)
        """Requested values of settings, by name."""

    def resolve(self, outcome: ChangeOutcome) -> None:
        """Set the outcome, unless there is one already or the request was canceled.

        Args:
            outcome: The outcome.
        """
        with contextlib.suppress(InvalidStateError):
            self.set_result(outcome)

    def __repr__(self) -> str:
        changes = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        if self.cancelled():
            return f"<ChangeRequest {changes}: canceled>"
        if not self.done():
            return f"<ChangeRequest {changes}: pending>"
        outcome = self.result()
        told: str = outcome.state
        if outcome.step is not None:
            told += f" after step {outcome.step}"
        if outcome.state != "applied":
            told += f": {outcome.text}"
        return f"<ChangeRequest {changes}: {told}>"


class Abandoned(BaseException):
    """Raised in the loop after a read of data that outlasted a stop, which nobody waits for."""


class Control:
    """Control of a loop: pause, stop, checkpoint, other settings.

    Any thread may call it. The loop looks at it between steps.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        """Start of the run, on the clock of `time.perf_counter`."""
        self.waiting = False
        """True while the loop stands still; a pause is requested before that."""
        self._changed = threading.Condition()
        self.settled = threading.Event()
        """Set while a wait for the loop is over: the loop has ended, or a failure paused it."""
        self.held: PauseReason | None = None
        """Reason of a pause that nobody asked for; None without one."""
        self.reading_since: float | None = None
        """Start of the current read of data or call of a callback, on the clock of
        `time.perf_counter`; else None."""
        self.reads_held_out = False
        """True if the current read is of held-out data."""
        self.calling: str | None = None
        """Callback that the loop waits for, as "Class.on_step_end"; None if it calls none."""
        self.abandoned = False
        """True if the loop was left in a read of data: it ends there, whenever the data comes."""
        self._in_read = threading.Lock()  # its owner finds the loop in a read, and keeps it there
        self._skipping = False
        self._pausing = False
        self._stopping = False
        self._closed = False
        self._asked: collections.deque[Future[Checkpoint]] = collections.deque()
        self._requests: list[ChangeRequest] = []
        self._taken: list[ChangeRequest] = []  # requests that the loop has, without an outcome yet

    def elapsed_s(self) -> float:
        """Return the seconds since the run began, pauses included."""
        return time.perf_counter() - self.began

    def pause(self) -> None:
        """Ask the loop to wait before its next step. After a stop this does nothing."""
        with self._changed:
            self._pausing = not self._stopping
            if self.held is not None and self.held.passes:
                self.held = None  # the loop is to stay paused even when its data arrives
                self.settled.clear()

    def resume(self, *, skip: bool = False) -> None:
        """Resume a paused loop.

        Args:
            skip: Skip the data or the evaluation whose failure paused it.
        """
        with self._changed:
            self._skipping = skip
            self._go_on()

    def hold(self, hold: PauseReason) -> None:
        """Pause the loop because of a failure.

        Args:
            hold: Reason of the pause.
        """
        with self._changed:
            if not self._stopping:
                self._pausing, self.held, self._skipping = True, hold, False
                self.settled.set()

    @property
    def skipping(self) -> bool:
        """True if the last `resume` asked to skip what failed."""
        return self._skipping

    @contextlib.contextmanager
    def reading_held_out(self) -> Iterator[None]:
        """Mark a read of held-out data, as `reading` does for training data."""
        self.reads_held_out = True
        try:
            with self.reading():
                yield
        finally:
            self.reads_held_out = False

    @contextlib.contextmanager
    def calling_back(self, name: str) -> Iterator[None]:
        """Mark a call of a callback, which may take any time, as `reading` does for data.

        Args:
            name: The callback and its method.
        """
        self.calling = name
        try:
            with self.reading():
                yield
        finally:
            self.calling = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Mark a read of data, which may take any time.

        Raises:
            Abandoned: If the loop was abandoned meanwhile.
        """
        self.reading_since = time.perf_counter()
        try:
            yield
        finally:
            with self._in_read, self._changed:
                self.reading_since = None
                if self.held is not None and self.held.passes:
                    self._go_on()
                if self.abandoned:
                    raise Abandoned

    @contextlib.contextmanager
    def kept_in_read(self, since: float) -> Iterator[bool]:
        """Keep the loop in its current read of data inside the context.

        Args:
            since: Start of the read that is meant.

        Yields:
            True if the loop is in that read.
        """
        with self._in_read:
            yield self.reading_since == since

    def hold_in_read(self, hold: PauseReason, since: float) -> bool:
        """Pause a loop that is in a read of data; it resumes by itself when the data comes.

        Args:
            hold: Reason of the pause.
            since: Start of the read that is meant.

        Returns:
            False if the loop is no longer in that read, or is to pause or stop anyway.
        """
        with self._changed:
            if self.reading_since != since or self._pausing:
                return False
            self.hold(hold)
            return self.held is hold

    def abandon(self, after_s: float) -> bool:
        """Abandon a loop that is to stop, if it has waited for data too long.

        Args:
            after_s: Seconds that a read may take.

        Returns:
            True if the loop is abandoned.
        """
        with self._in_read, self._changed:
            since = self.reading_since
            if self._stopping and since is not None:
                self.abandoned |= time.perf_counter() - since > after_s
            return self.abandoned

    def _go_on(self) -> None:
        self._pausing, self.held = False, None
        if not self._closed:
            self.settled.clear()
        self._changed.notify_all()

    def stop(self) -> None:
        """Ask the loop to end after the step in flight, also while it is paused."""
        with self._changed:
            self._stopping = True
            self._go_on()

    def checkpoint(self) -> Future[Checkpoint]:
        """Request the run's state after the step in flight; a paused loop gives it at once.

        Returns:
            Future of the state. It is canceled if the loop ends before.
        """
        asked: Future[Checkpoint] = Future()
        with self._changed:
            if self._closed:
                asked.cancel()
            else:
                self._asked.append(asked)
                self._changed.notify_all()
        return asked

    def apply(self, changes: Mapping[str, Any]) -> ChangeRequest:
        """Request other settings from the next step on.

        Args:
            changes: Values of settings, by name.

        Returns:
            Future of the outcome. Canceling it before the loop takes it withdraws the request.
        """
        request = ChangeRequest(changes)
        with self._changed:
            closed = self._closed
            if not closed:
                self._requests.append(request)
        if closed:
            request.resolve(_DROPPED)
        return request

    def take_requests(self) -> list[ChangeRequest]:
        """Return the changes that were requested since the last call, for the loop to resolve.

        Returns:
            The requests in their order, without those that were canceled.
        """
        with self._changed:
            requests, self._requests = self._requests, []
            taken = [each for each in requests if each.set_running_or_notify_cancel()]
            self._taken = [each for each in self._taken if not each.done()] + taken
        return taken

    def drop_requests(self) -> None:
        """Resolve all requested changes that have no outcome as dropped."""
        with self._changed:
            requests = self._taken + self._requests
            self._taken, self._requests = [], []
        for request in requests:
            request.resolve(_DROPPED)

    def close(self) -> None:
        """End all waits for the loop, which is over."""
        with self._changed:
            self._closed = True
            self.settled.set()
            for asked in self._asked:
                asked.cancel()
            self._asked.clear()
        self.drop_requests()

    @property
    def pausing(self) -> bool:
        """True if a pause was requested."""
        return self._pausing

    @property
    def stopping(self) -> bool:
        """True if a stop was requested."""
        return self._stopping

    def proceed(self, state: Callable[[], Checkpoint] | None = None) -> bool:
        """Wait while the loop is paused, and serve requests for its state. The loop calls this.

        Args:
            state: Returns the run's state; None to leave the requests for later.

        Returns:
            False if the loop is to end.
        """
        try:
            while True:
                with self._changed:
                    if not self._asked or state is None:
                        if not self._pausing:
                            return not self._stopping
                        self.waiting = True
                        self._changed.wait()
                        continue
                    asked = self._asked.popleft()
                if asked.set_running_or_notify_cancel():
                    try:
                        asked.set_result(state())
                    # Memory may not suffice for a copy: the caller gets the error, and the run
                    # continues.
                    except Exception as error:  # noqa: BLE001
                        asked.set_exception(error)
        finally:
            self.waiting = False


_DROPPED = ChangeOutcome("dropped", "the run ended before the change was applied")
