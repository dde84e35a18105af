"""Tests of the tutorials, each executed completely in its own kernel."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.headless import NOTEBOOKS, Executed, execute


@functools.cache
def executed(stem: str) -> Executed:
    (path,) = (path for path in NOTEBOOKS if path.stem == stem)
    return execute(path)


def number(notebook: Executed, pattern: str) -> float:
    """Return the number that the first group of `pattern` matches in the outputs."""
    found = re.search(pattern, notebook.printed(), re.MULTILINE)
    assert found, f"no output matches {pattern!r}"
    return float(found.group(1))


LONG = (
    # What these two train, tests/engines/distributed and tests/hf train too.
    *("05_zero", "10_hugging_face_trainer"),
    *("07_gpt2_code_completion", "08_question_answering", "09_bert_pretraining"),
)
"""Tutorials that train for a minute or more, for the nightly tests."""


def tutorials() -> list[object]:
    """Return all tutorials as parameters; the long ones run only at night."""
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LONG else [])
        for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", tutorials())
def test_runs_whole(path: Path, record_property: Callable[[str, object], None]) -> None:
    """No cell fails and every run finishes on the engine it requested."""
    notebook = executed(path.stem)
    assert notebook.error is None
    assert [run["state"] for run in notebook.runs] == ["finished"] * len(notebook.runs)
    assert len(notebook.pictures()) >= len(notebook.runs), "a run left no static picture"
    assert "Traceback" not in notebook.printed()
    record_property("tutorial", f"{path.stem}: {notebook.seconds:.0f} s")


def test_first_run_shows_the_same_losses() -> None:
    notebook = executed("01_first_run")
    assert number(notebook, r"largest difference: (\S+)") < 1e-4
    assert number(notebook, r"accuracy: eager torch (\S+)%") > 90
    assert number(notebook, r"accuracy: .* ONNX Runtime (\S+)%") > 90
    eager, ort = notebook.runs
    assert eager["steps"] == ort["steps"] == 400
    assert eager["loss"] == pytest.approx(ort["loss"], abs=1e-4)


def test_finetune_bert_beats_the_majority() -> None:
    notebook = executed("02_finetune_bert")
    majority = number(notebook, r"majority: (\S+)%")
    before = number(notebook, r"before: (\S+)%")
    after = number(notebook, r"after: (\S+)%")
    assert after > majority + 20
    assert after > before + 20
    (run,) = notebook.runs
    assert run["steps"] == 60


def test_graphs_answers_its_questions() -> None:
    """The statements of the text about the figures hold; the saved page has all five pictures."""
    notebook = executed("03_graphs")
    printed = notebook.printed()
    products = dict(re.findall(r"^(fc\d) +Gemm +(.*)$", printed, re.MULTILINE))
    # On engine ort, a sum is a product with ones, or a ReduceSum.
    counts = {
        name: ops.count("Gemm") - ops.count("ConstantOfShape") for name, ops in products.items()
    }
    assert counts["fc2"] == counts["fc1"] + 1
    assert re.search(r"^forward +forward +.*Gelu", printed, re.MULTILINE)
    assert re.search(r"^gradient +backward +.*(BiasGeluGrad_dX|Erf)", printed, re.MULTILINE)
    assert re.search(r"^com\.microsoft\.FusedMatMul ", printed, re.MULTILINE)
    peaks = {
        (int(batch), int(seq)): (int(mib), int(percent))
        for batch, seq, mib, percent in re.findall(
            r"batch +(\d+), seq (\d+): +(\d+) MiB, (\d+)%", printed
        )
    }
    assert 1.5 < peaks[32, 128][0] / peaks[16, 128][0] < 2
    assert peaks[32, 512][0] / peaks[32, 256][0] > 2 * 1.1
    assert peaks[32, 512][1] > peaks[32, 128][1] + 10
    # The plan allows for what the process takes beyond the buffers: 23 on engine ort.
    assert number(notebook, r"batch=(\d+) is the largest that fits into 2GiB") > 16
    assert "BertForSequenceClassification: a step without its optimizer takes" in printed
    pages = (
        output.get("data", {}).get("text/html", "")
        for cell in notebook.notebook.cells
        for output in cell.get("outputs", ())
    )
    assert sum(page.count("<img") for page in pages) == 5


def test_turn_the_knobs_changes_a_run_and_settles_on_settings() -> None:
    notebook = executed("04_turn_the_knobs")
    printed = notebook.printed()
    changed = re.findall(r"^after step (\d+): (.*), [\d.]+ s$", printed, re.MULTILINE)
    *others, last = [text for _, text in changed]
    assert others == [
        "recompute=layers (was off)",
        "precision=bf16 (was fp32), recompute=off (was layers)",
        "precision=fp32 (was bf16), learning_rate=0.0001 (was 0.0005)",
    ]
    assert re.fullmatch(r"engine=eager \(was ort(module)?\)", last)
    assert sorted({int(step) for step, _ in changed}) == [int(step) for step, _ in changed]
    run, refused, chosen = notebook.runs
    assert (run["steps"], refused["steps"], chosen["steps"]) == (140, 20, 20)
    assert "optimizer='sgd' cannot be applied" in printed
    batches = [int(size) for size in re.findall(r"^recompute \w+: batch (\d+) fits", printed, re.M)]
    assert batches[1] >= 1.5 * batches[0]
    assert re.search(r"^(eager|ort) fp32 .*\n(ort|eager) ", printed, re.MULTILINE)
    assert re.search(r"^\{'engine': '\w+', 'precision': '\w+', 'batch_size'", printed, re.MULTILINE)


@pytest.mark.nightly
def test_zero_trains_the_same_and_holds_what_the_paper_says() -> None:
    """Losses are those of one process at each stage and after changes; 16 bytes a parameter."""
    notebook = executed("05_zero")
    printed = notebook.printed()
    assert number(notebook, r"two workers beside one process: (\S+)") < 1e-5
    assert number(notebook, r"largest difference of a loss: (\S+)") < 1e-5
    parameters = int("".join(re.findall(r"^(\d+),(\d+),(\d+) parameters$", printed, re.M)[0]))
    assert parameters > 20e6
    stages = re.findall(
        r"^stage (\d): (\d+) and (\d+) MiB a worker, losses differ by (\S+)$", printed, re.M
    )
    for (stage, *sizes, differs), each in zip(stages, (16, 12, 10, 8), strict=True):
        assert float(differs) < 1e-5, stage
        least, most = sorted(int(size) * 2**20 / parameters for size in sizes)
        assert least == pytest.approx(each, rel=0.05)
        # The gradient of the word embeddings, half of all gradients, is whole until it has been
        # reduced.
        assert most == pytest.approx(each, rel=0.05) or (stage == "2" and most < 12 * 1.05)
    changed = re.findall(r"^after step \d+: (.*), [\d.]+ s$", printed, re.MULTILINE)
    assert changed == [
        "workers=2 (was 1), zero_stage=1 (was 0)",
        "workers=1 (was 2), zero_stage=0 (was 1)",
    ]
    assert "stage 1 is the cheapest that fits into 40.00 GiB" in printed
    assert "workers stopped" in printed


def test_orttrainer_is_plain_torch_and_the_model_leaves() -> None:
    notebook = executed("06_orttrainer_and_deploy")
    printed = notebook.printed()
    assert number(notebook, r"largest difference of a loss: (\S+)") < 1e-4
    assert "{'note': 'half-way'}" in printed
    assert "the same losses: True" in printed
    assert re.search(r"^ort_fused fp32 ", printed, re.MULTILINE)
    tracked, run = notebook.runs
    assert tracked["steps"] == 300
    assert "ort_fused" in run["title"]
    accuracy = [float(each) for each in re.findall(r"(0\.\d+) \(0\.\d+\)$", printed, re.MULTILINE)]
    assert len(accuracy) == 2
    assert min(accuracy) > 0.9
    steps = [float(each) for each in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
    assert len(steps) == 5
    assert max(steps) < 0.5, "the weights are the trained ones"


@pytest.mark.nightly
def test_gpt2_completes_code_of_files_that_it_has_not_seen() -> None:
    notebook = executed("07_gpt2_code_completion")
    assert number(notebook, r"before: next token (\S+)%") < 5
    assert number(notebook, r"before: .*whole name (\S+)%") == 0
    assert number(notebook, r"after: next token (\S+)%") > 17
    assert number(notebook, r"after: .*whole name (\S+)%") >= 3
    assert number(notebook, r"before, (\S+) after") < 4.2
    (run,) = notebook.runs
    assert run["steps"] == 600


@pytest.mark.nightly
def test_question_answering_is_as_good_in_mixed_precision() -> None:
    notebook = executed("08_question_answering")
    assert number(notebook, r"before: .*F1 (\S+)$") < 25
    rows = re.findall(r"^(fp32|bf16) +(\S+) +(\S+) +(\S+)$", notebook.printed(), re.MULTILINE)
    assert [name for name, *_ in rows] == ["fp32", "bf16"]
    for name, exact, f1, rate in rows:
        assert float(exact) > 70, name
        assert float(f1) > 75, name
        assert float(rate) > 0, name
    assert [run["steps"] for run in notebook.runs] == [130, 130]


@pytest.mark.nightly
def test_bert_learns_in_two_phases_and_jumps_between_them() -> None:
    notebook = executed("09_bert_pretraining")
    assert number(notebook, r"before: (\S+)% in short texts") < 5
    assert number(notebook, r"after phase 1: (\S+)% in short texts") > 30, "frequency alone has 14"
    assert number(notebook, r"after phase 2: .* (\S+)% in long ones") > 30
    assert number(notebook, r"after phase 2: (\S+)% in short texts") > 30, "phase 1 forgotten"
    before = number(notebook, r"^the jump: (\S+) ->")
    jumped = number(notebook, r"^the jump: .* -> (\S+),")
    assert before + 0.3 < jumped < 3.3, "it jumps, and does not begin again"
    assert number(notebook, r"^the jump: .* at the end (\S+)$") < jumped - 0.3
    first, second = notebook.runs
    assert (first["steps"], second["steps"]) == (900, 300)


def written(folder: Path, *sources: str) -> Path:
    """Write a notebook with these cells and return its path."""
    path = folder / "written.ipynb"
    blank: dict[str, object] = {
        "cell_type": "code",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    cells = [blank | {"id": f"cell-{i}", "source": source} for i, source in enumerate(sources)]
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def test_a_failed_cell_fails_the_notebook(tmp_path: Path) -> None:
    """A failed cell fails the notebook and the headless demo; earlier output is kept."""
    notebook = execute(written(tmp_path, "print('so far')", "1 / 0", "print(2)"))
    assert notebook.failed
    assert "ZeroDivisionError" in str(notebook.error)
    assert notebook.printed().startswith("so far\n")


def test_a_dead_kernel_fails_the_notebook(tmp_path: Path) -> None:
    notebook = execute(written(tmp_path, "print('so far')", "import os; os._exit(1)"))
    assert notebook.failed
    assert "died" in str(notebook.error)


def test_a_failed_run_fails_the_notebook(tmp_path: Path) -> None:
    """A failed run fails the notebook, even when no cell waits for it."""
    notebook = execute(
        written(
            tmp_path,
            "import torch, ortlab\n"
            "from torch.utils.data import TensorDataset\n"
            "model = torch.nn.Linear(2, 1)\n"
            "data = TensorDataset(torch.full((8, 2), float('nan')), torch.ones(8, 1))",
            "run = ortlab.finetune(model, data, loss='mse', engine='eager')\nrun.wait_over(60)",
        )
    )
    assert notebook.error is None
    assert notebook.failed
    assert "NaN" in str(notebook.runs[0]["error"])


@pytest.mark.nightly
def test_hugging_faces_trainer_learns_what_eager_torch_does() -> None:
    notebook = executed("10_hugging_face_trainer")
    assert number(notebook, r"largest relative difference: (\S+)") < 1e-4
    assert number(notebook, r"majority: (\S+)%") + 15 < number(notebook, r"after 40: (\S+)%")
    assert number(notebook, r"plain transformers beside the wrapped model's: (\S+)") < 1e-4
    first, last = re.findall(r"of the model: loss (\S+) -> (\S+)", notebook.printed())[0]
    assert float(last) < float(first)
    whole, adapters = notebook.runs
    assert (whole["steps"], adapters["steps"]) == (40, 12)
    assert {"charts.png", "metrics.jsonl", "run.json", "settings.json", "trainer.json"} <= set(
        notebook.printed().split()
    )
