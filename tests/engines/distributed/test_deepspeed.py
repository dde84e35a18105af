"""ZeRO stages 1 to 3 through DeepSpeed: two processes compute the same as one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ortlab.engines import compatibility
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, check_failure, check_parity, of, run

STAGES = ("1", "2", "3")
HALVES = {"precision": "bf16", "param_dtype": "bf16"}
ROUNDED = 1e-4


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    if (reason := compatibility.deepspeed_missing()) is not None:
        pytest.skip(reason)
    return run("tests.support.deepspeed_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(1, "adamw"), (2, "adamw"), (3, "adamw"), (2, "sgd"), (3, "sgd")]
)
def test_fifty_steps_are_those_of_one_process(two: Found, stage: int, optimizer: str) -> None:
    """Losses, norms, states and evaluation match: with accumulation, clipping and uneven shares."""
    found = of(two, f"parity eager {stage} {optimizer}")
    check_parity(found, "eager")
    assert f"ZeRO stage {stage} by DeepSpeed {compatibility.DEEPSPEED}" in found[0]["notes"][-1]


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "sgd"), (2, "adamw")])
def test_fifty_steps_in_ort(two: Found, stage: int, optimizer: str) -> None:
    needs("ortmodule")
    check_parity(of(two, f"parity ortmodule {stage} {optimizer}"), "ortmodule")


@pytest.mark.nightly
def test_fifty_steps_compiled(tmp_path: Path) -> None:
    """Compiled steps match eager ones, with 16-bit weights too."""
    if (reason := compatibility.deepspeed_missing()) is not None:
        pytest.skip(reason)
    ranks = run("tests.support.compiled_ranks", 2, tmp_path)
    for case, tolerance in (("compiled", TOLERANCE), ("compiled mixed", ROUNDED)):
        for each in of(ranks, case):
            assert each["engine"] == ["compile", "eager"]
            assert each["compile"] == pytest.approx(each["eager"], rel=tolerance)


def test_a_run_moves_from_stage_to_stage(two: Found) -> None:
    """A checkpoint file moves a run from one process to stage 2, stage 3 and back to one."""
    for each in of(two, "moving"):
        assert len(each["whole"]) == 20
        assert each["moved"] == pytest.approx(each["whole"], rel=TOLERANCE)


def test_one_model_goes_through_the_stages_and_is_whole_again(two: Found) -> None:
    """The case checks that nothing DeepSpeed adds to modules and parameters remains."""
    for each in of(two, "in place"):
        found, expected = each["losses"]
        assert found == pytest.approx(expected, rel=TOLERANCE)


def test_bytes_are_those_of_the_paper(two: Found) -> None:
    """The bytes match ZeRO's 4 + 4 + 8 bytes a parameter in fp32.

    Source: arXiv:1910.02054, sections 3 and 5. The last term is partitioned at stage 1, the
    second at 2, the first at 3. All tensors of the process between two steps are counted,
    except stage 3's buffers for in-flight gradients.
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


def test_bytes_of_16_bit_weights_are_those_of_the_paper(two: Found) -> None:
    """The bytes match 2 + 2 + 12 a parameter (arXiv:1910.02054, 3.1), partitioned likewise."""
    for each in of(two, "held mixed"):
        whole = 2 * each["parameters"]
        for stage in STAGES:
            told, number = each[stage], int(stage)
            assert told["parameters"] == pytest.approx(whole / (2 if number > 2 else 1), rel=0.05)
            assert told["gradients"] == pytest.approx(whole / (2 if number > 1 else 1), rel=0.05)
            assert told["optimizer_state"] == pytest.approx(6 * whole / 2, rel=0.05)
            assert told["host"] == 0
            between = told["parameters"] + told["optimizer_state"]
            if stage == "3":
                between += told["gradients"] + told["bucket"]
            assert told["all"] == pytest.approx(between, rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["mixed", "mixed sums"])
