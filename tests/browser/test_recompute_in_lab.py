"""Tests of the table of recompute plans in JupyterLab: ticks and their button, sliders, errors."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, NEEDS_ORT, Notebook, Opens, Takes

pytestmark = [pytest.mark.browser, NEEDS_ORT, BOTH]

MODEL = """
%load_ext ortlab
import torch, ortlab
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
model = ortlab.wrap(BertForSequenceClassification(config), kernels="torch").train()
batch = {"input_ids": torch.randint(0, 50, (4, 24)), "labels": torch.tensor([0, 1, 1, 0])}
"""
CHOSEN = "print('now', ortlab.session.session.wrapped.entry(model).settings.recompute)"


@pytest.fixture
def book(notebook: Opens) -> Notebook:
    opened = notebook([MODEL, "%ort recompute model --batch batch"])
    opened.run()
    return opened


def test_ticks_sliders_and_errors(book: Notebook, page: Page, screenshot: Takes) -> None:
    whole = page.get_by_label("bert.encoder.layer.*", exact=True)
    inner = page.get_by_label("bert.encoder.layer.*.attention.self", exact=True)
    said = page.locator(".ortlab-said")
    before = page.locator(".ortlab-recompute").get_by_text("without recompute")
    apply = page.locator(".jp-OutputArea .widget-button.mod-primary")
    expect(apply).to_have_text("Nothing is recomputed: select plans")
    expect(apply).to_be_disabled()
    expect(whole).not_to_be_checked()
    inner.check()
    expect(apply).to_have_text(re.compile(r"^Recompute 4 modules: saves [\d.]+ \w+ \(predicted\)$"))
    book.run_next(CHOSEN)
    expect(page.get_by_text("now off", exact=True)).to_be_visible()  # a tick alone applies nothing
    screenshot("recompute-ticked")
    apply.click()
    expect(said).to_contain_text("bert.encoder.layer.*.attention.self from the next step on")
    expect(apply).to_have_text(re.compile("^Recomputing 4 modules: saves "))
    expect(apply).to_be_disabled()
    page.get_by_role("button", name="all layers").click()
    expect(whole).to_be_checked()
    expect(inner).not_to_be_checked()
    text = apply.inner_text()
    shown = before.inner_text()
    slider = page.get_by_role("slider").first
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(before).not_to_have_text(shown)
    expect(apply).not_to_have_text(text)
    expect(whole).to_be_checked()
    page.get_by_role("button", name="measure").click()
    expect(page.get_by_text("ms (+").first).to_be_visible()
    screenshot("recompute")
    page.get_by_placeholder("2GiB").fill("much")
    page.keyboard.press("Enter")
    expect(said).to_contain_text("'much' is not a memory size")
    page.get_by_placeholder("2GiB").fill("4GiB")
    page.keyboard.press("Enter")
    expect(said).to_contain_text("off is the fastest that fits")
    expect(whole).not_to_be_checked()
    expect(apply).to_have_text(re.compile("^Recompute nothing: takes .* more"))
    whole.check()
    page.get_by_placeholder("2GiB").press("Enter")  # the same text once more
    expect(whole).not_to_be_checked()
    whole.check()
    expect(apply).to_have_text(re.compile("^Recompute 4 modules"))  # it is disabled in between
    apply.click()
    expect(said).to_contain_text("bert.encoder.layer.* from the next step on")
    book.run_next(CHOSEN)
    expect(page.get_by_text("now bert.encoder.layer.*", exact=True)).to_be_visible()
