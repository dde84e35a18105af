"""`ortlab bench papers`: the published benchmarks run here, next to the published figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlab import bench
from ortlab.bench.paper_report import PaperBench
from ortlab.bench.papers import PAPERS
from ortlab.bench.result import Cell
from ortlab.bench.settings import PaperSettings
from ortlab.cli import main
from ortlab.engines.base import progress
from ortlab.engines.ortmodule import compat

TINY: dict[str, Any] = {"rounds": 2, "threads": 1, "device": "cpu", "quick": True}
NEEDS_ORT = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
ENGINES = ("eager", "ort", "ortmodule")
MILLIONS = {
    "bert-large-phase-1": 336,
    "bert-large-phase-2": 336,
    "gpt2-medium": 355,
    "bart-large": 406,
    "bert-large": 335,
    "deberta-v2-xxlarge": 1567,
    "distilbert-base": 67,
    "gpt2": 124,
    "roberta-large": 354,
    "t5-large": 738,
}
"""Millions of parameters of the models on the Hugging Face hub."""
GAINS = {
    "bart-large": 13.8,
    "bert-large": 9.4,
    "deberta-v2-xxlarge": 25.3,
    "distilbert-base": 4.2,
    "gpt2": 27.0,
    "roberta-large": 18.5,
    "t5-large": 25.4,
}
"""Speedups in percent, as printed on the pages with the published figures."""


@pytest.fixture(scope="module")
def measured() -> PaperBench:
    engines = ",".join(ENGINES)
    return bench.papers(
        **TINY, models="bert-large-phase-2,t5-large", engines=engines, precisions="fp32"
    )


def row(shown: str, title: str) -> str:
    """Return a benchmark's row in the first table."""
    (found,) = (line for line in shown.splitlines() if line.startswith(f"| {title} |"))
    return found


def test_the_published_models_are_those_of_the_hub() -> None:
    with torch.device("meta"):
        for name, paper in PAPERS.items():
            model, batch = paper.build(paper.published_shape)
            count = sum(parameter.numel() for parameter in model.parameters())
            assert count / 1e6 == pytest.approx(MILLIONS[name], rel=0.005), name
            shape = paper.published_shape
            assert batch["input_ids"].shape == (shape.rows, shape.tokens)
    assert set(MILLIONS) == set(PAPERS)


def test_the_published_figures_give_the_published_gains() -> None:
    for name, percent in GAINS.items():
        gain = PAPERS[name].published.gain
        assert gain is not None
        assert round(100 * gain, 1) == percent, name
    assert all(paper.published.source.startswith("https://") for paper in PAPERS.values())


def test_what_trains_where() -> None:
    for paper in PAPERS.values():
        assert paper.shape("cuda") == paper.published_shape
        small = paper.shape("cpu")
        assert small.layers * small.hidden**2 < paper.published_shape.layers * 512**2
        assert small.tokens == paper.published_shape.tokens
    assert PaperSettings.on("cuda", {}).precisions == "fp16"
    assert PaperSettings.on("cuda", {"precisions": "bf16"}).precisions == "bf16"
    assert PaperSettings.on("cpu", {}).precisions == "fp32,bf16"


@NEEDS_ORT
def test_both_tables_stand_side_by_side(measured: PaperBench) -> None:
    for name in measured.shapes:
        speed = measured.samples_per_s(name, "ortmodule", "fp32")
        gain = measured.gain(name, "ortmodule", "fp32")
        assert speed is not None
        assert gain is not None
        cells = {
            each: measured.measured.cell(name, each, "fp32") for each in ("eager", "ortmodule")
        }
        assert cells["eager"] is not None
        assert cells["ortmodule"] is not None
        of_rounds = sorted(
            eager / ort - 1
            for eager, ort in zip(cells["eager"].step_ms, cells["ortmodule"].step_ms, strict=True)
        )
        assert gain.median == pytest.approx(sum(of_rounds) / 2)  # of two rounds
        rows = measured.shapes[name].rows
        assert speed.high <= 1e3 * rows / min(cells["ortmodule"].step_ms)
        assert not measured.measured.suspect(cells["ortmodule"])
    shown = measured.markdown()
    t5 = row(shown, "T5-Large, translation")
    assert "| precision | eager | ort | ortmodule | published shape |" in shown
    (of_ort,) = re.findall(r"fp32 \| [\d.e+]+ \| ([\d.e+]+), [+-][\d.]+% ", t5)
    ort = measured.samples_per_s("t5-large", "ort", "fp32")
    assert ort is not None
    assert float(of_ort) == pytest.approx(ort.median, rel=0.01)
    assert "| 24 x 1024, 16 x 64 tokens | 262.34 | 329.02 | +25.4% |" in t5
    bert = row(shown, "BERT-Large, pre-training phase 2")
    assert bert.endswith("| 24 x 1024, 8 x 512 tokens | 263.00 | not found | not found |")
    for paper in (PAPERS[name] for name in measured.shapes):
        assert f"<{paper.published.source}>" in shown
        assert f"<{paper.shape_source}>" in shown
    assert shown.count("**Not a benchmark**") == 1
    assert measured.measured.machine.processor in shown


@NEEDS_ORT
def test_as_json(measured: PaperBench) -> None:
    stored = json.loads(json.dumps(measured.as_dict(), allow_nan=False))
    published = stored["published"]["t5-large"]
    assert (published["torch"], published["ort"]) == (262.34, 329.02)
    assert published["source"] == PAPERS["t5-large"].published.source
    assert stored["published"]["bert-large-phase-2"]["ort"] is None
    (here,) = stored["here"]["t5-large"]
    for engine in ENGINES:
        speed = measured.samples_per_s("t5-large", engine, "fp32")
        gain = measured.gain("t5-large", engine, "fp32")
        assert speed is not None
        assert gain is not None
        stored_here = here["engines"][engine]
        assert stored_here["samples_per_s"]["median"] == speed.median
        assert stored_here["gain"]["median"] == gain.median
    assert stored["measured"]["environment"]["ortlab"]


@NEEDS_ORT
def test_an_engine_that_does_not_run_has_no_figures(measured: PaperBench) -> None:
    cells = [
        Cell(each.model, *each.key, reason="it does not run") if each.engine == "ort" else each
        for each in measured.measured.cells
    ]
    result = dataclasses.replace(
        measured, measured=dataclasses.replace(measured.measured, cells=cells)
    )
    assert result.gain("t5-large", "ort", "fp32") is None
    shown = row(result.markdown(), "T5-Large, translation")
    assert re.search(r"\| fp32 \| [\d.e+]+ \| not run \| [\d.e+]+, ", shown)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--quick", "--threads", "1", "--device", "cpu", "--rounds", "1", "--models", "gpt2"]
    given += ["--engines", "eager", "--precisions", "fp32", "--json", str(tmp_path / "papers.json")]
    token = progress.set(None)  # the command reports progress on standard error
    try:
        assert main(["bench", "papers", *given]) == 0
        assert row(capsys.readouterr().out, PAPERS["gpt2"].title)
        assert json.loads((tmp_path / "papers.json").read_text())["device"] == "cpu"
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "papers", "--models", "gpt-2"])
        assert "did you mean 'gpt2'?" in capsys.readouterr().err
    finally:
        progress.reset(token)


@pytest.mark.nightly
@NEEDS_ORT
def test_all_of_them_train_in_ort() -> None:
    result = bench.papers(**TINY, engines=",".join(ENGINES))
    assert {(cell.model, cell.reason) for cell in result.measured.cells if cell.reason} == set()
    assert not [cell for cell in result.measured.cells if result.measured.suspect(cell)]
