"""Checkpoints of a run: when they are saved, which ones are kept, and the thread that writes them.

``last-N`` are the last ones, N the step; ``best`` is that of the best evaluation. Each is written
to a temporary file and renamed once it is on the disk, and only then an older one is deleted:
after a crash, or on a full disk, the checkpoints that exist are complete.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history.run_folder import RunFolder
from ortlab.training.control import Control
from ortlab.training.training_state import TrainingState
from ortlab.utils.errors import out_of_memory
from ortlab.utils.threads import Thread

LAST: Final = "last"
BEST: Final = "best"
_RETRY_S: Final = 10.0
_WORKERS_CHECKPOINT: Final = 100
"""Default number of steps between the checkpoints of a run on workers."""


class CheckpointSchedule:
    """Decides when a run saves a checkpoint, and takes it.

    Args:
        state: State of the run.
        control: Clock of the run.
        keep: Receives each checkpoint, in memory of its own.
    """

    def __init__(
        self, state: TrainingState, control: Control, keep: Callable[[Checkpoint], object]
    ) -> None:
        self._state = state
        self._control = control
        self._keep = keep
        self._kept_step = state.step
        self._kept_s = control.elapsed_s()

    def save_if_due(self) -> None:
        """Save a checkpoint if ``save_steps`` or ``checkpoint_minutes`` asks for one."""
        settings = self._state.settings
        of_workers = _WORKERS_CHECKPOINT if settings.parallel.elsewhere else None
        every, minutes = (
            settings.checkpoint.save_steps or of_workers,
            settings.checkpoint.checkpoint_minutes,
        )
        if every and self._state.step % every == 0:
            self._save(self._state.checkpoint())
        elif minutes and self._control.elapsed_s() - self._kept_s >= 60 * minutes:
            self._save(self._state.copy())

    def save_unsaved(self) -> None:
        """Save the last step if that was not done yet and memory has room for a copy."""
        state = self._state
        if self._kept_step == state.step or state.lost:
            return
        try:
            self._save(state.copy())
        except Exception as error:
            if not out_of_memory(error):
                raise
            told = f"no checkpoint of step {state.step}: not enough memory for a copy"
            state.tell("warning", told)

    def _save(self, taken: Checkpoint) -> None:
        self._kept_step, self._kept_s = self._state.step, self._control.elapsed_s()
        self._state.remember(taken)
        self._keep(taken)


class Tells(Protocol):
    """Function that records an event; see `ortlab.training.run_record.RunRecord.event`."""

    def __call__(self, kind: str, text: str, step: int | None = None) -> object:
        """Record an event of a step; None for the current one."""
        ...


class CheckpointWriter:
    """Writer of a run's checkpoints, in a thread of its own, that deletes those beyond the limit.

    While one checkpoint is being written, the newest one after it waits in memory and is written
    next; those in between are skipped. One that cannot be written waits, too, and is tried again
    every ten seconds, until there is a newer one.

    Args:
        folder: The run's folder.
        first: Called before each write, to bring the run's metrics up to date.
        tell: Receives the kind, the text and the step of events.
    """

    def __init__(self, folder: RunFolder, *, first: Callable[[], object], tell: Tells) -> None:
        self.written = 0
        """Number of checkpoints that were written."""
        self._folder = folder
        self._first = first
        self._tell = tell
        self._last: list[Path] = []
        self._waiting: dict[str, tuple[Checkpoint, int]] = {}
        self._trouble: str | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def trouble(self) -> str | None:
        """Reason why the last checkpoint could not be written; None if it was written."""
        return self._trouble

    @property
    def newest(self) -> Path | None:
        """Path of the last checkpoint that is on the disk; None before the first."""
        return self._last[-1] if self._last else None

    def keep(self, taken: Checkpoint, many: int) -> None:
        """Write a checkpoint as one of the last ones, in the background.

        Args:
            taken: The checkpoint.
            many: Number of last checkpoints to keep.
        """
        self._ask(LAST, taken, many)

    def keep_best(self, taken: Checkpoint) -> None:
        """Write a checkpoint in place of the best one so far, in the background.

        Args:
            taken: The checkpoint.
        """
        self._ask(BEST, taken, 1)

    def place(self, name: str, taken: Checkpoint) -> Path:
        """Return the path of a checkpoint in the run's folder.

        Args:
            name: Name of the checkpoint, without a suffix.
            taken: The checkpoint.

        Returns:
            A file, or a folder for the shards of several ranks.
        """
        file = self._folder.checkpoint_path(name)
        return file if taken.shards is None else file.with_suffix("")

    def trim(self, many: int) -> None:
        """Delete the oldest of the last checkpoints.

        Args:
            many: Number of last checkpoints to keep.
        """
        while len(self._last) > many:
            remove(self._last.pop(0))

    def close(self) -> None:
        """Write what waits, and end the thread. A second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        else:
            self._work()  # what waits, if no thread could be started

    def _ask(self, name: str, taken: Checkpoint, many: int) -> None:
        with self._changed:
            self._waiting[name] = (taken, many)
            self._changed.notify_all()
            if self._thread is None:
                self._start(taken.position.step)

    def _start(self, step: int) -> None:
        thread = Thread(self._work, name="ortlab-checkpoints")
        try:
            thread.start()
        except RuntimeError as error:  # no memory for its stack, as after a step that did not fit
            told = f"no checkpoint of step {step} yet: {error}; the run continues and tries again"
            self._tell("warning", told)
        else:
            self._thread = thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                taken, many = self._waiting.pop(name)
            if not self._write(name, taken, many):
                self._put_back(name, taken, many)
            del taken  # as large as model and optimizer

    def _put_back(self, name: str, taken: Checkpoint, many: int) -> None:
        """Let a checkpoint that could not be written wait, unless there is a newer one."""
        with self._changed:
            if self._closing or name in self._waiting:
                return
            self._waiting[name] = (taken, many)
            waiting = dict(self._waiting)
            self._changed.wait_for(lambda: self._closing or self._waiting != waiting, _RETRY_S)

    def _write(self, name: str, taken: Checkpoint, many: int) -> bool:
        step = taken.position.step
        place = self.place(name if name == BEST else f"{name}-{step}", taken)
        try:
            self._first()
            taken.save(place)
        # A full disk, not enough memory: the run continues, the earlier checkpoints are complete,
        # and the next one is tried.
        except Exception as error:  # noqa: BLE001
            before, self._trouble = self._trouble, f"no checkpoint of step {step}: {error}"
            if before is None:
                self._tell("warning", f"{self._trouble}; the run continues and tries again")
            return False
        if self._trouble is not None:
            self._trouble = None
            self._tell("note", f"checkpoints are saved again: {place.name}")
        self.written += 1
        self._tell("checkpoint", f"checkpoint {place.name.removesuffix('.safetensors')}", step)
        if name == LAST:
            self._last = [path for path in self._last if path != place] + [place]
            self.trim(many)
        return True


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint. One that is gone already, or cannot be deleted, is ignored.

    Args:
        checkpoint: A file or a folder.
    """
    with contextlib.suppress(OSError):  # deleted by somebody else
        shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
