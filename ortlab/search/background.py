"""Work in a thread of its own that can be awaited, seen and stopped, and keeps what it has."""

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
    """The work was asked to end; no error of a set-up, so who catches those lets it through."""


class Background(abc.ABC, Generic[R]):
    """Work whose result so far is `standing`; waited for by ``await`` or `result`.

    A stop, an interrupt too, ends it after the turn in flight, and what was measured stays. What
    `_work` raises is raised where it is awaited.
    """

    kind: ClassVar[str]
    _numbers: ClassVar[dict[str, itertools.count[int]]] = {}

    def __init__(self) -> None:
        number = next(self._numbers.setdefault(self.kind, itertools.count(1)))
        self.name = f"{self.kind}-{number}"
        self.doing = "starting"
        """What takes its time just now."""
        self.version = 0
        """Another number whenever there is something new to be seen."""
        self.error: BaseException | None = None
        """What the work raised."""
        self._stop = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    @abc.abstractmethod
    def standing(self) -> R:
        """What there is so far."""

    @abc.abstractmethod
    def apply(self) -> str:
        """Has the best of what was found hold where the model is trained; says so in words.

        ValueError where that cannot be.
        """

    @abc.abstractmethod
    def _work(self) -> None:
        """Does it all, in the thread; `_go_on` ends it where a stop was asked for."""

    def start(self, show: Callable[[Any], None] = lambda _: None) -> None:
        """Starts the thread, has the work shown, and returns at once."""
        context = contextvars.copy_context()  # what the thread prints stays with its own cell
        self._thread = Thread(context.run, self._drive, name=f"ortlab-{self.name}")
        self._thread.start()
        show(self)

    def stop(self) -> None:
        """Ends it after the turn in flight; not waited for. Twice is fine."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def wait_over(self, timeout: float | None = None) -> bool:
        """Blocks until it is over, at most `timeout` seconds; returns `over`."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> R:
        """Blocks until it is over; what was measured. An interrupt (Ctrl-C) stops it.

        TimeoutError after `timeout` seconds; it goes on.
        """
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(f"{self.name} is not over after {timeout:g} s: {self.doing}")
        except KeyboardInterrupt:
            self._interrupted()
            self._over.wait()
        return self._outcome()

    def __await__(self) -> Generator[Any, None, R]:
        """Waits with the buttons alive. An interrupt stops it, a time-out does not."""
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        await until(self._over, self._interrupted)
        return self._outcome()

    def _interrupted(self) -> None:
        self.stop()
        print(f"{self.name} stops after the turn in flight and keeps what it has", flush=True)

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
        # Whatever is raised is kept here, and raised where the work is awaited.
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
        """Raises Stopped where a stop was asked for."""
        if self._stop.is_set():
            raise Stopped
