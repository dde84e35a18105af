"""Tests of workers as a job of Slurm: jobs that cannot run or wait, runs on two hosts, the ends."""

from __future__ import annotations

import _thread
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import safetensors.torch
import torch
from jupyter_client.manager import start_new_kernel

import ortlab
from ortlab.cluster import host_files
from ortlab.cluster.call import RankDied
from ortlab.cluster.workers import Workers
from ortlab.engines.base import StepperLost
from ortlab.session import session
from tests.cluster import slurm as slurm_here
from tests.cluster.hosts import Host, Network, command_lines
from tests.cluster.slurm import Slurm
from tests.support import worker_runs
from tests.support.readme import ROOT
from tests.support.typed_magics import Typist
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import TOLERANCE, begin, difference, losses, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.usefixtures("own_workers", "nothing_is_left", "no_job_is_left"),
]

TOGETHER_S = 10.0
"""Seconds within which users hear of a job that cannot run."""


@pytest.fixture(scope="module")
def slurm(network: Network) -> Iterator[Slurm]:
    """Start Slurm on the hosts, which its commands lead to."""
    if reason := slurm_here.missing():
        pytest.skip(reason)
    made = Slurm(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(made.conf))
        yield made
    made.close()


@pytest.fixture
def no_job_is_left(slurm: Slurm, nothing_is_left: None) -> Iterator[None]:
    yield
    if session.workers is not None:
        session.workers.stop()
        session.workers = None
    until(lambda: slurm.jobs() == [])


def rank() -> int:
    return int(os.environ["RANK"])


def workers_on(host: Host) -> list[int]:
    return [pid for pid, words in host.processes().items() if "remote-engine" in words]


# ---- jobs that cannot run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason", "step"),
    [
        ("--partition nope", "Slurm has no partition 'nope'", "choose from closed, main, one"),
        (
            "--partition one",
            "partition one has no room for 4 workers: it has 2 processors on 1 host",
            "start at most 2, or choose another by --partition",
        ),
        ("--time 9:00:00", "would wait forever (PartitionTimeLimit)", "ask for less by --time"),
        ("--partition closed", "would wait forever (PartitionDown)", "choose another"),
        ("--slurm-options nodelist=gamma", "Invalid node name specified", "see sinfo"),
        ("--slurm-options no-such-option=3", "unrecognized option", "correct the options"),
        ("--slurm-options mem=5T", "Requested node configuration is not available", "--mem=5T"),
        ("--python /no/python", "alpha: /no/python is not there", "name the path of its Python"),
        ("--address 127.0.0.1", "it cannot connect to this machine at 127.0.0.1", "--address"),
    ],
)
def test_a_job_that_cannot_run(
    ip: Typist,
    slurm: Slurm,
    record_property: Callable[[str, object], None],
    words: str,
    reason: str,
    step: str,
) -> None:
    began = time.monotonic()
    result, out, err = ip.run(f"%ort workers --slurm 4 {words}")
    seconds = time.monotonic() - began
    assert not result.success
    assert "Traceback" not in out + err
    assert reason in err
    assert step in err
    record_property("host", f"{seconds:4.1f} s  {err.strip()}")
    assert seconds < TOGETHER_S
    until(lambda: slurm.jobs() == [])


