"""Tests of ``%ort status`` and ``%ort help``, typed as a user types them."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

import ortlab
from ortlab.engines.base import Report
from ortlab.session import session
from tests.support.needed_engines import needs
from tests.support.typed_magics import Typist
from tests.support.waiting import until

COUNTED = """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden.relu() + torch.histc(hidden.detach(), 8))
"""
"""A model with an operator that ORT lacks, between two that it has."""


def test_nothing_yet(ip: Typist) -> None:
    out = ip("%ort")
    assert ip("%ort status").partition(": ")[2] == out.partition(": ")[2]
    assert "no model is wrapped" in out
    assert "no run yet" in out
    assert "%ort finetune model data trains one" in out
    assert "%ort help lists all commands" in out
    assert ip.completions("%ort stat") == ["status"]


def test_graphs_and_segments_of_a_model(ip: Typist) -> None:
    needs("ort")
    ip(COUNTED)
    ip("%%ort --engine ort\nnet = Counted()\nalias = net")
    assert "net, alias  Counted  ort           ort          none yet  -" in ip("%ort")
    ip("for x, _ in batches(): net(x).sum().backward()")
    row = ortlab.status().models[0]
    assert row.graphs is not None
    assert row.graphs.graphs == 2
    assert row.graphs.torch_segments == 1
    assert 0 < (row.graphs.ort_share or 0) < 1
    out = ip("%ort status")
    assert f"{row.graphs.ort_segments} segments, " in out
    assert "1 segment, " in out
    assert "aten.histc" in out


def test_a_fallback_is_named(ip: Typist) -> None:
    ip("%%ort --engine eager\nnet = Net()")
    line = ip("%ort").splitlines()[3]
    assert line.split() == ["net", "Net", "eager", "eager", "-", "-", "-", "-"]


def test_runs_with_state_while_they_train(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip("run = %ort finetune net data --loss cross_entropy --engine eager --epochs 100000")
    seen: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(50):
                repr(ortlab.status())
        except BaseException as error:  # noqa: BLE001 - the thread must not end silently
            seen.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not seen
    until(lambda: ip["run"].step > 0)
    name = ip["run"].name
    (line,) = (each for each in ip("%ort").splitlines() if each.startswith(f"{name} "))
    _, state, step, asked, used, model, kind = line.split()
    assert (state, asked, used, model, kind) == ("running", "eager", "eager", "net", "(Net)")
    assert step.endswith("/400,000")
    ip("run.stop()\nawait run")
    assert f"{name}  stopped" in ip("%ort status")
    ip("bad = [(torch.randn(4, 3), torch.randint(2, (4,)))]\nother = Net()")
    ip("failed = %ort finetune other bad --loss cross_entropy --engine eager")
    assert ip["failed"].wait_over(60)
    out = ip("%ort")
    assert f"{ip['failed'].name}  failed" in out
    assert f"{ip['failed'].name}: RuntimeError: mat1 and mat2 shapes" in out


def test_a_search_is_listed(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip("race = %ort race net data --engines eager --precisions fp32 --rounds 1\nawait race")
    assert f"{ip['race'].name}  finished" in ip("%ort") or "failed" in ip("%ort")
    session.searches.clear()


def test_names_are_escaped_on_the_page(ip: Typist) -> None:
    ip("net = type('<b>Net', (Net,), {})()\n%ort wrap net --engine eager")
    page = ortlab.status()._repr_html_()
    assert "&lt;b&gt;Net" in page
    assert "<b>" not in page


def test_a_report_that_cannot_be_read_does_not_hide_the_others(
    ip: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    ip("%%ort --engine eager\nnet = Net(); other = Net()")
    kind = type(session.wrapped.entries[0].engine)
    report = kind.report

    def broken(self: Any, wrapped: Any) -> Report:
        if wrapped is ip["net"]:
            raise RuntimeError("dictionary changed size during iteration")
        return report(self, wrapped)

    monkeypatch.setattr(kind, "report", broken)
    out = ip("%ort")
    assert "net: its report cannot be read now: RuntimeError: dictionary changed size" in out
    assert "\nother  Net" in out


def test_help_is_a_command(ip: Typist) -> None:
    assert ip("%ort help") == ip("%ort --help")
    assert ip("%ort help finetune") == ip("%ort finetune --help")
    assert "did you mean 'finetune'?" in ip.refused("%ort help finetun")
    assert ip.completions("%ort help fin") == ["finetune"]


def test_the_status_of_a_new_process_needs_no_torch() -> None:
    script = "import sys, ortlab; print(ortlab.status()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no run yet" in done.stdout
