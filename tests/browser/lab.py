"""JupyterLab and Notebook 7 in a headless Chromium: a server, and notebooks driven as by a user."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Self

import nbformat
import psutil
import pytest
from playwright.sync_api import Locator, Page

from ortlab.engines.ortmodule import compat
from ortlab.notebook.privacy import HOW as PRIVATE
from tests.support.waiting import HANGS_S

NEEDS_ORT = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
IN_NOTEBOOK = pytest.mark.parametrize("lab", ["notebook7"], indirect=True)
"""Run a test in Notebook 7 instead of JupyterLab."""
BOTH = pytest.mark.parametrize(
    "lab", ["jupyterlab", pytest.param("notebook7", marks=pytest.mark.nightly)], indirect=True
)
"""Run a test in JupyterLab and, in `make nightly`, in Notebook 7."""
OWN_PAGE = pytest.mark.own_page
"""Mark of a test that leaves listeners, styles or panels in its page, or needs a page that was
opened in the test's size or has not yet loaded a view.
"""
CHROMIUM_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    # Every cell with its output is in the page, visible or not.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    # By default JupyterLab drops a kernel's answer to Tab that takes longer than a second.
    "@jupyterlab/completer-extension/manager": {"providerTimeout": 60_000},
}
OPEN = """async path => {
    const app = window.jupyterapp, others = [...app.shell.widgets('main')];
    await app.commands.execute('docmanager:open', {path});
    others.forEach(other => other.dispose());
}"""
OPENED = """path => {
    const app = window.jupyterapp;
    if (!app || document.querySelector('.jp-mod-restoring')) return false;
    const panel = [...app.shell.widgets('main')].find(w => w.context?.path === path);
    if (!panel || !panel.context.isReady || !panel.isVisible) return false;
    window.panel = panel;
    return panel.sessionContext.session?.kernel?.connectionStatus === 'connected';
}"""
"""Return True once the notebook is open and its kernel is connected.

