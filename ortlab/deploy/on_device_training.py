"""Export of a model's training: graphs and weights for ORT's on-device training API."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from ortlab.deploy import axes, folder, weights
from ortlab.deploy.call import ModelCall
from ortlab.deploy.check import CheckFailed
from ortlab.deploy.exported import size
from ortlab.deploy.readme import escaped
from ortlab.deploy.trace import trace
from ortlab.engines.base import Batch, LossFunction, tell
from ortlab.engines.batch import forward, signature_names
from ortlab.engines.ortmodule import dropout
from ortlab.engines.ortmodule.compat import artifacts
from ortlab.engines.ortmodule.compat.artifacts import Device, NotDifferentiable
from ortlab.engines.torchscript import decisions
from ortlab.engines.torchscript.failures import Node
from ortlab.engines.torchscript.isolation import NoDropout, NotInGraph, undisturbed
from ortlab.settings import unknown_name
from ortlab.utils.tables import Column, Table

OPTIMIZERS = ("adamw", "sgd")
_TOLERANCE = 1e-3
"""Maximum difference of a gradient relative to its norm, as in the engines' self-check."""
_SCALE = 1e-6
"""Gradients below this fraction of the largest are rounding errors: the gradient of an attention
key's bias is exactly 0 in theory."""


@dataclass(frozen=True)
class File:
    """A file of the folder.

    Attributes:
        name: Its name.
        what: Its purpose.
        bytes: Its size.
    """

    name: str
    what: str
    bytes: int


@dataclass(frozen=True, repr=False)
class TrainingArtifacts:
    """Files for ORT's on-device training API.

    Attributes:
        path: Folder of the files.
        inputs: Names of a batch's tensors, in order.
        trained: Names of the trained parameters.
        off_by: Largest difference of a gradient from eager torch's, relative to its norm.
        notes: Remarks of the export.
    """

    path: Path
    inputs: tuple[str, ...]
    trained: tuple[str, ...]
    off_by: float
    notes: tuple[str, ...]

    @property
    def files(self) -> list[File]:
        """Files of the export with their purposes and sizes."""
        return [
            File(name, what, (self.path / name).stat().st_size)
            for name, what in _FILES.items()
            if (self.path / name).exists()
        ]

    def table(self) -> Table[File]:
        """Return a table of the files."""
        columns: list[Column[File]] = [
            Column("file", lambda each: each.name),
            Column("for", lambda each: each.what),
            Column("size", lambda each: size(each.bytes), number=True),
        ]
        notes = [
            f"{len(self.trained)} parameters are trained; inputs: {', '.join(self.inputs)}; "
            f"gradients within {self.off_by:.1e} of eager torch",
            *self.notes,
        ]
        return Table(self.files, columns, notes=notes)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_FILES = {
    artifacts.TRAINING: "a step's loss and gradients",
    artifacts.EVAL: "the loss without dropout",
    artifacts.OPTIMIZER: "the update of the weights",
    artifacts.CHECKPOINT: "the weights",
    "README.md": "how to train them",
}


class _Objective(nn.Module):
    """A model with its loss, which takes and returns tensors by name."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, batch: Batch) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.is_mapping = isinstance(batch, Mapping)
        self.training = model.training

    def forward(self, **named: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, and the scores if there are any.

        Args:
            **named: Tensors of a batch by name.
        """
        batch = dict(named) if self.is_mapping else list(named.values())
        found = forward(self.model, batch, self.loss)
        return {"loss": found.loss} | ({} if found.scores is None else {"scores": found.scores})


