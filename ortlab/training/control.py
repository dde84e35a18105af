"""What others ask of a run's loop, from threads of their own, and what they see of it.

The loop looks at it between two steps, and around every read of data.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ortlab.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class PauseReason:
    """Why a run waits that nobody has paused, and what lets it go on.

    ``where`` and ``hint`` complete "it waits ...: ..."; ``advice`` are the settings to go on with,
    ``skips`` says whether it can go on past the data of the step, or the evaluation, and
    ``passes`` whether it goes on by itself when the data comes that it is in the middle of reading.
    """

    error: Exception
    where: str
    hint: str
    what: str = ""
    advice: Mapping[str, Any] = field(default_factory=dict)
    skips: bool = False
    passes: bool = False


class Abandoned(BaseException):
    """A read of the data went on for too long after a stop, and nobody waits for it any more."""


class Control:
    """What anyone may ask of the loop: pause, stop, its state, other settings.

    The loop looks at it between steps.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        """When the run began, on `time.perf_counter`'s clock."""
        self.waiting = False
        """Whether the loop stands still now; a pause is asked for before that."""
        self._changed = threading.Condition()
        self.settled = threading.Event()
        """Set while a wait for the loop is over: the loop is, or was held."""
        self.held: PauseReason | None = None
        """What keeps a loop waiting that nobody has paused."""
        self.reading_since: float | None = None
        """Since when the loop waits for data, on `time.perf_counter`'s clock; None when not."""
        self.reads_held_out = False
        """Whether what it waits for is data to evaluate on."""
        self.abandoned = False
        """Whether the loop was left where it waits for data: it ends there, whenever that comes."""
        self._in_read = threading.Lock()
        """Who has it finds the loop in a read, and keeps it there."""
        self._skipping = False
        self._pausing = False
        self._stopping = False
        self._closed = False
        self._asked: collections.deque[Future[Checkpoint]] = collections.deque()
        self._changes: dict[str, Any] = {}

    def elapsed_s(self) -> float:
        """Seconds since the run began, pauses included."""
        return time.perf_counter() - self.began

    def pause(self) -> None:
        """Asks the loop to wait before its next step; nothing once a stop was asked for."""
        with self._changed:
            self._pausing = not self._stopping
            if self.held is not None and self.held.passes:
                self.held = None  # when its data comes the loop is to wait all the same
                self.settled.clear()

    def resume(self, *, skip: bool = False) -> None:
        """Lets a paused loop go on; with `skip` past what it was held in, data or an evaluation."""
        with self._changed:
            self._skipping = skip
            self._go_on()

    def hold(self, hold: PauseReason) -> None:
        """Has the loop wait, as after `pause`, since it cannot go on by itself."""
        with self._changed:
            if not self._stopping:
                self._pausing, self.held, self._skipping = True, hold, False
                self.settled.set()

    @property
    def skipping(self) -> bool:
        """Whether who let it go on last wanted it past what it was held in."""
        return self._skipping

    @contextlib.contextmanager
    def reading_held_out(self) -> Iterator[None]:
        """`reading` what the model is evaluated on."""
        self.reads_held_out = True
        try:
            with self.reading():
                yield
        finally:
            self.reads_held_out = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What reads data, which may take any time. `Abandoned` when nobody waited for its end."""
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
        """Whether the loop is in the read that it began at `since`; where it is, it stays there."""
        with self._in_read:
            yield self.reading_since == since

    def hold_in_read(self, hold: PauseReason, since: float) -> bool:
        """Holds a loop in the read that it began at `since`; False where it is not, or is to pause.

        When the data comes it goes on by itself.
        """
        with self._changed:
            if self.reading_since != since or self._pausing:
                return False
            self.hold(hold)
            return self.held is hold

    def abandon(self, after_s: float) -> bool:
        """Leaves a loop that is to stop where it has waited for data since `after_s` seconds."""
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
        """Asks the loop to end after the step in flight, from a pause too."""
        with self._changed:
            self._stopping = True
            self._go_on()

    def checkpoint(self) -> Future[Checkpoint]:
        """Asks for the run's state after the step in flight; a paused loop gives it at once.

        The future is cancelled where the loop ends before.
        """
        asked: Future[Checkpoint] = Future()
        with self._changed:
            if self._closed:
                asked.cancel()
            else:
                self._asked.append(asked)
                self._changed.notify_all()
        return asked

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Asks for settings by name, from the next step on."""
        with self._changed:
            self._changes.update(changes)

    def changes(self) -> dict[str, Any]:
        """The settings that were asked for since the last time."""
        with self._changed:
            changes, self._changes = self._changes, {}
        return changes

    def close(self) -> None:
        """The loop is over and answers no more."""
        with self._changed:
            self._closed = True
            self.settled.set()
            for asked in self._asked:
                asked.cancel()
            self._asked.clear()

    @property
    def pausing(self) -> bool:
        """Whether a pause was asked for."""
        return self._pausing

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stopping

    def proceed(self, state: Callable[[], Checkpoint] | None = None) -> bool:
        """Blocks while paused; False when the loop is to end. Who asked for the `state` gets it."""
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
                    # Memory may not suffice for a copy: who asked is told, and the run goes on.
                    except Exception as error:  # noqa: BLE001
                        asked.set_exception(error)
        finally:
            self.waiting = False
