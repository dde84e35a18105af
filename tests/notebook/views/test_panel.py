"""Tests of the panel without a browser: its messages, a real run changed through it, its text."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.graph import planned_capture
from ortlab.notebook.magics.variables import Variables
from ortlab.notebook.views import charts
from ortlab.notebook.views import panel as panels
from ortlab.notebook.views.panel import Panel, PanelView
from ortlab.session import session
from ortlab.settings import LOSSES, PRECISIONS, FinetuneSettings
from ortlab.training.run import Run
from tests.support.needed_engines import needs
from tests.support.notebook_outputs import execute
from tests.support.practice import Practice
from tests.support.waiting import HANGS_S, until


class Gated(TensorDataset):
    """Data that yields a batch for each `allow`, so that a test controls the progress of a run."""

    def __init__(self) -> None:
        super().__init__(torch.randn(64, 8), torch.zeros(64, dtype=torch.int64))
        self.open = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        self.open.wait()
        return super().__getitem__(index)


@pytest.fixture
def data() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    gated.open.set()


@pytest.fixture
def run(data: Gated) -> Iterator[Run]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    run = ortlab.finetune(
        model, data, loss="cross_entropy", engine="eager", device="cpu", num_train_epochs=10_000_000
    )
    yield run
    run.stop()
    data.open.set()
    assert run.wait_over(20)


class Page:
    """The browser's state of a panel, and the messages that it sends."""

    def __init__(self, panel: Panel) -> None:
        self.panel, self.serial = panel, 0
        self.controls: dict[str, Any] = {}
        self.standing: dict[str, Any] = {}
        self.hear()

    def send(self, do: str, **edits: str) -> None:
        self.serial += 1
        told = {} if do in ("undo", "checkpoint", "open") else {"edits": edits}
        self.panel.receive({"do": do, "serial": self.serial, **told})
        self.hear()

    def hear(self) -> dict[str, Any]:
        news = self.panel.news()
        json.dumps(news, allow_nan=False)
        self.standing = news.get("standing", self.standing)
        if "controls" in news:
            self.controls = {each["name"]: each for each in news["controls"]}
        return news

    def wait(self, kind: str) -> str:
        deadline = time.monotonic() + HANGS_S
        while self.standing["result"][0] != kind:
            assert time.monotonic() < deadline, self.standing["result"]
            time.sleep(0.01)
            self.hear()
        text: str = self.standing["result"][1]
        return text


def test_an_edit_shows_its_cost_before_it_is_applied(run: Run) -> None:
    page = Page(Panel(run))
    assert page.controls["learning_rate"]["held"] == "5e-05"
    assert page.controls["learning_rate"]["costs"] == ["free"]
    page.send("edit", learning_rate="0.5", precision="bf16")
    assert page.standing["pending"] == [
        "precision=bf16 (was fp32)",
        "learning_rate=0.5 (was 5e-05)",
    ]
    assert page.standing["cost"].startswith("rebuild: ")
    assert page.standing["line"] == "run.apply(precision='bf16', learning_rate=0.5)"
    assert page.standing["memory"] == "no prediction: engine 'eager' has made no graph of the model"
    assert run.current_settings.optim.learning_rate == 5e-5
    page.send("edit")
    assert not page.standing["pending"]
    assert page.hear() == {}, "nothing new is nothing to send"


def test_what_is_applied_holds_and_its_cost_is_told(run: Run, data: Gated) -> None:
    page = Page(Panel(run))
    page.send("apply", learning_rate="0.5")
    assert page.standing["result"][0] == "asked"
    assert page.standing["busy"]
    data.open.set()
    told = page.wait("done")
    assert told.startswith("applied after step ")
    assert told.endswith(", at no cost: learning_rate=0.5 (was 5e-05)")
    assert run.current_settings.optim.learning_rate == 0.5
    assert page.controls["learning_rate"]["held"] == "0.5"
    assert not page.standing["edits"]
    assert page.standing["undo"] == "learning_rate=5e-05 (was 0.5)"


