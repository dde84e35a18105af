"""A profile adds up, describes the graph that runs, and leaves the model unchanged.

No test compares two measured times, because the machine decides those. The tests compare which
module a time is assigned to, with modules that are busy for a fixed time.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

import ortlab
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.graph import profile_torch, profiler
from ortlab.graph.capture import Stage
from ortlab.graph.profile import MOST_MODULES, Profile
from ortlab.graph.timed_step import PHASES, Step
from ortlab.session import session
from ortlab.utils import session_profile, svg_bars
from ortlab.utils.rng import RandomStates
from tests.support.profiles import assert_sums_add_up
from tests.support.waiting import HANGS_S, eventually

pytestmark = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))

CPU = torch.device("cpu")


class Block(nn.Module):
    """A net with everything that a profile could disturb: dropout, statistics, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.first(x)).relu()))


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    return ortlab.wrap(model.train(), engine="ortmodule", cache=False, **settings)


def trained(model: nn.Module, *args: torch.Tensor, **settings: Any) -> nn.Module:
    """Return the wrapped model after one training step."""
    found = wrapped(model, **settings)
    found(*args).sum().backward()
    return found


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, Profile]:
    """Return a BERT that was called once, and its profile on a batch."""
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=100,
    )  # fmt: skip
    model = wrapped(BertForSequenceClassification(config))
    batch = {"input_ids": torch.randint(0, 100, (2, 8)), "labels": torch.arange(2)}
    model(**batch).loss.backward()
    return model, ortlab.profile(model, batch, steps=2)


def test_sums_add_up(bert: tuple[nn.Module, Profile]) -> None:
    assert_sums_add_up(bert[1])


def test_what_ran_is_what_the_execution_graph_has(bert: tuple[nn.Module, Profile]) -> None:
    model, found = bert
    assert found.ort is not None
    graphs = ortlab.graphs(model)
    expected = {(n.name, n.op, n.module) for n in graphs.execution.nodes if "Yield" not in n.op}
    assert {(node.node, node.op, node.module) for node in found.nodes} == expected
    # Nodes that do not depend on the yield may run after it, wherever the graph has them.
    ran = {node.node for node in found.nodes if node.phase == "backward"}
    assert {node.name for node in graphs.execution.nodes if node.phase == "backward"} <= ran
    assert len(ran) < len(found.nodes)
    assert found.ort.joined == 1
    total = sum(node.us for node in found.nodes)
    assert sum(found.overlay(graphs.execution).values.values()) == pytest.approx(total)
    # The session fuses some transposes and casts into other nodes, whose names list the parts.
    assert sum(found.overlay(graphs.gradient).values.values()) > 0.95 * total
    forward = found.overlay(graphs.forward)
    assert (forward.name, forward.unit) == ("time", "us")
    assert set(forward.values) <= {node.name for node in graphs.forward.nodes}


def test_modules_are_folded_to_a_page(bert: tuple[nn.Module, Profile]) -> None:
    model, found = bert
    order = [name for name, _ in ortlab.unwrap(model).named_modules()]
    rows = [row.module for row in found.by_module()]
    assert 10 < len(rows) <= MOST_MODULES
    assert rows[0] == "(the model itself)"
    assert rows[-1] == "(around)"
    assert rows[1:-1] == sorted(rows[1:-1], key=order.index)
    assert [row.module for row in found.by_module(1)][1:-1] == ["bert", "dropout", "classifier"]
    said = "depth=0 is less than 1; a module's path has at least one part"
    with pytest.raises(ValueError, match=said):
        found.by_module(0)


def test_it_is_shown(bert: tuple[nn.Module, Profile]) -> None:
    _, found = bert
    text, page = repr(found), found._repr_html_()
    assert found.headline.startswith("BertForSequenceClassification: a step without its optimizer")
    for shown in (found.headline, "bert.encoder.layer.0", "FusedMatMul", "medians of 2 steps"):
        assert shown in text
        assert shown in page
    assert text.index("medians of") < text.index("ORT ms"), "whether to trust them comes first"
    assert page.index("medians of") < page.index("<img")
    costliest = max(found.nodes, key=lambda node: node.us)
    assert costliest.node in repr(found.by_node(most=1))
    assert f"and {len(found.nodes) - 1} nodes more" in repr(found.by_node(most=1))


