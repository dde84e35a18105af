"""Tests of engine "auto": an ORT engine where it runs, else eager torch, with the reason."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines import registry
from ortlab.engines.base import EngineUnavailable, wrapped_model
from ortlab.engines.ort import session as sessions
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.registry import refusal, resolved
from ortlab.engines.torch import stepper
from ortlab.history.run_folder import RunFolder
from ortlab.history.saved_run import SavedRun
from ortlab.session import session
from ortlab.settings import EngineSettings, FinetuneSettings
from tests.support.needed_engines import needs

MISSING = "onnxruntime-training is not installed"


NO_RUNTIME = "onnxruntime is not installed: pip install onnxruntime"


@pytest.fixture
def no_ortmodule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ORTModule unavailable, as on a Python that it has no wheel for."""
    monkeypatch.setattr(compat, "unavailable", lambda: MISSING)


@pytest.fixture
def no_ort(no_ortmodule: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both runtimes unavailable."""
    monkeypatch.setattr(sessions, "unavailable", lambda: NO_RUNTIME)


@pytest.fixture
def with_ort() -> None:
    """Skip the test where ORTModule cannot run."""
    needs("ortmodule")


def chosen(**values: Any) -> tuple[str, str]:
    settings, reason = resolved(FinetuneSettings.of(values))
    return settings.model.engine, reason


def test_a_named_engine_has_no_reason() -> None:
    settings = FinetuneSettings.of(engine="eager")
    assert resolved(settings) == (settings, "")
    assert resolved(EngineSettings(engine="compile")) == (EngineSettings(engine="compile"), "")


def test_it_is_ort_where_that_runs(with_ort: None) -> None:
    assert chosen() == ("ortmodule", "engine auto: chose ortmodule, which runs here")
    assert registry.engine("auto").name == "ortmodule"


@pytest.fixture(autouse=True)
def with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "has_instructions", lambda _: True)


@pytest.mark.parametrize(
    "values",
    [
        {"workers": 2, "zero_stage": 3},
        {"precision": "fp16", "device": "cpu"},
    ],
    ids=str,
)
def test_it_is_eager_where_ort_does_not_support_the_settings(
    values: dict[str, Any], with_ort: None
) -> None:
    name, reason = chosen(**values)
    assert name == "eager"
    of_ort = refusal(FinetuneSettings.of(values, engine="ortmodule"))
    assert reason == f"engine auto: eager, because ortmodule cannot run: {of_ort}"


def test_layers_that_ranks_share_are_in_ort(with_ort: None) -> None:
    name, reason = chosen(workers=2, tensor_parallel=2)
    assert name == "ort"
    assert "because ortmodule cannot run: tensor_parallel=2" in reason


@pytest.mark.parametrize(
    ("precision", "because"),
    [
        ("bf16", "this CPU has no instructions for bf16, which ortmodule would use"),
        ("fp16", "ortmodule cannot run: "),
    ],
)
def test_16_bits_run_in_todays_onnxruntime_where_the_cpu_has_no_instructions_for_them(
    precision: str, because: str, with_ort: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "has_instructions", lambda _: False)
    name, reason = chosen(precision=precision, device="cpu")
    assert name == "ort"
    assert reason.startswith(f"engine auto: ort, because {because}")


def test_it_is_eager_where_ort_is_missing(no_ort: None) -> None:
    assert chosen() == ("eager", f"engine auto: eager, because ort cannot run: {NO_RUNTIME}")


def test_it_is_todays_onnxruntime_where_ortmodule_is_missing(no_ortmodule: None) -> None:
    assert chosen() == ("ort", f"engine auto: ort, because ortmodule cannot run: {MISSING}")
    name, reason = chosen(precision="bf16")
    assert (name, reason) == (
        "eager",
        f"engine auto: eager, because ortmodule cannot run: {MISSING}",
    )


@pytest.mark.parametrize(
    "values", [{"recompute": "layers"}, {"opset": 15}, {"kernels": "ort"}], ids=str
)
def test_a_choice_that_only_ort_has_is_not_ignored(values: dict[str, Any], no_ort: None) -> None:
    assert chosen(**values) == ("ortmodule", MISSING)
    assert refusal(FinetuneSettings.of(values)) == MISSING


@pytest.mark.parametrize("instructions", [True, False])
def test_a_precision_of_an_own_loop_is_not_ignored(
    instructions: bool, no_ort: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "has_instructions", lambda _: instructions)
    with pytest.raises(EngineUnavailable, match=MISSING):
        ortlab.wrap(nn.Linear(2, 2), precision="bf16")


@pytest.mark.parametrize("instructions", [True, False])
def test_a_precision_of_an_own_loop_is_for_ortmodule_alone(
    instructions: bool, with_ort: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine ``ort`` leaves the precision of an own loop to the loop's autocast."""
    monkeypatch.setattr(stepper, "has_instructions", lambda _: instructions)
    settings = EngineSettings.of(precision="bf16")
    assert registry.resolved(settings)[0].engine == "ortmodule"


def test_settings_that_no_engine_supports_have_the_reason_of_ort(with_ort: None) -> None:
    values = {"workers": 4, "batch_size": 2}
    assert chosen(**values)[0] == "ortmodule"
    assert "cannot be split across 4 workers" in (refusal(FinetuneSettings.of(values)) or "")


def test_a_model_is_wrapped_and_trained_without_ort(no_ort: None) -> None:
    model = nn.Linear(2, 2)
    assert ortlab.wrap(model) is model
    (row,) = [row for row in ortlab.models() if row.name == "a Linear"]
    assert (row.engine_asked, row.engine_used) == ("auto", "eager")
    assert any(NO_RUNTIME in remark for remark in row.remarks)
    with pytest.raises(ValueError, match=f"has no ORT graphs; {MISSING}"):
        ortlab.graphs(model)
    ortlab.unwrap(model)
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(2)]
    run = ortlab.finetune(model, data, loss="cross_entropy")
    run.result()
    assert (run.engine_asked, run.engine_used) == ("auto", "eager")
    assert run.settings.model.engine == "eager", "the name that was resolved is stored"
    assert any(NO_RUNTIME in line for line in run.status().lines)
    notes = [event.text for event in run.recorder.events() if event.kind == "note"]
    assert any(NO_RUNTIME in text for text in notes)


