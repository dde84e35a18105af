"""A cached graph in the next kernel: the same numbers, checked again, never the wrong graph."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from ortlab.engines.ortmodule import export, graph_cache
from ortlab.engines.ortmodule.compat import restoring
from ortlab.engines.ortmodule.engine import OrtModuleEngine, execution_of
from ortlab.settings import EngineSettings
from tests.support.needed_engines import needs

FROM_CACHE = "graph from the cache (saved "


@pytest.fixture
def ort() -> OrtModuleEngine:
    """Return the engine; skip with its reason where ORT cannot run."""
    needs("ortmodule")
    return OrtModuleEngine()


class Net(nn.Module):
    """A net with layers, dropout, statistics and a buffer that forward reads."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(p)
        self.second = nn.Linear(16, 4)
        self.register_buffer("shift", torch.arange(16.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x) + self.shift).relu()
        return self.second(self.dropout(hidden))


def _wrap(ort: OrtModuleEngine, model: nn.Module, **settings: Any) -> nn.Module:
    return ort.wrap(model, EngineSettings.of(**settings))


def _net(p: float = 0.0, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return Net(p)


def _hits(wrapped: nn.Module) -> int:
    """Return the number of graphs of `wrapped` from the cache, which its notes must match."""
    execution = execution_of(wrapped)
    hits = sum(each.from_cache for each in execution.exports())
    assert hits == sum(note.startswith(FROM_CACHE) for note in execution.report().notes)
    return hits


def _numbers(wrapped: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return outputs, gradients and buffers of one training step's forward and backward."""
    model = execution_of(wrapped).module
    model.zero_grad()
    output = wrapped(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


def _entries() -> list[Path]:
    return sorted(graph_cache.folder().glob("*.zip"))


def test_a_hit_gives_the_same_numbers_to_the_bit(ort: OrtModuleEngine) -> None:
    x = torch.randn(5, 6)
    without = _wrap(ort, _net(), cache=False)
    reference = _numbers(without, x)
    assert not _entries()
    first, second = _wrap(ort, _net()), _wrap(ort, _net())
    for wrapped, hits in ((first, 0), (second, 1)):
        for a, b in zip(reference, _numbers(wrapped, x), strict=True):
            assert torch.equal(a, b)
        assert _hits(wrapped) == hits
    assert len(_entries()) == 1
    for wrapped in (without, first, second):  # later results match too
        wrapped.get_submodule("second").weight.data.mul_(2)
    x = torch.randn(7, 6)
    expected = _numbers(without, x)
    for wrapped in (first, second):
        assert all(map(torch.equal, expected, _numbers(wrapped, x)))


def test_other_weights_and_another_batch_size_hit(ort: OrtModuleEngine) -> None:
    _numbers(_wrap(ort, _net()), torch.randn(5, 6))
    wrapped = _wrap(ort, _net(seed=2))
    _numbers(wrapped, torch.randn(9, 6))
    assert _hits(wrapped) == 1
    assert any("checked on [9, 6]" in note for note in execution_of(wrapped).report().notes)


def test_unchecked_graphs_are_for_the_sizes_that_they_were_made_of(ort: OrtModuleEngine) -> None:
    for size, hits in ((5, 0), (5, 1), (9, 0)):
        wrapped = _wrap(ort, _net(), self_check=False)
        _numbers(wrapped, torch.randn(size, 6))
        assert _hits(wrapped) == hits
    checked = _wrap(ort, _net())
    _numbers(checked, torch.randn(5, 6))
    assert _hits(checked) == 0


def test_dropout_drops_and_is_off_in_the_check(ort: OrtModuleEngine) -> None:
    x = torch.randn(64, 6)
    for hits in (0, 1):
        wrapped = _wrap(ort, _net(p=0.5))
        one, other = wrapped(x), wrapped(x)
        assert _hits(wrapped) == hits
        assert not torch.equal(one, other)
        (served,) = execution_of(wrapped)._kinds.popitem()[1].served
        twin = served.run((x,), {}, dropout=False)
        assert torch.equal(twin, served.run((x,), {}, dropout=False))
        reference = _net(p=0.0)
        assert torch.allclose(twin, reference(x), atol=1e-5)


def test_another_number_of_threads_misses(ort: OrtModuleEngine) -> None:
    """Another number of threads is a cache miss: other kernels may be faster."""
    before = torch.get_num_threads()
    try:
        for threads, hits in ((1, 0), (2, 0), (1, 1)):
            torch.set_num_threads(threads)
            wrapped = _wrap(ort, _net())
            _numbers(wrapped, torch.randn(5, 6))
            assert _hits(wrapped) == hits
    finally:
        torch.set_num_threads(before)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda net: setattr(net.dropout, "p", 0.25),
    "a part": lambda net: setattr(net, "norm", nn.Identity()),
    "the mode": lambda net: net.eval(),
    "frozen": lambda net: net.first.weight.requires_grad_(False),
    "a buffer": lambda net: net.shift.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_edited_model_misses(ort: OrtModuleEngine, change: Callable[[Any], object]) -> None:
    _numbers(_wrap(ort, _net(p=0.5)), torch.randn(5, 6))
    edited = _net(p=0.5)
    change(edited)
    wrapped = _wrap(ort, edited)
    _numbers(wrapped, torch.randn(5, 6))
    assert _hits(wrapped) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"opset": 16}},
        {"x": torch.randn(5, 6, requires_grad=True)},
        {"autocast": True},
    ],
    ids=["an option", "an input's gradient", "autocast"],
)
def test_another_call_misses(ort: OrtModuleEngine, other: dict[str, Any]) -> None:
    _numbers(_wrap(ort, _net()), torch.randn(5, 6))
    wrapped = _wrap(ort, _net(), **other.get("settings", {}))
    with torch.autocast("cpu", torch.float16, enabled=other.get("autocast", False)):
        wrapped(other.get("x", torch.randn(5, 6)))
    assert _hits(wrapped) == 0


