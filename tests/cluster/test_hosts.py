"""Tests of workers over SSH: hosts that cannot run them, work on two hosts, and how it all ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel

import ortlab
from ortlab.cluster import host_files
from ortlab.cluster.call import RankDied, RankError
from ortlab.cluster.workers import Workers
from ortlab.engines.base import StepperLost
from ortlab.session import session
from tests.cluster.hosts import HERE, Host, Network, command_lines
from tests.support import worker_runs
from tests.support.readme import ROOT
from tests.support.typed_magics import Typist
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import TOLERANCE, begin, difference, losses, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.usefixtures("own_workers", "nothing_is_left"),
]

TOGETHER_S = 10.0
"""Seconds that the checks of all hosts may take: users are promised that."""


def rank() -> int:
    return int(os.environ["RANK"])


def total(value: float) -> float:
    """Return the sum of the values of all ranks."""
    import torch
    from torch import distributed

    tensor = torch.tensor([value * (rank() + 1)])
    distributed.all_reduce(tensor)
    return tensor.item()


# ---- hosts that cannot run workers ---------------------------------------------------------------

Refused = Callable[..., str]


@pytest.fixture
def refused(ip: Typist, record_property: Callable[[str, object], None]) -> Refused:
    """Return a function that types a command, which is refused in time, and returns the reason."""

    def typed(words: str) -> str:
        began = time.monotonic()
        result, out, err = ip.run(f"%ort workers {words}")
        seconds = time.monotonic() - began
        assert not result.success
        assert "Traceback" not in out + err
        reason = err.removeprefix("UsageError: ").rstrip()
        record_property("host", f"{seconds:4.1f} s  {reason}")
        assert seconds < TOGETHER_S
        assert session.workers is None
        return reason

    return typed


@pytest.mark.parametrize(
    ("hosts", "reason", "step"),
    [
        ("lost", "its name 'no-such-host.invalid' does not resolve", "HostName in ~/.ssh/config"),
        ("alpha:2299", "nothing listens at 10.213.77.11 port 2299", "start its SSH server"),
        ("silent", "no answer from 10.213.77.99 port 22 within 5 s", "no firewall drops"),
        ("unknown", "its host key is unknown here", "type ssh unknown once in a terminal"),
        ("changed", "its host key has changed", 'type ssh-keygen -f "'),
        ("refusing", "it refuses the keys of root", "type ssh-copy-id refusing"),
    ],
)
def test_a_host_that_cannot_be_reached(
    refused: Refused, hosts: str, reason: str, step: str
) -> None:
    message = refused(f"--hosts {hosts}")
    assert message.startswith(f"{hosts}: {reason}")
    assert step in message
    assert len(message.splitlines()) == 1


def test_all_hosts_are_checked_at_once(refused: Refused) -> None:
    hosts = "alpha,silent,unknown,again,refusing,beta:2299,lost"
    first, *lines = refused(f"--hosts {hosts}").splitlines()
    assert first == "5 of 7 hosts cannot run workers:"
    assert [line.partition(": ")[0] for line in lines] == [
        *("silent", "unknown", "refusing", "beta:2299", "lost")
    ]


def test_a_host_that_accepts_and_says_nothing(refused: Refused, network: Network) -> None:
    with socket.create_server((HERE, 0)) as mute:
        name = f"mute:{mute.getsockname()[1]}"
        message = refused(f"--hosts alpha,{name}")
        assert message.startswith(f"{name}: no answer from {HERE} port ")
    waits = python(network.hosts["alpha"], "waits", "while read line; do :; done")
    message = refused(f"--hosts alpha --python {waits}")
    assert message.startswith("alpha: no answer within 8.5 s; type ssh alpha true")


def python(host: Host, name: str, script: str) -> str:
    """Write a program on the host that stands for its Python."""
    program = host.folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"/mnt/{name}"


def test_a_python_that_is_not_there_or_lacks_something(refused: Refused, network: Network) -> None:
    alpha = network.hosts["alpha"]
    message = refused("--hosts alpha --python /no/python")
    assert message.startswith("alpha: /no/python is not there; name the path of its Python")

    bare = python(alpha, "bare", f'exec {sys.executable} -I -S "$@"')
    message = refused(f"--hosts alpha --python {bare}")
    assert "no ortlab, no torch" in message
    assert "no ipyparallel" in message
    assert "install the same there, or name another Python by --python PATH" in message

    site = alpha.folder / "site" / "torch-1.2.3.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    path = "PYTHONPATH=/mnt/site:$PYTHONPATH"
    old = python(alpha, "old", f'{path} exec {sys.executable} "$@"')
    message = refused(f"--hosts alpha --python {old}")
    assert " has torch 1.2.3, but this process has torch " in message


def test_a_host_that_cannot_connect_back(refused: Refused, network: Network) -> None:
    beta = network.hosts["beta"]
    beta.drop_connections_to(HERE)
    try:
        message = refused("--hosts alpha,beta")
    finally:
        beta.accept_connections()
    assert message.startswith(f"beta: it cannot connect to this machine at {HERE} (timed out)")
    assert "let this machine's firewall accept connections from it" in message

    message = refused("--hosts alpha --address 127.0.0.1")
    assert message.startswith("alpha: it cannot connect to this machine at 127.0.0.1 (")


def test_shells_that_print_are_no_obstacle(network: Network) -> None:
    """Files that a shell reads at its start may print whatever they like."""
    alpha = network.hosts["alpha"]
    loud = python(alpha, "loud", f'echo welcome; echo hello >&2; exec {sys.executable} "$@"')
    assert ortlab.workers(hosts="alpha", python=loud).run(rank) == [0]


# ---- two hosts with two ranks each ---------------------------------------------------------------


@pytest.fixture
def four(network: Network) -> Workers:
    return ortlab.workers(hosts="alpha,beta", per_host=2)


def test_two_hosts_run_functions_and_reduce(ip: Typist, network: Network) -> None:
    def place() -> tuple[str, ...]:
        import socket

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return (socket.gethostname(), *(os.environ[name] for name in names))

    out = ip("w = %ort workers 4 --hosts alpha,beta --per-host 2")
    assert out.startswith("starting 4 workers\n4 workers up after ")
    workers = ip["w"]
    assert workers.run(place) == [
        ("alpha.test", "0", "4", "0", "2"),
        ("alpha.test", "1", "4", "1", "2"),
        ("beta.test", "2", "4", "0", "2"),
        ("beta.test", "3", "4", "1", "2"),
    ]
    assert not workers.local
    table = workers.table()
    assert [row.host for row in table] == ["alpha", "alpha", "beta", "beta"]
    assert all(row.rss_bytes and row.rss_bytes > 2**26 for row in table)
    ip("again = %ort workers --hosts alpha,beta --per-host 2")
    assert ip["again"] is workers
    with workers.rendezvous() as group:
        assert group.backend == "gloo"
        assert workers.run(total, 1.0) == [10.0] * 4
    with workers.rendezvous():
        assert workers.run(total, 2.0) == [20.0] * 4
    with pytest.raises(RankError, match=r"rank 2 of 4: ValueError: no luck"):
        workers.run(fail_on, 2)
    assert workers.run(rank) == [0, 1, 2, 3]
    assert "on alpha, beta, idle" in workers.summary
    ip("%ort workers stop")


def test_hosts_that_cannot_connect_to_each_other(four: Workers, network: Network) -> None:
    alpha, beta = network.hosts.values()
    beta.drop_connections_to(alpha.address)
    try:
        with (
            pytest.raises(RankError, match=r"rank 2 of 4: .*cannot connect to the host of rank 0"),
            four.rendezvous(),
        ):
            raise AssertionError("they cannot have met")
    finally:
        beta.accept_connections()
    with ortlab.workers(hosts="alpha,beta", per_host=2).rendezvous():
        pass


def fail_on(which: int) -> None:
    """Fail on one rank while the others sleep, until they are interrupted."""
    if rank() == which:
        raise ValueError("no luck")
    time.sleep(60)


def test_every_socket_is_on_loopback_or_on_the_one_address(four: Workers, network: Network) -> None:
    def listening() -> set[str]:
        """Return the addresses on which this process and its children listen."""
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        hosts = {host.pid for host in network.hosts.values()}
        return {
            connection.laddr.ip
            for process in family
            if process.pid not in hosts
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }

    before = listening()
    assert before == {HERE, "127.0.0.1"}
    with four.rendezvous():
        four.run(total, 1.0)
        assert listening() == before
        for host in network.hosts.values():
            told = host.inside("ss", "--listening", "--tcp", "--numeric", "--no-header")
            places = {line.split()[3].rpartition(":")[0] for line in told.splitlines()}
            assert places <= {"127.0.0.1", host.address}, told


def test_no_secret_is_on_a_command_line(network: Network) -> None:
    with command_lines() as seen:
        workers = ortlab.workers(hosts="alpha,beta")
        with workers.rendezvous():
            workers.run(total, 1.0)
    (folder,) = Path(tempfile.gettempdir()).glob("ortlab-scratch-workers-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    (written,) = (folder / "security").glob("*engine.json")
    assert written.stat().st_mode & 0o777 == 0o600
    connection = json.loads(written.read_text())
    assert connection["curve_serverkey"], "messages are encrypted"
    reached = workers._cluster._reached
    assert reached is not None
    secrets = {connection["key"], *(link.token for link in reached.links)}
    assert all(len(secret) >= 32 for secret in secrets)
    assert any("remote-engine" in text for text in seen)
    assert not [text for text in seen if any(secret in text for secret in secrets)]
    for host in network.hosts.values():
        for path in host.folder.rglob("*"):
            if path.is_file():
                text = path.read_bytes()
                assert not [secret for secret in secrets if secret.encode() in text], path
        (scratch,) = (host.folder / "tmp").glob("ortlab-scratch-workers-*")
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert secrets.isdisjoint((host.folder / "log").read_text().split())


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_that_of_one_process(
    four: Workers, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a host lost its workers: weights and state travel in pieces, both ways."""
    monkeypatch.setattr(host_files, "_PIECE", 1000)
    alone = worker_runs.Network()
    expected = losses(train(alone))
    model = worker_runs.Network()
    run = begin(model, workers=4, zero_stage=1, save_steps=10)
    until(lambda: run.step >= 17)
    assert session.workers is four
    os.kill(workers_on(network.hosts["beta"])[0], signal.SIGKILL)
    with pytest.raises(StepperLost, match=r"rank [23] of 4 on beta died: SIGKILL"):
        run.result(HANGS_S)
    assert run.step % 10 == 0
    assert run.step >= 10
    run.resume()
    assert run.result(HANGS_S).state == "finished"
    assert session.workers is not None
    assert session.workers.hosts == four.hosts
    assert difference(expected, losses(run)) < TOLERANCE
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    for host in network.hosts.values():  # model and state are removed once they were read
        (folder,) = (host.folder / "tmp").glob("ortlab-scratch-workers-*")
        assert {path.name for path in folder.iterdir()} == {"0", "1", "owner.lock"}


