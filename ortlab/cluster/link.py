"""Connections to the hosts of workers: a process here whose standard input reaches each host.

The process is ssh, srun or mpirun; its command line has no key of the cluster: everything goes
through its standard input. The same connection serves the checks and the workers. When it ends in
any way, the workers on that host end (`ortlab.cluster.host_side`).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from ortlab.cluster import facts
from ortlab.utils.threads import Thread

_FIRST_PYTHON: Final = (
    'for p in "$@"; do case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'q=$(command -v "$p") && exec "$q" -c '
    '"import sys; exec(sys.stdin.readline())"; done; '
    f"""echo '{facts.GREETING}{{"missing": true}}'"""
)
"""Script for sh that becomes the first Python of its arguments that exists."""
_TO_ANSWER_S: Final = 2.0
_TO_END_S: Final = 6.0
"""Seconds that a host has to end its workers before the connection is cut."""


def first_python(pythons: Sequence[str]) -> list[str]:
    """Return the command for a host that starts the first Python that exists there.

    Args:
        pythons: Interpreters to look for.
    """
    return ["sh", "-c", _FIRST_PYTHON, "sh", *pythons]


@dataclass(frozen=True)
class Way:
    """Way to a host: the command here that runs Python there.

    Attributes:
        host: The host as the user knows it.
        command: The command, whose standard input and output are those of Python.
        workers: Number of workers to start there.
        env: Environment of the command; None for that of this process.
    """

    host: str
    command: Sequence[str]
    workers: int
    env: Mapping[str, str] | None = None


class Link:
    """Connection to one host, on which Python has been started.

    ``ended`` are the exit codes of its workers that ended, by process id; a negative one is the
    number of a signal, None is unknown.

    Args:
        way: The way to it.
        reply_to: Address and port of this process to which the host connects back.

    Raises:
        OSError: If the command cannot be started.
    """

    def __init__(self, way: Way, reply_to: tuple[str, int]) -> None:
        self.host = way.host
        self.workers = way.workers
        self.token = secrets.token_hex(facts.TOKEN_BYTES // 2)
        self._lifeline: socket.socket | None = None
        self._joined = threading.Event()
        self.ended: dict[int, int | None] = {}
        self._pids: list[int] = []
        self._greeting: dict[str, Any] | None = None
        self._words: deque[str] = deque(maxlen=20)
        self._answered = threading.Event()
        self._process = subprocess.Popen(
            list(way.command),
            env=None if way.env is None else dict(way.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt of the kernel is not for it
        )
        self._errors = Thread(self._listen_to_errors, name="ortlab-host-errors")
        self._errors.start()  # before the other one, which waits for its end
        self._hearing = Thread(self._hear, name="ortlab-host")
        self._hearing.start()
        address, port = reply_to
        self._say(facts.as_text("greet()"))
        self._say(json.dumps({"address": address, "port": port, "token": self.token}))

    def greeting(self, until: float) -> dict[str, Any] | None:
        """Wait for the host's facts.

        Args:
            until: Time of `time.monotonic` to wait for.

        Returns:
            What `facts.greet` told; None if the connection ended before it, or the time is over.
        """
        self._answered.wait(max(0.0, until - time.monotonic()))
        return self._greeting

    def joined(self, lifeline: socket.socket) -> None:
        """Take the connection that the host has made to this process.

        Args:
            lifeline: The connection, which stays open as long as this process needs the host.
        """
        self._lifeline = lifeline
        self._joined.set()

    def is_joined(self, seconds: float) -> bool:
        """Return whether the host has connected to this process.

        Args:
            seconds: Time to wait for it.
        """
        return self._joined.wait(seconds)

    @property
    def alive(self) -> bool:
        """True while the connection stands."""
        return self._process.poll() is None

    @property
    def words(self) -> list[str]:
        """The last lines that the command and the host's processes wrote as errors."""
        return list(self._words)

    def start(self, connection: Mapping[str, Any]) -> None:
        """Start the workers on the host.

        Args:
            connection: ipyparallel's connection information for engines, with the key.
        """
        order = {"host": self.host, "count": self.workers, "connection": connection}
        self._say(json.dumps(order))

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ask the host to end its workers; see `wait`.

        Args:
            number: Signal that ends them; those that are left after 2 s are killed.
        """
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._say(str(int(number)))
            assert self._process.stdin is not None
            self._process.stdin.close()

    def wait(self, until: float) -> bool:
        """Wait for the end of the connection, and cut it when the time is over.

        Args:
            until: Time of `time.monotonic` to wait for.

        Returns:
            False if it had to be cut, so that the workers may end some seconds later.
        """
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            _kill(self._process)
            return False
        finally:
            if self._lifeline is not None:
                self._lifeline.close()
            for reader in (self._hearing, self._errors):
                reader.join(_TO_ANSWER_S)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its words say why
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith(facts.GREETING):
                continue
            told = json.loads(line.removeprefix(facts.GREETING))
            if "started" in told:
                self._pids.append(told["started"])
            elif "ended" in told:
                self.ended[told["ended"]] = told["code"]
            else:
                self._greeting = told
                self._answered.set()
        for pid in self._pids:  # nothing more is heard of them
            self.ended.setdefault(pid, None)
        if self._greeting is None:
            self._process.wait()
            self._errors.join(_TO_ANSWER_S)  # the reason is there before the answer
        self._answered.set()

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._words.append(line.strip())


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command with its own processes, such as the ssh of mpirun, which hold its pipes."""
    family = [psutil.Process(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += family[0].children(recursive=True)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def end_all(links: Sequence[Link], *, kill: bool = False, within_s: float = _TO_END_S) -> list[str]:
    """End the workers of all hosts, and the connections.

    Args:
        links: The connections.
        kill: True to end the workers by SIGKILL, not by SIGTERM.
        within_s: Seconds after which connections are cut.

    Returns:
        The hosts that did not answer: their workers end as soon as they notice.
    """
    for link in links:
        link.end(signal.SIGKILL if kill else signal.SIGTERM)
    until = time.monotonic() + within_s
    return [link.host for link in links if not link.wait(until)]