def test_evaluation_without_gradients_is_cached_too(ort: OrtModuleEngine) -> None:
    x = torch.randn(5, 6)
    outputs = []
    for hits in (0, 1):
        wrapped = _wrap(ort, _net()).eval()
        with torch.no_grad():
            outputs.append(wrapped(x))
        assert _hits(wrapped) == hits
    assert torch.equal(*outputs)


def _edit(change: Callable[[onnx.GraphProto], object], part: str) -> None:
    """Edit one graph of the only entry."""
    (path,) = _entries()
    entry = graph_cache.load(path.stem)
    assert entry is not None
    model = onnx.load_model_from_string(entry.graphs[part])
    change(model.graph)
    graphs = {**entry.graphs, part: model.SerializeToString()}
    graph_cache.store(path.stem, graph_cache.CachedGraph(graphs, entry.facts))


def _swap_relu(graph: onnx.GraphProto) -> None:
    (node,) = (node for node in graph.node if node.op_type == "Relu")
    node.op_type = "Sigmoid"


def _ask_for_more(graph: onnx.GraphProto) -> None:
    graph.input.add().CopyFrom(graph.input[0])
    graph.input[-1].name = "unheard_of"


def _forget_a_node(graph: onnx.GraphProto) -> None:
    del graph.node[3]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_swap_relu, restoring.OPTIMIZED),
        (_ask_for_more, restoring.EXPORTED),
        (_forget_a_node, restoring.OPTIMIZED),
    ],
)
def test_a_wrong_graph_is_caught_and_replaced(
    ort: OrtModuleEngine, change: Callable[[onnx.GraphProto], object], part: str
) -> None:
    """The check of every first export finds the wrong graph, and the right one replaces it."""
    x = torch.randn(5, 6)
    reference = _numbers(_wrap(ort, _net()), x)
    _edit(change, part)
    wrapped = _wrap(ort, _net())
    assert all(map(torch.equal, reference, _numbers(wrapped, x)))
    assert _hits(wrapped) == 0
    wrapped = _wrap(ort, _net())
    assert all(map(torch.equal, reference, _numbers(wrapped, x)))
    assert _hits(wrapped) == 1


