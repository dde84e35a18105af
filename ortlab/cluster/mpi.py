"""Hosts that workers are started on by mpirun: named ones, or those of the job that this runs in.

mpirun starts Python once on each host, and Python the workers: Open MPI's way to a host is used
(ssh, or the batch system's), while the ranks meet as over SSH.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.cluster import checks
from ortlab.cluster.checks import Reached
from ortlab.cluster.hosts import Hosts
from ortlab.cluster.link import Link, Way, first_python

_PORT: Final = 22
"""A port of a host, to find the route to it; nothing is sent there."""
_OWN: Final = ("mpirun", "--map-by", "ppr:1:node", "hostname")


@dataclass(frozen=True)
class MpiHosts(Hosts):
    """Hosts of workers that mpirun reaches."""

    @classmethod
    def chosen(
        cls,
        names: str | Sequence[str] | None,
        count: int | None,
        per_host: int | None,
        *,
        python: str | None = None,
        address: str | None = None,
    ) -> MpiHosts:
        """Return the hosts that a user chose; see `Hosts.chosen`.

        Args:
            names: Names of the hosts; None for those that mpirun uses by itself.
            count: See `Hosts.chosen`.
            per_host: See `Hosts.chosen`.
            python: See `Hosts`.
            address: See `Hosts`.

        Raises:
            ValueError: As in `Hosts.chosen`.
            RuntimeError: If mpirun is not installed, or does not say which hosts it uses.
        """
        if shutil.which("mpirun") is None:
            raise RuntimeError(
                "mpirun is not installed on this machine; install Open MPI (Debian: openmpi-bin), "
                "or leave out --mpi to start workers over SSH"
            )
        found = _own_hosts() if names is None else names
        chosen = Hosts.chosen(found, count, per_host, python=python, address=address)
        for name in chosen.names:
            if set("@:") & set(name):
                raise ValueError(
                    f"mpirun takes host names alone, not {name!r}; user and port of "
                    f"{name.rpartition('@')[2].partition(':')[0]} go into ~/.ssh/config"
                )
        return cls(chosen.names, chosen.per_host, chosen.python, chosen.address)

    @property
    def typed(self) -> str:
        """See `Elsewhere.typed`."""
        return f"--mpi {self.count} --hosts {self.text}"

    @property
    def called(self) -> str:
        """See `Elsewhere.called`."""
        return f"{self.count}, mpi=True, hosts={self.text!r}"

    def reach(self) -> Reached:
        """See `Elsewhere.reach`."""
        until = checks.soon()
        problems, sources = {}, {}
        for name in self.names:
            try:
                sources[name] = checks.source(name, _PORT)
            except OSError as error:
                problems[name] = (
                    f"its name does not resolve ({error.strerror}); correct it, or add it to this "
                    "machine's /etc/hosts"
                )
        known = {name: found for name, found in sources.items() if found}
        address = self.address or checks.common_address(known, problems, self.names)
        links = checks.greet(
            [Way(name, _mpirun(name, self.pythons), self.per_host) for name in self.names],
            address,
            pythons=self.pythons,
            explained=_explained,
            problems=problems,
            until=until,
        )
        return Reached(links, address, "mpirun's connection")


def _mpirun(host: str, pythons: Sequence[str]) -> list[str]:
    """Return the command that runs Python on a host, once for all its workers."""
    return ["mpirun", "--host", host, "-np", "1", "--bind-to", "none", *first_python(pythons)]


def _own_hosts() -> list[str]:
    """Return the hosts that mpirun uses if none is named: those of its job, or this machine."""
    try:
        told = subprocess.run(_OWN, capture_output=True, text=True, timeout=checks.ANSWERED_S)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {checks.ANSWERED_S:g} s"
    else:
        if not told.returncode:
            return list(dict.fromkeys(told.stdout.split()))
        reason = _first(told.stderr.splitlines())
    raise RuntimeError(
        f"mpirun does not say which hosts it uses: {reason}; name them, as in --hosts a,b"
    )


def _explained(link: Link) -> str:
    """Return why a host did not answer, and the next step."""
    typed = f"mpirun --host {link.host} hostname"
    if link.alive:
        return f"no answer within {checks.ANSWERED_S:g} s; type {typed} and see what it waits for"
    return f"mpirun ended: {_first(link.words)}; type {typed} in a terminal"


def _first(lines: Sequence[str]) -> str:
    """Return the first line of an error; mpirun's own advice, between dashes, comes after it."""
    words = [line for line in lines if line.strip() and not line.startswith("-----")]
    return words[0].strip().rstrip(".") if words else "without a message"
