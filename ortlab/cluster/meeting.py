"""Meeting of ranks on several hosts: their store, their network interface, and the ways between."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any, Final

import psutil

_REACH_S: Final = 4.0
"""Seconds that a host has to accept a connection of another one."""
_POLL_S: Final = 0.02


def meet(place: tuple[str, int], timeout: timedelta) -> Any:
    """Return the store of all ranks, and choose the interface of their sockets.

    It is the one of the way to the kernel, unless the host's environment names another: gloo would
    resolve the host's name, which other hosts do not know, and many hosts take for loopback.

    Args:
        place: Address and port of the kernel's TCPStore.
        timeout: Time that the store waits for a value.

    Raises:
        RuntimeError: If this host cannot connect to another one.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # heavy: torch

    own, interface = _own(place)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    store = TCPStore(*place, is_master=False, timeout=timeout)
    _check_ways(store, _address_of(os.environ["GLOO_SOCKET_IFNAME"]) or own)
    return store


def source_address(place: tuple[str, int]) -> str:
    """Return the IPv4 address from which packets to a place are sent.

    Args:
        place: Address and port.

    Raises:
        OSError: If there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(place)  # sends nothing
        return str(asked.getsockname()[0])


def _own(place: tuple[str, int]) -> tuple[str, str]:
    """Return this host's address for a place, and the interface that has it."""
    own = source_address(place)
    return own, next(name for name in psutil.net_if_addrs() if own in _addresses(name))


def _addresses(interface: str) -> list[str]:
    found = psutil.net_if_addrs().get(interface, [])
    return [each.address for each in found if each.family == socket.AF_INET]


def _address_of(interface: str) -> str | None:
    return next(iter(_addresses(interface)), None)


def _check_ways(store: Any, own: str) -> None:
    """Connect to the first rank of every other host: gloo would try for half an hour."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ["LOCAL_RANK"] != "0":
        store.set(f"way/{rank}", "")
        return
    with socket.create_server((own, 0), backlog=world) as listening:
        store.set(f"way/{rank}", f"{own}:{listening.getsockname()[1]}")
        for other in range(world):
            # The system accepts connections up to the backlog, so no thread has to.
            address, _, port = store.get(f"way/{other}").decode().partition(":")
            if other == rank or not address:
                continue
            try:
                socket.create_connection((address, int(port)), _REACH_S).close()
            except OSError as error:
                raise RuntimeError(
                    f"this host, {own}, cannot connect to the host of rank {other}, {address} "
                    f"({error.strerror or error}); let their firewalls accept connections between "
                    "the hosts, or name the right interface by GLOO_SOCKET_IFNAME there"
                ) from None
        store.add("way/connected", 1)
        hosts = sum(bool(store.get(f"way/{other}")) for other in range(world))
        while store.add("way/connected", 0) < hosts:  # the store's own wait hears no interrupt
            time.sleep(_POLL_S)
