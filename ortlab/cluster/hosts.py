"""Hosts that workers are started on over SSH: their names, and the checks before anything starts.

All hosts are checked at once, and within 10 s together each has answered or a line says why not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ortlab.cluster import facts, meeting, ssh
from ortlab.cluster.ssh import Destination, Link
from ortlab.utils.errors import Concise
from ortlab.utils.threads import Thread
from ortlab.utils.wording import counted

_ANSWERED_S: Final = 8.5
"""Seconds after which a host that has not answered is refused."""
_RESOLVED_S: Final = 4.0
_TOKEN_S: Final = 1.0
_CUT_S: Final = 0.3
"""Seconds that hosts have to end a connection after the checks; nothing was started there."""
_NO_PROXY: Final = ("", "none")


class HostsRefused(Concise, RuntimeError):
    """Raised if a host cannot run workers; the message names each such host, why, and what to do.

    Args:
        problems: Reason and next step, by host.
        total: Number of hosts.
    """

    def __init__(self, problems: Mapping[str, str], total: int) -> None:
        lines = [f"{host}: {problem}" for host, problem in problems.items()]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} of {counted(total, 'host')} cannot run workers:")
        super().__init__("\n".join(lines))


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
            _check_address(address)
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


@dataclass(frozen=True)
class Reached:
    """Hosts that passed all checks: their connections, and this machine's address for them."""

    links: Sequence[Link]
    address: str


def reach(hosts: Hosts) -> Reached:
    """Connect to all hosts and check that workers can run there; nothing else is started.

    Args:
        hosts: The hosts.

    Returns:
        The hosts' connections; `ssh.end_all` ends them.

    Raises:
        HostsRefused: If a host cannot run workers.
        RuntimeError: If OpenSSH is missing, or this machine has no address for all hosts.
    """
    began = time.monotonic()
    destinations = [Destination(name) for name in hosts.names]
    problems, places = _located(destinations, began + _RESOLVED_S)
    address = hosts.address or _common_address(places, problems, len(destinations))
    with socket.create_server((address, 0), backlog=len(destinations) + 8) as listening:
        links = [
            Link(each, hosts.pythons, listening.getsockname()[:2])
            for each in destinations
            if each.name not in problems
        ]
        try:
            Thread(_take_lifelines, listening, links, name="ortlab-lifelines").start()
            for link in links:
                told = link.greeting(began + _ANSWERED_S)
                settings = places[link.destination.name]
                problem = (
                    explained(link, settings)
                    if told is None
                    else _unfit(told, hosts, link, address)
                )
                if problem:
                    problems[link.destination.name] = problem
            if problems:
                in_order = {name: problems[name] for name in hosts.names if name in problems}
                raise HostsRefused(in_order, len(destinations))
        except BaseException:
            ssh.end_all(links, within_s=_CUT_S)
            raise
        finally:
            with contextlib.suppress(OSError):  # wakes the thread that accepts connections
                listening.shutdown(socket.SHUT_RDWR)
    return Reached(links, address)


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
                settings["source"] = _source(settings["hostname"], int(settings["port"]))
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


def _source(name: str, port: int) -> str:
    """Return the IPv4 address from which packets to a host are sent; "" if there is no route.

    ipyparallel's sockets are of IPv4.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)
    for family, _, _, _, place in found:
        if family == socket.AF_INET:
            with contextlib.suppress(OSError):
                return meeting.source_address((str(place[0]), port))
    return ""


def _common_address(
    places: Mapping[str, Mapping[str, str]], problems: Mapping[str, str], total: int
) -> str:
    """Return the one address of this machine for all hosts."""
    sources = {
        host: settings["source"] for host, settings in places.items() if settings.get("source")
    }
    found = set(sources.values())
    if len(found) > 1:  # this machine as a host reaches every address of it
        found = {each for each in found if not ipaddress.ip_address(each).is_loopback}
    if len(found) == 1:
        return found.pop()
    if not found and problems:
        raise HostsRefused(problems, total)
    if not found:
        raise RuntimeError(
            f"the address by which {', '.join(places)} can reach this machine is not known; name "
            "it, as in --address 192.0.2.1"
        )
    listed = ", ".join(f"{host} by {source}" for host, source in sources.items())
    raise RuntimeError(
        f"the hosts reach this machine by different addresses: {listed}; name one that all of them "
        "reach, as in --address 192.0.2.1"
    )


def _check_address(address: str) -> None:
    """Raise ValueError for an address that workers must not, or cannot, be served on."""
    try:
        parsed = ipaddress.IPv4Address(address)
    except ValueError:
        raise ValueError(
            f"address={address!r} is not an IPv4 address; write it as in 192.0.2.1"
        ) from None
    if parsed.is_unspecified:
        raise ValueError(
            f"address={address!r} would open the controller to every network; name one address of "
            "this machine"
        )
    try:
        socket.create_server((address, 0)).close()
    except OSError as error:
        raise ValueError(
            f"address={address!r} is not an address of this machine ({error.strerror}); `ip "
            "address` lists them"
        ) from None


# ---- the checks ----------------------------------------------------------------------------------


def _at_once(work: Sequence[Callable[[], object]], until: float) -> None:
    """Call functions in threads and wait for them; those that take longer are abandoned."""
    threads = [Thread(each, name="ortlab-hosts") for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _take_lifelines(listening: socket.socket, links: Sequence[Link]) -> None:
    """Accept the hosts' connections; whoever does not know a token is turned away."""
    waiting = {link.token: link for link in links}
    while waiting:
        try:
            taken, _ = listening.accept()
        except OSError:  # the checks are over
            return
        taken.settimeout(_TOKEN_S)
        token = b""
        with contextlib.suppress(OSError):
            while len(token) < facts.TOKEN_BYTES and (piece := taken.recv(facts.TOKEN_BYTES)):
                token += piece
        link = waiting.pop(token.decode(errors="replace"), None)
        if link is None:
            taken.close()
        else:
            link.joined(taken)


def explained(link: Link, settings: Mapping[str, str]) -> str:
    """Return why a host did not answer, and the next step.

    Args:
        link: The connection, which has ended or takes too long.
        settings: What ssh_config says about the host.
    """
    typed = link.destination.typed
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
        return f"no answer within {_ANSWERED_S:g} s; type {typed} true and see what it waits for"
    reason = words[-1] if words else "without a message"
    return f"the connection ended: {reason}; type {typed} true in a terminal"


def _unfit(told: Mapping[str, Any], hosts: Hosts, link: Link, address: str) -> str | None:
    """Return why a host that answered cannot run workers, and the next step; None if it can."""
    if told.get("missing"):
        return (
            f"{' and '.join(hosts.pythons)} {'are' if len(hosts.pythons) > 1 else 'is'} not there; "
            "name the path of its Python, as in --python ~/.venv/bin/python"
        )
    different = facts.different(told["versions"])
    if different:
        theirs, ours = different
        return (
            f"its {told['python']} has {theirs}, but this process has {ours}; install the same "
            "there, or name another Python by --python PATH"
        )
    if told["unreached"] or not link.is_joined(_TOKEN_S):
        reason = told["unreached"] or "another machine answers there"
        return (
            f"it cannot connect to this machine at {address} ({reason}); let this machine's "
            "firewall accept connections from it, or name another address by --address"
        )
    return None
