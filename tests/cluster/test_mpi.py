"""Tests of workers by Open MPI's mpirun: hosts that cannot run them, two hosts, and the ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import cloudpickle
import pytest
import torch

import ortlab
from ortlab.cluster.call import RankDied
from ortlab.session import session
from tests.cluster.hosts import NOBODY, Host, Network
from tests.support import worker_runs
from tests.support.typed_magics import Typist
from tests.support.waiting import until
from tests.support.worker_runs import TOLERANCE, difference, losses, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.usefixtures("own_workers", "nothing_is_left"),
]

TOGETHER_S = 10.0


@pytest.fixture(autouse=True)
def mpirun(network: Network, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let mpirun run as root; return the hosts, by addresses, which their names do not have."""
    if shutil.which("mpirun") is None:
        pytest.skip("tests with mpirun need openmpi-bin, which is not installed")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return ",".join(host.address for host in network.hosts.values())


def rank() -> int:
    return int(os.environ["RANK"])


def workers_on(host: Host) -> list[int]:
    return [pid for pid, words in host.processes().items() if "remote-engine" in words]


def test_two_hosts(ip: Typist, mpirun: str) -> None:
    def place() -> tuple[str, ...]:
        import socket

        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return (socket.gethostname(), *(os.environ[name] for name in names))

    ip(f"w = %ort workers --mpi 4 --hosts {mpirun}")
    assert ip["w"].run(place) == [
        ("alpha.test", "0", "0", "2"),
        ("alpha.test", "1", "1", "2"),
        ("beta.test", "2", "0", "2"),
        ("beta.test", "3", "1", "2"),
    ]
    ip(f"again = %ort workers --mpi 4 --hosts {mpirun}")
    assert ip["again"] is ip["w"]


def test_without_hosts_mpirun_uses_its_own() -> None:
    workers = ortlab.workers(2, mpi=True)
    assert workers.run(rank) == [0, 1]
    assert not workers.local


@pytest.mark.parametrize(
    ("hosts", "reason", "step"),
    [
        ("no-such-host.invalid", "its name does not resolve", "/etc/hosts"),
        (NOBODY, "no answer within 8.5 s", f"type mpirun --host {NOBODY} hostname"),
        ("HERE", "mpirun ended: ", "hostname in a terminal"),
    ],
)
def test_a_host_that_mpirun_cannot_reach(
    ip: Typist,
    record_property: Callable[[str, object], None],
    network: Network,
    hosts: str,
    reason: str,
    step: str,
) -> None:
    alpha, beta = network.hosts.values()
    keys = beta.folder / "authorized_keys"
    known = keys.read_text()
    if hosts == "HERE":  # it refuses the keys
        hosts = beta.address
        keys.write_text("")
    try:
        began = time.monotonic()
        result, out, err = ip.run(f"%ort workers --mpi 2 --hosts {alpha.address},{hosts}")
        seconds = time.monotonic() - began
    finally:
        keys.write_text(known)
    assert not result.success
    assert "Traceback" not in out + err
    assert f"{hosts}: {reason}" in err
    assert step in err
    record_property("host", f"{seconds:4.1f} s  {err.strip()}")
    assert seconds < TOGETHER_S


def test_numbers_names_and_a_machine_that_do_not_fit(
    ip: Typist, mpirun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="3 workers cannot be 1 on each of 2 hosts; start 2"):
        ortlab.workers(3, mpi=True, hosts=mpirun)
    with pytest.raises(ValueError, match="mpirun takes host names alone, not 'me@a'"):
        ortlab.workers(1, mpi=True, hosts="me@a")
    monkeypatch.setenv("PATH", "/no/programs")
    _, _, err = ip.run("%ort workers --mpi 2 --hosts a,b")
    assert "mpirun is not installed on this machine; install Open MPI" in err


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_that_of_one_process(mpirun: str) -> None:
    ortlab.workers(4, mpi=True, hosts=mpirun)
    alone, model = worker_runs.Network(), worker_runs.Network()
    expected = losses(train(alone))
    assert difference(expected, losses(train(model, workers=4, zero_stage=1))) < TOLERANCE
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_rank_and_then_mpirun_are_killed(mpirun: str, network: Network) -> None:
    beta = network.hosts["beta"]
    workers = ortlab.workers(4, mpi=True, hosts=mpirun)
    killed = threading.Timer(0.5, os.kill, (workers_on(beta)[0], signal.SIGKILL))
    killed.start()
    with pytest.raises(RankDied, match=rf"rank [23] of 4 on {beta.address} died: SIGKILL"):
        workers.run(time.sleep, 60)
    killed.join()
    workers = ortlab.workers(4, mpi=True, hosts=mpirun)
    assert session.workers is workers
    reached = workers._cluster._reached
    assert reached is not None
    reached.links[1]._process.kill()
    until(lambda: not workers.usable())
    assert "mpirun's connection to the host ended" in str(workers.broken) or "died" in str(
        workers.broken
    )


def test_a_script_on_two_hosts(mpirun: str) -> None:
    """They do not see pytest's folders."""
    chosen = {**worker_runs.CHOSEN, "zero_stage": 1}
    del chosen["engine"], chosen["device"]
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="ortlab-test-") as folder:
        written = ortlab.script(
            worker_runs.Network(), worker_runs.data(), to=f"{folder}/it", workers=4, **chosen
        )
        hosts = ",".join(f"{host}:2" for host in mpirun.split(","))
        words = ["mpirun", "--host", hosts, "-np", "4", sys.executable, str(written.path)]
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "name the first host: mpirun -x MASTER_ADDR=HOST" in refused.stderr
        words[1:1] = ["-x", f"MASTER_ADDR={mpirun.partition(',')[0]}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.M)]
    assert told == pytest.approx(losses(train(worker_runs.Network())), rel=TOLERANCE)
