"""Users' own loops as runs: steps, values that are logged, history, comparison and bad input."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import ortlab
from ortlab.checkpoint.checkpoint import Checkpoint
from ortlab.history.saved_run import SavedRun, find
from ortlab.metrics.recorder import INDEX
from ortlab.session import session
from ortlab.training import loop_run
from ortlab.training.loop_run import LoopRun
from ortlab.utils.process_memory import SAMPLER
from tests.support.needed_engines import needs
from tests.support.worker_runs import Network, data


@pytest.fixture(autouse=True)
def _nothing_left_behind(threads_end: None) -> Iterator[None]:
    before = torch.Tensor.backward
    yield
    assert torch.Tensor.backward is before
    assert not SAMPLER.running


def loop(model: nn.Module, *, steps: int = 12, accumulation: int = 1) -> list[float]:
    """Train as users write it, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    found = []
    batches = iter(DataLoader(data(), batch_size=8))
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulation):
            inputs, targets = next(batches)
            loss = functional.cross_entropy(model(inputs), targets) / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def interrupted(_: Any) -> None:
    raise KeyboardInterrupt


def column(run: LoopRun, name: str) -> list[float]:
    values: list[float] = run.recorder.rows()[:, INDEX[name]].tolist()
    return values


@pytest.mark.parametrize("engine", ["eager", "ort", "ortmodule"])
def test_each_step_of_the_optimizer_is_one_of_the_run(engine: str) -> None:
    needs(engine)
    expected = loop(Network())
    model = Network() if engine == "eager" else ortlab.wrap(Network(), engine=engine)
    with ortlab.track(model, name=f"mine-{engine}") as run:
        loop(model)
    assert column(run, "step") == list(range(1, 13))
    assert column(run, "loss") == pytest.approx(expected, rel=1e-4)
    assert column(run, "lr") == [0.125] * 12
    assert column(run, "samples") == [8] * 12
    parts = [column(run, f"{each}_ms") for each in ("data", "forward", "backward", "optimizer")]
    sums = np.sum(parts, axis=0)
    assert all(sums > 0)
    assert all(sums <= np.array(column(run, "step_ms")) + 0.01)
    assert (run.name, run.state, run.step) == (f"mine-{engine}", "finished", 12)
    assert run.engine_used == engine


def test_micro_batches_are_one_step() -> None:
    model = Network()
    with ortlab.track(model) as run:
        expected = loop(model, steps=4, accumulation=3)
    assert column(run, "loss") == pytest.approx(expected)
    assert column(run, "samples") == [24] * 4


class Slow(nn.Linear):
    """Takes 50 ms where the loop validates."""

    validates = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.validates:
            time.sleep(0.05)
        return super().forward(inputs)


@pytest.mark.parametrize("how", ["eval", "train", "no_grad", "logged"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_validation_is_no_part_of_a_step(how: str, accumulation: int) -> None:
    model, inputs = Slow(4, 3), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validated_s = 0.0

    def validate() -> None:
        nonlocal validated_s
        began = time.perf_counter()
        model.validates = True
        model.train(how not in ("eval", "no_grad"))
        with torch.set_grad_enabled(how != "no_grad"):
            total = sum(model(inputs).sum() for _ in range(2))
        model.validates = False
        model.train()
        validated_s += time.perf_counter() - began
        if how == "logged":
            run.log(val_loss=total)

    began = time.perf_counter()
    with ortlab.track(model, optimizer=optimizer) as run:
        for step in range(6):
            for part in range(accumulation):
                if step % 2 and part == (0 if how == "logged" else accumulation - 1):
                    validate()
                model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        passed_s = time.perf_counter() - began
    assert column(run, "samples") == [8 * accumulation] * 6
    assert sum(column(run, "step_ms")) / 1000 < passed_s - validated_s
    parts = [column(run, f"{each}_ms") for each in ("data", "forward", "backward", "optimizer")]
    assert np.all(np.array(parts) >= 0)
    assert all(np.sum(parts, axis=0) <= np.array(column(run, "step_ms")) + 0.01)


def test_a_batch_that_is_counted_replaces_what_the_model_is_called_with() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model) as run:
        for inputs, targets in itertools.islice(DataLoader(data(), batch_size=8), 3):
            run.count(inputs[:5])
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert column(run, "samples") == [5] * 3


@pytest.mark.parametrize("returned", [lambda x: SimpleNamespace(logits=x), lambda x: (x, 2 * x)])
def test_samples_count_once_whatever_the_model_returns(returned: Callable[[Any], Any]) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Network()

        def forward(self, inputs: torch.Tensor) -> Any:
            return returned(self.inner(inputs))

    model = Holder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model) as run:
        for inputs, targets in itertools.islice(DataLoader(data(), batch_size=8), 3):
            found = model(inputs)
            logits = sum(found) if isinstance(found, tuple) else found.logits
            functional.cross_entropy(logits, targets).backward()
            optimizer.step()
    assert column(run, "samples") == [8] * 3


