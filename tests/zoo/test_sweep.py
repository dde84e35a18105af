"""The sweep's quick subset, and proof that its checks detect the errors they are meant for."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from ortlab.engines.ortmodule import compat
from tests.support.needed_engines import needs
from tests.support.readme import ROOT
from tests.zoo import dropout, specs, sweep
from tests.zoo.outcome import FAILED, OK, REFUSED, WRONG, Outcome

needs_ortmodule = pytest.mark.skipif(
    compat.unavailable() is not None, reason=str(compat.unavailable())
)
CELLS = {cell.name: cell for cell in specs.cells()}
CHEAP = ("torch/mlp/0.0", "torch/lstm/0.1", "gpt2/causal/eager/0.1")
_LIMIT_S = 30 * 60
_LIMIT_ON_ORT_S = 4 * 3600


def swept(*arguments: str, passes: bool = True, limit_s: float = _LIMIT_S) -> str:
    """Return the output of the sweep, run in a process that chooses its own number of threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.zoo.sweep", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    return done.stdout


@needs_ortmodule
@pytest.mark.parametrize(
    "threads",
    [
        pytest.param((), id="one thread"),
        pytest.param(("--all-threads",), id="all threads", marks=pytest.mark.nightly),
    ],
)
def test_quick_subset(threads: tuple[str, ...]) -> None:
    needs("ort")
    assert f"{len(specs.QUICK)} ok" in swept("--engine", "auto", "--quick", *threads)


@needs_ortmodule
def test_cheap_cells_with_all_threads() -> None:
    assert f"{len(CHEAP)} ok" in swept("--all-threads", *CHEAP)


@needs_ortmodule
@pytest.mark.nightly
def test_every_cell() -> None:
    swept()


def test_quick_subset_on_ort() -> None:
    needs("ort")
    assert f"{len(specs.QUICK_ON_ORT)} ok" in swept("--engine", "ort", "--quick")


@pytest.mark.nightly
@pytest.mark.skipif(
    compat.unavailable() is None, reason="`make nightly` runs it in an environment of engine 'ort'"
)
def test_every_cell_on_ort(tmp_path: Path) -> None:
    """ORTLAB_ZOO_RESULTS names a file of results to resume, ORTLAB_ZOO_SHARD a shard, as 2/5."""
    needs("ort")
    results = os.environ.get("ORTLAB_ZOO_RESULTS", str(tmp_path / "results.jsonl"))
    shard = os.environ.get("ORTLAB_ZOO_SHARD", "1/1")
    options = ("--results", results, "--shard", shard)
    swept("--engine", "ort", *options, limit_s=_LIMIT_ON_ORT_S)


@needs_ortmodule
@pytest.mark.nightly
def test_every_cell_under_auto() -> None:
    needs("ort")
    swept("--engine", "auto", limit_s=_LIMIT_ON_ORT_S)


def test_cells_with_a_result_are_not_run_again(tmp_path: Path) -> None:
    needs("ort")
    results = tmp_path / "results.jsonl"
    sweep.keep(Outcome("torch/mlp/0.0", WRONG, "by hand", ort_share=1.0), results)
    options = ("--engine", "ort", "--results", str(results))
    assert "WRONG: torch/mlp/0.0\n    by hand" in swept("torch/mlp", *options, passes=False)
    names = [json.loads(line)["name"] for line in results.read_text().splitlines()]
    assert names == ["torch/mlp/0.0", "torch/mlp/0.1"]


def test_shards_are_parts_of_the_cells(tmp_path: Path) -> None:
    needs("ort")
    found = swept("torch/mlp", "--engine", "ort", "--shard", "2/2")
    assert "1 cells" in found
    assert "torch/mlp/0.1" in found


def test_every_cell_has_a_name_of_its_own() -> None:
    assert len(CELLS) == len(specs.cells())
    assert {*specs.QUICK, *specs.QUICK_ON_ORT} <= set(CELLS)


@pytest.mark.parametrize(
    ("statuses", "passes"),
    [
        ([OK] * 50, True),
        ([OK] * 93 + [REFUSED] * 7, True),
        ([OK] * 92 + [REFUSED] * 8, False),
        ([OK] * 99 + [WRONG], False),
        ([OK] * 99 + [FAILED], False),
    ],
)
def test_what_passes(statuses: list[str], passes: bool) -> None:
    outcomes = [Outcome(str(i), status) for i, status in enumerate(statuses)]
    assert sweep.passed(outcomes, "ortmodule") == passes


@pytest.mark.parametrize(
    ("statuses", "in_torch", "passes"),
    [
        ([OK] * 20, 1, True),
        ([OK] * 20, 2, False),
        ([OK] * 99 + [REFUSED], 0, False),
        ([OK] * 99 + [WRONG], 0, False),
    ],
)
def test_what_passes_on_ort(statuses: list[str], in_torch: int, passes: bool) -> None:
    outcomes = [
        Outcome(str(i), status, ort_share=0.94 if i < in_torch else 0.95)
        for i, status in enumerate(statuses)
    ]
    assert sweep.passed(outcomes, "ort") == passes


def test_a_cell_whose_process_dies_is_wrong() -> None:
    context = multiprocessing.get_context("forkserver")
    outcome = sweep.in_process(context, CELLS["torch/mlp/0.0"], task=_die, limit_s=60)
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
    from tests.zoo import trial  # onnxruntime is not installed everywhere

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


