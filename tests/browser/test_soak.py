"""Soak test in JupyterLab: settings toggled, pauses, views, wraps and races; nothing grows.

Takes two hours in `make nightly`; ORTLAB_SOAK_MINUTES=20 shortens it. The measurements of each
cycle are written to build/soak.jsonl, and those of the page to build/soak-page.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import CDPSession, Page

from tests.browser.lab import NEEDS_ORT, Lab, Opens, Takes
from tests.support.soaking import COUNTED

pytestmark = [pytest.mark.browser, pytest.mark.nightly, NEEDS_ORT]
MINUTES = float(os.environ.get("ORTLAB_SOAK_MINUTES", "120"))
MEASURED = Path(__file__).parents[2] / "build" / "soak.jsonl"
OF_PAGE = MEASURED.with_name("soak-page.jsonl")
FLAT, UPDATE_MS = 0.01, 2.0
LEAKS = "@jupyterlab/cell-toolbar-extension:plugin"
"""JupyterLab 4.6 keeps the toolbar of every cell that was ever active, with 810 listeners each
(https://github.com/jupyterlab/jupyterlab/pull/19370): after an hour the page uses a core and 2 GB.
"""

MODEL = f"""
%load_ext ortlab
import itertools
import ortlab, torch
from torch import nn
from tests.support import soaking
model = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
train, valid = map(soaking.Read, ortlab.data.digits())
seen = ortlab.wrap(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)))
seen(torch.randn(4, 64)).sum().backward()
cycles = itertools.count()
measured = {str(MEASURED)!r}
"""
FINETUNE = (
    "run = %ort finetune model train --eval-dataset valid --loss cross_entropy --device cpu "
    "--epochs 100000 --eval-steps 5000 --engine eager"
)
VIEWS = ("run", "%ort panel run", "%ort graph seen", "%ort memory seen", "%ort runs --limit 5")
TOGGLE = "cycle = next(cycles)\nsoaking.toggled(run, cycle)"
STOP = "run.stop()\n_ = run.result()"
WRAP = """%%ort
other = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
other(torch.randn(4, 64)).sum().backward()
"""
RACE = """%ort unwrap other
race = %ort race other train --loss cross_entropy --engines eager,ortmodule --precisions fp32
_ = race.result()
"""
FORGET = "%reset -f in out\nget_ipython().history_manager.outputs.clear()"
"""IPython keeps everything ever typed or shown. No page needs it, and ortlab cannot free it."""
NOTE = "soaking.note(measured, cycle)"
RUNS_IN = 5
"""Number of cycles per run. The page is not reloaded, because with each reload JupyterLab 4.6
leaves a subshell in the kernel: a thread with eight files.
"""


@pytest.fixture
def lab(installed: str, tmp_path: Path) -> Iterator[Lab]:
    """Start a separate server."""
    with Lab(tmp_path, without=[LEAKS]) as server:
        yield server


def test_hours_of_work_leave_nothing_behind(notebook: Opens, page: Page, screenshot: Takes) -> None:
    MEASURED.parent.mkdir(exist_ok=True)
    for file in (MEASURED, OF_PAGE):
        file.unlink(missing_ok=True)
    watched = page.context.new_cdp_session(page)
    watched.send("Performance.enable")
    cells = [MODEL, FINETUNE, TOGGLE, *VIEWS, FORGET, NOTE, STOP, WRAP, RACE]
    book = notebook(cells)
    model, finetune, toggle, *views, note, stop, wrap, race = range(len(cells))
    ends = time.monotonic() + 60 * MINUTES
    book.run_cell(model)
    cycle = 0
    while time.monotonic() < ends:
        if cycle % RUNS_IN == 0:
            if cycle:
                for at in (stop, wrap, race):
                    book.run_cell(at)
            book.run_cell(finetune)
        for at in (toggle, *views):
            book.run_cell(at)
        book.run_cell(note)
        assert "UsageError" not in str(book.outputs()), "a magic was refused, and shows nothing"
        cycle += 1
        if cycle % RUNS_IN == 0:
            _note(watched)
    screenshot("soak")
    book.run_cell(stop)
    _judge(_rows(MEASURED), _rows(OF_PAGE))


def _rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _note(page: CDPSession) -> None:
    """Append the page's object counts at the end of a run."""
    page.send("HeapProfiler.collectGarbage")
    held = {each["name"]: each["value"] for each in page.send("Performance.getMetrics")["metrics"]}
    with OF_PAGE.open("a") as file:
        file.write(json.dumps(held) + "\n")


def _judge(cycles: list[dict[str, float]], of_page: list[dict[str, float]]) -> None:
    """Compare the medians of the last fifth and of the second fifth; the first one is warm-up."""
    told, grown = [f"{len(cycles)} cycles in {MINUTES:g} minutes"], []
    for found, names in ((cycles, COUNTED), (of_page, ("JSEventListeners",))):
        part = len(found) // 5
        assert part >= 2, f"{len(cycles)} cycles are too few to say"
        early, late = found[part : 2 * part], found[-part:]
        for name in names:
            before, after = (statistics.median(c[name] for c in some) for some in (early, late))
            told.append(f"{name}: {before:,.0f} -> {after:,.0f} ({after / before - 1:+.2%})")
            if after > before * (1 + FLAT):
                grown.append(name)
    late = cycles[-(len(cycles) // 5) :]
    update_ms = statistics.median(c["update_ms"] for c in late)
    told.append(f"an update of the charts: {update_ms:.2f} ms")
    print("\n".join(told))
    assert not grown, "\n".join(told)
    assert update_ms < UPDATE_MS, "\n".join(told)
