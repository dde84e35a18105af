"""Tests of the magics in a real kernel: the messages that a front end receives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import ipykernel
import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from ortlab.cluster.rank import footprint
from ortlab.history.run_folder import RunFolder
from tests.bench.ending import ENDS, measured
from tests.support.jupyter_kernel import Kernel
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S

PRELUDE = """
%load_ext ortlab
import asyncio, ortlab, torch
from torch import nn
data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
"""


@pytest.fixture(scope="module")
def process() -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(process: Kernel) -> Kernel:
    """Return one kernel for all tests, with the extension loaded and their names defined."""
    process(PRELUDE)
    return process


def test_a_cell_that_awaits_is_wrapped_at_its_end(kernel: Kernel) -> None:
    cell = kernel(
        "%%ort --engine compile\nawait asyncio.sleep(0.01)\nmodel = nn.Linear(4, 2)\n"
        "await asyncio.sleep(0.01, 'value')"
    )
    assert cell.text == "model runs on engine 'compile'\n"
    assert [data["text/plain"] for data in cell.shown] == ["'value'"]


def test_a_check_becomes_a_table_in_its_place(kernel: Kernel) -> None:
    needs("ort")
    kernel("model = ortlab.wrap(nn.Linear(4, 2), engine='ort')")
    waiting = kernel("%ort check model")
    (first,) = [content for kind, content in waiting.outputs if kind == "display_data"]
    assert "waiting: " in first["data"]["text/plain"]
    done = kernel("model(torch.randn(3, 4)).sum().backward()")
    (second,) = [content for kind, content in done.outputs if kind == "update_display_data"]
    assert second["transient"] == first["transient"]
    assert "right: 1 output within " in second["data"]["text/plain"]
    assert "<table>" in second["data"]["text/html"]


def test_an_error_in_one_line_fails_the_cell(kernel: Kernel) -> None:
    """Therefore, running all cells stops at this cell."""
    cell = kernel.run("%%ort --engine orc\nmodel = nn.Linear(4, 2)")
    assert cell.reply["status"] == "error"
    assert cell.reply["ename"] == "UsageError"
    assert [kind for kind, _ in cell.outputs if kind == "error"] == []
    assert "did you mean 'ort'?" in cell.text


def test_a_cell_that_raises_shows_its_traceback_once(kernel: Kernel) -> None:
    cell = kernel.run("%%ort --engine compile\nmodel = nn.Linear(4, 2)\n1 / 0")
    assert cell.reply["status"] == "error"
    assert [content["ename"] for kind, content in cell.outputs if kind == "error"] == [
        "ZeroDivisionError"
    ]


def test_a_cell_that_is_interrupted_names_its_models_below_the_traceback(kernel: Kernel) -> None:
    kernel("import os, signal\nwrong = True")
    cell = (
        "%%ort --engine compile\nmodel = nn.Linear(4, 2)\n"
        "if wrong:\n"
        "    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)\n"
        "    await asyncio.sleep(60)"
    )
    interrupted = kernel.run(cell)
    kinds = [kind for kind, _ in interrupted.outputs if kind in ("error", "stream")]
    assert kinds == ["error", "stream"]
    assert interrupted.text == (
        "not wrapped, because the cell did not finish: model; run the cell again, or "
        "%ort wrap model --engine compile\n"
    )
    kernel("wrong = False")
    assert kernel(cell).text == "model runs on engine 'compile'\n"


def test_a_wait_that_is_interrupted_ends_in_one_line(kernel: Kernel) -> None:
    """Jupyter interrupts a kernel before it shuts it down, too."""
    kernel(
        "import os, signal\nrun = ortlab.finetune(nn.Linear(4, 2), data, loss='cross_entropy', "
        "engine='eager', num_train_epochs=10**6)"
    )
    cell = kernel.run(
        "asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)\nawait run"
    )
    assert cell.reply["status"] == "error", "so that running all cells stops at this cell"
    (error,) = [content for kind, content in cell.outputs if kind == "error"]
    assert error["traceback"] == ["CancelledError: the wait was interrupted"]
    assert "await it again to wait for it" in cell.text
    kernel("run.stop()\nawait run")


def test_the_table_is_rich(kernel: Kernel) -> None:
    kernel("%%ort --engine eager\nmodel = nn.Linear(4, 2)\ncriterion = nn.MSELoss()")
    (data,) = kernel("%ort").shown
    assert ">model</td>" in data["text/html"]
    assert "var(--jp-" in data["text/html"]
    assert "not wrapped: criterion" in data["text/html"]
    assert "not wrapped: criterion" in data["text/plain"]
    (data,) = kernel("%ort doctor").shown
    assert "onnxruntime-training" in data["text/html"]


@pytest.mark.parametrize(
    "start",
    [
        "%ort finetune net data --loss cross_entropy --engine eager",
        "ortlab.finetune(net, data, loss='cross_entropy', engine='eager')",
        "run = %ort finetune net data --loss cross_entropy --engine eager\nrun",
        "run = %ort finetune net data --loss cross_entropy --engine eager",
    ],
)
def test_a_run_is_shown_once_by_its_cell_and_again_when_asked_for(
    kernel: Kernel, start: str
) -> None:
    kernel("net = nn.Linear(4, 2)")
    # A run that is over before it is shown has its picture alone.
    first, *still = kernel(start).shown
    assert first.keys() & {"application/vnd.jupyter.widget-view+json", "image/png"}
    assert len(still) == ("image/png" not in first)
    kernel("await ortlab.last_run")
    live, picture = kernel("ortlab.last_run").shown
    assert "application/vnd.jupyter.widget-view+json" in live
    assert "data:image/png;base64," in picture["text/html"]


@pytest.mark.parametrize(
    "start",
    [
        "run = %ort finetune net data --loss cross_entropy --engine eager",
        "race = %ort race net data --loss cross_entropy --engines eager --rounds 2 --steps 1",
    ],
)
def test_buttons_that_wait_for_the_end_of_a_cell_say_so(kernel: Kernel, start: str) -> None:
    kernel("net = nn.Linear(4, 2)")
    waits = "buttons respond only while no cell runs" in kernel(start).text
    assert waits == (ipykernel.version_info[:2] < (7, 3))
    kernel("await (ortlab.last_run if 'race' not in dir() else race)")


def test_tab(kernel: Kernel) -> None:
    kernel("net = nn.Linear(4, 2); train_data = data")
    assert kernel.complete("%ort fine") == ["%ort finetune"]
    assert kernel.complete("%ort finetune net train_") == ["%ort finetune net train_data"]
    # IPython 7 offers its own completions, too.
    assert "%%ort --engine eager" in kernel.complete("%%ort --engine e")
    assert kernel.complete("x = 1\nrun = %ort finetune ne") == ["x = 1\nrun = %ort finetune net"]


def test_a_reset_kernel_still_knows_the_magics(kernel: Kernel) -> None:
    kernel("%reset -f")
    kernel("from torch import nn")
    assert "model runs on" in kernel("%%ort --engine compile\nmodel = nn.Linear(4, 2)").text
    assert ">model</td>" in kernel("%ort").shown[0]["text/html"]


def test_unloading_gives_back_how_runs_are_shown(kernel: Kernel) -> None:
    kernel(
        "net = nn.Linear(4, 2)\nrun = %ort finetune net data --loss cross_entropy --engine eager"
    )
    kernel("await run")
    kernel("%unload_ext ortlab")
    cell = kernel("run")
    assert [list(data) for data in cell.shown] == [["text/plain"]]
    assert "Run run-" in cell.shown[0]["text/plain"]
    assert "not found" in kernel.run("%ort").text


def test_unloading_while_a_run_is_live_leaves_its_picture(kernel: Kernel) -> None:
    kernel("%load_ext ortlab")
    kernel(
        "import threading, time\nclass Slow(nn.Linear):\n    def forward(self, x):\n"
        "        time.sleep(0.05)\n        return super().forward(x)\nnet = Slow(4, 2)\n"
        "run = %ort finetune net data --loss cross_entropy --engine eager --epochs 1000"
    )
    cell = kernel("%unload_ext ortlab")
    updates = [content for kind, content in cell.outputs if kind == "update_display_data"]
    assert "image/png" in updates[-1]["data"]
    cell = kernel(
        "print([t.name for t in threading.enumerate() if t.name == 'ortlab-view'], "
        "get_ipython().events.callbacks['post_run_cell'], run.over()); run.stop(); await run"
    )
    assert "ortlab" not in cell.text
    assert cell.text.startswith("[] [")
    assert cell.text.endswith("] False\n")


def test_a_race_and_its_result_are_shown_as_tables_below_what_was_printed(kernel: Kernel) -> None:
    kernel(
        "race = ortlab.race(nn.Linear(4, 2), data, loss='cross_entropy', engines='eager', "
        "rounds=2, steps=1)\nresult = race.result(60)"
    )
    for name in ("race", "result"):
        cell = kernel(f"print('above')\n{name}")
        assert cell.text == "above\n"
        (data,) = cell.shown
        assert "is fastest with" in data["text/plain"]
        assert "<table" in data["text/html"]
        # Buttons belong to a table; without them, the text above the table must not be hidden.
        assert "display: none" not in data["text/html"]


TRAINS = (
    PRELUDE
    + """
