"""Tests of training plans: the search, what it refuses, what it shows and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ortlab
from ortlab.engines import compatibility
from ortlab.plan import layouts
from ortlab.plan.cost import rank_memory, step_time
from ortlab.plan.hardware import CATALOG
from ortlab.plan.transformer import Transformer, transformer
from ortlab.settings import FinetuneSettings, PlanSettings
from ortlab.settings.choices import GPUS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def test_the_best_of_all_layouts() -> None:
    """The search finds what a plain loop over all layouts finds."""
    plan = ortlab.training_plan("7B", gpus=16, batch=64, precision="bf16")
    hardware, best = plan.hardware, plan.best
    assert best is not None
    room = hardware.memory * 0.9
    chosen = PlanSettings.of(gpus=16, batch=64, precision="bf16")
    every = list(layouts._layouts(plan.model, chosen, hardware, 16, 64))
    assert len({(one.tensor, one.pipeline, one.zero, one.micro_batch) for one in every}) > 50
    fitting = [one for one in every if rank_memory(plan.model, one).total <= room]
    assert 0 < len(fitting) < len(every)
    fastest = min(step_time(plan.model, one, hardware).total for one in fitting)
    assert best.seconds == pytest.approx(fastest)
    parts = [one for one in every if one.interleave > 1]
    assert parts
    assert all(one.micro_batches % one.pipeline == 0 for one in parts)
    seconds = [one.seconds for one in plan.shown]
    assert seconds == sorted(seconds)
    assert len(seconds) == 10
    for one in plan.shown:
        assert one.memory.total <= room
        assert (one.layout.gpus, one.layout.batch) == (16, 64)


@pytest.mark.parametrize(
    ("fixed", "value"),
    [("tensor", 4), ("pipeline", 4), ("zero", 1), ("micro_batch", 2), ("recompute", "full")],
)
def test_a_part_that_is_given(fixed: str, value: Any) -> None:
    plan = ortlab.training_plan("7B", gpus=32, **{fixed: value})  # type: ignore[misc]
    assert {getattr(one.layout, fixed) for one in plan.shown} == {value}


def test_attention_that_stores_scores() -> None:
    plan = ortlab.training_plan("7B", gpus=32, recompute="selective", attention_scores=True)
    assert plan.best is not None
    assert not plan.best.layout.fused_attention
    assert plan.best.layout.recompute == "selective"


def test_numbers_of_the_user() -> None:
    given = {"memory": "40GiB", "tflops": 100.0, "link": 50.0, "network": 5.0}
    plan = ortlab.training_plan("7B", gpus=8, node=4, efficiency=0.3, **given)  # type: ignore[arg-type]
    gpu = plan.hardware
    assert (gpu.memory, gpu.node, gpu.efficiency) == (40 * 2**30, 4, 0.3)
    assert (gpu.flops["bf16"], gpu.link, gpu.network) == (100e12, 50e9, 5e9)
    assert gpu.flops["fp32"] == CATALOG["a100-80gb"].flops["fp32"]
    assert set(CATALOG) == set(GPUS)
    assert all(one.source.startswith("https://") for one in CATALOG.values())


def test_days_and_cost() -> None:
    plan = ortlab.training_plan("7B", gpus=64, batch=512, tokens="300B", price=2.5)
    best = plan.best
    assert best is not None
    assert plan.steps == -(-300_000_000_000 // (512 * 2048))
    days = plan.days(best)
    assert days == pytest.approx(plan.steps * best.seconds / 86400)
    assert f"{24 * 64 * days:,.0f}" in repr(plan.table())
    assert f"{2.5 * 24 * 64 * days:,.0f}" in repr(plan.table())
    bare = repr(ortlab.training_plan("7B", gpus=64))
    assert "GPU hours" not in bare
    assert "cost" not in repr(ortlab.training_plan("7B", gpus=64, tokens="1B"))


def test_the_fewest_gpus_within_days() -> None:
    plan = ortlab.training_plan("7B", tokens="300B", days=30)
    best = plan.best
    assert best is not None
    assert (plan.days(best) or 0) <= 30
    fewer = ortlab.training_plan("7B", gpus=plan.gpus // 2, tokens="300B", days=30)
    assert fewer.best is not None
    assert (fewer.days(fewer.best) or 0) > 30
    assert "not within 30: use more GPUs" in repr(fewer)
    # 16 GPUs would do without any traffic, but they need a little longer.
    sixteen = ortlab.training_plan("7B", gpus=16, tokens="300B")
    assert sixteen.best is not None
    almost = 0.999 * (sixteen.days(sixteen.best) or 0)
    assert ortlab.training_plan("7B", tokens="300B", days=almost).gpus == 24


def test_what_is_shown() -> None:
    plan = ortlab.training_plan("175B", gpus=1024, batch=1536)
    told = repr(plan)
    assert "175B parameters, 1024 a100-80gb, 1536 samples of 2048 tokens a step" in told
    assert "assumed shape, as GPT-3's: 96 layers, hidden size 12288, 96 heads" in told
    assert "activations" in plan.bars()
    assert plan.picture().count("tensor ") == 10
    assert "gathered weights" not in plan.bars()
    html = plan._repr_html_()
    assert "<img" in html
    assert html.count("<table>") == 2
    rows = list(plan.others())
    shown = {(one.layout.tensor, one.layout.pipeline) for one in plan.shown}
    assert shown.isdisjoint({(int(row[0]), int(row[1])) for row in rows if row[1]})
    assert any("too much" in row[2] for row in rows)


def test_where_nothing_fits() -> None:
    plan = ortlab.training_plan("175B", gpus=8)
    assert plan.best is None
    assert repr(plan).startswith("nothing fits: tensor ")
    assert plan.bars() == ""
    with pytest.raises(ValueError, match="nothing fits"):
        plan.settings()
    with pytest.raises(ValueError, match="nothing fits"):
        plan.write("nowhere")
    assert "<img" not in plan._repr_html_()


def test_a_degree_that_the_heads_lack() -> None:
    plan = ortlab.training_plan("1B", gpus=8, layers=24, hidden=1728, heads=27, intermediate=6912)
    assert ("8", "", "27 heads are not a multiple of 8") in list(plan.others())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": 13}, "gpus=13 does not fill nodes of 8; the nearest number is gpus=16"),
        ({"gpus": 9, "node": 4}, "gpus=9 does not fill nodes of 4; the nearest number is gpus=8"),
        ({"tensor": 5}, "32 heads are not a multiple of 5; the nearest degree is tensor=4"),
        ({"pipeline": 7}, "32 layers cannot be split evenly .* the nearest number is pipeline=8"),
        ({"gpus": 8, "tensor": 8, "pipeline": 2}, "tensor . pipeline = 16; .* is gpus=16"),
        ({"batch": 100, "tensor": 1, "pipeline": 1}, "batch=100 .*; the nearest is batch=128"),
        ({"gpus": 8, "tensor": 8, "zero": 1}, "zero=1 shards across replicas, .* is gpus=16"),
        ({"batch": 4, "micro_batch": 3}, "the nearest is batch=3"),
        ({"zero": 2, "pipeline": 2}, "zero=2 with pipeline=2: .*; choose zero=1, or pipeline=1"),
        ({"heads": 30, "layers": 32, "hidden": 4096}, "the nearest number of heads is 32"),
        ({"heads": 32, "layers": 32}, "there is no hidden; give layers, hidden and heads"),
        ({"heads": 32, "layers": 3, "hidden": 4096}, "7B parameters, but layers=3, .* make 0.8"),
        ({"hardware": "v100-32gb", "precision": "bf16"}, "computes in fp16, fp32; choose one"),
        ({"gpus": None}, "give gpus, or tokens and days"),
        ({"tokens": "many"}, "'many' is not a number of tokens"),
        ({"hardware": "h100"}, "choose from .*did you mean 'h100-80gb'"),
        ({"memory": "some"}, "'some' is not a memory size"),
        ({"kv_heads": 5}, "heads=32 is not a multiple of kv_heads=5; the nearest is kv_heads=4"),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ortlab.training_plan("7B", **{"gpus": 64, **settings})
    assert len(str(raised.value)) < 250
    assert "\n" not in str(raised.value)


def test_a_batch_that_is_not_given() -> None:
    """It has a size as GPT-3's, which GPUs and micro-batches divide."""
    for gpus, micro in ((64, 1), (24, 1), (8, 7), (24, 5)):
        plan = ortlab.training_plan("7B", gpus=gpus, micro_batch=micro)
        assert plan.best is not None
        assert plan.batch * 2048 == pytest.approx(2**21, rel=0.05)
    assert ortlab.training_plan("175B", gpus=1024).batch == 2048
    assert ortlab.training_plan("350M", gpus=8, sequence=1024).batch == 512


