"""Tests that another user of the machine cannot read anything from an encrypted kernel."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import KernelManager

from ortlab.cluster.workers import Workers
from ortlab.engines.ortmodule import compat
from tests.support.jupyter_kernel import Kernel
from tests.support.waiting import HANGS_S

NEEDS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)

STRANGER = """
import json, os, sys, time, zmq
os.setgroups([]); os.setgid(65534); os.setuid(65534)
asked = json.loads(sys.argv[1])
opened = []
for path in asked["files"]:
    try:
        open(path, "rb").close()
    except PermissionError:
        continue
    opened.append(path)
sockets, context = {}, zmq.Context()
poller = zmq.Poller()
for port in asked["ports"]:
    for kind in (zmq.SUB, zmq.DEALER):
        socket = context.socket(kind)
        socket.connect(f"tcp://127.0.0.1:{port}")
        if kind == zmq.SUB:
            socket.subscribe(b"")
        else:
            socket.send_multipart([b"<IDS|MSG>", b"", b"{}", b"{}", b"{}", b"{}"])
        sockets[socket] = port
        poller.register(socket, zmq.POLLIN)
print("ready", flush=True)
heard, end = b"", time.monotonic() + asked["seconds"]
while time.monotonic() < end and not os.path.exists(asked["over"]):
    for socket, _ in poller.poll(100):
        heard += b"".join(socket.recv_multipart())
told = {"opened": opened, "uid": os.getuid(), "heard": heard.decode(errors="replace")}
print(json.dumps(told), flush=True)
os._exit(0)
"""
"""Script of another user, who tries to open each file and to listen and connect at each port."""

GRAPH = """
%load_ext ortlab
import torch
from torch import nn
class Secretive(nn.Module):
    def __init__(self):
        super().__init__()
        self.classified = nn.Linear(4, 4)
    def forward(self, x):
        return self.classified(x).sum()
"""
SHOWN = """
model = ortlab.wrap(Secretive())
model(torch.randn(2, 4)).backward()
%ort graph model
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep the user's files of ortlab and Jupyter in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("ORTLAB_HOME", str(folder / "ortlab"))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        yield folder


@contextlib.contextmanager
def kernel(encryption: str) -> Iterator[tuple[Kernel, list[int], Path]]:
    """Start a kernel with this encryption; yield it, its open ports and its connection file."""
    manager = KernelManager(kernel_name="python3", transport_encryption=encryption)
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=HANGS_S)
        started = Kernel(client)
        pid = int(started("import os; print(os.getpid())").text)
        yield started, listening(pid), Path(manager.connection_file)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def stranger(ports: list[int], files: list[Path], home: Path) -> Iterator[dict[str, Any]]:
    """Run as another user who meanwhile tries to open the files and listens at the ports.

    At the end, the yielded dictionary has the files ``opened`` and the messages ``heard``.
    """
    over, seen = home / "over", dict[str, Any]()
    asked = {"ports": ports, "files": list(map(str, files)), "seconds": 120, "over": str(over)}
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, json.dumps(asked)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        yield seen
        over.touch()
        seen.update(json.loads(other.stdout.read()))
    assert seen["uid"] == 65534


def listening(pid: int) -> list[int]:
    """Return the listening ports of a process, all of which must be on loopback."""
    sockets = [
        each.laddr
        for each in psutil.Process(pid).net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert {each.ip for each in sockets} <= {"127.0.0.1"}
    return sorted({each.port for each in sockets})


@NEEDS_ROOT
@pytest.mark.parametrize("encryption", ["auto", "disabled"])
def test_another_user_cannot_fetch_a_graph(home: Path, encryption: str) -> None:
    """Without encryption they can, which shows that the first case listens at the right place."""
    if compat.unavailable() is not None:
        pytest.skip(str(compat.unavailable()))
    with kernel(encryption) as (started, ports, connection):
        assert len(ports) >= 5
        started("import ortlab" + GRAPH)
        run = started(
            "data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]\n"
            "run = ortlab.finetune(nn.Linear(4, 2), data, loss='cross_entropy', engine='eager')\n"
            "print(run.result() and run.folder)"
        )
        folder = Path(run.text.splitlines()[-1])
        kept = [path for path in [*folder.rglob("*"), connection] if path.is_file()]
        assert len(kept) > 4
        with stranger(ports, kept, home) as seen:
            # A subscriber connects in the background, so it may miss the first of several messages.
            for number in range(5):
                started(f"print('classified output {number}')")
            assert "classified" in str(started(SHOWN).outputs)
        told = started("%ort device").shown[-1]["text/plain"]
    assert seen["opened"] == []
    if encryption == "auto":
        assert seen["heard"] == ""
        assert "can read what this kernel shows" not in told
    else:
        assert "classified" in seen["heard"]
        assert "transport_encryption=auto" in told


@NEEDS_ROOT
def test_another_user_cannot_listen_to_workers(home: Path) -> None:
    """The output of ranks goes through the same kind of sockets, which ipyparallel encrypts."""
    ranks = Workers(2)
    try:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        ports = sorted({port for each in processes for port in listening(each.pid)})
        assert len(ports) > 10
        with stranger(ports, [], home) as seen:
            for _ in range(5):
                assert ranks.run(print, "classified") == [None, None]
    finally:
        ranks.stop()
    assert seen["heard"] == ""


def test_what_is_kept_is_the_users_alone(home: Path) -> None:
    """Folders have mode 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        with kernel("auto") as (started, _, _):
            started("import ortlab" + GRAPH)
            started(
                "data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]\n"
                "ortlab.finetune(nn.Linear(4, 2), data, loss='cross_entropy',\n"
                "    engine='eager', save_steps=2).result()\n"
                "%ort runs"
            )
            if compat.unavailable() is None:
                started(SHOWN)
    finally:
        os.umask(before)
    kept = list((home / "ortlab").rglob("*"))
    assert len(kept) > 6
    modes = {
        str(path.relative_to(home)): stat.S_IMODE(path.stat().st_mode)
        for path in [home / "ortlab", *kept]
    }
    open_to_others = {path: oct(mode) for path, mode in modes.items() if mode & 0o077}
    assert not open_to_others
