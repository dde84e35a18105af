"""Tests of the memory picture in JupyterLab: names on hover, and in an untrusted notebook."""

from __future__ import annotations

import io

import nbformat
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from tests.browser.lab import BOTH, NEEDS_ORT, Lab, Notebook, Opens, Takes

pytestmark = [pytest.mark.browser, NEEDS_ORT, BOTH]

MODEL = """
%load_ext ortlab
import torch, ortlab
from torch import nn
model = ortlab.wrap(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 64)))
model(torch.rand(512, 256)).sum().backward()
"""
NAMED = """() => {
    const paths = [...document.querySelectorAll('path')];
    return paths.filter(path => {
        const [{x, y, width, height}] = path.getClientRects();
        const there = document.elementFromPoint(x + width / 2, y + height / 2);
        return there === path && path.querySelector('title')?.textContent.includes('MiB');
    }).length;
}"""


@pytest.fixture
def book(notebook: Opens) -> Notebook:
    """Open a notebook that shows a plan."""
    opened = notebook([MODEL, "%ort memory model batch=4096"])
    opened.run()
    return opened


def test_hover_names_a_tensor(book: Notebook, page: Page) -> None:
    """A browser shows the title of the element under the pointer; an <img> would show none."""
    expect(page.locator("object")).to_be_visible()
    (picture,) = (frame for frame in page.frames if frame.url.startswith("data:image/svg"))
    assert picture.evaluate(NAMED) > 3
    assert picture.evaluate("() => window.origin") == "null"


def test_it_is_on_white_on_a_dark_page(book: Notebook, page: Page, screenshot: Takes) -> None:
    book.theme("JupyterLab Dark")
    page.wait_for_function("() => document.body.dataset.jpThemeLight === 'false'")
    picture = page.locator("object")
    picture.scroll_into_view_if_needed()
    seen = Image.open(io.BytesIO(picture.screenshot())).convert("L")
    assert seen.getpixel((1, 1)) == 255
    assert seen.getextrema()[0] <= 0x42, "dark letters"
    screenshot("memory-dark")


def test_an_untrusted_notebook_shows_an_image(book: Notebook, page: Page, lab: Lab) -> None:
    saved = book.save()
    saved.cells[0].source += "\n# of somebody else"
    nbformat.write(saved, lab.root / "untrusted.ipynb")
    page.evaluate("() => window.panel.sessionContext.shutdown()")
    cell = Notebook(page, lab, "untrusted.ipynb").cell(1)
    image = cell.locator("img")
    expect(image).to_be_visible()
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("e => e.naturalWidth") > 300
    expect(cell.locator("object")).to_have_count(0)
    expect(cell.locator("svg title")).to_have_count(0)
    expect(cell.locator(".jp-OutputArea-output")).not_to_contain_text("activation of")
    expect(cell.locator(".jp-OutputArea-output td").first).to_be_visible()