def test_a_model_is_wrapped_and_trained_in_todays_onnxruntime(no_ortmodule: None) -> None:
    model = nn.Linear(2, 2)
    wrapped = ortlab.wrap(model)
    assert wrapped is not model
    wrapped(torch.randn(3, 2)).sum().backward()
    (row,) = [row for row in ortlab.models() if row.name == "a Linear"]
    assert (row.engine_asked, row.engine_used) == ("auto", "ort")
    assert any(MISSING in remark for remark in row.remarks)
    ortlab.unwrap(wrapped)
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(2)]
    run = ortlab.finetune(model, data, loss="cross_entropy")
    run.result()
    assert run.engine_used == "ort"
    assert any(MISSING in line for line in run.status().lines)


class Counting(nn.Module):
    """A model that ORTModule refuses: forward replaces a buffer, which no exported graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        hidden: torch.Tensor = self.layer(x)
        return hidden.tanh()


def assert_trains_as(wrapped: nn.Module, reference: nn.Module) -> None:
    """Compare three steps of other sizes, of a model and of its copy in eager torch."""
    for rows in (3, 4, 5):
        x = torch.randn(rows, 2)
        for each in (wrapped, reference):
            each.zero_grad()
            each(x).square().sum().backward()
        for p, q in zip(wrapped.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_todays_onnxruntime_takes_a_model_over_that_ortmodule_refuses(with_ort: None) -> None:
    model = Counting()
    reference = copy.deepcopy(model)
    wrapped = ortlab.wrap(model)
    seen: list[int] = []
    wrapped.register_forward_hook(lambda *_: seen.append(0))
    check = ortlab.check(wrapped)
    assert_trains_as(wrapped, reference)
    assert (float(model.calls), len(seen)) == (3, 3)
    assert check.passed
    (row,) = [row for row in ortlab.models() if row.name == "a Counting"]
    assert (row.engine_asked, row.engine_used) == ("auto", "ort")
    refused = "engine 'ortmodule' refuses the model: forward replaces its buffer calls"
    assert (row.fallback_reason or "").startswith(refused)
    with pytest.raises(ValueError, match=f"runs on engine 'ort' and has no graph: {refused}"):
        ortlab.graphs(wrapped)
    check = ortlab.check(wrapped)
    assert_trains_as(wrapped, reference)
    assert check.passed
    for again in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert_trains_as(again, copy.deepcopy(reference))


def test_a_run_that_ortmodule_refuses_trains_in_todays_onnxruntime(with_ort: None) -> None:
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(3)]
    for model in (Counting(), ortlab.wrap(Counting())):
        run = ortlab.finetune(model, data, loss="cross_entropy")
        run.result()
        assert run.engine_used == "ort"
        assert "forward replaces its buffer calls" in (run.fallback_reason or "")
        assert any("fallback to ort: engine 'ortmodule'" in each for each in run.status().badges)
        warned = [each.text for each in run.recorder.events() if each.kind == "warning"]
        assert len(warned) == 1
    again = ortlab.finetune(Counting(), data, resume_from=run, num_train_epochs=5)
    again.result()
    assert (again.engine_asked, again.engine_used) == ("auto", "ort")


def test_an_engine_that_was_named_is_not_exchanged(with_ort: None) -> None:
    x = torch.randn(3, 2)
    for settings in ({"engine": "ortmodule"}, {"engine": "auto", "opset": 15}):
        with pytest.raises(ExportFailed, match="forward replaces its buffer calls"):
            ortlab.wrap(Counting(), **settings)(x)
    in_torch = ortlab.wrap(Counting(), engine="ortmodule", fallback=True)
    in_torch(x)
    assert [row.engine_used for row in ortlab.models() if row.name == "a Counting"] == ["eager"]
    run = ortlab.finetune(
        Counting(), [(x, torch.randint(2, (3,)))], loss="cross_entropy", engine="ortmodule"
    )
    with pytest.raises(ExportFailed, match="forward replaces its buffer calls"):
        run.result()


class Stochastic(nn.Module):
    """A residual block with drop path and a layer scale, as in ConvNeXt."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.block, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 1).add(0.5).floor()
        return x + self.block(x) * self.scale * kept / 0.5


