"""Fixtures of the browser tests: a Chromium and a JupyterLab."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.lab import (
    CHROMIUM_ARGUMENTS,
    SAID,
    SCREENSHOTS,
    Lab,
    Notebook,
    Notebook7,
    Opens,
    Takes,
    write_notebook,
)
from tests.support.chromium import find
from tests.support.waiting import HANGS_S

expect.set_options(timeout=1000 * HANGS_S)

SIZE = {"width": 1280, "height": 1000}
SHARING = (
    "test_chart_tools_in_lab.py",
    "test_charts_in_lab.py",
    "test_panel_in_lab.py",
    "test_graphs_in_lab.py",
    "test_after_the_kernel.py",
    "test_nan_in_lab.py",
    "test_history_in_lab.py",
    "test_magics_in_lab.py",
    "test_memory_in_lab.py",
    "test_metrics_in_lab.py",
    "test_ranks_in_lab.py",
)
"""Files whose tests share a page, one after the other, except those with the mark `OWN_PAGE`."""
CLOSE = """async () => {
    if (!location.pathname.startsWith('/lab/')) return;
    [...window.jupyterapp.shell.widgets('main')].forEach(each => each.dispose());
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
}"""
"""Close every notebook of JupyterLab, and wait until the page has been painted without them."""
FAILED = pytest.StashKey[bool]()
LAST_WORDS = "Canceled future for create_subshell_request message before replies were done"
"""JupyterLab's own unhandled rejection when a kernel ends just after a subshell was requested. It
requests one when a page's widgets are restored.
"""
NOTEBOOKS_OWN = "/static/notebook/notebook_core."
"""Notebook 7.6's own script, which reads the schema of settings that it does not have, on every
page, even with an empty notebook.
"""


@pytest.fixture(scope="session")
def installed() -> str:
    """Return Chromium's path; without one, skip the test, or fail where a browser is required."""
    path = find()
    if path is None:
        reason = "no Chromium found: apt-get install chromium, or `make test BROWSER=install`"
        if os.environ.get("ORTLAB_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="module")
def chromium(installed: str) -> Iterator[Browser]:
    """Start a headless Chromium.

    Its scope is one module: Playwright keeps an event loop running, in which no other can run.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def jupyterlab(installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start one server for all tests; every test has its own notebook, page and kernel."""
    with Lab(tmp_path_factory.mktemp("notebooks")) as server:
        yield server


@pytest.fixture(scope="session")
def notebook7(installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start one server of Notebook 7 for the tests marked `BOTH` or `IN_NOTEBOOK`."""
    with Notebook7(tmp_path_factory.mktemp("notebooks")) as server:
        yield server


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    """Return the server of JupyterLab, or the one that a mark of the test names."""
    server: Lab = request.getfixturevalue(getattr(request, "param", "jupyterlab"))
    return server


class Watched:
    """A page whose script errors are collected."""

    def __init__(self, chromium: Browser) -> None:
        context = chromium.new_context(viewport=SIZE)
        context.set_default_timeout(1000 * HANGS_S)
        self.page = context.new_page()
        self._errors: list[str] = []
        self.page.on("pageerror", lambda error: self._errors.append(f"{error}\n{error.stack}"))

    def errors(self) -> list[str]:
        """Return the errors since the last call, without those of JupyterLab and Notebook 7."""
        self.page.evaluate("() => null")  # every error before its answer has arrived
        found, self._errors[:] = self._errors[:], []
        found = [error for error in found if LAST_WORDS not in error]
        return [e for e in found if not (NOTEBOOKS_OWN in e and "(reading 'schema')" in e)]

    def reset(self) -> None:
        """Close the notebooks, so that an error of that is one of the test that opened them."""
        self.page.evaluate(CLOSE)
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size(SIZE)

    def close(self) -> None:
        self.page.context.close()


class Shared:
    """The page that the tests of a module share, and its errors between two tests."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self._kept: Watched | None = None
        self._last = ""

    def keep(self, watched: Watched, test: str) -> None:
        """Keep a page that `test` no longer needs."""
        self._kept, self._last = watched, test

    def take(self) -> Watched | None:
        """Return the page. One with an error since its last test is closed, and the error noted."""
        watched, self._kept = self._kept, None
        if watched is not None and (errors := watched.errors()):
            self.late += [f"after the end of {self._last}: {error}" for error in errors]
            watched.close()
            return None
        return watched


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Keep the page that the tests of a module share: JupyterLab takes 8 s of CPU time to load.

    Fails after the last test if the page reported an error between two of them, which is none of
    the test that comes next.
    """
    shared = Shared()
    yield shared
    if watched := shared.take():
        watched.close()
    assert not shared.late, "\n".join(shared.late)


@pytest.fixture
def page(chromium: Browser, shared: Shared, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Return a page whose script errors fail the test: the module's in `SHARING`, or a new one.

    The one that a failed test had is not used again.
    """
    marked = request.node.get_closest_marker("own_page") is not None
    own = marked or request.path.name not in SHARING
    watched = (None if own else shared.take()) or Watched(chromium)
    yield watched.page
    again = not own and not request.node.stash.get(FAILED, False)
    if again:
        watched.reset()
    errors = watched.errors()
    if again and not errors:
        shared.keep(watched, request.node.name)
    else:
        watched.close()
    assert not errors, "\n".join(errors)


@pytest.fixture
def notebook(lab: Lab, page: Page, request: pytest.FixtureRequest) -> Iterator[Opens]:
    """Return a function that writes a notebook and opens it; its kernel ends with the test."""
    books: list[Notebook] = []

    def opened(cells: Sequence[str]) -> Notebook:
        # nbconvert takes brackets as a pattern, Notebook 7 a percent sign as a code.
        name = re.sub(r"\W+", "-", request.node.name) + ".ipynb"
        write_notebook(lab.root / name, cells)
        books.append(Notebook(page, lab, name, stay=not books))
        return books[-1]

    yield opened
    try:
        for book in books:
            book.close()
    except Exception:
        request.node.stash[FAILED] = True  # pytest reports it after the page is given back
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Save a screenshot of a failed test; report cell outputs and the kernels' threads."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    arguments = getattr(item, "funcargs", {})
    page, lab = arguments.get("page"), arguments.get("lab")
    if report.failed and report.when == "call" and page is not None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"failed-{item.name}.png")
        report.sections.append(("the notebook", page.evaluate(SAID)))
        if lab is not None:
            report.sections.append(("the kernel's threads", lab.threads()))
    return report


@pytest.fixture
def screenshot(page: Page, lab: Lab) -> Takes:
    """Return a function that saves a screenshot of the page under build/screenshots."""

    def take(name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        seen = f"notebook-7-{name}" if isinstance(lab, Notebook7) else name
        page.screenshot(path=SCREENSHOTS / f"{seen}.png")

    return take