def test_the_switch_moves_a_run_into_a_process_of_its_own(run: Run, data: Gated) -> None:
    pytest.importorskip("ipyparallel")
    page = Page(Panel(run))
    switch = page.controls["isolated"]
    assert (switch["held"], [text for text, _ in switch["choices"]]) == ("off", ["on", "off"])
    page.send("edit", isolated="on")
    assert page.standing["pending"] == ["isolated=on (was off)"]
    assert page.standing["line"] == "run.apply(isolated=True)"
    data.open.set()
    page.send("apply", isolated="on")
    try:
        until(lambda: run.current_settings.parallel.isolated)
        assert page.wait("done").endswith(": isolated=True (was False)")
        assert page.controls["isolated"]["held"] == "on"
        assert session.workers is not None
        assert os.getpid() not in session.workers.pids
    finally:
        run.stop()
        assert run.wait_over(60)
        if session.workers is not None:
            session.workers.stop()
            session.workers = None


def test_undo_goes_back_one_change_at_a_time(run: Run, data: Gated) -> None:
    data.open.set()
    page = Page(Panel(run))
    for lr in ("0.5", "0.25"):
        page.send("apply", learning_rate=lr)
        page.wait("done")
    for lr in (0.5, 5e-5):
        page.send("undo")
        page.wait("done")
        assert run.current_settings.optim.learning_rate == lr
    assert page.standing["undo"] == ""
    with pytest.raises(ValueError, match="nothing to undo"):
        run.undo()


def test_what_was_edited_meanwhile_stays_an_edit(run: Run, data: Gated) -> None:
    page = Page(Panel(run))
    page.send("apply", learning_rate="0.5")
    page.send("edit", learning_rate="0.5", max_grad_norm="2")
    data.open.set()
    page.wait("done")
    assert page.standing["edits"] == {"max_grad_norm": "2"}
    assert page.standing["pending"] == ["max_grad_norm=2 (was 1)"]


def test_what_cannot_be_read_or_had_says_why_and_changes_nothing(run: Run) -> None:
    page = Page(Panel(run))
    page.send("edit", learning_rate="fast", max_grad_norm="-1", eval_steps="")
    assert page.standing["wrong"] == {
        "learning_rate": "--learning-rate takes a number, not 'fast'",
        "max_grad_norm": "max_grad_norm=-1.0 must be above 0, or None",
    }
    page.send("apply", learning_rate="fast")
    assert page.wait("refused") == "--learning-rate takes a number, not 'fast'"
    page.send("edit", zero_stage="1")
    assert page.standing["blocked"].startswith("zero_stage=1 needs at least 2 workers")
    assert page.standing["cost"] == ""
    page.send("apply", zero_stage="1")
    assert page.wait("refused").startswith("zero_stage=1 needs at least 2 workers")
    page.send("edit", zero_stage="1", workers="2")
    assert page.standing["blocked"] == ""
    assert page.standing["cost"] != ""
    page.send("edit", memory_level="1", memory_plans="plans.json")
    assert "choose one" in page.standing["wrong"]["memory_plans"]


class NoAutocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("this model has no bf16")
        return super().forward(x)


def test_a_change_that_fails_says_why_and_can_be_edited_on(data: Gated) -> None:
    data.open.set()
    run = ortlab.finetune(
        NoAutocast(8, 4),
        data,
        loss="cross_entropy",
        engine="eager",
        device="cpu",
        num_train_epochs=10**7,
    )
    try:
        page = Page(Panel(run))
        page.send("apply", precision="bf16")
        assert page.wait("refused").endswith("continues without it: this model has no bf16")
        assert page.standing["edits"] == {"precision": "bf16"}
        assert not page.standing["busy"]
    finally:
        run.stop()
        assert run.wait_over(20)


def test_a_checkpoint_is_kept_and_its_file_told(run: Run, data: Gated) -> None:
    data.open.set()
    page = Page(Panel(run))
    page.send("checkpoint")
    told = page.wait("done")
    assert Path(told.removeprefix("checkpoint saved: ")).is_file()


