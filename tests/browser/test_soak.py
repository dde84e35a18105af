"""Hours in JupyterLab: settings toggled, pauses, views opened and closed; nothing grows.

Two hours in `make nightly`; ORTLAB_SOAK_MINUTES=20 for less. What was measured, cycle by cycle,
stays in build/soak.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.lab import NEEDS_ORT, Opens, Takes
from tests.soaking import COUNTED

pytestmark = [pytest.mark.browser, pytest.mark.nightly, NEEDS_ORT]
MINUTES = float(os.environ.get("ORTLAB_SOAK_MINUTES", "120"))
MEASURED = Path(__file__).parents[2] / "build" / "soak.jsonl"
FLAT, UPDATE_MS = 0.01, 2.0

MODEL = f"""
%load_ext ortlab
import itertools
import ortlab, torch
from torch import nn
from tests import soaking
model = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
train, valid = map(soaking.Read, ortlab.data.digits())
seen = ortlab.wrap(nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)))
seen(torch.randn(4, 64)).sum().backward()
cycles = itertools.count()
measured = {str(MEASURED)!r}
"""
FINETUNE = (
    "run = %ort finetune model train --eval-data valid --loss cross_entropy --device cpu "
    "--epochs 100000 --eval-every 5000 --engine eager"
)
VIEWS = ("run", "%ort panel run", "%ort graph seen", "%ort memory seen", "%ort runs --limit 5")
TOGGLE = "cycle = next(cycles)\nsoaking.toggled(run, cycle)"
STOP = "run.stop()\n_ = run.result()"
FORGET = "%reset -f in out\nget_ipython().history_manager.outputs.clear()"
"""IPython keeps all that was ever typed or shown: no page needs it, and ortlab cannot free it."""
NOTE = "soaking.note(measured, cycle)"
RUNS_IN = 5
"""Cycles of a run. The page is not loaded again: each time JupyterLab 4.6 leaves a subshell in the
kernel, a thread with eight files."""


def test_hours_of_work_leave_nothing_behind(notebook: Opens, page: Page, screenshot: Takes) -> None:
    page.set_default_timeout(180_000)
    MEASURED.parent.mkdir(exist_ok=True)
    MEASURED.unlink(missing_ok=True)
    book = notebook([MODEL, FINETUNE, TOGGLE, *VIEWS, FORGET, NOTE, STOP])
    model, finetune, toggle, *views, note, stop = range(6 + len(VIEWS))
    ends = time.monotonic() + 60 * MINUTES
    book.run_cell(model)
    cycle = 0
    while time.monotonic() < ends:
        if cycle % RUNS_IN == 0:
            if cycle:
                book.run_cell(stop)
            book.run_cell(finetune)
        for at in (toggle, *views):
            book.run_cell(at)
        book.run_cell(note)
        assert "UsageError" not in str(book.outputs()), "a magic was refused, and shows nothing"
        cycle += 1
    screenshot("soak")
    book.run_cell(stop)
    _judge([json.loads(line) for line in MEASURED.read_text().splitlines()])


def _judge(cycles: list[dict[str, float]]) -> None:
    """Medians of the last fifth beside those of the second one: the first one warms up."""
    part = len(cycles) // 5
    assert part >= 2, f"{len(cycles)} cycles are too few to say"
    early, late = cycles[part : 2 * part], cycles[-part:]
    told, grown = [f"{len(cycles)} cycles in {MINUTES:g} minutes"], []
    for name in COUNTED:
        before, after = (statistics.median(c[name] for c in some) for some in (early, late))
        told.append(f"{name}: {before:,.0f} -> {after:,.0f} ({after / before - 1:+.2%})")
        if after > before * (1 + FLAT):
            grown.append(name)
    update_ms = statistics.median(c["update_ms"] for c in late)
    told.append(f"an update of the charts: {update_ms:.2f} ms")
    print("\n".join(told))
    assert not grown, "\n".join(told)
    assert update_ms < UPDATE_MS, "\n".join(told)
