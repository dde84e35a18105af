"""Checks of hosts before workers start there, whatever reaches them: SSH, Slurm or MPI.

All hosts are checked at once, and within 10 s together each has answered or a line says why not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ortlab.cluster import facts, meeting
from ortlab.cluster import link as links_
from ortlab.cluster.link import Link, Way
from ortlab.utils.errors import Concise
from ortlab.utils.threads import Thread
from ortlab.utils.wording import counted

ANSWERED_S: Final = 8.5
"""Seconds after which a host that has not answered is refused."""
_TOKEN_S: Final = 1.0
_CUT_S: Final = 0.3
"""Seconds that hosts have to end a connection after the checks; nothing was started there."""


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


class Elsewhere(Protocol):
    """Choice of hosts that workers are started on; two that are equal are the same choice."""

    @property
    def count(self) -> int:
        """Number of workers on all hosts."""

    @property
    def where(self) -> str:
        """The place in words, such as "on a, b"."""

    @property
    def typed(self) -> str:
        """The options of ``%ort workers`` that choose it."""

    @property
    def called(self) -> str:
        """The arguments of ``ortlab.workers`` that choose it."""

    def reach(self) -> Reached:
        """Connect to all hosts and check that workers can run there; nothing else is started.

        Raises:
            HostsRefused: If a host cannot run workers.
            RuntimeError: If there are no hosts to be had.
        """


@dataclass(frozen=True)
class Reached:
    """Hosts that passed all checks.

    Attributes:
        links: Their connections.
        address: This machine's address for them.
        connection: What a connection is, for messages, such as "the SSH connection".
        ended: Return why all hosts were taken away, such as a time limit; "" if they were not.
        release: Function that gives the hosts back once their connections have ended.
    """

    links: Sequence[Link]
    address: str
    connection: str
    ended: Callable[[], str] = lambda: ""
    release: Callable[[], object] = lambda: None

    def end(self, *, kill: bool = False) -> list[str]:
        """End the workers and connections, and give the hosts back; see `link.end_all`."""
        try:
            return links_.end_all(self.links, kill=kill)
        finally:
            self.release()


def greet(
    ways: Sequence[Way],
    address: str,
    *,
    pythons: Sequence[str],
    explained: Callable[[Link], str],
    problems: Mapping[str, str],
    until: float,
) -> list[Link]:
    """Connect to hosts and check that workers can run there.

    Args:
        ways: The ways to them.
        address: This machine's address for the hosts.
        pythons: Interpreters that are looked for there, for messages.
        explained: Return why a host did not answer, and the next step.
        problems: Reason and next step of hosts that are known to be unfit.
        until: Time of `time.monotonic` to wait for.

    Returns:
        The connections; `link.end_all` ends them.

    Raises:
        HostsRefused: If a host cannot run workers.
    """
    found = dict(problems)
    with socket.create_server((address, 0), backlog=len(ways) + 8) as listening:
        links = [Link(way, listening.getsockname()[:2]) for way in ways if way.host not in problems]
        try:
            Thread(_take_lifelines, listening, links, name="ortlab-lifelines").start()
            for link in links:
                told = link.greeting(until)
                problem = explained(link) if told is None else _unfit(told, pythons, link, address)
                if problem:
                    found[link.host] = problem
            if found:
                in_order = {way.host: found[way.host] for way in ways if way.host in found}
                raise HostsRefused(in_order, len(ways))
        except BaseException:
            links_.end_all(links, within_s=_CUT_S)
            raise
        finally:
            with contextlib.suppress(OSError):  # wakes the thread that accepts connections
                listening.shutdown(socket.SHUT_RDWR)
    return links


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


def _unfit(told: Mapping[str, Any], pythons: Sequence[str], link: Link, address: str) -> str | None:
    """Return why a host that answered cannot run workers, and the next step; None if it can."""
    if told.get("missing"):
        return (
            f"{' and '.join(pythons)} {'are' if len(pythons) > 1 else 'is'} not there; "
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


# ---- where this machine is for the hosts ---------------------------------------------------------


def source(name: str, port: int) -> str:
    """Return the IPv4 address from which packets to a host are sent; "" if there is no route.

    ipyparallel's sockets are of IPv4.

    Args:
        name: Name or address of the host.
        port: A port of it.

    Raises:
        OSError: If the name does not resolve.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)
    for family, _, _, _, place in found:
        if family == socket.AF_INET:
            with contextlib.suppress(OSError):
                return meeting.source_address((str(place[0]), port))
    return ""


def common_address(
    sources: Mapping[str, str], problems: Mapping[str, str], hosts: Sequence[str]
) -> str:
    """Return the one address of this machine for all hosts.

    Args:
        sources: This machine's address for each host that has a known one.
        problems: Reason and next step of hosts that are known to be unfit.
        hosts: All hosts.

    Raises:
        HostsRefused: If no address is known since hosts are unfit.
        RuntimeError: If there is none, or several.
    """
    found = set(sources.values())
    if len(found) > 1:  # this machine as a host reaches every address of it
        found = {each for each in found if not ipaddress.ip_address(each).is_loopback}
    if len(found) == 1:
        return found.pop()
    if not found and problems:
        raise HostsRefused(problems, len(hosts))
    if not found:
        raise RuntimeError(
            f"the address by which {', '.join(hosts)} can reach this machine is not known; name "
            "it, as in --address 192.0.2.1"
        )
    listed = ", ".join(f"{host} by {each}" for host, each in sources.items())
    raise RuntimeError(
        f"the hosts reach this machine by different addresses: {listed}; name one that all of them "
        "reach, as in --address 192.0.2.1"
    )


def check_address(address: str) -> None:
    """Raise ValueError for an address that workers must not, or cannot, be served on.

    Args:
        address: The address.

    Raises:
        ValueError: If it is no IPv4 address of this machine, or stands for all networks.
    """
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


def soon() -> float:
    """Return the time of `time.monotonic` at which hosts that have not answered are refused."""
    return time.monotonic() + ANSWERED_S
