"""ZeRO's stages 1 to 3 through DeepSpeed: what two processes compute is what one computes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ortlab.engines import deepspeed, sharded
from ortlab.engines.base import EngineUnavailable, engine
from ortlab.settings import FinetuneSettings
from tests.engines.several import TOLERANCE, Found, check_parity, of, run

STAGES = ("1", "2", "3")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    if (reason := deepspeed.missing()) is not None:
        pytest.skip(reason)
    return run("tests.engines.deepspeed_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(1, "adamw"), (2, "adamw"), (3, "adamw"), (2, "sgd"), (3, "sgd")]
)
def test_fifty_steps_are_those_of_one_process(two: Found, stage: int, optimizer: str) -> None:
    """Losses, gradient norms, states, evaluation: with accumulation, clipping, uneven shares."""
    found = of(two, f"parity eager {stage} {optimizer}")
    check_parity(found, "eager")
    assert f"ZeRO stage {stage} by DeepSpeed {deepspeed.VERSION}" in found[0]["notes"][-1]


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "sgd"), (2, "adamw")])
def test_fifty_steps_in_ort(two: Found, stage: int, optimizer: str) -> None:
    try:
        engine("ort")
    except EngineUnavailable as error:
        pytest.skip(str(error))
    check_parity(of(two, f"parity ort {stage} {optimizer}"), "ort")


def test_fifty_steps_compiled(two: Found) -> None:
    for each in of(two, "compiled"):
        assert each["steps"] < TOLERANCE
        assert each["engine"] == "compile"


def test_a_run_moves_from_stage_to_stage(two: Found) -> None:
    """One process, stage 2, stage 3, one process, by a checkpoint's file."""
    for each in of(two, "moving"):
        assert len(each["whole"]) == 20
        assert each["moved"] == pytest.approx(each["whole"], rel=TOLERANCE)


