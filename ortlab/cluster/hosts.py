"""Hosts that workers are started on over SSH, or by mpirun: their names, and the ways to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.cluster import checks, ssh
from ortlab.cluster.checks import Reached
from ortlab.cluster.link import Link
from ortlab.cluster.ssh import Destination
from ortlab.utils.threads import Thread
from ortlab.utils.wording import counted

_RESOLVED_S: Final = 4.0
_NO_PROXY: Final = ("", "none")


@dataclass(frozen=True)
class Hosts:
    """Hosts of workers, and how they are started there.

    Attributes:
        names: Their names for OpenSSH: ``host``, ``user@host``, ``host:port`` or an alias.
        per_host: Number of workers on each.
        python: Path of the interpreter on the hosts; None for the path of this process's, or
            else python3.
        address: Address of this machine by which the hosts reach it; None to find it.
    """

    names: tuple[str, ...]
    per_host: int = 1
    python: str | None = None
    address: str | None = None

    @classmethod
    def chosen(
        cls,
        names: str | Sequence[str],
        count: int | None,
        per_host: int | None,
        *,
        python: str | None = None,
        address: str | None = None,
    ) -> Hosts:
        """Return the hosts that a user chose.

        Args:
            names: Names of the hosts; a text separates them by commas.
            count: Number of workers; None for ``per_host`` on each host.
            per_host: Number of workers on each host; None for an equal part of ``count``.
            python: See `Hosts`.
            address: See `Hosts`.

        Raises:
            ValueError: If a name, a number or the address is impossible.
        """
        given = names.split(",") if isinstance(names, str) else names
        found = tuple(filter(None, (name.strip() for name in given)))
        if not found:
            raise ValueError("hosts names no host; write them as in hosts='a,b'")
        for name in found:
            Destination(name)
            if found.count(name) > 1:
                raise ValueError(f"hosts has {name} twice; use per_host for several workers on it")
        each = per_host if per_host is not None else max(1, (count or 0) // len(found))
        if each < 1:
            raise ValueError(f"per_host={each} must be at least 1")
        if count is not None and count != each * len(found):
            raise ValueError(
                f"{counted(count, 'worker')} cannot be {each} on each of "
                f"{counted(len(found), 'host')}; start {each * len(found)}, or change per_host"
            )
        if address is not None:
            checks.check_address(address)
        return cls(found, each, python, address)

    @property
    def count(self) -> int:
        """Number of workers on all hosts."""
        return len(self.names) * self.per_host

    @property
    def pythons(self) -> tuple[str, ...]:
        """Interpreters to look for on the hosts, the first one first."""
        return (self.python,) if self.python else (sys.executable, "python3")

    @property
    def text(self) -> str:
        """The names, separated by commas."""
        return ",".join(self.names)

    @property
    def where(self) -> str:
        """See `Elsewhere.where`."""
        return f"on {', '.join(self.names)}"

    @property
    def typed(self) -> str:
        """See `Elsewhere.typed`."""
        return f"--hosts {self.text} --per-host {self.per_host}"

    @property
    def called(self) -> str:
        """See `Elsewhere.called`."""
        return f"hosts={self.text!r}, per_host={self.per_host}"

    def reach(self) -> Reached:
        """See `Elsewhere.reach`.

        Raises:
            HostsRefused: If a host cannot run workers.
            RuntimeError: If OpenSSH is missing, or this machine has no address for all hosts.
        """
        began = time.monotonic()
        destinations = [Destination(name) for name in self.names]
        problems, places = _located(destinations, began + _RESOLVED_S)
        sources = {host: each["source"] for host, each in places.items() if each.get("source")}
        address = self.address or checks.common_address(sources, problems, self.names)
        links = checks.greet(
            [each.way(self.pythons, self.per_host) for each in destinations],
            address,
            pythons=self.pythons,
            explained=lambda link: explained(link, Destination(link.host), places[link.host]),
            problems=problems,
            until=began + checks.ANSWERED_S,
        )
        return Reached(links, address, "the SSH connection")


# ---- where they are, and where this machine is for them ------------------------------------------


def _located(
    destinations: Sequence[Destination], until: float
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Resolve all names at once.

    Returns:
        The problems, and ssh's settings by host; "source" is this machine's address for the host.
    """
    problems: dict[str, str] = {}
    places: dict[str, dict[str, str]] = {}
    missing: list[RuntimeError] = []

    def locate(destination: Destination) -> None:
        try:
            settings = destination.settings()
            places[destination.name] = settings
            if not _proxied(settings):
                settings["source"] = checks.source(settings["hostname"], int(settings["port"]))
        except RuntimeError as error:
            missing.append(error)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            problems[destination.name] = (
                f"its name {places[destination.name]['hostname']!r} does not resolve "
                f"({reason}); correct it, or give its address as HostName in ~/.ssh/config"
            )

    _at_once([lambda each=each: locate(each) for each in destinations], until)  # type: ignore[misc]
    if missing:
        raise missing[0]
    for each in destinations:
        if each.name not in places or not (
            each.name in problems or "source" in places[each.name] or _proxied(places[each.name])
        ):
            problems[each.name] = (
                f"its name was not resolved within {_RESOLVED_S:g} s; check this machine's DNS, "
                "or give its address as HostName in ~/.ssh/config"
            )
    return problems, places