def test_the_picture_escapes_names() -> None:
    rows = [("<b>&\"'", [{"a": 1000.0, "b": 500.0}]), ("x" * 100, [{"a": 3000.0}])]
    picture = svg_bars.svg(rows, {"a": ("#123456", 1.0), "b": ("#123456", 0.5)})
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>&\"'" in texts
    assert {"1.50 ms", "3.00 ms"} <= set(texts)
    assert all(len(text) <= svg_bars.LETTERS for text in texts)
    bars = [each.get("width", "") for each in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    *_, first, second, third = map(float, bars)  # the first is the paper
    assert first == pytest.approx(2 * second, abs=0.1)
    assert third == pytest.approx(svg_bars.WIDTH - svg_bars.LABELS - svg_bars.NUMBERS, abs=0.1)


def test_the_names_of_many_series_are_within_the_picture() -> None:
    names = [f"part of a step {i}" for i in range(15)]
    series = dict.fromkeys(names, ("#123456", 1.0))
    picture = svg_bars.svg([("one", [dict.fromkeys(names, 1000.0)])], series)
    space = "{http://www.w3.org/2000/svg}"
    found = {each.text: each for each in ElementTree.fromstring(picture).iter(f"{space}text")}
    places = [(float(found[name].get("x", "")), float(found[name].get("y", ""))) for name in names]
    assert all(x + 0.6 * svg_bars.FONT * len(names[-1]) <= svg_bars.WIDTH for x, _ in places)
    assert len(set(places)) == len(places)
    assert max(y for _, y in places) < float(found["one"].get("y", ""))


def test_a_picture_with_a_limit() -> None:
    """A limit beyond the longest bar sets the scale; the sums are shown in another unit."""
    series = {"a": ("#123456", 1.0)}
    picture = svg_bars.svg([("one", [{"a": 5.0}])], series, told=lambda b: f"{b:g} B", limit=10.0)
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert {"5 B", "10 B"} <= {element.text for element in root.iter(f"{space}text")}
    (line,) = root.iter(f"{space}line")
    *_, bar = root.iter(f"{space}rect")
    room = svg_bars.WIDTH - svg_bars.LABELS - svg_bars.NUMBERS
    assert float(line.get("x1", 0)) == pytest.approx(svg_bars.LABELS + room, abs=0.1)
    assert float(bar.get("width", 0)) == pytest.approx(room / 2, abs=0.1)


def test_a_branch_counts_once(tmp_path: Path) -> None:
    """ORT's profile also lists the nodes within a branch, whose time is part of the branch's."""
    branches = []
    for name in ("Exp", "Log"):
        out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
        nodes = [
            onnx.helper.make_node(name, ["x"], ["z"], name=f"inner {name}"),
            onnx.helper.make_node("Sin", ["z"], ["y"], name=f"inner {name} sine"),
        ]
        branches.append(onnx.helper.make_graph(nodes, name, [], [out]))
    nodes = [
        onnx.helper.make_node("Neg", ["x0"], ["x"], name="before"),
        onnx.helper.make_node("If", ["c"], ["y"], "branch", then_branch=branches[0],
                              else_branch=branches[1]),
    ]  # fmt: skip
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [
            onnx.helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, ["n"]),
            onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
        ],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])],
    )
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    options = onnxruntime.SessionOptions()
    session_profile.record(tmp_path, options)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    run = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {"x0": torch.rand(50_000).numpy(), "c": torch.tensor(True).numpy()}
    for _ in range(3):
        run.run(None, given)
    ran = session_profile.read(Path(run.end_profiling()))
    assert [[kernel.node for kernel in one.kernels] for one in ran] == [["before", "branch"]] * 3
    for one in ran:
        assert 0 < sum(kernel.us for kernel in one.kernels) <= one.us


# ---- owners of the time in eager torch ---------------------------------------------------------

