"""Tests of races between tiny models, whichever configuration wins them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.torch.stepper import Eager, TorchStepper
from ortlab.search import start
from ortlab.search.feed import Feed, split
from ortlab.search.memory import Line
from ortlab.search.race import Race, field_of
from ortlab.search.result import Cell, RaceResult
from ortlab.session import session
from ortlab.settings import FinetuneSettings, RaceSettings, TuneSettings
from tests.support.small_classifier import Net, pairs
from tests.support.tiny import bert
from tests.support.typed_magics import Typist
from tests.support.waiting import until

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
FAST: dict[str, Any] = {"engines": "eager", "rounds": 2, "steps": 2, "device": "cpu"}


pytestmark = pytest.mark.usefixtures("one_thread")


def sentences(number: int = 4, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(50, (rows, 8), generator=made),
            "labels": torch.randint(2, (rows,), generator=made),
        }
        for _ in range(number)
    ]


@pytest.fixture
def own_workers() -> Iterator[None]:
    """Check that there are no workers before; stop those left afterwards."""
    assert session.workers is None
    yield
    if session.workers is not None:
        session.workers.stop()
    session.workers = None


def race(model: nn.Module, data: Any, **options: Any) -> RaceResult:
    return ortlab.race(model, data, **{**FAST, **options}).result(120)


@pytest.mark.parametrize("kind", [RaceSettings, TuneSettings])
def test_engines_that_cannot_run_here_are_left_out(
    kind: type[RaceSettings | TuneSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names them, unless they were asked for: their rows then have the reason."""
    monkeypatch.setattr(compat, "unavailable", lambda: "no ORT is installed. pip install it")
    settings, notes = start.of_this_machine(kind.of({}))
    assert not {"ortmodule", "ort_fused"} & {*settings.engines.split(",")}
    assert "eager" in settings.engines.split(",")
    assert "left out: ortmodule, ort_fused, because no ORT is installed" in notes
    asked = kind.of({"engines": "ortmodule"})
    assert start.of_this_machine(asked) == (asked, ())


# ---- measurements --------------------------------------------------------------------------------


@needs_ort
def test_every_set_up_has_its_row() -> None:
    result = race(bert(), sentences(), engines="ortmodule", memory="1GiB")
    labels = [cell.label for cell in result.cells]
    assert labels == ["eager fp32", "ortmodule fp32", "ortmodule bf16"]
    for cell in result.cells:
        assert cell.reason is None, cell.reason
        assert len(cell.step_ms) == 2
        if cell.settings["engine"] == "ortmodule":  # eager torch's first step is like any other
            assert cell.first_step_s > min(cell.step_ms) / 1e3
        assert cell.steps == 1 + 1 + 2 * (2 + 2)
        assert abs(result.loss_difference(cell)) < 0.02 * result.reference.loss
    eager, ort, low = result.cells
    weights = sum(p.numel() * p.element_size() for p in bert().parameters())
    assert eager.peak_bytes >= 4 * weights  # weights, gradients, two moments
    assert (eager.peak_from, ort.peak_from) == ("measured", "graph")
    assert "step memory" in repr(result.table()).splitlines()[0]
    assert ort.max_batch is not None
    assert low.max_batch is not None
    assert 1000 < ort.max_batch < low.max_batch
    assert result.speed(eager) is not None
    assert not result.interrupted


def test_weights_are_judged_by_what_training_made_of_them() -> None:
    """The reference's loss is that of a run with the same steps, independent of its competitors."""
    model, data = bert(), sentences()
    result = race(model, data, lr=1e-2)
    assert len(result.cells) == 2
    cell = result.reference
    alone = copy.deepcopy(model)
    stepper = Eager().prepare(alone, None, FinetuneSettings.of(engine="eager", lr=1e-2))
    for at in range(cell.steps):
        stepper.step([data[at % len(data)]], lr=1e-2)
    alone.eval()
    with torch.no_grad():
        losses = [alone(**batch).loss.item() for batch in data]
    assert cell.loss == pytest.approx(np.mean(losses), rel=1e-4)