def _proxied(settings: Mapping[str, str]) -> bool:
    """Return whether ssh reaches a host through another one."""
    return any(settings.get(name, "") not in _NO_PROXY for name in ("proxyjump", "proxycommand"))


# ---- what ssh says -------------------------------------------------------------------------------


def _at_once(work: Sequence[Callable[[], object]], until: float) -> None:
    """Call functions in threads and wait for them; those that take longer are abandoned."""
    threads = [Thread(each, name="ortlab-hosts") for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def explained(link: Link, destination: Destination, settings: Mapping[str, str]) -> str:
    """Return why a host did not answer to ssh, and the next step.

    Args:
        link: The connection, which has ended or takes too long.
        destination: The host.
        settings: What ssh_config says about the host.
    """
    typed = destination.typed
    place = f"{settings['hostname']} port {settings['port']}"
    words = link.words
    said = " ".join(words)

    if "Could not resolve" in said:
        return f"the name {settings['hostname']!r} does not resolve; correct it"
    if "Connection refused" in said:
        return (
            f"nothing listens at {place} (connection refused); start its SSH server, or name its "
            "port, as in host:2222"
        )
    if "timed out" in said:
        return (
            f"no answer from {place} within {ssh.CONNECT_S} s; check that it is on and that no "
            "firewall drops the connection"
        )
    if "No route to host" in said or "unreachable" in said:
        return f"no route to {place}; check the address and this machine's network"
    if "IDENTIFICATION HAS CHANGED" in said:
        removal = next((word for word in words if word.startswith("ssh-keygen")), "ssh-keygen -R")
        return (
            f"its host key has changed: another machine may answer at {place}; if the change is "
            f"right, type {removal}, then {typed} once"
        )
    if "ost key" in said:  # "No ED25519 host key is known", "Host key verification failed"
        return (
            f"its host key is unknown here; type {typed} once in a terminal and compare the "
            "fingerprint"
        )
    if "Permission denied" in said or "authentication failures" in said:
        copied = typed.replace("ssh", "ssh-copy-id", 1)
        return (
            f"it refuses the keys of {settings['user']}; type {copied}, or name the user, as in "
            "user@host (passwords are not asked for)"
        )
    if link.alive:
        return (
            f"no answer within {checks.ANSWERED_S:g} s; type {typed} true and see what it waits for"
        )
    reason = words[-1] if words else "without a message"
    return f"the connection ended: {reason}; type {typed} true in a terminal"
