"""Models that a naive export gets wrong: each trains correctly or is refused."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertForSequenceClassification, MambaConfig, MambaForCausalLM

import ortlab
from ortlab.engines.ortmodule import dispatch
from ortlab.engines.ortmodule.engine import OrtModuleEngine
from ortlab.engines.ortmodule.export_pool import ExportFailed
from ortlab.engines.self_check import SelfCheckFailed
from ortlab.settings import EngineSettings
from tests.support import tiny


@pytest.fixture
def ort() -> OrtModuleEngine:
    return OrtModuleEngine()


def _wrap(ort: OrtModuleEngine, model: nn.Module, **settings: Any) -> nn.Module:
    return ort.wrap(model, EngineSettings.of(**settings))


def _assert_trains_as_eager(
    ort: OrtModuleEngine, model: nn.Module, *batches: tuple[Any, ...]
) -> nn.Module:
    """Assert eager torch's outputs and gradients for each of `batches`; return the wrapper."""
    twin = copy.deepcopy(model)
    wrapped = _wrap(ort, model)
    for batch in batches:
        expected, found = twin(*batch), wrapped(*batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for each, output in ((twin, expected), (model, found)):
            each.zero_grad()
            output.square().sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
    return wrapped


# --- 1, 2: branches on a tensor's value


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x * 2
        return self.layer(x)


class Loop(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.abs().max())):
            x = self.layer(x)
        return x


class Scale(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / x.abs().max().item()


class InNumpy(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(np.abs(x.detach().numpy()).max())


class BranchAfterNorm(nn.Module):
    """The branch is known only after BatchNorm has updated its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if x[0, 0] > 0:
            return self.layer(x)
        return -2 * x * self.layer.weight[0] + self.layer.bias


def _of_size(size: float) -> tuple[torch.Tensor]:
    return (torch.full((2, 3), float(size)),)


@pytest.mark.parametrize("kind", [Branch, Loop])
def test_a_decision_by_value_is_followed(ort: OrtModuleEngine, kind: type[nn.Module]) -> None:
    """Each branch gets a graph; a graph's own outputs tell whether it applies."""
    wrapped = _assert_trains_as_eager(ort, kind(), *map(_of_size, (2, -3, 1, 2, -3, 1, 4)))
    notes = [note for note in ort.report(wrapped).notes if note.startswith("exported again")]
    assert len(notes) == (1 if kind is Branch else 3)
    assert all("test_adversarial.py" in note and "x." in note for note in notes)


def test_a_wrong_way_leaves_no_trace(ort: OrtModuleEngine) -> None:
    up = torch.tensor([[9.0, 0, 0], [0, 1, 2], [0, 2, 1]])
    batches = [(up,), (-up,), (up,), (-up,), (2 * up,)]
    _assert_trains_as_eager(ort, BranchAfterNorm(), *batches)


def test_ways_to_decide_have_a_bound(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, Loop())
    for times in range(16):
        wrapped(*_of_size(times + 0.5))
    with pytest.raises(ExportFailed, match=r"16 branches already have an export each"):
        wrapped(*_of_size(16.5))
    wrapped(*_of_size(3.5))  # existing exports still run


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Scale, "return self.layer(x) / x.abs().max().item()"),
        (InNumpy, "return self.layer(x) * float(np.abs(x.detach().numpy()).max())"),
    ],
)
def test_a_fraction_that_is_read_is_refused_with_its_line(
    ort: OrtModuleEngine, kind: type[nn.Module], line: str
) -> None:
    x = torch.full((2, 3), 2.0)
    with pytest.raises(ExportFailed) as refused:
        _wrap(ort, kind())(x)
    assert line in str(refused.value)
    assert "test_adversarial.py" in str(refused.value)
    model = kind()
    falls_back = _wrap(ort, model, fallback=True)
    for each in (x, -x):
        torch.testing.assert_close(falls_back(each), model(each))
    assert "reads a tensor's value" in str(ort.report(falls_back).fallback_reason)


