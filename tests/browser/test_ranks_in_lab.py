"""Tests of a run on two workers in JupyterLab: the slow rank, memory per rank, ZeRO's savings."""

from __future__ import annotations

import os
import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import Opens, Takes

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(os.name != "posix", reason="gloo over loopback"),
]

CELLS = [
    """
%load_ext ortlab
import time, torch, ortlab
from torch import distributed, nn

class Uneven(nn.Module):  # a rank that is slower than the other
    def __init__(self):
        super().__init__()
        wide = (part for _ in range(4) for part in (nn.Linear(1000, 1000), nn.ReLU()))
        self.layers = nn.Sequential(nn.Linear(64, 1000), *wide, nn.Linear(1000, 10))

    def forward(self, x):
        if distributed.is_initialized():
            time.sleep(0.05 * distributed.get_rank())
        return self.layers(x)

model = Uneven()
train, valid = ortlab.data.digits()
""",
    "run = %ort finetune model train --loss cross_entropy --engine eager --epochs 10000 "
    "--workers 2 --zero-stage 1",
]
TOGGLE_FILES = "() => window.jupyterapp.commands.execute('application:toggle-left-area')"
CUT_OFF = """section => [...section.querySelectorAll('*')].filter(e => e.clientWidth > 1
    && e.scrollWidth > e.clientWidth + 1 && !e.closest('svg')).map(e => e.className)"""
OUTSIDE = """section => { const box = section.getBoundingClientRect();
    return [...section.querySelectorAll('.ortlab-rank:not(.ortlab-rank-heads) *')]
        .filter(e => { const own = e.getBoundingClientRect();
            return own.width > 0 && (own.left < box.left - 1 || own.right > box.right + 1); })
        .map(e => e.getAttribute('class')); }"""


def widths(row: Locator, pieces: str) -> list[float]:
    """Return the widths of the parts of a bar, as fractions of the bar's width."""
    found: list[float] = row.locator(pieces).evaluate_all(
        """pieces => pieces.map(piece => piece.getBoundingClientRect().width
            / piece.parentElement.getBoundingClientRect().width)"""
    )
    return found


def whole(section: Locator) -> None:
    """Check that nothing in the section is cut off."""
    assert section.evaluate(CUT_OFF) == []
    assert section.evaluate(OUTSIDE) == []


def test_the_ranks_of_a_run(notebook: Opens, page: Page, screenshot: Takes) -> None:
    page.set_viewport_size({"width": 1280, "height": 1150})
    book = notebook(CELLS)
    page.evaluate(TOGGLE_FILES)
    book.run()
    run = book.view()
    section = run.get_by_role("region", name="Workers")
    expect(section).to_be_visible()
    rows = section.locator(".ortlab-rank:not(.ortlab-rank-heads)")
    expect(rows).to_have_count(2)
    expect(section.get_by_role("row")).to_have_count(3)
    expect(section.get_by_role("columnheader")).to_have_count(6)
    expect(section.get_by_role("columnheader").last).to_have_text("step memory")
    expect(rows.nth(0).locator(".ortlab-rank-share .ortlab-value")).to_have_text(
        re.compile(r"^\d+%$")
    )
    expect(rows.nth(1).get_by_text("▲ slowest")).to_be_visible()
    expect(rows.nth(0).get_by_text("▲ slowest")).to_be_hidden()
    page.wait_for_function(
        """() => [...document.querySelectorAll('.ortlab-spark path')]
            .every(path => path.getAttribute('d').split('L').length > 30)"""
    )
    run.get_by_role("button", name="Pause").click()
    expect(run.locator(".ortlab-state")).to_have_text("paused")
    waits, works = (widths(rows.nth(rank), ".ortlab-rank-waited")[0] for rank in (0, 1))
    assert waits > works
    both = [widths(rows.nth(rank), ".ortlab-rank-piece") for rank in (0, 1)]
    assert max(map(sum, both)) == pytest.approx(1, rel=1e-3), "the widest has all the room"
    parameters, gradients, state, rest = both[0]
    total = float(rows.nth(0).locator(".ortlab-rank-memory .ortlab-value").inner_text().split()[0])
    assert parameters / sum(both[0]) == pytest.approx(15.56 / total, rel=0.01)
    assert parameters == pytest.approx(gradients, rel=0.02)
    assert state == pytest.approx(parameters, rel=0.2), "half of two moments"
    assert rest > 0
    title = rows.nth(0).locator(".ortlab-rank-stack").get_attribute("aria-label") or ""
    assert title.startswith("parameters 15.6 MiB, gradients 15.6 MiB, optimizer state ")
    notes = section.locator(".ortlab-line").all_inner_texts()
    assert notes[0].startswith("rank 1 is the slowest: ")
    assert notes[1].startswith("ZeRO stage 1 on 2 workers: a total of 93.4 MiB ")
    assert notes[1].endswith("(25.0%)")
    whole(section)
    section.scroll_into_view_if_needed()
    screenshot("ranks-light")
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
    screenshot("ranks-dark")
    book.theme("JupyterLab Light")
    for width in (760, 480, 320):
        page.set_viewport_size({"width": width, "height": 1150})
        section.scroll_into_view_if_needed()
        expect(rows.nth(1).get_by_text("▲ slowest")).to_be_visible()
        whole(section)
        screenshot(f"ranks-{width}")
    page.set_viewport_size({"width": 1280, "height": 1150})

    book.run_next("run.apply(workers=1, zero_stage=0); run.resume()")
    expect(section.get_by_text("the run continued in one process")).to_be_visible()
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_have_class("ortlab-rank ortlab-gone")
    section.scroll_into_view_if_needed()
    screenshot("ranks-moved")
    run.get_by_role("button", name="Stop").click()
    picture = page.locator(".jp-OutputArea img").first
    expect(picture).to_be_visible()
    words = next(each["data"] for each in book.outputs()[1] if "image/png" in each["data"])
    words = words["text/plain"]
    assert "the workers trained until step" in words
    assert "ZeRO stage 1 on 2 workers" in words
    picture.scroll_into_view_if_needed()
    screenshot("ranks-picture")
    page.evaluate(TOGGLE_FILES)


def test_a_run_in_one_process_has_no_such_section_until_there_are_ranks(notebook: Opens) -> None:
    book = notebook(
        [
            "from tests.support.practice import Practice\n"
            "from ortlab.notebook.views import charts\n"
            "run = Practice(steps=60).start(); run.wait_over(); view = charts.view(run); view"
        ]
    )
    book.run()
    run = book.view()
    expect(run.locator(".ortlab-ranks")).to_be_hidden()
    section = run.get_by_role("region", name="Workers")
    assert section.count() == 0
    # Notes are shown with and without figures, and their text is escaped.
    book.run_next(
        "view.rank_notes = ['<i>note</i>']\n"
        "view.ranks = [[3, '<b>gone</b>', 0, 0, 1.5, None, 1250, None, 2**21, *[None] * 3, '', '']]"
    )
    expect(section.get_by_role("rowheader", name="rank 3 <b>gone</b>")).to_be_visible()
    expect(section.locator(".ortlab-line")).to_have_text("<i>note</i>")
    expect(section.locator(".ortlab-gone .ortlab-value")).to_have_text(
        ["1.5", "\u2013", "1.25 s", "\u2013", "2 MiB"]
    )
    assert section.locator("b, i").count() == 0
