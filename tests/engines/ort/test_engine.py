"""The engine ``ort`` in `ortlab.wrap`: the wrapper, the check of its results, what it reports."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import pickle
import re
import site
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ortlab
from ortlab.engines.base import wrapped_model
from ortlab.engines.ort import check, segments, session
from ortlab.engines.ort import model as ort_model
from ortlab.engines.ort.compile_log import CompileLog
from ortlab.engines.ort.lowering import graph as lowering
from ortlab.engines.ort.model import CaptureFailed
from ortlab.engines.registry import engine
from ortlab.engines.self_check import SelfCheckFailed
from ortlab.settings import EngineSettings
from ortlab.utils.plain_onnxruntime import turn_off_telemetry
from tests.support.needed_engines import needs
from tests.support.waiting import HANGS_S, until
from tests.support.worker_runs import losses as losses_of

aten = torch.ops.aten


class Net(nn.Module):
    """A classifier with dropout, whose forward has a keyword and an attribute that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 4)
        self.scale = 1.0

    def forward(self, x: Tensor, *, sharpness: float = 1.0) -> Tensor:
        hidden = functional.dropout(self.inner(x).tanh(), 0.2, self.training)
        scores: Tensor = self.outer(hidden) * sharpness * self.scale
        return scores


def losses(model: Any, reference: nn.Module, inputs: Tensor, **named: Any) -> tuple[float, float]:
    """Return the loss of both, after a backward pass with the same random numbers."""
    found = []
    for each in (model, reference):
        each.zero_grad()
        torch.manual_seed(3)
        loss = each(inputs, **named).square().mean()
        loss.backward()
        found.append(float(loss.detach()))
    return found[0], found[1]


