"""Tests that no request leaves the machine while the tutorials run in JupyterLab."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.lab import CHROMIUM_ARGUMENTS, NEEDS_ORT, Lab, Notebook, Takes, write_notebook
from tests.browser.nowhere import Nowhere, nowhere
from tests.support.headless import NOTEBOOKS
from tests.support.waiting import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.nightly,
    NEEDS_ORT,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="only root has networks to give"
    ),
]
LONGEST_S = 300
HERE = {"127.0.0.1", "localhost"}
MAKERS = ("google.com", "googleapis.com", "gstatic.com", "gvt1.com")
"""Domains that Chromium contacts by itself, whatever the page. `Page.on` shows what a page requests
from them.
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Nowhere]:
    with nowhere() as network:
        yield network


@pytest.fixture(scope="module")
def server(
    network: Nowhere, installed: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """Start a server in that network; its kernels may contact Hugging Face's hub."""
    root = tmp_path_factory.mktemp("tutorials")
    shutil.copytree(NOTEBOOKS[0].parent, root, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE")
        with Lab(root) as server:
            yield server


@pytest.fixture(scope="module")
def chromium(network: Nowhere, installed: str) -> Iterator[Browser]:
    """Start a Chromium in that network that cannot resolve its vendor's host names."""
    unknown = ", ".join(f"MAP *.{name} ~NOTFOUND" for name in MAKERS)
    arguments = [*CHROMIUM_ARGUMENTS, f"--host-resolver-rules={unknown}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed, args=arguments)
        yield browser
        browser.close()


ASKS = """
import contextlib, urllib.request
import huggingface_hub
from IPython.display import Javascript
with contextlib.suppress(OSError):
    urllib.request.urlopen("http://kernel.example/", timeout=1)
with contextlib.suppress(Exception):
    huggingface_hub.model_info("somebody/something")
Javascript("fetch('http://198.51.100.9/page').catch(() => 0)")
"""


def test_what_leaves_is_seen(network: Nowhere, server: Lab, page: Page) -> None:
    """Requests of a kernel and of a page are recorded, so the other tests can fail."""
    write_notebook(server.root / "asks.ipynb", [ASKS])
    before = len(network.sent())
    with page.expect_request("http://198.51.100.9/page", timeout=LONGEST_S * 1000):
        Notebook(page, server, "asks.ipynb").run()
    until(lambda: "tcp to 198.51.100.9:80" in network.sent()[before:])
    for name in ("kernel.example", "huggingface.co"):
        assert any(f"asked for {name}" in each for each in network.sent()[before:])


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_nothing_leaves(
    path: Path, network: Nowhere, server: Lab, page: Page, screenshot: Takes
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    before = len(network.sent())
    book = Notebook(page, server, path.name)
    page.set_default_timeout(LONGEST_S * 1000)
    book.run()
    screenshot(f"offline-{path.stem}")
    book.close()
    page.goto("about:blank")
    assert len(asked) > 10
    hosts = {urllib.parse.urlsplit(url).hostname for url in asked if url.startswith(("http", "ws"))}
    assert hosts <= HERE
    assert sorted(set(network.sent()[before:])) == []