def test_a_loss_that_is_only_logged_is_told_where_it_is_nan() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model) as run:
        for loss in (1.0, math.nan, 2.0):
            optimizer.step()
            run.log(loss=loss)
    assert [event.text for event in run.recorder.events("not_finite")] == [
        "the loss is nan at step 2"
    ]


def test_a_long_loop_saves_checkpoints_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_run, "_SAVED_EVERY_S", 0.0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model, optimizer=optimizer) as run:
        for inputs, targets in DataLoader(data(), batch_size=8):
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    kept = [each.name for each in run.checkpoints]
    assert kept[-1] == "final"
    assert kept[:-1], "at least the last one that waited for the writer"
    assert Checkpoint.load(run.checkpoints[-2].path).position.step <= run.step


def test_calls_that_a_backward_uses_are_counted_once() -> None:
    model, inputs = Network(), data()[:8][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model) as run:
        (model(inputs) - model(inputs[:4]).mean()).sum().backward()
        optimizer.step()
        for reentrant in (False, True):
            given = inputs.clone().requires_grad_()
            checkpoint(model, given, use_reentrant=reentrant).sum().backward()
            optimizer.step()
        model.eval()  # as with frozen statistics
        model(inputs).sum().backward()
        optimizer.step()
        first, second = model(inputs).sum(), model(inputs[:2]).sum()
        first.backward()
        second.backward()
        optimizer.step()
        with torch.no_grad():
            targets = model(inputs)
        (model(inputs) - targets).square().sum().backward()
        optimizer.step()
    assert column(run, "samples") == [12, 8, 8, 8, 10, 8]
    assert np.array([column(run, f"{part}_ms") for part in ("data", "forward")]).min() >= 0


def test_what_the_generator_of_a_gan_makes_for_the_other_model_is_not_counted() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
    with ortlab.track(one) as run:
        for _ in range(4):
            other(one(torch.ones(6, 4)).detach()).sum().backward()
            time.sleep(0.01)
            second.step()
            other(one(torch.ones(2, 4))).sum().backward()
            first.step()
    assert column(run, "samples") == [2] * 4
    assert min(column(run, "step_ms")) > 10, "the other model's training is a part of the step"


def test_steps_of_another_model_belong_to_the_model_s() -> None:
    one, other = nn.Linear(4, 1), nn.Linear(4, 1)
    expected = []
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other))
    with ortlab.track(one) as run:
        for _ in range(5):
            for model, optimizer in ((other, second), (one, first)):
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                optimizer.step()
            expected.append(loss.item())
    assert column(run, "loss") == expected


def test_values_that_are_logged() -> None:
    model = Network()
    with ortlab.track(model) as run:
        for step in range(4):
            loop(model, steps=1)
            run.log(loss=torch.tensor(0.5) * step, grad_norm=np.float32(2), epoch=step / 2)
            if step % 2:
                run.log(f1=0.25 * step, val_loss=1.0 + step)
    assert column(run, "loss") == [0, 0.5, 1, 1.5]
    assert column(run, "grad_norm") == [2] * 4
    assert column(run, "epoch") == [0, 0.5, 1, 1.5]
    events = [(event.step, event.values) for event in run.recorder.events("eval")]
    assert [step for step, _ in events] == [2, 4]
    assert events[1][1]["f1"] == 0.75
    assert events[1][1]["loss"] == 4.0