def test_all_get_the_same_batches_and_seeds_in_shuffled_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, list[tuple[float, float]]] = {}
    order: list[int] = []
    step = TorchStepper.step

    def watched(self: Any, batches: Any, *, lr: float) -> Any:
        mask = torch.rand(1).item()
        seen.setdefault(id(self), []).append((batches[0][0].sum().item(), mask))
        order.append(id(self))
        return step(self, batches, lr=lr)

    monkeypatch.setattr(TorchStepper, "step", watched)
    data = pairs(3)
    result = race(Net(), data, loss="cross_entropy", rounds=8, steps=1, memory="1GiB")
    first, second = seen.values()
    raced = result.reference.steps
    assert raced == 1 + 1 + 2 + 8
    assert first[:raced] == second[:raced]
    assert [total for total, _ in first[:raced]] == [
        data[at % 3][0].sum().item() for at in range(raced)
    ]
    turns = order[4 : 4 + 2 * 10]
    each_round = [tuple(turns[at : at + 2]) for at in range(0, len(turns), 2)]
    assert all(set(both) == set(seen) for both in each_round), "not all had a turn"
    assert len(set(each_round)) == 2, "the order is the same in each round"


def test_the_model_and_the_random_states_stay_as_they_are() -> None:
    model = Net()
    model.body.eval()
    model(torch.randn(4, 4)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = DataLoader(
        TensorDataset(*map(torch.cat, zip(*pairs(), strict=True))),
        batch_size=4,
        shuffle=True,
        generator=(generator := torch.Generator().manual_seed(3)),
    )
    drawn = generator.get_state()
    result = race(model, loader, loss="cross_entropy")
    assert result.best() is not None
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert torch.equal(generator.get_state(), drawn)


@needs_ort
def test_a_wrapped_model_races_with_its_own_options() -> None:
    model = bert()
    wrapped = ortlab.wrap(model, kernels="ort", memory_level=1)
    made = ortlab.race(wrapped, sentences(1), **{**FAST, "precisions": "fp32"})
    assert made.result(120).reference.label == "eager fp32"
    assert made.settings == {
        "kernels": "ort",
        "memory_level": 1,
        "device": "cpu",
        "engine": "eager",
        "precision": "fp32",
    }
    ortlab.unwrap(wrapped)


# ---- errors --------------------------------------------------------------------------------------


def test_a_set_up_that_cannot_run_says_why_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")  # no C++ compiler
    result = race(Net(), pairs(), loss="cross_entropy", engines="compile", precisions="fp32")
    eager, compiled = result.cells
    assert "C++ compiler" in (compiled.reason or "")
    assert len(eager.step_ms) == 2
    assert "C++ compiler" in repr(result)
    assert result.best() is eager


def test_one_that_fails_in_a_round_loses_its_figures_alone() -> None:
    class Tired(Net):
        calls: list[str] = []  # noqa: RUF012 - of all copies

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = torch.is_autocast_enabled("cpu")
            self.calls.append("low" if low else "full")
            if low and self.calls.count("low") > 9:
                raise ValueError("<b>tired</b> of it")
            return super().forward(x)

    result = race(Tired(), pairs(), loss="cross_entropy", rounds=4)
    full, low = result.cells
    assert low.reason == "<b>tired</b> of it"
    assert (low.step_ms, math.isnan(low.first_step_s)) == ((), True)
    assert len(full.step_ms) == 4
    assert "&lt;b&gt;tired&lt;/b&gt;" in result._repr_html_()
    assert "<b>tired" not in result._repr_html_()


@needs_ort
def test_the_examples_have_all_four_columns(own_workers: None) -> None:
    """The columns of ORT's training examples run on two workers, DeepSpeed's at ZeRO stage 1."""
    result = race(bert(), sentences(), preset="examples")
    labels = [cell.label for cell in result.cells]
    assert labels == ["torch", "ORT", "DeepSpeed", "DeepSpeed with ORT"]
    assert {cell.settings["workers"] for cell in result.cells} == {2}
    assert [cell.settings.get("zero_stage", 0) for cell in result.cells] == [0, 0, 1, 1]
    for cell in result.cells:
        assert cell.reason is None, cell.reason
        assert len(cell.step_ms) == 2
        assert cell.peak_from == "measured"
        assert cell.loss == pytest.approx(result.cells[0].loss, rel=1e-4)
    state = sum(p.nbytes for p in bert().parameters())
    assert result.cells[0].peak_bytes > 4 * state, "weights, gradients and two moments"
    assert "On workers: the largest of all workers" in repr(result)


def test_workers_race_one_process(own_workers: None) -> None:
    net = nn.Linear(4, 2)  # without dropout and batch statistics, which differ between ranks
    result = race(net, pairs(), loss="cross_entropy", precisions="fp32", workers="1,2")
    assert [cell.label for cell in result.cells] == ["eager fp32", "eager fp32 x 2"]
    one, two = result.cells
    assert one.settings == {"engine": "eager", "precision": "fp32"}
    assert two.settings == {**one.settings, "workers": 2, "zero_stage": 0}
    assert two.reason is None
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert session.workers is not None
    assert session.workers.busy is None, "they are free again"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": "2,4"}, "several numbers above 1; choose only one of 2, 4, with or without 1"),
        ({"workers": "two"}, "whole numbers above 0, separated by commas"),
        ({"workers": 0}, "whole numbers above 0, separated by commas"),
        ({"zero_stages": "0,1"}, "needs at least 2 workers; choose workers='1,2'"),
        ({"workers": 2, "zero_stages": "5"}, "choose from 0, 1, 2, 3"),
    ],
)
def test_a_field_of_workers_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaceSettings(**changes)


