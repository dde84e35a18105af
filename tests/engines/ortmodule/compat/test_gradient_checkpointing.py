"""Gradient checkpointing in ORT: gradients match eager torch, and ORT's recompute replaces it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ortlab.engines.ortmodule.engine import OrtModuleEngine, execution_of
from ortlab.engines.ortmodule.kernels.recomputed_graph import SUFFIX
from ortlab.engines.self_check import SelfCheckFailed
from ortlab.settings import EngineSettings
from tests.support.needed_engines import needs

RECOMPUTES = "gradient checkpointing: replaced by ORT's recomputation"


@pytest.fixture
def ort() -> OrtModuleEngine:
    """Return the engine; skip with its reason where ORT cannot run."""
    needs("ortmodule")
    return OrtModuleEngine()


class Blocks(nn.Module):
    """Three blocks, each checkpointed by `keep`."""

    def __init__(self, keep: Callable[[nn.Module, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 16))
            for _ in range(3)
        )
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.keep(block, x)
        return x


def with_reentry(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def without_reentry(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def in_segments(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(block, 2, x, use_reentrant=False)


def assert_trains_as_eager(
    ort: OrtModuleEngine, model: nn.Module, batches: list[dict[str, Any]]
) -> nn.Module:
    """Compare the loss and all gradients, with checkpointing in both."""
    eager = copy.deepcopy(model)
    wrapped = ort.wrap(model, EngineSettings.of(cache=False))
    for batch in batches:
        losses = []
        for each in (eager, wrapped):
            each.zero_grad(set_to_none=True)
            found = each(**batch)
            loss = found.pow(2).sum() if isinstance(found, Tensor) else found.loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    return wrapped


@pytest.mark.parametrize("keep", [with_reentry, without_reentry, in_segments])
def test_trains_as_eager_torch_does(
    ort: OrtModuleEngine, keep: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, 16, requires_grad=True)} for rows in (5, 3)]
    wrapped = assert_trains_as_eager(ort, Blocks(keep), batches)
    report = ort.report(wrapped)
    assert sum(note.startswith("checked on") for note in report.notes) == 2
    assert any(remark.startswith(RECOMPUTES) for remark in report.remarks)


def transformer(name: str, p: float = 0.0) -> nn.Module:
    """Return a small BERT or GPT-2 with dropout `p`."""
    import transformers

    torch.manual_seed(0)
    if name == "bert":
        bert = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            vocab_size=50, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
        )  # fmt: skip
        return transformers.BertForMaskedLM(bert).train()
    gpt2 = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(gpt2).train()


def text(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(50, (rows, length))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers(ort: OrtModuleEngine, name: str, reentrant: bool) -> None:
    model = transformer(name)
    with warnings.catch_warnings():  # transformers will rename it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wrapped = assert_trains_as_eager(ort, model, [text(4, 12), text(3, 9)])
    assert any(remark.startswith(RECOMPUTES) for remark in ort.report(wrapped).remarks)


def recomputed(folder: Path) -> list[str]:
    """Return the operators that the session's graph recomputes."""
    (file,) = folder.glob("*execution_model_training.onnx")
    nodes = onnx.load(file, load_external_data=False).graph.node
    return [node.op_type for node in nodes if "_recompute" in node.name]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_graph_recomputes(ort: OrtModuleEngine, name: str, p: float, tmp_path: Path) -> None:
    """The graph recomputes only where checkpointing is on, and no dropout or layer norm."""
    for asked in (True, False):
        model = transformer(name, p)
        if asked:
            model._set_gradient_checkpointing(
                gradient_checkpointing_func=lambda part, *args: checkpoint(
                    part, *args, use_reentrant=False
                )
            )
        folder = tmp_path / str(asked)
        folder.mkdir()
        settings = EngineSettings.of(self_check=False, cache=False, save_onnx=str(folder / "m"))
        ort.wrap(model, settings)(**text(2, 8)).loss.backward()
        nodes = recomputed(folder)
        assert bool(nodes) == asked
        assert not {"Dropout", "LayerNormalization"} & set(nodes)


def test_a_forward_without_a_backward(ort: OrtModuleEngine) -> None:
    """Later masks stay correct; ORT's own recomputed dropout would draw another mask."""
    model = Blocks(without_reentry, p=0.5)
    last = nn.Parameter(torch.ones(16))

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = model, last

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x) * self.last

    wrapped = ort.wrap(Ending(), EngineSettings.of(cache=False))
    x = torch.randn(6, 16)
    for _ in range(2):
        wrapped(x)
        total = wrapped(x).sum()
        last.grad = None
        total.backward()
        torch.testing.assert_close((last * last.grad).sum(), total, rtol=1e-3, atol=1e-3)
    assert any(remark.startswith(RECOMPUTES) for remark in ort.report(wrapped).remarks)


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_where_there_is_nothing_to_recompute(ort: OrtModuleEngine) -> None:
    wrapped = ort.wrap(Plain(6, 4), EngineSettings.of(cache=False))
    wrapped(torch.randn(3, 6)).sum().backward()
    (remark,) = ort.report(wrapped).remarks
    assert remark.startswith("gradient checkpointing saves no memory in ORT")


