"""Placement of ranks: engines of a cluster become ranks, each with a device and threads."""

from __future__ import annotations

import json
import socket
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from ortlab.cluster import facts
from ortlab.cluster import rank as on_rank
from ortlab.cluster.launch import Cluster
from ortlab.utils.wording import counted

ANSWER_S: Final = 5.0
"""Seconds that a rank on another host has to answer a question."""


@dataclass(frozen=True)
class PlacedRank:
    """Properties of a rank that never change; ``devices`` counts the CUDA devices of its host."""

    engine: int
    place: on_rank.Place
    host: str
    pid: int
    local: bool
    device: str
    devices: int


def place_ranks(cluster: Cluster, *, elsewhere: bool) -> list[PlacedRank]:
    """Assign a rank, a device and threads to each engine of a cluster.

    Warns if the ranks of a host share cores (of one that is not this machine) or CUDA devices.

    Args:
        cluster: The cluster, whose engines run.
        elsewhere: True if the cluster was started on hosts or by an ipyparallel profile.

    Returns:
        The ranks, in order.

    Raises:
        RuntimeError: If an engine has other versions of Python or a library than this process.
    """
    client = cluster.client
    engines = sorted(client.ids)
    found = _facts(client, engines)
    if cluster.hosts is not None:  # neighbors are on the same host, as torchrun places them
        names = cluster.host_names
        in_order = sorted(
            zip(engines, found, strict=True), key=lambda each: names.index(each[1]["host"])
        )
        engines, found = [list(part) for part in zip(*in_order, strict=True)]
    on_host = Counter(fact["host"] for fact in found)
    met: Counter[str] = Counter()
    places = []
    for number, fact in enumerate(found):
        host = fact["host"]
        threads = max(1, fact["cores"] // on_host[host])
        places.append(on_rank.Place(number, len(found), met[host], on_host[host], threads))
        met[host] += 1
    placed = [
        client[engine].apply_async(on_rank.take_place, place)
        for engine, place in zip(engines, places, strict=True)
    ]
    ranks = []
    for engine, place, fact, answer in zip(engines, places, found, placed, strict=True):
        device, devices = answer.get()
        # Another host may have the same name and process ids as this machine.
        host, here = fact["host"], cluster.hosts is None and _is_here(fact)
        ranks.append(PlacedRank(engine, place, host, fact["pid"], here, device, devices))
        if place.local_rank == 0 and elsewhere:  # without one the caller has warned
            warn_of_sharing(host, place.local_world, fact["cores"], "core")
        if place.local_rank == 0 and devices:
            warn_of_sharing(host, place.local_world, devices, "CUDA device")
    return ranks


def _facts(client: Any, engines: Sequence[int]) -> list[dict[str, Any]]:
    """Return the engines' `facts.facts`; RuntimeError if the versions differ from this process."""
    asked = client[engines].execute(facts.as_text(), silent=False)
    asked.get()
    asked.wait_for_output(ANSWER_S)
    found = [json.loads(text) for text in asked.stdout]
    for rank, fact in enumerate(found):
        if different := facts.different(fact["versions"]):
            theirs, ours = different
            raise RuntimeError(
                f"rank {rank} on {fact['host']} has {theirs}, but this process has {ours}; install "
                "the same version in both"
            )
    return found


def _is_here(fact: Mapping[str, Any]) -> bool:
    """Return whether an engine is a process of this machine."""
    return fact["host"] == socket.gethostname() and bool(psutil.pid_exists(fact["pid"]))


def warn_of_sharing(host: str, count: int, available: int, what: str) -> None:
    """Warn if more workers than cores or devices run on a host.

    Args:
        host: The host, for the message.
        count: Number of workers on it.
        available: Number of cores or devices.
        what: "core" or "CUDA device".
    """
    if count > available:
        warnings.warn(
            f"{counted(count, 'worker')} share {counted(available, what)} of "
            f"{host}: they take turns",
            stacklevel=5,
        )
