"""Tensor parallel ranks, which split a model's layers, compute the same as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ortlab.engines.distributed.tensor_parallel_plan import Part, plan_for
from tests.support.several import TOLERANCE, Found, of, run

RANKS = "tests.support.tensor_ranks"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(RANKS, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(RANKS, 4, tmp_path_factory.mktemp("four"))


def _check_parity(found: list[Any], tolerance: float = TOLERANCE) -> None:
    for each in found:
        for name in ("losses", "norms", "weights", "moments", "evaluated"):
            assert each[name] < tolerance, name
        alone, together = each["hits"]
        assert alone == together
        assert each["held"]["parameters"] < each["whole"]
        assert each["left"] == 0.0
        assert each["same objects"]
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(
    "model",
    ["sequential", "sequential sgd", "encoder", "scaled", "bert", "gpt2", "llama", "qwen3"],
)
def test_fifty_steps_are_those_of_one_process(two: Found, model: str) -> None:
    """Losses, norms, states and evaluation match; then the user's model is whole and trained."""
    _check_parity(of(two, model))


def test_three_steps_of_other_architectures(two: Found) -> None:
    for each in of(two, "others"):
        assert len(each) == 5
        for worst, note in each.values():
            assert worst < TOLERANCE
            assert "layers are sharded" in note


@pytest.mark.parametrize("case", ["sequential", "zero"])
def test_data_and_tensor_parallel_on_four_ranks(four: Found, case: str) -> None:
    _check_parity(of(four, case))


def test_in_bfloat16_only_the_rounding_differs(two: Found) -> None:
    _check_parity(of(two, "bf16"), tolerance=2e-2)


def test_ranks_hold_their_shares(two: Found, four: Found) -> None:
    """A rank has 880 of 1644 parameters: half of four weights and two biases, all the rest."""
    for each in of(two, "sequential"):
        held = each["held"]
        assert held["parameters"] == held["gradients"] == 4 * 880
        assert held["optimizer_state"] == pytest.approx(8 * 880, rel=0.01)
        assert "this rank has 880 of 1,644 parameters" in each["notes"][1]
    state = [each["held"]["optimizer_state"] for each in of(four, "zero")]
    assert max(state) < 0.6 * 8 * 880
    assert sum(state) == pytest.approx(2 * 8 * 880, rel=0.02)


def test_a_run_moves_to_shares_and_back(two: Found) -> None:
    for each in of(two, "moving"):
        assert len(each["expected"]) == 30
        assert each["losses"] == pytest.approx(each["expected"], rel=TOLERANCE)


def test_a_nan_changes_no_weight(two: Found) -> None:
    for each in of(two, "not finite"):
        assert each["finite"] == [True, False]
        before, after = each["digests"]
        assert before == after


def test_dropout_of_split_and_of_whole_activations(two: Found) -> None:
    """Checkpointing computes the split region twice in each step with the same dropout masks."""
    first, second = of(two, "dropout")
    assert first["whole"] == second["whole"]
    assert len(set(first["whole"])) == 2
    for each in (first, second):
        forward, recomputed = each["split"][::2], each["split"][1::2]
        assert forward == recomputed
        assert forward[:2] == forward[2:]
        assert forward[0] != forward[1]
        assert each["whole"][:2] == each["whole"][2:]
        assert each["undisturbed"]
    assert not set(first["split"]) & set(second["split"])


def test_dropout_of_transformers(two: Found) -> None:
    """A region that one layer opens and no layer closes would leave each rank masks of its own."""
    first, second = of(two, "dropping")
    assert first == second
    assert len(first) == 6
    assert all(len(losses) == 3 for losses in first.values())


def test_ranks_that_fail_stop_the_step_of_all(two: Found, four: Found) -> None:
    for each in of(two, "failing"):
        assert each["told"] == "ValueError: a row is out of range"
    fine, fine_too, *failed = of(four, "failing")
    for each in (fine, fine_too):
        assert "RankFailed: rank 2, 3 of 4 has failed" in each["told"]
    for each in failed:
        assert each["told"] == "ValueError: a row is out of range"
    for each in (*of(two, "failing"), fine, fine_too, *failed):
        assert each["error"] < TOLERANCE


def test_another_process_group_after_the_first(four: Found) -> None:
    """A later process group works too, although torch caches the groups of the first equal mesh."""
    for each in of(four, "again"):
        assert len(each["losses"]) == 3
        for alone, together in each["losses"]:
            assert together == pytest.approx(alone, rel=TOLERANCE)


def test_what_is_refused(two: Found) -> None:
    for each in of(two, "refused"):
        told = each["told"]
        assert set(told[1::2]) == {"unchanged"}
        nothing, odd, conv1d, heads, tied, entry, wrong = told[::2]
        assert "no layer of Sequential is known to be shardable: no plan of" in nothing
        assert "0 has 5 outputs, which cannot be split evenly across 2 ranks" in odd
        assert "GPT2Block has num_attention_heads=1, which cannot be split evenly" in conv1d
        assert "num_attention_heads=1, which cannot be split evenly across 2 ranks" in heads
        assert "is shared with another layer" in tied
        assert "has 'sequence_parallel' for norm, which is not supported" in entry
        assert "RuntimeError: the gradient of norm.weight has norm" in wrong


# --- without processes


def test_a_layer_without_a_partner_stays_whole() -> None:
    model = nn.Sequential(
        *(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        *(nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4)),
    )
    columns, rows = Part("columns", "0"), Part("rows", "0")
    assert plan_for(model, 2) == {"0": columns, "2": rows}


def test_tied_embeddings_stay_whole_with_their_head() -> None:
    transformers = pytest.importorskip("transformers")
    for tied in (True, False):
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            tie_word_embeddings=tied,
        )
        plan = plan_for(transformers.LlamaForCausalLM(config), 2)
        assert ("lm_head" in plan) == (not tied)
        assert plan["model.layers.0.mlp.down_proj"] == Part("rows", "model.layers.0.mlp")


def test_layers_with_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda *_: torch.zeros(1))
    with pytest.raises(ValueError, match="0 has hooks of its own"):
        plan_for(model, 2)
