"""Engine ``ort`` in two processes: data parallel, ZeRO 1 and 2, Adasum, pipeline stages."""

from __future__ import annotations

import pytest

from ortlab.engines import compatibility
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, check_failure, check_parity, of, run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    needs("ort")
    if (reason := compatibility.deepspeed_missing()) is not None:
        pytest.skip(reason)
    return run("tests.support.ort_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize(
    "case",
    ["0 adamw", "0 lamb", "1 adamw", "2 adamw", "2 sgd", "with a budget", "with recompute"],
)
def test_fifty_steps_are_those_of_one_process(two: Found, case: str) -> None:
    """Losses, norms, states and evaluation match: with accumulation, clipping and uneven shares."""
    found = of(two, f"parity {case}")
    check_parity(found, "ort")
    assert all(any(note.startswith("checked on") for note in each["notes"]) for each in found)


@pytest.mark.parametrize("case", ["sgd 0", "sgd 1", "adamw 0"])
def test_adasum_trains_as_the_paper_says(two: Found, case: str) -> None:
    found = [each[case] for each in of(two, "adasum")]
    for each in found:
        assert each["error"] < 1e-6
        assert each["moments"] < 1e-6
        assert each["norm"] < TOLERANCE
    assert len({each["digests"][0] for each in found}) == 1


def test_pipeline_stages_are_one_process(two: Found) -> None:
    found = of(two, "stages")
    for each in found:
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_layers_that_ranks_share_are_one_process(two: Found, model: str) -> None:
    """Fifty steps of two micro-batches; the first step of each kind is compared with eager."""
    for each in of(two, f"tensor {model}"):
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
        assert any("layers are sharded" in note for note in each["notes"])
        assert any(note.startswith("checked on") for note in each["notes"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_fails_stops_the_step_of_all(two: Found, stage: int) -> None:
    """The model has a graph break, of which torch's compiler keeps the traceback."""
    check_failure(of(two, f"failing {stage}"))


@pytest.mark.parametrize("loss", ["causal", "causal without", "cross_entropy"])
def test_a_mean_over_targets_that_are_not_ignored(two: Found, loss: str) -> None:
    for each in of(two, "ignored"):
        assert max(each[loss]) < TOLERANCE


def test_statistics_are_the_same_on_all_ranks(two: Found) -> None:
    first, second = of(two, "statistics")
    assert first["states"] == second["states"]
    assert first["states"][0] != first["states"][1]


def test_a_head_that_no_loss_uses_has_no_gradient(two: Found) -> None:
    """DeepSpeed needs a gradient of every parameter; that it is zero is told."""
    for each in of(two, "unused"):
        assert each["0"] < TOLERANCE
    for each in of(two, "with hooks"):
        told = [remark for remark in each["remarks"] if "eager torch's is None" in remark]
        assert len(told) == 1
        assert "head.bias, head.weight" in told[0]


def test_weights_of_16_bits_are_eager_torch_s(two: Found) -> None:
    for each in of(two, "halved"):
        assert each["ort"] == pytest.approx(each["eager"], rel=1e-4)


@pytest.mark.parametrize(
    ("case", "graphs"),
    [
        ("wrapped_inside", 2),
        ("compiled_inside", 2),
        ("compiled_outside", 4),
        ("of_deepspeed 1", 2),
        ("of_deepspeed 2", 2),
    ],
)
def test_a_user_s_own_processes(two: Found, case: str, graphs: int) -> None:
    """A wrapped or compiled model in DistributedDataParallel and in DeepSpeed's engine."""
    for each in of(two, case):
        assert each["losses"] == pytest.approx(each["expected"], rel=TOLERANCE)
        assert each["error"] < TOLERANCE
        assert each["graphs"] >= graphs
