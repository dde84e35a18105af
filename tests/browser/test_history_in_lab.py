"""Tests of the history in JupyterLab: sorted by a click, searched, live, shown without a kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Lab, Notebook, Opens, Takes

pytestmark = pytest.mark.browser

RUNS = """
%load_ext ortlab
import os, tempfile
os.environ["ORTLAB_HOME"] = tempfile.mkdtemp()
import torch, ortlab
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
data = [(torch.randn(16, 8), torch.randint(2, (16,))) for _ in range(40)]
def train(lr, epochs=1):
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    return ortlab.finetune(net, data, loss="cross_entropy", engine="eager",
        lr=lr, num_train_epochs=epochs,
                           eval_dataset=data[:4])
for lr in (0.3, 0.01, 0.001):
    train(lr).result()
best = ortlab.open_run(2)
best.note("<img src=x onerror=alert(1)> looks right"); best.tag("paper")
live = train(0.001, epochs=100000)
"""


def test_runs_are_sorted_searched_and_compared(
    notebook: Opens, page: Page, lab: Lab, screenshot: Takes
) -> None:
    book = notebook([RUNS, "%ort runs", "live.stop()\nawait live", "%ort compare 1 2 3"])
    book.start()
    table = page.locator(".ortlab-history")
    expect(table.locator("tbody tr")).to_have_count(4)
    expect(page.locator(".ortlab-history-live, .ortlab-history tr").first).to_be_visible()
    # The picture of the comparison is the last output.
    expect(page.get_by_alt_text("Curves of run-1, run-2, run-3")).to_be_visible()
    book.check()
    state = table.locator("tbody tr", has_text="run-4").locator("td").nth(1)
    expect(state).to_have_text("stopped")  # live: the run was still running when the table was made

    def names() -> list[str]:
        return table.locator("tbody tr td:first-child").all_inner_texts()

    assert names() == ["run-4", "run-3", "run-2", "run-1"]
    loss = table.get_by_role("button", name="Sort by loss")
    loss.click()
    low = [float(text) for text in table.locator("tbody tr td:nth-child(7)").all_inner_texts()]
    assert low == sorted(low)
    loss.click()
    high = [float(text) for text in table.locator("tbody tr td:nth-child(7)").all_inner_texts()]
    assert high == low[::-1]
    expect(table.locator("th[aria-sort=descending]")).to_have_text("loss")
    search = table.get_by_role("searchbox", name="Search the runs")
    search.fill("eager PAPER")
    assert names() == ["run-2"]
    expect(table.get_by_role("status")).to_have_text("1 of 4 runs")
    assert table.locator("img").count() == 0, "a note became a part of the page"
    search.fill("")
    page.locator(".ortlab-history-table").evaluate("table => table.scrollLeft = 10000")
    table.scroll_into_view_if_needed()
    screenshot("history-light")
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
    table.scroll_into_view_if_needed()
    screenshot("history-dark")
    page.get_by_alt_text("Curves of run-1, run-2, run-3").scroll_into_view_if_needed()
    screenshot("compare-dark")
    book.theme("JupyterLab Light")
    page.get_by_alt_text("Curves of run-1, run-2, run-3").scroll_into_view_if_needed()
    screenshot("compare-light")
    saved = book.save()
    (page_of_runs,) = [o.data["text/html"] for o in saved.cells[1].outputs if "text/html" in o.data]
    assert "&lt;img src=x onerror" in page_of_runs
    assert "<img src=x" not in page_of_runs
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    again = Notebook(page, lab, f"{test_runs_are_sorted_searched_and_compared.__name__}.ipynb")
    still = again.cell(1)
    expect(still.locator("table tbody tr")).to_have_count(4)
    expect(still.locator("tr", has_text="run-4").locator("td").nth(1)).to_have_text("stopped")
    expect(still.get_by_text("Error displaying widget")).to_be_hidden()
    still.scroll_into_view_if_needed()
    screenshot("history-saved")
