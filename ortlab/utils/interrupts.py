"""Ctrl-C, and a notebook's stop button, heard while something is awaited; and SIGTERM."""

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
    """Has SIGTERM end this process as `sys.exit` does, so that what is to be kept at its end is.

    By itself Python ends at once. A handler that is there stays, and where none can be set, outside
    the main thread, nothing changes. The exit status is the shell's of a process that a signal
    ended, 143.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def ends_already() -> None:
    """Has SIGTERM change nothing any more once Python ends: raised again, it would end the waits.

    Jupyter sends one to a kernel that takes its time to shut down.
    """
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


async def until(over: threading.Event, interrupted: Callable[[], None]) -> None:
    """Waits for `over` with the buttons alive; `interrupted` is called when an interrupt ends that.

    CancelledError or KeyboardInterrupt then, and CancelledError alone after a time-out.
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
    """Hears SIGINT while a wait goes on, and hands it on to who handled it before.

    ipykernel and asyncio.run make an interrupt a cancellation of the cell's or the main task, and
    a task that is cancelled cannot tell that from a timeout: asyncio.timeout cancels the very same
    task. The signal itself tells. Outside the main thread, where none arrives, nothing is heard.
    """

    def __init__(self) -> None:
        self.heard = False
        self._over = False
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        if self._before is not None:
            self._before(number, frame)

    def __enter__(self) -> Self:
        before = signal.getsignal(signal.SIGINT)
        # Without a handler in Python an interrupt is ignored, or ends the process: so it stays.
        if threading.current_thread() is threading.main_thread() and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        if threading.current_thread() is not threading.main_thread():
            return
        # Waits end in any order: who is over lies below one that still hears, and goes with it.
        # A handler that somebody else has set meanwhile (the kernel, after the cell) stays.
        while isinstance(top := signal.getsignal(signal.SIGINT), Interrupts) and top._over:
            signal.signal(signal.SIGINT, top._before)