def assert_equal(model: Any, reference: nn.Module, inputs: Tensor, **named: Any) -> None:
    one, other = losses(model, reference, inputs, **named)
    assert one == pytest.approx(other, rel=1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def pair(model: nn.Module, **settings: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    return ortlab.wrap(model, engine="ort", **settings), copy.deepcopy(model)


def report(model: Any) -> Any:
    record = wrapped_model(model)
    assert record is not None
    return record.report()


# The wrapper


def test_the_wrapper_is_a_model_of_the_same_class_with_the_same_state() -> None:
    model = Net()
    wrapped, reference = pair(model)
    assert type(wrapped) is not Net
    assert isinstance(wrapped, Net)
    assert type(wrapped).__name__ == "Net"
    assert wrapped.inner is model.inner
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert str(inspect.signature(wrapped.forward)) == str(inspect.signature(model.forward))
    assert "sharpness" in inspect.signature(type(wrapped).forward).parameters
    wrapped.eval()
    assert not model.training
    wrapped.scale = 3.0
    assert model.scale == 3.0
    reference.load_state_dict(wrapped.state_dict())
    reference.eval()
    reference.scale = 3.0
    assert_equal(wrapped, reference, torch.randn(4, 6), sharpness=2.0)
    assert ortlab.unwrap(wrapped) is model


def test_an_edited_attribute_and_other_arguments_count() -> None:
    wrapped, reference = pair(Net())
    inputs = torch.randn(4, 6)
    for scale, sharpness in ((1.0, 1.0), (2.5, 1.0), (2.5, 0.5)):
        wrapped.scale = reference.scale = scale  # type: ignore[assignment]
        assert_equal(wrapped, reference, inputs, sharpness=sharpness)


def test_a_class_that_changes_the_forward_of_its_subclasses() -> None:
    """Layers of transformers do: wrapped alone, they would run in eager torch."""

    class Layer(nn.Module):
        def __init_subclass__(cls) -> None:
            own = cls.forward

            def around(self: Any, *args: Any) -> Any:
                return own(self, *args)

            cls.forward = around  # type: ignore[method-assign, assignment]

    class Own(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.inner(x)
            return hidden.tanh()

    wrapped = ortlab.wrap(Own(), engine="ort")
    wrapped.__class__ = type("Again", (type(wrapped),), {})  # as FSDP2 does
    wrapped(torch.randn(3, 6)).sum().backward()
    record = wrapped_model(wrapped)
    assert record is not None
    graphs = record.report().graphs
    assert graphs is not None
    assert graphs.graphs == 2


def test_hooks_run_once() -> None:
    wrapped, reference = pair(Net())
    seen: list[str] = []
    for each in (wrapped, reference):
        each.register_forward_hook(lambda *_: seen.append("root"))
        each.inner.register_forward_hook(lambda *given: given[2] * 2)
    assert_equal(wrapped, reference, torch.randn(4, 6))
    assert seen.count("root") == 2


def test_copies_and_pickles_are_wrapped() -> None:
    wrapped, reference = pair(Net())
    for made in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert made.inner.weight is not wrapped.inner.weight
        assert_equal(made, reference, torch.randn(4, 6))
        assert report(made).engine_used == "ort"


def test_a_library_may_replace_forward_and_put_it_back() -> None:
    """Replace ``forward`` as accelerate does when it prepares a model, and restore it."""
    model = Net()
    wrapped, _ = pair(model)
    before = wrapped.forward
    wrapped.forward = lambda x: before(x) * 0
    assert wrapped(torch.randn(2, 6)).abs().sum() == 0
    assert model(torch.randn(2, 6)).abs().sum() > 0
    wrapped.forward = before
    assert wrapped(torch.randn(2, 6)).abs().sum() > 0
    del wrapped.forward
    assert wrapped(torch.randn(2, 6)).abs().sum() > 0
    assert not [note for note in report(wrapped).notes if "captured again" in note]


@pytest.mark.parametrize("engine", ["ort", "ortmodule"])
def test_another_forward_runs_in_ort_and_stays_with_the_model(engine: str) -> None:
    needs(engine)
    model = Net().eval()
    wrapped = ortlab.wrap(model, engine=engine, cache=False)
    inputs = torch.randn(4, 6)
    before = wrapped(inputs)

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = 2 * type(model).forward(self, x)
        return made

    wrapped.forward = types.MethodType(doubled, model)
    torch.testing.assert_close(wrapped(inputs), 2 * before)
    assert report(wrapped).engine_used == engine
    original = ortlab.unwrap(wrapped)
    assert original is model
    torch.testing.assert_close(original(inputs), 2 * before)


def test_an_environment_variable_that_forward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x) * float(os.environ.get("ORTLAB_SCALE", "1"))
            return found

    wrapped, _ = pair(Scaled().eval())
    inputs = torch.randn(4, 6)
    before = wrapped(inputs)
    monkeypatch.setenv("ORTLAB_SCALE", "3")
    torch.testing.assert_close(wrapped(inputs), 3 * before)
    assert "captured again: an environment variable has changed" in report(wrapped).notes


def test_models_of_one_class_do_not_share_a_limit_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ort_model._LIMITS, "recompile_limit", 4)
    models = [pair(nn.Sequential(nn.Linear(6, 4 + i)))[0] for i in range(12)]
    for model in models:
        for rows in (3, 5):
            model(torch.randn(rows, 6)).sum().backward()
        assert report(model).fallback_reason is None


def test_a_model_without_trainable_parameters_is_refused() -> None:
    settings = EngineSettings(engine="ort")
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        engine("ort").wrap(nn.ReLU(), settings)
    with pytest.raises(ValueError, match="precision='bf16' of engine 'ort' applies only to runs"):
        engine("ort").wrap(nn.Linear(2, 2), settings.replace(precision="bf16"))


# The check


def test_the_first_step_of_each_graph_is_checked_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    wrapped, reference = pair(model)
    torch.manual_seed(3)
    for rows in (4, 6, 9):
        inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        state = torch.get_rng_state()
        one = wrapped(inputs)
        torch.set_rng_state(state)
        torch.testing.assert_close(one, reference(inputs))
    assert all(p.grad is None for p in model.parameters())
    for one, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    first, again, second = report(wrapped).notes
    assert first.startswith("checked on [4, 6]: ")
    assert "gradients within" in first
    assert again == "compiled again in forward: size 0 of args[0] changed from 4 to 6"
    assert second.startswith("checked on [6, 6]: ")


class InPlace(nn.Module):
    """A model that changes its input, a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(6))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # type: ignore[operator, union-attr]
        x.mul_(2)
        made: Tensor = self.layer(x + self.average)
        return made


def test_what_forward_changes_is_changed_once() -> None:
    wrapped, reference = pair(InPlace())
    for rows in (4, 5, 6):
        inputs = [torch.ones(rows, 6) for _ in range(2)]
        for each, x in zip((wrapped, reference), inputs, strict=True):
            each.zero_grad()
            each(x).square().sum().backward()
        torch.testing.assert_close(inputs[0], inputs[1])
        torch.testing.assert_close(wrapped.average, reference.average)
        torch.testing.assert_close(wrapped.layer.weight.grad, reference.layer.weight.grad)  # type: ignore[union-attr]
    assert wrapped.seen == reference.seen == 3


@pytest.fixture
def wrong_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower tanh to another function."""
    monkeypatch.setitem(
        lowering.RULES, aten.tanh.default, lambda graph, node, x: graph.unary("Sin", x)
    )


def test_a_wrong_operator_is_found_and_runs_in_torch(wrong_tanh: None) -> None:
    wrapped, reference = pair(Net())
    for rows in (4, 7, 9):
        assert_equal(wrapped, reference, torch.randn(rows, 6))
    found = report(wrapped)
    assert found.engine_used == "ort"
    line = Net.forward.__code__.co_firstlineno + 1
    assert found.remarks[0].startswith(
        f"aten.tanh at test_engine.py:{line} runs in torch: ORT's result was off by "
    )
    assert any("aten.tanh" in each and "in torch" in each for each in found.remarks[1:])


def test_a_wrong_operator_alone_is_found_among_roundings_to_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Differences that rounding explains are told apart from errors in double precision."""
    monkeypatch.setattr(segments, "has_instructions", lambda _: False)
    monkeypatch.setitem(
        lowering.RULES, aten.tanh.default, lambda graph, _, x: graph.unary("Neg", x)
    )
    layers = [each for _ in range(8) for each in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    wrapped, _ = pair(nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(torch.randn(32, 64)).float().sum().backward()
    moved = [each for each in report(wrapped).remarks if "was off by" in each]
    assert len(moved) == 1
    assert moved[0].startswith("aten.tanh")


class Joined(nn.Module):
    """Heads that are joined by a view, which torch can take of its own results alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
        heads = torch.special.erfcx(heads * 2)  # ORT has no such operator
        scores: Tensor = self.outer(heads.transpose(1, 2).view(x.shape).tanh())
        return scores


def test_a_wrong_operator_is_found_after_a_view_of_what_ort_has_in_another_order(
    wrong_tanh: None,
) -> None:
    wrapped, reference = pair(Joined())
    assert_equal(wrapped, reference, torch.randn(3, 8, 16))
    moved = [each for each in report(wrapped).remarks if "was off by" in each]
    assert [each.partition(" ")[0] for each in moved] == ["aten.tanh"]


def test_without_the_check_a_wrong_operator_stays(wrong_tanh: None) -> None:
    wrapped, reference = pair(Net(), self_check=False)
    one, other = losses(wrapped, reference, 3 * torch.randn(4, 6))
    assert one != pytest.approx(other, rel=1e-2)


class ByVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.weight.t().contiguous()
        return torch.stack([matrix @ row for row in x.unbind()])


def test_what_orts_optimizer_makes_wrong_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ORT's MatMul of a transposed matrix and a vector: right alone, wrong once fused."""

    def by_matmul(graph: Any, node: Any, matrix: Any, vector: Any) -> Any:
        shape = lowering.result(node).shape
        return graph.value("MatMul", matrix, vector, shape=shape, dtype=matrix.dtype)

    monkeypatch.setitem(lowering.RULES, aten.mv.default, by_matmul)
    wrapped, reference = pair(ByVector())
    assert_equal(wrapped, reference, torch.randn(2, 6))
    moved, _ = report(wrapped).remarks
    assert moved.startswith("a segment runs without ORT's optimizations: ORT's result was off by")


def test_a_difference_that_no_operator_explains_falls_back(
    wrong_tanh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "mended", lambda inputs: [])
    wrapped, reference = pair(Net(), fallback=True)
    assert_equal(wrapped, reference, 3 * torch.randn(4, 6))
    found = report(wrapped)
    assert found.engine_used == "eager"
    assert "its results would differ from eager torch" in str(found.fallback_reason)
    strict, _ = pair(Net(), fallback=False)
    with pytest.raises(SelfCheckFailed, match="use engine='eager'"):
        strict(3 * torch.randn(4, 6))


# The check that a user asks for


@pytest.mark.parametrize("self_check", [True, False])
def test_a_check_compares_the_next_call_and_leaves_no_trace(self_check: bool) -> None:
    wrapped, reference = pair(Net(), self_check=self_check)
    assert_equal(wrapped, reference, torch.randn(4, 6))
    made = ortlab.check(wrapped)
    assert made.passed is None
    assert_equal(wrapped, reference, torch.randn(4, 6))
    assert made.passed
    assert made.verdict.endswith(", for inputs of shape [4, 6]")
    assert [(row.kind, row.count) for row in made.differences] == [("output", 1), ("gradient", 4)]
    for row in made.differences:
        for error in (row.largest, row.of_ort, row.of_eager):
            assert error is not None
            assert error < 1e-5
    with torch.no_grad():
        without = ortlab.check(wrapped)
        wrapped(torch.randn(4, 6))
    assert [row.kind for row in without.differences] == ["output"]


def test_a_check_moves_a_wrong_operator_to_torch(wrong_tanh: None) -> None:
    wrapped, reference = pair(Net(), self_check=False)
    wrapped(3 * torch.randn(4, 6))
    made = ortlab.check(wrapped)
    assert_equal(wrapped, reference, 3 * torch.randn(4, 6))
    assert made.passed
    assert "aten.tanh at test_engine.py:" in made.verdict
    assert "runs in torch: ORT's result was off by" in made.verdict


def test_a_check_says_what_is_wrong(wrong_tanh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "mended", lambda inputs: [])
    wrapped, _ = pair(Net(), self_check=False, fallback=True)
    made = ortlab.check(wrapped)
    wrapped(3 * torch.randn(4, 6))
    assert made.passed is False
    outputs = made.differences[0]
    assert outputs.largest > 0.01
    assert outputs.of_ort is not None
    assert outputs.of_eager is not None
    assert outputs.of_ort > 0.01 > 1e-5 > outputs.of_eager
    with pytest.raises(ValueError, match="already runs in eager torch: its results would differ"):
        ortlab.check(wrapped)


def test_a_check_waits_for_a_call_that_succeeds() -> None:
    wrapped, reference = pair(Broken())
    made = ortlab.check(wrapped)
    with pytest.raises(ValueError, match="three rows"):
        wrapped(torch.randn(3, 6))
    assert made.passed is None
    assert_equal(wrapped, reference, torch.randn(4, 6))
    assert made.passed


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_check_in_a_run(is_wrapped: bool) -> None:
    model = pair(Net())[0] if is_wrapped else Net()
    data = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(4)]
    run = ortlab.finetune(
        model, data, loss="cross_entropy", engine="ort", device="cpu", num_train_epochs=100_000
    )
    until(lambda: run.step >= 2)
    made = ortlab.check(model)
    assert made.wait(HANGS_S)
    run.stop()
    assert run.wait_over(HANGS_S)
    assert made.passed
    assert [row.kind for row in made.differences] == ["output", "gradient"]