def test_a_run_that_is_over_takes_nothing(run: Run, data: Gated) -> None:
    page = Page(Panel(run))
    page.send("apply", learning_rate="0.5")
    run.stop()
    data.open.set()
    assert run.wait_over(20)
    page.hear()
    assert page.standing["over"]
    assert page.standing["result"][0] in ("done", "refused"), "the last step may have taken it"
    page.send("apply", learning_rate="0.1")
    assert "is over (stopped)" in page.wait("refused")


@pytest.fixture
def wrapped() -> nn.Module:
    try:
        return ortlab.wrap(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    except RuntimeError as error:
        pytest.skip(str(error))


def test_memory_is_predicted_from_the_plan_of_a_wrapped_model(wrapped: nn.Module) -> None:
    page = Page(Panel(wrapped, name="net"))
    page.send("open")
    assert page.standing["memory"].startswith("no prediction: Sequential has no graph yet")
    wrapped(torch.randn(4, 8)).sum().backward()
    plan = ortlab.memory_plan(wrapped)
    page.send("edit", batch_size="4096")
    now, then = (panels.memory(plan.peak_bytes(batch=size)) for size in (16, 4096))
    assert page.standing["memory"] == f"{now} → {then}"
    page.send("edit", learning_rate="0.1")
    assert page.standing["memory"] == f"{now}, unchanged"
    page.send("edit", workers="4", zero_stage="1", batch_size="4096")
    of_rank = plan.peak_bytes_of_rank(4, zero_stage=1, batch=1024)
    assert plan.peak_bytes_of_rank(4, batch=1024) == plan.peak_bytes(batch=1024)
    trained = sum(p.nbytes for p in wrapped.parameters())
    saved = plan.peak_bytes(batch=1024) - of_rank
    assert 0 < saved <= 2 * trained * 3 / 4
    told = f"{now} → {panels.memory(of_rank)} of each worker"
    assert page.standing["memory"] == told
    page.send("edit", workers="2", pipeline_stages="2", batch_size="16")
    assert "no prediction: each worker has a part of the model" in page.standing["memory"]
    page.send("edit", engine="eager")
    assert "no prediction: engine 'eager' has no graph" in page.standing["memory"]
    page.send("edit", opset="15")
    assert "no prediction: opset=15 needs another graph" in page.standing["memory"]


def test_memory_of_recomputing_is_predicted_and_comes_true() -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
    )

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = layers, nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            scores: torch.Tensor = self.head(x)
            return scores

    try:
        model = ortlab.wrap(Net())
    except RuntimeError as error:
        pytest.skip(str(error))
    model(torch.randn(512, 32)).sum().backward()
    page = Page(Panel(model))
    page.send("edit", batch_size="512", recompute="layers")
    now = ortlab.memory_plan(model).peak_bytes()
    said = page.standing["memory"]
    session.wrapped.configure(model, {"recompute": "layers"})
    model(torch.randn(512, 32)).sum().backward()
    then = ortlab.memory_plan(model).peak_bytes()
    assert then < 0.8 * now
    assert said.endswith(f" → {panels.memory(then)}")
    page.send("edit", recompute="layer")
    assert "did you mean" in page.standing["memory"]


def test_memory_of_engine_ort_is_predicted_for_any_size_and_budget() -> None:
    """A graph of one size predicts nothing; while a run trains, no other graph is made."""
    needs("ort")
    torch._dynamo.reset()  # torch makes the sizes vary that other models of this class had
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
    )
    wrapped: Any = ortlab.wrap(model, engine="ort")
    page = Page(Panel(wrapped))
    page.send("open")
    assert "no prediction: Sequential has no graph yet" in page.standing["memory"]
    wrapped(torch.randn(512, 32)).sum().backward()
    page.send("edit", batch_size="512")
    assert "no prediction: its graph holds for one size" in page.standing["memory"]
    plan = ortlab.memory_plan(wrapped)
    now = panels.memory(plan.peak_bytes(batch=16))
    page.send("edit", batch_size="256")
    then = panels.memory(plan.peak_bytes(batch=256))
    assert page.standing["memory"] == f"{now} → {then}"
    record: Any = wrapped_model(wrapped)
    settings = FinetuneSettings.of(engine="ort", activation_budget=0.3)
    with pytest.raises(ValueError, match="made in the first step after the change"):
        planned_capture.plan_for(record, settings, trains=True)
    page.send("edit", batch_size="512", activation_budget="0.3")
    assert planned_capture.plan_for(record, settings, trains=True)[1] == settings.model
    session.wrapped.configure(wrapped, {"activation_budget": 0.3})
    found = ortlab.memory_plan(wrapped).peak_bytes(batch=512)
    assert found < 0.95 * plan.peak_bytes(batch=512)
    assert f"→ {panels.memory(found)}" in page.standing["memory"]


