"""The charts in JupyterLab: a person opens a notebook, watches, clicks, saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.lab import Notebook

pytestmark = pytest.mark.browser

Opens = Callable[[Sequence[str]], Notebook]
Takes = Callable[[str], None]

START = """
from tests.browser.practice import Practice
from ortlab.notebook import charts
run = Practice({options}).start()
charts.show(run)
"""
WAIT = """
import asyncio
while not run.over():
    await asyncio.sleep(0.05)
print("state:", run.status().state)
"""
STEP_S = 0.02
REACTION_S = 1.0 + STEP_S  # what a click may take: a second and the step in flight
CANVAS = ".ortlab-run canvas"


def step_of(run: Locator) -> int:
    """The step that the page shows."""
    words = run.locator(".ortlab-numbers").inner_text().split()
    return int(words[words.index("step") + 1].replace(",", ""))


def points(run: Locator) -> int:
    """The rows that the first chart of the page has."""
    return int(run.locator(".ortlab-chart").first.get_attribute("data-points") or 0)


def test_points_grow_while_the_cell_waits(notebook: Opens, page: Page, screenshot: Takes) -> None:
    book = notebook([START.format(options="steps=400, title='line fit'"), WAIT])
    book.start()
    run = page.locator(".ortlab-run")
    expect(run.locator(CANVAS.split()[1])).to_have_count(4, timeout=20_000)
    expect(run.locator(".ortlab-state")).to_have_text("running")
    first = points(run)
    page.wait_for_function(
        "n => Number(document.querySelector('.ortlab-chart').dataset.points) > n + 20", arg=first
    )
    screenshot("live-light")