# What it reports


class Counted(nn.Module):
    """Operators in torch: one without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y: Tensor = self.head(h * torch.special.erfcx(h))
        return y


def test_operators_in_torch_are_remarks_with_their_lines_after_the_share_of_ort() -> None:
    wrapped, reference = pair(Counted())
    assert_equal(wrapped, reference, torch.randn(4, 6))
    line = Counted.forward.__code__.co_firstlineno + 2
    (remark,) = report(wrapped).remarks
    assert re.fullmatch(
        r"ORT \d+\.\d% of the step \(forward and backward\); aten\.special_erfcx at "
        rf"test_engine\.py:{line} in torch: no rule for this operator",
        remark,
    )


def test_many_operators_that_are_in_torch_for_one_reason_have_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "has_instructions", lambda _: True)
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)
    wrapped, _ = pair(nn.Sequential(*layers))
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(torch.randn(8, 6)).sum().backward()
    (told,) = [each for each in report(wrapped).remarks if each.endswith("which torch uses")]
    operator = r"aten\.\w+(\.\w+)?"
    assert re.search(rf"({operator}, ){{2}}{operator} and \d+ more in torch: this CPU", told)


class Loop(nn.Module):
    """A graph break inside a loop: Dynamo skips the frame and compiles nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layer(x)
            torch._dynamo.graph_break()
        return x