def test_batches_of_a_loaders_own_have_a_greyed_size() -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.int64)))
    run = ortlab.finetune(
        nn.Linear(8, 4), loader, loss="cross_entropy", engine="eager", device="cpu", max_steps=1
    )
    page = Page(Panel(run))
    assert page.controls["batch_size"]["reason"].startswith("the DataLoader makes its own batches")
    page.send("edit", batch_size="4")
    assert page.standing["blocked"].startswith("batch_size=4 cannot be applied to a run")
    run.result(20)


def test_memory_of_a_return_is_read_from_the_graph_that_waits() -> None:
    try:
        model = ortlab.wrap(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    except RuntimeError as error:
        pytest.skip(str(error))

    def step(precision: str) -> int:
        session.wrapped.configure(model, {"precision": precision})
        model(torch.randn(512, 64)).sum().backward()
        return ortlab.memory_plan(model).peak_bytes(batch=16)

    in_fp32, in_bf16 = step("fp32"), step("bf16")
    assert panels.memory(in_fp32) != panels.memory(in_bf16)
    page = Page(Panel(model))
    page.send("edit", precision="fp32")
    now, then = panels.memory(in_bf16), panels.memory(in_fp32)
    assert page.standing["memory"] == f"{now} → {then}"
    assert step("fp32") == in_fp32, "the graph that is in use is the one that is shown"
    page.send("edit", precision="bf16")
    assert page.standing["memory"] == f"{then} → {now}"


def test_memory_of_a_run_is_that_of_its_own_batches(data: Gated, wrapped: nn.Module) -> None:
    data.open.set()
    run = ortlab.finetune(
        wrapped, data, loss="cross_entropy", batch_size=8, gradient_accumulation_steps=2,
        device="cpu",
        num_train_epochs=10**7,
    )  # fmt: skip
    try:
        while run.step < 1:
            assert not run.wait_over(0.01), run.error
        page = Page(Panel(run))
        page.send("open")
        plan, _ = session.plan_for(run, run.settings)
        peak = panels.memory(plan.peak_bytes(batch=8))
        assert page.standing["memory"] == f"{peak}, predicted from the graph"
        page.send("edit", batch_size="4096")
        then = panels.memory(plan.peak_bytes(batch=4096))
        assert page.standing["memory"] == f"{peak} → {then}"
        assert page.standing["cost"].startswith("free")
    finally:
        run.stop()
        assert run.wait_over(20)


def of_notebook(names: dict[str, Any], **given: Any) -> Page:
    """Return the panel of `names["net"]` in a notebook with these variables."""
    shell: Any = SimpleNamespace(user_ns=names, user_ns_hidden={})
    return Page(Panel(names["net"], name="net", variables=Variables(shell), **given))


def started() -> Run:
    assert session.last_run is not None
    return session.last_run


def texts(page: Page, name: str) -> list[str]:
    return [text for text, _ in page.controls[name]["choices"]]


def test_a_models_panel_starts_a_run_with_what_was_edited(data: Gated) -> None:
    data.open.set()
    model, held_out = nn.Linear(8, 4), TensorDataset(data.tensors[0], data.tensors[1])
    page = of_notebook({"net": model, "train": data, "valid": held_out}, data="train")
    edits = {"loss": "cross_entropy", "engine": "eager", "max_steps": "3", "device": "cpu"}
    edits["eval_dataset"] = "valid"
    page.send("edit", **edits)
    assert page.standing["line"] == (
        "%ort finetune net train --eval-dataset valid --engine eager --max-steps 3 "
        "--loss cross_entropy --device cpu"
    )
    assert page.controls["batch_size"]["reason"] == ""
    page.send("start", **edits)
    run = started()
    assert page.wait("done") == f"{run.name} started"
    assert run.result(20).steps == 3
    assert run.settings.model.engine == "eager"
    assert run.result(20).after is not None, "the data to evaluate on was passed on"


def test_model_data_and_loss_are_chosen_among_the_variables(data: Gated) -> None:
    data.open.set()
    called = []

    def focal(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        called.append(target)
        return nn.functional.cross_entropy(scores, target)

    names: dict[str, Any] = {"net": nn.Linear(8, 4), "other": nn.Linear(8, 4), "focal": focal}
    page = of_notebook(names | {"train": data})
    assert list(page.controls)[:4] == ["model", "train", "eval_dataset", "loss"]
    assert texts(page, "model") == ["net", "other"]
    assert texts(page, "train") == texts(page, "eval_dataset") == ["", "train"]
    assert texts(page, "loss") == ["none", *LOSSES, "focal"]
    assert page.controls["loss"]["says"] == {"none": "the model's own"}
    edits = {"model": "other", "train": "train", "loss": "focal", "engine": "eager"}
    page.send("start", **edits, max_steps="1", device="cpu")
    assert page.wait("done").endswith("started"), page.standing
    run = started()
    assert run.result(20).steps == 1
    assert called
    assert page.standing["title"] == "other"


def test_variables_that_appear_later_are_offered() -> None:
    names: dict[str, Any] = {"net": nn.Linear(8, 4)}
    page = of_notebook(names)
    assert texts(page, "train") == [""]
    names["rows"] = DataLoader(TensorDataset(torch.randn(8, 8)))
    page.hear()
    assert texts(page, "train") == ["", "rows"]
    page.send("edit", train="rows")
    assert page.controls["batch_size"]["reason"].startswith("the DataLoader makes its own batches")


@pytest.mark.parametrize(
    ("edits", "marked", "said"),
    [
        ({"train": ""}, {"train"}, "choose the training data"),
        ({"train": "gone"}, {"train"}, "nothing is called 'gone'"),
        ({"model": "gone"}, {"model"}, "nothing is called 'gone'"),
        ({"eval_dataset": "empty"}, {"eval_dataset"}, "the data is empty"),
        ({"loss": "focl"}, {"loss"}, "loss='focl'"),
        ({"learning_rate": "fast"}, {"learning_rate"}, "takes a number, not 'fast'"),
        ({"zero_stage": "1"}, {"zero_stage", "workers"}, "needs at least 2 workers"),
        ({"engine": "eager", "recompute": "layers"}, {"recompute"}, "is for engines 'ort'"),
        ({"warmup_steps": "1.5"}, {"warmup_steps"}, "must be a whole number of steps"),
        ({"keep_best": "loss"}, {"keep_best"}, "keep_best='loss'"),
    ],
)
def test_a_start_that_is_refused_marks_the_control_and_keeps_the_edits(
    edits: dict[str, str], marked: set[str], said: str, data: Gated
) -> None:
    page = of_notebook({"net": nn.Linear(8, 4), "train": data, "empty": []}, data="train")
    before = len(session.runs)
    page.send("start", **edits)
    assert said in page.wait("refused")
    assert page.standing["result"][1].startswith("not started: ")
    assert set(page.standing["wrong"]) == marked
    assert all(said in why for why in page.standing["wrong"].values())
    assert page.standing["edits"] == edits
    assert len(session.runs) == before
    page.send("edit", seed="1")
    assert page.standing["wrong"] == {}


def test_a_run_that_is_refused_in_its_first_step_marks_the_control(data: Gated) -> None:
    data.open.set()
    model = nn.Linear(8, 4)
    page = of_notebook({"net": model, "train": data}, data="train")
    page.send("start", engine="eager", device="cpu", seed="3")
    run = started()
    assert run.wait_over(20)
    assert page.panel.failed_at_start(run)
    assert not run.folder.exists(), "it was refused, so it is no run"
    assert run.name not in [each.name for each in ortlab.list_runs()]
    assert run not in session.runs
    page.hear()
    said = page.wait("refused")
    assert "if its last element is the targets, name a loss: loss='cross_entropy' (--loss" in said
    assert set(page.standing["wrong"]) == {"loss"}
    assert page.standing["edits"] == {"engine": "eager", "device": "cpu", "seed": "3"}
    page.send("start", engine="eager", device="cpu", loss="cross_entropy", max_steps="2")
    assert started().name == run.name
    assert started().result(20).steps == 2
    assert session.registry.initial[model].is_file(), "--fresh is possible"
    assert not page.panel.failed_at_start(started())
    assert page.standing["wrong"] == {}


class Broken(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ValueError("not done yet")


def test_a_run_that_fails_in_forward_stays_in_the_history(data: Gated) -> None:
    data.open.set()
    page = of_notebook({"net": Broken(8, 4), "train": data}, data="train")
    page.send("start", engine="eager", device="cpu", loss="cross_entropy")
    run = started()
    assert run.wait_over(20)
    assert page.panel.failed_at_start(run)
    (kept,) = [each for each in ortlab.list_runs() if each.name == run.name]
    assert kept.error.startswith("ValueError: not done yet")
    assert "in forward" in kept.error


def test_what_the_engine_lacks_is_greyed(data: Gated) -> None:
    page = of_notebook({"net": nn.Linear(8, 4), "train": data}, data="train")
    page.send("edit", engine="eager")
    assert "is for engines 'ort' and 'ortmodule'" in page.controls["recompute"]["reason"]
    assert page.controls["activation_budget"]["reason"] == "engine 'eager' has no activation budget"
    page.send("edit", engine="eager", recompute="layers")  # typed before the engine was chosen
    assert page.controls["recompute"]["reason"] == "", "it can be corrected"


def test_a_loop_of_the_users_own_has_no_panel() -> None:
    assert panels.panel_of(Practice()) is None


def rows_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line[:1].isalpha()}


def test_text_says_values_costs_reasons_and_what_to_type(run: Run) -> None:
    text = repr(Panel(run).table())
    rows = rows_of(text)
    assert list(rows)[:4] == ["setting", "loss", "num_train_epochs", "max_steps"]
    assert "free" in rows["learning_rate"]
    assert "5e-05" in rows["learning_rate"]
    assert "precision='tf32' is for CUDA devices" in rows["precision"]
    assert "free" in rows["batch_size"]
    assert "device" in rows, "what differs from its default is shown, too"
    assert "seed" not in rows
    assert "run.apply(learning_rate=1e-4), or %ort apply --lr 1e-4" in text


Types = Callable[[str], str]


@pytest.fixture
def types(capsys: pytest.CaptureFixture[str]) -> Iterator[Types]:
    """Return a function that types a cell into a terminal's shell and returns its output."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.extension_manager.load_extension("ortlab")

    def typed(code: str) -> str:
        capsys.readouterr()
        shell.run_cell(code)
        said = capsys.readouterr()
        return said.out + said.err

    typed.shell = shell  # type: ignore[attr-defined]
    yield typed
    shell.extension_manager.unload_extension("ortlab")
    InteractiveShell.clear_instance()


def test_magics_show_apply_and_undo(types: Types, run: Run, data: Gated) -> None:
    shell: Any = types.shell  # type: ignore[attr-defined]
    shell.user_ns |= {"r": run, "net": nn.Linear(8, 4), "train": data}
    assert "run.apply(learning_rate=1e-4)" in types("%ort panel")
    assert "run.apply(learning_rate=1e-4)" in types(f"%ort panel {run.name}")
    assert "%ort finetune net train --lr 1e-4" in types("%ort panel net train")
    assert "name a setting, as in %ort apply --lr 1e-4" in types("%ort apply")
    assert "changes learning_rate after the step in flight" in types("%ort apply r --lr 0.5")
    data.open.set()
    page = Page(Panel(run))
    while not run.earlier_settings:
        assert not run.wait_over(0.01)
    assert "reverts its last change" in types("%ort undo r")
    while run.earlier_settings:
        assert not run.wait_over(0.01)
    assert run.current_settings.optim.learning_rate == 5e-5
    assert "nothing to undo" in types("%ort undo")
    assert "optimizer='sgd' cannot be applied to a run" in types("%ort apply --optimizer sgd")
    assert "changes batch_size after the step in flight" in types("%ort apply --batch-size 3")
    while run.current_settings.data.batch_size != 3:
        assert not run.wait_over(0.01)
    page.hear()


def test_a_model_in_training_has_its_runs_panel(types: Types, run: Run) -> None:
    types.shell.user_ns["net"] = run.model  # type: ignore[attr-defined]
    assert "run.apply(learning_rate=1e-4)" in types("%ort panel net")


def test_names_are_completed(types: Types, run: Run) -> None:
    from ortlab.notebook.magics.completion import Names, offers

    shell: Any = types.shell  # type: ignore[attr-defined]
    shell.user_ns |= {"net": nn.Linear(8, 4), "train": [1]}
    names = Names(shell)
    assert {"net", run.name} <= set(offers("%ort panel ", names))
    assert "train" in offers("%ort panel net ", names)
    assert offers("%ort apply --prec", names) == ["--precision"]
    assert offers("%ort apply --precision ", names) == list(PRECISIONS)
    assert run.name in offers("%ort undo ", names)


def test_a_saved_notebook_has_the_table(tmp_path: Path) -> None:
    model = "%load_ext ortlab\nfrom torch import nn\nmodel = nn.Linear(4, 2)"
    book = execute(tmp_path, model, "%ort panel model")
    _, output = book.cells[1].outputs
    assert "precision='tf32' is for CUDA devices" in output.data["text/plain"]
    assert output.data["text/html"].count("<tr>") > 8


def test_charts_compare_the_settings_again_once_they_are_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Panel] = []
    news = Panel.news
    monkeypatch.setattr(Panel, "news", lambda panel: (looked.append(panel), news(panel))[1])
    network, digits = nn.Linear(64, 10), ortlab.data.digits()[0]
    run = ortlab.finetune(network, digits, engine="eager", loss="cross_entropy", max_steps=2)
    run.result()
    view = charts.RunView(run)
    assert view.pump.join(HANGS_S)
    first = len(looked)
    view._set_traits()
    assert len(looked) == first
    view._receive(view, {"do": "open"}, [])
    assert len(looked) == first + 1
    view.close()


def test_an_edit_that_newer_ones_have_overtaken_is_ignored() -> None:
    """JupyterLab moves a view's messages to a subshell while earlier ones still wait."""
    panel = Panel(nn.Linear(2, 2))
    panel.receive({"do": "edit", "serial": 3, "edits": {"batch_size": "9"}})
    panel.receive({"do": "edit", "serial": 2, "edits": {"batch_size": "8"}})
    standing = panel.news()["standing"]
    assert standing["serial"] == 3
    assert standing["edits"] == {"batch_size": "9"}
    panel.receive({"do": "edit", "serial": 3, "edits": {}})
    assert panel.news()["standing"]["edits"] == {}


def test_a_slow_thread_does_not_send_older_news_last(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Panel(nn.Linear(2, 2))
    view = PanelView(panel)
    news, made, go = panel.news, threading.Event(), threading.Event()

    def slow() -> dict[str, Any]:
        found = news()
        if not made.is_set():  # the first thread waits between its news and their way to the page
            made.set()
            go.wait(HANGS_S)
        return found

    monkeypatch.setattr(panel, "news", slow)
    threads = [threading.Thread(target=view.send_news) for _ in range(2)]
    panel.receive({"do": "edit", "serial": 1, "edits": {"batch_size": "8"}})
    threads[0].start()
    assert made.wait(HANGS_S)
    panel.receive({"do": "edit", "serial": 2, "edits": {"batch_size": "9"}})
    threads[1].start()
    threads[1].join(0.5)  # as long as it may take; with the lock it waits for the first
    go.set()
    for thread in threads:
        thread.join(HANGS_S)
    assert view.standing["serial"] == 2
    assert view.standing["edits"] == {"batch_size": "9"}
    view.close()
