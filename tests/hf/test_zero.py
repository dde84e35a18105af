"""Tests of `zero_stage` of `ortlab.hf.Trainer`: two processes of torchrun against a single one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, TrainingArguments

from ortlab import hf
from ortlab.hf import zero
from tests.browser.lab import NEEDS_ORT
from tests.support import hf_ranks, tiny

pytestmark = pytest.mark.usefixtures("one_thread", "threads_end")
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
TOLERANCE = 1e-4
SHARED = ("ort:2", "ortmodule:1", "ortmodule:2", "eager:3")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train in two processes; return the folder of their saved models and the results of each."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *(str(Path(hf_ranks.__file__)), str(folder), "eager:0", *SHARED),
        ],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@NEEDS_ORT
@NEEDS_DEEPSPEED
def test_two_processes_train_as_one(
    tmp_path: Path, ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    """Losses and saved weights of each stage are those of one process with the same batches.

    The loss of this model ignores the number of samples of all processes; transformers alone would
    train on twice the loss.
    """
    folder, found = ranks
    one = hf_ranks.trained(tmp_path, engine="eager")
    weights = load_file(tmp_path / "model.safetensors")
    for each in ("eager:0", *SHARED):
        engine, _, stage = each.partition(":")
        for rank in found:
            assert rank[each]["losses"] == pytest.approx(one["losses"], rel=TOLERANCE), each
        saved = load_file(folder / f"{engine}-{stage}" / "model.safetensors")
        assert saved.keys() == weights.keys()
        for name, value in weights.items():
            # For a bias that no output depends on (attention's keys), Adam's steps are noise.
            if not name.endswith("key.bias"):
                torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)
        kept = found[0][each]["settings"]
        assert (kept["engine"], kept["zero_stage"], kept["workers"]) == (engine, int(stage), 2)
        assert found[1][each]["settings"] is None, "the first process tells"
        losses = zip(found[0][each]["losses"], one["losses"], strict=True)
        far = max(abs(a - b) / b for a, b in losses)
        share = found[0][each]["bytes"] / one["bytes"]
        print(f"{each}: 10 losses within {far:.1e}; a process has {share:.3f} of the state")
    AutoModelForSequenceClassification.from_pretrained(folder / "eager-3")


@NEEDS_ORT
@NEEDS_DEEPSPEED
def test_each_process_has_its_half_of_the_state(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, found = ranks
    whole = found[0]["eager:0"]["bytes"]
    assert whole == 8 * sum(p.numel() for p in hf_ranks.bert().parameters())
    for each in SHARED:
        shares = [rank[each]["bytes"] / whole for rank in found]
        assert shares == pytest.approx([0.5, 0.5], rel=0.01), each
        assert {rank[each]["optimizer"] for rank in found} == {"DeepSpeedOptimizerWrapper"}


@NEEDS_ORT
@NEEDS_DEEPSPEED
def test_what_does_not_go_with_it_is_refused(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, found = ranks
    for rank in found:
        whole, compiled, halves, optimizer, twice, best, resumed = rank["refused"]
        assert "choose zero_stage=2, or engine='eager'" in whole
        assert "engine='compile' is not tested" in compiled
        assert "bf16=True" in halves
        assert "Adafactor" in optimizer
        assert "both configure DeepSpeed" in twice
        assert "load_best_model_at_end=True: DeepSpeed unpickles" in best
        assert "resume_from_checkpoint: DeepSpeed unpickles" in resumed


def test_one_process_is_told_how_to_be_several(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 2 train.py; .*%ort finetune"):
        hf.Trainer(tiny.bert(), args, zero_stage=2, engine="eager")
    with pytest.raises(
        ValueError, match="zero_stage=4 must be 0 to 3: 1 partitions the optimizer state"
    ):
        hf.Trainer(tiny.bert(), args, zero_stage=4, engine="eager")
    hf.Trainer(tiny.bert(), args, zero_stage=0, engine="eager")


@pytest.mark.parametrize("stage", [-1, 1.5, "2", True, None])
def test_a_stage_is_a_number_of_four(stage: Any) -> None:
    with pytest.raises(ValueError, match="zero_stage="):
        zero.check_stage(stage)