def line_of(model: type[nn.Module], offset: int) -> str:
    """Return the place of a line of a model's forward."""
    return f"test_engine.py:{model.forward.__code__.co_firstlineno + offset}"


USERS_BREAK = "User-inserted graph break."


def test_a_model_that_dynamo_skips_runs_in_eager_torch_and_says_so() -> None:
    wrapped, reference = pair(Loop())
    assert_equal(wrapped, reference, torch.randn(4, 6))
    found = report(wrapped)
    assert found.engine_used == "eager"
    assert found.fallback_reason == (
        f"torch captured no graph of it: graph break at {line_of(Loop, 3)}: {USERS_BREAK}"
    )


class Split(nn.Module):
    """A graph break in the middle, and one within a loop of a submodule."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), middle, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        made: Tensor = self.last(self.middle(h))
        return made


def test_a_model_with_a_graph_break_trains_as_in_eager_torch_and_shows_it() -> None:
    wrapped, reference = pair(Split(nn.Tanh()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, reference)]
    for rows in (4, 4, 7, 4):
        assert_equal(wrapped, reference, torch.randn(rows, 6))
        for optimizer in optimizers:
            optimizer.step()
    found = report(wrapped)
    assert found.engine_used == "ort"
    told = [
        f"graph break at {line_of(Split, 2)}: {USERS_BREAK}",
        f"compiled again at {line_of(Split, 0)}: size 0 of x changed from 4 to 7",
        f"compiled again at {line_of(Split, 2)}: size 0 of h changed from 4 to 7",
    ]
    assert list(found.remarks[1:]) == told
    assert [note for note in found.notes if not note.startswith("checked")] == told


def test_a_part_that_dynamo_skips_is_named() -> None:
    wrapped, reference = pair(Split(Loop()))
    assert_equal(wrapped, reference, torch.randn(4, 6))
    found = report(wrapped)
    assert found.engine_used == "ort"
    assert found.remarks[1] == (
        f"{line_of(Loop, 0)} runs in eager torch: graph break at {line_of(Loop, 3)}: {USERS_BREAK}"
    )


def test_what_happened_in_many_places_has_few_lines() -> None:
    log = CompileLog(lambda _: None)
    log._skipped = {f"a.py:{i}": "a break" for i in range(5)} | {"b.py:1": "another"}
    log._again = {f"c.py:{i}": ["first", *["size"] * i] for i in range(5)}
    assert log.remarks() == [
        "a.py:0, a.py:1, a.py:2 and 2 more run in eager torch: a break",
        "b.py:1 runs in eager torch: another",
        "compiled 5 more times at c.py:4, the last time: size",
        "compiled 4 more times at c.py:3, the last time: size",
        "compiled 3 more times at c.py:2, the last time: size",
        "compiled again 3 times elsewhere",
    ]
    assert len(log.remarks(log.recompilations())) == 2


class Mode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor | None, mode: str) -> Tensor | None:
        return None if x is None else self.layer(x) * len(mode)


def test_a_model_that_reaches_torchs_limit_of_graphs_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ort_model._LIMITS, "recompile_limit", 2)
    wrapped, reference = pair(Mode())
    for mode in ("a", "bb", "ccc"):
        assert_equal(wrapped, reference, torch.randn(4, 6), mode=mode)
    found = report(wrapped)
    assert found.engine_used == "eager"
    assert found.fallback_reason == (
        "torch captured no graph of it: torch's recompile_limit is reached "
        "(mode == 'bb' is no longer true)"
    )
    assert found.notes[1] == f"compiled again at {line_of(Mode, 0)}: mode == 'a' is no longer true"


def test_a_call_without_operators_is_no_reason_to_fall_back() -> None:
    """Torch ignores the code of forward after such a call, which a later call shows."""
    wrapped, reference = pair(Mode())
    assert_equal(wrapped, reference, torch.randn(4, 6), mode="a")
    assert wrapped(None, "a") is None
    assert report(wrapped).engine_used == "ort"
    assert_equal(wrapped, reference, torch.randn(4, 6), mode="a")
    assert report(wrapped).fallback_reason == (
        "torch captured no graph of it: torch.compile ignores its forward after a call without "
        "operators"
    )


class Excluded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_a_forward_that_torch_is_told_to_skip_runs_in_eager_torch_and_says_so() -> None:
    wrapped, reference = pair(Excluded())
    assert_equal(wrapped, reference, torch.randn(4, 6))
    found = report(wrapped)
    assert found.engine_used == "eager"
    assert "torch.compiler.disable" in str(found.fallback_reason)


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        made: Tensor = self.last(h)
        return made


def test_breaks_are_those_of_the_model_itself() -> None:
    """Other models compile at the same time, in threads of their own."""
    kinds: tuple[Callable[[], nn.Module], ...] = (lambda: Split(nn.Tanh()), Parted)
    models = [pair(kind())[0] for kind in kinds]
    models.append(torch.compile(Parted(), backend="eager"))
    begin = threading.Barrier(len(models))

    def call(model: Any) -> None:
        begin.wait()
        for rows in (3, 4):
            model(torch.randn(rows, 6))

    threads = [threading.Thread(target=call, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, kind in zip(models, (Split, Parted), strict=False):
        _, first, *rest = report(model).remarks
        assert first == f"graph break at {line_of(kind, 2)}: {USERS_BREAK}"
        places = re.findall(r" at (\S+?)[:,] ", " ".join(rest))
        assert set(places) <= {line_of(kind, offset) for offset in (0, 2)}


class Chosen(nn.Module):
    """A selection by a mask and a number read from a tensor: both are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h[x[:, 0] > 0] * x.abs().max().item()


