"""Cells that make a graph or a run, and its view in the page."""

from __future__ import annotations

from playwright.sync_api import FrameLocator, Locator, expect

from tests.browser.lab import Notebook

BERT = """
%load_ext ortlab
import torch, ortlab
from transformers import BertConfig, BertForSequenceClassification
model = BertForSequenceClassification(BertConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128,
    vocab_size=100))
model = ortlab.wrap(model.train(), engine="ortmodule", self_check=False)
ids = torch.randint(0, 100, (2, 8))
model(input_ids=ids, labels=torch.arange(2)).loss.backward()
"""
"""A cell that calls BERT once in engine ortmodule, so that its graphs can be shown."""
MODEL = """
%load_ext ortlab
import ortlab
from torch import nn
model = nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))
train, valid = ortlab.data.digits()
"""
"""A cell that makes a small model and its data."""
FINETUNE = (
    "run = %ort finetune model train --eval-dataset valid --loss cross_entropy --engine eager "
    "--device cpu --epochs 100000 --eval-steps 1000000"
)
"""A cell that starts a long run of `MODEL`."""


def graph(book: Notebook, which: int = 0) -> Locator:
    """Return a view once its panes are drawn; the browser draws only what is scrolled into view."""
    view = book.page.locator(".ortlab-graph").nth(which)
    expect(view).to_be_visible()
    book.check()
    view.scroll_into_view_if_needed()
    drawn(view)
    return view


def drawn(view: Locator) -> None:
    """Wait until all panes of a view are drawn."""
    expect(view.locator(".ortlab-pane[data-drawn]").first).to_be_visible()
    expect(view.locator(".ortlab-pane:not([data-drawn])")).to_have_count(0)


def pane(view: Locator, phase: str) -> FrameLocator:
    return view.frame_locator(f".ortlab-pane[data-phase={phase}] iframe")


def opened(run: Locator) -> None:
    """Open the settings of a run's view."""
    run.locator(".ortlab-settings-fold").click()
    expect(run.get_by_label("engine", exact=True)).to_be_visible()