def test_what_a_message_names_works() -> None:
    assert ortlab.training_plan("7B", gpus=16).best is not None
    assert ortlab.training_plan("7B", gpus=64, tensor=4).best is not None
    assert ortlab.training_plan("7B", gpus=64, pipeline=8).best is not None
    fixed = ortlab.training_plan("7B", gpus=64, batch=128, tensor=1, pipeline=1)
    assert fixed.best is not None


def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    """Llama 3 8B has 8,030,261,248 parameters."""
    shape = transformer(LLAMA, {})
    assert shape.parameters == 8_030_261_248
    assert layouts.tensor_degrees(shape) == [1, 2, 4, 8]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert transformer(str(file), {}) == transformer(str(tmp_path), {}) == shape
    assert transformer(LLAMA, {"sequence": 1024}).sequence == 1024

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return LLAMA

    assert transformer(Config(), {}) == shape
    plan = ortlab.training_plan(LLAMA, gpus=64, hardware="h100-80gb", sequence=4096)
    assert plan.best is not None


def test_gpt2_s_config() -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}
    shape = transformer({**config, "vocab_size": 50257, "n_positions": 1024}, {})
    assert shape.parameters == 124_439_808


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts=8: mixtures of experts"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoders are not planned yet"),
        ({"model_type": "llama"}, "the config has no layers"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden='wide' in the config is not a whole number"),
        ({**LLAMA, "num_attention_heads": 30}, "hidden=4096 is not a multiple of heads=30"),
        ("none.json", "none.json cannot be read .*; name a file"),
        ("-1", "'-1' is not a number of parameters"),
        (object(), "object has no config of Hugging Face's transformers"),
    ],
)
def test_models_that_are_none(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ortlab.training_plan(model, gpus=8)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, message in (("{", "is not a JSON file"), ("[]", "is not a config")):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            ortlab.training_plan(str(file), gpus=8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"zero": 2, "micro_batch": 2, "recompute": "none"},
            {"zero_stage": 2, "param_dtype": "bf16", "precision": "bf16", "engine": "eager"},
        ),
        ({"zero": 0, "recompute": "full"}, {"engine": "ort", "recompute": "layers"}),
        ({"tensor": 2, "zero": 0}, {"tensor_parallel": 2, "engine": "eager"}),
        ({"pipeline": 2, "zero": 0, "recompute": "none"}, {"pipeline_stages": 2}),
    ],
)
def test_settings_that_finetune_takes(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = ortlab.training_plan("1B", gpus=8, batch=64, trainer="ortlab", tokens="1B", **settings)
    found = plan.settings()
    assert plan.best is not None
    layout = plan.best.layout
    assert {name: found[name] for name in expected} == expected
    assert found["max_steps"] == plan.steps
    assert found["workers"] == 8
    # All replicas' samples of a micro-batch, times the micro-batches, is the batch.
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 64
    assert found["batch_size"] == layout.micro_batch * layout.data
    chosen = FinetuneSettings.of(found)
    assert compatibility.ranks_conflict(chosen, 8, elsewhere=True) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor": 2, "pipeline": 2}, "interleaved pipelines run on CPUs"),
        (
            {"tensor": 2, "micro_batch": 16, "pipeline": 1, "zero": 0},
            "does not share layers by tokens",
        ),
        ({"zero": 1, "tensor": 2}, "param_dtype='bf16'"),
        ({"zero": 1, "tensor": 1, "pipeline": 1}, "accumulates gradients in bf16"),
        ({"recompute": "selective", "attention_scores": True}, "recomputes whole layers only"),
    ],
)
def test_settings_that_finetune_does_not_take(settings: dict[str, Any], reason: str) -> None:
    plan = ortlab.training_plan("1B", gpus=8, batch=64, **settings)
    with pytest.raises(ValueError, match=f"finetune cannot train this layout: .*({reason})") as no:
        plan.settings()
    assert "plan with trainer='ortlab'" in str(no.value)
    assert "\n" not in str(no.value)


