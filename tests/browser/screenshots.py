"""Pictures of the tutorials in JupyterLab: ``python -m tests.browser.screenshots [THEME]``.

Runs every notebook in a headless Chromium and writes into build/screenshots NAME-done.png, the
whole notebook, and where it trains NAME-live.png and NAME-charts.png, taken while it runs. Exits
with 1 if a cell raised.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Error, sync_playwright

from tests.browser.lab import CHROMIUM_ARGUMENTS, SCREENSHOTS, Lab, Notebook
from tests.support.chromium import find

TUTORIALS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
ALL_RAN = """() => {
    const models = window.panel.content.widgets.map(cell => cell.model);
    const cells = models.filter(model => model.type === 'code');
    const raised = cells.some(cell => cell.outputs.toJSON().some(o => o.output_type === 'error'));
    return (raised || cells.every(cell => cell.executionCount !== null))
        && window.panel.sessionContext.session.kernel.status === 'idle';
}"""
LIVE = """() => Number(document.querySelector('.ortlab-chart')?.dataset.points) > 30
    && document.querySelectorAll('.ortlab-run canvas').length >= 4"""
DRAWN = """() => document.querySelectorAll('.ortlab-graph[hidden]').length === 0
    && [...document.querySelectorAll('.ortlab-pane')].every(pane => pane.dataset.drawn)"""
WHOLE_HEIGHT = """() => {
    const cells = [...document.querySelectorAll('.jp-NotebookPanel .jp-Cell')];
    cells[0].scrollIntoView();
    return Math.ceil(cells.at(-1).getBoundingClientRect().bottom
        - cells[0].getBoundingClientRect().top) + 180;
}"""


def take(browser: Browser, lab: Lab, tutorial: Path) -> None:
    """Take the pictures of one notebook."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    shutil.copy(tutorial, lab.root)
    shutil.copytree(tutorial.parent / "data", lab.root / "data", dirs_exist_ok=True)
    book = Notebook(page, lab, tutorial.name)
    page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")
    book.start()
    page.wait_for_function(f"() => ({LIVE})() || ({ALL_RAN})()", timeout=300_000)
    run = page.locator(".ortlab-run")
    if run.count():
        run.first.scroll_into_view_if_needed()
        page.screenshot(path=SCREENSHOTS / f"{tutorial.stem}-live.png")
        run.first.screenshot(path=SCREENSHOTS / f"{tutorial.stem}-charts.png")
    page.wait_for_function(ALL_RAN, timeout=600_000)
    page.set_viewport_size({"width": 1280, "height": page.evaluate(WHOLE_HEIGHT)})
    page.wait_for_function(DRAWN)
    page.locator(".jp-NotebookPanel .jp-Cell").first.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / f"{tutorial.stem}-done.png")
    book.check()
    page.close()


def main() -> int:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    theme = sys.argv[1] if len(sys.argv) > 1 else None
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Path(folder), theme=theme) as lab,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find(), args=CHROMIUM_ARGUMENTS)
        for tutorial in TUTORIALS:
            try:
                take(browser, lab, tutorial)
            except (AssertionError, Error) as error:
                print(f"{tutorial.name}: {error}")
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