def test_16_bit_weights_are_rounded_from_an_fp32_copy(two: Found, case: str, stage: str) -> None:
    """Losses, norms and the fp32 copy match torch alone; losses are close to those of fp32.

    Only the order of fp32's additions differs, which gives 2e-7. It may round a weight to the
    next bf16 number, one part in 256 away, which sets the tolerance. A few such roundings in
    one direction, 2%, is the distance allowed between the losses and those of fp32.
    """
    for each in of(two, f"{case} {stage}"):
        assert each["steps"] < ROUNDED
        assert each["copy"] < ROUNDED
        assert each["from fp32"] < 0.02
        expected, evaluated = each["evaluated"]
        assert evaluated == pytest.approx(expected, rel=TOLERANCE)
        state, again = each["digests"]
        assert state == again
        assert each["whole"] == 0.0
        assert each["types"] == ["torch.float32"]
        adds = "fp32" if case == "mixed sums" and stage != "1" else "bf16"
        assert f"reduced in fp32 and kept in {adds}" in each["notes"][-1]
        told = "zero_stage=1 adds up the gradients of micro-batches in bf16"
        assert any(told in remark for remark in each["remarks"]) == (
            (case, stage) == ("mixed sums", "1")
        )


def test_a_run_with_16_bit_weights_moves_and_loses_nothing(two: Found) -> None:
    for each in of(two, "mixed moving"):
        assert each["same"] == [0.0] * 10
        halves, whole = ["torch.bfloat16"], ["torch.float32"]
        assert each["kinds"] == whole + 3 * halves + 2 * whole
        assert each["losses"] == pytest.approx(each["expected"], rel=2e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_stay_keep_32_bits(two: Found, stage: str) -> None:
    for each in of(two, "mixed untouched"):
        assert each[stage] == {"changed": True, "states": 2, "whole": 0.0}


@pytest.mark.parametrize(
    "case",
    [*(f"{s} {bad}" for s in STAGES for bad in ("nan", "infinite", "steep")), "2 offloaded"],
)
def test_16_bit_weights_after_a_loss_that_is_not_finite(two: Found, case: str) -> None:
    """16-bit weights are unchanged; so are the 32-bit ones with the optimizer on the host."""
    for each in of(two, "mixed damaged"):
        finite, unchanged = each[case]
        assert not finite
        assert unchanged


@pytest.mark.parametrize("case", ["2 param_dtype", "3 param_dtype", "2 offload_optimizer"])
def test_16_bit_weights_after_a_rank_that_failed(two: Found, case: str) -> None:
    """Training continues with 16-bit weights, and 32-bit ones with the optimizer on the host."""
    for each in of(two, "mixed failing"):
        assert each[case]["told"] in ("RankFailed", "ValueError")
        assert each[case]["same"]
        disturbed, undisturbed = each[case]["losses"]
        assert disturbed == undisturbed


@pytest.mark.parametrize("stage", STAGES)
def test_inputs_are_of_the_type_of_weights_and_targets_are_not(two: Found, stage: str) -> None:
    for each in of(two, "mixed types"):
        kinds, exact, calls = each[stage]
        assert kinds == ["torch.bfloat16"]
        assert exact
        assert calls == 4


def test_statistics_beside_16_bit_weights_are_refused(two: Found) -> None:
    for each in of(two, "mixed refused"):
        assert "1 is a BatchNorm1d, whose statistics stay in fp32" in each["told"]


@pytest.mark.parametrize(("stage", "optimizer"), [(1, "adamw"), (2, "sgd"), (3, "adamw")])
def test_fifty_steps_with_the_optimizer_on_the_host(two: Found, stage: int, optimizer: str) -> None:
    found = of(two, f"offload {stage} {optimizer}")
    check_parity(found, "eager")
    assert "in host memory; on a CPU that saves nothing" in found[0]["notes"][-1]


def test_bytes_on_the_host(two: Found) -> None:
    """The host holds a share of 4 + 8 bytes a parameter for fp32 copy and moments, 4 for gradients.

    Stage 3 has the gradients twice. In stages 1 and 2, new weights pass through a buffer and
    the largest gradient through two; these are not counted.
    """
    for each in of(two, "held offloaded"):
        whole = 4 * each["parameters"]
        for stage in STAGES:
            told, number = each[stage], int(stage)
            assert told["parameters"] == pytest.approx(whole / (2 if number > 2 else 1), rel=0.05)
            assert told["optimizer_state"] == pytest.approx(3 * whole / 2, rel=0.05)
            gradients = whole if number == 3 else whole / 2
            assert told["host"] == pytest.approx(3 * whole / 2 + gradients, rel=0.05)
            between = told["parameters"] + told["host"]
            between += told["bucket"] if number == 3 else whole / 2 + 2 * told["largest"]
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
    """A failure in a first or last micro-batch or in evaluation stops all; training continues."""
    check_failure(of(two, f"failing {stage}"))


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
    """Unused parameters and parameters with another memory layout match."""
    for each in of(two, case):
        assert each[stage] < TOLERANCE


@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_take_turns(two: Found, stage: str) -> None:
    """The first micro-batch of a step uses one layer, the second another one."""
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
    """Changing layers are refused, as DeepSpeed would add gradients of different layers.

    The state is unchanged, and further steps run.
    """
    for each in of(two, "wayward"):
        ranks, steps = each[stage]
        assert "the ranks used different layers" in ranks
        assert "has a gradient in some steps only; choose zero_stage=0" in steps


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
        assert "the checkpoint does not match the model: 0.weight is float32[33, 6]" in model
        assert "{'step': 2.0} for 2.weight and {'step': 1.0} for 0.weight" in steps
        assert each["unchanged"]
        assert each["adopted"] < TOLERANCE
        version = compatibility.DEEPSPEED
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
    return FinetuneSettings.of(**{"engine": "eager", "device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": 3, "engine": "ortmodule"}, "choose zero_stage=2, or engine='eager'"),
        ({"zero_stage": 3, "engine": "compile"}, "choose zero_stage=2, or engine='eager'"),
        ({"zero_stage": 2, "precision": "fp16"}, "choose precision='bf16'"),
        ({"zero_stage": 2, "reduction": "adasum", "optimizer": "sgd"}, "choose reduction='mean'"),
        (HALVES, "with zero_stage=0: DeepSpeed supports it with a sharded optimizer state"),
        ({**HALVES, "zero_stage": 1, "precision": "fp32"}, "choose precision='bf16', or param"),
        ({**HALVES, "zero_stage": 1, "engine": "ortmodule"}, "has no MatMul of bfloat16"),
        ({**HALVES, "zero_stage": 1, "optimizer": "lamb"}, "choose optimizer='adamw'"),
        ({**HALVES, "zero_stage": 1, "reduction": "adasum"}, "choose reduction='mean'"),
        ({**HALVES, "zero_stage": 1, "tensor_parallel": 2}, "these ranks have parts"),
        ({"offload_optimizer": True, "pipeline_stages": 2}, "these ranks have parts"),
        ({"offload_optimizer": True}, "offload_optimizer=True with zero_stage=0"),
        ({"offload_optimizer": True, "zero_stage": 1, "precision": "fp16"}, "precision='bf16'"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    assert message in str(compatibility.ranks_conflict(_settings(**changes), 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 2, "engine": "ortmodule"},
        {"zero_stage": 3},
        {"zero_stage": 2, "engine": "compile"},
        {**HALVES, "zero_stage": 3, "offload_optimizer": True},
        {**HALVES, "zero_stage": 1, "engine": "compile"},
    ],
)
def test_what_goes_together(changes: dict[str, Any]) -> None:
    assert compatibility.ranks_conflict(_settings(**changes), 2) is None


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DeepSpeed, stage 1 is torch's own."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python's convention: the import fails
    assert "pip install 'ortlab[deepspeed]'" in str(
        compatibility.ranks_conflict(_settings(zero_stage=2), 2)
    )
    assert compatibility.ranks_conflict(_settings(zero_stage=1), 2) is None
    for more in (HALVES, {"offload_optimizer": True}):  # only DeepSpeed provides this
        told = str(compatibility.ranks_conflict(_settings(zero_stage=1, **more), 2))
        assert f"{list(more)[-1]}=" in told
        assert "pip install 'ortlab[deepspeed]'" in told
