"""Tests of pages whose kernel is gone: restarted, reopened, exported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, SCREENSHOTS, Notebook, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

SETUP = """
%load_ext ortlab
import os
import ortlab
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2000, 8)
train = TensorDataset(inputs, (inputs[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
print(os.getpid())
"""
RESUMED = re.compile(r"%ort resume run-\d+ continues it")
RUN = "run = %ort finetune model train --loss cross_entropy --engine eager --epochs 5000"


def kill(book: Notebook) -> None:
    (printed,) = book.outputs()[0]
    os.kill(int(printed["text"]), signal.SIGKILL)


def test_a_run_whose_kernel_died(
    notebook: Opens, page: Page, screenshot: Takes, tmp_path: Path
) -> None:
    book = notebook([SETUP, RUN])
    book.run_cell(0)
    book.run_cell(1)
    run = book.view()
    still = page.locator("[data-ortlab-still]")
    expect(still).to_contain_text("· running ·")
    expect(still).to_be_hidden()
    kill(book)
    page.get_by_role("button", name="Ok", exact=True).click()
    expect(run.locator(".ortlab-state")).to_have_text("its kernel has ended")
    expect(run.get_by_role("button", name="Stop")).to_be_hidden()
    expect(run).to_contain_text(RESUMED)
    expect(run).to_contain_text("after you run the cells that load ortlab and create its model")
    screenshot("kernel-died")
    book.reload()
    expect(still).to_be_visible()
    expect(still).to_contain_text(RESUMED)
    expect(page.get_by_text("Error displaying widget")).to_be_hidden()
    screenshot("kernel-died-reopened-light")
    book.theme("JupyterLab Dark")
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)
    screenshot("kernel-died-reopened-dark")
    html = tmp_path / "page.html"
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--output", str(html)]
    subprocess.run([*command, str(book.file)], check=True, capture_output=True)
    exported = page.context.new_page()
    exported.goto(html.as_uri())
    expect(exported.locator("body")).to_contain_text(RESUMED)
    expect(exported.locator("body")).not_to_contain_text("step 0 of")
    exported.screenshot(path=SCREENSHOTS / "kernel-died-page.png")
    exported.close()


LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with ortlab.track(model, optimizer=optimizer, name="baseline") as run:
    for step in range(100_000):
        nn.functional.cross_entropy(model(inputs[:32]), train[:32][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_loop_whose_kernel_died_says_how_to_continue(notebook: Opens, page: Page) -> None:
    book = notebook([SETUP])
    book.run_cell(0)
    book.run_next(LOOP)
    run = book.view()
    kill(book)
    page.get_by_role("button", name="Ok", exact=True).click()
    call = r"ortlab\.track\(model, optimizer=\.\.\., resume_from='baseline\S*'\)"
    told = re.compile(
        f"{call} continues it from its last checkpoint, after you run the cells that create model, "
        r"data and optimizer again; let the loop skip the batches of the first run\.step steps"
    )
    expect(run.locator(".ortlab-silence")).to_contain_text(told)
    book.reload()
    expect(page.locator("[data-ortlab-still]")).to_contain_text(told)


def test_after_a_restart_nothing_looks_alive_and_the_run_is_resumed(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([SETUP, RUN, "%ort panel model", "%ort runs"])
    for cell in range(4):
        book.run_cell(cell)
    run = book.view()
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.locator(".lm-Menu-item", has_text="Restart Kernel…").first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    panel = page.locator(".ortlab-panel-view")
    for view, state in ((run, ".ortlab-state"), (panel, ".ortlab-panel-state")):
        expect(view.locator(state)).to_have_text("its kernel has ended")
        expect(view.get_by_role("button", name="Stop")).to_be_hidden()
    expect(panel).to_have_attribute("inert", "")
    expect(book.cell(3)).to_contain_text("The kernel has ended: run this cell again")
    found = RESUMED.search(run.inner_text())
    assert found is not None
    command = found[0].removesuffix(" continues it")
    name = command.split()[-1]
    panel.scroll_into_view_if_needed()
    screenshot("kernel-restarted")
    book.reload()
    expect(book.cell(3).get_by_text("Active runs are shown as of 2")).to_be_visible()
    expect(page.get_by_text("Error displaying widget").locator("visible=true")).to_have_count(0)
    screenshot("kernel-restarted-reopened")
    book.run_cell(0)
    book.run_next(f"again = {command}")
    expect(page.locator(".ortlab-run")).to_contain_text(f"continues {name} from step")


def test_a_run_whose_kernel_was_shut_down(notebook: Opens, page: Page) -> None:
    """JupyterLab then disposes of the connection and tells of no other state of the kernel."""
    book = notebook([SETUP, RUN])
    book.run_cell(0)
    book.run_cell(1)
    run = book.view()
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    expect(run.locator(".ortlab-state")).to_have_text(re.compile("its kernel has ended|stopped"))
    expect(run.get_by_role("button", name="Stop")).to_be_hidden()


WRAPPED = """
wrapped = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
wrapped = ortlab.wrap(wrapped, engine="ort")
nn.functional.cross_entropy(wrapped(inputs[:8]), train[:8][1]).backward()
%ort recompute wrapped
"""


RACE = """
race = %ort race model train --loss cross_entropy --engines eager --rounds 100000 --steps 5
"""


def test_other_views_whose_kernel_died(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([SETUP, "%ort panel model train", WRAPPED, RACE])
    for cell in range(4):
        book.run_cell(cell)
    panel, recompute = page.locator(".ortlab-panel-view"), page.locator(".ortlab-recompute")
    buttons = page.locator(".ortlab-search")
    expect(buttons.get_by_role("button", name="Stop")).to_be_enabled()
    views = {1: (panel, "learning_rate"), 2: (recompute, "budget")}
    for cell, (live, _) in views.items():
        expect(live).to_be_visible()
        expect(book.cell(cell).locator("[data-ortlab-still]")).to_be_hidden()
    kill(book)
    page.get_by_role("button", name="Ok", exact=True).click()
    for live in (panel, recompute, buttons):
        expect(live).to_have_attribute("inert", "")
    expect(book.cell(3)).to_contain_text("The kernel has ended: run the cells above")
    book.cell(3).scroll_into_view_if_needed()
    screenshot("race-kernel-died")
    book.reload()
    for cell, (_, told) in views.items():
        still = book.cell(cell).locator("[data-ortlab-still]")
        expect(still).to_be_visible()
        expect(still).to_contain_text(told)
        expect(book.cell(cell).get_by_text("Error displaying widget")).to_be_hidden()


def test_a_run_that_is_over_has_its_picture_and_its_charts_again(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([SETUP, RUN.replace("5000", "1"), "await run", "run"])
    for cell in range(3):
        book.run_cell(cell)
    expect(page.locator("img[src^='data:image/png']").first).to_be_visible()
    picture, left = book.outputs()[1]
    assert "image/png" in picture["data"]
    assert left["data"] == {"text/html": "", "text/plain": ""}
    last = page.locator(".jp-OutputArea-child").filter(has=page.locator(".jp-RenderedHTMLCommon"))
    assert all(each["height"] < 20 for each in [last.last.bounding_box() or {"height": 0}])

    book.run_cell(3)
    run = page.locator(".ortlab-run")
    expect(run.locator(".ortlab-state")).to_have_text("finished")
    expect(run.get_by_label("Smoothing")).to_be_visible()
    picture = page.locator("[data-ortlab-still] img")
    expect(picture).to_be_hidden()
    run.scroll_into_view_if_needed()
    screenshot("charts-again")
    kill(book)
    page.get_by_role("button", name="Ok", exact=True).click()
    book.reload()
    expect(picture).to_be_visible()
    expect(run).to_have_count(0)


def test_a_loop_that_is_over_has_its_charts_again(notebook: Opens, page: Page) -> None:
    book = notebook([SETUP, LOOP.replace("100_000", "20"), "run"])
    for cell in range(3):
        book.run_cell(cell)
    run = book.cell(2).locator(".ortlab-run")
    expect(run.locator(".ortlab-state")).to_have_text("finished")
    expect(run.get_by_label("Smoothing")).to_be_visible()
