"""Tests of recorded steps: the profiler's events, and steps of real ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ortlab
from ortlab.cluster import recording
from ortlab.cluster.recording import timeline
from ortlab.metrics.timeline import KINDS, Timeline
from ortlab.training.run import Run
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import Network, begin, losses, train

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="gloo over loopback"),
    pytest.mark.usefixtures("one_thread", "own_workers"),
]

MIB = 2**20


def event(name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    """Return an event of the profiler; times are in milliseconds."""
    ours = name.startswith(("ortlab.", "gloo:"))
    return {
        "ph": "X",
        "cat": "user_annotation" if ours else "cpu_op",
        "name": name,
        "pid": 99,
        "tid": tid,
        "ts": 1000 * (500 + start),
        "dur": 1000 * (end - start),
        "args": args,
    }


STEP = [
    event("ortlab.step", 0, 100),
    event("ortlab.forward", 0, 30),
    event("aten::linear", 5, 30),
    event("aten::addmm", 6, 29),  # within the other
    event("ortlab.backward", 30, 80),
    event("autograd::engine::evaluate_function: AddmmBackward0", 30, 60, tid=2),
    event(
        "gloo:all_reduce", 50, 75, tid=7, **{"Input Dims": [[256, 1024]], "Input type": ["float"]}
    ),
    event("ortlab.optimizer", 80, 100),
    event("aten::_fused_adamw_", 80, 90),
    event("aten::item", 98, 104),  # the end is beyond the step
    event("aten::zeros", -5, -1),
]


def test_times_of_a_step() -> None:
    found = timeline(STEP, rank=3, wire_bytes=5)
    assert (found.rank, found.step_ms, found.wire_bytes) == (3, 100, 5)
    assert found.computing_ms == pytest.approx(25 + 30 + 10 + 2)
    assert found.communicating_ms == pytest.approx(25)
    assert found.exposed_ms == pytest.approx(15), "10 of 25 ms are beside the backward pass"
    assert found.idle_ms == pytest.approx(100 - 67 - 15)
    assert [(s.kind, s.began_ms, s.ended_ms) for s in found.spans] == [
        ("forward", 5, 30),
        ("backward", 30, 60),
        ("optimizer", 80, 90),
        ("optimizer", 98, 100),
        ("communication", 50, 75),
    ]
    (collective,) = found.collectives
    assert (collective.name, collective.sent_bytes) == ("all_reduce", MIB)


def test_a_thread_that_waits_for_a_collective_does_not_compute() -> None:
    events = [
        event("ortlab.step", 0, 100),
        event("CompiledFunction", 0, 90),
        event("_c10d_functional::wait_tensor", 10, 30),
        event("gloo:recv", 40, 60, **{"Input Dims": [[8]], "Input type": ["c10::BFloat16"]}),
        event("aten::mm", 45, 50, tid=2),  # another thread computes meanwhile
    ]
    found = timeline(events, rank=0, wire_bytes=None)
    assert found.computing_ms == pytest.approx(90 - 20 - 20 + 5)
    assert found.exposed_ms == pytest.approx(15)
    assert {span.kind for span in found.spans} == {"other", "communication"}
    assert found.collectives[0].sent_bytes == 16


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a socket")
def test_bytes_count_at_the_socket_that_sends_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()
    with sender, receiver:
        names = [os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (sender, receiver)]
        before = recording._sent() or {}
        sender.sendall(bytes(10_000))
        receiver.recv(10_000, socket.MSG_WAITALL)

        def sent() -> list[int]:
            now = recording._sent() or {}
            return [now[name] - before[name] for name in names]

        until(lambda: sent()[0] == 10_000)  # all is acknowledged
        assert sent() == [10_000, 0]


def wide(**changes: Any) -> Run:
    """Begin a run of a model whose gradients are much more than what else is sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    samples = TensorDataset(torch.randn(64, 64), torch.randint(64, (64,)))
    chosen = {"engine": "eager", "device": "cpu", "loss": "cross_entropy", "num_train_epochs": 1000}
    return ortlab.finetune(model, samples, workers=2, **{**chosen, **changes})


@pytest.fixture(scope="module")
def recorded(own_workers: None) -> Timeline:
    run = wide()
    until(lambda: run.step > 2)
    found = run.timeline()
    run.stop()
    run.result(HANGS_S)
    return found


def test_two_ranks_send_what_the_paper_says(recorded: Timeline) -> None:
    assert [rank.rank for rank in recorded.ranks] == [0, 1]
    assert recorded.predicted_bytes == 4 * sum((64 * 2048 + 2048, 2048 * 64 + 64)), (
        "half of twice the gradients"
    )
    for rank in recorded.ranks:
        assert rank.wire_bytes == pytest.approx(recorded.predicted_bytes, rel=0.02)
        assert {span.kind for span in rank.spans} >= set(KINDS) - {"other"}
        assert {span.name for span in rank.collectives} == {"all_reduce"}
        assert 0 < rank.computing_ms < rank.step_ms
        assert rank.computing_ms + rank.exposed_ms + rank.idle_ms == pytest.approx(rank.step_ms)


def test_a_trace_has_the_operators_of_both_ranks(recorded: Timeline, tmp_path: Path) -> None:
    events = json.loads(recorded.save(tmp_path / "trace.json").read_bytes())["traceEvents"]
    adds = {each["pid"] for each in events if each["name"] == "aten::addmm"}
    assert adds == {0, 1}


def test_losses_stay_the_same() -> None:
    run = begin(Network(0.3), workers=2)
    until(lambda: run.step > 2)
    run.timeline()
    run.result(HANGS_S)
    assert (losses(run) == losses(train(Network(0.3), workers=2))).all()


def test_where_no_step_of_several_ranks_follows() -> None:
    run = begin(Network(), num_train_epochs=10_000, max_steps=None)
    until(lambda: run.step > 2)
    with pytest.raises(ValueError, match=r"trains in one process.*workers=2"):
        run.timeline()
    run.apply(workers=2).result(HANGS_S)
    run.pause()
    until(lambda: run.state == "paused")
    with pytest.raises(ValueError, match="takes no step: it is paused"):
        run.timeline()
    run.resume()
    assert len(run.timeline().ranks) == 2
    run.stop()
    run.result(HANGS_S)
    with pytest.raises(ValueError, match="takes no step: it is stopped"):
        run.timeline()


def test_in_a_callback() -> None:
    told: list[str] = []

    class Asks:
        def on_step_end(self, run: Run) -> None:
            with pytest.raises(ValueError, match="call it in another thread") as raised:
                run.timeline()
            told.append(str(raised.value))

    begin(Network(), workers=2, max_steps=2, callbacks=[Asks()]).result(HANGS_S)
    assert len(told) == 2