# Steps in a fixed order, each one call; parts of it would only pass its arguments on.
def export(
    module: nn.Module,
    target: Path,
    batch: Batch,
    trainable: str | Sequence[str],
    *,
    loss: LossFunction | None,
    optimizer: str,
    weight_decay: float,
) -> TrainingArtifacts:
    """Write the files of ORT's on-device training API; see `ortlab.export`.

    Args:
        module: The model.
        target: The folder.
        batch: Example batch with labels, on the CPU.
        trainable: Names of parameters, or patterns such as "classifier.*".
        loss: The loss; None for the model's own.
        optimizer: One of `OPTIMIZERS`.
        weight_decay: Weight decay of all trained parameters.

    Returns:
        The export.

    Raises:
        ValueError: If an argument is not valid.
        NotInGraph: If the training cannot be expressed as a graph.
        CheckFailed: If the loss or a gradient differs from eager torch's.
    """
    names = chosen(module, trainable)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r}: {unknown_name(optimizer, OPTIMIZERS)}")
    if not math.isfinite(weight_decay) or weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay!r} must be at least 0")
    if optimizer == "sgd" and weight_decay:
        raise ValueError("weight_decay has no effect with optimizer='sgd'; leave it out")
    objective = _Objective(module, loss, batch)
    named = _named(module, batch)
    frozen = [name for name, _ in module.named_parameters() if name not in names]
    with folder.filled(target) as made, undisturbed(module):
        call = ModelCall(objective, (), named)
        module.eval()
        with torch.no_grad():
            objective(**named)  # torch itself reports an error in the batch
        tell("determining which sizes may vary")
        found = axes.tried(call)
        module.train()
        fixed = _fix_statistics(module)
        with decisions.reads() as known:
            call(call.tensors)
        traced, found = trace(module, call, found, opset=artifacts.OPSET, known=frozenset(known))
        model = artifacts.with_shapes(traced.model)
        weights.put_in(model.graph, traced.weights)
        notes = [*found.notes, *fixed]
        off_by = _check(module, call, model, names, frozen, notes, traced.nodes)
        tell("writing the training graphs")
        _generate(
            model, made, names, frozen, traced.nodes, optimizer=optimizer, weight_decay=weight_decay
        )
        inputs = Device(made).names()
        notes.append(f"optimizer {optimizer}; set_learning_rate sets its learning rate")
        if weight_decay:
            notes.append(f"weight decay {weight_decay:g} applies to all trained parameters")
        result = TrainingArtifacts(made, tuple(inputs), tuple(names), off_by, tuple(notes))
        (made / "README.md").write_text(_readme(result, type(module).__name__, call))
        folder.describe(made, {"trained": names, "inputs": inputs, "off_by": off_by})
    return dataclasses.replace(result, path=target)


def chosen(module: nn.Module, trainable: str | Sequence[str]) -> list[str]:
    """Return the names of the parameters that match names or patterns, in the model's order.

    Args:
        module: The model.
        trainable: Names of parameters, or patterns such as "classifier.*".

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    known = [name for name, _ in module.named_parameters()]
    found = set()
    for pattern in patterns:
        fitting = fnmatch.filter(known, pattern)
        if not fitting:
            raise ValueError(f"trainable={pattern!r}: {unknown_name(pattern, known)}")
        found.update(fitting)
    if not found:
        raise ValueError("trainable is empty and names no parameter; give some, or '*' for all")
    return [name for name in known if name in found]


def _fix_statistics(module: nn.Module) -> list[str]:
    """Set BatchNorm to evaluation mode, because checkpoints of this API have no buffers."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = {name: part for name, part in module.named_modules() if isinstance(part, kinds)}
    for norm in norms.values():
        norm.eval()
    return [f"{', '.join(norms)}: BatchNorm keeps its running statistics"] if norms else []


def _named(module: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a batch's tensors by name: a tuple's by forward's parameters, the last as target."""
    if isinstance(batch, Mapping):
        return dict(batch)
    values = list(batch) if isinstance(batch, tuple | list) else [batch]
    names = signature_names(module)[: len(values) - 1]
    return dict(zip([*names, "target"] if len(values) > 1 else ["input"], values, strict=True))


def _generate(
    model: onnx.ModelProto,
    made: Path,
    trained: Sequence[str],
    frozen: Sequence[str],
    nodes: Sequence[Node],
    *,
    optimizer: str,
    weight_decay: float,
) -> None:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)  # artifacts.generate modifies it
    known = {each.name for each in copied.graph.initializer}
    if missing := [name for name in trained if name not in known]:
        raise ValueError(
            f"the loss does not depend on {', '.join(missing[:3])}; leave it out of trainable"
        )
    with _in_words():
        artifacts.generate(
            copied,
            made,
            trained=trained,
            frozen=[name for name in frozen if name in known],
            optimizer=optimizer,
            weight_decay=weight_decay,
            nodes=nodes,
        )


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except NotDifferentiable as error:
        raise NotInGraph(
            f"ORT cannot build a training graph: {error}; train with ortlab.finetune instead"
        ) from error


