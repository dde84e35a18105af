"""Data-parallel processes that train together compute the same as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.engines import compatibility
from ortlab.engines.distributed import steppers
from ortlab.engines.distributed.batch_split import share_of, weights_of
from ortlab.engines.registry import engine
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, check_failure, check_parity, of, run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("tests.support.ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("tests.support.ranks", 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Found:
    found: Found = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
@pytest.mark.parametrize("stage", [0, 1])
def test_fifty_steps_are_those_of_one_process(two: Found, stage: int, optimizer: str) -> None:
    """Losses, norms, states and evaluation match: with accumulation, clipping and uneven shares."""
    found = of(two, f"parity eager {stage} {optimizer}")
    check_parity(found, "eager")
    sharer = " by torch's ZeroRedundancyOptimizer" if stage else ""
    assert f"ZeRO stage {stage}{sharer}, reduction mean" in found[0]["notes"][-1]


def test_four_ranks_are_one_process(four: Found) -> None:
    check_parity(of(four, "parity"), "eager")


def test_a_group_is_a_part_of_all_ranks(four: Found) -> None:
    for each in of(four, "subgroups"):
        assert max(each["errors"]) < TOLERANCE


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "sgd"), (1, "adamw")])
def test_fifty_steps_in_ort(two: Found, stage: int, optimizer: str) -> None:
    needs("ortmodule")
    check_parity(of(two, f"parity ortmodule {stage} {optimizer}"), "ortmodule")


def test_a_run_moves_to_more_processes_and_back(two: Found) -> None:
    """A checkpoint file resumes mid-epoch on more processes and back, with ZeRO 1 in between."""
    for each in of(two, "moving"):
        assert len(each["whole"]) == 15
        assert each["moved"] == pytest.approx(each["whole"], rel=TOLERANCE)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_nan_on_one_rank_changes_no_weight_on_any(two: Found, stage: int, optimizer: str) -> None:
    finite_before, finite_after, loss_is_nan, unchanged = range(4)
    for each in of(two, "not finite"):
        told = each[f"{stage} {optimizer}"]
        assert told[finite_before]
        assert not told[finite_after]
        assert told[loss_is_nan]
        assert told[unchanged]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_overflow_on_one_rank_is_skipped_by_all(two: Found, stage: int) -> None:
    first, second = (each[str(stage)] for each in of(two, "overflow"))
    assert first == second
    assert first["finite"]
    assert first["results"] == [[True, 2.0**15], [False, 2.0**15]]
    assert first["momenta"] == [False, True]
    before, skipped, stepped = first["states"]
    assert before == skipped != stepped


def test_a_rank_that_fails_stops_the_step_of_all(two: Found) -> None:
    """A failure in a first or last micro-batch or in evaluation stops all; training continues."""
    check_failure(of(two, "failing"))


@pytest.mark.parametrize("loss", ["causal", "causal without", "cross_entropy"])
def test_a_mean_over_targets_that_are_not_ignored(two: Found, loss: str) -> None:
    for each in of(two, "ignored"):
        assert max(each[loss]) < TOLERANCE


def test_dropout_differs_by_rank_and_the_order_of_data_does_not(two: Found) -> None:
    found = of(two, "dropout")
    for each in found:
        first, second, *again = each["masks"]
        assert first != second
        assert again == [first, second]
        assert each["undisturbed"]
    assert not set(found[0]["masks"]) & set(found[1]["masks"])
    assert found[0]["engine's"] != found[1]["engine's"]


def test_statistics_are_the_same_on_all_ranks(two: Found) -> None:
    first, second = of(two, "statistics")
    assert first["states"] == second["states"]
    assert first["states"][0] != first["states"][1]
    assert "BatchNorm" in first["remarks"][0]
    assert first["notes"] == ["rank 0 of 2 over gloo: ZeRO stage 0, reduction mean"]


@pytest.mark.parametrize("case", ["unused", "layouts"])
@pytest.mark.parametrize("stage", ["0", "1"])
def test_models_that_are_not_plain(two: Found, case: str, stage: str) -> None:
    """Unused parameters and parameters with another memory layout match."""
    for each in of(two, case):
        assert each[stage] < TOLERANCE


def test_stage_1_holds_half_of_the_optimizer_state(two: Found) -> None:
    """ZeRO stage 1 partitions the last of the paper's 4 + 4 + 8 bytes a parameter (fp32)."""
    for each in of(two, "held"):
        parameters = each["parameters"]
        for stage, state in (("0", 8 * parameters), ("1", 8 * parameters / 2)):
            assert each[stage]["parameters"] == each[stage]["gradients"] == 4 * parameters
            assert each[stage]["optimizer_state"] == pytest.approx(state, rel=0.05)


def test_what_is_refused_among_ranks(two: Found) -> None:
    for samples, each in zip((8, 16), of(two, "refused"), strict=True):
        group, types, batches, rows = each["told"]
        assert "workers=3, but the process group has 2 ranks" in group
        assert "types" not in types
        assert "float32 and float64; choose zero_stage=0" in types
        assert f"12 samples on average, and this rank {samples}" in batches
        assert "y has shape [7, 6], which cannot be split across 2 ranks" in rows


