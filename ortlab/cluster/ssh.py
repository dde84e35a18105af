"""SSH connections to the hosts of workers: one process of OpenSSH for each host.

OpenSSH itself is called, so that aliases, keys and jump hosts of ssh_config apply. Its command line
has no key of the cluster: everything goes through its standard input. The same connection serves
the checks and the workers. When it ends in any way, the workers on that host end
(`ortlab.cluster.host_side`).
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortlab.cluster import facts
from ortlab.utils.threads import Thread

CONNECT_S: Final = 5
"""Seconds that a host has to accept a connection."""
_OPTIONS: Final = {
    "BatchMode": "yes",  # no prompt: nobody would see it
    "ConnectTimeout": str(CONNECT_S),
    "ConnectionAttempts": "1",
    "ServerAliveInterval": "5",  # a host that is dead for half a minute is given up
    "ServerAliveCountMax": "6",
    "ControlMaster": "no",  # uses a running one, but leaves none behind
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "LogLevel": "ERROR",
}
_NAME: Final = re.compile(
    r"(?:(?P<user>[^\s@:-][^\s@:]*)@)?(?P<host>[\w.%]+(?:[\w.%-]*[\w.%])?)(?::(?P<port>\d{1,5}))?"
)
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


@dataclass(frozen=True)
class Destination:
    """A host as the user names it: ``host``, ``user@host``, ``host:port`` or an alias.

    Args:
        name: The name.

    Raises:
        ValueError: If it is none of these.
    """

    name: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ValueError(
                f"host {self.name!r} is not a host name; write host, user@host or host:port"
            )

    @property
    def words(self) -> list[str]:
        """The words that name it on the command line of ssh."""
        found = _NAME.fullmatch(self.name)
        assert found is not None
        port = ["-p", found["port"]] if found["port"] else []
        return [*port, "--", self.name.partition(":")[0]]

    @property
    def typed(self) -> str:
        """The command that a user types to connect to it."""
        return " ".join(word for word in ("ssh", *self.words) if word != "--")

    def settings(self) -> dict[str, str]:
        """Return what ssh_config says about it, such as ``hostname`` and ``port``.

        Raises:
            RuntimeError: If ssh is not installed, or refuses its configuration.
        """
        try:
            told = subprocess.run(
                [*_ssh(), "-G", *self.words], capture_output=True, text=True, timeout=_TO_ANSWER_S
            )
        except FileNotFoundError:
            raise RuntimeError(
                "ssh is not installed on this machine; install OpenSSH's client"
            ) from None
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.typed} -G does not answer; check ~/.ssh/config") from None
        if told.returncode:
            raise RuntimeError(f"ssh refuses its configuration: {told.stderr.strip()}")
        return dict(line.partition(" ")[::2] for line in told.stdout.splitlines())


def _ssh() -> list[str]:
    return ["ssh", "-T", *(f"-o{name}={value}" for name, value in _OPTIONS.items())]


class Link:
    """Connection to one host, on which Python has been started.

    ``ended`` are the exit codes of its workers that ended, by process id; a negative one is the
    number of a signal, None is unknown.

    Args:
        destination: The host.
        pythons: Interpreters to look for there; the first one that exists is used.
        reply_to: Address and port of this process to which the host connects back.

    Raises:
        OSError: If ssh cannot be started.
    """

    def __init__(
        self, destination: Destination, pythons: Sequence[str], reply_to: tuple[str, int]
    ) -> None:
        self.destination = destination
        self.token = secrets.token_hex(facts.TOKEN_BYTES // 2)
        self._lifeline: socket.socket | None = None
        self._joined = threading.Event()
        self.ended: dict[int, int | None] = {}
        self._pids: list[int] = []
        self._greeting: dict[str, Any] | None = None
        self._words: deque[str] = deque(maxlen=20)
        self._answered = threading.Event()
        command = f"exec sh -c {shlex.join([_FIRST_PYTHON, 'sh', *pythons])}"
        self._process = subprocess.Popen(
            [*_ssh(), *destination.words, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt of the kernel is not for it
        )
        self._errors = Thread(self._listen_to_errors, name="ortlab-ssh-errors")
        self._errors.start()  # before the other one, which waits for its end
        self._hearing = Thread(self._hear, name="ortlab-ssh")
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
        """The last lines that ssh and the host's processes wrote as errors."""
        return list(self._words)

    def start(self, count: int, connection: Mapping[str, Any]) -> None:
        """Start workers on the host.

        Args:
            count: Number of workers.
            connection: ipyparallel's connection information for engines, with the key.
        """
        order = {"host": self.destination.name, "count": count, "connection": connection}
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
            self._process.kill()
            self._process.wait()
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
        with contextlib.suppress(BrokenPipeError):  # ssh has ended: its words say why
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
    return [link.destination.name for link in links if not link.wait(until)]
