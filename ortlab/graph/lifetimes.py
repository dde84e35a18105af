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

import onnx

from ortlab.engines.ort.onnx_model import TANGENTS
from ortlab.graph.capture import Node, Sessions, Stage

KINDS: Final = ("parameter", "optimizer state", "batch", "activation", "gradient", "workspace")
"""Kinds of tensors. A workspace is memory that a kernel allocates for itself while it runs."""
HOLD_SIZES = frozenset({"Shape", "Size", "com.microsoft.ConcatTraining"})
"""Operators whose last output holds sizes."""
_YIELD = "com.microsoft.YieldOp"
_WORKSPACE: Final[Mapping[str, tuple[tuple[int, str, int], ...]]] = {
    "Where": ((2, "output", 0),),
    "com.microsoft.LayerNormalizationGrad": ((4, "input", 1),),
    "com.microsoft.SimplifiedLayerNormalizationGrad": ((4, "input", 1),),
    "com.microsoft.BiasGelu": ((1, "output", 0),),
    "com.microsoft.BiasGeluGrad_dX": ((1, "output", 0),),
    "org.pytorch.aten.ortlab_kernels.attention": ((1, "output", 1),),
    "org.pytorch.aten.ortlab_kernels.attention_backward": ((1, "input", 5),),
    "torch.convolution": ((1, "output", 0),),
    "torch.convolution_backward": ((1, "input", 0), (1, "input", 1)),
}
"""Workspaces of each CPU kernel: how many times the size of which of its inputs or outputs.

Measured with ORT 1.19.2, see tests/bench/memory.py; that of Where with 1.32 as well, and those of
convolutions, which oneDNN computes in a layout of its own, with torch 2.13 and large batches. The
other kernels of the models measured there allocate no workspace.
"""
_IN_PLACE: Final = frozenset(
    {
        "Cast",
        "Clip",
        "Elu",
        "HardSigmoid",
        "LeakyRelu",
        "LogSoftmax",
        "Relu",
        "Selu",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "Softsign",
        "Tanh",
        "ThresholdedRelu",
    }
)
"""Operators whose CPU kernels can write to the memory of their input, measured with 1.32."""
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
    storage = _storage(stage)
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
        if value.name.startswith(TANGENTS):
            born = stage.backward
            dies = last.get(value.name, born)
            yield Tensor(value.name, "gradient", "", "", born, dies, value.name)
        elif value.name not in held:
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
        for times, side, place in _WORKSPACE.get(node.op, ()):
            like = (node.inputs if side == "input" else node.outputs)[place]
            size_of = _sized_like(stage, like, views[like])
            yield Tensor(node.name, "workspace", node.module, node.name, at, at, size_of, times)


def _is_activation(node: Node) -> bool:
    return (node.phase == "forward" and node.op != _YIELD) or node.name.endswith("_recompute")


def _storage(stage: Stage) -> dict[str, str]:
    """Return the tensor whose storage each view shares, and each result that takes over a buffer.

    A view that leaves its session is a copy, as one that the yield node reads first.
    """
    readers: dict[str, list[int]] = defaultdict(list)
    for at, node in enumerate(stage.nodes):
        for name in node.inputs:
            readers[name].append(at)
    if stage.sessions is not None:
        return _Buffers(stage, stage.sessions, readers).storage
    found: dict[str, str] = {}
    for node in stage.nodes:
        name = node.outputs[0] if node.outputs else ""
        to_torch = bool(readers[name]) and stage.nodes[readers[name][0]].op == _YIELD
        if stage.is_view(node) and not to_torch:
            found[name] = found.get(node.inputs[0], node.inputs[0])
    return found


