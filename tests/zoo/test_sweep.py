"""The sweep's quick subset, and proof that its checks detect the errors they are meant for."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import onnx
import pytest
import torch

from ortlab.engines.ortmodule import compat
from tests.support.readme import ROOT
from tests.zoo import dropout, specs, sweep
from tests.zoo.outcome import FAILED, OK, REFUSED, WRONG, Outcome

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
CELLS = {cell.name: cell for cell in specs.cells()}
CHEAP = ("torch/mlp/0.0", "torch/lstm/0.1", "gpt2/causal/eager/0.1")
_LIMIT_S = 30 * 60


def swept(*arguments: str) -> str:
    """Return the output of the sweep, run in a process that chooses its own number of threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.zoo.sweep", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_ort
@pytest.mark.parametrize(
    "threads",
    [
        pytest.param((), id="one thread"),
        pytest.param(("--all-threads",), id="all threads", marks=pytest.mark.nightly),
    ],
)
def test_quick_subset(threads: tuple[str, ...]) -> None:
    assert f"{len(specs.QUICK)} ok" in swept("--quick", *threads)


@needs_ort
def test_cheap_cells_with_all_threads() -> None:
    assert f"{len(CHEAP)} ok" in swept("--all-threads", *CHEAP)


@needs_ort
@pytest.mark.nightly
def test_every_cell() -> None:
    swept()


def test_every_cell_has_a_name_of_its_own() -> None:
    assert len(CELLS) == len(specs.cells())
    assert set(specs.QUICK) <= set(CELLS)


@pytest.mark.parametrize(
    ("statuses", "passes"),
    [
        ([OK] * 50, True),
        ([OK] * 49 + [REFUSED], True),
        ([OK] * 48 + [REFUSED] * 2, False),
        ([OK] * 99 + [WRONG], False),
        ([OK] * 99 + [FAILED], False),
    ],
)
def test_what_passes(statuses: list[str], passes: bool) -> None:
    outcomes = [Outcome(str(i), status) for i, status in enumerate(statuses)]
    assert sweep.passed(outcomes) == passes


def test_a_cell_whose_process_dies_is_wrong() -> None:
    context = multiprocessing.get_context("forkserver")
    outcome = sweep.in_process(context, CELLS["torch/mlp/0.0"], task=_die)
    assert (outcome.status, outcome.reason) == (WRONG, "the process died (exit code 7)")


def _die(*_: object) -> None:
    os._exit(7)


def test_a_cell_that_does_not_end_has_failed() -> None:
    context = multiprocessing.get_context("forkserver")
    outcome = sweep.in_process(context, CELLS["torch/mlp/0.0"], task=_hang, limit_s=2)
    assert (outcome.status, outcome.reason) == (FAILED, "no end after 2 s")


def _hang(*_: object) -> None:
    import time

    time.sleep(600)


# ---- what a trial detects ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trial() -> Any:
    reason = compat.unavailable()
    if reason is not None:
        pytest.skip(reason)
    from tests.zoo import trial

    return trial


MASKED = "bert/sequence/sdpa/0.1"


def edit_last_dropout(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Change the ratio of the last Dropout node in every export."""
    seed = dropout.Replay._seed

    def seed_and_edit(self: dropout.Replay, graph: onnx.GraphProto) -> Iterator[int]:
        yield from seed(self, graph)
        last = [node for node in graph.node if node.op_type == "Dropout"][-1]
        tensor = onnx.helper.make_tensor("other_ratio", onnx.TensorProto.FLOAT, [], [ratio])
        graph.node.insert(0, onnx.helper.make_node("Constant", [], ["other_ratio"], value=tensor))
        last.input[1] = "other_ratio"

    monkeypatch.setattr(dropout.Replay, "_seed", seed_and_edit)


def test_an_unchanged_dropout_is_ok(trial: Any) -> None:
    assert trial.trial(CELLS[MASKED]).status == OK


@pytest.mark.parametrize("ratio", [0.0, 0.11, 0.2])
def test_another_ratio_is_wrong(trial: Any, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    edit_last_dropout(monkeypatch, ratio)
    outcome = trial.trial(CELLS[MASKED])
    assert outcome.status == WRONG
    assert "off by" in outcome.reason


def test_a_missing_dropout_is_wrong(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlab.engines.torchscript.rules.dropout", lambda g, x, ratio: x)
    outcome = trial.trial(CELLS[MASKED])
    assert outcome.status == WRONG
    assert "more often than ORT" in outcome.reason


@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_a_twin_that_differs_is_wrong(
    trial: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A twin that differs is reported; the self-check cannot find it, as the twin is edited."""
    pair = trial.Pair(specs.model(CELLS["torch/mlp/0.0"]))
    head = pair.twin.head.weight
    if name == "loss":
        with torch.no_grad():
            head.mul_(1.01)
    else:
        head.register_hook(lambda gradient: gradient * 1.01)
    with pair.replay, pytest.raises(trial.Differs, match=f"^{name}"):
        pair.compare(specs.batches(CELLS["torch/mlp/0.0"])[0])


def test_steps_that_differ_are_wrong(trial: Any) -> None:
    pair = trial.Pair(specs.model(CELLS["torch/mlp/0.0"]))
    pair.twin.head.weight.requires_grad_(False)
    with pair.replay, pytest.raises(trial.Differs, match="loss after 1 steps"):
        pair.train([specs.batches(CELLS["torch/mlp/0.0"])[0]] * 3)


def test_masks_are_drawn_at_their_rate() -> None:
    draw = dropout.drawn_by_ort(1)
    first, second = draw((100, 1000), 0.1), draw((100, 1000), 0.1)
    for mask in (first, second):  # of 1e5 draws: five standard deviations are 0.0047
        assert abs(float(mask.float().mean()) - 0.9) < 0.005
    assert not torch.equal(first, second)
