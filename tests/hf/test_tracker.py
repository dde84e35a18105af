"""accelerate's loops with ortlab's tracker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader

import ortlab
from ortlab import hf
from ortlab.metrics.recorder import INDEX
from tests.support.needed_engines import needs
from tests.support.worker_runs import Network, data


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_a_loop_of_accelerate(engine: str) -> None:
    needs(engine)
    model: Any = Network() if engine == "eager" else ortlab.wrap(Network(), engine=engine)
    tracker = hf.OrtLabTracker(model, name="accelerated")
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=40)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("project", config={"lr": 0.01})
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            inputs, targets = batch
            loss = functional.cross_entropy(prepared(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.log({"f1": 0.75, "split": "held out"}, step=5)
    accelerator.end_training()
    run = tracker.run
    assert run is not None
    rows = run.recorder.rows()
    means = [(one + two) / 2 for one, two in zip(losses[::2], losses[1::2], strict=True)]
    assert rows[:, INDEX["loss"]].tolist() == pytest.approx(means, rel=1e-5)
    assert rows[:, INDEX["samples"]].tolist() == [80] * 5
    (event,) = run.recorder.events("eval")
    assert (event.step, event.values["f1"]) == (5, 0.75)
    notes = [each.text for each in run.recorder.events("note")]
    assert "configuration: lr=0.01" in notes
    assert "split: held out" in notes
    assert ortlab.open_run("accelerated").about["state"] == "finished"


def test_trackers_that_are_initialized_again_end_the_run_before() -> None:
    tracker = hf.OrtLabTracker(Network())
    tracker.start()
    first = tracker.run
    assert first is not None
    tracker.start()
    assert first.over()
    assert tracker.run is not first
    tracker.finish()