def test_a_field_of_workers_and_stages() -> None:
    made = field_of(
        RaceSettings(engines="eager", precisions="fp32", workers="1,2", zero_stages="0,1")
    )
    assert list(made) == ["eager fp32", "eager fp32 x 2", "eager fp32 x 2 ZeRO 1"]
    assert list(field_of(RaceSettings(engines="ortmodule", precisions="bf16", workers=2))) == [
        "eager fp32 x 2",
        "ortmodule bf16 x 2",
    ]


def test_a_stop_keeps_what_was_measured() -> None:
    made = ortlab.race(Net(), pairs(), loss="cross_entropy", **{**FAST, "rounds": 100_000})
    while "round 3" not in made.doing:
        assert not made.wait_over(0.01)
    made.stop()
    made.stop()
    result = made.result(60)
    assert result.interrupted
    lengths = {len(cell.step_ms) for cell in result.cells}
    assert 2 <= min(lengths) <= max(lengths) < 100_000
    assert "stopped before the end" in repr(result)
    assert made.settings["engine"] == "eager"


def test_ctrl_c_stops_it(capsys: pytest.CaptureFixture[str]) -> None:
    made = ortlab.race(Net(), pairs(), loss="cross_entropy", **{**FAST, "rounds": 100_000})

    def interrupt() -> None:
        until(lambda: bool(made.standing.reference.step_ms))  # the main thread waits by then
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert made.result().interrupted
    thread.join()
    assert "keeps its results" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"engines": "eager,orrt"}, "did you mean 'ort'"),
        ({"round": 3}, "unknown setting 'round'.*did you mean 'rounds'"),
        ({"num_train_epochs": 3}, "unknown setting 'num_train_epochs'"),
        ({"engine": "ortmodule"}, "did you mean 'engines'"),
        ({"memory": "much"}, "is not a memory size"),
        ({"loss": "mze"}, "did you mean 'mse'"),
    ],
)
def test_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ortlab.race(Net(), pairs(), **options)
    assert not session.searches