@needs_ortmodule
def test_an_unchanged_dropout_is_ok(trial: Any) -> None:
    assert trial.trial(CELLS[MASKED]).status == OK


@needs_ortmodule
@pytest.mark.parametrize("ratio", [0.0, 0.11, 0.2])
def test_another_ratio_is_wrong(trial: Any, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    edit_last_dropout(monkeypatch, ratio)
    outcome = trial.trial(CELLS[MASKED])
    assert outcome.status == WRONG
    assert "off by" in outcome.reason


@needs_ortmodule
def test_a_missing_dropout_is_wrong(trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlab.engines.torchscript.rules.dropout", lambda g, x, ratio: x)
    outcome = trial.trial(CELLS[MASKED])
    assert outcome.status == WRONG
    assert "more often than ORT" in outcome.reason


@pytest.fixture(params=["ortmodule", "ort"])
def pair(request: pytest.FixtureRequest, trial: Any) -> Iterator[Any]:
    needs(request.param)
    made = trial.Pair(specs.model(CELLS["torch/mlp/0.0"]), request.param)
    with made.replay or contextlib.nullcontext():
        yield made


@pytest.mark.parametrize("name", ["loss", "gradient"])
def test_a_twin_that_differs_is_wrong(trial: Any, pair: Any, name: str) -> None:
    """A twin that differs is reported, by something that the self-check cannot find."""
    if name == "loss":
        with torch.no_grad():
            pair.twin.head.weight.mul_(1.01)
    else:  # of the model in ORT, since float64 decides by the twin
        pair.model.head.weight.register_hook(lambda gradient: gradient * 1.01)
    with pytest.raises(trial.Differs, match=f"^{name}"):
        pair.compare(specs.batches(CELLS["torch/mlp/0.0"])[0])


def test_steps_that_differ_are_wrong(trial: Any, pair: Any) -> None:
    pair.twin.head.weight.requires_grad_(False)
    with pytest.raises(trial.Differs, match="loss after 1 steps"):
        pair.train([specs.batches(CELLS["torch/mlp/0.0"])[0]] * 3)


def test_other_masks_are_wrong_on_ort(trial: Any) -> None:
    needs("ort")
    cell = CELLS["torch/mlp/0.1"]
    pair = trial.Pair(specs.model(cell), "ort")
    next(each for each in pair.twin.modules() if isinstance(each, torch.nn.Dropout)).p = 0.11
    with pytest.raises(trial.Differs, match=r"^loss"):
        pair.compare(specs.batches(cell)[0])


def test_a_gradient_that_eager_torch_does_not_have_is_wrong_on_ort(trial: Any) -> None:
    needs("ort")
    pair = trial.Pair(specs.model(CELLS["torch/mlp/0.0"]), "ort")
    pair.twin.head.bias.requires_grad_(False)
    with pytest.raises(trial.Differs, match=r"gradient of head\.bias is None in eager torch"):
        pair.compare(specs.batches(CELLS["torch/mlp/0.0"])[0])


class Partly(torch.nn.Module):
    """A layer, an operator that has no rule, and a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.logcumsumexp(self.layer(x), 0)
        return found.t().sum()


def test_share_of_the_nodes_in_ort(trial: Any) -> None:
    needs("ort")
    pair = trial.Pair(Partly(), "ort")
    pair.compare({"x": torch.randn(4, 3)})
    found = pair.coverage()
    assert "x aten.logcumsumexp: no rule for this operator" in found["in_torch"]
    assert 0 < found["ort_share"] < 1


class NotCaptured(torch.nn.Module):
    """A model that torch is told not to capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 3)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


def test_a_model_that_runs_in_eager_torch_is_refused(
    trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("ort")
    monkeypatch.setattr(specs, "model", lambda _: NotCaptured())
    outcome = trial.trial(CELLS["torch/mlp/0.0"], "ort")
    assert outcome.status == REFUSED
    assert "eager torch" in outcome.reason


class Counting(torch.nn.Module):
    """A model with a buffer that forward sets anew, which ORTModule refuses."""

    def __init__(self, cell: specs.Cell) -> None:
        super().__init__()
        self.inner = OWN_MODEL(cell)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, **inputs: Any) -> Any:
        self.calls = self.calls + 1
        return self.inner(**inputs)


OWN_MODEL = specs.model


@needs_ortmodule
def test_auto_is_compared_in_the_engine_that_it_takes(
    trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("ort")
    cell = CELLS["torch/mlp/0.1"]
    found = trial.trial(cell, "auto")
    assert (found.status, found.engine, found.exports) == (OK, "ortmodule", 1)
    monkeypatch.setattr(specs, "model", Counting)
    found = trial.trial(cell, "auto")
    assert (found.status, found.engine, found.ort_share) == (OK, "ort", 1.0)


def test_masks_are_drawn_at_their_rate() -> None:
    draw = dropout.drawn_by_ort(1)
    first, second = draw((100, 1000), 0.1), draw((100, 1000), 0.1)
    for mask in (first, second):  # of 1e5 draws: five standard deviations are 0.0047
        assert abs(float(mask.float().mean()) - 0.9) < 0.005
    assert not torch.equal(first, second)
