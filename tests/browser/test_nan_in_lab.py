"""Tests of what a notebook shows of a loss that is NaN: the cause is to be found at a glance."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

SETUP = """
%load_ext ortlab
import os, tempfile
os.environ["ORTLAB_HOME"] = tempfile.mkdtemp()
import torch, ortlab
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0); torch.set_num_threads(1)
x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))
train = TensorDataset(x, y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

model = Net()
"""
TRAIN = "run = %ort finetune model train --loss cross_entropy --batch-size 16"


BUG = """
class Odds(Net):
    def forward(self, x):
        return torch.log(super().forward(x))

model = Odds()
"""


def test_a_row_of_the_data_is_named_and_skipped(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    book = notebook([SETUP, "x[203, 4] = torch.nan", f"{TRAIN} --epochs 3"])
    book.start()
    view = book.cell(2).locator(".ortlab-run")
    error = view.locator(".ortlab-error")
    expect(error).to_contain_text("the loss became NaN at step")
    expect(error).to_contain_text("an input, sample")
    expect(error).to_contain_text("index 203 of the TensorDataset")
    book.cell(2).scroll_into_view_if_needed()
    screenshot("nan-in-a-row")
    view.get_by_role("button", name="Resume").click()
    expect(book.cell(2).locator(".jp-OutputArea img")).to_be_visible()
    book.run_next("print(*run.status().lines)")
    expect(book.cell(3).locator(".jp-OutputArea")).to_contain_text(
        "skipped 3 batches with values that are not finite (row 203)"
    )


ROOT = """
class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.offset = nn.Linear(8, 1, bias=False), nn.Parameter(torch.ones(1))
    def forward(self, x):
        return self.body(x) + torch.sqrt(self.offset)

model, data = Root(), TensorDataset(x, x[:, :1] - 1.5)
"""


def test_a_run_that_fails_again_at_once_can_be_resumed_once_more(
    notebook: Opens, page: Page
) -> None:
    """The run is back in its pause before the page has seen it train."""
    book = notebook([SETUP, ROOT, "run = %ort finetune model data --loss mse --lr 0.1 --epochs 9"])
    book.start()
    view = book.cell(2).locator(".ortlab-run")
    error = view.locator(".ortlab-error")
    expect(error).to_contain_text("if the line is wrong")
    view.get_by_role("button", name="Resume with learning_rate=0.01").click()
    expect(error).to_contain_text("the first step after resuming failed, too")
    expect(view.locator(".ortlab-state")).to_have_text("paused")
    expect(view.locator(".ortlab-advice")).to_be_hidden()
    step = view.locator(".ortlab-numbers")
    before = step.inner_text()
    view.get_by_role("button", name="Resume", exact=True).click()
    expect(step).not_to_have_text(before)
    expect(view.get_by_role("button", name="Resume", exact=True)).to_be_enabled()
    view.get_by_role("button", name="Stop").click()
    expect(book.cell(2).locator(".jp-OutputArea img")).to_be_visible()


def test_a_bug_in_forward_and_a_learning_rate_are_named(
    notebook: Opens, page: Page, screenshot: Takes
) -> None:
    """The first step fails, and the history has the line of code; a later one waits."""
    book = notebook([SETUP, BUG, TRAIN, "%ort runs"])
    book.start()
    expect(book.cell(2).locator(".jp-OutputArea img")).to_be_visible()
    book.run_cell(3)
    told = re.compile(
        r"NotFinite: the loss became NaN at step 1: the output of Odds is the first NaN value, "
        r"from torch\.log at cell \d+, line \d+: return torch\.log"
    )
    expect(book.cell(3).locator(".ortlab-history")).to_contain_text(told)
    book.cell(3).scroll_into_view_if_needed()
    screenshot("nan-of-a-bug")
    book.run_next("model = Net()")
    book.run_next(f"{TRAIN} --lr 1e6")
    view = book.cell(5).locator(".ortlab-run")
    told = re.compile(r"at step \d+, after it rose from \S+ to \S+ \(learning_rate=1e\+06\)")
    expect(view.locator(".ortlab-error")).to_contain_text(told)
    book.cell(5).scroll_into_view_if_needed()
    screenshot("nan-of-a-learning-rate")
    view.get_by_role("button", name="Stop").click()
    expect(book.cell(5).locator(".jp-OutputArea img")).to_be_visible()
    book.run_next("print(ortlab.open_run(2).status().error)")
    expect(book.cell(6).locator(".jp-OutputArea")).to_contain_text("stopped after the loss became")
