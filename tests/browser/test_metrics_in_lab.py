"""Tests of own metrics in JupyterLab: a person adds them, sees their chart, keeps the best."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Dialog, Page, expect

from tests.browser.lab import BOTH, Opens, Takes

pytestmark = [pytest.mark.browser, BOTH]

SETUP = """
%load_ext ortlab
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2000, 8)
labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
train = TensorDataset(inputs[:1600], labels[:1600])
held_out = TensorDataset(inputs[1600:], labels[1600:])
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))

def f1(predictions, targets):
    return f1_score(targets, predictions.argmax(1), average="macro")

def top2(predictions, targets):
    return (predictions.topk(2).indices == targets[:, None]).any(1).float().mean()

def broken(predictions, targets):
    raise ZeroDivisionError("no positives")

scores = {"f1": f1, "<img src=x onerror=alert(1)> top 2, of a long name": top2, "broken": broken}
"""
RUN = """
run = %ort finetune model train --eval-dataset held_out --loss cross_entropy --engine eager \\
    --metrics scores --keep-best f1 --eval-steps 20 --epochs 5000 --lr 0.003
"""


def test_own_metrics_have_a_chart(notebook: Opens, page: Page, screenshot: Takes) -> None:
    def executed(_: Dialog) -> None:
        pytest.fail("a name was executed")

    page.on("dialog", executed)
    book = notebook([SETUP, RUN, "run.stop()\nawait run"])
    book.run_cell(0)
    book.run_cell(1)
    run = book.view()
    chart = run.locator(".ortlab-chart-evaluation")
    expect(chart.locator(".ortlab-chart-title")).to_have_text("Evaluation")
    names = chart.locator(".ortlab-label")
    told = ["accuracy", "f1", "<img src=x onerror=alert(1)> top 2, of a long name"]
    expect(names).to_have_text(told)
    expect(chart.locator(".ortlab-value").nth(1)).to_have_text(re.compile(r"0\.\d"))
    expect(run.locator(".ortlab-chart")).to_have_count(5)
    expect(run.get_by_text("top 2, of a long name").first).to_be_visible()
    chart.scroll_into_view_if_needed()
    screenshot("metrics-light")
    book.theme("JupyterLab Dark")
    screenshot("metrics-dark")
    book.run_cell(2)
    expect(page.locator("img[src^='data:image/png']").first).to_be_visible()
    screenshot("metrics-picture")
    page.remove_listener("dialog", executed)


def test_a_run_without_evaluations_has_no_such_chart(notebook: Opens) -> None:
    train = "run = %ort finetune model train --loss cross_entropy --engine eager --epochs 5000"
    book = notebook([SETUP, train, "run.stop()\nawait run"])
    book.run_cell(0)
    book.run_cell(1)
    run = book.view()
    expect(run.locator(".ortlab-state")).to_have_text("running")
    expect(run.locator(".ortlab-chart-evaluation")).to_be_hidden()
    book.run_cell(2)