class _Buffers:
    """Buffers that the sessions of a stage plan to use again, as onnxruntime 1.32 does.

    A result takes over the buffer of an input that is not read any more, if its kernel can work in
    place, or that of any earlier tensor of the same size (onnxruntime/core/framework/
    allocation_planner.cc). A buffer is not freed until the last tensor in it is not read any more.
    """

    def __init__(
        self, stage: Stage, sessions: Sessions, readers: Mapping[str, Sequence[int]]
    ) -> None:
        self.storage: dict[str, str] = {}
        self._stage, self._sessions, self._readers = stage, sessions, readers
        self._given = {value.name for value in stage.model.graph.output}
        self._left: dict[str, int] = {}  # reads of a buffer that are to come, in its session
        self._free: list[str] = []
        for at, node in enumerate(stage.nodes):
            if at and sessions.ends[at] != sessions.ends[at - 1]:
                self._left.clear()
                self._free.clear()
            self._add(at, node)

    def _add(self, at: int, node: Node) -> None:
        for name in filter(None, node.outputs):
            in_torch = self._sessions.ends[at] is None
            if not in_torch and self._leaves(at, name):
                continue
            if node.inputs and self._stage.is_view(node):
                self._share(name, self._root(node.inputs[0]))
            elif not in_torch:
                self._share(name, self._taken_over(node, name))
        for name in node.inputs:
            self._read(self._root(name))
        for name in node.outputs:
            self._read(self._root(name), times=0)

    def _leaves(self, at: int, name: str) -> bool:
        """Return True if torch or another session reads a session's result."""
        ends = self._sessions.ends
        return name in self._given or any(ends[each] != ends[at] for each in self._readers[name])

    def _root(self, name: str) -> str:
        return self.storage.get(name, name)

    def _share(self, name: str, buffer: str) -> None:
        if buffer != name:
            self.storage[name] = buffer
        if buffer == name or buffer in self._left:
            self._left[buffer] = self._left.get(buffer, 0) + len(self._readers[name])

    def _taken_over(self, node: Node, name: str) -> str:
        """Return the buffer that a result is written to, which may be its own."""
        if node.op in _IN_PLACE and node.outputs[0] == name:
            buffer = self._root(node.inputs[0])
            reads = sum(self._root(each) == buffer for each in node.inputs)
            same = self._size(buffer) is not None and self._size(buffer) == self._size(name)
            if same and self._left.get(buffer) == reads:
                return buffer
        size = self._size(name)
        for buffer in self._free:
            if size is not None and self._size(buffer) == size:
                self._free.remove(buffer)
                return buffer
        return name

    def _read(self, buffer: str, times: int = 1) -> None:
        if buffer in self._left:
            self._left[buffer] -= times
            if not self._left[buffer] and buffer not in self._free:
                self._free.insert(0, buffer)

    def _size(self, name: str) -> tuple[int | str, ...] | None:
        """Return the size of an element and the shape of a tensor; None if ORT does not know it."""
        kind, sizes = self._stage.tensors.get(name, (0, ("",)))
        if not all(isinstance(size, int) for size in sizes):
            kind, sizes = self._sessions.shapes.get(name, (0, ()))
        return (onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize, *sizes) if kind else None


def _last_uses(stage: Stage, storage: Mapping[str, str], end: int) -> dict[str, int]:
    """Return the last node that reads each tensor or a view of it.

    Graph outputs and outputs passed to the caller of forward live until the step ends. What a
    session is given lives at least until it ends.
    """
    found: dict[str, int] = {}
    makers: dict[str, int] = {}
    for at, node in enumerate(stage.nodes):
        makers |= dict.fromkeys(node.outputs, at)
        for name in node.inputs:
            stored = storage.get(name, name)
            last = end if node.op == _YIELD else at
            if stage.sessions is not None:
                reads, made = (_end_of(stage.sessions, each) for each in (at, makers.get(stored)))
                last = at if reads is None or reads == made else reads
            found[stored] = max(last, found.get(stored, 0))
    for value in stage.model.graph.output:
        found[storage.get(value.name, value.name)] = end
    return found


def _end_of(sessions: Sessions, at: int | None) -> int | None:
    """Return the last node of the session of a node; None if there is none."""
    return None if at is None else sessions.ends[at]


def _sized_like(stage: Stage, name: str, views: Sequence[str]) -> str:
    """Return a tensor of the same size: a view, or the source of a gradient or recomputed copy."""
    likes = (name, *views, name.removesuffix("_grad"), name.removesuffix("_recompute"))
    return next((like for like in likes if like in stage.tensors), name)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
