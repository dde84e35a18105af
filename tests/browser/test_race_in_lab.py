"""Tests of a race in JupyterLab: a live table, buttons to stop and to apply, the saved page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, Lab, Notebook, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

RACE = """
%load_ext ortlab
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
data = [(torch.randn(16, 8), torch.randint(2, (16,))) for _ in range(4)]
race = %ort race model data --loss cross_entropy --engines eager,ortmodule --rounds 100000 --steps 5
await race
"""


def test_a_table_fills_in_and_the_best_is_applied(
    notebook: Opens, page: Page, lab: Lab, screenshot: Takes
) -> None:
    book = notebook([RACE])
    book.start()
    table = page.locator("[data-ortlab-still] table")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(4)
    fast = page.locator("[data-ortlab-still]", has_text="is fastest with")
    expect(fast).to_be_visible()
    before = rows.first.inner_text()
    expect(rows.first).not_to_have_text(before, use_inner_text=True)
    screenshot("race-going")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("stopped before the end").first).to_be_visible()
    book.check()
    apply = page.get_by_role("button", name="Apply the best")
    expect(apply).to_be_visible()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()
    apply.click()
    expect(page.get_by_text("finetune of this Sequential uses engine=")).to_be_visible()
    page.locator("[data-ortlab-still]").scroll_into_view_if_needed()
    screenshot("race-light")
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
    screenshot("race-dark")
    saved = book.save()
    pages = [o.data["text/html"] for o in saved.cells[0].outputs if "text/html" in o.data]
    assert len(pages) == 1, "the value of the cell is shown twice"
    assert "stopped before the end" in pages[0]
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    again = Notebook(page, lab, book.file.name)
    still = again.cell(0)
    expect(still.locator("table tbody tr")).to_have_count(4)
    expect(still.get_by_text("Error displaying widget")).to_be_hidden()