# ---- ends ----------------------------------------------------------------------------------------


def workers_on(host: Host, what: str = "remote-engine") -> list[int]:
    """Return the processes of a host whose command line has a word."""
    return [pid for pid, words in host.processes().items() if what in words]


def test_a_rank_that_is_killed(four: Workers, network: Network) -> None:
    def end_one() -> None:
        if rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankDied) as raised:
        four.run(end_one)
    assert str(raised.value) == (
        "rank 3 of 4 on beta died: SIGKILL (signal 9); %ort workers --hosts alpha,beta --per-host "
        "2, or ortlab.workers(hosts='alpha,beta', per_host=2), starts fresh ones"
    )
    assert raised.value.rank == 3


@pytest.mark.parametrize("what", ["sshd", "supervisor"])
def test_a_connection_that_ends(four: Workers, network: Network, what: str) -> None:
    """SSH's server, or the process that it runs, is killed on one host."""
    beta = network.hosts["beta"]
    if what == "sshd":
        victims = [pid for pid, words in beta.processes().items() if words[0].startswith("sshd:")]
    else:
        victims = [psutil.Process(pid).ppid() for pid in workers_on(beta)]
    assert victims
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    until(lambda: not four.usable())
    assert four.broken in [
        f"rank {number} of 4 on beta {how}"
        for number in (2, 3)
        for how in ("was lost: the SSH connection to the host ended", "died: exit code 1")
    ]


