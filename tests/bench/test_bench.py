"""The benchmark of the engines, run on tiny models; the speeds themselves are not tested."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab import bench
from ortlab.bench import interleaved, machine, models, profiled, roofline, timing
from ortlab.bench.interleaved import Spread
from ortlab.bench.result import AROUND, BETWEEN, OPTIMIZER, Difference, EngineBench, Floor
from ortlab.bench.settings import BenchSettings
from ortlab.engines.base import progress
from ortlab.engines.ortmodule import compat, graph_cache
from ortlab.settings import ENGINES, REFERENCE
from tests.support.readme import speed
from tests.support.waiting import HANGS_S

MODEL = "bert-256/2x128"
# One thread: two would wait for each other whenever another process computes.
TINY: dict[str, Any] = {"models": MODEL, "rounds": 3, "threads": 1, "device": "cpu", "quick": True}
NO_ORT = compat.unavailable()


def command(*options: str) -> list[str]:
    given = ["--quick", "--threads", "1", "--device", "cpu", *options]
    return [sys.executable, "-m", "ortlab.cli", "bench", "engines", *given]


@pytest.fixture(scope="module")
def told() -> Iterator[list[str]]:
    """Collect the progress messages of a benchmark."""
    lines: list[str] = []
    token = progress.set(lines.append)
    yield lines
    progress.reset(token)


@pytest.fixture(scope="module")
def measured(told: list[str]) -> EngineBench:
    """Measure eager torch and ORT in both precisions; only one test compiles."""
    return bench.engines(**TINY, engines="eager,ortmodule", roofline=True, profile=True)


def whole(result: EngineBench) -> EngineBench:
    """Pretend that full models were measured on an otherwise idle machine."""
    settings = result.settings.replace(quick=False)
    return dataclasses.replace(
        result, settings=settings, machine=dataclasses.replace(result.machine, load=0.0)
    )


# ---- what is measured ----------------------------------------------------------------------------


def test_every_cell_has_its_figures(measured: EngineBench) -> None:
    assert [cell.key for cell in measured.cells] == list(measured.settings.cells)
    for cell in measured.cells:
        if cell.reason is not None:
            assert cell.engine == "ortmodule"
            assert cell.step_ms == ()
            continue
        assert len(cell.step_ms) == 3
        assert all(ms > 0 for ms in cell.step_ms)
        assert cell.first_step_s is not None
        assert len(cell.losses) == len(cell.grad_norms) == 1 + interleaved.WARMUP + 3
        assert not measured.suspect(cell), measured.loss_difference(cell)
    reference = measured.cell(MODEL, *REFERENCE)
    assert reference is not None
    assert measured.speed(reference) == Spread(1, 1, 1)


@pytest.mark.skipif(NO_ORT is not None, reason=str(NO_ORT))
def test_ort_is_exported_anew_for_it(measured: EngineBench) -> None:
    cell = measured.cell(MODEL, "ortmodule", "fp32")
    assert cell is not None
    assert cell.reason is None
    assert 0 < cell.export_s + cell.check_s < (cell.first_step_s or 0)
    assert graph_cache.usage().graphs == 0, "it kept what it exported"


def test_it_says_how_far_it_is(measured: EngineBench, told: list[str]) -> None:
    assert f"{MODEL}, model 1 of 1" in told
    assert f"{MODEL}: first step of eager in bf16" in told
    assert any(line.startswith(f"{MODEL}: round 3 of 3, about ") for line in told)


def test_options_are_of_the_engines_in_ort(measured: EngineBench) -> None:
    settings = BenchSettings(ort_options="kernels=ort, attention=onnx,triton=on")
    of_ort, of_eager = (
        timing._finetune((e, "bf16"), "cpu", settings) for e in ("ortmodule", "eager")
    )
    assert (of_ort.model.kernels, of_ort.model.attention, of_ort.model.ortmodule.triton) == (
        "ort",
        "onnx",
        True,
    )
    assert (of_ort.model.precision, of_ort.model.cache) == ("bf16", False)
    assert of_eager.model.kernels == "measured"
    told = dataclasses.replace(measured, settings=settings).markdown()
    assert "ORT's engines with kernels=ort, attention=onnx, triton=on." in told
    assert "ORT's engines with" not in measured.markdown()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("attnetion=fused", "did you mean 'attention'?"),
        ("attention=fast", "choose from"),
        ("triton=maybe", "takes on or off"),
        ("cache=on", "ort_options has 'cache'"),
    ],
)
def test_options_that_are_none(options: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        bench.engines(**TINY, ort_options=options)


def test_it_leaves_the_process_as_it_was() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    bench.engines(**TINY, engines="eager", precisions="fp32")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder


def test_turns_are_shuffled_and_repeatable() -> None:
    keys = list(BenchSettings().cells)
    orders = list(interleaved.rounds(keys, 80))
    assert orders == list(interleaved.rounds(keys, 80))
    assert all(sorted(order) == sorted(keys) for order in orders)
    assert {order[0] for order in orders} == set(keys)
    assert {order[-1] for order in orders} == set(keys)


@pytest.mark.parametrize("rounds", [3, 6, 11])
def test_interval_of_a_ratio_contains_it_as_often_as_it_says(rounds: int) -> None:
    """98% of 4000 intervals, within three standard errors; noise that both share has no effect."""
    made = random.Random(rounds)
    inside = 0
    for _ in range(4000):
        shared = [math.exp(made.gauss(0, 0.5)) for _ in range(rounds)]
        ours, theirs = ([s * math.exp(made.gauss(0, 0.05)) for s in shared] for _ in range(2))
        low, high = interleaved.ratio_interval(
            (0.9 * a, b) for a, b in zip(ours, theirs, strict=True)
        )
        inside += low <= 0.9 <= high
    assert inside / 4000 == pytest.approx(0.98, abs=0.007)


def test_interval_needs_three_rounds() -> None:
    assert interleaved.ratio_interval([(1.0, 2.0)] * 2) == (0.0, math.inf)
    assert interleaved.ratio_interval([(1.0, 2.0)] * 3) == pytest.approx((0.5, 0.5))
    # exp(-0.1 +- 6.965 * 0.1 / sqrt(3)), by the t table for two degrees of freedom
    pairs = [(math.exp(log), 1.0) for log in (-0.2, -0.1, 0.0)]
    assert interleaved.ratio_interval(pairs) == pytest.approx((0.6052, 1.3528), abs=1e-4)


def test_all_train_from_the_same_weights_and_keep_them() -> None:
    race = timing.Race(MODEL, BenchSettings(**TINY, engines="eager"), "cpu")
    race.run()
    original, _ = models.build(MODEL, quick=True)
    assert len(race.lanes) == 2
    for lane in race.lanes.values():
        trained = lane.stepper.state_dict()
        assert trained["optimizer"]["state"], "the optimizer made no step"
        for name, tensor in original.state_dict().items():
            assert torch.equal(trained["model"][name], tensor), name
    race.close()


@pytest.mark.parametrize("name", models.MODELS)
def test_models_have_dropout_and_torchs_attention(name: str) -> None:
    model, batch = models.build(name, quick=True)
    assert model.training
    if name not in ("resnet-18", "mobilenet-v2", "lstm-256"):  # without attention
        assert model.config._attn_implementation == "sdpa"
    if name != "resnet-18":
        dropouts = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
        dropouts |= {m.dropout for m in model.modules() if isinstance(m, nn.LSTM)}
        assert dropouts == {0.1}
    if name == "lstm-256":  # without a configuration
        assert model(**batch).ndim == 0
        return
    before = model.config.to_dict()
    assert model(**batch).loss.ndim == 0
    assert model.config.to_dict() == before, "forward edits the model: it is compiled twice"


@pytest.mark.parametrize(
    ("name", "millions"),
    [("bert-768", 52.8), ("bert-256/8x64", 11.2), ("gpt2-768", 67.7), ("t5-small", 60.5),
     ("vit-small", 21.7), ("resnet-18", 11.2), ("mobilenet-v2", 2.2), ("lstm-256", 6.2)],
)  # fmt: skip
def test_models_have_the_size_that_they_say(name: str, millions: float) -> None:
    model, _ = models.build(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


# ---- configurations that cannot run --------------------------------------------------------------


def test_a_cell_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that cannot run gives its reason: no compiler, or an option that ORT refuses here."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    result = bench.engines(**TINY, precisions="fp32")
    eager, compiled, ort = (
        result.cell(MODEL, e, "fp32") for e in ("eager", "compile", "ortmodule")
    )
    assert eager is not None
    assert compiled is not None
    assert ort is not None
    assert len(eager.step_ms) == 3
    assert "C++ compiler" in (compiled.reason or "")
    assert ort.reason
    shown = result.markdown()
    assert f"(1) {compiled.reason}" in shown
    assert f"(2) {ort.reason}" in shown
    assert "| not run (2) |" in result.summary()


def test_a_cell_that_fails_later_leaves_the_others() -> None:
    """A cell that fails later leaves the others: a layer's shape changes after the first round."""
    race = timing.Race(MODEL, BenchSettings(**TINY, engines="eager"), "cpu")

    def listen(line: str) -> None:
        if "round 1 of" in line:
            broken: Any = race.lanes["eager", "bf16"].stepper
            broken._module.classifier = torch.nn.Linear(3, 2)

    token = progress.set(listen)
    race.run()
    progress.reset(token)
    others, failed = race.cells()
    assert len(others.step_ms) == 3
    assert "shapes cannot be multiplied" in (failed.reason or "")
    assert failed.step_ms == ()
    race.close()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--models", "bert-786"], "did you mean 'bert-768'?"),
        (["--engines", "eager,orrt"], "did you mean 'ort'?"),
        (["--precisions", "bf17"], "did you mean 'bf16'?"),
        (["--rounds", "0"], "must be at least 1"),
        (["--rounds", "many"], "takes a whole number"),
        (["--json", "no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_refusals(options: list[str], refused: str) -> None:
    answer = subprocess.run(command(*options), capture_output=True, text=True)
    assert answer.returncode == 2
    assert refused in answer.stderr
    assert "first step" not in answer.stderr


def test_refusals_in_python() -> None:
    with pytest.raises(ValueError, match="did you mean 'rounds'"):
        bench.engines(round=3)


# ---- the command ---------------------------------------------------------------------------------


def test_all_engines_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    options = ["--models", MODEL, "--precisions", "fp32", "--rounds", "2", "--json", str(file)]
    options += ["--profile"]
    answer = subprocess.run(command(*options), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "**Not a benchmark**" in answer.stdout
    result = EngineBench.from_dict(json.loads(file.read_text()))
    assert answer.stdout == result.markdown() + "\n"
    assert [cell.key for cell in result.cells] == [(e, "fp32") for e in ENGINES]
    for cell in result.cells:
        if cell.engine in ("eager", "compile") or NO_ORT is None:
            assert cell.reason is None
            assert len(cell.step_ms) == 2
            assert not result.suspect(cell)
    profiles = {each.engine: each for each in result.profiled(MODEL)}
    assert list(profiles) == [cell.engine for cell in result.cells if cell.reason is None]
    assert profiles["compile"].kind_ms[profiled.COMPILED] > 0


def test_interrupted() -> None:
    """Ctrl-C in a round prints the rounds before it, as JSON alone where JSON was requested."""
    options = ["--models", f"{MODEL},gpt2-768", "--engines", "eager", "--rounds", "100000"]
    with subprocess.Popen(
        command(*options, "--json", "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "round 3 of" in line:
                running.send_signal(signal.SIGINT)
                break
        printed, complaints = running.communicate(timeout=HANGS_S)
    assert running.returncode == 130
    assert "Traceback" not in complaints
    result = EngineBench.from_dict(json.loads(printed))
    assert result.interrupted
    assert {cell.model for cell in result.cells} == {MODEL}
    lengths = {len(cell.step_ms) for cell in result.cells}
    assert len(lengths) == 1
    assert min(lengths) >= 3
    assert "**Interrupted**" in result.markdown()
    assert "not reached" in result.markdown()


# ---- output --------------------------------------------------------------------------------------


def test_json_gives_back_the_same(measured: EngineBench) -> None:
    stored = json.loads(json.dumps(measured.as_dict()))
    again = EngineBench.from_dict(stored)
    assert again == measured
    assert again.markdown() == measured.markdown()
    derived = stored["cells"][1]["derived"]
    spread = measured.speed(measured.cells[1])
    assert spread is None or derived["speed"]["median"] == spread.median
    with pytest.raises(ValueError, match="format version 99"):
        EngineBench.from_dict(stored | {"form": 99})


def test_figures_by_hand(measured: EngineBench) -> None:
    """Rounds are compared one by one: a second round that is slow for all changes no speed."""
    first, second = measured.cells[0], measured.cells[2]
    one = dataclasses.replace(first, step_ms=(10.0, 30.0, 10.0), losses=(2.0, 2.0))
    other = dataclasses.replace(second, step_ms=(5.0, 15.0, 4.0), losses=(2.1, 2.3), reason=None)
    result = dataclasses.replace(measured, cells=(one, other))
    assert result.speed(other) == Spread(median=2.0, low=2.0, high=2.25)
    found = result.loss_difference(other)
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.error == pytest.approx(0.05)


def test_a_step_is_compared_with_the_machines_rates_round_by_round(measured: EngineBench) -> None:
    cell = dataclasses.replace(measured.cells[0], step_ms=(10.0, 30.0, 10.0))
    floor = Floor(
        MODEL,
        cell.precision,
        flops=4_000_000_000,
        moved_bytes=50_000_000,
        product_ms=(4.0, 12.0, 5.0),
        moving_ms=(0.5, 1.5, 0.5),
        optimizer_ms=(0.5, 1.5, 1.5),
    )
    result = dataclasses.replace(measured, cells=(cell,), floors=(floor,))
    assert floor.step_ms == (5.0, 15.0, 7.0)
    assert result.share(cell) == Spread(median=0.5, low=0.5, high=0.6)
    shown = result.summary()
    row = "4 GFLOP at 800 GFLOP/s: 5 ms | 0.05 GB at 100 GB/s: 0.5 ms | 1.5 ms | 7 ms |"
    assert row in shown
    assert "50% (50% to 60%)" in shown
    assert "Floor" not in dataclasses.replace(result, floors=()).summary()


def test_the_machine_is_measured_in_every_round(measured: EngineBench) -> None:
    assert [(each.model, each.precision) for each in measured.floors] == [
        (MODEL, "fp32"),
        (MODEL, "bf16"),
    ]
    for each in measured.floors:
        assert len(each.step_ms) == TINY["rounds"]
        assert all(ms > 0 for ms in (*each.product_ms, *each.moving_ms, *each.optimizer_ms))
    single, half = measured.floors
    assert (single.flops, single.moved_bytes) == (half.flops, 2 * half.moved_bytes)


def test_products_are_counted_by_what_enters_and_leaves_them() -> None:
    rows, model = 5, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    products = 8 * 16 + 16 * 4  # forward
    products += 16 * 4 + 16 * 4 + 8 * 16  # gradients of the second layer and of the first weight
    entering = 8 + 16 + 4 + 16  # input, ReLU's output, and gradients of output and of ReLU's input
    leaving = 16 + 4 + 16  # both outputs, and the gradient of the second layer's input
    assert roofline._counted(model, (torch.randn(rows, 8),)) == (
        2 * rows * products,
        rows * (entering + leaving),
    )


def test_products_are_counted_where_the_model_is() -> None:
    flops, _ = roofline._counted(nn.Linear(8, 4).to("meta"), (torch.randn(5, 8),))
    assert flops == 2 * (2 * 5 * 8 * 4)  # forward and the gradient of the weight


def test_attention_that_torchs_counter_leaves_out_is_counted() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            query = query * self.scale
            return nn.functional.scaled_dot_product_attention(query, query, query)

    flops, _ = roofline._counted(Attention(), (torch.randn(2, 3, 32, 16),))
    one = 2 * 2 * 3 * 32 * 32 * 16  # a product for all heads
    assert flops == 2 * one + 5 * one  # backward computes the scores again


def test_a_wrong_engine_shows(measured: EngineBench) -> None:
    right = next(cell for cell in measured.cells if cell.key == ("eager", "bf16"))
    for losses in (tuple(loss * 1.5 for loss in right.losses), (math.nan,) * len(right.losses)):
        wrong = dataclasses.replace(right, losses=losses)
        result = dataclasses.replace(measured, cells=(measured.cells[0], wrong))
        assert result.suspect(wrong)
        assert "**wrong?**" in result.summary()
        stored = json.dumps(result.as_dict(), allow_nan=False)
        assert EngineBench.from_dict(json.loads(stored)).suspect(wrong)
    assert Difference(0.05, error=0.01).within(1e-3)
    assert not Difference(0.07, error=0.01).within(1e-3)


def test_the_table_of_the_readme(measured: EngineBench, tmp_path: Path) -> None:
    file = tmp_path / "engines.json"
    refused = dataclasses.replace(measured.cells[1], reason="it is raining", step_ms=())
    result = whole(dataclasses.replace(measured, cells=(measured.cells[0], refused)))
    file.write_text(json.dumps(result.as_dict()))
    table = speed(file)
    versions = f"ortlab {ortlab.__version__}, Python 3."
    for shown in (models.MODELS[MODEL].about, "(1) it is raining", versions, measured.date):
        assert shown in table
    assert measured.machine.processor in table
    file.write_text(json.dumps(measured.as_dict()))
    with pytest.raises(ValueError, match="quick"):
        speed(file)


def test_a_busy_machine_is_told(measured: EngineBench) -> None:
    busy = dataclasses.replace(measured.machine, load=3.0)
    assert "**Busy machine**" in dataclasses.replace(measured, machine=busy).markdown()
    assert "**Busy machine**" not in whole(measured).markdown()


def test_the_machine() -> None:
    here = machine.machine("cpu")
    assert here.threads == torch.get_num_threads()
    assert here.cpus >= 1
    assert here.processor in str(here)


# ---- where a step goes ---------------------------------------------------------------------------


def test_profiles_add_up_to_a_step(measured: EngineBench) -> None:
    timed = [cell.key for cell in measured.cells if cell.step_ms]
    assert [(each.engine, each.precision) for each in measured.profiled(MODEL)] == timed
    for each in measured.profiles:
        parts = each.part_ms
        products = {op for op in each.operator_ms if profiled.kind_of(op) == "matrix products"}
        wanted = "addmm" if each.engine == "eager" else "matmul"
        assert any(wanted in op.lower() for op in products), products
        assert parts["matrix products"] > 0
        assert parts[OPTIMIZER] == each.optimizer_ms > 0
        operators_ms = sum(each.operator_ms.values())
        assert sum(each.kind_ms.values()) == pytest.approx(operators_ms)
        assert (each.around_ms > 0) == (AROUND in parts) == (each.engine == "ortmodule")
        passes_ms, told_ms = each.forward_ms + each.backward_ms, operators_ms + each.around_ms
        assert told_ms + parts[BETWEEN] == pytest.approx(max(passes_ms, told_ms))


def test_profiles_stand_side_by_side(measured: EngineBench) -> None:
    shown = measured.summary()
    columns = [f"{each.engine} {each.precision}" for each in measured.profiles]
    assert f"|  | {' | '.join(columns)} |" in shown
    assert "| matrix products | " in shown
    backward = " | ".join(f"{each.backward_ms:.3g}" for each in measured.profiles)
    assert f"| backward without profiler | {backward} |" in shown
    assert "- eager fp32: " in shown
    first, *rest = measured.profiles
    slowed = dataclasses.replace(first, forward_ms=0.0, backward_ms=0.0)
    assert slowed.step_ms == first.optimizer_ms
    told = dataclasses.replace(measured, profiles=(slowed, *rest)).summary()
    assert f"; the profiler makes the step {slowed.slowdown - 1:.0%} slower" in told
    assert "where a step goes" not in dataclasses.replace(measured, profiles=()).summary()
    picture = measured.picture(MODEL)
    assert all(f">{column}</text>" in picture for column in columns)
    assert ">matrix products</text>" in picture


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matrix products"),
        ("aten::baddbmm", "matrix products"),
        ("com.microsoft.FusedMatMul", "matrix products"),
        ("org.pytorch.aten.ortlab_kernels.matmul", "matrix products"),
        ("aten::mkldnn_convolution", "convolutions"),
        ("torch.convolution_backward", "convolutions"),
        ("aten::mkldnn_rnn_layer_backward", "recurrent layers"),
        ("torch.onednn_lstm_backward", "recurrent layers"),
        ("aten::_softmax_backward_data", "attention"),
        ("com.microsoft.SoftmaxGrad_13", "attention"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("LogSoftmax", "loss"),
        ("com.microsoft.SoftmaxCrossEntropyLossInternalGrad", "loss"),
        ("torch.nll_loss_backward", "loss"),
        ("torch.bernoulli_", "random draws"),
        ("aten::native_layer_norm_backward", "normalization"),
        ("com.microsoft.BiasGeluGrad_dX", "activations"),
        ("torch.embedding_dense_backward", "embeddings and selection"),
        ("ReduceSum", "reductions"),
        ("Mul", "elementwise"),
        ("aten::copy_", "copies and layout"),
        ("Reshape", "copies and layout"),
        (profiled.COMPILED, profiled.COMPILED),
        ("aten::fft_r2c", profiled.OTHERS),
    ],
)
def test_operators_have_kinds(name: str, kind: str) -> None:
    assert profiled.kind_of(name) == kind


def test_the_profiler_counts_what_computes() -> None:
    assert profiled._operator("## Call CompiledFxGraph fab12 ##") == profiled.COMPILED
    assert profiled._operator("aten::mm") == "aten::mm"
    assert profiled._operator("autograd::engine::evaluate_function: AddmmBackward0") is None
    assert profiled._operator("Torch-Compiled Region: 0/0") is None