def test_ortlab_s_layouts_can_be_trained() -> None:
    plan = ortlab.training_plan("1B", gpus=16, batch=64, trainer="ortlab")
    assert len(plan.shown) == 10
    for one in plan.shown:
        assert plan._conflict(one) is None
    both = ortlab.training_plan("1B", gpus=16, batch=64, trainer="ortlab", tensor=2, pipeline=2)
    assert both.settings()["tensor_parallel"] == both.settings()["pipeline_stages"] == 2


def test_launch_files_for_ortlab(tmp_path: Path) -> None:
    plan = ortlab.training_plan("1B", gpus=16, batch=64, trainer="ortlab", zero=1)
    paths = plan.write(tmp_path / "job")
    assert [path.name for path in paths] == ["launch.sh", "job.sbatch", "settings.json"]
    launch, job, saved = (path.read_text() for path in paths)
    assert json.loads(saved) == plan.settings()
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in launch
    assert launch.endswith(" train.py\n")
    assert "ortlab.script cannot write train.py: param_dtype='bf16'" in launch
    assert "#SBATCH --nodes=2\n" in job
    for path in paths[:2]:
        assert subprocess.run(["bash", "-n", path]).returncode == 0
    with pytest.raises(ValueError, match=r"launch.sh already exists; name another folder"):
        plan.write(tmp_path / "job")
    plain = ortlab.training_plan(
        "1B", gpus=4, batch=64, trainer="ortlab", zero=0, tensor=1, pipeline=1, recompute="none"
    )
    launch = plain.write(tmp_path / "plain")[0].read_text()
    assert "train.py: ortlab.script(model, data, to='.', **settings) writes it." in launch