def test_one_at_a_time_and_not_beside_a_run() -> None:
    model = Net()
    run = ortlab.finetune(
        model, pairs(), loss="cross_entropy", engine="eager", num_train_epochs=100_000, device="cpu"
    )
    with pytest.raises(ValueError, match=f"{run.name} is active"):
        ortlab.race(model, pairs(), loss="cross_entropy")
    run.stop()
    run.result(60)
    made = ortlab.race(model, pairs(), loss="cross_entropy", **{**FAST, "rounds": 100_000})
    with pytest.raises(ValueError, match=f"{made.name} is active"):
        ortlab.race(model, pairs(), loss="cross_entropy")


def test_what_can_be_read_once_is_not_used_up() -> None:
    data = iter(pairs())
    with pytest.raises(ValueError, match="can be read only once"):
        ortlab.race(Net(), data, loss="cross_entropy")
    assert len(list(data)) == 4


# ---- evaluation of results -----------------------------------------------------------------------


def made_up(**cells: tuple[float, tuple[float, ...]]) -> RaceResult:
    """Return a result with these first steps (seconds) and further steps (milliseconds)."""
    small = Race(
        Net(), pairs(), RaceSettings(), shared={"loss": "mse"}, loss=nn.functional.mse_loss
    )
    rows = [
        Cell(label, {"engine": "ortmodule"}, first_step_s=first, step_ms=ms, steps=4, loss=0.5)
        for label, (first, ms) in cells.items()
    ]
    return dataclasses.replace(small.standing, cells=tuple(rows), samples=4, doing="")


def test_set_up_pays_off_after_so_many_steps() -> None:
    result = made_up(
        plain=(1.0, (100.0,)), quick=(6.0, (60.0,)), slow=(3.0, (110.0,)), light=(0.5, (90.0,))
    )
    # The first step takes 5 s more and each later one 40 ms less: 125 of them, plus the first.
    assert [result.pays_off(cell) for cell in result.cells[1:]] == [126, math.inf, 1]
    table = repr(result)
    assert "126 steps" in table
    assert "never" in table
    assert "at once" in table


def test_the_best_has_a_loss_that_is_a_number() -> None:
    result = made_up(plain=(1.0, (100.0, 120.0)), quick=(1.0, (50.0, 55.0)))
    assert result.best() is result.cells[1]
    broken = dataclasses.replace(result.cells[1], finite=False, loss=math.nan)
    result = dataclasses.replace(result, cells=(result.cells[0], broken))
    assert result.best() is result.cells[0]
    assert "not a number" in repr(result)


def test_the_best_has_the_highest_rate_in_the_table() -> None:
    """The median of an even number of rates is not that of their times."""
    result = made_up(plain=(1.0, (100.0, 50.0)), even=(1.0, (70.0, 72.0)))
    assert result.best() is result.cells[0]
    assert "plain is fastest with 60 samples/s" in repr(result)


def test_set_ups_within_the_noise_of_the_best_are_named() -> None:
    """The third is slower by less than rounds differ, but in each of them."""
    slow = (100.0, 200.0, 150.0, 120.0)
    result = made_up(
        plain=(1.0, slow),
        near=(1.0, (103.0, 196.0, 151.0, 121.0)),
        behind=(1.0, tuple(1.1 * ms for ms in slow)),
        none=(math.nan, ()),
    )
    assert "Within the noise of plain: near. More rounds" in repr(result)
    two = made_up(plain=(1.0, (100.0, 100.0)), far=(1.0, (200.0, 200.0)))
    assert "Within the noise of plain: far." in repr(two), "two rounds tell nothing apart"


def test_json_keeps_every_figure() -> None:
    result = made_up(plain=(1.0, (100.0, 120.0)), none=(math.nan, ()))
    stored = json.dumps(result.to_dict(), allow_nan=False)
    again = RaceResult.from_dict(json.loads(stored))
    assert again.to_dict() == result.to_dict()
    assert repr(again) == repr(result)
    with pytest.raises(ValueError, match="format version 2 of a race; expected 1"):
        RaceResult.from_dict({**result.to_dict(), "form": 2})