import os, time
run = ortlab.finetune(
    nn.Linear(4, 2), data, loss="cross_entropy", engine="eager",
    num_train_epochs=10**7, isolated={isolated}
)
while run.step < 3:
    time.sleep(0.001)
print(os.getpid(), run.folder)
"""
)


def listens(address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5):
        return True
    return False


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("isolated", [False, True], ids=["here", "isolated"])
@pytest.mark.parametrize("how", ["SIGTERM", "shutdown", "restart"])
def test_a_kernel_that_ends_stops_its_runs_in_order(
    how: str, isolated: bool, tmp_path: Path
) -> None:
    """A checkpoint to resume from remains, but no process, port or folder."""
    if isolated:
        pytest.importorskip("ipyparallel")
    manager, client = start_new_kernel(
        kernel_name="python3", env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    def folders() -> list[Path]:
        return list(tmp_path.glob("ortlab-*"))

    try:
        pid, folder = Kernel(client)(TRAINS.format(isolated=isolated)).text.split()[-2:]
        before = {*psutil.Process(int(pid)).children(recursive=True), psutil.Process(int(pid))}
        # A restarted kernel has the same ports as before.
        ports = {each for each in footprint(int(pid))[1] if each[1] not in manager.ports}
        assert ports
        assert bool(folders()) == isolated
        if how == "SIGTERM":
            os.kill(int(pid), signal.SIGTERM)
        elif how == "shutdown":
            manager.shutdown_kernel()
        else:
            manager.restart_kernel()
        _, alive = psutil.wait_procs(before, timeout=HANGS_S)
        assert not alive
        assert not [each for each in ports if listens(each)]
        assert not folders()
        kept = RunFolder(Path(folder))
        assert kept.read_json("run")["state"] == "stopped"
        assert len(kept.read_metrics().rows) == kept.read_checkpoint().position.step >= 3
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.nightly
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ENDS)
def test_a_run_ends_soon_after_its_step(how: str) -> None:
    """The limit is loose, as other tests may run; `python -m tests.bench.ending` checks 2 s."""
    found = measured(500, how)
    assert found["took_s"] < found["step_s"] + 10
