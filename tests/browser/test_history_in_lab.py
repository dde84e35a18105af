"""Tests of the history in JupyterLab: sorted by a click, searched, live, shown without a kernel."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import BOTH, Lab, Notebook, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

CURVES = "Curves of run-1 · lr 0.3, run-2 · lr 0.01, run-3 · lr 0.001"
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
    expect(page.get_by_alt_text(CURVES)).to_be_visible()
    book.check()
    state = table.locator("tbody tr", has_text="run-4").locator("td").nth(1)
    expect(state).to_have_text("stopped")  # live: the run was still running when the table was made

    def names() -> list[str]:
        return table.locator("tbody tr td:first-child").all_inner_texts()

    assert names() == ["run-4", "run-3", "run-2", "run-1"]
    loss = table.get_by_role("button", name="Sort by loss")
    loss.click()
    low = [float(text) for text in table.locator("tbody tr td:nth-child(8)").all_inner_texts()]
    assert low == sorted(low)
    loss.click()
    high = [float(text) for text in table.locator("tbody tr td:nth-child(8)").all_inner_texts()]
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
    page.get_by_alt_text(CURVES).scroll_into_view_if_needed()
    screenshot("compare-dark")
    book.theme("JupyterLab Light")
    page.get_by_alt_text(CURVES).scroll_into_view_if_needed()
    screenshot("compare-light")
    saved = book.save()
    (page_of_runs,) = [o.data["text/html"] for o in saved.cells[1].outputs if "text/html" in o.data]
    assert "&lt;img src=x onerror" in page_of_runs
    assert "<img src=x" not in page_of_runs
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    again = Notebook(page, lab, book.file.name)
    still = again.cell(1)
    expect(still.locator("table tbody tr")).to_have_count(4)
    expect(still.locator("tr", has_text="run-4").locator("td").nth(1)).to_have_text("stopped")
    expect(still.get_by_text("Error displaying widget")).to_be_hidden()
    still.scroll_into_view_if_needed()
    screenshot("history-saved")


MANY = """
%load_ext ortlab
import os, tempfile
os.environ["ORTLAB_HOME"] = tempfile.mkdtemp()
import ortlab
from pathlib import Path
from ortlab.history.run_folder import RunFolder
from tests.support.past_runs import kept
root = Path(os.environ["ORTLAB_HOME"], "runs")
named = [("run-1", "Sequential"), ("lr-0.001", "GPT2LMHeadModel"), ("squad-warmup", "Net"),
         ("bert-base-lr-5e-5-batch-32", "BertForSequenceClassification")]
for name, model in named:
    path = kept(root, name, model=model, engine="ortmodule", count=12_000, loss=1.2345)
    folder = RunFolder(path)
    about = folder.read_json("run")
    about |= {"engine_asked": "auto", "resumed": "continues run-3 from step 40"}
    about["result"]["best"]["metrics"] = {"f1": 0.8712}
    folder.write_json("run", about)
kept(root, "cut-off", state="running")
ortlab.open_run("lr-0.001").note("the best so far, diverges with a higher learning rate")
"""
EXTRA = {"precision", "samples/s", "peak memory", "took", "on disk"}
WIDTHS = """element => [element.scrollWidth, element.clientWidth,
    element.closest('.jp-OutputArea-output').clientWidth]"""


def test_the_runs_fit_into_a_page_of_1280_pixels(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([MANY, "%ort runs", "%ort runs --wide", "%ort runs --sort memory"])
    book.run()
    plain, wide, sorted_ = (page.locator(".ortlab-history").nth(i) for i in range(3))
    expect(sorted_.locator("tbody tr")).to_have_count(5)
    assert page.evaluate("innerWidth") == 1280

    def heads(table: Locator) -> list[str]:
        return table.locator("th:visible").all_inner_texts()

    box = plain.locator(".ortlab-history-table")
    inside, room, area = box.evaluate(WIDTHS)
    assert inside <= room <= area, f"the table is {inside} px wide, its output {area} px"
    assert not EXTRA & {*heads(plain)}
    (name,) = [each for each in box.locator("td:first-child").all() if "bert" in each.inner_text()]
    assert name.get_attribute("title") == "bert-base-lr-5e-5-batch-32", "it may be cut off"
    box.scroll_into_view_if_needed()
    screenshot("runs-1280-light")
    columns = plain.get_by_role("button", name="Show or hide columns")
    expect(columns).to_have_text("All columns")
    columns.click()
    assert {*heads(plain)} >= EXTRA
    screenshot("runs-1280-all-light")
    expect(columns).to_have_text("Fewer columns")
    columns.click()
    assert "peak memory" not in heads(plain)
    assert {*heads(wide)} >= EXTRA
    assert "peak memory" in heads(sorted_)
    assert "took" not in heads(sorted_)
    book.theme("JupyterLab Dark")
    box.scroll_into_view_if_needed()
    screenshot("runs-1280-dark")
    # Pages without a kernel show the static table.
    static = page.locator(".ortlab-runs").first
    style = page.add_style_tag(content=".ortlab-history { display: none } ")
    page.evaluate(
        "() => document.querySelectorAll('[data-ortlab-still]')"
        ".forEach(each => each.style.setProperty('display', 'block', 'important'))"
    )
    inside, room, area = static.evaluate(WIDTHS)
    static.scroll_into_view_if_needed()
    screenshot("runs-1280-static-dark")
    assert inside <= room <= area, f"the table is {inside} px wide, its output {area} px"
    style.evaluate("style => style.remove()")