class Guarded(Branch):
    """A layer that reads a value in eager torch only, as transformers' masks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        if not torch.jit.is_tracing() and mask.all():
            return self.layer(x)
        return self.layer(x * mask)


def test_a_value_that_the_graph_does_not_hold_may_be_read(ort: OrtModuleEngine) -> None:
    _assert_trains_as_eager(ort, Guarded(), (torch.ones(2, 3),), (torch.randn(2, 3),))


class Compares(nn.Module):
    def __init__(self, truth: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.truth = truth

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * 2 if self.truth(x, y) else self.layer(x)


@pytest.mark.parametrize(
    "truth",
    [
        torch.equal,
        lambda x, y: x.allclose(y, rtol=1e-3),
        lambda x, y: torch.is_nonzero((x - y).sum()),
        lambda x, y: 7.0 in y,
    ],
    ids=["equal", "allclose", "is_nonzero", "in"],
)
def test_what_torch_answers_with_a_truth_is_a_decision(
    ort: OrtModuleEngine, truth: Callable[[torch.Tensor, torch.Tensor], bool]
) -> None:
    x = torch.randn(2, 3)
    batches = (x, x), (x, torch.full((2, 3), 7.0)), (x, x)
    _assert_trains_as_eager(ort, Compares(truth), *batches)


# --- the sizes of the first input


class ByParity(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if x.shape[0] % 2 == 0 else x)


def test_a_decision_by_size_is_checked_for_every_shape(ort: OrtModuleEngine) -> None:
    """Seven rows run after other sizes of their bucket are known, and with a cached graph too."""
    for _ in range(2):
        batches = [(torch.randn(rows, 3),) for rows in (8, 6, 10, 12, 7, 6, 7)]
        _assert_trains_as_eager(ort, ByParity(), *batches)


class ByChunks(Branch):
    """A model with a step per whole chunk; lengths below the next multiple take as many."""

    def __init__(self, count: Callable[[int], int]) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for i in range(self.count(x.shape[1])):
            state = self.layer(x[:, 16 * i : 16 * i + 16].mean(1) + state).tanh()
        return state


@pytest.mark.parametrize(
    "count",
    [lambda size: size // 16, lambda size: int(size) // 16, lambda size: math.floor(size / 16)],
    ids=["range", "int", "float"],
)
def test_a_size_that_is_read_as_a_number_is_checked_for_every_shape(
    ort: OrtModuleEngine, count: Callable[[int], int]
) -> None:
    """Three lengths agree, and the fourth, in the same bucket, needs one more step."""
    batches = [(torch.randn(2, length, 3),) for length in (16, 17, 18, 32)]
    _assert_trains_as_eager(ort, ByChunks(count), *batches)


class Heads(nn.Module):
    """Attention as users write it: sizes are passed to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("places", torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        x = x + self.places[:length]
        parts = self.project(x).view(rows, length, 2, 3 * width // 2).transpose(1, 2)
        q, k, v = parts.split(width // 2, dim=-1)
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        past = torch.ones(length, length, device=x.device).tril()
        shares = scores.masked_fill(past == 0, -1e4).softmax(-1)
        return self.last((shares @ v).transpose(1, 2).reshape(rows, length, width))


def test_sizes_that_torch_is_given_ask_for_no_more_checks(ort: OrtModuleEngine) -> None:
    batches = [(torch.randn(2, length, 8),) for length in (9, 10, 11, 12, 13)]
    wrapped = _assert_trains_as_eager(ort, Heads(), *batches)
    checks = [note for note in ort.report(wrapped).notes if note.startswith("checked on")]
    assert len(checks) == 3


class HoldsLength(nn.Module):
    """The mean over the sequence, divided by a Python number; any length runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.sum(1) / float(x.shape[1]))


class HoldsTable(HoldsLength):
    """A layer that adds a numpy table; ORT cannot run another length at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.from_numpy(np.arange(x.shape[1], dtype=np.float32))
        return self.layer(x + places[:, None])


@pytest.mark.parametrize("kind", [HoldsLength, HoldsTable])
def test_a_graph_that_holds_sizes_is_exported_for_each_shape(
    ort: OrtModuleEngine, kind: type[nn.Module]
) -> None:
    """Other batch sizes run first: the length changes once the graph seems well checked."""
    sizes = [(8, 60), (4, 60), (3, 60), (5, 60), (5, 50), (8, 60), (2, 33), (5, 50)]
    wrapped = _assert_trains_as_eager(ort, kind(), *((torch.randn(*s, 3),) for s in sizes))
    remarks = ort.report(wrapped).remarks
    assert sum("every shape gets its own export" in remark for remark in remarks) == 1


class Mamba(nn.Module):
    """A Mamba model, which updates its state for every token in Python."""

    def __init__(self) -> None:
        super().__init__()
        config = MambaConfig(vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=1)
        self.mamba = MambaForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mamba(ids, use_cache=False).logits


def test_a_model_of_transformers_that_holds_its_length(ort: OrtModuleEngine) -> None:
    torch.manual_seed(0)
    batches = [(torch.randint(20, (2, length)),) for length in (5, 8, 5)]
    wrapped = _assert_trains_as_eager(ort, Mamba(), *batches)
    (remark,) = ort.report(wrapped).remarks
    assert "every shape gets its own export" in remark


def test_exports_for_each_shape_have_a_bound(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, HoldsLength())
    for length in range(2, 18):
        wrapped(torch.randn(2, length, 3))
    with pytest.raises(ExportFailed, match="pad batches to fewer sizes"):
        wrapped(torch.randn(2, 18, 3))
    wrapped(torch.randn(2, 3, 3))  # existing exports still run


# --- 4: a parameter's shape edited in place


def test_a_parameter_that_gets_another_shape(ort: OrtModuleEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    wrapped, x = _wrap(ort, model), torch.randn(2, 3)
    assert wrapped(x).shape == (2, 4)
    model[0].weight.data, model[0].bias.data = torch.randn(6, 3), torch.randn(6)
    found = wrapped(x)
    torch.testing.assert_close(found, model(x))
    found.sum().backward()
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.shape == (6, 3)


# --- 5: buffers that change


class Average(nn.Module):
    """A model that keeps a moving average of its input, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.average)


def test_a_buffer_that_forward_changes(ort: OrtModuleEngine) -> None:
    """BatchNorm's buffers train; a change of any other is refused by name and undone."""
    torch.manual_seed(0)  # the bias before the norm has only rounding error as its gradient
    batches = [(torch.randn(4, 3),), (torch.randn(6, 3),), (torch.randn(4, 3),)]
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    _assert_trains_as_eager(ort, norm, *batches)
    model = Average()
    with pytest.raises((SelfCheckFailed, ExportFailed), match="average"):
        _wrap(ort, model)(torch.randn(4, 3))
    assert torch.equal(model.average, torch.zeros(3))


# --- 6: shared submodules


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.first(x).tanh()).tanh())


def test_shared_submodules_and_weights(ort: OrtModuleEngine) -> None:
    _assert_trains_as_eager(ort, Shared(), (torch.randn(2, 3),), (torch.randn(5, 3),))


# --- 7: dataclass inputs


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class TakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, pair: Pair) -> torch.Tensor:
        return self.layer(pair.x) + pair.y


def test_a_dataclass_is_refused_or_right(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, TakesPair())
    for _ in range(2):
        with pytest.raises(ExportFailed, match="Pair"):
            wrapped(Pair(torch.randn(2, 3), torch.randn(2, 3)))


# --- 8: complex numbers


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()


class Spectrum(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.layer(x)).abs()


@pytest.mark.parametrize("kind", [Complex, Spectrum])
def test_complex_numbers_are_refused(ort: OrtModuleEngine, kind: type[nn.Module]) -> None:
    with pytest.raises(ExportFailed, match=r"(?i)complex|fft"):
        _wrap(ort, kind())(torch.randn(2, 3))


# --- 9: gradients of gradients


def test_gradients_of_gradients_are_refused(ort: OrtModuleEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    wrapped = _wrap(ort, model)
    loss = wrapped(torch.randn(2, 3)).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*engine='eager'"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_a_second_backward_is_refused(ort: OrtModuleEngine) -> None:
    wrapped = _wrap(ort, nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    loss = wrapped(torch.randn(2, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"only once per forward.*engine='eager'"):
        loss.backward()


def test_a_step_between_forward_and_backward_is_refused(ort: OrtModuleEngine) -> None:
    """The step is refused, as in eager torch: the gradient would belong to other weights."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    optimizer, wrapped = torch.optim.SGD(model.parameters(), lr=0.1), _wrap(ort, model)
    late = wrapped(torch.randn(2, 3)).sum()
    wrapped(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        late.backward()


# --- gradients that are not needed, or for an input alone


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = self.body(x).relu()
        return self.first(body), self.second(body)


@pytest.mark.parametrize("head", [0, 1])
def test_what_no_output_in_use_depends_on_has_no_gradient(ort: OrtModuleEngine, head: int) -> None:
    """Unused parameters have no gradient: AdamW would decay them with zeros."""
    model = TwoHeads()
    twin = copy.deepcopy(model)
    wrapped = _wrap(ort, model)
    x = torch.randn(4, 3)
    wrapped(x)[head].sum().backward()
    twin(x)[head].sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_frozen_model_has_the_gradient_of_its_input(ort: OrtModuleEngine) -> None:
    model = TwoHeads().requires_grad_(False)
    wrapped = _wrap(ort, TwoHeads())
    wrapped.load_state_dict(model.state_dict())
    wrapped.requires_grad_(False)
    x, same = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    wrapped(x)[0].sum().backward()
    model(same)[0].sum().backward()
    torch.testing.assert_close(x.grad, same.grad)


def test_a_check_without_gradients_is_not_for_calls_with_them(ort: OrtModuleEngine) -> None:
    model = TwoHeads()
    wrapped = _wrap(ort, model)
    with torch.no_grad():
        wrapped(torch.randn(4, 3))
    wrapped(torch.randn(4, 3))
    checks = [note for note in ort.report(wrapped).notes if note.startswith("checked")]
    assert ["gradients" in note for note in checks] == [False, True]


# --- 10: hooks


def _double(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_a_forward_hook_that_computes_is_in_the_graph(ort: OrtModuleEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    handle = model[0].register_forward_hook(_double)
    batch = (torch.randn(2, 3),)
    wrapped = _assert_trains_as_eager(ort, model, batch)
    assert any("hook" in remark for remark in ort.report(wrapped).remarks)
    handle.remove()
    torch.testing.assert_close(wrapped(*batch), model(*batch))


def test_a_backward_hook_is_refused(ort: OrtModuleEngine) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ExportFailed, match="0 has a backward hook"):
        _wrap(ort, model)(torch.randn(2, 3))


class Hooks(Branch):
    """A layer that clamps or stores the gradient of its result."""

    def __init__(self, how: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if x.requires_grad:
            self.how(x)
        return x.tanh()


@pytest.mark.parametrize(
    "how",
    [lambda x: x.register_hook(lambda gradient: gradient.clamp(-9, 9)), torch.Tensor.retain_grad],
    ids=["register_hook", "retain_grad"],
)
def test_a_hook_of_what_forward_computes_is_refused(
    ort: OrtModuleEngine, how: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(RuntimeError, match=r"forward calls re.*engine='eager'"):
        _wrap(ort, Hooks(how))(torch.randn(2, 3))


# --- in-place changes by forward


class ChangesInput(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mul_(2))


def test_an_input_that_forward_changes_is_told_and_left(ort: OrtModuleEngine) -> None:
    model = ChangesInput()
    wrapped = _wrap(ort, model)
    for x in (torch.randn(2, 3), torch.randn(2, 3)):
        before = x.clone()
        torch.testing.assert_close(wrapped(x), model.layer(before * 2))
        assert torch.equal(x, before)
    assert any("changes its input in place" in remark for remark in ort.report(wrapped).remarks)


def test_a_parameter_that_forward_changes_is_refused(ort: OrtModuleEngine) -> None:
    with pytest.raises(ExportFailed, match=r"parameter weight in place"):
        _wrap(ort, nn.Embedding(5, 3, max_norm=1.0))(torch.tensor([1, 2]))


class Collects(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(x.square().mean())
        return self.layer(x)


def test_what_forward_collects_is_told_and_left(ort: OrtModuleEngine) -> None:
    model = Collects()
    wrapped = _wrap(ort, model)
    wrapped(torch.randn(2, 3))
    assert model.losses == []
    assert any("forward sets Collects.losses" in remark for remark in ort.report(wrapped).remarks)


class CollectsActivations(Collects):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        self.losses.append(found.square().mean())
        return found


class SetsLoss(Branch):
    aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        self.aux = found.square().mean()
        return found


@pytest.mark.parametrize(
    ("model", "name"), [(CollectsActivations, "losses"), (SetsLoss, "aux")], ids=["list", "loss"]
)
def test_a_tensor_that_forward_keeps_is_refused_before_a_step(
    model: type[Branch], name: str, ort: OrtModuleEngine
) -> None:
    """It would hold a tensor of the export, or none, and a loss would be left out."""
    kept = rf"keeps a tensor that it computes in {model.__name__}\.{name}.*use engine='ort'"
    with pytest.raises(ExportFailed, match=kept):
        _wrap(ort, model())(torch.randn(2, 3))
    eager = model()
    wrapped = ortlab.wrap(copy.deepcopy(eager))
    for own in (eager, wrapped):
        for _ in range(2):
            x = torch.ones(2, 3)
            loss = own(x).sum() + (own.aux if name == "aux" else own.losses[-1])
            loss.backward()
    pairs = zip(eager.parameters(), wrapped.parameters(), strict=True)
    for theirs, ours in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_a_hook_collects_is_real(ort: OrtModuleEngine) -> None:
    """No tensor of the export, whose gradient would end the process, is among it."""
    for engine in ("ortmodule", "auto"):
        model, seen = Branch(), list[torch.Tensor]()
        model.layer.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output))
        wrapped = ortlab.wrap(model, engine=engine)
        refused = pytest.raises(ExportFailed, match="a hook of it, keeps a tensor")
        with refused if engine == "ortmodule" else contextlib.nullcontext():
            output = wrapped(torch.randn(2, 3))
            torch.testing.assert_close(seen[-1], output)
        assert all(type(each) is torch.Tensor for each in seen)


# --- empty batches


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 3, 1), nn.Linear(4, 4)], ids=["conv", "linear"])
def test_an_empty_batch_is_refused(ort: OrtModuleEngine, layer: nn.Module) -> None:
    """An empty batch is refused: ORT's gradient of a convolution would divide by zero."""
    wrapped = _wrap(ort, layer)
    wrapped(torch.randn(2, 3, 4)).sum().backward()
    with pytest.raises(ExportFailed, match=r"an input is empty \(\[0, 3, 4\]\)"):
        wrapped(torch.randn(0, 3, 4))


# --- random numbers besides dropout


class ByChance(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * int(torch.rand(()) * 1e6)


def test_a_decision_by_random_numbers_is_refused(ort: OrtModuleEngine) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 3), ByChance()
    with pytest.raises(ExportFailed, match=r"decides by random numbers at .*torch\.rand"):
        _wrap(ort, model)(x)
    falls_back = _wrap(ort, model, fallback=True)
    assert falls_back(x).shape == x.shape
    assert "decides by random numbers" in str(ort.report(falls_back).fallback_reason)


class NumpyMask(Branch):
    """A layer that masks its input with numpy's random numbers, as transformers' SpecAugment."""

    share = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.from_numpy(np.random.rand(3) >= self.share)
        return self.layer(x * kept)


class SkipsLayers(Branch):
    """A layer that skips itself at random with a rate of zero, as BART's layerdrop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand([]) < 0.0 else self.layer(x)


def test_numpys_random_numbers_are_refused_where_they_matter(ort: OrtModuleEngine) -> None:
    np.random.seed(0)  # one mask of eight equals that of the other seed
    with pytest.raises(ExportFailed, match="random numbers from Python or numpy"):
        _wrap(ort, NumpyMask())(torch.randn(2, 3))
    harmless = NumpyMask()
    harmless.share = 0.0
    _assert_trains_as_eager(ort, harmless, (torch.randn(2, 3),))


def test_random_numbers_that_change_nothing_hinder_no_check(ort: OrtModuleEngine) -> None:
    wrapped = _assert_trains_as_eager(ort, SkipsLayers(), (torch.randn(2, 3),))
    assert not ort.report(wrapped).remarks


# --- results that are not in any graph


def test_a_decoder_trains_with_its_cache_on(ort: OrtModuleEngine) -> None:
    model = tiny.gpt2(use_cache=True, bos_token_id=0, eos_token_id=0)
    twin, wrapped = copy.deepcopy(model), _wrap(ort, model)
    for size in ((2, 7), (3, 5)):
        ids = torch.randint(20, size)
        for each in (twin, wrapped):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    name = "cache" if "cache" in twin(input_ids=ids) else "past_key_values"  # transformers 5.24
    assert twin(input_ids=ids)[name] is not None
    assert wrapped(input_ids=ids).get(name) is None
    assert ort.report(wrapped).remarks == (f"{name} is None: ORT's graph has no cache",)


def test_a_wrapped_model_generates_as_the_plain_one(ort: OrtModuleEngine) -> None:
    """Generation works; it looks up methods in the model's class and needs the model's cache."""
    model = tiny.gpt2(use_cache=True, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(1, 32, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    wrapped = ort.wrap(model, EngineSettings())
    found = wrapped.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert found.shape[1] > ids.shape[1]
    assert torch.equal(found, expected)


# --- copies and files


def _bert() -> nn.Module:
    torch.manual_seed(0)
    return tiny.bert()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_by_itself(
    ort: OrtModuleEngine, again: Callable[[nn.Module], nn.Module]
) -> None:
    wrapped = _wrap(ort, _bert())
    ids = torch.randint(20, (2, 5))
    wrapped(input_ids=ids)
    twin = again(wrapped)
    torch.testing.assert_close(twin(input_ids=ids).logits, wrapped(input_ids=ids).logits)
    twin(input_ids=ids).logits.sum().backward()
    assert all(p.grad is None for p in ort.unwrap(wrapped).parameters())
    with torch.no_grad():
        ort.unwrap(twin).classifier.bias += 1
    torch.testing.assert_close(twin(input_ids=ids).logits, wrapped(input_ids=ids).logits + 1)


def test_a_wrapped_model_saves_what_the_model_would(ort: OrtModuleEngine, tmp_path: Path) -> None:
    model = _bert()
    wrapped = _wrap(ort, model)
    ids = torch.randint(20, (2, 5))
    expected = wrapped(input_ids=ids).logits
    wrapped.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert list(wrapped.state_dict()) == list(model.state_dict())


# --- the first check uses some of the batch's rows


class NeedsAll(Branch):
    """A model that rejects a batch with fewer rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(4, -1, 3).mean(1)


class HoldsSize(Branch):
    """A model whose graph holds the number of rows, though forward does not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / float(x.shape[0])


class DecidesBySize(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.shape[0] > 4 else -self.layer(x)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(Branch, 8), (nn.Linear, 2), (NeedsAll, 8), (HoldsSize, 8), (DecidesBySize, 8)],
)
def test_rows_are_checked_where_they_can_tell(
    ort: OrtModuleEngine, kind: type[nn.Module], rows: int
) -> None:
    model = nn.Linear(3, 3) if kind is nn.Linear else kind()
    batches = [(torch.rand(rows, 3),) for rows in (8, 8, 12, 3)]
    if kind is NeedsAll:
        batches = batches[:3]
    wrapped = _assert_trains_as_eager(ort, model, *batches)
    checks = [note for note in ort.report(wrapped).notes if note.startswith("checked on")]
    assert checks[0].startswith(f"checked on [{rows}, 3]"), checks


def test_what_is_wrong_on_rows_and_on_all_is_refused(ort: OrtModuleEngine) -> None:
    class Twofold(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if torch.jit.is_tracing() else 1)

    with pytest.raises(SelfCheckFailed, match="1 of 1 outputs"):
        _wrap(ort, Twofold(3, 3))(torch.rand(16, 3))


# --- frozen parameters


@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_computed_for_frozen_parameters(ort: OrtModuleEngine, cached: bool) -> None:
    """Frozen parameters get no gradient computations, so training only a head stays cheap.

    ORTModule computes the whole backward pass for them.
    """
    x = torch.randn(4, 3)
    if cached:
        _wrap(ort, _with_frozen_body())(x).sum().backward()
    model = _with_frozen_body()
    wrapped = _assert_trains_as_eager(ort, model, (x,))
    notes = ort.report(wrapped).notes
    assert any("from the cache" in note for note in notes) is cached, notes
    stage = ortlab.graphs(wrapped).gradient
    assert set(stage.parameter_gradients) == {"2.weight", "2.bias"}
    assert len(stage.model.graph.output) == 2
    assert not [node for node in stage.nodes if node.op == "TanhGrad"]
    model.requires_grad_(True)
    model.zero_grad()
    wrapped(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def _with_frozen_body() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    return model


# --- rows that are fully masked


class Masked(nn.Module):
    """Attention with an additive mask, as in models: the lowest number hides a key."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.mask = torch.zeros(hidden.shape)
        self.mask = self.mask.masked_fill(hidden, torch.finfo(torch.float32).min)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (layer(x)[:, None] for layer in (self.query, self.key, self.value))
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=self.mask)


PADDED = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_row_that_is_hidden_whole_has_plain_attentions_gradient(
    ort: OrtModuleEngine, precision: Any
) -> None:
    """A fully masked row has plain attention's gradient.

    Torch's flash attention on a CPU computes another one, and the check says so.
    """
    model, x = Masked(PADDED), torch.randn(2, 3, 6)
    twin = copy.deepcopy(model)
    wrapped = _wrap(ort, model, precision=precision)
    wrapped(x).square().sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        twin(x).square().sum().backward()
    close = {"rtol": 1e-3, "atol": 1e-4} if precision == "fp32" else {"rtol": 5e-2, "atol": 0.5}
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name, **close)
    report = ort.report(wrapped)
    if precision == "fp32":  # in bf16, rounding can explain a difference in so few numbers
        assert any("computes another gradient" in remark for remark in report.remarks), report
    assert any(note.startswith("checked on") for note in report.notes), report


def test_plain_attention_is_asked_where_the_first_comparison_fails_alone(
    ort: OrtModuleEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(backend: SDPBackend) -> Any:
        asked.append(backend)
        return sdpa_kernel(backend)

    monkeypatch.setattr(dispatch, "sdpa_kernel", counted)
    wrapped = _wrap(ort, Masked(torch.eye(3, dtype=torch.bool)))
    wrapped(torch.randn(2, 3, 6)).square().sum().backward()
    assert not asked
    assert not ort.report(wrapped).remarks
    with pytest.raises(SelfCheckFailed, match="1 of 1 outputs differ"):
        _wrap(ort, WrongAndMasked(PADDED))(torch.randn(2, 3, 6))
    assert SDPBackend.MATH in asked


class WrongAndMasked(Masked):
    """A model that also has a wrong row: ORT's sigmoid is zero where torch's is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.sigmoid(x[:, None] - 40.0).log()
