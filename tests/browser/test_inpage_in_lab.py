"""Tests of an exported model that runs in the JupyterLab page itself, without other connections."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Opens

pytestmark = pytest.mark.browser

MODEL = """
%load_ext ortlab
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)
    def forward(self, input_ids, scale):
        return {"<b>scores</b>": self.head(self.words(input_ids).mean(1)) * scale}

model = Net()
batch = (torch.randint(0, 20, (2, 8)), torch.ones(2, 3))
"""


def test_the_page_computes_what_the_kernel_does(notebook: Opens, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    book = notebook([MODEL, "exported = %ort export model out --batch batch --web"])
    book.run()
    view = book.cell(1).locator(".ortlab-inpage")
    expect(view).to_be_visible()
    before = len(asked)
    view.get_by_label("input_ids (int64 [batch, sequence])").fill("[[3, 1, 4, 1], [5, 9, 2, 6]]")
    view.get_by_label("scale (float32 [batch, 3])").fill("[[1, 2, 3], [4, 5, 6]]")
    view.get_by_role("button", name="Run").click()
    status = view.get_by_role("status")
    expect(status).to_have_text(re.compile(r"[\d.]+ ms in this page, [\d.]+ ms in the kernel"))
    name, shape, ours, theirs, apart = view.locator("tbody td").all_inner_texts()
    assert (name, shape) == ("<b>scores</b>", "2 x 3")
    assert ours[:5] == theirs[:5]
    assert float(apart) < 1e-5
    assert {urlsplit(url).netloc for url in asked[before:]} <= {urlsplit(page.url).netloc, ""}
    assert not [url for url in asked if "wasm" in url or "onnx" in url]

    (shown,) = (o["data"] for o in book.outputs()[1] if "application/vnd" in str(o.get("data")))
    assert "largest difference" in shown["text/html"]
    view.get_by_label("scale (float32 [batch, 3])").fill("[[1, 2], [3]]")
    view.get_by_role("button", name="Run").click()
    expect(status).to_have_text("refused: scale: the lists are ragged; give lists of equal length")
    view.get_by_label("scale (float32 [batch, 3])").fill("1")
    view.get_by_label("input_ids (int64 [batch, sequence])").fill("[[99]]")
    view.get_by_role("button", name="Run").click()
    expect(status).to_have_text(re.compile("refused: .*out of data bounds|refused: .*indices"))