def _check(
    module: nn.Module,
    call: ModelCall,
    model: onnx.ModelProto,
    trained: Sequence[str],
    frozen: Sequence[str],
    notes: list[str],
    nodes: Sequence[Node],
) -> float:
    """Compare loss and gradients, without dropout, with torch; return the largest difference."""
    tell("comparing loss and gradients with eager torch")
    without = onnx.ModelProto()
    without.CopyFrom(model)
    dropout.switch_off(without.graph)
    batch = {name: tensor.numpy() for name, tensor in call.tensors.items()}
    with tempfile.TemporaryDirectory() as scratch:
        update: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0}
        _generate(without, Path(scratch), trained, frozen, nodes, **update)
        with _in_words():
            device = Device(Path(scratch), nodes)
        inputs = {name: batch[name] for name in device.names()}
        loss = device.loss(inputs)
        found = device.gradients(trained)
    expected, gradients = _eager(module, call, trained)
    if not math.isclose(loss, expected, rel_tol=1e-4, abs_tol=1e-6):
        raise CheckFailed(
            f"the loss of the training graph is {loss:g}, but eager torch's is {expected:g}"
        )
    largest = max((float(each.norm()) for each in gradients.values()), default=0.0)
    worst = 0.0
    for name, wanted in gradients.items():
        ours = torch.from_numpy(found[name].reshape(wanted.shape)).clone()
        padding = _padding(module, name)
        if padding is not None and not torch.allclose(ours[padding], wanted[padding]):
            ours[padding] = wanted[padding]
            notes.append(f"{name}: on-device training also updates the padding row; torch does not")
        off = float((ours - wanted).norm()) / max(float(wanted.norm()), _SCALE * largest, 1e-12)
        if not off <= _TOLERANCE:
            raise CheckFailed(
                f"the gradient of {name} is off by {off:.1e}, relative to eager torch's norm"
            )
        worst = max(worst, off)
    return worst


def _eager(
    module: nn.Module, call: ModelCall, trained: Sequence[str]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients in training mode without dropout."""
    parameters = dict(module.named_parameters())
    needed = [parameters[name] for name in trained]
    before = [(p, p.requires_grad) for p in needed]
    with NoDropout(), torch.enable_grad():
        for parameter in needed:
            parameter.requires_grad_(True)
        loss = call.results(list(call.tensors.values()))[0]
        found = torch.autograd.grad(loss, needed, allow_unused=True)
    for parameter, required in before:
        parameter.requires_grad_(required)
    return float(loss.detach()), {
        name: torch.zeros_like(p) if each is None else each
        for name, p, each in zip(trained, needed, found, strict=True)
    }


def _padding(module: nn.Module, name: str) -> int | None:
    """Return the row of a weight that torch does not train as an embedding; None if there is none.

    The weight may be another layer's, too, whose gradient has that row.
    """
    weight = module.get_parameter(name)
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding))
    return next((part.padding_idx for part in embeddings if part.weight is weight), None)


def _readme(made: TrainingArtifacts, model: str, call: ModelCall) -> str:
    values = {name: call.tensors[name] for name in made.inputs}
    batch = "\n".join(
        f"batch[{name!r}] = np.{'full' if tensor.is_floating_point() else 'ones'}"
        f"({list(tensor.shape)!r}, {_fill(tensor)}dtype=np.{tensor.numpy().dtype.name})"
        for name, tensor in values.items()
    )
    rows = "\n".join(f"| {each.name} | {each.what} |" for each in made.files)
    notes = "\n".join(f"- {escaped(note)}" for note in made.notes)
    return f"""# {escaped(model)} for on-device training

Files for ONNX Runtime's on-device training (onnxruntime-training 1.19). The gradients of the
{len(made.trained)} trained parameters are within {made.off_by:.1e} of eager torch's.

| file | for |
| --- | --- |
{rows}

{notes}

```python
import numpy as np
from onnxruntime.training.api import CheckpointState, Module, Optimizer

batch = {{}}  # placeholder values
{batch}
state = CheckpointState.load_checkpoint("{artifacts.CHECKPOINT}")
module = Module("{artifacts.TRAINING}", state, "{artifacts.EVAL}")
optimizer = Optimizer("{artifacts.OPTIMIZER}", module)
optimizer.set_learning_rate(1e-3)
for step in range(3):
    module.train()
    loss, *_ = module(*(batch[name] for name in module.input_names()))
    optimizer.step()
    module.lazy_reset_grad()
    print(float(loss))
CheckpointState.save_checkpoint(state, "trained", include_optimizer_state=True)
```
"""


def _fill(tensor: torch.Tensor) -> str:
    return "0.5, " if tensor.is_floating_point() else ""
