"""A network without a way out, which records all outgoing traffic. Needs Linux and root.

The calling thread, and all processes and threads that it starts meanwhile, are in a network
namespace with its own loopback and one way out: a TUN device (network_namespaces(7), the kernel's
documentation of tuntap). Every packet that would leave the machine is read there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
UDP = 17
OWN, CANARY = "198.51.100.2", "192.0.2.1"
"""Addresses reserved for documentation (RFC 5737), which belong to nobody."""


class Nowhere:
    """The packets that would have left the machine, and the names looked up by DNS."""

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(self._tun, TUNSETIFF, struct.pack("16sH", b"nowhere", IFF_TUN | IFF_NO_PI))
        for command in (
            "link set lo up",
            f"address add {OWN}/24 dev nowhere",
            "link set nowhere up",
            "route add default dev nowhere",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        # A resolver on loopback would answer in place of the network; this socket replaces it.
        self._resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._resolver.bind(("", 53))
        for read in (self._read_packets, self._read_questions):
            threading.Thread(target=read, name="nowhere", daemon=True).start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as canary:
            canary.sendto(b"?", (CANARY, 9))
        deadline = time.monotonic() + 10
        while f"udp to {CANARY}:9" not in self._sent:
            assert time.monotonic() < deadline, f"a packet went unseen: {self._sent}"
            time.sleep(0.01)

    def sent(self) -> list[str]:
        """Return each packet and each lookup since the beginning, without the canary's."""
        return [each for each in self._sent if CANARY not in each]

    def close(self) -> None:
        self._resolver.close()
        os.close(self._tun)

    def _read_packets(self) -> None:
        with contextlib.suppress(OSError):  # the device is closed
            while True:
                self._sent.append(_described(os.read(self._tun, 65536)))

    def _read_questions(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                question = self._resolver.recv(65536)
                if not question:
                    return
                self._sent.append(f"a resolver was asked for {_name(question)}")


def _described(packet: bytes) -> str:
    """Return protocol, address and port of an IP packet, and the name that a DNS query asks for."""
    if packet[0] >> 4 != 4:
        # The kernel itself sends multicasts to routers and groups, some of them for a new device.
        to = ipaddress.IPv6Address(packet[24:40])
        return f"IPv6 to {to}" if not to.is_multicast else f"multicast to {to}, {CANARY}"
    body = packet[(packet[0] & 15) * 4 :]
    address = f"{ipaddress.IPv4Address(packet[16:20])}:{int.from_bytes(body[2:4])}"
    if packet[9] == UDP and address.endswith(":53"):
        return f"{address} was asked for {_name(body[8:])}"
    return f"{ {6: 'tcp', UDP: 'udp'}.get(packet[9], packet[9]) } to {address}"


def _name(question: bytes) -> str:
    """Return the name in a DNS message (RFC 1035, 4.1.2)."""
    return ".".join(part.decode(errors="replace") for part in re.findall(rb"[\w-]{2,}", question))


@contextlib.contextmanager
def nowhere() -> Iterator[Nowhere]:
    """Restrict everything that this thread starts meanwhile to this network."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace")
        try:
            network = Nowhere()
            try:
                yield network
            finally:
                network.close()
        finally:
            libc.setns(before, CLONE_NEWNET)
    finally:
        os.close(before)
