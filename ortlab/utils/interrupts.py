"""Handling of SIGINT (Ctrl-C, a notebook's stop button) during a wait, and of SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_POLL_S = 0.1


def end_in_order() -> None:
    """Make SIGTERM end this process as `sys.exit` does, so that cleanup at exit runs.

    By default Python ends immediately. An existing handler is kept. Outside the main thread, where
    no handler can be set, nothing changes. The exit status is 143, which a shell reports for a
    process ended by this signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def ends_already() -> None:
    """Ignore SIGTERM while Python exits: another one would interrupt the waits of the cleanup.

    Jupyter sends it to a kernel that is slow to shut down.
    """
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