def in_eager_and_in(wrapped: nn.Module, reference: nn.Module) -> list[list[torch.Tensor]]:
    """Return the gradients of three steps of each of two models that draw the same numbers."""
    found = []
    for each in (wrapped, reference):
        torch.manual_seed(0)
        for _ in range(3):
            each.zero_grad()
            each(torch.arange(32.0).reshape(8, 4)).square().sum().backward()
            found.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
    return found


# The scale of 1e-6 is ConvNeXt's: draws show in no output, but in the gradient of the scale.
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_drop_path_trains_in_todays_onnxruntime_with_the_draws_of_torch(
    with_ort: None, scale: float
) -> None:
    reference = Stochastic(scale)
    wrapped = ortlab.wrap(copy.deepcopy(reference))
    found = in_eager_and_in(wrapped, reference)
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    report = wrapped_model(wrapped).report()
    assert report.engine_used == "ort"
    assert "draws random numbers besides dropout" in (report.fallback_reason or "")


@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("chosen", [{"engine": "ortmodule"}, {"opset": 15}])
def test_drop_path_trains_unchecked_where_ortmodule_is_meant(
    with_ort: None, chosen: dict[str, Any], scale: float
) -> None:
    wrapped = ortlab.wrap(Stochastic(scale), **chosen)
    in_eager_and_in(wrapped, Stochastic(scale))
    report = wrapped_model(wrapped).report()
    assert report.engine_used == "ortmodule"
    assert report.remarks == ("not checked: forward draws random numbers besides dropout",)


