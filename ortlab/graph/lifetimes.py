"""Lifetime of each tensor of a training step.

A tensor lives from the node that computes it to the last node that reads it, in the order in which
ORT's session runs the nodes. Views share the storage of the tensor they view. ORT's planner
allocates this way in training, where it reuses no buffers
(onnxruntime/core/framework/allocation_planner.cc).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.graph.capture import Node, Stage

KINDS: Final = ("parameter", "optimizer state", "batch", "activation", "gradient", "workspace")
"""Kinds of tensors. A workspace is memory that a kernel allocates for itself while it runs."""
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
HOLD_SIZES = frozenset({"Shape", "Size", "com.microsoft.ConcatTraining"})
"""Operators whose last output holds sizes."""
_YIELD = "com.microsoft.YieldOp"
_WORKSPACE: Final[Mapping[str, tuple[int, str, int]]] = {
    "com.microsoft.LayerNormalizationGrad": (4, "input", 1),
    "com.microsoft.SimplifiedLayerNormalizationGrad": (4, "input", 1),
    "com.microsoft.BiasGelu": (1, "output", 0),
    "com.microsoft.BiasGeluGrad_dX": (1, "output", 0),
    "org.pytorch.aten.ortlab_kernels.attention": (1, "output", 1),
    "org.pytorch.aten.ortlab_kernels.attention_backward": (1, "input", 5),
}
"""Workspace of each CPU kernel: how many times the size of which of its inputs or outputs.

Measured with ORT 1.19.2, see tests/bench/memory.py. The other kernels of the models measured there
allocate no workspace.
"""
STATE: Final = {"adamw": 2, "sgd": 1, "lamb": 2}
"""Copies of a trained parameter that each optimizer of `ortlab.settings` stores as its state."""
SCOPE = re.compile(r"^(/_original_module/(.*/)?|_original_module\.)")


@dataclass(frozen=True)
class Tensor:
    """Storage that a step allocates, named after the tensor that it was allocated for.

    Attributes:
        name: Name of the tensor.
        kind: One of `KINDS`.
        module: Path of the module that the tensor belongs to.
        node: Name of the node that computes it, empty if there is none.
        born: Index of the first node during which it is in memory.
        dies: Index of the last node during which it is in memory. The index after the last node
            stands for the optimizer's step.
        size_of: Tensor whose shape it has. It differs from `name` for a workspace, and where the
            graph does not record the tensor's own shape.
        times: How often that size is allocated.
    """

    name: str
    kind: str
    module: str
    node: str
    born: int
    dies: int
    size_of: str
    times: int = 1

    @property
    def label(self) -> str:
        """Name without its scope, which the module already shows."""
        name = SCOPE.sub("", self.name)
        return name.removeprefix(f"{self.module}.")


def lifetimes(stage: Stage, optimizer: str) -> Iterator[Tensor]:
    """Yield all storage of a training step.

    Args:
        stage: Graph of the step.
        optimizer: Name of the optimizer, a key of `STATE`.
    """
    nodes = stage.nodes
    end = len(nodes)
    storage = _storage(nodes)
    last = _last_uses(stage, storage, end)
    views: dict[str, list[str]] = defaultdict(list)
    for view, looked_at in storage.items():
        views[looked_at].append(view)
    for name, tensor in stage.parameters.items():
        yield Tensor(name, "parameter", _owner(name), "", 0, end, tensor)
        if name in stage.parameter_gradients and STATE[optimizer]:
            copies = STATE[optimizer]
            yield Tensor(name, "optimizer state", _owner(name), "", 0, end, tensor, copies)
    held = set(stage.parameters.values())
    for value in stage.model.graph.input:
        if value.name not in held:
            yield Tensor(value.name, "batch", "", "", 0, end, value.name)
    for at, node in enumerate(nodes):
        # Torch creates the gradients that ORT's yield node returns when backward begins.
        born = at + 1 if node.op == _YIELD else at
        for name in node.outputs:
            if name and name not in storage:
                dies = max(last.get(name, born), born)
                kind = "activation" if _is_activation(node) else "gradient"
                size_of = _sized_like(stage, name, views[name])
                yield Tensor(name, kind, node.module, node.name, born, dies, size_of)
        if node.op in _WORKSPACE:
            times, side, place = _WORKSPACE[node.op]
            like = (node.inputs if side == "input" else node.outputs)[place]
            size_of = _sized_like(stage, like, views[like])
            yield Tensor(node.name, "workspace", node.module, node.name, at, at, size_of, times)


def _is_activation(node: Node) -> bool:
    return (node.phase == "forward" and node.op != _YIELD) or node.name.endswith("_recompute")


def _storage(nodes: Sequence[Node]) -> dict[str, str]:
    """Return the tensor whose storage each view shares.

    A view that is read first by the yield node, and so passed to torch, is a copy.
    """
    readers: dict[str, str] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, node.op)
    found: dict[str, str] = {}
    for node in nodes:
        if node.op in _VIEWS and readers.get(node.outputs[0]) != _YIELD:
            found[node.outputs[0]] = found.get(node.inputs[0], node.inputs[0])
    return found


def _last_uses(stage: Stage, storage: Mapping[str, str], end: int) -> dict[str, int]:
    """Return the last node that reads each tensor or a view of it.

    Graph outputs and outputs passed to the caller of forward live until the step ends.
    """
    found: dict[str, int] = {}
    for at, node in enumerate(stage.nodes):
        for name in node.inputs:
            found[storage.get(name, name)] = (
                end if node.op == _YIELD else max(at, found.get(storage.get(name, name), 0))
            )
    for value in stage.model.graph.output:
        found[storage.get(value.name, value.name)] = end
    return found


def _sized_like(stage: Stage, name: str, views: Sequence[str]) -> str:
    """Return a tensor of the same size: a view, or the source of a gradient or recomputed copy."""
    likes = (name, *views, name.removesuffix("_grad"), name.removesuffix("_recompute"))
    return next((like for like in likes if like in stage.tensors), name)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
