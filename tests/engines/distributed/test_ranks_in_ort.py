"""Engine ``ort`` in two processes: data parallel, ZeRO, Adasum, and models in parts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ortlab.engines import compatibility
from ortlab.engines.distributed import fully_sharded
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, check_failure, check_parity, of, run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    needs("ort")
    if (reason := compatibility.deepspeed_missing()) is not None:
        pytest.skip(reason)
    return run("tests.support.ort_ranks", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Found:
    needs("ort")
    folder = tmp_path_factory.mktemp("parts")
    return run("tests.support.parts_in_ort", 2, folder, "bert", seconds=600)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Found:
    needs("ort")
    folder = tmp_path_factory.mktemp("further")
    return run("tests.support.parts_in_ort", 2, folder, "gpt2", "llama", seconds=900)


@pytest.fixture
def in_parts(model: str, request: pytest.FixtureRequest) -> Found:
    """Return the cases of a model: ``further`` ones take long, and run in `make nightly`."""
    found: Found = request.getfixturevalue("parts" if model == "bert" else "further")
    return found


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


def check_stages(found: list[Any]) -> None:
    for each in found:
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
        assert any(note.startswith("checked on") for note in each["notes"])


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_stages_of_transformers_are_one_process(in_parts: Found, model: str) -> None:
    check_stages(of(in_parts, f"stages of {model}"))


def test_interleaved_stages_are_one_process(further: Found) -> None:
    check_stages(of(further, "interleaved"))


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_blocks_whose_weights_are_gathered_one_by_one(in_parts: Found, model: str) -> None:
    """ZeRO 3 by FSDP2, each block in ORT; afterwards the user's model has all weights."""
    for each in of(in_parts, f"fully sharded {model}"):
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
        assert each["same objects"]
        assert any("ZeRO stage 3 by torch's FSDP2" in note for note in each["notes"])
        assert any(note.startswith("checked on") for note in each["notes"])
    assert (
        sum(each["held"]["parameters"] for each in of(in_parts, f"fully sharded {model}"))
        == each["whole"]
    )


@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_layers_that_ranks_share_are_one_process(in_parts: Found, model: str) -> None:
    """Fifty steps of two micro-batches; the first step of each kind is compared with eager."""
    for each in of(in_parts, f"tensor {model}"):
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
        assert any("layers are sharded" in note for note in each["notes"])
        assert any(note.startswith("checked on") for note in each["notes"])


def test_ranks_that_share_layers_agree_on_a_check(parts: Found) -> None:
    """Each check has exchanges: another number of them on one rank would mix up the others."""
    for each, reason in zip(
        of(parts, "disagreeing"), ("on another rank", "a made-up difference"), strict=True
    ):
        assert each["losses"] < TOLERANCE
        assert each["weights"] < TOLERANCE
        assert any(reason in note for note in each["notes"])


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


def test_models_whose_weights_cannot_be_gathered_one_by_one() -> None:
    settings = FinetuneSettings.of(engine="ort", device="cpu", workers=2, zero_stage=3)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(4, 2)})
    assert fully_sharded.blocks_of(model, settings) == ["layers.0", "layers.1"]
    layers[1].weight = layers[0].weight
    with pytest.raises(ValueError, match=r"layers\.0\.weight is shared with another layer"):
        fully_sharded.blocks_of(model, settings)
    with pytest.raises(ValueError, match="and Linear has none; choose zero_stage=2"):
        fully_sharded.blocks_of(nn.Linear(4, 4), settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduction": "adasum"}, "FSDP2 averages the gradients itself"),
        ({"optimizer": "lamb"}, "choose optimizer='adamw'"),
        ({"precision": "fp16"}, "choose precision='bf16'"),
        ({"offload_optimizer": True}, "choose zero_stage=2, or engine='eager'"),
        ({"tensor_parallel": 2}, "choose zero_stage=1 or tensor_parallel=1"),
        ({}, None),
        ({"precision": "bf16", "optimizer": "sgd"}, None),
    ],
)
def test_what_goes_with_stage_3(changes: dict[str, Any], message: str | None) -> None:
    settings = FinetuneSettings.of(
        **{"engine": "ort", "device": "cpu", "workers": 2, "zero_stage": 3, **changes}
    )
    found = compatibility.ranks_conflict(settings, 2)
    assert found is None if message is None else message in str(found)
