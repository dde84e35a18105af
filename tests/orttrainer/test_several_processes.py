"""Tests of `ORTTrainer` in two processes, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ortlab import ORTTrainer, ORTTrainerOptions, optim
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, of, run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run the cases; for float32 one process has the graph of the whole step."""
    needs("ort")
    needs("ort_fused")
    return run("tests.support.orttrainer_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", ["sgd 0", "adam 0", "adam 1", "lamb 1"])
def test_two_processes_train_as_one(two: Found, case: str) -> None:
    """Losses, weights and moments match, with accumulation and clipping; each rank has its rows."""
    found = of(two, f"parity {case}")
    for each in found:
        assert each["losses"] < TOLERANCE
        assert each["weights"] < TOLERANCE
        assert each["moments"] < 10 * TOLERANCE
    assert len({each["digest"] for each in found}) == 1


def test_two_processes_train_as_one_in_float16(two: Found) -> None:
    """A step overflows, which both skip."""
    found = of(two, "parity in float16")
    for each in found:
        assert each["losses"] < 1e-2
        assert each["weights"] < 1e-2
        assert each["scales"] == [2.0**12] * 5 + [2.0**11] * 7
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("case", ["sgd 0", "adam 0", "adam 1", "in float16"])
def test_a_checkpoint_goes_on(two: Found, case: str) -> None:
    for each in of(two, f"parity {case}"):
        assert each["told"] == {"epoch": 1}
        assert each["ends"][0] == each["ends"][1]


def test_zero_partitions_the_moments(two: Found) -> None:
    whole = of(two, "parity adam 0")[0]["bytes"]
    shares = [each["bytes"] for each in of(two, "parity adam 1")]
    assert sum(shares) == whole
    assert max(shares) < whole


def test_gradients_are_combined_as_chosen(two: Found) -> None:
    """The ranks' gradients are orthogonal: their mean is half of the sum, which is Adasum."""
    for each in of(two, "adasum"):
        assert each["mean"] == pytest.approx([-0.25, -0.25])
        assert each["adasum"] == pytest.approx([-0.5, -0.5])


def test_a_loss_that_is_not_finite_raises_in_all(two: Found) -> None:
    for each in of(two, "not finite"):
        assert "in step 1: the weights are unchanged" in each["told"]
        assert each["same"] == 0
        assert each["after"] > 0


def test_what_does_not_fit_the_group_is_refused(two: Found) -> None:
    for rank, each in enumerate(of(two, "messages")):
        assert f"has size 2 and this process rank {rank}; pass those" in each["rank"]
        assert "choose utils.grad_norm_clip=False" in each["adasum"]


def test_without_a_process_group() -> None:
    description = {"inputs": [("x", ["batch", 2])], "outputs": [("y", ["batch", 2])]}
    with pytest.raises(ValueError, match=r"no process group.*torchrun --nproc-per-node 2"):
        ORTTrainer(
            nn.Linear(2, 2),
            description,
            optim.SGDConfig(),
            nn.CrossEntropyLoss(),
            {"distributed": {"world_size": 2}},
        )


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"world_rank": 1}, "world_rank=1 must be below world_size=1"),
        ({"world_size": 4, "data_parallel_size": 2}, "=2 must be world_size=4.*tensor_parallel=2"),
        ({"horizontal_parallel_size": 2}, "tensor_parallel=2"),
        ({"pipeline_parallel": {"pipeline_parallel_size": 2}}, "pipeline_stages=2"),
        ({"deepspeed_zero_optimization": {"stage": 2}}, r"must be 0 or 1; .*zero_stage=2"),
        ({"deepspeed_zero_optimization": {"stages": 1}}, "did you mean 'stage'"),
    ],
)
def test_options(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTTrainerOptions({"distributed": chosen})


def test_one_process_takes_the_options() -> None:
    """A script for torchrun runs in one process, too."""
    found = ORTTrainerOptions(
        {
            "distributed": {
                "world_size": 1,
                "world_rank": 0,
                "data_parallel_size": 1,
                "allreduce_post_accumulation": True,
                "enable_adasum": True,
                "deepspeed_zero_optimization": {"stage": 1},
            }
        }
    )
    assert not found.in_torch
