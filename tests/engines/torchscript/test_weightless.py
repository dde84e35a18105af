"""An export can run forward without computing weight-dependent values, with the same graph."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import ortlab
from ortlab.engines.batch import tensors
from ortlab.engines.ortmodule.engine import execution_of
from ortlab.engines.ortmodule.export import Export
from ortlab.engines.torchscript.isolation import inputs_kept, undisturbed
from tests.support import tiny

weightless = pytest.importorskip("ortlab.engines.torchscript.weightless")


class Net(nn.Module):
    """A single layer; the subclasses below each add one property."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.layer(x))

    def change(self, y: torch.Tensor) -> torch.Tensor:
        return y


class Normed(Net):
    """A net with statistics that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def change(self, y: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.norm(y)
        return changed


class ByInput(Net):
    """A net that branches on its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if (x > 0).any() else -y


class ByResult(Net):
    """A net that branches on a computed value."""

    def change(self, y: torch.Tensor) -> torch.Tensor:
        return y if y.abs().sum() > 0 else -y


class Catches(Net):
    """A net that takes another branch where no value is available."""

    def change(self, y: torch.Tensor) -> torch.Tensor:
        try:
            return y if bool((y == y).all()) else y - 1
        except Exception:  # noqa: BLE001 - as a user's model might
            return -y


class Writes(Net):
    """A net that writes its result into a tensor that it created."""

    def change(self, y: torch.Tensor) -> torch.Tensor:
        room = torch.ones(len(y), 4)
        room *= y
        return room


class Convolves(Net):
    """A net that applies an operation to the input that the tracer records in several parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(
            nn.functional.conv1d(x[:, :, None], torch.eye(6)[:, :, None])[:, :, 0]
        )
        return y


class AsksForType(Net):
    """A net that computes something else for tensor subclasses."""

    def change(self, y: torch.Tensor) -> torch.Tensor:
        return y if type(y) is torch.Tensor else -y


class Draws(Net):
    """A net with random numbers other than dropout, so that no check can verify the graph."""

    def change(self, y: torch.Tensor) -> torch.Tensor:
        return y + torch.rand_like(y)


WORDS = torch.arange(24).reshape(4, 6)
CASES: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "BERT": (lambda: tiny.bert(0.1), {"input_ids": WORDS, "labels": torch.arange(4) % 2}),
    "GPT-2": (lambda: tiny.gpt2(0.1), {"input_ids": WORDS, "labels": WORDS}),
    "statistics": (Normed, {"x": torch.randn(8, 6)}),
    "a decision": (ByInput, {"x": torch.ones(8, 6)}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_the_same_without_values(case: str) -> None:
    make, batch = CASES[case]
    model = make().train()
    wrapped = ortlab.wrap(model, cache=False)
    found = []
    for how in ("build_weightless", "build"):
        export = Export(wrapped, model, gradient=True)
        with undisturbed(model), inputs_kept(tensors([batch])):
            getattr(export, how)((), batch)
        assert export.weightless == (how == "build_weightless")
        stages = [export.stages()[stage] for stage in ("exported", "gradient")]
        graphs = [stage.SerializeToString(deterministic=True) for stage in stages]
        decided = [(each.place, each.value.tolist()) for each in export.decisions]
        found.append((graphs, decided, export.by_size, export.left_out))
    assert found[0] == found[1]
    assert bool(found[0][1]) == (case == "a decision")


@pytest.mark.parametrize("kind", [ByResult, Catches, Writes, Convolves, AsksForType])
def test_what_needs_values_is_exported_with_them(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model = kind().train()
    wrapped = ortlab.wrap(model, cache=False)
    x = torch.randn(8, 6)
    torch.testing.assert_close(wrapped(x), model(x))
    execution = execution_of(wrapped)
    assert [each.weightless for each in execution.exports()] == [False]
    wrong = [note for note in execution.report().notes if "without values was wrong" in note]
    assert len(wrong) == (kind is AsksForType)


class Traced(Net):
    """A net that runs as in an export and reads a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with weightless.running():
            y: torch.Tensor = self.layer(x)
            return y.reshape(x.shape[0], -1, 2).sum(1)


def test_the_tracer_hears_forward_alone() -> None:
    model, x, heard = Traced(), torch.randn(8, 6), []
    for how in (contextlib.nullcontext(), weightless.without_weights()):
        with how, torch.no_grad():
            graph, _ = torch.jit._get_trace_graph(model, (x,))
        heard.append([node.kind() for node in graph.nodes()])
    assert heard[0] == heard[1]


def test_only_what_is_checked_is_exported_so() -> None:
    x = torch.randn(8, 6)
    for model, settings, expected in (
        (Net(), {}, True),
        (Net(), {"self_check": False}, False),
        (Draws(), {}, False),
    ):
        wrapped = ortlab.wrap(model.train(), engine="ortmodule", cache=False, **settings)
        wrapped(x)
        assert [each.weightless for each in execution_of(wrapped).exports()] == [expected]


def test_what_follows_from_inputs_is_computed_and_what_follows_from_weights_is_not() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(8, 6)
    with weightless.without_weights(), weightless.running():
        mask = (x > 0).all(1)
        assert mask.tolist() == (x > 0).all(1).tolist()
        y = layer(x) * mask[:, None]
        assert (y.shape, y.dtype, y.device) == ((8, 4), torch.float32, x.device)
        assert isinstance(y, weightless.FakeTensor)
    with (
        pytest.raises(weightless.NeedsValues),
        weightless.without_weights(),
        weightless.running(),
        contextlib.suppress(RuntimeError),
    ):  # forward may suppress errors too
        layer(x).sum().item()
    assert type(layer(x)) is torch.Tensor
    assert not weightless.is_asked()


def test_autocast_keeps_no_weight_without_values() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with weightless.without_weights(), weightless.running():
            layer(x)
        assert torch.is_autocast_cache_enabled()
        assert type(layer(x)) is torch.Tensor