def test_one_model_goes_through_the_stages_and_is_whole_again(two: Found) -> None:
    """Of what DeepSpeed puts on modules and parameters nothing stays: the case checks it."""
    for each in of(two, "in place"):
        found, expected = each["losses"]
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_bytes_are_those_of_the_paper(two: Found) -> None:
    """In fp32 ZeRO has 4 + 4 + 8 bytes a parameter (arXiv:1910.02054, sections 3 and 5).

    The last is shared out at stage 1, the second at 2, the first at 3. All tensors of the process
    between two steps are told, but for stage 3's buffers for gradients under way.
    """
    for each in of(two, "held"):
        whole = 4 * each["parameters"]
        for stage in ("0", *STAGES):
            told, number = each[stage], int(stage)
            assert told["parameters"] == pytest.approx(whole / (2 if number > 2 else 1), rel=0.05)
            assert told["gradients"] == pytest.approx(whole / (2 if number > 1 else 1), rel=0.05)
            state = 2 * whole / (2 if number > 0 else 1)
            assert told["optimizer_state"] == pytest.approx(state, rel=0.05)
            between = told["parameters"] + told["optimizer_state"]
            if stage in ("0", "3"):
                between += told["gradients"]
            if stage == "3":
                between += told["bucket"]
            assert told["all"] == pytest.approx(between, rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_stepper_keeps_no_model(two: Found, stage: str) -> None:
    for each in of(two, "gone"):
        assert each[stage] == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_on_one_rank_changes_no_weight_on_any(two: Found, stage: str) -> None:
    for each in of(two, "not finite"):
        finite_before, finite_after, loss_is_nan, unchanged = each[f"{stage} adamw"]
        assert finite_before
        assert not finite_after
        assert loss_is_nan
        assert unchanged


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_stops_the_step_of_all(two: Found, stage: str) -> None:
    """In a first micro-batch, a last one and in evaluation; then all go on as one process."""
    other, failed = of(two, f"failing {stage}")
    assert len(other["told"]) == 3
    assert all("RankFailed: rank 1 of 2 has failed" in told for told in other["told"])
    assert failed["told"] == ["ValueError: a row is out of range"] * 3
    for each in (other, failed):
        assert each["error"] < TOLERANCE
        assert each["loss"][0] == pytest.approx(each["loss"][1], rel=TOLERANCE)


@pytest.mark.parametrize("loss", ["causal", "causal without", "cross_entropy"])
def test_a_mean_over_targets_that_are_not_ignored(two: Found, loss: str) -> None:
    for each in of(two, "ignored"):
        assert max(each[loss]) < TOLERANCE


def test_statistics_are_the_same_on_all_ranks(two: Found) -> None:
    first, second = of(two, "statistics")
    assert first["states"] == second["states"]
    assert first["states"][0] != first["states"][1]


@pytest.mark.parametrize("case", ["unused", "layouts"])
@pytest.mark.parametrize("stage", STAGES)
def test_models_that_are_not_plain(two: Found, case: str, stage: str) -> None:
    """A parameter that the loss does not use, one that lies otherwise in memory."""
    for each in of(two, case):
        assert each[stage] < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_take_turns(two: Found, stage: str) -> None:
    """The first micro-batch of a step goes through one, the second through another."""
    for each in of(two, "turns"):
        assert each[stage] < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_an_infinite_loss_with_finite_gradients(two: Found, stage: str) -> None:
    for each in of(two, "infinite"):
        finite, unchanged = each[stage]
        assert not finite
        assert unchanged


@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_come_and_go_are_refused(two: Found, stage: str) -> None:
    """DeepSpeed would add up gradients of different layers; the state stays, and steps follow."""
    for each in of(two, "wayward"):
        ranks, steps = each[stage]
        assert "the ranks used different layers" in ranks
        assert "has a gradient in some steps alone; choose zero_stage=0" in steps


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_that_of_products(two: Found, stage: str) -> None:
    for each in of(two, "halved"):
        products, weights, alone, together = each[stage]
        assert products == ["torch.bfloat16"]
        assert weights == ["torch.float32"]
        assert together == pytest.approx(alone, rel=1e-3)


def test_what_is_refused_and_what_is_adopted(two: Found) -> None:
    for rank, each in enumerate(of(two, "settled")):
        types, model, steps = each["told"]
        assert "trains float32 weights, and 1.weight is torch.float64" in types
        assert "the checkpoint is of another model: 0.weight is float32[33, 6]" in model
        assert "{'step': 2.0} for 2.weight and {'step': 1.0} for 0.weight" in steps
        assert each["unchanged"]
        assert each["adopted"] < TOLERANCE
        version = deepspeed.VERSION
        assert each["notes"] == [
            f"rank {rank} of 2 over gloo: ZeRO stage 3 by DeepSpeed {version}, reduction mean"
        ]
        assert each["environment"]["DS_ACCELERATOR"] is None


def test_nothing_is_said(two: Found) -> None:
    for each in two:
        said = [line for line in each["printed"].splitlines() if "[transformers]" not in line]
        assert said == []


# --- without processes


def _settings(**changes: Any) -> FinetuneSettings:
    return FinetuneSettings(**{"engine": "eager", "device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": 3, "engine": "ort"}, "choose zero_stage=2, or engine='eager'"),
        ({"zero_stage": 3, "engine": "compile"}, "choose zero_stage=2, or engine='eager'"),
        ({"zero_stage": 2, "precision": "fp16"}, "choose precision='bf16'"),
        ({"zero_stage": 2, "reduction": "adasum", "optimizer": "sgd"}, "choose reduction='mean'"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    assert message in str(sharded.refuses(_settings(**changes), 2))


@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": 2, "engine": "ort"}, {"zero_stage": 3}, {"zero_stage": 2, "engine": "compile"}],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert sharded.refuses(_settings(**changes), 2) is None


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 is torch's own then."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python's way: it cannot be imported
    assert "pip install 'ortlab[deepspeed]'" in str(sharded.refuses(_settings(zero_stage=2), 2))
    assert sharded.refuses(_settings(zero_stage=1), 2) is None