def test_a_machine_without_slurm(ip: Typist, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/programs")
    result, _, err = ip.run("%ort workers --slurm 2")
    assert not result.success
    assert "salloc is not installed on this machine; start the notebook on a host" in err


def test_a_controller_that_does_not_answer(
    ip: Typist, monkeypatch: pytest.MonkeyPatch, slurm: Slurm, tmp_path: Path
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(slurm.conf.read_text() + "SlurmctldPort=6999\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    began = time.monotonic()
    result, _, err = ip.run("%ort workers --slurm 2")
    assert time.monotonic() - began < TOGETHER_S
    assert not result.success
    assert "Slurm does not answer sinfo: " in err
    assert "type scontrol ping" in err


# ---- jobs that wait ------------------------------------------------------------------------------


def interrupted(words: str, ip: Typist, told: Callable[[], bool]) -> str:
    """Type a command, interrupt it once something is told, and return its output."""

    def watch() -> None:
        until(told)
        _thread.interrupt_main()

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, out, err = ip.run(words)
    watcher.join()
    assert "KeyboardInterrupt" in out + err
    return out


def test_a_job_that_waits(ip: Typist, slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    """It says why, and an interrupt cancels it."""
    slurm.told("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600")
    until(lambda: [state for _, state in slurm.jobs()] == ["RUNNING"])
    (other,) = (job for job, _ in slurm.jobs())
    began = time.monotonic()
    heard: list[float] = []

    def told() -> bool:
        if len(slurm.jobs()) == 2 and time.monotonic() - began > 4:
            heard.append(time.monotonic() - began)
        return bool(heard)

    out = interrupted("%ort workers --slurm 4", ip, told)
    assert "waits: (Resources); an interrupt cancels it" in out
    until(lambda: [job for job, _ in slurm.jobs()] == [other])
    assert session.workers is None
    slurm.told("scancel", other)


def test_a_host_that_is_down(ip: Typist, slurm: Slurm) -> None:
    """The reason has the host; the job runs as soon as it is there again."""
    slurm.told("scontrol", "update", "nodename=beta", "state=down", "reason=broken")
    began = time.monotonic()
    back = threading.Timer(6, slurm.told, ("scontrol", "update", "nodename=beta", "state=resume"))
    back.start()
    out = ip("w = %ort workers --slurm 4")
    back.join()
    assert "waits: " in out
    assert "beta is down (broken)" in out
    assert time.monotonic() - began > 6
    assert [row.host for row in ip["w"].table()] == ["alpha", "alpha", "beta", "beta"]


KERNEL_CELL = "%load_ext ortlab\nw = %ort workers --slurm 4\nprint('sum', sum(w.run(lambda: 1)))"


@pytest.mark.parametrize("waiting", [False, True])
def test_a_kernel_that_is_killed_leaves_no_job(
    network: Network, slurm: Slurm, waiting: bool
) -> None:
    other = ""
    if waiting:
        slurm.told("sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600")
        until(lambda: [state for _, state in slurm.jobs()] == ["RUNNING"])
        ((other, _),) = slurm.jobs()
    manager, client = start_new_kernel(
        kernel_name="python3", env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        if waiting:
            client.execute(KERNEL_CELL)
            until(lambda: "PENDING" in [state for _, state in slurm.jobs()])
        else:
            said: list[str] = []

            def hear(message: dict[str, Any]) -> None:
                said.append(message["content"].get("text", ""))

            client.execute_interactive(KERNEL_CELL, timeout=HANGS_S, output_hook=hear)
            assert "sum 4" in "".join(said)
            client.execute("import time; w.run(time.sleep, 600)")
        theirs = psutil.Process(manager.provisioner.pid).children(recursive=True)
        psutil.Process(manager.provisioner.pid).kill()
        until(lambda: [job for job, _ in slurm.jobs() if job != other] == [])
        until(lambda: not any(each.is_running() for each in theirs))
        for host in network.hosts.values():
            until(lambda host=host: workers_on(host) == [])  # type: ignore[misc]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        if other:
            slurm.told("scancel", other)


# ---- two hosts with two ranks each ---------------------------------------------------------------


@pytest.fixture
def four(slurm: Slurm) -> Workers:
    return ortlab.workers(4, slurm=True)


def test_two_hosts_of_a_job(ip: Typist) -> None:
    def place() -> tuple[str, ...]:
        import socket

        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return (socket.gethostname(), *(os.environ[name] for name in names))

    ip("w = %ort workers --slurm 4 --per-host 2 --time 10 --slurm-options comment=x")
    workers = ip["w"]
    assert workers.run(place) == [
        ("alpha.test", "0", "4", "0", "2"),
        ("alpha.test", "1", "4", "1", "2"),
        ("beta.test", "2", "4", "0", "2"),
        ("beta.test", "3", "4", "1", "2"),
    ]
    ip("again = %ort workers --slurm 4 --per-host 2 --time 10 --slurm-options comment=x")
    assert ip["again"] is workers
    assert "of Slurm, idle" in workers.summary
    ip("w = %ort workers --slurm 3")  # uneven: two on one host, one on the other
    assert [place[3:] for place in ip["w"].run(place)] == [("0", "2"), ("1", "2"), ("0", "1")]


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_that_of_one_process(
    four: Workers, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a stall of 20 s, and after a host lost its workers."""
    monkeypatch.setattr(host_files, "_PIECE", 1000)
    alone = worker_runs.Network()
    expected = losses(train(alone))
    model = worker_runs.Network()
    run = begin(model, workers=4, zero_stage=1, save_steps=10)
    until(lambda: run.step >= 5)
    beta = network.hosts["beta"]
    beta.unplug()
    time.sleep(20)  # the stall itself: a wait for nothing
    beta.plug()
    until(lambda: run.step >= 17)
    os.kill(workers_on(beta)[0], signal.SIGKILL)
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


def test_no_secret_is_on_a_command_line_or_in_slurms_files(network: Network, slurm: Slurm) -> None:
    with command_lines() as seen:
        workers = ortlab.workers(2, slurm=True, per_host=1)
        assert workers.run(rank) == [0, 1]
    (folder,) = Path(tempfile.gettempdir()).glob("ortlab-scratch-workers-*")
    (written,) = (folder / "security").glob("*engine.json")
    connection = json.loads(written.read_text())
    reached = workers._cluster._reached
    assert reached is not None
    secrets = {connection["key"], *(link.token for link in reached.links)}
    assert any("remote-engine" in text for text in seen)
    assert not [text for text in seen if any(secret in text for secret in secrets)]
    shown = slurm.told("scontrol", "show", "job", "--details")
    assert not any(secret in shown for secret in secrets)
    for place in (slurm.folder, *(host.folder for host in network.hosts.values())):
        for path in place.rglob("*"):
            if path.is_file():
                text = path.read_bytes()
                assert not [secret for secret in secrets if secret.encode() in text], path


# ---- ends ----------------------------------------------------------------------------------------


def test_a_job_that_is_canceled(four: Workers, slurm: Slurm) -> None:
    ((job, _),) = slurm.jobs()
    canceled = threading.Timer(1, slurm.told, ("scancel", job))
    canceled.start()
    with pytest.raises(RankDied) as raised:
        four.run(time.sleep, 600)
    canceled.join()
    assert f"Slurm ended job {job}: CANCELLED (somebody canceled it)" in str(raised.value)
    assert "%ort workers --slurm 4, or ortlab.workers(4, slurm=True), starts" in str(raised.value)


def test_a_time_limit(slurm: Slurm) -> None:
    workers = ortlab.workers(4, slurm={"time": 1})
    ((job, _),) = slurm.jobs()
    with pytest.raises(RankDied) as raised:
        workers.run(time.sleep, 600)
    assert f"Slurm ended job {job}: TIMEOUT (ask for more by --time)" in str(raised.value)


def test_a_host_without_power(network: Network, four: Workers) -> None:
    beta = network.hosts["beta"]
    began = time.monotonic()
    unplugged = threading.Timer(1.0, beta.unplug)
    unplugged.start()
    try:
        with pytest.raises(RankDied, match=r"rank [23] of 4 on beta (was lost|died)"):
            four.run(time.sleep, 600)
        assert time.monotonic() - began < 120
        assert workers_on(network.hosts["alpha"]) == []
        until(lambda: workers_on(beta) == [])
    finally:
        unplugged.cancel()
        beta.plug()


# ---- scripts -------------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that all hosts see; they do not see pytest's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="ortlab-test-") as folder:
        yield Path(folder)


def output(folder: Path, job: str) -> str:
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def submitted(slurm: Slurm, folder: Path) -> str:
    words = ("sbatch", "--parsable", "--nodes=2", f"--chdir={folder}", str(folder / "job.sbatch"))
    return slurm.told("env", f"PYTHON={sys.executable}", "OMP_NUM_THREADS=1", *words)


def test_a_script_is_stopped_requeued_and_continues(slurm: Slurm, shared: Path) -> None:
    """On two hosts, to the bit as a job that was not stopped, and as a run in one process."""
    chosen = {**worker_runs.CHOSEN, "max_steps": 200, "num_train_epochs": 99}
    del chosen["engine"], chosen["device"]
    model = worker_runs.Network()
    for name in ("whole", "stopped"):
        ortlab.script(
            model, worker_runs.data(), to=shared / name, workers=4, zero_stage=1, **chosen
        )
    whole = submitted(slurm, shared / "whole")
    until(lambda: slurm.jobs() == [])
    expected = re.findall(r"^step .*", output(shared / "whole", whole), re.M)
    assert len(expected) == 200, output(shared / "whole", whole)

    job = submitted(slurm, shared / "stopped")
    until(lambda: "step 20 loss" in output(shared / "stopped", job))
    slurm.told("scancel", "--signal=TERM", job)  # as Slurm does a minute before the limit
    until(lambda: slurm.jobs() == [(job, "PENDING")])
    assert "stopped after step" in output(shared / "stopped", job)
    # Slurm lets two minutes pass, until the job's old credentials have expired.
    until(lambda: slurm.jobs() == [(job, "RUNNING")])
    until(lambda: slurm.jobs() == [])
    told = re.findall(r"^step .*", output(shared / "stopped", job), re.M)
    assert told == expected, output(shared / "stopped", job)
    one, other = (
        safetensors.torch.load_file(shared / name / "trained.safetensors")
        for name in ("whole", "stopped")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    alone = losses(train(worker_runs.Network(), **chosen, engine="eager"))
    of_script = [float(line.rpartition(" ")[2]) for line in told]
    assert of_script == pytest.approx(alone, rel=1e-3)