def test_a_host_without_power(network: Network, four: Workers) -> None:
    """Neither side is told; what runs on the host ends by itself, in calls of its workers, too."""
    beta = network.hosts["beta"]
    assert len(workers_on(beta)) == 2
    began = time.monotonic()
    unplugged = threading.Timer(1.0, beta.unplug)
    unplugged.start()
    try:
        with pytest.raises(RankDied, match=r"on beta was lost: the SSH connection"):
            four.run(time.sleep, 600)
        assert time.monotonic() - began < 60
        assert workers_on(network.hosts["alpha"]) == []
        until(lambda: workers_on(beta) == [])
    finally:
        unplugged.cancel()
        beta.plug()


KERNEL_CELLS = """
%load_ext ortlab
import time
w = %ort workers --hosts alpha,beta --per-host 2
print("sum", sum(w.run(lambda: 1)))
"""


def test_a_kernel_that_is_killed_leaves_nothing(network: Network) -> None:
    manager, client = start_new_kernel(
        kernel_name="python3", env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            said.append(message["content"].get("text", ""))

        client.execute_interactive(KERNEL_CELLS, timeout=HANGS_S, output_hook=hear)
        assert "sum 4" in "".join(said)
        assert all(len(workers_on(host)) == 2 for host in network.hosts.values())
        client.execute("w.run(time.sleep, 600)")
        kernel = psutil.Process(manager.provisioner.pid)
        theirs = kernel.children(recursive=True)
        kernel.kill()
        for host in network.hosts.values():
            until(lambda host=host: host.processes() == {})  # type: ignore[misc]
        until(lambda: not any(each.is_running() for each in theirs))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
