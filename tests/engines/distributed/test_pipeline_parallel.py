"""Pipeline-parallel ranks, which each run a stage of a model, compute the same as one process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ortlab.engines import compatibility
from ortlab.engines.distributed import pipeline_schedule, pipeline_stages
from ortlab.engines.registry import refusal
from ortlab.settings import FinetuneSettings
from tests.support.needed_engines import needs
from tests.support.several import TOLERANCE, Found, of, run

RANKS = "tests.support.pipeline_ranks"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(RANKS, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(RANKS, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(RANKS, 8, tmp_path_factory.mktemp("eight"))


def _check_parity(found: list[Any]) -> None:
    for each in found:
        for name in ("losses", "norms", "weights", "moments", "evaluated", "left"):
            assert each[name] < TOLERANCE, name
        alone, together = each["hits"]
        assert alone == together
        assert each["same objects"]
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(
    "case", ["eager", "sgd", "ortmodule", "bf16", "swapped", "tied", "interleaved"]
)
def test_fifty_steps_are_those_of_one_process(two: Found, case: str) -> None:
    """Losses, norms, states and evaluation match; then the user's model is whole and trained."""
    if case == "ortmodule":
        needs("ortmodule")
    _check_parity(of(two, case))


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama"])
def test_transformers_are_one_process(two: Found, case: str) -> None:
    """GPT-2's embedding on the first stage is the head of the last."""
    _check_parity(of(two, case))


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_stages_of_layers_that_ranks_share(four: Found, case: str) -> None:
    """Two stages of two ranks that share each layer; Llama with ZeRO 1."""
    _check_parity(of(four, case))


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama"])
def test_data_pipeline_and_tensor_parallel_on_eight_ranks(eight: Found, case: str) -> None:
    _check_parity(of(eight, case))


@pytest.mark.parametrize("case", ["data x stages", "zero", "four"])
def test_four_ranks_are_one_process(four: Found, case: str) -> None:
    """Four ranks match: two stages of two data-parallel ranks (ZeRO 1), and four stages."""
    _check_parity(of(four, case))


def test_ranks_hold_their_stages(two: Found, four: Found) -> None:
    first, second = of(two, "eager")
    for each, parameters in ((first, 168), (second, 500)):
        assert each["held"]["parameters"] == each["held"]["gradients"] == 4 * parameters
        assert each["held"]["optimizer_state"] == pytest.approx(8 * parameters, rel=0.01)
        assert any(f": {parameters} of 668 parameters" in note for note in each["notes"])
    held = [each["held"]["parameters"] for each in of(four, "four")]
    assert sum(held) == of(four, "four")[0]["whole"]
    state = [each["held"]["optimizer_state"] for each in of(four, "zero")]
    assert sum(state) == pytest.approx(8 * 668, rel=0.02)


def test_a_run_moves_through_stages_and_shares_and_back(two: Found) -> None:
    for each in of(two, "moving"):
        assert len(each["expected"]) == 40
        assert each["losses"] == pytest.approx(each["expected"], rel=TOLERANCE)
        assert each["error"] < TOLERANCE


def test_a_nan_changes_no_weight(two: Found) -> None:
    for each in of(two, "not finite"):
        assert each["finite"] == [True, False]
        before, after = each["digests"]
        assert before == after


def test_dropout_is_each_stages_own(two: Found) -> None:
    first, second = of(two, "dropout")
    for each in (first, second):
        assert each["masks"][:2] == each["masks"][2:]
        assert each["masks"][0] != each["masks"][1]
        assert each["undisturbed"]
    assert not set(first["masks"]) & set(second["masks"])


def test_what_is_refused(two: Found) -> None:
    for each in of(two, "refused"):
        own, few, inputs, closed = each["told"]
        assert "the model is a Own; choose pipeline_stages=1" in own
        assert "needs that many layers with parameters to train, and the model has 1;" in few
        assert "this stepper is closed" in closed
        assert "has 2 besides the target; pass (input, target)" in inputs
        assert each["error"] < TOLERANCE


def test_a_stage_that_fails_stops_the_others(two: Found) -> None:
    """A failed rank leaves the process group, as a worker's call does; the others do not wait."""
    failed, other = of(two, "failing")
    assert failed["told"] == "ValueError: a row is out of range"
    assert "Connection closed by peer" in other["told"]
    for each in (failed, other):
        assert each["unchanged"]
        assert each["seconds"] < 10


def test_two_pipelines_side_by_side(four: Found) -> None:
    for each in of(four, "beside"):
        expected, *losses = each["losses"]
        assert losses == pytest.approx([expected] * 2, rel=TOLERANCE)
        assert each["groups"] == [True, True, False, False]


def test_ranks_print_nothing(two: Found, four: Found) -> None:
    assert [each["printed"] for each in (*two, *four)] == [""] * 6


# --- without processes


def test_stages_are_about_as_large() -> None:
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2)),
        *(nn.Linear(2, 6), nn.Tanh()),
    )

    def names(stages: int) -> list[list[str]]:
        return [list(part.module._modules) for part in pipeline_stages.cut(model, stages)]

    assert names(2) == [["0", "1", "2", "3", "4"], ["5", "6"]]
    assert names(4) == [["0", "1"], ["2", "3"], ["4"], ["5", "6"]]


