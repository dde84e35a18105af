"""Table of the workers: one row a rank, and notes on the sockets that the processes listen on."""

from __future__ import annotations

import ipaddress
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from ortlab.utils.process_memory import memory
from ortlab.utils.tables import Column


@dataclass(frozen=True)
class Worker:
    """Row of one rank; ``rss_bytes`` is None while the rank cannot be asked."""

    rank: int
    host: str
    pid: int
    device: str
    threads: int
    rss_bytes: int | None
    state: str


def _size(worker: Worker) -> str:
    return "-" if worker.rss_bytes is None else memory(worker.rss_bytes)


COLUMNS: Final[tuple[Column[Worker], ...]] = (
    Column("rank", lambda worker: str(worker.rank), number=True),
    Column("host", lambda worker: worker.host),
    Column("pid", lambda worker: str(worker.pid), number=True),
    Column("device", lambda worker: worker.device),
    Column("threads", lambda worker: str(worker.threads), number=True),
    Column("memory", _size, number=True),
    Column("state", lambda worker: worker.state),
)


def listening_note(who: str, sockets: Set[tuple[str, int]] | None) -> str:
    """Return a line on the sockets that a process listens on.

    Args:
        who: The process, as in "rank 0 (pid 4711)".
        sockets: Addresses and ports; None if they are unknown.
    """
    if sockets is None:
        return f"{who}: its listening sockets cannot be seen from here"
    ports: dict[str, list[int]] = {}
    for address, port in sorted(sockets):
        ports.setdefault(address, []).append(port)
    places = [
        f"{address}{'' if ipaddress.ip_address(address).is_loopback else ' (open to the network)'} "
        f"port{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for address, numbers in ports.items()
    ]
    return f"{who} listens on {'; '.join(places) or 'nothing'}"