def test_it_is_in_the_history_and_in_comparisons(tmp_path: Path) -> None:
    for name in ("first", "second"):
        model = Network()
        with ortlab.track(model, name=name) as run:
            loop(model)
            run.log(**{"f1 <b>": 0.5, "loss": 0.25})
    assert "f1 &lt;b&gt;" in ortlab.list_runs()._repr_html_()
    saved = ortlab.open_run("first")
    assert saved.metrics.rows[-1, INDEX["loss"]] == 0.25
    names = {each.name for each in ortlab.compare_runs("first", "second").differences}
    assert "evaluation f1 <b> (best)" in names
    saved.to_tensorboard(tmp_path)
    assert list(tmp_path.rglob("events.*"))


def test_a_loop_that_raises_is_a_run_that_failed() -> None:
    model = Network()
    run = ortlab.track(model)
    with pytest.raises(ZeroDivisionError), run:
        len(loop(model, steps=3)) / 0
    assert (run.state, run.step) == ("failed", 3)
    assert run.status().error == "ZeroDivisionError: division by zero"
    run = ortlab.track(model)
    with pytest.raises(KeyboardInterrupt), run:
        interrupted(loop(model, steps=2))
    assert (run.state, run.step) == ("stopped", 2)


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.ones(2), np.ones(3)])
def test_what_is_no_number(value: Any) -> None:
    model = Network()
    with ortlab.track(model) as run:
        loop(model, steps=1)
        with pytest.raises(ValueError, match=r"cannot log f1=.*: give a number or a tensor of one"):
            run.log(loss=3.0, f1=value)
        run.log(f1=math.nan)
    assert column(run, "loss") != [3.0]
    (event,) = run.recorder.events("eval")
    assert math.isnan(event.values["f1"])


def test_a_loss_that_is_nan_is_told_when_the_loop_is_over() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ortlab.track(model) as run:
        for value in (1.0, math.nan, math.nan):
            model(torch.full((2, 4), value)).sum().backward()
            optimizer.step()
    for each in (run, SavedRun(run.folder)):
        assert "the loss is nan at step 2" in each.status().lines
    assert find(run.name).not_finite == "nan"
    with ortlab.track(model) as unknown:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert find(unknown.name).not_finite == ""


def test_ten_thousand_metrics() -> None:
    model = Network()
    with ortlab.track(model) as run:
        for _ in range(2):
            run.log(**{f"m{number}": number for number in range(10_000)})
    warnings = [each.text for each in run.recorder.events("warning")]
    assert warnings == ["10000 metrics were logged at once; 100 are kept"]
    assert [len(each.values) for each in run.recorder.events("eval")] == [102, 102]


def test_stop_is_for_the_loop_to_see() -> None:
    model = Network()
    with ortlab.track(model) as run:
        assert session.under_way(run.name) is run
        run.stop()
        assert run.stopping
    assert run.state == "stopped"


def test_another_model_s_loop_in_between_is_not_recorded() -> None:
    model = Network()
    with ortlab.track(model) as run:
        loop(model, steps=2)
        loop(Network(), steps=2)
        loop(model, steps=0)
    assert run.step == 2


