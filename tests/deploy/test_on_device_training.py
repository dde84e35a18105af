"""Exported training artifacts train as `finetune` does, with ORT's plain training API."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import ortlab
from ortlab.deploy.check import CheckFailed
from ortlab.deploy.on_device_training import TrainingArtifacts, chosen
from ortlab.engines.ortmodule import compat
from ortlab.engines.ortmodule.compat import artifacts
from ortlab.engines.torchscript.isolation import NotInGraph
from tests.support import tiny
from tests.support.typed_magics import Typist

needs_ort = pytest.mark.skipif(compat.unavailable() is not None, reason=str(compat.unavailable()))
pytestmark = [needs_ort, pytest.mark.usefixtures("one_thread")]


def sentences(number: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(6)
    return [
        {
            "input_ids": torch.randint(1, 50, (4, 9), generator=made),
            "attention_mask": torch.ones(4, 9, dtype=torch.long),
            "labels": torch.randint(0, 2, (4,), generator=made),
        }
        for _ in range(number)
    ]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(6)
    return torch.randn(5, 1, 8, 8, generator=made), torch.tensor([0, 1, 2, 0, 1])


def device_losses(folder: Path, data: list[Any], *, lr: float) -> list[float]:
    """Return the losses of ORT's plain training API, as a device would compute them."""
    compat.ortmodule()
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint(folder / artifacts.CHECKPOINT)
    module = Module(folder / artifacts.TRAINING, state, folder / artifacts.EVAL)
    optimizer = Optimizer(folder / artifacts.OPTIMIZER, module)
    optimizer.set_learning_rate(lr)
    losses = []
    for batch in data:
        module.train()
        loss, *_ = module(*(batch[name].numpy() for name in module.input_names()))
        losses.append(float(np.asarray(loss)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_device_trains_as_finetune_does(tmp_path: Path, optimizer: str) -> None:
    torch.manual_seed(2)
    model, data = tiny.bert(), sentences(12)
    found = ortlab.export(model, tmp_path / "out", data, trainable="*", optimizer=optimizer)
    assert isinstance(found, TrainingArtifacts)
    assert found.off_by < 1e-4
    assert found.inputs == ("input_ids", "attention_mask", "labels")
    assert not model.training or model.classifier.weight.grad is None
    given = device_losses(found.path, data, lr=1e-3)
    reference = copy.deepcopy(model).train()
    make = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    stepper = make(reference.parameters(), lr=1e-3, weight_decay=0.0)
    plain = []
    for batch in data:
        stepper.zero_grad()
        loss = reference(**batch).loss
        loss.backward()
        stepper.step()
        plain.append(float(loss.detach()))
    assert given == pytest.approx(plain, rel=1e-4)
    if optimizer == "adamw":
        run = ortlab.finetune(
            model,
            data,
            engine="eager",
            device="cpu",
            learning_rate=1e-3,
            weight_decay=0.0,
            max_grad_norm=None,
            lr_scheduler_type="constant",
        )
        run.result(60)
        assert run.step == len(data)
        torch.testing.assert_close(
            model.classifier.weight, reference.classifier.weight, rtol=1e-3, atol=1e-5
        )


class Words(nn.Module):
    """A model with a padding row that torch leaves unchanged, a dropout and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8, padding_idx=0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.drop(self.frozen(self.words(ids)).mean(1)))
        return found


class Masked(nn.Module):
    """A model whose weight gradient is the dropout's output for ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.Linear(640, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.sum(nn.functional.dropout(x, 0.1, self.training))
        return found.sum()


def test_each_element_is_dropped_as_often_as_any(tmp_path: Path) -> None:
    """The rates agree within six standard errors; ORT's own Dropout always drops element one."""
    batch, calls = torch.ones(1, 640), 1000
    found = ortlab.export(Masked(), tmp_path / "out", batch, trainable="*")
    assert isinstance(found, TrainingArtifacts)
    device = artifacts.Device(found.path)
    sums = [np.zeros((1, 640), np.float32)]
    for _ in range(calls):
        device.loss({found.inputs[0]: batch.numpy()})
        sums.append(device.gradients(["sum.weight"])["sum.weight"].reshape(1, 640))
    dropped = np.abs(np.diff(np.concatenate(sums), axis=0)) < 0.5
    error = (0.1 * 0.9 / calls) ** 0.5
    assert np.abs(dropped.mean(0) - 0.1).max() < 6 * error
    assert abs(dropped.mean(0).std() / error - 1) < 6 / (2 * 640) ** 0.5


def test_dropout_padding_and_what_is_frozen(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Words()
    batch = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]]), torch.tensor([0, 1, 2])
    found = ortlab.export(model, tmp_path / "out", batch, trainable="*", loss="cross_entropy")
    assert isinstance(found, TrainingArtifacts)
    assert found.off_by < 1e-4
    assert "words.weight: on-device training also updates the padding row" in repr(found)
    assert not model.frozen.weight.requires_grad, "as it was"
    assert model.words.weight.requires_grad
    named = [dict(zip(found.inputs, batch, strict=True))] * 4
    assert len(set(device_losses(found.path, named, lr=0.0))) == 4, "dropout draws in training"
    read = {
        name for node in onnx.load(found.path / artifacts.EVAL).graph.node for name in node.input
    }
    for node in onnx.load(found.path / artifacts.EVAL).graph.node:
        assert node.op_type != "Constant" or node.output[0] in read, "no session warns of it"