JupyterLab opens the notebook of a page twice: when it restores the layout, and again for the
address, before it marks the file browser as restored. If the test closed the notebook between the
two, it would open again in front of the next one.
"""
IDLE = "() => window.panel.sessionContext.session.kernel.status === 'idle'"
OUTPUTS = """() => window.panel.content.widgets
    .filter(cell => cell.model.type === 'code').map(cell => cell.model.outputs.toJSON())"""

SAID = """() => {
    if (!window.panel) return 'no notebook is open';
    const kernel = window.panel.sessionContext.session?.kernel?.status;
    const cells = window.panel.content.widgets.filter(cell => cell.model.type === 'code');
    const one = output => output.text ?? output.traceback?.join('\\n')
        ?? Object.entries(output.data).map(([type, value]) =>
            type.startsWith('text/') ? value : `<${type}>`).join(' ');
    return [`the kernel is ${kernel}`, ...cells.map(cell =>
        `[${cell.model.executionCount ?? '*'}] `
        + cell.model.outputs.toJSON().map(one).join('\\n'))].join('\\n');
}"""
"""Every output as text, other types by name, for the report of a failed test."""


class Lab:
    """A JupyterLab server on loopback with its own settings and data."""

    module = "jupyterlab"
    options: tuple[str, ...] = (
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    )

    def __init__(
        self, root: Path, *, theme: str | None = None, without: Sequence[str] = ()
    ) -> None:
        """Start the server; `without` names JupyterLab plugins to disable."""
        self.root = root
        self._temporary = tempfile.TemporaryDirectory(prefix="ortlab-lab-")
        self._folder = Path(self._temporary.name)
        self._token = secrets.token_hex(16)
        settings = dict(SETTINGS)
        if theme:
            settings["@jupyterlab/apputils-extension/themes"] = {"theme": theme}
        for name, value in settings.items():
            path = self._folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        page = self._folder / "config" / "labconfig" / "page_config.json"
        page.parent.mkdir(parents=True)
        page.write_text(json.dumps({"disabledExtensions": dict.fromkeys(without, True)}))

    def __enter__(self) -> Self:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = self._open_log()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", self.module, "--no-browser", "--allow-root"),
                *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
                f"--IdentityProvider.token={self._token}",
                f"--ServerApp.root_dir={self.root}",
                PRIVATE,  # as in `make demo`
                *self.options,
            ],
            env=self._environment(),
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait_until_up()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the server shuts its kernels down on this request
            self._request("/api/shutdown", method="POST")
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(HANGS_S)
        self._log.close()
        self._temporary.cleanup()

    @property
    def home(self) -> str:
        """Return the address at which a browser starts without a file."""
        return f"{self._url}/?token={self._token}"

    def address(self, path: str) -> str:
        """Return the address that opens the file `path` in a new workspace."""
        return f"{self._url}/lab/workspaces/{secrets.token_hex(4)}/tree/{path}?token={self._token}"

    def shown(self, page: Page) -> bool:
        """Return whether the page has this JupyterLab, which can open another notebook."""
        return page.url.startswith(f"{self._url}/lab/")

    def threads(self) -> str:
        """Return the stacks of all threads of the kernels.

        Ends the kernels; meant for failed tests.
        """
        path = self._folder / "lab.log"
        before = path.stat().st_size
        kernels = psutil.Process(self._process.pid).children()
        for kernel in kernels:
            kernel.send_signal(signal.SIGABRT)
        psutil.wait_procs(kernels, timeout=5)
        return path.read_bytes()[before:].decode(errors="replace")

    def _open_log(self) -> IO[bytes]:
        return open(self._folder / "lab.log", "wb")

    def _environment(self) -> dict[str, str]:
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        for name in folders.values():
            (self._folder / name).mkdir(exist_ok=True)
        own = {variable: str(self._folder / name) for variable, name in folders.items()}
        source = str(Path(__file__).parents[2])  # for `tests.support.practice` in the kernel
        return {
            **os.environ,
            **own,
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYTHONPATH": source,
            "PYTHONFAULTHANDLER": "1",  # for `threads`
        }

    def _request(self, path: str, *, method: str = "GET") -> None:
        address = f"{self._url}{path}?token={self._token}"
        urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=10).read()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                log = (self._folder / "lab.log").read_text()
                raise RuntimeError(f"{self.module} ended while starting:\n{log[-4000:]}")
            with contextlib.suppress(OSError):
                return self._request("/api/status")
            time.sleep(0.1)
        self.__exit__()
        raise TimeoutError(f"{self.module} did not start within {HANGS_S:.0f} s")


class Notebook7(Lab):
    """A Jupyter Notebook 7 server, which shows one notebook per page."""

    module = "notebook"
    options = ("--JupyterNotebookApp.expose_app_in_browser=True",)

    def address(self, path: str) -> str:
        """Return the address that opens the file `path`."""
        return f"{self._url}/notebooks/{path}?token={self._token}"


class Notebook:
    """A notebook that is open in a page, with an idle kernel."""

    def __init__(self, page: Page, lab: Lab, path: str, *, stay: bool = False) -> None:
        """Open the file `path`; with `stay` in the JupyterLab that the page has, if it has one."""
        self.page = page
        self._path = path
        self.file = lab.root / path
        """Path of the notebook."""
        if stay and lab.shown(page):
            page.evaluate(OPEN, path)
        else:
            page.goto(lab.address(path))
        page.wait_for_function(OPENED, arg=path, timeout=1000 * HANGS_S)
        page.wait_for_function(IDLE)

    def start(self) -> None:
        """Run all cells without waiting for them."""
        self._command("notebook:run-all-cells", wait=False)

    def run(self) -> None:
        """Run all cells and wait for them; raise AssertionError with the error of a cell."""
        self._command("notebook:run-all-cells")
        self.check()

    def check(self) -> None:
        """Raise AssertionError with the errors that cells have raised so far."""
        raised = [o for cell in self.outputs() for o in cell if o["output_type"] == "error"]
        assert not raised, "\n".join(f"{o['ename']}: {o['evalue']}" for o in raised)

    def view(self) -> Locator:
        """Return the charts once they are drawn; raise AssertionError if a cell failed."""
        self.page.wait_for_function(
            """() => document.querySelectorAll('.ortlab-run canvas').length >= 4
                || document.querySelector('[data-mime-type="application/vnd.jupyter.stderr"]')"""
        )
        self.check()
        return self.page.locator(".ortlab-run")

    def reload(self) -> None:
        """Save the notebook and reload the page; the kernel keeps running."""
        self.save()
        self.page.reload()
        self.page.wait_for_function(OPENED, arg=self._path, timeout=1000 * HANGS_S)

    def run_next(self, code: str) -> None:
        """Append a cell with this code and run it without waiting for it."""
        self.page.evaluate(
            """async code => {
                const app = window.jupyterapp, notebook = window.panel.content;
                app.shell.activateById(window.panel.id);
                notebook.activeCellIndex = notebook.widgets.length - 1;
                await app.commands.execute('notebook:insert-cell-below');
                notebook.activeCell.model.sharedModel.setSource(code);
                app.commands.execute('notebook:run-cell');
            }""",
            code,
        )

    def run_cell(self, index: int) -> None:
        """Run one cell again and wait for it; raise AssertionError with its error."""
        self.page.evaluate(
            """async index => {
                const app = window.jupyterapp;
                app.shell.activateById(window.panel.id);
                window.panel.content.activeCellIndex = index;
                await app.commands.execute('notebook:run-cell');
            }""",
            index,
        )
        self.check()

    def outputs(self) -> list[list[dict[str, Any]]]:
        """Return the outputs of every code cell as they would be saved."""
        found: list[list[dict[str, Any]]] = self.page.evaluate(OUTPUTS)
        return found

    def cell(self, index: int) -> Locator:
        """Return the cell on the page."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").nth(index)

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook and read the file back."""
        self._command("docmanager:save")
        return nbformat.read(self.file, as_version=4)

    def theme(self, name: str) -> None:
        """Switch JupyterLab's theme as its menu does."""
        self._command("apputils:change-theme", {"theme": name})
        self.page.wait_for_function("() => !document.getElementById('jupyterlab-splash')")

    def close(self) -> None:
        """End the kernel and switch back to the light theme."""
        self.theme("JupyterLab Light")
        self.page.evaluate("() => window.panel.sessionContext.shutdown()")

    def _command(self, name: str, options: Any = None, *, wait: bool = True) -> None:
        # Commands act on the panel in front, so this panel is activated in the same tick.
        self.page.evaluate(
            """([name, options, wait]) => {
                window.jupyterapp.shell.activateById(window.panel.id);
                const done = window.jupyterapp.commands.execute(name, options).then(() => null);
                return wait ? done : null;
            }""",
            [name, options or {}, wait],
        )


Opens = Callable[[Sequence[str]], Notebook]
"""Type of the fixture `notebook`."""
Takes = Callable[[str], None]
"""Type of the fixture `screenshot`."""


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """Write a notebook of code cells for the Python that runs the tests."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in cells]
    nbformat.write(notebook, path)
