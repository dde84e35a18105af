"""Handling of SIGINT (Ctrl-C, a notebook's stop button) during a wait, SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from ortlab.utils.errors import shorten

_POLL_S = 0.1
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a process: by the system or `kill`, and when its terminal is closed."""


def end_in_order() -> None:
    """Make SIGTERM and SIGHUP end this process as `sys.exit` does, so that cleanup at exit runs.

    By default Python ends immediately. An existing handler is kept, and a signal that is ignored
    (nohup does that) stays so. Outside the main thread, where no handler can be set, nothing
    changes. The exit status is 143 or 129, which a shell reports for a process ended by the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit)


def ends_already() -> None:
    """Ignore these signals while Python exits: another one would interrupt the cleanup's waits.

    Jupyter sends SIGTERM to a kernel that is slow to shut down.
    """
    for number in _ENDS:
        if signal.getsignal(number) is _exit:
            signal.signal(number, signal.SIG_IGN)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


async def until(over: threading.Event, interrupted: Callable[[], None]) -> None:
    """Wait for `over` while the event loop keeps running, so that a notebook's buttons work.

    Args:
        over: Event to wait for.
        interrupted: Called if an interrupt ends the wait, before the exception is raised again.

    Raises:
        asyncio.CancelledError: The wait was interrupted or timed out.
        KeyboardInterrupt: The wait was interrupted.
    """
    with Interrupts() as interrupts:
        try:
            while not over.is_set():
                await asyncio.sleep(_POLL_S)
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            if interrupts.heard or isinstance(error, KeyboardInterrupt):
                interrupted()
                # A shutdown of the kernel, too, begins with an interrupt: the cell shows one line.
                error.args = error.args or ("the wait was interrupted",)
                shorten(error)
            raise


class Interrupts:
    """Context manager that notes SIGINT during a wait and passes it to the previous handler.

    ipykernel and asyncio.run turn an interrupt into a cancellation of the cell's or the main task.
    A canceled task cannot distinguish it from a timeout, since asyncio.timeout cancels the same
    task; only the signal shows the difference. Outside the main thread, which never receives the
    signal, this does nothing.

    Attributes:
        heard: True once an interrupt has arrived.
    """

    def __init__(self) -> None:
        self.heard = False
        self._over = False
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal and call the previous handler."""
        self.heard = True
        if self._before is not None:
            self._before(number, frame)

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        # Without a Python handler, an interrupt is ignored or ends the process; keep it that way.
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if threading.current_thread() is not threading.main_thread():
            return
        # Waits may end in any order. A handler whose wait is over stays below one that is still
        # active and is removed together with it. A handler that other code has set in the
        # meantime (the kernel does, after the cell) is kept.
        while isinstance(top := signal.getsignal(signal.SIGINT), Interrupts) and top._over:
            signal.signal(signal.SIGINT, top._before)
