"""The tutorials, executed whole in a kernel of their own."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.headless import NOTEBOOKS, Executed, execute


@functools.cache
def executed(stem: str) -> Executed:
    (path,) = (path for path in NOTEBOOKS if path.stem == stem)
    return execute(path)


def texts(notebook: Executed) -> Iterator[str]:
    """All that a reader of the static page sees as text, output by output."""
    for cell in notebook.notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.get("text", "") or output.get("data", {}).get("text/plain", "")


def number(notebook: Executed, pattern: str) -> float:
    """The number that the first group of `pattern` finds in the outputs."""
    found = re.search(pattern, "\n".join(texts(notebook)))
    assert found, f"no output matches {pattern!r}"
    return float(found.group(1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_whole(path: Path) -> None:
    """No cell fails, every run finishes on the engine it asked for, within three minutes."""
    notebook = executed(path.stem)
    assert notebook.error is None
    assert notebook.runs
    assert [run["state"] for run in notebook.runs] == ["finished"] * len(notebook.runs)
    assert len(notebook.pictures()) >= len(notebook.runs), "a run left no static picture"
    assert not any("Traceback" in text for text in texts(notebook))
    assert notebook.seconds < 180


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
