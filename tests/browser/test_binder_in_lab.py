"""Test of the start page on Binder: JupyterLab opens the index of the tutorials."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.lab import Lab, Takes
from tests.support.binder import ROOT

pytestmark = pytest.mark.browser


def test_it_begins_at_the_index(
    installed: str,
    page: Page,
    screenshot: Takes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(ROOT / "binder" / "jupyter"))
    with Lab(tmp_path) as lab:
        page.goto(lab.home)
        index = page.locator(".jp-MarkdownViewer")
        expect(index.get_by_role("heading", name="Tutorials")).to_be_visible()
        screenshot("binder-index-light")
        for path in (ROOT / "notebooks").glob("*.ipynb"):
            expect(index.locator(f"a[href*='{path.name}']").first).to_be_visible()
        page.goto("about:blank")  # otherwise the page would report that the server has ended
