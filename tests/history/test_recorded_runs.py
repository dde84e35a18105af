"""Tests that runs recorded by an earlier version are listed and resume as they would have then.

``recorded/`` has a run of 12 steps that was stopped after 6, for each engine, as ortlab wrote it
before settings, engines and classes got their present names. ``losses_of_whole_run.json`` has
[step, loss] of the same run without the stop.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.training.resume import names_of

RECORDED = Path(__file__).with_name("recorded")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 4, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(count)
    ]


def recorded_settings(engine: str) -> dict[str, Any]:
    return dict(json.loads((RECORDED / engine / "settings.json").read_text()))


@pytest.mark.parametrize("engine", ["eager", "ort"])
def test_a_recorded_run_is_listed_and_resumes(home: Path, engine: str) -> None:
    if engine != "eager" and (reason := compat.unavailable()) is not None:
        pytest.skip(reason)
    recorded = json.loads((RECORDED / engine / "run.json").read_text())
    name = recorded["name"]
    shutil.copytree(RECORDED / engine, home / "runs" / name)
    today = {"eager": "eager", "ort": "ortmodule"}[engine]
    (entry,) = ortlab.list_runs()
    assert (entry.name, entry.state, entry.steps) == (name, "stopped", 6)
    assert (entry.engine_asked, entry.engine_used) == (today, today)
    (stored,) = ortlab.list_runs(engine=today)
    saved = ortlab.open_run(name)
    assert stored.name == saved.name
    assert saved.settings.model.engine == today
    assert saved.settings.optim.learning_rate == recorded_settings(engine)["lr"]
    assert names_of(saved)["eval_dataset"] == recorded["names"]["eval_data"]
    run = ortlab.resume(name, network(), batches(12, 1), eval_dataset=batches(2, 2))
    assert run.result().steps == 12
    assert run.engine_used == today
    whole = dict(json.loads((RECORDED / engine / "losses_of_whole_run.json").read_text()))
    found = {int(row["step"]): row["loss"] for _, row in run.to_frame().reset_index().iterrows()}
    assert found == pytest.approx(whole, abs=1e-6)
