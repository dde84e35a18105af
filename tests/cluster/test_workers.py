"""Tests of workers: real clusters on this machine, and how they end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

import ortlab
from ortlab.cluster.call import RankDied, RankError
from ortlab.cluster.workers import Workers
from ortlab.session import session
from tests.support.readme import ROOT
from tests.support.typed_magics import Typist
from tests.support.waiting import HANGS_S, eventually

# Pickled by value like functions of a cell, and without pytest on the ranks.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a folder that nobody else writes to, so that files left there are ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Return the processes that other tests started, such as servers of notebooks."""
    return family(os.getpid())


@pytest.fixture(scope="module")
def two(temporary_files: None, others: set[int]) -> Iterator[Workers]:
    """Start two workers for all tests that leave them intact."""
    workers = Workers(2)
    yield workers
    workers.stop()


def running(pids: set[int]) -> set[int]:
    """Return the processes that are running; a zombie only waits for its parent."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def family(pid: int) -> set[int]:
    """Return the processes below `pid`."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("ortlab-*")}


def rank() -> int:
    return int(os.environ["RANK"])


def threads() -> int:
    import torch

    return torch.get_num_threads()


def total(value: float) -> float:
    """Return the sum of the values of all ranks."""
    import torch
    from torch import distributed

    tensor = torch.tensor([value * (rank() + 1)])
    distributed.all_reduce(tensor)
    return tensor.item()


# ---- one intact cluster --------------------------------------------------------------------------


def test_each_rank_has_its_place_and_share_of_the_threads(two: Workers) -> None:
    def place() -> tuple[Any, ...]:
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"
        return os.getpid(), threads(), *(os.environ[name] for name in names)

    share = max(1, len(os.sched_getaffinity(0)) // 2)
    places = two.run(place)
    assert [told[1:] for told in places] == [
        (share, "0", "2", "0", "2", str(share)),
        (share, "1", "2", "1", "2", str(share)),
    ]
    table = two.table()
    assert [(row.rank, row.pid, row.threads, row.state) for row in table] == [
        (0, places[0][0], share, "idle"),
        (1, places[1][0], share, "idle"),
    ]
    for row in table:
        process = psutil.Process(row.pid)
        assert process.environ()["OMP_NUM_THREADS"] == str(share), "from its start"
        assert process.environ()["OMP_WAIT_POLICY"] == "passive"
        rss = process.memory_info().rss
        assert row.rss_bytes is not None
        assert rss < row.rss_bytes < 2 * rss  # including the process that forwards its signals
    heads = repr(two).splitlines()[0].split()
    assert heads == ["rank", "host", "pid", "device", "threads", "memory", "state"]
    assert "<table>" in two._repr_html_()
    assert len(two) == 2


def test_every_socket_is_on_loopback_and_listed(two: Workers, others: set[int]) -> None:
    def listening() -> set[tuple[str, int]]:
        ours = [psutil.Process(pid) for pid in family(os.getpid()) - others]
        return {
            tuple(connection.laddr)
            for process in ours
            for connection in process.net_connections("all")
            if connection.status == psutil.CONN_LISTEN
        }

    idle = listening()
    assert idle
    with two.rendezvous():
        two.run(total, 1.0)
        meeting = listening()
        notes = "\n".join(two.table().notes)
        meeting &= listening()  # short-lived ones are closed before the table is made
    assert len(meeting - idle) >= 2  # gloo's own
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in meeting)
    for _, port in meeting:
        assert str(port) in notes
    assert "open to the network" not in notes
    assert eventually(lambda: listening() == idle), "the group's sockets are closed after it"


def test_its_files_are_private(two: Workers) -> None:
    (folder,) = Path(tempfile.gettempdir()).glob("ortlab-scratch-workers-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    keys = list((folder / "security").glob("*.json"))
    assert keys
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}