def test_a_loop_continues_from_its_checkpoint(tmp_path: Path) -> None:
    batches = list(DataLoader(data(), batch_size=8))[:20]

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = Network(0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def steps(
        model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, part: Any
    ) -> None:
        for inputs, targets in part:
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    torch.manual_seed(7)
    model, optimizer, scheduler = made()
    torch.manual_seed(7)
    with ortlab.track(model, name="whole", optimizer=optimizer, lr_scheduler=scheduler) as whole:
        steps(model, optimizer, scheduler, batches[:12])
        path = whole.checkpoint(tmp_path / "twelve.safetensors")
        steps(model, optimizer, scheduler, batches[12:])
    assert [each.name for each in whole.checkpoints] == ["final"]
    for where in (path, "whole"):
        model, optimizer, scheduler = made()
        again = ortlab.track(model, optimizer=optimizer, lr_scheduler=scheduler, resume_from=where)
        with again as run:
            first = run.step
            steps(model, optimizer, scheduler, batches[first:])
        assert (first, run.step) == (12 if where == path else 20, 20)
        told = f"continues {'twelve.safetensors' if where == path else where} from step {first}"
        assert run.status().lines[0] == SavedRun(run.folder).status().lines[0] == told
        # The metrics of an earlier run are read from its folder, with 9 digits.
        assert column(run, "loss")[-8:] == pytest.approx(column(whole, "loss")[-8:], rel=1e-8)
        assert column(run, "lr")[-8:] == pytest.approx(column(whole, "lr")[-8:])
    assert column(run, "step") == list(range(1, 21))
    other = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"by ortlab\.track\(model, optimizer=.*'whole'\)"):
        ortlab.resume("whole")
    with pytest.raises(ValueError, match="is not in the model"):
        ortlab.track(other, optimizer=torch.optim.SGD(other.parameters()), resume_from="whole")
    with pytest.raises(ValueError, match="resume_from needs the loop's optimizer"):
        ortlab.track(model, resume_from="whole")
    with pytest.raises(ValueError, match=r"checkpoints need the model: with ortlab.track\(model"):
        ortlab.track(batches, optimizer=optimizer)
    with ortlab.track(model) as run, pytest.raises(ValueError, match="needs the loop's optimizer"):
        run.checkpoint()


class Stateless:
    """Neither an optimizer nor a scheduler."""


def test_an_optimizer_or_scheduler_that_cannot_be_saved_is_refused_before_the_loop() -> None:
    model, other = Network(), Network()
    optimizer, foreign = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    before = len(ortlab.list_runs())
    given: dict[str, dict[str, Any]] = {
        r"optimizer=<.*Stateless.* has no state_dict\(\)": {"optimizer": Stateless()},
        r"has no state_dict\(\); give a scheduler": {"optimizer": optimizer, "lr_scheduler": 3},
        "SGD has no parameter of this Network; create it": {"optimizer": foreign},
        "has no parameter of this": {"optimizer": torch.optim.lr_scheduler.StepLR(optimizer, 2)},
        "lr_scheduler needs the loop's optimizer, too": {"lr_scheduler": optimizer},
    }
    for told, arguments in given.items():
        with pytest.raises(ValueError, match=told):
            ortlab.track(model, **arguments)
    assert len(ortlab.list_runs()) == before


def test_an_optimizer_that_wraps_others_is_taken_as_it_is() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.state_dict = optimizer.state_dict
            self.load_state_dict = optimizer.load_state_dict

    model = Network()
    optimizer: Any = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with ortlab.track(model, optimizer=optimizer) as run:
        loop(model, steps=2)
    assert [each.name for each in run.checkpoints] == ["final"]


def test_a_loop_ends_though_its_state_cannot_be_saved() -> None:
    class Raises(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise AttributeError("no state")

    model = Network()
    with ortlab.track(model, optimizer=Raises(model.parameters(), lr=0.1)) as run:
        loop(model, steps=2)
    assert run.state == "finished"
    told = [event.text for event in run.recorder.events("warning")]
    assert told == ["no checkpoint of the end of the loop: no state"]
    assert f"warning at step 2: {told[0]}" in run.status().lines


def test_an_evaluation_without_a_loss_has_none() -> None:
    model = Network()
    with ortlab.track(model) as run:
        loop(model, steps=1)
        run.log(f1=0.5)
        with pytest.raises(ValueError, match="has no result: it has not ended"):
            run.result()
    assert "evaluation (last, step 1): f1 0.5" in run.status().lines
    assert " -, f1" not in str(ortlab.list_runs(limit=1))
    result = run.result()
    assert (result.state, result.steps) == ("finished", 1)
    assert str(result.after) == "f1 0.5"
    assert str(ortlab.open_run(run.name).result()) == str(result)