def test_a_line_through_two_peaks() -> None:
    mib = 2**20
    line = Line((16, 300 * mib), (8, 200 * mib))
    assert line.peak_bytes(32) == 500 * mib
    assert line.max_batch(1000 * mib) == 71  # 990 of 1000 MiB: (990 - 100) / 12.5
    assert line.max_batch(50 * mib) == 0
    assert Line((16, 301 * mib), (8, 300 * mib)).max_batch(1000 * mib) is None
    assert Line((16, 200 * mib), (8, 300 * mib)).max_batch(1000 * mib) is None


def test_the_same_samples_in_other_micro_batches() -> None:
    data = [{"x": torch.arange(8) + 8 * n, "scale": 3, "none": torch.ones(2)} for n in range(3)]
    feed = Feed(data, FinetuneSettings.of(gradient_accumulation_steps=1), 2)
    assert (feed.samples, feed.micro, len(feed)) == (8, 8, 2)
    ((first, second, third),) = feed.steps(3, 1, micro=3)
    assert [len(part["x"]) for part in (first, second, third)] == [3, 3, 2]
    assert torch.cat([part["x"] for part in (first, second, third)]).tolist() == list(range(8, 16))
    assert all(part["scale"] == 3 and len(part["none"]) == 2 for part in (first, second))
    assert [len(part[0]) for part in split((torch.ones(4, 2), torch.ones(4)), 4)] == [4]
    wide = Feed(data, FinetuneSettings.of(gradient_accumulation_steps=2), 5)
    assert (wide.samples, wide.micro, len(wide)) == (16, 8, 1), "the rest of an epoch is smaller"


def test_the_best_settings_train_the_model() -> None:
    model = Net()
    made = ortlab.race(model, pairs(), loss=nn.functional.cross_entropy, learning_rate=1e-3, **FAST)
    best = made.result(60).best()
    assert best is not None
    assert made.settings["loss"] is nn.functional.cross_entropy
    assert made.settings["learning_rate"] == 1e-3
    assert "the next finetune of this Net uses engine=eager, precision=" in made.apply()
    run = ortlab.finetune(model, pairs(), loss="cross_entropy", num_train_epochs=100_000)
    assert run.settings.model.precision == best.settings["precision"]
    assert (run.settings.model.engine, run.settings.optim.learning_rate) == ("eager", 1e-3)
    other = {"fp32": "bf16", "bf16": "fp32"}[best.settings["precision"]]
    run.apply(precision=other)
    while run.current_settings.model.precision != other:
        assert not run.wait_over(0.01)
    assert run.name in made.apply()
    while run.current_settings.model.precision == other:
        assert not run.wait_over(0.01)
    run.stop()
    run.result(60)


# ---- magics --------------------------------------------------------------------------------------


def test_typed(ip: Typist) -> None:
    ip("net = Net(); data = batches(); metric = nn.CrossEntropyLoss()")
    ip(
        "race = %ort race net data --loss metric --engines eager --rounds 2 --steps 1 "
        "--batch-size 16 --kernels ort"
    )
    ip("result = race.result(60)")
    assert ip["race"].settings["kernels"] == "ort"
    assert ip["race"].settings["loss"] is ip["metric"]
    shown = ip("race")
    assert "is fastest with" in shown
    assert "eager bf16" in shown
    assert "--rounds N" in ip("%ort race --help")
    assert "did you mean '--rounds'" in ip.refused("%ort race net data --round 3")
    assert "nothing is called 'dat'" in ip.refused("%ort race net dat")
    assert "no option --epochs" in ip.refused("%ort race net data --epochs 3")
    assert ip.completions("%ort race net da") == ["data"]
    assert ip.completions("%ort race net data --preset ") == ["examples"]
    assert "--engines" in ip.completions("%ort race net data --eng")


def test_stopped_by_the_magic(ip: Typist) -> None:
    ip("net = Net(); data = batches()")
    ip("race = %ort race net data --loss cross_entropy --engines eager --rounds 100000")
    name = ip["race"].name
    assert ip.completions("%ort stop ") == [name]
    assert ip(f"%ort stop {name}").startswith(f"{name} stops after the turn in flight")
    assert ip["race"].result(60).interrupted
