"""`ortlab bench papers --claim zero`: state and largest batch of each of several ranks."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ortlab import bench
from ortlab.bench.claims.children import Request, TrialFailed, children
from ortlab.bench.claims.search import Largest, ZeroSettings
from ortlab.bench.claims.zero import Cell, StepMemory, ZeroBatches
from ortlab.engines import compatibility
from ortlab.engines.distributed.deepspeed_config import BUCKET

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
MIB = 2**20
STATE = {"parameters": 40 * MIB, "gradients": 40 * MIB, "optimizer_state": 80 * MIB, "host": 0}
STEP = StepMemory(10 * MIB, 10 * MIB, 5.0 * MIB, 2.0 * MIB)
LIMIT_BYTES = 48 * MIB


def answer(rows: int, **more: Any) -> dict[str, Any]:
    """Return what two ranks answer that train a tiny model."""
    given = {"model": "bert-128", "engine": "eager", "threads": 1, "quick": True}
    options = {"workers": 2, **more.pop("options", {})}
    with children(Request(**given, rows=rows, options=options, **more)) as ranks:
        return ranks.answer()


def test_memory_of_a_step_follows_from_two_batches() -> None:
    small = {"rows": 32, "peak_bytes": (120 + 5 + 64) * MIB, "state_bytes": STATE}
    large = {"rows": 64, "peak_bytes": (120 + 5 + 128) * MIB, "state_bytes": STATE}
    assert StepMemory.of(small, large) == STEP


@pytest.mark.parametrize(
    ("workers", "stage", "deepspeed", "expected"),
    [
        (1, 0, True, 40 + 80),
        (4, 0, True, 40 + 80 + 40),  # buckets keep all gradients
        (4, 1, False, 40 + 20 + 40),
        (4, 1, True, 40 + 20 + 4 * BUCKET / MIB),
        (4, 2, True, 40 + 20 + 4 * BUCKET / MIB),
        (4, 3, True, 10 + 20 + 10 + 40 + 4 * BUCKET / MIB),  # all 40 MiB of weights are gathered
    ],
)
def test_a_peak_is_what_a_rank_keeps_and_its_samples(
    workers: int, stage: int, deepspeed: bool, expected: float
) -> None:
    peaks = STEP.peaks(workers, stage, deepspeed=deepspeed)
    assert peaks[99] == pytest.approx((expected + 5 + 200) * MIB, rel=1e-6)
    state = STEP.state(workers, stage)
    assert peaks[0] >= state.parameters + state.gradients + state.optimizer_state


def test_the_table_has_predictions_beside_measurements() -> None:
    measured = ZeroBatches(ZeroSettings(engines="eager"))
    found = Largest(
        "m", "eager, 2 workers, stage 0", 40, 42, "no memory", 500 * MIB, 390 * MIB, 44, 400 * MIB
    )
    other = Largest(
        "m", "eager, 2 workers, stage 1", 60, 63, "bad_alloc", 500 * MIB, 395 * MIB, 57, 398 * MIB,
        state_bytes={**STATE, "optimizer_state": 44 * MIB},
    )  # fmt: skip
    measured.cells = [
        Cell("eager", 2, 0, found, STEP.state(2, 0)),
        Cell("eager", 2, 1, other, STEP.state(2, 1)),
        Cell("eager", 2, 2, Largest("m", "eager, 2 workers, stage 2", error="no DeepSpeed")),
    ]
    measured.found = [cell.largest for cell in measured.cells]
    text = "\n".join(measured.tables())
    assert (
        "| m | eager | 2 | 1 | 40.0 + 40.0 + 40.0 = 120.0 MiB | 40.0 + 40.0 + 44.0 = 124.0 MiB "
        "| +3.3% | 57 | 60 | -5.0% | 1.50 | 398.0 MiB | 395.0 MiB | +0.8% |" in text
    )
    assert "| m | eager | 2 | 2 | not measured, see below |" in text
    assert "- m, eager, 2 workers, stage 2: no DeepSpeed" in text
    cells = json.loads(json.dumps(measured.as_dict()))["cells"]
    assert [(each["workers"], each["stage"], each["rows"]) for each in cells] == [
        (2, 0, 40),
        (2, 1, 60),
        (2, 2, None),
    ]
    assert cells[1]["predicted_state_bytes"]["optimizer_state"] == 40 * MIB


@LINUX
def test_ranks_hold_their_shard() -> None:
    found = answer(4, options={"zero_stage": 1})
    assert found["fits"]
    state = found["state_bytes"]
    assert state["gradients"] == pytest.approx(state["parameters"], rel=0.01)
    half = state["parameters"]  # of two moments
    assert state["optimizer_state"] == pytest.approx(half, rel=0.1)  # whole tensors, or padded
    assert found["peak_bytes"] > sum(state.values())


@LINUX
def test_a_rank_without_memory_ends_the_trial_of_all() -> None:
    found = answer(2000, limit_bytes=LIMIT_BYTES)
    assert not found["fits"]
    assert "memory" in found["why"] or "bad_alloc" in found["why"]


@LINUX
def test_an_error_of_a_rank_is_no_lack_of_memory() -> None:
    with pytest.raises(TrialFailed, match="precision='fp64'"):
        answer(2, options={"precision": "fp64"})


@LINUX
def test_set_ups_that_an_engine_refuses_are_not_tried() -> None:
    measured = ZeroBatches(ZeroSettings(engines="ort"))
    measured.measure("bert-128", "ort", 2, 3, STEP)
    (cell,) = measured.cells
    assert cell.largest.trials == ()
    reason = "DeepSpeed" if compatibility.deepspeed_missing() else "choose zero_stage=2"
    assert reason in cell.largest.error


@LINUX
@pytest.mark.slow
def test_zero_as_a_whole() -> None:
    given = {"models": "bert-128", "engines": "eager", "workers": "2", "stages": "1"}
    result = bench.papers(claim="zero", **given, quick=True)
    here = json.loads(json.dumps(result.as_dict(), allow_nan=False))["here"]
    (cell,) = here["cells"]
    assert cell["rows"] < cell["refused_rows"] <= 2 * cell["rows"]
    assert cell["peak_bytes"] <= here["limit_bytes"]
    assert cell["state_bytes"]["optimizer_state"] == pytest.approx(
        cell["predicted_state_bytes"]["optimizer_state"], rel=0.1
    )
    assert f"| {cell['rows']} |" in result.markdown()