BUSY_S = {"forward": 0.004, "backward": 0.012}


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Busy(torch.autograd.Function):
    """The identity, which is busy for a fixed time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        busy(BUSY_S["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        busy(BUSY_S["backward"])
        return gradients[0]


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(x)


class Outer(nn.Module):
    """A slow module between fast ones, followed by slow code of its own."""

    def __init__(self, *, saves_memory: bool = False) -> None:
        super().__init__()
        self.quick = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Tanh(), Slow(), nn.Tanh())
        self.last = nn.Linear(4, 4)
        self.saves_memory = saves_memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.quick(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.saves_memory else self.inner(x)
        return self.last(Busy.apply(x))


def eager_of(model: nn.Module) -> profile_torch.Eager:
    return profile_torch.profile(Step(model.train(), (torch.randn(2, 4),), {}), 1, CPU)


def test_forward_and_backward_time_belong_to_the_module_that_took_it() -> None:
    found = eager_of(Outer())
    for phase, seconds in BUSY_S.items():
        for owner in ("inner.1", ""):  # the model's own code is in no submodule
            assert found.us[owner, phase] >= 1e6 * seconds


def test_recomputed_time_belongs_to_backward_of_the_same_module() -> None:
    found = eager_of(Outer(saves_memory=True))
    assert found.us["inner.1", "backward"] >= 1e6 * sum(BUSY_S.values())
    assert found.us["", "backward"] >= 1e6 * BUSY_S["backward"]


def test_all_of_the_watched_time_is_somebodys_or_told() -> None:
    found = eager_of(Outer())
    assert set(found.unowned_us) == set(PHASES)
    total = sum(found.us.values()) + sum(found.unowned_us.values())
    assert total == pytest.approx(found.watched_us), "of a single step, so no median differs"
    assert total >= 2e6 * sum(BUSY_S.values())


class Lines(nn.Module):
    """A line that torch computes, one that takes time, and one whose gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        time.sleep(BUSY_S["forward"])
        return Busy.apply(x)


def test_time_belongs_to_the_innermost_line_outside_of_torch() -> None:
    traced = sys.gettrace()
    found = eager_of(Lines()).line_us
    assert sys.gettrace() is traced
    first = Lines.forward.__code__.co_firstlineno
    layer, asleep, slow = ((__file__, first + i) for i in (1, 2, 3))
    assert found[asleep, "forward"] >= 1e6 * BUSY_S["forward"]
    assert found[slow, "backward"] >= 1e6 * BUSY_S["backward"]
    assert min(found[layer, phase] for phase in PHASES) > 0
    inside = {number for (file, number), _ in found if file == __file__} - {first}
    assert inside >= {first + 1, first + 2, first + 3}
    assert not any("/torch/" in file for (file, _), _ in found), "torch's own lines are left out"


def test_another_threads_calls_are_none_of_it() -> None:
    model = Outer()
    ledger = profile_torch.Ledger(model, CPU)
    other = threading.Thread(target=model, args=(torch.randn(2, 4),))
    with ledger.watching(), ledger.within("forward", ()):
        other.start()
        other.join()
    assert {(owner.module, phase) for owner, phase in ledger.us} == {(None, "forward")}


def test_a_user_of_hooks_keeps_them() -> None:
    model, heard = Outer(), []
    model.quick.register_forward_hook(lambda *_: heard.append("after"))
    eager_of(model)
    count = len(heard)
    assert count > 0
    model(torch.randn(2, 4))
    assert len(heard) == count + 1
    assert sum(len(each._forward_hooks) for each in model.modules()) == 1
    assert not any(each._forward_pre_hooks for each in model.modules())


# ---- state that a profile must not change ------------------------------------------------------


def test_the_model_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = torch.randn(6, 4)
    model = trained(Block(), given)
    model(given).sum().backward()  # the second batch is checked, too
    own = ortlab.unwrap(model)
    execution = execution_of(model)
    (export,) = execution.exports()
    agent, notes = export.manager._execution_agent, execution.report().notes
    state = {name: value.clone() for name, value in own.state_dict().items()}
    gradients = [(p.grad, p.grad.clone()) for p in own.parameters() if p.grad is not None]
    attributes, random = dict(own.__dict__), RandomStates.now()
    before = given.clone()

    assert ortlab.profile(model, given, steps=2).ort is not None

    assert gradients
    assert all(torch.equal(grad, value) for grad, value in gradients)
    assert [p.grad for p in own.parameters()] == [grad for grad, _ in gradients]
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())
    assert own.__dict__ == attributes
    assert random.same_as(RandomStates.now())
    assert torch.equal(given, before)
    assert execution.exports() == [export]
    assert export.manager._execution_agent is agent
    assert execution.report().notes == notes
    model(given).sum().backward()
    assert execution.report().notes == notes, "the same export goes on"
    assert not list(tmp_path.iterdir()), "the profile's file is gone"


