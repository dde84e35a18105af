"""Tests of `%ort status`, reruns and help in JupyterLab, typed and clicked as a person would."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, NEEDS_ORT, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

SETUP = """
%load_ext ortlab
import os, tempfile
os.environ["ORTLAB_HOME"] = tempfile.mkdtemp()
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)
data = [(torch.randn(16, 8), torch.randint(2, (16,))) for _ in range(40)]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 2)
    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden.relu() + torch.histc(hidden.detach(), 64))

plain = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
"""
TRAIN = "run = %ort finetune plain data --loss cross_entropy --engine eager --epochs "
STATE = re.compile(r"run-1(starting|running)[\d,]+/4,000,000eagereagerplain \(Sequential\)")


def test_a_cell_run_again_shows_its_run_and_offers_a_fresh_start(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([SETUP, f"{TRAIN}100000", "%ort"])
    book.start()
    book.view()
    expect(book.cell(2).locator("tbody tr")).to_have_text(STATE)
    book.run_cell(1)
    expect(book.cell(1).locator(".jp-OutputArea")).to_contain_text("trains this model already")
    expect(book.cell(1).locator(".ortlab-run canvas").first).to_be_visible()
    assert page.locator(".ortlab-run").count() == 1, "the view of the first execution is closed"
    book.cell(1).scroll_into_view_if_needed()
    screenshot("rerun-of-a-live-run")
    book.cell(1).get_by_role("button", name="Stop").click()
    expect(book.cell(1).locator(".jp-OutputArea img")).to_be_visible()
    book.run_next(f"{TRAIN}2\nawait run")
    again = book.cell(3)
    expect(again.locator(".jp-OutputArea img")).to_be_visible()
    book.run_next("print(*run.status().lines)")
    expect(book.cell(4).locator(".jp-OutputArea")).to_contain_text("continues from weights that")
    book.run_next(f"{TRAIN}100000 --fresh")
    fresh = book.cell(5).locator(".ortlab-run")
    expect(fresh).to_contain_text("starts from the weights before run-1")
    book.cell(5).scroll_into_view_if_needed()
    screenshot("fresh-start")
    fresh.get_by_role("button", name="Stop").click()
    expect(book.cell(5).locator(".jp-OutputArea img")).to_be_visible()
    book.check()


@NEEDS_ORT
def test_the_status_is_compact(notebook: Opens, page: Page, screenshot: Takes) -> None:
    cells = [
        SETUP,
        "%%ort --engine ort\nnet = Net()",
        "for x, y in data: nn.functional.cross_entropy(net(x), y).backward()",
        f"{TRAIN}100000",
        "%ort status",
        "%ort finetune --help",
        "%ort finetune net data --lerning-rate 1",
    ]
    book = notebook(cells)
    book.start()
    status = book.cell(4)
    row = status.locator("tbody tr", has_text="net")
    expect(row.first).to_contain_text("segments")
    expect(status.locator("tbody tr", has_text="run-1")).to_have_text(STATE)
    status.scroll_into_view_if_needed()
    box = status.locator(".jp-OutputArea").bounding_box()
    assert box is not None
    assert box["height"] < 400
    screenshot("status-light")
    book.theme("JupyterLab Dark")
    status.scroll_into_view_if_needed()
    screenshot("status-dark")
    help_text = book.cell(5)
    help_text.scroll_into_view_if_needed()
    screenshot("finetune-help")
    expect(book.cell(6)).to_contain_text("did you mean '--learning-rate'? also near: --")


def test_tab_offers_options_and_keyword_arguments(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([SETUP, "import ortlab"])
    book.run()
    for typed, offered in (
        ("%ort finetune plain data --gradient", "--gradient-accumulation-steps"),
        ("%ort finetune plain data --confi", "--config"),
        ("ortlab.finetune(plain, data, learning", "learning_rate="),
        ('ortlab.finetune(plain, data, engine="ortm', "ortmodule"),
    ):
        book.run_next("")
        editor = page.locator(".jp-Cell.jp-mod-active .cm-content")
        editor.click()
        page.keyboard.type(typed)
        page.keyboard.press("Tab")
        expect(page.locator(".jp-Completer-item").first).to_contain_text(offered)
        screenshot("tab")
        page.keyboard.press("Enter")
        expect(editor).to_contain_text(offered)