def test_the_user_is_told_of_a_wrong_graph(ort: OrtModuleEngine) -> None:
    _numbers(_wrap(ort, _net()), torch.randn(5, 6))
    _edit(_swap_relu, restoring.OPTIMIZED)
    wrapped = _wrap(ort, _net())
    _numbers(wrapped, torch.randn(5, 6))
    assert "exported again: the graph from the cache was wrong" in (
        execution_of(wrapped).report().notes
    )


def test_no_weight_is_in_a_file(ort: OrtModuleEngine) -> None:
    """No part of the file contains any four adjacent numbers of a weight."""
    model = _net()
    _numbers(_wrap(ort, model), torch.randn(5, 6))
    (path,) = _entries()
    with zipfile.ZipFile(path) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    for parameter in model.parameters():
        raw = parameter.detach().numpy().tobytes()
        if parameter.detach().unique().numel() > 4:  # the norm's are zeros and ones
            assert not any(raw[i : i + 16] in content for i in range(0, len(raw) - 15, 4))


class Baked(nn.Module):
    """A layer that adds a tensor attribute that is not a parameter."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 100)
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.numbers


@pytest.mark.parametrize(
    ("numbers", "kept"),
    [(torch.linspace(0, 1, 100), 0), (torch.full((100,), 0.5), 1), (torch.tensor(3.0), 1)],
    ids=["many", "all the same", "one"],
)
def test_a_graph_that_holds_many_numbers_is_not_kept(
    ort: OrtModuleEngine, numbers: torch.Tensor, kept: int
) -> None:
    wrapped = _wrap(ort, Baked(numbers))
    wrapped(torch.randn(2, 4))
    assert len(_entries()) == kept
    told = [n for n in execution_of(wrapped).report().notes if "may come from weights" in n]
    assert len(told) == 1 - kept


class Twice(torch.autograd.Function):
    """A function that returns x + x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Calling(nn.Module):
    """A layer followed by `call`."""

    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.layer(x))


def _decide(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x * 3


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (Twice.apply, "it runs Python code"),
        (_decide, "forward decides by a tensor's value"),
        (lambda x: x + x.new_tensor(next(iter([1.0]))), ""),
    ],
    ids=["a function", "a decision", "neither"],
)
def test_what_is_more_than_a_graph_is_not_kept(
    ort: OrtModuleEngine, call: Callable[[torch.Tensor], Any], why: str
) -> None:
    wrapped = _wrap(ort, Calling(call))
    wrapped(torch.randn(2, 4))
    assert len(_entries()) == (not why)
    assert (f"the graph is not cached: {why}" in str(execution_of(wrapped).report())) == bool(why)


def test_a_model_that_cannot_be_compared_is_not_cached(ort: OrtModuleEngine) -> None:
    model = _net()
    model.source = iter(())
    wrapped = _wrap(ort, model)
    wrapped(torch.randn(5, 6))
    assert not _entries()
    notes = execution_of(wrapped).report().notes
    assert "the graph is not cached: Net.source is a tuple_iterator" in notes


Pair = namedtuple("Pair", "a b")


def _forms(x: torch.Tensor) -> dict[str, Any]:
    return {"pair": Pair(x, [x + 1, None]), "tuple": (x * 2,), "name": "a"}


def test_outputs_keep_their_form(ort: OrtModuleEngine) -> None:
    x = torch.randn(2, 4)
    found = []
    for hits in (0, 1):
        torch.manual_seed(3)
        wrapped = _wrap(ort, Calling(_forms))
        found.append(wrapped(x))
        assert _hits(wrapped) == hits
    for output in found:
        assert isinstance(output, dict)
        assert isinstance(output["pair"], Pair)
        assert output["pair"].b[1] is None
        assert isinstance(output["tuple"], tuple)
        assert output["name"] == "a"
    assert torch.equal(found[0]["pair"].b[0], found[1]["pair"].b[0])


