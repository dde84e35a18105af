"""How long each tensor of a training step is there.

From the node that computes it to the last one that reads it, in the order in which ORT's session
runs them; views share the storage that they look at. That is how ORT's planner allocates in
training, where it reuses no buffers (onnxruntime/core/framework/allocation_planner.cc).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ortlab.graph.capture import Node, Stage

KINDS: Final = ("parameter", "optimizer state", "batch", "activation", "gradient", "workspace")
"""What tensors are for. Workspace is what a kernel takes for itself while it runs."""
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
HOLD_SIZES = frozenset({"Shape", "Size", "com.microsoft.ConcatTraining"})
"""Operators whose last output is sizes."""
_YIELD = "com.microsoft.YieldOp"
_WORKSPACE: Final[Mapping[str, tuple[int, str, int]]] = {
    "com.microsoft.LayerNormalizationGrad": (4, "input", 1),
    "com.microsoft.SimplifiedLayerNormalizationGrad": (4, "input", 1),
    "com.microsoft.BiasGelu": (1, "output", 0),
    "com.microsoft.BiasGeluGrad_dX": (1, "output", 0),
    "org.pytorch.aten.ortlab_kernels.attention": (1, "output", 1),
    "org.pytorch.aten.ortlab_kernels.attention_backward": (1, "input", 5),
}
"""How many times which input or output of its own a CPU kernel allocates beside its results.

As measured of ORT 1.19.2, see tests/bench/memory.py; other kernels of the models there take none.
"""
STATE: Final = {"adamw": 2, "sgd": 1, "lamb": 2}
"""Copies of a trained parameter that an optimizer of `ortlab.settings` keeps."""
SCOPE = re.compile(r"^(/_original_module/(.*/)?|_original_module\.)")


@dataclass(frozen=True)
class Tensor:
    """Storage that a step allocates, under the name of the tensor that it was allocated for.

    It is there while nodes ``born`` to ``dies`` run; the node after the last is the optimizer's
    step. ``size_of`` is the tensor whose shape it has, which is another one for a workspace and
    where the graph does not tell its own; ``times`` is how often that is taken.
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
        """Its name without its scope, which the module tells."""
        name = SCOPE.sub("", self.name)
        return name.removeprefix(f"{self.module}.")


def lifetimes(stage: Stage, optimizer: str) -> Iterator[Tensor]:
    """All storage of a step of the graph `stage`, with the state of the `optimizer`."""
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
        # torch makes the gradients that ORT's yield gives when backward begins.
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
    """For each view, the tensor whose storage it looks at.

    What goes first to the yield, and with it to torch, is a copy.
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
    """The last node that reads each tensor or a view of it.

    What the graph gives and what forward gave its caller is there until the step ends.
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
    """The tensor that tells its size: a view, what it is a gradient of or computed once more."""
    likes = (name, *views, name.removesuffix("_grad"), name.removesuffix("_recompute"))
    return next((like for like in likes if like in stage.tensors), name)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