def test_decay_comes_before_the_update_as_in_torch(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, lr, decay = nn.Linear(4, 3), 0.1, 0.5
    batch = torch.randn(6, 4), torch.arange(6) % 3
    found = ortlab.export(
        model, tmp_path / "out", batch, trainable="*", loss="cross_entropy", weight_decay=decay
    )
    named = [dict(zip(found.inputs, batch, strict=True))] * 12
    given = device_losses(found.path, named, lr=lr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    plain = []
    for _ in named:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        plain.append(float(loss.detach()))
    assert given == pytest.approx(plain, rel=1e-5)


def test_a_head_alone_is_trained_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)
    )
    net.append(nn.Linear(144, 3))
    kept = copy.deepcopy(net.state_dict())
    found = ortlab.export(net, tmp_path / "o", images(), trainable=["5.*"], loss="cross_entropy")
    assert found.trained == ("5.weight", "5.bias")
    assert found.inputs == ("input", "target")
    graph = onnx.load(found.path / artifacts.TRAINING).graph
    sizes = {each.name: each.type.tensor_type.shape.dim[0].dim_param for each in graph.input}
    assert sizes["input"] == sizes["target"] == "batch", (
        "another batch size is a device's to choose"
    )
    assert "BatchNorm keeps its running statistics" in repr(found)
    assert net.training
    assert all(torch.equal(kept[name], value) for name, value in net.state_dict().items())
    outputs = {each.name for each in onnx.load(found.path / artifacts.TRAINING).graph.output}
    assert any("5.weight" in name for name in outputs)
    assert not any("0.weight" in name for name in outputs)
    again = ortlab.export(net, tmp_path / "o", images(), trainable="*", loss="cross_entropy")
    assert len(again.trained) == 6, "an earlier export is replaced"


def test_broadcast_gradients_are_summed(tmp_path: Path) -> None:
    """A plain export sums the gradient of the broadcast position embeddings explicitly."""
    torch.manual_seed(2)
    found = ortlab.export(
        tiny.bert(), tmp_path / "o", sentences(1), trainable="*position_embeddings*"
    )
    nodes = onnx.load(found.path / artifacts.TRAINING).graph.node
    makers = {name: node for node in nodes for name in node.output}
    (gradient,) = [
        each for each in nodes if each.op_type == "GatherGrad" and "position" in each.name
    ]
    assert makers[gradient.input[2]].op_type == "ReduceSum"


def test_a_wrong_gradient_is_refused(tmp_path: Path) -> None:
    class Twice(torch.autograd.Function):
        """A function that doubles but reports the gradient of the identity."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

        @staticmethod
        def symbolic(g: Any, x: Any) -> Any:
            return g.op("Identity", x)

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Twice.apply(super().forward(x))

    batch = (torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(CheckFailed, match=r"the gradient of weight is off by 5\.0e-01"):
        ortlab.export(Net(4, 3), tmp_path / "o", batch, trainable="*", loss="cross_entropy")
    assert not (tmp_path / "o").exists()


def test_its_readme_runs(tmp_path: Path) -> None:
    found = ortlab.export(
        nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
        tmp_path / "o",
        (torch.randn(5, 6), torch.arange(5) % 3),
        trainable="*",
        loss="cross_entropy",
    )
    text = (found.path / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from ortlab.engines.ortmodule import compat; compat.ortmodule()\n{code}",
        ],
        cwd=found.path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    losses = [float(line) for line in done.stdout.splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


class Pools(nn.Module):
    """A model with max pooling, whose gradient in ORT ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.max_pool2d(x, 2).flatten(1))


