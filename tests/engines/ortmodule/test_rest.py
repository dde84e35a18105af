"""Unused sessions release their memory, and are created again from the same graph."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.dispatch import GraphDispatcher
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.utils import process_memory
from tests.support import tiny
from tests.support.needed_engines import needs, needs_kernels
from tests.support.waiting import HANGS_S

IDS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": torch.tensor([0, 1, 1])}


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """Skip with the reason where ORT or the kernels are not available."""
    needs("ortmodule")
    needs_kernels()


def wrapped(**settings: Any) -> tuple[nn.Module, GraphDispatcher]:
    torch.manual_seed(0)
    model = ortlab.wrap(tiny.bert(0.1).train(), cache=False, **settings)
    return model, execution_of(model)


def forward(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(7)
    compat.ortmodule().set_seed(7)
    loss: torch.Tensor = model(**BATCH).loss
    return loss


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 1 and all(map(torch.equal, a, b))


@pytest.mark.parametrize("own", ["torch", "ort"])
def test_a_session_that_is_made_again_computes_the_same(own: str) -> None:
    model, execution = wrapped(kernels=own)
    forward(model)
    before = gradients(model, forward(model))
    exported_s = execution.report().export_s
    execution.rest()
    assert not any(each.is_open for each in execution.exports())
    assert same(before, gradients(model, forward(model)))
    assert execution.report().export_s == exported_s, "nothing was exported again"


@pytest.mark.parametrize("meanwhile", ["rest", "layers"])
def test_backward_runs_in_the_session_of_its_forward(meanwhile: str) -> None:
    """Backward finds its session after another one, or none, has replaced it."""
    model, execution = wrapped(kernels="torch")
    forward(model)
    before = gradients(model, forward(model))
    early = forward(model)
    if meanwhile == "rest":
        execution.rest()
    else:
        execution.configure(execution.settings.replace(recompute=meanwhile))
        assert same(before, gradients(model, forward(model)))
    assert same(before, gradients(model, early))


def test_other_settings_have_the_sessions_before_at_rest() -> None:
    model, execution = wrapped(kernels="torch")
    forward(model)
    (first,) = execution.exports()
    execution.configure(execution.settings.replace(precision="bf16"))
    assert not first.is_open
    forward(model)
    second = execution.exports()[-1]
    told = execution.kept()
    assert list(told) == ["fp32, kernels='torch'"]
    assert told["fp32, kernels='torch'"] > len(first.graph_to_run().SerializeToString())
    execution.configure(execution.settings.replace(precision="fp32"))
    forward(model)
    assert (first.is_open, second.is_open) == (True, False)
    assert list(execution.kept()) == ["bf16, kernels='torch'"]


def test_what_was_in_use_last_is_let_go_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortlab.engines.ortmodule.dispatch._EXPORTS", 2)
    model, execution = wrapped(kernels="torch")
    exported_s = [0.0]
    for precision, arena in (
        ("fp32", True),
        ("bf16", True),
        ("fp32", True),
        ("fp32", False),
        ("fp32", True),
    ):
        execution.configure(execution.settings.replace(precision=precision, arena=arena))
        forward(model)
        exported_s.append(execution.report().export_s)
    new = [later > earlier for earlier, later in itertools.pairwise(exported_s)]
    assert new == [True, True, False, True, False]
    assert list(execution.kept()) == ["fp32, kernels='torch', arena=False"]


def test_what_is_at_rest_is_let_go_where_memory_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, execution = wrapped(kernels="torch")
    forward(model)
    monkeypatch.setattr(process_memory, "_SCARCE", 1.0)  # the share that must be free
    execution.configure(execution.settings.replace(precision="bf16"))
    forward(model)
    assert not execution.kept()
    assert len(execution.exports()) == 1
    assert "graphs for fp32, kernels='torch' were released: memory is low" in (
        execution.report().notes
    )
    gradients(model, forward(model))


def test_a_run_tells_what_it_keeps_for_a_return() -> None:
    """A run reports the graphs cached for earlier settings, even on another engine.

    When it is over, no session holds a step's memory.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    wrapper = ortlab.wrap(model, cache=False)
    lines: list[list[str]] = []
    changes = iter([{"precision": "bf16"}, {"engine": "eager"}, {"engine": "ortmodule"}])

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Apply the next change in each step, and record the run's status before it."""
        run = ortlab.session.session.last_run
        if run is not None and run.name == started[0] and torch.is_grad_enabled():
            lines.append(
                [line for line in run.status().lines if "cached for earlier settings" in line]
            )
            if (change := next(changes, None)) is not None:
                run.apply(**change)
        return nn.functional.cross_entropy(output, target)

    started = [""]
    run = ortlab.finetune(wrapper, data, loss=loss, batch_size=8, engine="ortmodule", cache=False)
    started[0] = run.name
    run.result(timeout=HANGS_S)
    told = [re.sub(r"[\d.]+ KiB", "N KiB", each) for found in lines for each in found]
    assert "cached for earlier settings: ortmodule fp32 (N KiB)" in told
    assert "cached for earlier settings: ortmodule fp32 (N KiB), ortmodule bf16 (N KiB)" in told
    assert not [line for line in run.status().lines if "cached for earlier settings" in line]
    assert not any(each.is_open for each in execution_of(wrapper).exports())


MEMORY = """
import torch, ortlab
from torch import nn
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.utils.threads import trim
from ortlab.utils.process_memory import _host_memory
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)))
model = ortlab.wrap(model, cache=False)
x = torch.randn(32768, 64)
def resident():
    trim()
    return _host_memory()[0]
for _ in range(2):
    model(x).square().mean().backward()
model.zero_grad()  # gradients lie in the memory of a session
before = resident()
execution_of(model).rest()
print((before - resident()) >> 20, (x.nbytes * 12) >> 20)
"""


def test_the_memory_of_a_step_goes_back_to_the_system() -> None:
    """The memory of a step is released; its activations take at least 96 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    given_back, activations = map(int, done.stdout.split()[-2:])
    assert given_back >= activations