def test_adasum_of_vectors(ranks: Found) -> None:
    """Adasum gives the same bits on every rank for odd sizes, which halving cuts, and for zeros."""
    found = of(ranks, "combined")
    assert all(each["error"] < 1e-6 for each in found)
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("case", ["sgd 0", "sgd 1", "adamw 0"])
def test_adasum_trains_as_the_paper_says(ranks: Found, case: str) -> None:
    """Five Adasum steps match the paper: gradients under SGD, parameter changes under AdamW."""
    found = [each[case] for each in of(ranks, "adasum")]
    for each in found:
        assert each["error"] < 1e-6
        assert each["moments"] < 1e-6
        assert each["norm"] < TOLERANCE
        state, again = each["digests"]
        assert state == again
        refused = "choose max_grad_norm=None" in each["adopted"]
        assert refused == (case == "adamw 0"), each["adopted"]
    assert len({each["digests"][0] for each in found}) == 1


# --- without processes

ADASUM = {"reduction": "adasum"}


def _settings(**changes: Any) -> FinetuneSettings:
    return FinetuneSettings.of(**{"engine": "eager", "device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"zero_stage": 2, "optimizer": "lamb"}, 2, "trust ratios need whole tensors"),
        ({**ADASUM, "optimizer": "lamb"}, 2, "choose reduction='mean'"),
        (ADASUM, 6, "train with 4 or 8 workers"),
        ({**ADASUM, "zero_stage": 1, "max_grad_norm": None}, 2, "which ZeRO cannot shard"),
        (ADASUM, 2, "choose max_grad_norm=None"),
        ({**ADASUM, "max_grad_norm": None, "precision": "fp16"}, 2, "choose precision='bf16'"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], size: int, message: str) -> None:
    assert message in str(compatibility.ranks_conflict(_settings(**changes), size))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"zero_stage": 1, "precision": "fp16"}, 3),
        ({**ADASUM, "optimizer": "sgd", "zero_stage": 1, "precision": "fp16"}, 4),
        ({**ADASUM, "max_grad_norm": None}, 1),
    ],
)
def test_what_goes_together(changes: dict[str, Any], size: int) -> None:
    assert compatibility.ranks_conflict(_settings(**changes), size) is None


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group"):
        steppers.prepare(engine("eager"), nn.Linear(2, 2), None, _settings())


def _rows(batch: Any, rank: int, size: int) -> Any:
    samples = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    return share_of(batch, rank, size, torch.ones(samples))


def test_rows_are_contiguous_and_every_tensor_has_the_same() -> None:
    x, y = torch.arange(14).reshape(7, 2), torch.arange(7)
    batch = {"x": x, "more": (y, {"deep": y * 2}), "mask": torch.ones(1, 2), "scale": 0.5}
    shares = [_rows(batch, rank, 3) for rank in range(3)]
    assert [share.part for share in shares] == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert torch.equal(torch.cat([share.batch["x"] for share in shares]), x)
    for share, rows in zip(shares, (slice(0, 3), slice(3, 5), slice(5, 7)), strict=True):
        assert torch.equal(share.batch["more"][0], y[rows])
        assert torch.equal(share.batch["more"][1]["deep"], 2 * y[rows])
        assert share.batch["mask"].shape == (1, 2)
        assert share.batch["scale"] == 0.5


def test_a_rank_without_samples_takes_one_that_counts_for_nothing() -> None:
    shares = [_rows((torch.arange(2.0),), rank, 3) for rank in range(3)]
    assert [share.part for share in shares] == [0.5, 0.5, 0.0]
    assert shares[2].factor == 0.0
    assert len(shares[2].batch[0]) == 1


def test_a_rank_whose_targets_are_ignored_takes_another_sample() -> None:
    weights = torch.tensor([0.0, 0.0, 1.0, 3.0])
    first, second = (share_of((torch.arange(4),), rank, 2, weights) for rank in range(2))
    assert first.batch[0].tolist() == [3]
    assert (first.part, second.part) == (0.0, 1.0)
    assert second.batch[0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("batch", "loss", "expected"),
    [
        ((torch.zeros(3, 2), torch.tensor([1, -100, 2])), functional.cross_entropy, [1, 0, 1]),
        ((torch.zeros(3, 2), torch.tensor([1, -100, 2])), functional.l1_loss, [1, 1, 1]),
        ((torch.zeros(2, 2), torch.tensor([1.0, -100.0])), functional.cross_entropy, [1, 1]),
        ({"x": torch.zeros(2, 3), "labels": torch.tensor([[1, -100], [2, 3]])}, None, [1, 2]),
        ({"x": torch.zeros(2, 3), "labels": torch.tensor([[1, 2], [2, 3]])}, None, [1, 1]),
        (torch.zeros(2, 3), None, [1, 1]),
    ],
)
def test_weights_are_counted_targets_where_that_is_known(
    batch: Any, loss: Callable[..., torch.Tensor] | None, expected: list[int]
) -> None:
    assert weights_of(batch, loss, nn.Linear(3, 2)).tolist() == expected
