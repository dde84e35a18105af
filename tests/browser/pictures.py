"""README.md's pictures, taken in JupyterLab: ``python -m tests.browser.pictures [FOLDER]``.

Runs `CELLS` in a headless Chromium, in the light theme on a page of 1280 pixels, and writes each of
`PICTURES` as a PNG of 256 colors into notebooks/images, or into FOLDER.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.browser.lab import CHROMIUM_ARGUMENTS, Lab, Notebook, write_notebook
from tests.support.chromium import find

FOLDER = Path(__file__).parents[2] / "notebooks" / "images"
WIDTH, HEIGHT = 1280, 1500
"""Size of the page; it is higher than any view."""
MOST_BYTES = 150_000
"""Size limit of one picture."""
COLORS = 256
LONG_MS = 300_000
"""Timeout of training on a busy machine."""
CELLS = [
    "%load_ext ortlab\nimport ortlab\nfrom transformers import BertConfig\n"
    "from transformers import BertForSequenceClassification as Bert",
    "_, tokenizer = ortlab.data.minilm(labels=6)\n"
    "train, valid = ortlab.data.docstrings(tokenizer=tokenizer)",
    "%%ort\nmodel = Bert(BertConfig(hidden_size=128, num_hidden_layers=4, intermediate_size=512,\n"
    "    num_attention_heads=4, vocab_size=len(tokenizer), num_labels=6))",
    "run = %ort finetune model train --eval-dataset valid --lr 2e-4 --epochs 3 --max-steps 240 "
    "--eval-steps 60",
    "result = await run",
    "%ort graph model",
    "%ort panel model train",
    "race = %ort race model train --engines eager,ortmodule --precisions fp32,bf16 "
    "--rounds 3 --steps 2\nawait race\nNone",
    "for precision in ('fp32', 'bf16'):\n"
    "    await ortlab.finetune(model, train, lr=1e-3, max_steps=12, precision=precision)\n"
    "ortlab.open_run(1).note('first')\n"
    "ortlab.open_run(3).tag('bf16')",
    "%ort runs",
]
"""A first run, its graphs, its settings, a race and the history, of a BERT with random weights."""
PICTURES = {
    "charts": (3, ".ortlab-run"),
    "graph": (5, ".ortlab-graph"),
    "panel": (6, ".ortlab-panel-view"),
    "race": (7, "[data-ortlab-still]"),
    "runs": (9, ".ortlab-history"),
}
"""For each picture, the cell that shows it and the selector of the element in its output."""


def take(page: Page, book: Notebook, folder: Path) -> None:
    """Write `PICTURES`; raise AssertionError if a cell failed or a view is missing."""

    def shown(name: str) -> Locator:
        cell, selector = PICTURES[name]
        return book.cell(cell).locator(selector).first

    book.start()
    run = shown("charts")
    # The run must be live, with visible curves.
    page.wait_for_function(
        "() => Number(document.querySelector('.ortlab-chart')?.dataset.points) > 60",
        timeout=LONG_MS,
    )
    book.check()
    save(run, folder / "charts.png")
    expect(run.get_by_role("button", name="Stop")).to_be_visible()  # as it was in the picture
    expect(shown("runs").locator("tbody tr")).to_have_count(3, timeout=LONG_MS)
    book.check()
    expect(shown("race")).to_contain_text("is fastest with")
    graph = shown("graph")
    graph.scroll_into_view_if_needed()  # the browser does not draw invisible elements
    expect(graph.locator(".ortlab-pane[data-drawn]").first).to_be_visible(timeout=60_000)
    expect(graph.locator(".ortlab-pane:not([data-drawn])")).to_have_count(0, timeout=60_000)
    for name in ("graph", "panel", "race", "runs"):
        save(shown(name), folder / f"{name}.png")


def save(view: Locator, path: Path) -> None:
    """Save a picture of the visible `view`, with few enough colors for a small file."""
    view.scroll_into_view_if_needed()
    with Image.open(io.BytesIO(view.screenshot())) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as root:
        os.environ["ORTLAB_HOME"] = kept  # so that the history has only this notebook's runs
        with Lab(Path(root), theme="JupyterLab Light") as lab, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find(), args=CHROMIUM_ARGUMENTS)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            write_notebook(lab.root / "pictures.ipynb", CELLS)
            book = Notebook(page, lab, "pictures.ipynb")
            page.evaluate(
                "() => window.jupyterapp.commands.execute('application:toggle-left-area')"
            )
            take(page, book, folder)
            browser.close()


if __name__ == "__main__":
    main()