def test_a_class_of_outputs_that_has_no_name_is_not_kept(ort: OrtModuleEngine) -> None:
    class Hidden(dict[str, Any]):
        pass

    wrapped = _wrap(ort, Calling(lambda x: Hidden(y=x)))
    assert type(wrapped(torch.randn(2, 4))) is Hidden
    assert not _entries()
    assert "it returns a " in str(execution_of(wrapped).report())


def test_a_shared_folder_is_told_and_training_goes_on(ort: OrtModuleEngine) -> None:
    graph_cache.folder().mkdir(mode=0o700, exist_ok=True)
    graph_cache.folder().chmod(0o777)
    try:
        wrapped = _wrap(ort, _net())
        wrapped(torch.randn(5, 6)).sum().backward()
        assert "chmod 700" in str(execution_of(wrapped).report())
        assert not _entries()
    finally:
        graph_cache.folder().chmod(0o700)


def test_saving_onnx_saves_it(ort: OrtModuleEngine, tmp_path: Path) -> None:
    _numbers(_wrap(ort, _net()), torch.randn(5, 6))
    wrapped = _wrap(ort, _net(), save_onnx=str(tmp_path / "net"))
    _numbers(wrapped, torch.randn(5, 6))
    assert _hits(wrapped) == 0
    assert list(tmp_path.glob("net*execution_model*"))


def test_a_copy_and_a_later_export_hit_in_the_same_kernel(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, _net())
    x = torch.randn(5, 6)
    wrapped(x)
    other = copy.deepcopy(wrapped)
    other(x)
    assert _hits(other) == 1


def test_a_session_that_cannot_be_made_is_an_export(
    ort: OrtModuleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ORT makes no session of an entry, for any reason, the model is exported."""
    x = torch.randn(5, 6)
    reference = _numbers(_wrap(ort, _net()), x)

    def broken(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(export.restoring, "put_together", broken)
    wrapped = _wrap(ort, _net())
    assert all(map(torch.equal, reference, _numbers(wrapped, x)))
    assert _hits(wrapped) == 0


SCRIPT = """
import hashlib, json, sys
import torch
from transformers import BertConfig, BertForSequenceClassification
import ortlab

torch.manual_seed(0)
torch.set_num_threads(1)
config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
original = BertForSequenceClassification(config)
model = ortlab.wrap(original, kernels="torch")  # measured, each may choose other kernels
ids = torch.randint(0, 50, (4, 8))
loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.arange(4) % 2).loss
loss.backward()
digest = hashlib.sha256(loss.detach().numpy().tobytes())
for p in original.parameters():
    digest.update(p.grad.numpy().tobytes())
from ortlab.engines.ortmodule.engine import execution_of
hit = any("graph from the cache" in note for note in execution_of(model).report().notes)
print(json.dumps({"hit": hit, "digest": digest.hexdigest()}))
"""


def test_the_next_kernels_at_once(ort: OrtModuleEngine) -> None:
    """Two kernels miss and write the same entry at once; then two more hit it."""
    found = []
    for _ in range(2):
        started = [
            subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        found += [json.loads(one.communicate(timeout=300)[0].splitlines()[-1]) for one in started]
    assert len({one["digest"] for one in found}) == 1
    assert [one["hit"] for one in found[2:]] == [True, True]
    assert len(_entries()) == 1


def test_a_bert_with_padding_and_labels(ort: OrtModuleEngine) -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ids = torch.randint(0, 50, (4, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    losses = []
    for hits in (0, 1):
        torch.manual_seed(0)
        model = BertForSequenceClassification(config).eval()
        wrapped = _wrap(ort, model)
        output = wrapped(input_ids=ids, attention_mask=mask, labels=torch.arange(4) % 2)
        assert type(output).__name__ == "SequenceClassifierOutput"
        losses.append(output.loss)
        assert _hits(wrapped) == hits
    assert torch.equal(*losses)
