"""Tests that views close with their cell: when it runs again or is deleted, in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from tests.support.waiting import HANGS_S

PRELUDE = """
%load_ext ortlab
import threading
import ipywidgets, ortlab
from torch import nn
from tests.support.waiting import until
model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
train, valid = ortlab.data.digits()
def held():
    pumps = [each for each in threading.enumerate() if each.name == "ortlab-view"]
    return len(ipywidgets.widgets.widget._instances), len(pumps)
"""
FINETUNE = (
    "run = %ort finetune model train --loss cross_entropy --engine eager --device cpu "
    "--epochs 100000\nuntil(lambda: run.step > 1)"
)


class Front:
    """A front end that reports the cell in which code runs, as JupyterLab does."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client

    def run(self, code: str, cell: str | None = None, *, deleted: Sequence[str] = ()) -> str:
        """Return the output of `code`; raise AssertionError with its traceback if it fails."""
        session, printed = self._client.session, ""
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        message = session.msg("execute_request", content)
        if cell is not None:
            message["metadata"] = {"cellId": cell, "deletedCells": list(deleted)}
        self._client.shell_channel.send(message)
        while True:
            got: dict[str, Any] = self._client.get_iopub_msg(timeout=HANGS_S)
            assert got["msg_type"] != "error", "\n".join(got["content"]["traceback"])
            if got["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            if got["msg_type"] == "stream":
                printed += got["content"]["text"]
            if got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                return printed

    def held(self) -> tuple[int, int]:
        """Return the numbers of live widgets and of threads that update one."""
        widgets, pumps = self.run("print(*held())").split()
        return int(widgets), int(pumps)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        front = Front(client)
        front.run(PRELUDE)
        yield front
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("shows", ["%ort panel model train", "%ort runs"])
def test_a_view_ends_when_its_cell_runs_again_or_is_deleted(front: Front, shows: str) -> None:
    none = front.held()
    front.run(shows, "one")
    one = front.held()
    assert one[0] > none[0]
    front.run(shows, "one")
    front.run(shows, "one")
    assert front.held() == one
    front.run(shows, "two")
    assert front.held()[0] == 2 * one[0] - none[0]
    front.run("pass", "three", deleted=["one", "two"])
    assert front.held() == none


def test_without_word_of_cells_views_stay(front: Front) -> None:
    before, _ = front.held()
    front.run("%ort runs")
    one, _ = front.held()
    front.run("%ort runs")
    assert front.held()[0] - one == one - before > 0


def test_the_last_charts_of_a_run_that_goes_on_make_its_picture(front: Front) -> None:
    none = front.held()
    front.run(FINETUNE, "start")
    one = front.held()
    assert one[1] == none[1] + 1
    front.run("run", "again")
    two = front.held()
    front.run("run", "again")
    assert front.held() == two
    front.run("pass", "other", deleted=["start"])
    assert front.held() == one
    front.run("pass", "other", deleted=["again"])
    assert front.held() == one
    told = front.run(
        "run.stop(); _ = run.result()\nuntil((run.folder / 'charts.png').exists); print('drawn')"
    )
    assert told.endswith("drawn\n")
    assert front.held()[1] == none[1]