def test_selections_are_captured_whole() -> None:
    wrapped, reference = pair(Chosen())
    for rows in (6, 8, 9):
        assert_equal(wrapped, reference, torch.randn(rows, 6))
    record: Any = wrapped_model(wrapped)
    # One graph of the first size and one of all sizes: a break would double them.
    assert [graph.phase for graph in record._backend.graphs] == ["forward", "backward"] * 2


class Numpy(nn.Module):
    """A model that draws from numpy, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) * torch.from_numpy(np.random.rand(4)).float()
        return made


def test_numbers_of_numpy_are_those_of_its_generator() -> None:
    wrapped, reference = pair(Numpy())
    for rows in (3, 5):
        inputs = torch.randn(rows, 6)
        made = []
        for each in (wrapped, reference):
            np.random.seed(rows)
            made.append(each(inputs))
        torch.testing.assert_close(*made)
    assert report(wrapped).engine_used == "ort"


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three rows are too many")
        made: Tensor = self.layer(x)
        return made


@pytest.mark.parametrize(
    ("bad", "kind", "said"),
    [
        (torch.randn(3, 6), ValueError, "three rows are too many"),
        (torch.randn(4, 5), RuntimeError, r"^mat1 and mat2 shapes cannot be multiplied \(4x5 and"),
        (
            torch.ones(4, 6, dtype=torch.long),
            RuntimeError,
            "mat1 and mat2 must have the same dtype",
        ),
        (None, AttributeError, "'NoneType' object has no attribute 'shape'"),
    ],
)
def test_errors_of_forward_are_the_users_own(
    bad: Any, kind: type[Exception], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after calls in ORT, where the next call runs as before."""
    wrapped, reference = pair(Broken())
    for _ in range(2):
        with pytest.raises(kind, match=said):
            wrapped(bad)
        assert_equal(wrapped, reference, torch.randn(4, 6))
        assert_equal(wrapped, reference, torch.randn(5, 6))
    found = report(wrapped)
    assert (found.engine_used, found.fallback_reason) == ("ort", None)
    assert not [each for each in found.remarks if "in eager torch" in each]
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


