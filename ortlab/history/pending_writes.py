"""Writes of a run that failed, such as on a full disk, and the thread that repeats them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from ortlab.history.run_folder import RunFolder
from ortlab.utils import at_exit
from ortlab.utils.threads import Thread

_FIRST_S: Final = 2.0
_MOST_S: Final = 60.0


class PendingWrites:
    """Writes parts of a run; one that fails is repeated until it succeeds or Python ends.

    Args:
        folder: Folder of the run.
        tell: Receives the kind and the text of events.
    """

    def __init__(self, folder: RunFolder, tell: Callable[[str, str], object]) -> None:
        self._folder = folder
        self._tell = tell
        self._lock = threading.RLock()
        self._writes: dict[str, Callable[[], object]] = {}
        self._error = ""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def trouble(self) -> str | None:
        """Parts that are not written, and why, in a line; None if all are."""
        parts = ", ".join(list(self._writes))
        return f"not saved yet: {parts} ({self._error})" if parts else None

    def write_json(self, file: str, values: Mapping[str, Any]) -> None:
        """Write ``file``.json, as `RunFolder.write_json` does, or repeat that later.

        Args:
            file: Name of the file without its suffix, and of the part.
            values: The content.
        """
        self.write(f"the {file}", functools.partial(self._folder.write_json, file, values))

    def write(self, part: str, write: Callable[[], object]) -> None:
        """Write a part of the run, or repeat that later if it raises OSError.

        Args:
            part: Name of the part, for users. An earlier write of the same part is dropped.
            write: Writes it completely or not at all.
        """
        with self._lock:
            self._writes.pop(part, None)
            try:
                write()
            except OSError as error:
                self.repeat(part, write, error)

    def repeat(self, part: str, write: Callable[[], object], error: Exception) -> None:
        """Repeat a write that has failed.

        Args:
            part: Name of the part, for users.
            write: Writes it completely or not at all; raises OSError or RuntimeError if it cannot.
            error: Reason of the failure.
        """
        with self._lock:
            first = not self._writes
            self._writes[part], self._error = write, str(error.__cause__ or error)
            if self._thread is None:
                self._thread = Thread(self._work, name="ortlab-pending-writes")
                self._thread.start()
                at_exit.register(self._last_time, last=True)
        if first:
            self._tell("warning", f"{self.trouble}; it is tried again until there is room")

    def _work(self) -> None:
        wait_s = _FIRST_S
        while not self._closed.wait(wait_s):
            wait_s = min(2 * wait_s, _MOST_S)
            with self._lock:
                if self._repeated():
                    self._thread = None
                    at_exit.unregister(self._last_time)
                    break
        else:
            return
        self._tell("note", "everything is saved now")

    def _last_time(self) -> None:
        """Repeat the writes before Python ends."""
        self._closed.set()
        with self._lock:
            self._repeated()

    def _repeated(self) -> bool:
        """Repeat the writes in their order; return True if none is left."""
        for part, write in list(self._writes.items()):
            try:
                write()
            except (OSError, RuntimeError) as error:  # a checkpoint's own error
                self._error = str(error.__cause__ or error)
            else:
                del self._writes[part]
        return not self._writes
