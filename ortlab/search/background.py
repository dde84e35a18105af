"""Background work in its own thread, which can be awaited, displayed and stopped."""

from __future__ import annotations

import abc
import contextvars
import itertools
import threading
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Generic, TypeVar

from ortlab.engines.base import progress
from ortlab.utils.errors import shorten
from ortlab.utils.interrupts import until
from ortlab.utils.threads import Thread

R = TypeVar("R")


class Stopped(BaseException):
    """Raised in the worker thread to end the work after a stop request.

    It is not an Exception, so that code that catches a set-up's errors lets it pass.
    """


class Background(abc.ABC, Generic[R]):
    """Work in its own thread with a result so far, `standing`, awaited with ``await`` or `result`.

    A stop request or an interrupt ends the work after the current turn, and all measurements so far
    are kept. An exception that `_work` raises is raised again where the work is awaited.
    """

    kind: ClassVar[str]
    _numbers: ClassVar[dict[str, itertools.count[int]]] = {}

    def __init__(self) -> None:
        number = next(self._numbers.setdefault(self.kind, itertools.count(1)))
        self.name = f"{self.kind}-{number}"
        self.doing = "starting"
        """Description of the current activity."""
        self.version = 0
        """Number that changes whenever there is something new to display."""
        self.error: BaseException | None = None
        """Exception that the work raised, if any."""
        self._stop = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    @abc.abstractmethod
    def standing(self) -> R:
        """Result so far."""

    @abc.abstractmethod
    def apply(self) -> str:
        """Apply the best settings found so far to the training of the model.

        Returns:
            Text that says what was done.

        Raises:
            ValueError: If there are none, or they cannot be applied.
        """

    @abc.abstractmethod
    def _work(self) -> None:
        """Do all work in the thread. `_go_on` ends it if a stop was requested."""

    def start(self, show: Callable[[Any], None] = lambda _: None) -> None:
        """Start the thread, display the work and return immediately.

        Args:
            show: Called with this object to display it.
        """
        context = contextvars.copy_context()  # routes the thread's output to its own cell
        self._thread = Thread(context.run, self._drive, name=f"ortlab-{self.name}")
        self._thread.start()
        show(self)

    def stop(self) -> None:
        """Request a stop after the current turn and return. Repeated calls are fine."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """True if a stop was requested."""
        return self._stop.is_set()

    def over(self) -> bool:
        """Return True if the work has ended."""
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Block until the work has ended.

        Args:
            timeout: Maximum number of seconds to wait, None for no limit.

        Returns:
            True if the work has ended.
        """
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> R:
        """Block until the work has ended. An interrupt (Ctrl-C) stops the work.

        Args:
            timeout: Maximum number of seconds to wait, None for no limit.

        Returns:
            Everything that was measured.

        Raises:
            TimeoutError: After `timeout` seconds. The work continues.
        """
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(
                    f"{self.name} is still running after {timeout:g} s: {self.doing}"
                )
        except KeyboardInterrupt:
            self._interrupted()
            self._over.wait()
        return self._outcome()

    def __await__(self) -> Generator[Any, None, R]:
        """Wait while widgets stay responsive. An interrupt stops the work, a timeout does not."""
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        await until(self._over, self._interrupted)
        return self._outcome()

    def _interrupted(self) -> None:
        self.stop()
        print(f"{self.name} stops after the current turn and keeps its results", flush=True)

    def _outcome(self) -> R:
        if self.error is not None:
            raise self.error
        return self.standing

    def _drive(self) -> None:
        progress.set(self._tell)
        try:
            self._work()
        except Stopped:
            pass
        # Any exception is stored here and raised again where the work is awaited.
        except BaseException as error:  # noqa: BLE001
            shorten(error)
            self.error = error
        finally:
            self._tell("stopped" if self.stopped else "finished")
            self._over.set()

    def _tell(self, line: str) -> None:
        self.doing = line
        self.version += 1

    def _go_on(self) -> None:
        """Raise Stopped if a stop was requested."""
        if self._stop.is_set():
            raise Stopped
