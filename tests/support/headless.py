"""The tutorials without a browser.

``python -m tests.support.headless build`` executes them into build/.

It writes every executed notebook, an HTML page of it, and its pictures as PNG; prints the results
of each run; and fails if a notebook or a run failed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from ortlab.utils import contention

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

WATCH = '''
def _watch():
    """After every cell, what each run and tracker so far has come to, as JSON beside this file."""
    import json
    from pathlib import Path

    import numpy as np

    from ortlab.session import session
    from ortlab.metrics.recorder import INDEX

    shown = []
    session.viewers.append(shown.append)

    def known(rows, name):
        values = rows[:, INDEX[name]]
        return values[~np.isnan(values)]

    def summary(one):
        status, rows = one.status(), one.recorder.rows()
        evaluations = [event.values for event in one.recorder.events("eval")]
        seconds = known(rows, "time_s")
        return {
            "title": one.title,
            "state": status.state,
            "error": status.error,
            "steps": status.step,
            "loss": next(iter(known(rows, "loss")[::-1]), None),
            "accuracy": next(
                (a for v in evaluations[::-1] if (a := v.get("accuracy", np.nan)) == a), None
            ),
            "samples_per_s": float(np.median(known(rows, "samples_per_s"))) if len(rows) else None,
            "peak_bytes": max(known(rows, "peak_bytes"), default=None),
        }

    def write(*_):
        runs = [one for one in shown if hasattr(one, "recorder")]  # a race is shown, too
        Path(SUMMARY).write_text(json.dumps([summary(one) for one in runs]))

    get_ipython().events.register("post_execute", write)

_watch()
del _watch
'''

HEADS = (
    f"  {'run':<44} {'state':<9} {'steps':>6} {'loss':>10} {'accuracy':>9} "
    f"{'samples/s':>10} {'peak MiB':>10}"
)


class OwnKernel(AsyncKernelManager):
    """A kernel of the running Python, whatever kernels the user has installed."""

    def __init__(self, **options: object) -> None:
        specs = KernelSpecManager(kernel_dirs=[])
        super().__init__(kernel_spec_manager=specs, **options)


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs so far, the results of its runs, and the first error."""

    notebook: NotebookNode
    runs: list[dict[str, object]]
    error: Exception | None
    seconds: float

    @property
    def failed(self) -> bool:
        return self.error is not None or any(run["state"] != "finished" for run in self.runs)

    def printed(self) -> str:
        """Return all text that a reader of the static page sees."""
        return "\n".join(
            output.get("text", "") or output.get("data", {}).get("text/plain", "")
            for cell in self.notebook.cells
            for output in cell.get("outputs", ())
        )

    def pictures(self) -> list[bytes]:
        """Return the PNGs among the outputs."""
        return [
            base64.b64decode(output["data"]["image/png"])
            for cell in self.notebook.cells
            for output in cell.get("outputs", ())
            if "image/png" in output.get("data", ())
        ]


def execute(path: Path, *, timeout_s: int = 600) -> Executed:
    """Execute a notebook completely in its own kernel."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:  # so that files it writes do not end up beside it
        if (data := path.parent / "data").is_dir():
            Path(folder, "data").symlink_to(data.resolve())
        return _execute(path, folder, start, timeout_s)


def _execute(path: Path, folder: str, start: float, timeout_s: int) -> Executed:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    # Only the static picture is stored: the widgets' state would be a script of 70 KB per run, and
    # an HTML page with it requests a widget manager from the network.
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        kernel_manager_class=OwnKernel,
        resources={"metadata": {"path": folder}},
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],  # hides the advice on encrypting loopback
    )
    error: Exception | None = None
    with tempfile.TemporaryDirectory() as ipython:
        summary = Path(ipython, "runs.json")
        startup = Path(ipython, "profile_default", "startup", "watch.py")
        startup.parent.mkdir(parents=True)
        startup.write_text(WATCH.replace("SUMMARY", repr(str(summary))))
        try:
            client.execute(env={**contention.SLEEPING, **os.environ, "IPYTHONDIR": ipython})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as raised:
            error = raised
        runs = json.loads(summary.read_text()) if summary.exists() else []
    return Executed(notebook, runs, error, time.monotonic() - start)


def row(run: dict[str, object]) -> str:
    """Return a run as a line of the printed table."""

    def number(name: str, form: str, scale: float = 1) -> str:
        value = run[name]
        if isinstance(value, (int, float)):
            return format(value * scale, form)
        return format("-", ">" + form.split(".")[0].rstrip(","))

    return (
        f"  {run['title']!s:<44} {run['state']!s:<9} {run['steps']!s:>6} "
        f"{number('loss', '10.4f')} {number('accuracy', '9.3f')} "
        f"{number('samples_per_s', '10,.0f')} {number('peak_bytes', '10,.0f', 2**-20)}"
    )


def main(folder: Path) -> int:
    from nbconvert import HTMLExporter

    folder.mkdir(parents=True, exist_ok=True)
    home = folder.resolve() / "ortlab-home"
    shutil.rmtree(home, ignore_errors=True)
    os.environ["ORTLAB_HOME"] = str(home)
    failed = False
    for path in NOTEBOOKS:
        print(f"{path.name}: executing", flush=True)
        executed = execute(path)
        failed |= executed.failed
        nbformat.write(executed.notebook, folder / path.name)  # type: ignore[no-untyped-call]
        exporter = HTMLExporter()  # type: ignore[no-untyped-call]
        page, _ = exporter.from_notebook_node(executed.notebook)
        (folder / f"{path.stem}.html").write_text(page)
        for number, picture in enumerate(executed.pictures(), 1):
            (folder / f"{path.stem}-{number}.png").write_bytes(picture)
        print(f"{path.name}: {'FAILED' if executed.failed else 'done'} in {executed.seconds:.0f} s")
        if executed.runs:
            print(HEADS)
        for run in executed.runs:
            print(row(run))
            if run["error"]:
                print(f"    {run['error']}")
        for line in executed.printed().splitlines():
            if line.startswith("accuracy"):  # from the user's own loops, which no run measures
                print(f"  {line}")
        if executed.error:
            print(executed.error)
    print(f"written to {folder}/", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