def test_stages_of_a_transformer_are_its_own_modules() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.support import tiny

    model = tiny.gpt2(n_layer=3)
    first, second = pipeline_stages.cut(model, 2)
    found = [{id(p) for p in part.parameters()} for part in (first, second)]
    assert found[0] | found[1] == {id(p) for p in model.parameters()}
    assert found[0] & found[1] == {id(model.lm_head.weight)}
    assert id(model.transformer.ln_f.weight) in found[1]
    with pytest.raises(ValueError, match="the model has 3; choose pipeline_stages=3 or fewer"):
        pipeline_stages.cut(model, 4)
    reads_ids = transformers.GPT2ForSequenceClassification(model.config)
    for other in (model.transformer, reads_ids):
        with pytest.raises(ValueError, match="is not known to have a head that reads activations"):
            pipeline_stages.cut(other, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_schedules_do_everything_once_and_no_rank_waits_for_ever(ranks: int, chunks: int) -> None:
    """With whole rounds of micro-batches the idle time is that of Narayanan et al."""
    for micro_batches in (1, 2, 3, 4, 5, 8, 12):
        order = pipeline_schedule.training_order(ranks, chunks, micro_batches)
        done = {action for actions in order for action in actions}
        assert len(done) == sum(map(len, order)) == 2 * ranks * chunks * micro_batches
        assert {a.stage % ranks for a in order[ranks - 1]} == {ranks - 1}
        spans = pipeline_schedule.spans(order)
        assert spans is not None
        if micro_batches % ranks == 0:
            bubble = (ranks - 1) / (ranks - 1 + micro_batches * chunks)
            assert pipeline_schedule.idle(spans, ranks) == pytest.approx(bubble)


def test_an_order_in_which_ranks_wait_for_each_other_is_found() -> None:
    first, second = pipeline_schedule.training_order(2, 1, 1)
    assert pipeline_schedule.spans([first[::-1], second]) is None


def test_times_of_a_step(two: Found) -> None:
    for each in of(two, "timed"):
        assert len(each["actions"]) == 2 * 4 * 4
        assert all(rank == stage % 2 and took for rank, stage, took in each["actions"])
        assert any("micro-batches alone leaves 11% of all" in note for note in each["notes"])


TENSOR, STAGES = {"tensor_parallel": 2}, {"pipeline_stages": 2}


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        (
            {**TENSOR, **STAGES},
            6,
            "tensor_parallel=2 x pipeline_stages=2 does not divide workers=6; train with 4 or 8",
        ),
        (TENSOR, 3, "tensor_parallel=2 does not divide workers=3; train with 2 or 4 workers"),
        (STAGES, 5, "pipeline_stages=2 does not divide workers=5; train with 4 or 6 workers"),
        ({**TENSOR, "zero_stage": 2}, 2, "choose zero_stage=1 or tensor_parallel=1"),
        ({**STAGES, "zero_stage": 3}, 2, "choose zero_stage=1 or pipeline_stages=1"),
        ({**TENSOR, "reduction": "adasum"}, 2, "choose reduction='mean' or tensor_parallel=1"),
        ({**STAGES, "reduction": "adasum"}, 4, "choose reduction='mean' or pipeline_stages=1"),
        ({**TENSOR, "precision": "fp16"}, 2, "choose precision='bf16' or tensor_parallel=1"),
        ({**STAGES, "precision": "fp16"}, 2, "choose precision='bf16' or pipeline_stages=1"),
        (
            {**TENSOR, "engine": "ortmodule"},
            2,
            "engine 'ortmodule' cannot execute layers that exchange",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], size: int, message: str) -> None:
    settings = FinetuneSettings.of(**{"engine": "eager", "device": "cpu", **changes})
    assert message in str(compatibility.ranks_conflict(settings, size))


def test_interleaved_stages_need_a_pipeline() -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu", workers=2, pipeline_interleave=2)
    assert "pipeline_interleave=2 needs a pipeline" in str(refusal(settings))


@pytest.mark.parametrize("changes", [TENSOR, STAGES])
def test_one_process_has_nobody_to_share_with(changes: dict[str, Any]) -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu", **changes)
    assert "needs at least 2 workers (workers=1); choose workers=2, or" in str(refusal(settings))


def test_a_batch_is_shared_out_among_pipelines() -> None:
    settings = FinetuneSettings.of(engine="eager", device="cpu", batch_size=2, **STAGES)
    assert compatibility.ranks_conflict(settings, 4) is None
    assert "cannot be split across 3 workers" in str(compatibility.ranks_conflict(settings, 6))


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({**TENSOR, "zero_stage": 1}, 4),
        ({**TENSOR, "engine": "compile"}, 2),
        ({**TENSOR, "engine": "ort"}, 2),
        ({**STAGES, "zero_stage": 1, "engine": "ortmodule", "precision": "bf16"}, 6),
        ({"zero_stage": 3, "reduction": "adasum"}, 1),
    ],
)
def test_what_goes_together(changes: dict[str, Any], size: int) -> None:
    settings = FinetuneSettings.of(**{"engine": "eager", "device": "cpu", **changes})
    assert compatibility.ranks_conflict(settings, size) is None