def test_what_ranks_print_is_labelled_while_they_run(
    two: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = tmp_path / "heard"

    def speak() -> int:
        import sys

        print("one\ntwo", rank())
        print("warned", file=sys.stderr)
        for _ in range(200):
            if heard.exists():
                break
            time.sleep(0.05)
        print(heard.exists(), end="")
        return rank()

    printed = []
    done = threading.Event()

    def listen() -> None:
        while not done.wait(0.05):
            printed.append(capsys.readouterr())
            if "[1] two 1" in "".join(each.out for each in printed):
                heard.touch()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert two.run(speak) == [0, 1]
    finally:
        done.set()
        listener.join()
    printed.append(capsys.readouterr())
    out, err = ("".join(each) for each in zip(*printed, strict=True))
    for number in (0, 1):
        lines = [line for line in out.splitlines() if line.startswith(f"[{number}]")]
        assert lines == [f"[{number}] one", f"[{number}] two {number}", f"[{number}] True"]
    assert sorted(err.splitlines()) == ["[0] warned", "[1] warned"]


def test_an_all_reduce_over_gloo_is_the_sum(two: Workers) -> None:
    before = folders()
    with two.rendezvous() as group:
        assert group.backend == "gloo"
        assert two.run(total, 2.0) == [6.0, 6.0]
    assert folders() == before, "the folder where they met is gone"
    with pytest.raises(RankError, match="process group"):
        two.run(total, 2.0)


def test_an_error_on_one_rank_ends_the_others(two: Workers, tmp_path: Path) -> None:
    """The other rank waits in a collective or in a sleep."""
    interrupted = tmp_path / "interrupted"

    def fail(together: bool) -> None:

        if rank() == 1:
            raise ValueError("no luck")
        try:
            total(1.0) if together else time.sleep(20)
        except KeyboardInterrupt:
            interrupted.touch()
            raise

    for together in (True, False):
        with pytest.raises(RankError) as raised, two.rendezvous():
            two.run(fail, together)
        assert str(raised.value) == "rank 1 of 2: ValueError: no luck"
        assert interrupted.exists() is not together
        notes = "".join(raised.value.__notes__)
        assert ("after that rank 0" in notes) is together, "who was interrupted did not fail"
        assert raised.value.rank == 1
        assert 'raise ValueError("no luck")' in raised.value.remote_traceback
        shown = raised.value._render_traceback_()
        assert any("in fail" in line for line in shown)
        assert len(shown) < 6
    assert two.run(rank) == [0, 1]


def test_what_cannot_be_sent_is_named_before_anything_runs(two: Workers, tmp_path: Path) -> None:
    lock = threading.Lock()

    def learn(model: object, train: object) -> None:
        (tmp_path / "ran").touch()

    def use_lock() -> None:
        (tmp_path / "ran").touch()
        lock.acquire()

    with pytest.raises(ValueError, match=r"^train cannot be sent to workers: .*generator"):
        two.run(learn, {}, (number for number in range(3)))
    with pytest.raises(ValueError, match=r"^lock, which use_lock uses, cannot be sent to workers"):
        two.run(use_lock)
    assert not (tmp_path / "ran").exists()

    def give() -> object:
        import threading

        return threading.Lock()

    with pytest.raises(RankError, match=r"rank \d of 2: TypeError: cannot pickle '_thread.lock'"):
        two.run(give)


def test_one_call_at_a_time(two: Workers, tmp_path: Path) -> None:
    begun, end = tmp_path / "begun", tmp_path / "end"

    def wait() -> None:

        begun.touch()
        for _ in range(500):
            if end.exists():
                break
            time.sleep(0.02)

    thread = threading.Thread(target=two.run, args=(wait,))
    thread.start()
    try:
        assert eventually(begun.exists)
        assert [row.state for row in two.table()] == ["busy: wait"] * 2
        with pytest.raises(ValueError, match="busy with wait"):
            two.run(rank)
    finally:
        end.touch()
        thread.join()
    assert two.run(rank) == [0, 1]


# ---- clusters that start and end -----------------------------------------------------------------


@pytest.fixture
def typist(threads_end: None, ip: Typist) -> Iterator[Typist]:
    """Return a shell, without workers before and after."""
    assert session.workers is None
    yield ip
    if session.workers is not None:
        session.workers.stop()
    session.workers = None


def test_from_start_to_stop(
    typist: Typist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typist("%ort workers") == "no workers yet; %ort workers 2 starts two\n"
    assert typist.completions("%ort workers st") == ["stop"]
    assert typist.completions("%ort workers --prof") == ["--profile"]
    assert "not a number" in typist.refused("%ort workers many")
    assert "at least 1" in typist.refused("%ort workers 0")
    with pytest.raises(ValueError, match="no workers yet"):
        ortlab.workers()

    (tmp_path / "factors.py").write_text("FACTOR = 2\n")
    monkeypatch.syspath_prepend(tmp_path)  # the ranks must be able to import it, too
    here, before = family(os.getpid()), folders()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pytest.warns(UserWarning, match="2 workers share 1 core of this machine"):
            out = typist("w = %ort workers 2\nw")
    finally:
        os.sched_setaffinity(0, cores)
    assert out.startswith("starting 2 workers\n2 workers up after ")
    assert out.count("idle") == 2
    first = family(os.getpid()) - here
    typist("again = %ort workers 2")
    assert typist["again"] is typist["w"] is ortlab.workers()
    assert family(os.getpid()) - here == first

    cell = """
    import factors

    class Twice(nn.Linear):
        def forward(self, x):
            return factors.FACTOR * super().forward(x)

    def train(model, x):
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.zero_()
        return model, model(x), type(model).__name__
    results = w.run(train, Twice(3, 1), torch.ones(1, 3))
    """
    typist(textwrap.dedent(cell))
    for model, output, name in typist["results"]:
        assert type(model) is typist["Twice"]
        assert (output.item(), name) == (6, "Twice")

    out = typist("w = %ort workers 1")
    assert out.startswith("ending the 2 previous workers\nstarting 1 worker\n")
    assert eventually(lambda: not running(first))
    assert len(typist["w"]) == 1

    # A process that dies while nothing runs is noticed, too.
    ours = family(os.getpid()) - here
    (controller,) = (
        child
        for child in psutil.Process().children()
        if child.pid in ours and "controller" in child.cmdline()
    )
    controller.kill()
    assert eventually(lambda: not typist["w"].usable())
    out = typist("%ort workers")
    assert "no workers: the controller died, so the workers cannot" in out
    assert "; %ort workers 1, or ortlab.workers(1), starts fresh ones\n" in out
    typist("%ort workers stop")
    assert eventually(lambda: not running(ours))
    assert folders() == before


def test_a_rank_that_dies_and_one_that_does_not_end(typist: Typist) -> None:
    here = family(os.getpid())
    workers = ortlab.workers(2)
    ours = family(os.getpid()) - here

    def collect() -> None:
        """Kill rank 1 while rank 0 waits for it in a collective."""
        import signal

        if rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        total(1.0)
        time.sleep(60)

    ranks = {row.pid for row in workers.table()}
    with pytest.raises(RankDied) as raised, workers.rendezvous():
        workers.run(collect)
    assert not running(ranks)
    assert str(raised.value).startswith("rank 1 of 2 died: SIGKILL (signal 9); %ort workers 2")
    assert raised.value.rank == 1
    assert eventually(lambda: not running(ours))
    with pytest.raises(RuntimeError, match=r"no workers: rank 1 of 2 died: SIGKILL"):
        workers.run(rank)

    def hear_the_second() -> None:
        """Lose the first interrupt on rank 0, as if it arrived before the call began."""
        if rank() == 1:
            raise ValueError("no luck")
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            time.sleep(1000)

    def resist() -> None:
        """Ignore interrupts on rank 0 when its peer has failed."""
        import signal

        if rank() == 1:
            raise ValueError("no luck")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)

    fresh = ortlab.workers(2)
    assert fresh is not workers
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: no luck"):
        fresh.run(hear_the_second)
    assert fresh.run(rank) == [0, 1], "who is interrupted again goes on"
    ranks = {row.pid for row in fresh.table()}
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: no luck") as failed:
        fresh.run(resist)
    assert not running(ranks)
    assert any("rank 0 of 2 did not end" in note for note in failed.value.__notes__)
    assert not fresh.usable()


KERNEL_CELLS = """
%load_ext ortlab
import os, time

class Word:
    def __init__(self, text): self.text = text

def shout(word):
    return word.text.upper() + os.environ["RANK"]

def sleep():
    print("asleep")
    time.sleep(1000)

w = %ort workers 2
print(w.run(shout, Word("here")))
"""


def test_a_kernel_s_workers_hear_its_interrupt_and_end_with_it() -> None:
    """After kill -9 no process and no file is left."""
    before = folders()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment)
    theirs: set[int] = set()
    try:
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            said.append(content.get("text", "") or content.get("ename", ""))
            if "[1] asleep" in "".join(said) and "interrupted" not in said:
                said.append("interrupted")
                manager.interrupt_kernel()

        answer = client.execute_interactive(KERNEL_CELLS, timeout=HANGS_S, output_hook=hear)
        assert answer["content"]["status"] == "ok", said
        assert "['HERE0', 'HERE1']" in "".join(said)
        answer = client.execute_interactive("w.run(sleep)", timeout=HANGS_S, output_hook=hear)
        assert answer["content"]["ename"] == "KeyboardInterrupt"
        said.clear()
        client.execute_interactive(
            "print(w.run(shout, Word('yes')))", timeout=HANGS_S, output_hook=hear
        )
        assert "['YES0', 'YES1']" in "".join(said), "they go on"

        kernel = psutil.Process(manager.provisioner.pid)
        theirs = family(kernel.pid)
        assert len(theirs) >= 6
        kernel.kill()
        assert eventually(lambda: not running(theirs)), [
            psutil.Process(pid).cmdline() for pid in running(theirs)
        ]
        assert eventually(lambda: folders() == before)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        for pid in running(theirs):  # in case the test failed
            os.kill(pid, signal.SIGKILL)