def test_a_choice_of_both_engines_leaves_the_choice_to_auto(
    no_ortmodule: None, tmp_path: Path
) -> None:
    assert chosen(save_onnx=str(tmp_path / "net"), log_level="warning")[0] == "ort"


def test_an_ort_that_is_installed_and_cannot_be_imported(
    with_ort: None, ort_not_loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise compat.base.OrtUnavailable("its library is missing", "reinstall it")

    monkeypatch.setattr(compat, "_load", broken)
    model = ortlab.wrap(nn.Linear(2, 2))
    (row,) = [row for row in ortlab.models() if "its library" in " ".join(row.remarks)]
    assert (row.engine_asked, row.engine_used) == ("auto", "ort")
    assert model(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(EngineUnavailable, match="its library is missing"):
        ortlab.wrap(nn.Linear(2, 2), engine="ortmodule")
    with pytest.raises(EngineUnavailable, match="its library is missing"):
        ortlab.wrap(nn.Linear(2, 2), opset=15)


def test_a_run_of_a_wrapped_model_says_why_it_has_its_engine(with_ort: None) -> None:
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(2)]
    wrapped = ortlab.wrap(nn.Linear(2, 2))
    run = ortlab.finetune(wrapped, data, loss="cross_entropy")
    run.result()
    assert run.status().lines[0] == "engine auto: chose ortmodule, which runs here"
    named = ortlab.finetune(wrapped, data, loss="cross_entropy", engine="eager")
    named.result()
    assert not any("engine auto" in line for line in named.status().lines)


def test_the_engine_that_was_asked_for_stays_auto() -> None:
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(2)]
    run = ortlab.finetune(nn.Linear(2, 2), data, loss="cross_entropy")
    started = RunFolder(run.folder).read_json("run")
    run.result()
    used = run.engine_used
    assert (started["engine_asked"], run.engine_asked) == ("auto", "auto")
    (listed,) = [each for each in ortlab.list_runs(engine="auto") if each.name == run.name]
    (row,) = [each for each in ortlab.status().runs if each.name == run.name]
    saved = SavedRun(run.folder)
    for each in (listed, row, saved.entry):
        assert (each.engine_asked, each.engine_used) == ("auto", used)
    assert f"auto → {used}" in repr(ortlab.list_runs())
    assert saved.title == run.title
    again = ortlab.finetune(nn.Linear(2, 2), data, resume_from=run, num_train_epochs=5)
    again.result()
    assert (again.engine_asked, again.engine_used) == ("auto", used)
    assert f"engine auto: {used}, as in {run.name}" in again.status().lines
    other = ortlab.finetune(nn.Linear(2, 2), data, resume_from=run, engine="eager", max_steps=8)
    other.result()
    assert other.engine_asked == "eager"
    named = ortlab.finetune(nn.Linear(2, 2), data, loss="cross_entropy", engine="eager")
    named.result()
    assert (named.engine_asked, SavedRun(named.folder).entry.engine_asked) == ("eager", "eager")
    model = ortlab.wrap(nn.Linear(2, 2))
    with ortlab.track(model) as loop:
        model(torch.randn(3, 2)).sum().backward()
    entry = SavedRun(loop.folder).entry
    assert (loop.engine_asked, entry.engine_asked, entry.engine_used) == ("auto", "auto", used)


def test_a_change_to_auto_is_resolved() -> None:
    data = [(torch.randn(4, 2), torch.randint(2, (4,))) for _ in range(40)]
    run = ortlab.finetune(nn.Linear(2, 2), data, loss="cross_entropy", engine="compile")
    assert run.engine_asked == "compile"
    run.apply(engine="auto")
    run.result()
    assert run.engine_asked == "auto"
    assert run.current_settings.model.engine in ("ortmodule", "ort", "eager")
    assert session.run(f"{run.name}") is run