class Partly(nn.Module):
    """A model that Dynamo fails to capture in one method, by an assertion of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(self.net(x), (x > -9).sum())

    def chosen(self, hidden: Tensor, count: Tensor) -> Tensor:
        assert list(hidden.shape) == [count // 6, 4]
        return hidden.exp()


def test_what_torch_fails_to_capture_runs_in_eager_torch_and_the_rest_in_ort() -> None:
    wrapped, reference = pair(Partly())
    for rows in (4, 5):
        assert_equal(wrapped, reference, torch.randn(rows, 6))
    found = report(wrapped)
    assert (found.engine_used, found.fallback_reason) == ("ort", None)
    assert [each for each in found.remarks if "in eager torch" in each]


def test_a_failed_capture_falls_back_or_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("no way\nsecond line")

    wrapped, reference = pair(Net(), self_check=False, fallback=True)
    wrapped_model(wrapped)._compile = lambda: fail  # type: ignore[union-attr, attr-defined]
    wrapped_model(wrapped)._compiled = fail  # type: ignore[union-attr, attr-defined]
    assert_equal(wrapped, reference, torch.randn(4, 6))
    assert report(wrapped).fallback_reason == "torch cannot capture it (no way)"
    strict, _ = pair(Net(), self_check=False, fallback=False)
    wrapped_model(strict)._compile = lambda: fail  # type: ignore[union-attr, attr-defined]
    wrapped_model(strict)._compiled = fail  # type: ignore[union-attr, attr-defined]
    with pytest.raises(CaptureFailed, match="no way"):
        strict(torch.randn(4, 6))


def test_an_error_of_the_backend_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, reference = pair(Net())
    monkeypatch.setattr(session, "unavailable", lambda: "onnxruntime is gone")
    assert_equal(wrapped, reference, torch.randn(4, 6))
    told = "torch captured no graph of it: EngineUnavailable: onnxruntime is gone"
    assert report(wrapped).fallback_reason == told


# Runs


def test_a_run_trains_as_in_eager_torch() -> None:
    data = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(12)]
    found = {}
    for name in ("eager", "ort"):
        torch.manual_seed(5)
        run = ortlab.finetune(
            Net(),
            data,
            loss="cross_entropy",
            engine=name,
            device="cpu",
            seed=1,
            max_steps=12,
        )
        run.result(timeout=300)
        found[name] = list(losses_of(run))
    assert len(found["ort"]) == 12
    assert found["ort"] == pytest.approx(found["eager"], rel=1e-4)


def test_a_run_of_a_wrapped_model_has_settings_of_its_own(tmp_path: Path) -> None:
    data = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(2)]
    wrapped, _ = pair(Net())
    prefix = str(tmp_path / "net")
    ortlab.finetune(
        wrapped, data, loss="cross_entropy", save_onnx=prefix, max_steps=2, device="cpu"
    ).result(timeout=300)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"net_0_forward_0.onnx", "net_1_backward_0.onnx"} <= written
    wrapped(torch.randn(3, 6)).sum().backward()
    assert {path.name for path in tmp_path.iterdir()} == written
    with pytest.raises(ValueError, match="nowhere is not a writable folder"):
        ortlab.wrap(Net(), engine="ort", save_onnx=str(tmp_path / "nowhere" / "net"))


def test_a_run_reports_on_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "has_instructions", lambda _: True)
    data = [(torch.randn(8, 6), torch.randint(0, 4, (8,)))]
    wrapped, _ = pair(nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 4)))
    told, spent = [], []
    for precision in ("bf16", "fp32", "fp32"):
        run = ortlab.finetune(
            wrapped, data, loss="cross_entropy", precision=precision, max_steps=1, device="cpu"
        )
        result = run.result(timeout=300)
        told.append("\n".join(run.status().lines))
        spent.append((result.export_s, result.check_s))
    assert ["aten._softmax" in each for each in told] == [True, False, False]
    assert ["compiled again" in each for each in told] == [False, True, False]
    assert re.search(r"^ORT \d+\.\d% of the step", told[-1], re.MULTILINE)
    assert spent[0][0] > spent[0][1], "torch's capture counts as part of the check"
    whole = report(wrapped)
    for column, total in enumerate((whole.export_s, whole.check_s)):
        first, second, third = (each[column] for each in spent)
        assert min(first, second) > 0
        assert third == 0
        assert first + second == pytest.approx(total)


def test_the_models_of_segments_that_were_divided_again_are_saved(
    wrong_tanh: None, tmp_path: Path
) -> None:
    wrapped, reference = pair(Net(), save_onnx=str(tmp_path / "net"))
    assert_equal(wrapped, reference, torch.randn(4, 6))
    models = map(onnx.load, tmp_path.glob("net_0_forward_*.onnx"))
    written = {node.op_type for model in models for node in model.graph.node}
    assert written
    assert not {"Tanh", "Sin"} & written


def segments_alive() -> int:
    gc.collect()
    return sum(isinstance(each, segments.OrtSegment) for each in gc.get_objects())


def test_graphs_and_sessions_go_with_the_model() -> None:
    """Torch alone would keep those of every model of a class, with the class's forward."""
    before = segments_alive()
    for _ in range(2):
        wrapped = ortlab.wrap(Net(), engine="ort", cache=False)
        wrapped(torch.randn(3, 6)).sum().backward()
    assert segments_alive() > before
    loss = wrapped(torch.randn(3, 6)).sum()
    reference = ortlab.unwrap(wrapped)
    del wrapped
    loss.backward()  # whose graph is still needed
    assert reference.inner.weight.grad is not None
    del loss
    assert segments_alive() == before


def test_graphs_that_are_captured_again_take_the_place_of_the_old_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = segments_alive()
    wrapped = ortlab.wrap(Net(), engine="ort", cache=False)
    found = []
    for number in range(3):
        monkeypatch.setenv("ORTLAB_TEST_ANY", str(number))
        wrapped(torch.randn(3, 6)).sum().backward()
        found.append(segments_alive() - before)
    assert found[0] > 0
    assert found == [found[0]] * 3


# Privacy


def test_onnxruntime_sends_no_usage_data(tmp_path: Path) -> None:
    """Its telemetry stores an identifier of the machine when it starts."""
    code = """
import torch, ortlab
from torch import nn
model = nn.Linear(2, 2)
ortlab.wrap(model, engine="ort", self_check=False)(torch.ones(1, 2)).sum().backward()
"""
    changed = {"HOME", "XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY"}
    usual = {name: value for name, value in os.environ.items() if name not in changed}
    given = {**usual, "HOME": str(tmp_path), "PYTHONUSERBASE": site.getuserbase()}
    subprocess.run([sys.executable, "-c", code], env=given, check=True)
    assert not [*tmp_path.rglob("deviceid")]


def test_a_user_may_leave_the_telemetry_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    turn_off_telemetry()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
