"""Hosts for tests of workers over SSH: namespaces of this machine, each with an SSH server.

Each host has its own network, address, host name, processes, /etc/hosts, /run and folders, and does
not see the folders of this process: in all that workers notice it is another machine. A bridge
joins the hosts and this machine. The command ``ssh`` of this process gets a configuration of the
test. The namespaces end with their first process, so nothing is left after `Network.close`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.readme import ROOT
from tests.support.waiting import until

BRIDGE = "ortlabtest"
NETWORK = "10.213.77"
HERE = f"{NETWORK}.1"
NOBODY = f"{NETWORK}.99"
"""An address at which nothing answers, as behind a firewall that drops packets."""
NO_CARD = "02:00:00:00:00:63"
HOSTS = ("alpha", "beta")

_SSHD = "/usr/sbin/sshd"
_NEEDED = {
    "ip": "iproute2",
    _SSHD: "openssh-server",
    "ssh": "openssh-client",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_START = """
set -e
mount --bind "$1" /mnt
mount -t tmpfs tmpfs "$2"
mount -t tmpfs tmpfs /run
mount --bind /mnt/hosts /etc/hosts
mount --bind /mnt/resolv.conf /etc/resolv.conf
hostname "$3"
mkdir -m 0755 /run/sshd
ip link set lo up
exec 3>&1 >/dev/null
echo ready >&3
read go
exec 3>&-
exec /usr/sbin/sshd -D -e -f /mnt/sshd_config
"""
_SERVER = """
ListenAddress {address}
HostKey /mnt/host_key
PidFile none
AuthorizedKeysFile /mnt/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv PYTHONPATH={root} TMPDIR=/mnt/tmp ORTLAB_HOME=/mnt/home XDG_CACHE_HOME=/mnt/cache
"""
_CLIENT = """
Host *
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def missing() -> str | None:
    """Return why there can be no hosts on this machine; None if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts for SSH are Linux namespaces, which need root"
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            return f"hosts for SSH need {package}, which is not installed"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def do(*words: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def _make_key(path: Path) -> str:
    """Write a new pair of keys and return the public one."""
    do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path))
    return path.with_suffix(".pub").read_text().strip()


class Host:
    """One host, whose SSH server runs.

    Args:
        name: Its name, which only ssh_config of this process knows.
        number: Last number of its address.
        folder: Folder for its files, which it sees as /mnt.
        hidden: Folder of this machine that it does not see.
        user_key: Public key that it accepts.
    """

    def __init__(self, name: str, number: int, folder: Path, hidden: Path, user_key: str) -> None:
        self.name, self.folder = name, folder
        self.address = f"{NETWORK}.{number}"
        self._cable = f"{BRIDGE}{number}"
        self.servers: set[int] = set()
        """Processes that are no part of a test, such as Slurm's on this host."""
        folder.mkdir()
        for each in ("tmp", "home", "cache"):
            (folder / each).mkdir()
        self.key = _make_key(folder / "host_key")
        (folder / "authorized_keys").write_text(f"{user_key}\n")
        (folder / "sshd_config").write_text(_SERVER.format(address=self.address, root=ROOT))
        # As on Debian it knows its own name, as loopback, and no other host.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}.test\n")
        (folder / "resolv.conf").touch()
        with (folder / "log").open("wb") as log:
            self._first = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES),
                    *("sh", "-c", _START, "sh", str(folder), str(hidden), f"{name}.test"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        told = self._first.stdout.readline()
        assert told == "ready\n", (folder / "log").read_text()
        (self._init,) = psutil.Process(self._first.pid).children()
        self._network = os.readlink(f"/proc/{self._init.pid}/ns/net")
        do("ip", "link", "add", self._cable, "type", "veth", "peer", "name", f"{self._cable}p")
        do("ip", "link", "set", f"{self._cable}p", "netns", str(self._init.pid), "name", "eth0")
        do("ip", "link", "set", self._cable, "master", BRIDGE, "up")
        self.inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        self._first.stdin.write("go\n")
        self._first.stdin.flush()
        until(lambda: "Server listening" in (folder / "log").read_text())

    @property
    def pid(self) -> int:
        """Process id of its first process as this machine sees it: its SSH server."""
        return self._init.pid

    def inside(self, *words: str) -> str:
        """Run a command in the host's network."""
        return do("nsenter", "--target", str(self._init.pid), "--net", *words)

    def processes(self) -> dict[int, list[str]]:
        """Return the command lines of the host's processes, without its servers, by pid."""
        return {
            pid: words for pid, words in self.all_processes().items() if pid not in self.servers
        }

    def all_processes(self) -> dict[int, list[str]]:
        """Return the command lines of the host's processes, without its first one, by pid."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                ours = os.readlink(f"/proc/{process.pid}/ns/net") == self._network
                ended = process.status() == psutil.STATUS_ZOMBIE
                if ours and not ended and process.pid not in (self._first.pid, self._init.pid):
                    found[process.pid] = process.cmdline()
        return found

    def files(self) -> list[str]:
        """Return what ortlab has in the host's folder for temporary files."""
        return sorted(path.name for path in (self.folder / "tmp").glob("*ortlab*"))

    def unplug(self) -> None:
        """Cut the host off: neither side hears of it."""
        do("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """Undo `unplug`."""
        do("ip", "link", "set", self._cable, "up")

    def drop_connections_to(self, address: str) -> None:
        """Drop the packets of new connections from the host, as a firewall does."""
        self.inside("ip", "neigh", "replace", NOBODY, "lladdr", NO_CARD, "dev", "eth0")
        self.inside("ip", "route", "add", address, "via", NOBODY, "dev", "eth0", "table", "99")
        of_ssh = ("ipproto", "tcp", "sport", "22", "lookup", "main", "priority", "10")
        self.inside("ip", "rule", "add", *of_ssh)
        self.inside("ip", "rule", "add", "ipproto", "tcp", "lookup", "99", "priority", "20")

    def accept_connections(self) -> None:
        """Undo `drop_connections_to`."""
        for priority in ("10", "20"):
            self.inside("ip", "rule", "delete", "priority", priority)
        self.inside("ip", "route", "flush", "table", "99")

    def close(self) -> None:
        """End everything on the host; its namespaces end with it."""
        self._first.kill()
        self._first.communicate()
        self._init.wait()


class Network:
    """Hosts on a bridge, and OpenSSH's configuration to reach them.

    Args:
        folder: Folder for its files.
        hidden: Folder of this machine that the hosts do not see.
    """

    def __init__(self, folder: Path, hidden: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        user_key = _make_key(folder / "key")
        if BRIDGE in do("ip", "-o", "link", "show", "type", "bridge"):  # of a killed session
            do("ip", "link", "delete", BRIDGE)
        try:
            do("ip", "link", "add", BRIDGE, "type", "bridge")
            do("ip", "address", "add", f"{HERE}/24", "dev", BRIDGE)
            do("ip", "link", "set", BRIDGE, "up")
            for number, name in enumerate(HOSTS, 11):
                self.hosts[name] = Host(name, number, folder / name, hidden, user_key)
            # A bridge without hosts has no carrier and forgets its neighbors.
            do("ip", "neigh", "replace", NOBODY, "lladdr", NO_CARD, "dev", BRIDGE)
        except BaseException:
            self.close()
            raise
        self._configure()

    @property
    def bin(self) -> Path:
        """Folder of the command ssh that uses the configuration."""
        return self.folder / "bin"

    def _configure(self) -> None:
        alpha, beta = self.hosts.values()
        _make_key(self.folder / "other_key")
        known = [f"{host.address} {host.key}" for host in (alpha, beta)]
        known.append(f"changed {beta.key}")
        (self.folder / "known_hosts").write_text("\n".join([*known, ""]))
        aliases: dict[str, tuple[str, ...]] = {
            **{host.name: (f"HostName {host.address}",) for host in (alpha, beta)},
            "again": (f"HostName {alpha.address}",),
            "silent": (f"HostName {NOBODY}",),
            "mute": (f"HostName {HERE}",),
            "lost": ("HostName no-such-host.invalid",),
            "unknown": (f"HostName {alpha.address}", "HostKeyAlias unknown"),
            "changed": (f"HostName {alpha.address}", "HostKeyAlias changed"),
            "refusing": (f"HostName {alpha.address}", f"IdentityFile {self.folder}/other_key"),
        }
        lines = [
            line
            for alias, options in aliases.items()
            for line in (f"Host {alias}", *(f"    {option}" for option in options))
        ]
        # ssh takes all keys that the configuration names: the one of "refusing" is to be the only.
        general = _CLIENT.format(folder=self.folder).replace("Host *", "Host * !refusing", 1)
        rest = "\n".join(
            line
            for line in _CLIENT.format(folder=self.folder).splitlines()
            if "IdentityFile" not in line
        )
        config = self.folder / "ssh_config"
        config.write_text("\n".join([*lines, general, rest, ""]))
        self.bin.mkdir()
        command = self.bin / "ssh"
        command.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
        command.chmod(0o700)

    def close(self) -> None:
        """End the hosts and remove the bridge."""
        for host in self.hosts.values():
            host.close()
        do("ip", "link", "delete", BRIDGE)


@contextlib.contextmanager
def command_lines() -> Iterator[set[str]]:
    """Collect the command lines and environments of all processes, of this machine's hosts too."""
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for process in psutil.process_iter():
                for name in ("cmdline", "environ"):
                    try:
                        text = Path(f"/proc/{process.pid}/{name}").read_bytes()
                    except OSError:
                        continue
                    seen.add(text.decode(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
