"""Names of hosts for OpenSSH, and its command: aliases, keys and jump hosts of ssh_config apply."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.cluster.link import Way, first_python

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
_TO_ANSWER_S: Final = 2.0


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

    def way(self, pythons: Sequence[str], workers: int) -> Way:
        """Return the way to it.

        Args:
            pythons: Interpreters to look for there; the first one that exists is used.
            workers: Number of workers to start there.
        """
        command = f"exec {shlex.join(first_python(pythons))}"
        return Way(self.name, [*_ssh(), *self.words, command], workers)

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