def test_the_numbers_of_dropout_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random numbers that a profile draws are restored afterwards."""
    given = torch.randn(6, 4)
    model = trained(Block(), given)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    found = []
    for profiled in (False, True):
        torch.manual_seed(5)
        model.load_state_dict(buffers, strict=False)
        first = model(given)
        if profiled:
            ortlab.profile(model, given, steps=1)
        found.append((first.detach(), model(given).detach()))
    assert not torch.equal(*found[0]), "dropout is on"
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_two_at_once_do_not_mix() -> None:
    calls: list[str] = []
    own = {"a": Block(), "b": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))}

    def logged(name: str) -> None:
        busy(BUSY_S["forward"])  # a thread's turn ends within one or two calls
        calls.append(name)

    for name, model in own.items():
        model.register_forward_hook(lambda *_, name=name: logged(name))
    models = {name: trained(model, torch.randn(3, 4)) for name, model in own.items()}
    calls.clear()
    found: dict[str, Profile] = {}
    both = threading.Barrier(2)

    def profile(name: str) -> None:
        both.wait()
        found[name] = ortlab.profile(models[name], steps=3)

    threads = [threading.Thread(target=profile, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(itertools.groupby(calls))) == 2, "one after the other"
    for name, model in models.items():
        graph = ortlab.graphs(model).execution
        nodes = {node.name for node in graph.nodes if not node.op.endswith("YieldOp")}
        assert {node.node for node in found[name].nodes} == nodes
        assert {path for path, _ in found[name].eager.us} <= set(found[name].modules)


def test_another_threads_calls_wait() -> None:
    """No count of BatchNorm's batches is lost to a profile that restores buffers."""
    given = torch.randn(6, 4)
    model = trained(Block(), given)
    norm: Any = model.norm
    counted, called, over = int(norm.num_batches_tracked), threading.Event(), threading.Event()
    calls = 0

    def train() -> None:
        nonlocal calls
        while not over.is_set():
            model(given)
            calls += 1
            called.set()

    thread = threading.Thread(target=train)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(over.set)
        assert called.wait(HANGS_S)
        for _ in range(3):
            ortlab.profile(model, given, steps=1)
    assert int(norm.num_batches_tracked) == counted + calls


# ---- conditions for a profile ------------------------------------------------------------------


def test_without_a_batch_the_last_calls_form_is_made_up() -> None:
    model = trained(Block(), torch.randn(6, 4))
    found = ortlab.profile(model, steps=1)
    assert "made-up values in the shapes of the last call: float32[6, 4]" in found.notes
    assert len(execution_of(model).exports()) == 1
    batch = (torch.randn(5, 4),)
    assert not any("made-up" in note for note in ortlab.profile(model, batch, steps=1).notes)


def test_a_model_that_was_never_called_needs_a_batch() -> None:
    model = wrapped(Block())
    with pytest.raises(
        ValueError, match=r"Block has not been called yet: give a batch for forward\(x\)"
    ):
        ortlab.profile(model)
    assert ortlab.profile(model, torch.randn(6, 4), steps=1).ort is not None
    assert len(execution_of(model).exports()) == 1