def test_launch_files_for_megatron(tmp_path: Path) -> None:
    plan = ortlab.training_plan(LLAMA, gpus=32, batch=64, tensor=2, pipeline=2, tokens="1B")
    launch, _, saved = plan.write(tmp_path)
    text = launch.read_text()
    assert "# ortlab cannot train this layout: its interleaved pipelines run on CPUs" in text
    assert "not tested here" in text
    assert subprocess.run(["bash", "-n", launch]).returncode == 0
    best = plan.best
    assert best is not None
    flags = json.loads(saved.read_text())["megatron"]
    for flag in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        f"--micro-batch-size {best.layout.micro_batch}",
        "--global-batch-size 64",
        "--group-query-attention --num-query-groups 8",
        "--bf16",
        "--sequence-parallel",
        f"--train-iters {plan.steps}",
    ):
        assert flag in flags
        assert flag in text


def test_shapes_of_layers_that_stages_do_not_divide() -> None:
    assert layouts.pipeline_degrees(Transformer(70, 14336, 112, 2048)) == sorted(
        {1, 2, 5, 7, 10, 14, 35, 70} | {1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36}
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ortlab.cli", "plan", *words], capture_output=True, text=True
    )


def test_the_command(tmp_path: Path) -> None:
    answer = run("1B", "--gpus", "8", "--tokens", "10B", "--script", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert "GPU hours" in answer.stdout
    assert "a GPU has" in answer.stdout
    assert f"wrote {tmp_path / 'launch.sh'}" in answer.stdout
    again = run("1B", "--gpus", "8", "--script", str(tmp_path))
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    refused = run("1B", "--gpus", "13")
    assert refused.returncode == 1
    assert refused.stderr.startswith("ortlab plan: gpus=13 does not fill nodes of 8")
    assert refused.stderr.count("\n") == 1
    assert run("175B", "--gpus", "8").returncode == 1
    assert "name a model" in run().stderr


def test_the_command_for_published_runs() -> None:
    answer = run("--published")
    assert answer.returncode == 0
    assert "Llama 3 405B, 16384 GPUs" in answer.stdout


def test_a_plan_loads_no_torch() -> None:
    code = (
        "import sys; from ortlab import cli; cli.main(['plan', '7B', '--gpus', '16']);"
        "import ortlab; p = ortlab.training_plan('7B', gpus=16, trainer='ortlab'); p.settings();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