class Decides(nn.Linear):
    """A model that branches on the values of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


@pytest.mark.parametrize(
    ("model", "batch", "options", "error", "message"),
    [
        (Pools(), images(), {}, NotInGraph, "gradient of max pooling.*finetune"),
        (
            Decides(4, 3),
            (torch.ones(2, 4), torch.tensor([0, 1])),
            {},
            NotInGraph,
            "reads a tensor's value",
        ),
        (nn.Linear(4, 3), None, {}, ValueError, "trainable needs a batch with its labels"),
        (
            nn.Linear(4, 3),
            (torch.ones(2, 4), torch.tensor([0, 1])),
            {"trainable": "wait"},
            ValueError,
            "did you mean 'weight'",
        ),
        (
            nn.Linear(4, 3),
            (torch.ones(2, 4), torch.tensor([0, 1])),
            {"optimizer": "lamb"},
            ValueError,
            "optimizer='lamb': choose from adamw, sgd",
        ),
        (
            nn.Linear(4, 3),
            (torch.ones(2, 4), torch.tensor([0, 1])),
            {"optimizer": "sgd", "weight_decay": 0.1},
            ValueError,
            "no effect with optimizer='sgd'",
        ),
    ],
)
def test_refused(
    tmp_path: Path, model: nn.Module, batch: Any, options: Any, error: Any, message: str
) -> None:
    given = {"trainable": "*", "loss": "cross_entropy", **options}
    with pytest.raises(error, match=message):
        ortlab.export(model, tmp_path / "o", batch, **given)
    assert not (tmp_path / "o").exists()


class BySize(nn.Linear):
    """A model that branches on the size of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] > 3 else super().forward(-x)


def test_a_branch_by_size_is_told(tmp_path: Path) -> None:
    batch = torch.ones(2, 4), torch.tensor([0, 1])
    found = ortlab.export(
        BySize(4, 3), tmp_path / "out", batch, trainable="*", loss="cross_entropy"
    )
    assert isinstance(found, TrainingArtifacts)
    (note,) = [note for note in found.notes if "branches on sizes" in note]
    assert "2 in the graph" in note
    assert "branches on sizes" in (tmp_path / "out" / "README.md").read_text()


def test_a_loss_without_trainable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a graph for inference has no loss"):
        ortlab.export(nn.Linear(4, 3), tmp_path / "o", torch.ones(1, 4), loss="mse")


def test_patterns() -> None:
    model = tiny.bert()
    assert chosen(model, "classifier.*") == ["classifier.weight", "classifier.bias"]
    assert chosen(model, ["classifier.bias", "*.pooler.*"])[-1] == "classifier.bias"
    with pytest.raises(ValueError, match="names no parameter"):
        chosen(model, [])


def test_typed(ip: Typist, tmp_path: Path) -> None:
    ip.shell.user_ns |= {
        "net": nn.Linear(4, 3),
        "train": [(torch.ones(2, 4), torch.tensor([0, 1]))],
    }
    said = ip.refused(f"%ort export net {tmp_path}/out --trainable bias --loss cross_entropy")
    assert "--trainable needs a batch with its labels" in said
    line = f"made = %ort export net {tmp_path}/out --trainable bias,weight --batch train"
    ip(f"{line} --loss cross_entropy")
    made = ip.shell.user_ns["made"]
    assert made.trained == ("weight", "bias")
    assert "--fp16 is for inference" in ip.refused(f"{line} --loss cross_entropy --fp16 on")


class Up(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Conv2d(1, 4, 3), kind
        self.up = nn.ConvTranspose2d(4, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.kind == "Resize":
            hidden = nn.functional.interpolate(hidden, scale_factor=2, mode="bilinear")
        else:
            hidden = self.up(hidden)
        return hidden.mean((2, 3))


@pytest.mark.parametrize(
    ("kind", "line"),
    [("Resize", "hidden = nn.functional.interpolate"), ("ConvTranspose", "hidden = self.up(")],
)
def test_what_ort_has_no_gradient_for_is_named_with_its_line(
    kind: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(NotInGraph) as refused:
        ortlab.export(
            Up(kind), tmp_path / "out", images(), trainable="first.*", loss="cross_entropy"
        )
    said = str(refused.value)
    assert f"ORT has no kernel for {kind}Grad" in said
    assert line in said
    assert "onnxruntime_src" not in said


@pytest.mark.parametrize("embedding_first", [True, False])
def test_tied_embeddings_with_padding(embedding_first: bool, tmp_path: Path) -> None:
    """The padding row has the gradient of the scores, but not that of the embedding."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            scores, embedding = nn.Linear(8, 20, bias=False), nn.Embedding(20, 8, padding_idx=0)
            embedding.weight = scores.weight
            parts = {"embedding": embedding, "scores": scores}
            for name in sorted(parts, reverse=not embedding_first):
                self.add_module(name, parts[name])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.scores(self.embedding(ids).mean(1))
            return found

    batch = torch.tensor([[0, 3, 4], [0, 5, 6]]), torch.tensor([1, 0])
    found = ortlab.export(Tied(), tmp_path / "out", batch, trainable="*", loss="cross_entropy")
    assert any("also updates the padding row" in note for note in found.notes)