def test_plans_that_were_chosen_stay(ort: OrtModuleEngine) -> None:
    wrapped = ort.wrap(Blocks(without_reentry), EngineSettings.of(cache=False, memory_level=1))
    wrapped(torch.randn(3, 16)).sum().backward()
    remark, kernels = ort.report(wrapped).remarks
    assert remark == "gradient checkpointing: replaced by the selected recompute plans"
    assert "run its own kernels alone" in kernels


def test_plans_of_modules_that_were_chosen_stay(ort: OrtModuleEngine) -> None:
    wrapped = ort.wrap(Blocks(without_reentry), EngineSettings.of(cache=False, recompute="layers"))
    wrapped(torch.randn(3, 16)).sum().backward()
    (export,) = execution_of(wrapped).exports()
    assert export.without_kernels is None
    (remark,) = ort.report(wrapped).remarks
    assert remark == "gradient checkpointing: replaced by the selected recompute plans"


@pytest.mark.parametrize("chosen", [("layers", "off", "layers"), ("off", "layers", "off")])
def test_plans_that_are_chosen_and_left_again(
    ort: OrtModuleEngine, chosen: tuple[str, ...]
) -> None:
    model = Blocks(without_reentry)
    wrapped, x = ort.wrap(model, EngineSettings.of(cache=False)), torch.randn(3, 16)
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    for recompute in chosen:
        execution_of(wrapped).configure(EngineSettings.of(cache=False, recompute=recompute))
        model.zero_grad()
        wrapped(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        (export,) = execution_of(wrapped).exports()
        graph, _ = export.executed()
        assert any(SUFFIX in node.name for node in graph.graph.node)


@pytest.mark.parametrize("asked", ["precision", "autocast", "layers"])
def test_in_bfloat16_on_a_cpu(ort: OrtModuleEngine, asked: str) -> None:
    """ORT's own plans have no bfloat16 kernels on a CPU, so whole layers are recomputed."""
    model = transformer("bert", p=0.1)
    with warnings.catch_warnings():  # transformers will rename it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = {
        "precision": {"precision": "bf16"},
        "autocast": {},
        "layers": {"precision": "bf16", "recompute": "layers"},
    }[asked]
    wrapped = ort.wrap(model, EngineSettings.of(cache=False, **chosen))
    for batch in (text(4, 12), text(3, 9)):
        with torch.autocast("cpu", torch.bfloat16, enabled=asked == "autocast"):
            loss = wrapped(**batch).loss
        loss.backward()
    report = ort.report(wrapped)
    assert sum(note.startswith("checked on") for note in report.notes) == 2
    how = (
        "the selected recompute plans" if asked == "layers" else "recomputing each layer of a list"
    )
    assert report.remarks.count(f"gradient checkpointing: replaced by {how}") == 1
    (export,) = execution_of(wrapped).exports()
    graph, in_file_order = export.executed()
    assert in_file_order
    assert any(SUFFIX in node.name for node in graph.graph.node)


def test_in_bfloat16_without_a_list_of_layers(ort: OrtModuleEngine) -> None:
    wrapped = ort.wrap(Plain(6, 4), EngineSettings.of(cache=False, precision="bf16"))
    x = torch.randn(3, 6)
    wrapped(x).sum().backward()
    (remark,) = ort.report(wrapped).remarks
    assert remark.startswith("gradient checkpointing saves no memory in ORT")


def test_a_part_that_eager_torch_would_not_train(ort: OrtModuleEngine) -> None:
    """A reentrant checkpoint of an input without gradient is refused; eager skips the part."""
    model = nn.Sequential(Blocks(with_reentry), nn.Linear(16, 4))
    wrapped = ort.wrap(model, EngineSettings.of(cache=False))
    with pytest.raises(SelfCheckFailed, match="gradients differ"):
        wrapped(torch.randn(3, 16))


def test_a_graph_from_the_cache_recomputes_too(
    ort: OrtModuleEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remarks = []
    for _ in range(2):
        wrapped = ort.wrap(Blocks(without_reentry), EngineSettings())
        wrapped(torch.randn(3, 16)).sum().backward()
        remarks.append(ort.report(wrapped).remarks)
    notes = ort.report(wrapped).notes
    assert any("graph from the cache" in note for note in notes), notes
    assert remarks[0] == remarks[1]
    assert remarks[0][0].startswith(RECOMPUTES)