# ---- profiles ------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes ipyparallel's profile "far" with this configuration."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))

    def make(config: str) -> None:
        folder = tmp_path / "profile_far"
        folder.mkdir()
        (folder / "ipcluster_config.py").write_text(textwrap.dedent(config))
        (folder / "ipcontroller_config.py").write_text("c.HeartMonitor.period = 250\n")

    return make


def test_a_profile_s_workers_may_be_on_another_host(
    typist: Typist, profile: Callable[[str], None]
) -> None:
    """These workers report another host, so their data is not read here but requested from them."""
    profile(
        f"""
        import sys
        pretend = "import torch, socket; socket.gethostname = lambda: 'elsewhere'; "
        start = "from ipyparallel.engine.app import main; main()"
        c.LocalEngineSetLauncher.engine_cmd = [sys.executable, "-c", pretend + start]
        c.LocalEngineSetLauncher.environment = {{
            "PYTHONPATH": {str(ROOT)!r}, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "7"
        }}
        """
    )
    error = typist.refused("%ort workers --profile fare 2")
    assert error.endswith("no profile is called 'fare': choose from far; did you mean 'far'?")
    assert "--profile needs a number of workers" in typist.refused("%ort workers --profile far")
    here = family(os.getpid())
    typist("w = %ort workers --profile far 2")
    workers = typist["w"]
    assert not workers.local
    table = workers.table()
    assert [row.host for row in table] == ["elsewhere"] * 2
    assert all(row.rss_bytes and row.rss_bytes > 2**26 for row in table)
    assert len([note for note in table.notes if "127.0.0.1" in note]) == 3
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert workers.run(threads) == [share] * 2
    home = Path(os.environ["ORTLAB_HOME"])  # shared by all hosts
    with workers.rendezvous():
        assert workers.run(total, 1.0) == [3.0, 3.0]
        (group,) = home.glob("ortlab-scratch-group-*")
        assert group.stat().st_mode & 0o777 == 0o700
    assert not list(home.glob("ortlab-scratch-group-*"))
    typist("%ort workers stop")
    assert eventually(lambda: family(os.getpid()) == here)


def test_other_versions_are_named_before_anything_runs(
    typist: Typist, profile: Callable[[str], None], tmp_path: Path
) -> None:
    other = tmp_path / "site" / "torch-1.2.3.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    path = os.pathsep.join([str(other.parent), str(ROOT)])
    profile(f"c.LocalEngineSetLauncher.environment = {{'PYTHONPATH': {path!r}}}")
    here = family(os.getpid())
    error = typist.refused("%ort workers --profile far 1")
    assert "rank 0 on " in error
    assert " has torch 1.2.3, but this process has " in error
    assert eventually(lambda: family(os.getpid()) == here)


def test_without_ipyparallel_it_says_what_to_install(
    typist: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    error = typist.refused("%ort workers 1")
    assert error == (
        "workers need ipyparallel, which is not installed: pip install 'ortlab[workers]'"
    )


def test_a_start_that_fails_says_why(
    typist: Typist, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no luck\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    before = folders()
    error = typist.refused("%ort workers 1")
    assert error == "the workers did not start: Controller stopped with 3 (no luck)"
    assert session.workers is None
    assert folders() == before