def test_values_that_do_not_fit_are_no_batch() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(1, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.words(ids)

    model = trained(Tokens(), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(
        ValueError,
        match=r"made-up values do not fit forward \(index out of range in self\); give a batch",
    ):
        ortlab.profile(model, steps=1)


@pytest.mark.parametrize(("watched_us", "said"), [(140.0, False), (160.0, True), (60.0, True)])
def test_steps_that_differ_are_told(watched_us: float, said: bool) -> None:
    eager = profile_torch.Eager({}, {"forward": 0.0}, 100.0, watched_us)
    notes = list(profiler.medians(3, None, eager))
    assert notes[0].endswith(
        f"tables show instrumented steps, which took {watched_us / 1000:.2f} ms in eager torch"
    )
    assert any("instrumented steps differ a lot from plain ones" in note for note in notes) == said


def test_evaluation_is_a_forward_pass() -> None:
    model = trained(Block(), torch.randn(6, 4)).eval()
    found = ortlab.profile(model, torch.randn(6, 4), steps=1)
    assert found.phases == ("forward",)
    assert {node.phase for node in found.nodes} == {"forward"}
    assert [row.phase for row in found.by_phase()] == ["forward"]
    assert "the model is in evaluation mode: forward pass only" in found.notes
    assert "a forward pass takes" in repr(found)
    assert not model.training


def test_a_model_that_fell_back_has_eager_torch_alone() -> None:
    class Complex(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(super().forward(x)).abs()

    model = trained(Complex(4, 2), torch.randn(3, 4), fallback=True)
    found = ortlab.profile(model, steps=1)
    assert found.ort is None
    assert found.eager.us["", "forward"] > 0
    assert any(
        note.startswith("the model runs on engine 'eager': ORTModule cannot run")
        for note in found.notes
    )
    for table in (found.by_op(), found.by_node()):
        assert "no ORT graph: torch runs the model" in repr(table)
    assert "ORT forward" not in repr(found.by_module())
    assert not found.overlay(Stage("gradient", onnx.ModelProto())).values


def test_a_recomputed_node_is_the_modules_that_it_was() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    given = torch.randn(4, 8)
    found = ortlab.profile(trained(Saving(), given), given, steps=1)
    again = [node for node in found.nodes if node.node.endswith("_recompute")]
    assert again
    assert all(node.phase == "backward" for node in again)
    assert {node.module for node in again} <= {"inner.0", "inner.1", "inner.2"}


def test_more_steps_than_a_profile_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(6, 4)
    model = trained(Block(), given)
    monkeypatch.setattr(session_profile, "MOST_EVENTS", 1000)
    said = r"ORT's profiler can record \d+ steps of .*; use fewer steps"
    with pytest.raises(ValueError, match=said):
        ortlab.profile(model, given, steps=50)
    assert ortlab.profile(model, given, steps=1).ort is not None


@pytest.mark.parametrize(
    ("batch", "steps", "said"),
    [
        ({"y": torch.randn(2, 4)}, 1, "does not fit forward: missing a required argument: 'x'"),
        ((torch.randn(2, 4), torch.zeros(2)), 1, "does not fit forward: too many positional"),
        (iter([]), 1, r"not a list_iterator; for a data loader pass next\(iter\(loader\)\)"),
        (torch.randn(2, 4), 0, "steps=0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line(batch: Any, steps: int, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        ortlab.profile(wrapped(Block()), batch, steps=steps)
    assert len(str(raised.value).splitlines()) == 1


def test_what_is_no_ort_model_is_refused() -> None:
    with pytest.raises(ValueError, match="this Linear has no ORT graphs; wrap it"):
        ortlab.profile(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"is a str, not a torch\.nn\.Module"):
        ortlab.profile("model")  # type: ignore[arg-type]


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    for run in session.runs:
        run.stop()
        assert run.wait_over(60)
    session.runs.clear()


def test_a_model_in_training_is_refused_and_a_paused_one_not(ended: None) -> None:
    torch.manual_seed(0)
    model = wrapped(Block())
    data = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(8)]
    run = ortlab.finetune(model, data, loss="cross_entropy", num_train_epochs=10_000)
    assert eventually(lambda: run.step > 2)
    with pytest.raises(ValueError, match=f"{run.name} is training this model; pause it"):
        ortlab.profile(model, data[0][:1], steps=1)
    run.pause()
    assert eventually(lambda: run.state == "paused")
    step, weights = run.step, {n: v.clone() for n, v in model.state_dict().items()}
    assert ortlab.profile(model, data[0][:1], steps=1).ort is not None
    assert run.step == step
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    run.resume()
    assert eventually(lambda: run.step > step)
